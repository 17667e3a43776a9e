"""The cluster edge: watches TrainingJobs, decides by pure functions, applies; kopf and its client live here."""
