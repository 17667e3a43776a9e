"""`spillway report`: a run as one HTML page."""
