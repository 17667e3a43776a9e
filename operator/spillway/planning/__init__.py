"""A job and a node -> a MemoryPlan, or what would make it fit. Arithmetic only."""
