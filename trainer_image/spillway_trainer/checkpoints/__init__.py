"""Checkpoints: written durably, verified, resumed from."""
