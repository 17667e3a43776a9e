"""`spillway submit`, `status` and `logs`: TrainingJobs in a cluster."""
