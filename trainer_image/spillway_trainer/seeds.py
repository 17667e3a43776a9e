"""Derives many seeds from one, the same in every process."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MASK = 2**64 - 1


def splitmix64(state: int) -> int:
    """One output of splitmix64 (Steele, Lea, Flood 2014)."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def fork_seed(seed: int, step: int, micro_batch: int, segment: int) -> int:
    """Returns a 63-bit seed for one forward of one segment."""
    state = 0
    for value in (seed, step, micro_batch, segment):
        state = splitmix64(state ^ (value & _MASK))
    return state >> 1


def splitmix64_array(states: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64 of each element."""
    states = states + np.uint64(0x9E3779B97F4A7C15)
    states = (states ^ (states >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    states = (states ^ (states >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return states ^ (states >> np.uint64(31))
