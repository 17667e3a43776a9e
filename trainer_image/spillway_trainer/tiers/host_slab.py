"""HostSlab: all host memory that techniques use, one anonymous mapping, handed out in 4096-aligned extents.

There is one mapping instead of one allocation per tensor: its size is the budget, pages are touched once and reused,
and a device that needs registered memory registers it once.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from spillway.errors import HostOutOfMemory
from spillway.units import format_bytes

from .extents import ALIGNMENT_BYTES, Extents, round_up
from .releases import obtain

HUGE_PAGE_BYTES = 2 * 2**20


class HostSlab:
    """`nbytes` of host memory (0 is allowed and rejects every allocation). Pages become resident when they are first
    written.

    `may_grow`: returns how many bytes larger the slab may become when a spill device fails and bytes have to stay here.
    `planned_bytes`: an allocation that would exceed them waits for releases in flight first.
    """

    def __init__(self, nbytes: int, may_grow: Callable[[], int] = lambda: 0, planned_bytes: float = math.inf) -> None:
        self.reclaim: Callable[[], bool] | None = None
        """Waits for one release in flight; False if there is none. Set by the lanes."""
        self._extents = Extents(nbytes)
        self._planned_bytes = planned_bytes
        self._mapping = _map(self._extents.capacity_bytes)
        self._memory = self._mapping.tensor
        self._storage: int = self._memory.untyped_storage()._cdata
        self._may_grow = may_grow
        self._spare: HostSlab | None = None
        self._growing = threading.Lock()

    def allocate(self, nbytes: int, label: str) -> Tensor:
        """Returns a uint8 view of `nbytes`, 4096-aligned and uninitialised.

        Waits for releases in flight before it raises HostOutOfMemory, which names the holders.
        """
        while self.held_bytes + round_up(nbytes) > self._planned_bytes and self.reclaim is not None and self.reclaim():
            pass
        memory = obtain(lambda: self.allocate_now(nbytes, label), self.reclaim)
        if memory is None:
            self._reject(nbytes, label)
        return memory

    def allocate_now(self, nbytes: int, label: str) -> Tensor | None:
        """As `allocate`, but returns None if there is no room. It never waits, so a lane may call it."""
        offset = self._extents.allocate(nbytes, label)
        if offset is not None:
            return self._memory[offset : offset + nbytes]
        return self._spare.allocate_now(nbytes, label) if self._spare else None

    def grow(self) -> None:
        """Makes the slab larger, once, by what `may_grow` allows: a spill device failed, and bytes have to stay
        here."""
        with self._growing:
            nbytes = self._may_grow() if self._spare is None else 0
            if nbytes >= ALIGNMENT_BYTES:
                self._spare = HostSlab(nbytes)

    def free(self, tensor: Tensor) -> None:
        """Frees what `allocate` returned; the caller must no longer use it. Safe in a destructor."""
        if self._spare is not None and tensor.untyped_storage()._cdata != self._storage:
            self._spare.free(tensor)
            return
        # By offset, because torch has no address for an empty tensor.
        self._extents.free(int(tensor.storage_offset() - self._memory.storage_offset()))

    def give_pages_back(self) -> None:
        """Returns the pages of free runs to the system; they occupy no memory until they are written again."""
        self._extents.each_free(self._mapping.give_back)

    @property
    def memory(self) -> Tensor:
        """The whole initial memory, for registration with a device or a file; allocations are views of it."""
        return self._memory

    @property
    def capacity_bytes(self) -> int:
        return self._extents.capacity_bytes + (self._spare.capacity_bytes if self._spare else 0)

    @property
    def held_bytes(self) -> int:
        return self._extents.held_bytes + (self._spare.held_bytes if self._spare else 0)

    @property
    def peak_bytes(self) -> int:
        """Highest bytes held. After `grow`, an upper bound: the sum of the peaks of both parts."""
        return self._extents.peak_bytes + (self._spare.peak_bytes if self._spare else 0)

    @property
    def largest_free_bytes(self) -> int:
        """Size of the largest possible allocation."""
        return max(self._extents.largest_free_bytes, self._spare.largest_free_bytes if self._spare else 0)

    def reset_peak(self) -> None:
        self._extents.reset_peak()
        if self._spare:
            self._spare.reset_peak()

    def by_label(self) -> dict[str, int]:
        """Returns bytes held by label, largest first."""
        held = Counter(self._extents.holders()) + Counter(self._spare.by_label() if self._spare else {})
        return dict(held.most_common())

    def _reject(self, nbytes: int, label: str) -> NoReturn:
        held = self.by_label()
        holders = ", ".join(f"{name} {format_bytes(size)}" for name, size in list(held.items())[:6]) or "nothing"
        raise HostOutOfMemory(
            f"host memory: {format_bytes(nbytes)} for {label} do not fit into this rank's host memory of "
            f"{format_bytes(self.capacity_bytes)}; held: {format_bytes(sum(held.values()))} ({holders}), the "
            f"largest free block is {format_bytes(self.largest_free_bytes)}. Raise spec.memory.budget.host.",
            wanted_bytes=nbytes,
            held_bytes=sum(held.values()),
            budget_bytes=self.capacity_bytes,
        )


class _Mapping(NamedTuple):
    """An anonymous private mapping, 4096-aligned; unmapped when the last view dies."""

    tensor: Tensor
    whole: mmap.mmap | None
    start: int
    """Offset of the tensor in the whole mapping."""

    def give_back(self, offset: int, nbytes: int) -> None:
        assert self.whole is not None
        self.whole.madvise(mmap.MADV_DONTNEED, self.start + offset, nbytes)


def _map(nbytes: int) -> _Mapping:
    """Maps `nbytes`. A slab of several huge pages requests huge pages (fewer page faults and TLB misses in streaming
    loops); for a smaller one, rounding up to huge pages would only cost memory."""
    if nbytes == 0:
        return _Mapping(torch.empty(0, dtype=torch.uint8), None, 0)
    if nbytes < 8 * HUGE_PAGE_BYTES:
        mapping = mmap.mmap(-1, nbytes, flags=_PRIVATE)
        return _Mapping(torch.frombuffer(mapping, dtype=torch.uint8), mapping, 0)
    mapping = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=_PRIVATE)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE_BYTES
    assert HUGE_PAGE_BYTES % ALIGNMENT_BYTES == 0
    return _Mapping(memory[start : start + nbytes], mapping, start)


def mapped(nbytes: int) -> Tensor:
    """Returns memory of its own, 4096-aligned, whose pages are freed with the last tensor that shares it."""
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=_PRIVATE), dtype=torch.uint8)


_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
