"""Slots: device memory used by streamed segments in turn. A loaded segment's parameters are views of its slot.

    load     h2d into a slot, after everything that used the slot before
    bind     the compute lane waits for the load; `parameter.data` becomes a view of the slot
    evict    `parameter.data` becomes a NaN of the same shape; no view may be left; the values are dropped, because
             their home has them

A parameter that is not bound is NaN, never stale: a stub of one element, expanded, which cannot be written either. Its
version rises at each eviction, so a tensor that autograd saved without our hooks raises instead of reading another
segment's values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from spillway.plan import Tier

from ..tiers.lanes import Buffer, Event, Lanes, Region
from .layout import SegmentLayout


class Load(Protocol):
    def __call__(self, segment: str, slot: Buffer, after: Sequence[Event]) -> Event:
        """Submits the copy of `segment` into `slot`, not before `after`."""


class Contents(Region):
    """What an evicted slot holds. Nobody reads it, so lanes that poison overwrite it."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor, label: str) -> None:
        super().__init__(tensor.numel(), label)
        self._tensor = tensor

    def poison(self) -> None:
        self._tensor.fill_(0xFF)


class Slot:
    """Device memory that can hold the largest streamed segment."""

    __slots__ = ("_num_uses", "buffer", "free", "is_bound", "loaded", "num_pins", "segment")

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.segment: str | None = None
        self.loaded: Event | None = None
        self.is_bound = False
        self.num_pins = 0
        self.free: tuple[Event, ...] = ()
        """Refilling the slot waits for these."""
        self._num_uses = self._count_uses()

    @property
    def address(self) -> int:
        """Address of the storage. The storage lives as long as the run, so the address never comes to mean another
        one."""
        return self.buffer.tensor.untyped_storage().data_ptr()

    @property
    def num_views(self) -> int:
        """Number of tensors that share the slot's memory."""
        return self._count_uses() - self._num_uses

    def _count_uses(self) -> int:
        uses: int = torch._C._storage_Use_Count(self.buffer.tensor.untyped_storage()._cdata)
        return uses


class Slots:
    """Which segment is in which slot. The least recently used one is evicted first; pinned ones stay."""

    def __init__(self, layouts: Mapping[str, SegmentLayout], num_slots: int, load: Load, lanes: Lanes) -> None:
        self._layouts = layouts
        self._load = load
        self._lanes = lanes
        nbytes = max(layout.nbytes for layout in layouts.values())
        self._recent = [Slot(lanes.acquire(Tier.DEVICE, nbytes, f"slot {index}")) for index in range(num_slots)]
        """Least recently used first."""
        self._by_address = {slot.address: slot for slot in self._recent}
        self._holding: dict[str, Slot] = {}
        self._num_evictions: Counter[str] = Counter()
        """By parameter: the part of its version that is due to evictions."""

    def at(self, tensor: Tensor) -> Slot | None:
        """The slot whose memory `tensor` shares."""
        return self._by_address.get(tensor.untyped_storage().data_ptr())

    def num_evictions(self, name: str) -> int:
        return self._num_evictions[name]

    def ensure(self, segment: str) -> Slot:
        """Returns the slot of `segment`, loading it if necessary: its parameters are bound, the compute lane runs after
        the load, and the slot becomes the most recently used."""
        slot = self._holding.get(segment)
        if slot is None:
            slot = self._victim(self._recent)
            if slot is None:
                raise RuntimeError(
                    f"segment {segment} of the model must be loaded, but every slot (device buffer for a streamed "
                    "layer) is pinned by a layer that is running; keep the layers on the device "
                    "(spec.memory.advanced.parameters.placement: Resident)"
                )
            self._fill(slot, segment)
        self._recent.remove(slot)
        self._recent.append(slot)
        if not slot.is_bound:
            assert slot.loaded is not None
            self._lanes.wait(slot.loaded)
            for row in self._layouts[segment].rows:
                row.parameter.data = row.view(slot.buffer.tensor)
            slot.is_bound = True
        return slot

    def prefetch(self, segment: str) -> None:
        """Starts to load `segment`, unless it is loaded or only the most recently used slot could make room."""
        slot = None if segment in self._holding else self._victim(self._recent[:-1])
        if slot is not None:
            self._fill(slot, segment)
            self._recent.remove(slot)
            self._recent.insert(len(self._recent) - 1, slot)  # needed next, after the one in use

    @contextmanager
    def pinned(self, segment: str) -> Iterator[Slot]:
        """Inside, `segment` stays in its slot."""
        slot = self.ensure(segment)
        slot.num_pins += 1
        try:
            yield slot
        finally:
            slot.num_pins -= 1

    def clear(self) -> None:
        """Waits for every load, then evicts every segment, so that the homes may change."""
        for slot in list(self._holding.values()):
            assert slot.loaded is not None
            slot.loaded.wait()
            self._evict(slot)

    def _victim(self, slots: Sequence[Slot]) -> Slot | None:
        """The slot of `slots` to fill next: an empty one, or the least recently used; None if all are pinned."""
        unpinned = [slot for slot in slots if not slot.num_pins]
        return min(unpinned, key=lambda slot: slot.segment is not None, default=None)

    def _fill(self, slot: Slot, segment: str) -> None:
        self._evict(slot)
        slot.segment = segment
        self._holding[segment] = slot
        slot.loaded = self._load(segment, slot.buffer, slot.free)

    def _evict(self, slot: Slot) -> None:
        segment = slot.segment
        if segment is None:
            return
        assert slot.loaded is not None
        del self._holding[segment]
        slot.segment = None
        # The compute lane does not know of a segment that was prefetched but never bound.
        slot.free = (self._lanes.computed() if slot.is_bound else slot.loaded,)
        if slot.is_bound:
            slot.is_bound = False
            self._unbind(segment, slot)
        self._lanes.release(Contents(slot.buffer.tensor, f"{segment} in {slot.buffer.label}"), after=slot.free)

    def _unbind(self, segment: str, slot: Slot) -> None:
        for row in self._layouts[segment].rows:
            row.parameter.data = stub(row.parameter.shape, row.dtype, slot.buffer.tensor.device)
            increment_version(row.parameter)
            self._num_evictions[row.name] += 1
        if slot.num_views and slot.loaded is not None:
            slot.loaded.wait()  # on streams only compute waited: the load's own views last until it is complete
        if slot.num_views:
            raise RuntimeError(
                f"segment {segment}: {slot.num_views} view(s) of its parameters still exist after its forward or "
                "backward, but another part of the model must be loaded into their device memory. The model's code "
                "keeps a parameter, or a view of one, outside of torch's saved tensors: in its own saved-tensor hooks "
                "(save_on_cpu), in an attribute of an autograd.Function's ctx, or in a cache. Change this code to keep "
                "a copy (clone), or keep all layers on the device (spec.memory.advanced.parameters.placement: "
                "Resident)."
            )


@cache
def stub(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What an evicted parameter is: NaN of the right shape and type (autograd needs both), in one element."""
    nan = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), nan, dtype=dtype, device=device).expand(shape)
