"""What a run directory holds, read back: events, attempts, plan against reality."""
