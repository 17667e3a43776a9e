"""A run's reports: run.jsonl, /metrics, progress to the operator."""
