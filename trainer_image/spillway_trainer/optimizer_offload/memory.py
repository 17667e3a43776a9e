"""State blocks: one chunk's states back to back, [master |] moments, each in a row of whole cache lines (NVMe: pages).

One copy therefore moves them all. With float32 compute a chunk that the device updates has no master in its block: the
parameter itself is the master and never leaves the device. With bfloat16 compute the block of a streamed chunk has only
that part of the master that the weight on the device lacks (master_halves.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.master_halves import rest_bytes
from ..kernels.reference import kept_elements
from ..optimizer.plain import FLOAT32_BYTES, MOMENT_DTYPES, Hyperparameters
from ..tiers.arena import TORCH_ALIGNMENT_BYTES, padded


@dataclass(frozen=True, slots=True)
class StateRows:
    """Where the states of one chunk lie in their block (uint8)."""

    row_bytes: tuple[int, ...]
    """Bytes of each state, without padding."""
    dtypes: tuple[torch.dtype, ...]
    """One per row: the master's, if the block has one (uint8 if it is only the rest), then those of the moments."""
    unit_bytes: int = TORCH_ALIGNMENT_BYTES
    """The size of every row is a multiple of it."""
    is_split: bool = False
    """Whether the first row is the rest of a master, not a whole one."""

    @property
    def nbytes(self) -> int:
        return self.begin(len(self.dtypes))

    @property
    def update_bytes(self) -> int:
        """Bytes of the states that an update reads and writes, without padding."""
        return 2 * sum(self.row_bytes)

    def begin(self, index: int) -> int:
        """Offset of that row in the block, in bytes."""
        return sum(-(-row // self.unit_bytes) * self.unit_bytes for row in self.row_bytes[:index])

    def row(self, block: Tensor, index: int) -> Tensor:
        """All bytes of that row."""
        return block[self.begin(index) : self.begin(index + 1)]

    def views(self, block: Tensor) -> tuple[Tensor, ...]:
        """The values of every row."""
        return tuple(
            self.row(block, index)[:nbytes].view(dtype)
            for index, (nbytes, dtype) in enumerate(zip(self.row_bytes, self.dtypes, strict=True))
        )


def rows_of(
    size: int,
    settings: Hyperparameters,
    *,
    has_master: bool,
    is_split: bool = False,
    unit_bytes: int = TORCH_ALIGNMENT_BYTES,
) -> StateRows:
    """The rows of a chunk of `size` parameters."""
    moment = MOMENT_DTYPES[settings.moments]
    rows = [(kept_elements(size, moment) * moment.itemsize, moment) for _ in settings.rule.moments]
    if has_master:
        rows.insert(0, (rest_bytes(size), torch.uint8) if is_split else (FLOAT32_BYTES * size, torch.float32))
    return StateRows(tuple(nbytes for nbytes, _ in rows), tuple(dtype for _, dtype in rows), unit_bytes, is_split)


def accumulator_bytes(size: int) -> int:
    return padded(FLOAT32_BYTES * size)
