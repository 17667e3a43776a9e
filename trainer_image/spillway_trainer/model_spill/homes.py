"""Homes: memory of streamed parameters between uses, divided into the optimizer's chunks.

    host   one buffer per segment, laid out like its slot         -h2d-> slot
    nvme   one extent per segment, every chunk in whole blocks with a checksum
                                                -nvme_read-> staging -h2d-> slot

The CPU's update writes a chunk's new values directly into host memory; new values for NVMe go through the update's own
staging. Loads only read: a segment that was used is dropped, not written back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from spillway.plan import PLAN_AGAIN, Tier
from spillway.planning.workload import NUM_SLOTS

from ..kernels import dispatch as kernels
from ..optimizer.trainable import cut
from ..tiers.arena import MemorySlice, Ring, as_bytes
from ..tiers.extents import round_up
from ..tiers.lanes import Buffer, Event, Lane, Lanes, Region
from ..tiers.nvme_slab import Address, NvmeSlab, Stored
from .layout import SegmentLayout, SlotRow


@dataclass(slots=True)
class HostChunk:
    """A part of a segment's host buffer."""

    region: Region
    memory: Tensor
    changed: tuple[Event, ...] = ()
    """Complete when the optimizer's last update of the values has arrived here."""

    def store(self, staged: Tensor) -> None:
        kernels.copy(self.memory, staged[: self.memory.numel()])


class NvmeChunk:
    """Whole blocks of the spill file, and what was written there last."""

    __slots__ = ("_nvme", "_place", "_stored", "changed", "memory", "region")

    def __init__(self, nvme: NvmeSlab, place: Address, nbytes: int, label: str) -> None:
        self._nvme = nvme
        self._place = place
        self._stored: Stored | None = None
        self.memory: Tensor | None = None
        self.changed: tuple[Event, ...] = ()
        self.region = Region(nbytes, label)

    def store(self, staged: Tensor) -> None:
        (self._stored,) = self._nvme.write_batch([(self._place, staged, self.region.label)])

    def request(self, staged: Tensor) -> tuple[Stored, Tensor, str]:
        """The read that fills `staged`."""
        if self._stored is None:
            raise RuntimeError(
                f"{self.region.label}: read from the spill file before it was written; load the model first"
            )
        return self._stored, staged, self.region.label


Chunk = HostChunk | NvmeChunk


class Fill(NamedTuple):
    """Where one chunk goes in a slot."""

    chunk: Chunk
    offset: int
    """Bytes from the start of the slot."""

    @property
    def nbytes(self) -> int:
        return self.chunk.region.nbytes

    def part_of(self, slot: Tensor) -> Tensor:
        return slot[self.offset : self.offset + self.nbytes]


class Homes:
    """The homes of all streamed segments. Allocated before the first step; raises an error when a tier is too small."""

    def __init__(
        self, layouts: Mapping[str, SegmentLayout], chunk_parameters: int, lanes: Lanes, nvme: NvmeSlab | None
    ) -> None:
        self._lanes = lanes
        self._nvme = nvme
        self._chunk_parameters = chunk_parameters
        self._chunks: dict[str, list[Chunk]] = {}
        self._in_host: dict[str, Tensor] = {}
        """By segment: the host memory of its own parameters, laid out like the start of a slot."""
        for layout in layouts.values():
            if layout.home is Tier.HOST:
                self._settle_in_host(layout)
            else:
                self._settle_on_nvme(layout)
        self._fills = {segment: self._fills_of(layout) for segment, layout in layouts.items()}
        self._staging = self._staging_ring()

    def of(self, parameter: str) -> Sequence[Chunk]:
        """Its chunks in order; none for a parameter that is resident or an alias."""
        return self._chunks.get(parameter, ())

    def set(self, parameter: str, values: Tensor) -> None:
        """Puts `values`, flat and in the parameter's type, into its homes; returns when they are there."""
        source, start, ends = as_bytes(values.contiguous()), 0, list[Event]()
        for chunk in self._chunks[parameter]:
            part = source[start : start + chunk.region.nbytes]
            start += part.numel()
            ends.append(self._set(chunk, part))
        for event in ends:
            event.wait()

    def load(self, segment: str, slot: Buffer, after: Sequence[Event]) -> Event:
        """Submits the copy of a whole segment into `slot`. It runs after `after`, when the slot's earlier users are
        complete, and after the updates of the segment's values.

        An alias is loaded from the home of its owner, which is in the same tier.
        """
        fills = self._fills[segment]
        changed = [event for fill in fills for event in fill.chunk.changed]
        own = self._in_host.get(segment)
        if own is not None:  # host memory: the segment's own parameters in one piece
            elsewhere = [fill for fill in fills if fill.offset >= own.numel()]
            aliases = [
                (fill.part_of(slot.tensor), fill.chunk.memory) for fill in elsewhere if fill.chunk.memory is not None
            ]
            pairs = [(slot.tensor[: own.numel()], own), *aliases] if own.numel() else aliases
            return self._copy(segment, pairs, [fill.chunk.region for fill in fills], slot, [*changed, *after])
        staging = self._staging.take()
        staged = _staged(staging.buffer.tensor, fills)
        read = self._lanes.submit(
            Lane.NVME_READ,
            partial(self._read, fills, staged),
            reads=[fill.chunk.region for fill in fills],
            writes=[staging.buffer],
            after=[*staging.free, *changed],
            nbytes=sum(part.numel() for part in staged),
            label=f"read of parameters of {segment}",
        )
        pairs = [(fill.part_of(slot.tensor), part[: fill.nbytes]) for fill, part in zip(fills, staged, strict=True)]
        loaded = self._copy(segment, pairs, [staging.buffer], slot, [read, *after])
        staging.free = (loaded,)
        return loaded

    def _copy(
        self,
        segment: str,
        pairs: Sequence[tuple[Tensor, Tensor]],
        reads: Sequence[Region],
        slot: Buffer,
        after: Sequence[Event],
    ) -> Event:
        return self._lanes.submit(
            Lane.H2D,
            partial(kernels.copy_batch, pairs),
            reads=reads,
            writes=[slot],
            after=after,
            nbytes=sum(target.numel() for target, _ in pairs),
            label=f"parameters of {segment}",
        )

    def _read(self, fills: Sequence[Fill], staged: Sequence[Tensor]) -> None:
        assert self._nvme is not None, "_settle_on_nvme checks it"
        chunks = [fill.chunk for fill in fills]
        self._nvme.read_batch(
            [chunk.request(part) for chunk, part in zip(chunks, staged, strict=True) if isinstance(chunk, NvmeChunk)]
        )

    def _settle_in_host(self, layout: SegmentLayout) -> None:
        home = self._lanes.acquire(Tier.HOST, layout.home_bytes, f"parameters of {layout.segment}").tensor
        self._in_host[layout.segment] = home
        for row in layout.own:
            self._chunks[row.name] = [
                HostChunk(part, part.tensor)
                for start, nbytes, label in self._cut(row)
                for part in [MemorySlice(home[row.offset + start : row.offset + start + nbytes], label)]
            ]

    def _settle_on_nvme(self, layout: SegmentLayout) -> None:
        if self._nvme is None:
            raise ValueError(f"the plan keeps parameters on NVMe, but has no bytes for a spill file; {PLAN_AGAIN}")
        pieces = [(row.name, nbytes, label) for row in layout.own for _, nbytes, label in self._cut(row)]
        total = sum(round_up(nbytes) for _, nbytes, _ in pieces)
        extent, offset = self._nvme.allocate(total, f"parameters of {layout.segment}"), 0
        for name, nbytes, label in pieces:
            self._chunks.setdefault(name, []).append(NvmeChunk(self._nvme, extent.at(offset), nbytes, label))
            offset += round_up(nbytes)

    def _cut(self, row: SlotRow) -> list[tuple[int, int, str]]:
        """(first byte, bytes, label) of each chunk of a parameter."""
        size = row.dtype.itemsize
        return [
            (offset * size, count * size, f"{row.name}[{offset}:{offset + count}]")
            for offset, count in cut(row.parameter.numel(), self._chunk_parameters)
        ]

    def _fills_of(self, layout: SegmentLayout) -> list[Fill]:
        fills = []
        for row in layout.rows:
            offset = row.offset
            for chunk in self._chunks[row.owner]:
                fills.append(Fill(chunk, offset))
                offset += chunk.region.nbytes
        return fills

    def _staging_ring(self) -> Ring:
        """The ring for loads from NVMe: one segment is read while another one is copied to its slot."""
        sizes = [
            sum(round_up(fill.nbytes) for fill in fills if isinstance(fill.chunk, NvmeChunk))
            for fills in self._fills.values()
        ]
        num_buffers, largest = NUM_SLOTS if any(sizes) else 0, max(sizes, default=0)
        labels = [f"staging of parameters {index}" for index in range(num_buffers)]
        return Ring([self._lanes.acquire(Tier.HOST, largest, label) for label in labels])

    def _set(self, chunk: Chunk, values: Tensor) -> Event:
        if chunk.memory is not None:
            return self._fill(chunk.memory, values, chunk.region, ())
        staging = self._staging.take()
        filled = self._fill(staging.buffer.tensor[: values.numel()], values, staging.buffer, staging.free)
        blocks = staging.buffer.tensor[: round_up(values.numel())]
        stored = self._lanes.submit(
            Lane.NVME_WRITE,
            partial(chunk.store, blocks),
            reads=[staging.buffer],
            writes=[chunk.region],
            after=[filled],
            nbytes=blocks.numel(),
            label=f"store {chunk.region.label}",
        )
        staging.free = (stored,)
        return stored

    def _fill(self, target: Tensor, values: Tensor, memory: Region, after: Sequence[Event]) -> Event:
        """Submits the copy of `values` into `target`, a part of `memory`."""
        return self._lanes.submit(
            Lane.CPU,
            partial(kernels.copy, target, values),
            writes=[memory],
            after=after,
            nbytes=values.numel(),
            label=f"values for {memory.label}",
        )


def _staged(staging: Tensor, fills: Sequence[Fill]) -> list[Tensor]:
    """Each chunk's part of a staging buffer, in whole blocks: the file moves nothing smaller."""
    sizes = [round_up(fill.nbytes) for fill in fills]
    return list(torch.split(staging[: sum(sizes)], sizes))
