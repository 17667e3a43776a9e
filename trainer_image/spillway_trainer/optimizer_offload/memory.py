"""State blocks: one chunk's states back to back, [master |] moments, each in a row of whole cache lines (NVMe: pages).

So one copy moves them all. With float32 compute a chunk that the device updates has no master in its block: the
parameter itself is the master and never leaves the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..optimizer import MOMENT_DTYPES, Hyperparameters
from ..reference import kept_elements
from ..tiers.arena import ALIGNMENT_BYTES, padded

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the states of one chunk lie in their block (uint8)."""

    size: int
    """values of each state"""
    dtypes: tuple[torch.dtype, ...]
    """one a row: the master's, where the block has one, then those of the moments"""
    unit_bytes: int = ALIGNMENT_BYTES
    """every row is a multiple of it"""

    @property
    def nbytes(self) -> int:
        return self.begin(len(self.dtypes))

    @property
    def update_bytes(self) -> int:
        """What an update reads and writes of them, padding apart."""
        return 2 * sum(map(self._row_bytes, self.dtypes))

    def begin(self, index: int) -> int:
        """Bytes before that row."""
        rows = map(self._row_bytes, self.dtypes[:index])
        return sum(-(-row // self.unit_bytes) * self.unit_bytes for row in rows)

    def _row_bytes(self, dtype: torch.dtype) -> int:
        return kept_elements(self.size, dtype) * dtype.itemsize

    def row(self, block: Tensor, index: int) -> Tensor:
        """All bytes of that row."""
        return block[self.begin(index) : self.begin(index + 1)]

    def views(self, block: Tensor) -> tuple[Tensor, ...]:
        """The values of every row."""
        return tuple(
            self.row(block, index)[: self._row_bytes(dtype)].view(dtype) for index, dtype in enumerate(self.dtypes)
        )


def rows_of(size: int, settings: Hyperparameters, *, has_master: bool, unit_bytes: int = ALIGNMENT_BYTES) -> Rows:
    """Of a chunk of `size` parameters."""
    moments = [MOMENT_DTYPES[settings.moments] for _ in settings.rule.moments]
    return Rows(size, (*([torch.float32] if has_master else []), *moments), unit_bytes)


def accumulator_bytes(size: int) -> int:
    return padded(FLOAT32_BYTES * size)
