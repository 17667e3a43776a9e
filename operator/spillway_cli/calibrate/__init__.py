"""`spillway calibrate`: measures this machine or a node of a cluster."""
