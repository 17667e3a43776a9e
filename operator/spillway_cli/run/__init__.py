"""`spillway run`: plan, train, restart, replan."""
