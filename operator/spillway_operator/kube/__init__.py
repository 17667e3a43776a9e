"""Access to the API server: watches, lists, the work queue, writes, the Lease."""
