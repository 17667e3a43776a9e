"""`spillway report`: writes a run's report as one HTML page."""
