"""The API server: watches, lists, the work queue, writes, the lease."""
