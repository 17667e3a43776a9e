"""Technique `optimizer_offload`: optimizer states in host memory, their update split between CPU and device."""

from .offload import OptimizerOffload

__all__ = ["OptimizerOffload"]
