"""Reads run directories: events, attempts, plan against reality."""
