"""Parking: moves the states of paused members to NVMe and back.

A parked member is a run of blocks of a spill file: its tensors one after the other, in the order in which its optimizer
gave them, cut into pieces of a buffer. It is scratch like all that is spilled: checksummed, preallocated, and gone with
the process, however that ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from spillway.api.job_file import JobFile
from spillway.plan import SLAB_EXTRA_BYTES, SLAB_SLACK, MemoryPlan
from spillway.planning.sweep_plan import PARKING_BUFFER_BYTES

from ..checkpoints.tensors import bytes_of
from ..tiers.encrypted_file import encrypted
from ..tiers.extents import round_up
from ..tiers.host_slab import HostSlab
from ..tiers.nvme_slab import NvmeExtent, NvmeSlab, OpenFile, Stored
from ..tiers.spill_file import SpillFile


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a parked member."""

    name: str
    dtype: torch.dtype
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * self.shape.numel()


@dataclass(frozen=True, slots=True)
class ParkedPiece:
    extent: NvmeExtent
    stored: Stored
    nbytes: int
    """Without the padding of its last block."""


@dataclass(frozen=True, slots=True)
class Parked:
    """Where a member's tensors are."""

    label: str
    entries: tuple[Entry, ...]
    pieces: tuple[ParkedPiece, ...]


class Parking:
    """The place of all parked members of a sweep. Opened by the first that parks."""

    def __init__(self, job: JobFile, plan: MemoryPlan) -> None:
        self._directories = [Path(directory) for directory in job.spill_directories]
        self._nbytes = sum(one.parked_bytes for one in plan.members)
        self._num_io_threads = plan.activations.num_io_threads
        open_file: OpenFile = partial(SpillFile, listed=job.spill_is_listed)
        self._open_file = open_file if job.spec.spill.encryption == "None" else encrypted(open_file)
        self._slab: NvmeSlab | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def park(self, tensors: Iterable[tuple[str, Tensor]], label: str) -> Parked:
        """Write all. Raises SpillIOError or SpillVolumeFull; then nothing of it stays."""
        slab, entries, pieces, used = self._opened(), list[Entry](), list[ParkedPiece](), 0
        try:
            for name, tensor in tensors:
                entries.append(Entry(name, tensor.dtype, tensor.shape))
                rest = torch.frombuffer(bytes_of(tensor), dtype=torch.uint8) if tensor.nbytes else self._buffer[:0]
                while rest.numel():
                    fitting = min(rest.numel(), self._buffer.numel() - used)
                    self._buffer[used : used + fitting].copy_(rest[:fitting])
                    used, rest = used + fitting, rest[fitting:]
                    if used == self._buffer.numel():
                        pieces.append(self._written(slab, used, label))
                        used = 0
            if used:
                pieces.append(self._written(slab, used, label))
        except BaseException:
            drop(pieces)
            raise
        return Parked(label, tuple(entries), tuple(pieces))

    def tensors(self, parked: Parked) -> Iterator[tuple[str, Tensor]]:
        """As they were given to `park`. Raises SpillIOError for bytes that are not what was written."""
        slab, pieces, start, end = self._opened(), iter(parked.pieces), 0, 0
        for entry in parked.entries:
            found = torch.empty(entry.nbytes, dtype=torch.uint8)
            filled = 0
            while filled < entry.nbytes:
                if start == end:
                    piece = next(pieces)
                    whole = self._buffer[: round_up(piece.nbytes)]
                    slab.read_batch([(piece.stored, whole, parked.label)])
                    start, end = 0, piece.nbytes
                fitting = min(entry.nbytes - filled, end - start)
                found[filled : filled + fitting].copy_(self._buffer[start : start + fitting])
                filled, start = filled + fitting, start + fitting
            yield entry.name, found.view(entry.dtype).view(entry.shape)

    def leave(self, parked: Parked) -> None:
        """Its room is free again."""
        drop(parked.pieces)

    @property
    def held_bytes(self) -> int:
        return 0 if self._slab is None else self._slab.held_bytes

    def take_peak_bytes(self) -> int:
        """The most that was held since the last call."""
        if self._slab is None:
            return 0
        peak = self._slab.peak_bytes
        self._slab.reset_peak()
        return peak

    def close(self) -> None:
        """Idempotent."""
        if self._slab is not None:
            self._slab.close()
            self._slab = None

    def _written(self, slab: NvmeSlab, nbytes: int, label: str) -> ParkedPiece:
        whole = self._buffer[: round_up(nbytes)]
        whole[nbytes:].zero_()
        extent = slab.allocate(nbytes, label)
        try:
            (stored,) = slab.write_batch([(extent.at(0), whole, label)])
        except BaseException:
            extent.drop()
            raise
        return ParkedPiece(extent, stored, nbytes)

    def _opened(self) -> NvmeSlab:
        if self._slab is None:
            nbytes = int(self._nbytes * SLAB_SLACK) + SLAB_EXTRA_BYTES
            self._slab = NvmeSlab(self._directories, nbytes, self._num_io_threads, open_file=self._open_file)
            host = HostSlab(PARKING_BUFFER_BYTES)
            self._buffer = host.allocate(PARKING_BUFFER_BYTES, "parking")
        return self._slab


def drop(pieces: Iterable[ParkedPiece]) -> None:
    for piece in pieces:
        piece.extent.drop()
