"""State blocks: one chunk's float32 states back to back, [master |] moments, each padded to 64 bytes.

So one copy moves them all. With float32 compute a chunk that the device updates has no master in its block: the
parameter itself is the master and never leaves the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..optimizer import States
from ..tiers.arena import padded

FLOAT32_BYTES = 4


def states_bytes(size: int, has_master: bool, num_moments: int) -> int:
    """Bytes of the state block of `size` parameters."""
    return row_bytes(size) * (num_moments + has_master)


def accumulator_bytes(size: int) -> int:
    return padded(FLOAT32_BYTES * size)


def row_bytes(size: int) -> int:
    """Of one state in memory."""
    return padded(FLOAT32_BYTES * size)


def view_states(block: Tensor, size: int, row_bytes: int, parameter: Tensor | None) -> States:
    """`block` (uint8, rows of `row_bytes`) as states of `size` parameters; `parameter` (flat float32) is the master
    when it is given."""
    rows = tuple(
        block[start : start + FLOAT32_BYTES * size].view(torch.float32) for start in range(0, block.numel(), row_bytes)
    )
    return States(rows[0], rows[1:]) if parameter is None else States(parameter, rows)
