"""`spillway top`: a live view of a run or of a cluster's jobs."""
