"""Optimizer states on NVMe: read before a chunk's update, written back after it.

    nvme_read    states N0 | states N1 | states N2 |            into a buffer of the window, a bounded ring
    cpu                    | update N0 | update N1 | ...
    nvme_write                         | states N0 | ...        a buffer is filled again only after it was written

The spill file is scratch; only a checkpoint is durable. A state's checksum is verified when it is read back. What
cannot be written stays in host memory if there is room (tiers/nvme_slab.py). Otherwise the step fails: everything after
the write fails with the same error, so that no checkpoint sees the state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from spillway.plan import PLAN_AGAIN

from ..kernels import dispatch as kernels
from ..tiers.arena import Ring, RingSlot
from ..tiers.lanes import Event, Lane, Lanes, Region
from ..tiers.nvme_slab import Address, NvmeSlab, Stored
from .assign import Chunk
from .memory import StateRows


class NvmeStates(Region):
    """The states of one chunk in the spill file: rows of whole pages, each with the checksum of what was written last.
    A row that was never written reads as 0, as moments are before the first update."""

    __slots__ = ("_nvme", "_place", "_rows", "_stored", "settled")

    def __init__(self, nvme: NvmeSlab, place: Address, rows: StateRows, label: str) -> None:
        super().__init__(rows.nbytes, label)
        self._nvme = nvme
        self._place = place
        self._rows = rows
        self._stored: list[Stored | None] = [None] * len(rows.dtypes)
        self.settled: tuple[Event, ...] = ()
        """Complete when everything submitted so far is in the file."""

    def read(self, block: Tensor) -> None:
        """Fills `block` (uint8, whole pages) with all rows. Runs on lane nvme_read. Raises SpillIOError."""
        self._read({index: self.row(block, index) for index in range(len(self._stored))})

    def write(self, block: Tensor) -> None:
        """Writes all rows of `block`. Runs on lane nvme_write. Raises SpillIOError."""
        self._write({index: self.row(block, index) for index in range(len(self._stored))})

    def read_row(self, index: int, row: Tensor) -> None:
        """Like `read`, for a single row."""
        self._read({index: row})

    def write_row(self, index: int, row: Tensor) -> None:
        """Like `write`, for a single row."""
        self._write({index: row})

    def row(self, block: Tensor, index: int) -> Tensor:
        """The whole pages of that row in `block`."""
        return self._rows.row(block, index)

    def _read(self, rows: Mapping[int, Tensor]) -> None:
        requests = []
        for index, row in rows.items():
            stored = self._stored[index]
            if stored is None:
                row.numpy().fill(0)  # zero_() would use torch's threads in a lane
            else:
                requests.append((stored, row, self.label))
        if requests:
            self._nvme.read_batch(requests)

    def _write(self, rows: Mapping[int, Tensor]) -> None:
        requests = [(self._at(index), row, self.label) for index, row in rows.items()]
        for index, stored in zip(rows, self._nvme.write_batch(requests), strict=True):
            self._stored[index] = stored

    def _at(self, index: int) -> Address:
        return self._place.extent.at(self._place.offset + self._rows.begin(index))


def place_on_nvme(nvme: NvmeSlab | None, chunks: Sequence[tuple[Chunk, StateRows]]) -> list[NvmeStates]:
    """Allocates room for the states of each chunk, one after the other in one extent. Raises SpillVolumeFull with the
    bytes that are missing."""
    if not chunks:
        return []
    if nvme is None:
        raise ValueError(f"the plan has optimizer states on NVMe, but no bytes for a spill file; {PLAN_AGAIN}")
    extent, offset, placed = nvme.allocate(sum(rows.nbytes for _, rows in chunks), "optimizer states"), 0, []
    for chunk, rows in chunks:
        placed.append(NvmeStates(nvme, extent.at(offset), rows, f"states of {chunk.label}"))
        offset += rows.nbytes
    return placed


@dataclass(frozen=True, slots=True)
class Loaded:
    """A chunk's states on their way through the window."""

    slot: RingSlot
    block: Tensor
    """All rows in whole pages, uint8."""
    read: Event
    """Complete when the states have been read."""


@dataclass(frozen=True, slots=True)
class StateWindow:
    """Host buffers, each for one chunk, that states pass through between NVMe and the CPU."""

    lanes: Lanes
    ring: Ring

    def load(self, stored: NvmeStates) -> Loaded:
        """Reads all states into the next buffer, once it is free; `store` gives the buffer back."""
        slot = self.ring.take()
        block = slot.buffer.tensor[: stored.nbytes]
        read = self.lanes.submit(
            Lane.NVME_READ,
            partial(stored.read, block),
            reads=[stored],
            writes=[slot.buffer],
            after=[*stored.settled, *slot.free],
            nbytes=stored.nbytes,
            label=f"read {stored.label}",
        )
        return Loaded(slot, block, read)

    def store(self, stored: NvmeStates, loaded: Loaded, updated: Sequence[Event]) -> Event:
        """Writes the states back once `updated` is complete, and gives the buffer back."""
        write = partial(stored.write, loaded.block)
        return self._write(stored, loaded.slot, write, updated, loaded.block.numel(), f"write {stored.label}")

    def store_row(
        self, stored: NvmeStates, index: int, lane: Lane, fill: Callable[[Tensor], None], source: Sequence[Region] = ()
    ) -> Event:
        """Writes a single state. `fill` puts it into a row; it runs on `lane` and reads `source`."""
        slot = self.ring.take()
        row = stored.row(slot.buffer.tensor, index)
        filled = self.lanes.submit(
            lane,
            partial(fill, row),
            reads=source,
            writes=[slot.buffer],
            after=slot.free,
            nbytes=row.numel(),
            label=f"fill {stored.label}",
        )
        write = partial(stored.write_row, index, row)
        return self._write(stored, slot, write, (filled,), row.numel(), f"write one of {stored.label}")

    def fetch_row(self, stored: NvmeStates, index: int, target: Tensor) -> Event:
        """Reads a single state into `target` (uint8), which is no longer than a row."""
        slot = self.ring.take()
        row = stored.row(slot.buffer.tensor, index)
        read = self.lanes.submit(
            Lane.NVME_READ,
            partial(stored.read_row, index, row),
            reads=[stored],
            writes=[slot.buffer],
            after=[*stored.settled, *slot.free],
            nbytes=row.numel(),
            label=f"read one of {stored.label}",
        )
        copied = self.lanes.submit(
            Lane.CPU,
            partial(kernels.copy, target, row[: target.numel()]),
            reads=[slot.buffer],
            after=[read],
            nbytes=target.numel(),
            label=f"copy one of {stored.label}",
        )
        slot.free = (copied,)
        return copied

    def _write(
        self,
        stored: NvmeStates,
        slot: RingSlot,
        write: Callable[[], None],
        after: Sequence[Event],
        nbytes: int,
        label: str,
    ) -> Event:
        written = self.lanes.submit(
            Lane.NVME_WRITE,
            write,
            reads=[slot.buffer],
            writes=[stored],
            after=[*after, *stored.settled],
            nbytes=nbytes,
            label=label,
        )
        slot.free = stored.settled = (written,)
        return written
