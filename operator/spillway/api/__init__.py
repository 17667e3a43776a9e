"""What users write and read: TrainingJob, profiles, status, their CRDs, and the errors of a manifest."""
