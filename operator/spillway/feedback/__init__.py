"""Turns measurements into corrected predictions, and into the plan of the next attempt."""
