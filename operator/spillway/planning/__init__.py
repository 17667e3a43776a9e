"""From a job and a node to a MemoryPlan, or to what would make the job fit. Arithmetic only."""
