"""Sweeps, jobs that train several models: their members, the search that makes members, and successive halving."""
