"""Process 1 of a trainer pod: starts the ranks of a node and reports how they ended. No torch."""
