"""Parking: moves the states of paused members to NVMe and back.

Each member has a region of a spill file, with its tensors one after the other, in the order in which its optimizer gave
them, cut into pieces of a buffer. Like everything that is spilled it is scratch: checksummed, preallocated, and gone
with the process, however that ends. All processes of a sweep on several devices share the file and have the same
regions: whichever has a member's next turn reads what another one parked.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from spillway.api.job_file import JobFile
from spillway.errors import SpillVolumeFull
from spillway.plan import SLAB_EXTRA_BYTES, SLAB_SLACK, MemoryPlan
from spillway.planning.sweep_plan import PARKING_BUFFER_BYTES
from spillway.units import format_bytes

from ..checkpoints.tensors import bytes_of
from ..tiers.encrypted_file import encrypted
from ..tiers.extents import round_up
from ..tiers.host_slab import HostSlab
from ..tiers.nvme_slab import Kept, NvmeExtent, NvmeSlab, OpenFile, StoredPiece, file_bytes
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


class StoredAt(NamedTuple):
    """A StoredPiece in a form that other processes can use."""

    device: int
    offset: int
    nbytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class ParkedPiece:
    stored: tuple[StoredAt, ...]
    nbytes: int
    """Bytes of the tensors, without the padding of the last block."""


@dataclass(frozen=True, slots=True)
class Parked:
    """Where a member's tensors are. Valid in every process that shares the file."""

    member: str
    entries: tuple[Entry, ...]
    pieces: tuple[ParkedPiece, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file, in whole blocks."""
        return sum(round_up(piece.nbytes) for piece in self.pieces)

    @property
    def label(self) -> str:
        return label_of(self.member)


class Parking:
    """The place of all parked members of a sweep. The first use opens it.

    `descriptors`: of its files, one per volume, if another process has made them (`shared_files`).
    """

    def __init__(self, job: JobFile, plan: MemoryPlan, descriptors: Sequence[int] = ()) -> None:
        self.held_bytes = 0
        """Bytes of the members that are parked now."""
        self._peak_bytes = 0
        self._directories = [Path(directory) for directory in job.spill_directories]
        self._sizes, self._nbytes = region_bytes(plan), slab_bytes(plan)
        self._descriptors = descriptors
        self._num_io_threads = plan.activations.num_io_threads
        open_file: OpenFile = partial(SpillFile, listed=job.spill_is_listed)
        if job.spec.spill.encryption != "None":
            open_file = encrypted(open_file)
        elif descriptors:
            open_file = _adopting(iter(descriptors))
        self._open_file = open_file
        self._slab: NvmeSlab | None = None
        self._regions: dict[str, NvmeExtent] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def park(self, member: str, tensors: Iterable[tuple[str, Tensor]]) -> Parked:
        """Writes all tensors, over what the member had parked before. Raises SpillIOError or SpillVolumeFull; then the
        member has nothing parked."""
        slab, entries, pieces, filled = self._opened(), list[Entry](), list[ParkedPiece](), 0
        start = 0

        def write() -> None:
            nonlocal filled, start
            pieces.append(self._written(slab, member, start, filled))
            start, filled = start + round_up(filled), 0

        for name, tensor in tensors:
            entries.append(Entry(name, tensor.dtype, tensor.shape))
            rest = torch.frombuffer(bytes_of(tensor), dtype=torch.uint8) if tensor.nbytes else self._buffer[:0]
            while rest.numel():
                fitting = min(rest.numel(), self._buffer.numel() - filled)
                self._buffer[filled : filled + fitting].copy_(rest[:fitting])
                filled, rest = filled + fitting, rest[fitting:]
                if filled == self._buffer.numel():
                    write()
        if filled:
            write()
        parked = Parked(member, tuple(entries), tuple(pieces))
        self.held_bytes += parked.nbytes
        self._peak_bytes = max(self._peak_bytes, self.held_bytes)
        return parked

    def tensors(self, parked: Parked) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors as they were given to `park`. Raises SpillIOError for bytes that are not what was
        written."""
        slab, pieces, start, end = self._opened(), iter(parked.pieces), 0, 0
        for entry in parked.entries:
            found = torch.empty(entry.nbytes, dtype=torch.uint8)
            filled = 0
            while filled < entry.nbytes:
                if start == end:
                    piece = next(pieces)
                    whole = self._buffer[: round_up(piece.nbytes)]
                    stored = tuple(StoredPiece(slab.device(one.device), *one[1:]) for one in piece.stored)
                    slab.read_batch([(stored, whole, parked.label)])
                    start, end = 0, piece.nbytes
                fitting = min(entry.nbytes - filled, end - start)
                found[filled : filled + fitting].copy_(self._buffer[start : start + fitting])
                filled, start = filled + fitting, start + fitting
            yield entry.name, found.view(entry.dtype).view(entry.shape)

    def leave(self, parked: Parked) -> None:
        """Called when the member no longer needs what it has parked."""
        self.held_bytes -= parked.nbytes

    def take_peak_bytes(self) -> int:
        """The most bytes held since the last call."""
        peak, self._peak_bytes = max(self._peak_bytes, self.held_bytes), self.held_bytes
        return peak

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Excludes the other processes of the sweep: only one of them is inside at a time."""
        descriptors = self._descriptors[:1]
        for descriptor in descriptors:
            fcntl.lockf(descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            for descriptor in descriptors:
                fcntl.lockf(descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Closes the file, and with it all that is parked. Idempotent."""
        self.held_bytes = 0
        if self._slab is not None:
            self._slab.close()
            self._slab = None

    def _written(self, slab: NvmeSlab, member: str, start: int, nbytes: int) -> ParkedPiece:
        region, whole = self._regions[member], self._buffer[: round_up(nbytes)]
        if start + whole.numel() > region.nbytes:
            raise SpillVolumeFull(
                f"{label_of(member)} are larger than planned: the plan reserves {format_bytes(region.nbytes)} of the "
                "spill file for them. This is a bug in Spillway; please report it with this job's spec",
                budget_bytes=region.nbytes,
            )
        whole[nbytes:].zero_()
        (stored,) = slab.write_batch([(region.at(start), whole, label_of(member))])
        assert not isinstance(stored, Kept), "parking has no host memory to keep what a device rejects"
        return ParkedPiece(tuple(StoredAt(one.device.index, *one[1:]) for one in stored), nbytes)

    def _opened(self) -> NvmeSlab:
        if self._slab is None:
            self._slab = NvmeSlab(self._directories, self._nbytes, self._num_io_threads, open_file=self._open_file)
            self._regions = {name: self._slab.allocate(size, label_of(name)) for name, size in self._sizes.items()}
            host = HostSlab(PARKING_BUFFER_BYTES)
            self._buffer = host.allocate(PARKING_BUFFER_BYTES, "parking")
        return self._slab


def label_of(member: str) -> str:
    return f"states of member {member}"


def region_bytes(plan: MemoryPlan) -> dict[str, int]:
    """Size of each member's region, in the order of members: what it parks, with half of the file's slack. The rest of
    the slack is for uneven stripes."""
    extra = SLAB_EXTRA_BYTES // (2 * len(plan.members))
    return {one.name: round_up(int(one.parked_bytes * (1.0 + SLAB_SLACK) / 2.0) + extra) for one in plan.members}


def slab_bytes(plan: MemoryPlan) -> int:
    """Size of the files of all volumes together."""
    return int(sum(one.parked_bytes for one in plan.members) * SLAB_SLACK) + SLAB_EXTRA_BYTES


def shared_files(job: JobFile, plan: MemoryPlan) -> list[SpillFile]:
    """Creates the files of a `Parking` that several processes share, one per volume. Raises as SpillFile does."""
    with ExitStack() as made:
        files, size = list[SpillFile](), file_bytes(slab_bytes(plan), len(job.spill_directories))
        for directory in job.spill_directories:
            files.append(SpillFile(directory, size, num_threads=1, listed=job.spill_is_listed))
            made.callback(files[-1].close)
        made.pop_all()
    return files


def _adopting(descriptors: Iterator[int]) -> OpenFile:
    """An OpenFile that opens no file, but takes the next of `descriptors`."""

    def opened(directory: Path, nbytes: int, *, num_threads: int) -> SpillFile:
        return SpillFile(directory, nbytes, num_threads=num_threads, descriptor=next(descriptors))

    return opened
