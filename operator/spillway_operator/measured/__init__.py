"""Measurements of nodes and pods: live memory, profiles, reservations."""
