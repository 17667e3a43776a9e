"""Several models that take turns in one process."""
