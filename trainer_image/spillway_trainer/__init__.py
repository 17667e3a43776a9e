"""The device edge: executes a MemoryPlan. torch lives in this package only (and not in this file)."""
