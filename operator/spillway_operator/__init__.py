"""The operator: watches TrainingJobs, decides with pure functions, writes; kopf and its client live here."""
