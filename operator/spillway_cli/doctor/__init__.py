"""`spillway doctor`: diagnoses this machine and cluster."""
