"""A job and the cluster -> the nodes that run it, with the plan for them."""
