"""Transfer: what one segment's forward saved, copied to host memory or the spill file, and back.

    HOST   source -d2h-> host buffer                                       host buffer -h2d-> reload buffers
    NVME   source -d2h-> staging -nvme_write-> extent      extent -nvme_read-> staging -h2d-> reload buffers

Only events order these operations: a source is dropped after its d2h; staging after its write, or after its h2d; a host
buffer or an extent after everything that reads it. Reload buffers are fresh device memory, aligned like torch's own,
and hold whole storages: a saved view comes back at its offset, so kernels see the same alignment as before, and give
the same bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, Protocol

from torch import Tensor

from spillway.errors import HostOutOfMemory, SpillIOError, SpillVolumeFull
from spillway.plan import Tier
from spillway.planning.workload import PIECE_BYTES

from ..kernels import dispatch as kernels
from ..tiers.device_ledger import DeviceLedger
from ..tiers.extents import ALIGNMENT_BYTES, round_up
from ..tiers.host_slab import HostSlab
from ..tiers.lanes import Buffer, Event, Lane, Lanes
from ..tiers.nvme_slab import NvmeExtent, NvmeSlab, Stored
from .records import Record, Sources

CACHE_LINE_BYTES = 64
"""Alignment of records in host memory; the spill file needs whole blocks."""


class Staged(NamedTuple):
    """Bytes in host memory from which records can be loaded."""

    buffer: Buffer
    offsets: list[int]
    """Offset of each record in `buffer`, in bytes."""
    ready: Event


class Copy(Protocol):
    """A transfer's bytes in their tier; released when the transfer is."""

    tier: Tier
    nbytes: int
    stored: Event
    """Complete when the bytes have arrived."""

    def take_back(self) -> list[tuple[Tensor, int]] | None:
        """The sources and their charges, in the order of the records; None if they were given up already."""

    def read_into(self, records: Sequence[Record], buffers: Sequence[Buffer]) -> Event | None:
        """Submits the read of the records into device buffers of whole blocks. None if the bytes are in host memory."""

    def stage(self, records: Sequence[Record]) -> Staged:
        """Makes the records' bytes readable in host memory."""

    def unstage(self, staged: Staged, loaded: Event) -> None:
        """Gives `staged` back, which is read until `loaded` is complete."""

    def release(self) -> None: ...


class Transfer:
    """The records that one flush moved together."""

    __slots__ = ("__weakref__", "_copy", "_lanes", "_ledger", "_records", "_segment", "is_entered", "number")

    def __init__(self, lanes: Lanes, ledger: DeviceLedger, segment: str, records: Sequence[Record], copy: Copy) -> None:
        self._lanes = lanes
        self._ledger = ledger
        self._segment = segment
        self.number = 0
        """Index among the transfers of its batch, in the order of forward."""
        self.is_entered = False
        """Whether backward has reached it."""
        self._records = [weakref.ref(record) for record in records]
        self._copy = copy

    @property
    def tier(self) -> Tier:
        return self._copy.tier

    @property
    def nbytes(self) -> int:
        return self._copy.nbytes

    def load(self, records: Sequence[Record] | None = None) -> None:
        """Submits the reload of `records` (None: of all that are still needed). Raises an error when a tier has no
        room."""
        alive = records if records is not None else [record for ref in self._records if (record := ref()) is not None]
        wanted = [record for record in alive if not record.is_loaded]
        if not wanted or self._forward():
            return
        buffers = self._acquire(wanted)
        if self._lanes.direct_io and (loaded := self._copy.read_into(wanted, buffers)) is not None:
            for record, buffer in zip(wanted, buffers, strict=True):
                record.load_into(buffer, loaded)
            return
        try:
            staged = self._copy.stage(wanted)
        except BaseException:
            self._give_back(buffers)
            raise
        loaded = self._lanes.submit(
            Lane.H2D,
            partial(_copy_in, buffers, staged.buffer, staged.offsets, [record.nbytes for record in wanted]),
            reads=(staged.buffer,),
            writes=buffers,
            after=(staged.ready,),
            nbytes=sum(buffer.nbytes for buffer in buffers),
            label=f"reload of {self._segment}",
        )
        self._copy.unstage(staged, loaded)
        for record, buffer in zip(wanted, buffers, strict=True):
            record.load_into(buffer, loaded)

    def _forward(self) -> bool:
        """Whether the sources still exist. If so, they stay on the device; a write that has not begun never will."""
        lent = self._copy.take_back()
        if lent is None:
            return False
        for ref, (source, charge) in zip(self._records, lent, strict=True):
            if (record := ref()) is not None:
                record.stay(charge)
            else:
                self._ledger.release_saved(charge)
            del source
        return True

    def _acquire(self, records: Sequence[Record]) -> list[Buffer]:
        buffers: list[Buffer] = []
        try:
            for record in records:
                buffers.append(self._lanes.acquire(Tier.DEVICE, record.nbytes, record.label))
        except BaseException:
            self._give_back(buffers)
            raise
        return buffers

    def _give_back(self, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            self._lanes.release(buffer)

    def __del__(self) -> None:
        self._forward()  # the graph was dropped: what is not written yet need not be written
        self._copy.release()


class HostCopy:
    """A copy in a host buffer, which reloads read directly."""

    tier = Tier.HOST

    def __init__(self, lanes: Lanes, buffer: Buffer, stored: Event) -> None:
        self._lanes = lanes
        self._buffer = buffer
        self._reads = list[Event]()
        """Reads of the copy; each comes after `stored`."""
        self.nbytes = buffer.nbytes
        self.stored = stored

    def take_back(self) -> list[tuple[Tensor, int]] | None:
        return None

    def read_into(self, records: Sequence[Record], buffers: Sequence[Buffer]) -> Event | None:
        return None

    def stage(self, records: Sequence[Record]) -> Staged:
        return Staged(self._buffer, [record.offset for record in records], self.stored)

    def unstage(self, staged: Staged, loaded: Event) -> None:
        self._reads.append(loaded)

    def release(self) -> None:
        self._lanes.release(self._buffer, after=self._reads or (self.stored,))


class NvmeCopy:
    """A copy in an extent of the spill file, each record with a checksum of its own."""

    tier = Tier.NVME

    def __init__(
        self,
        lanes: Lanes,
        nvme: NvmeSlab,
        extent: NvmeExtent,
        copied: Event,
        stored: Event,
        stored_at: dict[int, Stored],
        sources: Sources | None = None,
    ) -> None:
        """`sources`: given if they are written to the file directly, without staging."""
        self._lanes = lanes
        self._nvme = nvme
        self._sources = sources
        self._extent = extent
        self._reads = list[Event]()
        """Reads of the copy; each comes after `stored`."""
        self._stored_at = stored_at
        self.nbytes = extent.nbytes
        self.copied = copied
        """Complete when the sources are free, because staging (without staging: the file) has the bytes."""
        self.stored = stored

    def take_back(self) -> list[tuple[Tensor, int]] | None:
        return self._sources.take_back() if self._sources is not None else None

    def read_into(self, records: Sequence[Record], buffers: Sequence[Buffer]) -> Event | None:
        parts = [
            (record.offset + start, piece, record.label)
            for record, buffer in zip(records, buffers, strict=True)
            for start, piece in pieces(buffer.tensor)
        ]
        return self._read(parts, buffers)

    def _read(self, parts: Sequence[tuple[int, Tensor, str]], targets: Sequence[Buffer]) -> Event:
        read = self._lanes.submit(
            Lane.NVME_READ,
            partial(_read, self._nvme, parts, self._stored_at),
            reads=(self._extent,),
            writes=targets,
            after=(self.stored,),
            nbytes=sum(tensor.numel() for _, tensor, _ in parts),
            label=f"read of {self._extent.label}",
        )
        self._reads.append(read)
        return read

    def stage(self, records: Sequence[Record]) -> Staged:
        """Stages records from the file or, if the disk rejected them, uses the staging buffer that still has them."""
        if self.stored.done and self._extent.home is not None:
            return self._at_home(self._extent.home, records)
        try:
            return self._read_into_staging(records)
        except HostOutOfMemory:
            self.stored.wait()  # only now is it known whether staging was kept
            if self._extent.home is None:
                raise
            return self._at_home(self._extent.home, records)

    def _at_home(self, home: Buffer, records: Sequence[Record]) -> Staged:
        return Staged(home, [record.offset for record in records], self.stored)

    def _read_into_staging(self, records: Sequence[Record]) -> Staged:
        offsets, nbytes = lay_out(records, ALIGNMENT_BYTES)
        staging = self._lanes.acquire(Tier.HOST, nbytes, f"staging of {self._extent.label}")
        parts = [
            (record.offset, padded(staging.tensor, offset, record.nbytes), record.label)
            for record, offset in zip(records, offsets, strict=True)
        ]
        ready = self._read(parts, (staging,))
        return Staged(staging, offsets, ready)

    def unstage(self, staged: Staged, loaded: Event) -> None:
        if staged.buffer is self._extent.home:
            self._reads.append(loaded)
        else:
            self._lanes.release(staged.buffer, after=(loaded,))

    def release(self) -> None:
        self._lanes.release(self._extent, after=self._reads or (self.stored,))


def copy_to_host(lanes: Lanes, ledger: DeviceLedger, segment: str, records: Sequence[Record]) -> HostCopy:
    """Submits the copies of `records` to one host buffer. Raises HostOutOfMemory."""
    buffer, copied = _copy_out(lanes, ledger, f"activations of {segment}", records, CACHE_LINE_BYTES)
    return HostCopy(lanes, buffer, copied)


def copy_to_nvme(
    lanes: Lanes, ledger: DeviceLedger, nvme: NvmeSlab, segment: str, records: Sequence[Record]
) -> NvmeCopy:
    """Submits the copies of `records` to staging and from there to one extent. Raises HostOutOfMemory or
    SpillVolumeFull."""
    label = f"activations of {segment}"
    extent = nvme.allocate(lay_out(records, ALIGNMENT_BYTES)[1], label)
    try:
        staging, copied = _copy_out(lanes, ledger, f"staging of {label}", records, ALIGNMENT_BYTES)
    except BaseException:
        lanes.release(extent)
        raise
    parts = [(record.offset, padded(staging.tensor, record.offset, record.nbytes), record.label) for record in records]
    stored_at: dict[int, Stored] = {}
    written = lanes.submit(
        Lane.NVME_WRITE,
        partial(_write, nvme, extent, staging, parts, stored_at),
        reads=(staging,),
        writes=(extent,),
        after=(copied,),
        nbytes=extent.nbytes,
        label=f"write of {label}",
    )
    lanes.release(staging, after=(written,))
    return NvmeCopy(lanes, nvme, extent, copied, written, stored_at)


def write_to_nvme(
    lanes: Lanes, ledger: DeviceLedger, nvme: NvmeSlab, segment: str, records: Sequence[Record], bounces: Bounces
) -> NvmeCopy:
    """Like `copy_to_nvme`, where device memory is host memory: the sources stay until they are written, and nothing is
    staged. Sources from the tensor pool are whole pages and go to the file directly; others go through one of
    `bounces`.

    Raises SpillVolumeFull.
    """
    label = f"activations of {segment}"
    offsets, nbytes = lay_out(records, ALIGNMENT_BYTES)
    extent = nvme.allocate(nbytes, label)
    for record, offset in zip(records, offsets, strict=True):
        record.offset = offset
    sources, stored_at = Sources(ledger, records, f"sources of {label}"), dict[int, Stored]()
    names = [record.label for record in records]
    lanes.compute(writes=(sources,), label=f"forward before {label}")
    written = lanes.submit(
        Lane.NVME_WRITE,
        partial(_write_pieces, nvme, extent, sources, offsets, names, bounces, stored_at),
        reads=(sources,),
        writes=(extent,),
        after=(lanes.computed(),),
        nbytes=nbytes,
        label=f"write of {label}",
    )
    lanes.release(sources, after=(written,))
    return NvmeCopy(lanes, nvme, extent, written, written, stored_at, sources)


class Bounces:
    """Aligned buffers of PIECE_BYTES, one for each write that runs at the same time; reused."""

    def __init__(self) -> None:
        self._free: list[HostSlab] = []

    @contextmanager
    def lent(self) -> Iterator[Tensor]:
        try:
            slab = self._free.pop()
        except IndexError:
            slab = HostSlab(PIECE_BYTES)
        try:
            yield slab.memory
        finally:
            self._free.append(slab)

    def give_pages_back(self) -> None:
        """Frees the pages of unused buffers until they are written again."""
        idle, self._free = self._free, []
        for bounce in idle:
            bounce.give_pages_back()
        self._free += idle


def pieces(memory: Tensor) -> list[tuple[int, Tensor]]:
    """`memory` in pieces of PIECE_BYTES: offset and bytes of each."""
    return [(start, memory[start : start + PIECE_BYTES]) for start in range(0, memory.numel(), PIECE_BYTES)]


Part = tuple[int, Tensor, str]
"""Offset in the extent, bytes, label."""


def in_bounces(parts: Iterable[Part], bounce: Tensor) -> Iterator[list[tuple[Part, Tensor]]]:
    """Yields as many parts at a time as `bounce` has room for, each with its place there, in whole blocks."""
    group, used = list[tuple[Part, Tensor]](), 0
    for part in parts:
        nbytes = part[1].numel()
        if used + nbytes > bounce.numel():
            yield group
            group, used = [], 0
        place = padded(bounce, used, nbytes)
        group.append((part, place))
        used += place.numel()
    if group:
        yield group


def _write_pieces(
    nvme: NvmeSlab,
    extent: NvmeExtent,
    sources: Sources,
    offsets: Sequence[int],
    names: Sequence[str],
    bounces: Bounces,
    stored_at: dict[int, Stored],
) -> None:
    memory = sources.bytes()  # before the check: once they are taken, they are gone from there
    if sources.is_taken:
        return  # they were needed before they were written
    straight, others = list[Part](), list[Part]()
    for source, offset, name in zip(memory, offsets, names, strict=True):
        for at, piece in pieces(source):
            is_whole = (piece.data_ptr() | piece.numel()) % ALIGNMENT_BYTES == 0
            (straight if is_whole else others).append((offset + at, piece, name))

    def write(parts: Sequence[Part]) -> None:
        stored = nvme.write_batch([(extent.at(at), part, name) for at, part, name in parts], copies=False)
        stored_at.update(zip((at for at, *_ in parts), stored, strict=True))

    try:
        if straight:
            write(straight)
        if others:
            with bounces.lent() as bounce:
                for group in in_bounces(others, bounce):
                    kernels.copy_batch([(place[: part.numel()], part) for (_, part, _), place in group])
                    write([(at, place, name) for (at, _, name), place in group])
    except (SpillIOError, SpillVolumeFull):
        if not nvme.survives:
            raise
        sources.retain()


def lay_out(records: Sequence[Record], alignment_bytes: int) -> tuple[list[int], int]:
    """The aligned offset of each record, and the bytes of all of them."""
    offsets, end = [], 0
    for record in records:
        offsets.append(end)
        end += -(-record.nbytes // alignment_bytes) * alignment_bytes
    return offsets, end


def padded(staging: Tensor, offset: int, nbytes: int) -> Tensor:
    """A record's part of staging in whole blocks: the file moves nothing smaller."""
    return staging[offset : offset + round_up(nbytes)]


def _copy_out(
    lanes: Lanes, ledger: DeviceLedger, label: str, records: Sequence[Record], alignment_bytes: int
) -> tuple[Buffer, Event]:
    offsets, nbytes = lay_out(records, alignment_bytes)
    buffer = lanes.acquire(Tier.HOST, nbytes, label)
    for record, offset in zip(records, offsets, strict=True):
        record.offset = offset
    sources = Sources(ledger, records, f"sources of {label}")
    lanes.compute(writes=(sources,), label=f"forward before {label}")
    copied = lanes.submit(
        Lane.D2H,
        partial(_copy_away, sources, buffer, offsets),
        reads=(sources,),
        writes=(buffer,),
        after=(lanes.computed(),),
        nbytes=sources.nbytes,
        label=f"copy to {label}",
    )
    lanes.release(sources, after=(copied,))
    return buffer, copied


def _copy_away(sources: Sources, buffer: Buffer, offsets: Sequence[int]) -> None:
    memory = buffer.tensor
    kernels.copy_batch(
        [(memory[at : at + source.numel()], source) for at, source in zip(offsets, sources.bytes(), strict=True)]
    )


def _copy_in(buffers: Sequence[Buffer], staging: Buffer, offsets: Sequence[int], sizes: Sequence[int]) -> None:
    memory = staging.tensor
    kernels.copy_batch(
        [
            (buffer.tensor[:size], memory[at : at + size])
            for buffer, at, size in zip(buffers, offsets, sizes, strict=True)
        ]
    )


def _write(
    nvme: NvmeSlab,
    extent: NvmeExtent,
    staging: Buffer,
    parts: Sequence[tuple[int, Tensor, str]],
    stored_at: dict[int, Stored],
) -> None:
    found = nvme.write_batch([(extent.at(offset), part, label) for offset, part, label in parts], staging)
    stored_at.update(zip((offset for offset, _, _ in parts), found, strict=True))


def _read(nvme: NvmeSlab, parts: Sequence[tuple[int, Tensor, str]], stored_at: dict[int, Stored]) -> None:
    nvme.read_batch([(stored_at[offset], part, label) for offset, part, label in parts])
