"""State blocks: one chunk's float32 states back to back, [master |] exp_avg | exp_avg_sq, each padded to 64 bytes.

So one copy moves them all. With float32 compute a chunk that the device updates has no master in its block: the
parameter itself is the master and never leaves the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..tiers.arena import padded

FLOAT32_BYTES = 4


def states_bytes(size: int, has_master: bool) -> int:
    """Bytes of the state block of `size` parameters."""
    return padded(FLOAT32_BYTES * size) * (3 if has_master else 2)


def accumulator_bytes(size: int) -> int:
    return padded(FLOAT32_BYTES * size)


@dataclass(frozen=True, slots=True)
class States:
    """Views of one state block, flat float32. `master` is the parameter's own memory where the block has none."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


def view_states(block: Tensor, size: int, parameter: Tensor | None) -> States:
    """`block` (uint8) as states of `size` parameters; `parameter` (flat float32) is the master when it is given."""
    stride = padded(FLOAT32_BYTES * size)
    rows = [
        block[start : start + FLOAT32_BYTES * size].view(torch.float32)
        for start in range(0, states_bytes(size, parameter is None), stride)
    ]
    return States(*rows) if parameter is None else States(parameter, *rows)
