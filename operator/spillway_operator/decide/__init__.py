"""Decisions about one TrainingJob. Pure: what was observed in, what to write out."""
