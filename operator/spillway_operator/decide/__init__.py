"""Decisions about one TrainingJob: pure functions from what was observed to what to write."""
