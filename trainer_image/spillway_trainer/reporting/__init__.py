"""What a run says while it goes on: run.jsonl, /metrics, progress to the operator."""
