"""Memory that a technique allocates before the first step and holds for the run: parts and rings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spillway.plan import Tier

from .device_ledger import DeviceLedger
from .lanes import Buffer, Event, Lanes, Region

TORCH_ALIGNMENT_BYTES = 64
"""The alignment of torch's own allocator. Memory that stands in for a tensor's own has it, too, because a kernel may
take another path for less, and give other bits."""


def padded(nbytes: int) -> int:
    return -(-nbytes // TORCH_ALIGNMENT_BYTES) * TORCH_ALIGNMENT_BYTES


def as_bytes(flat: Tensor) -> Tensor:
    """Returns a uint8 view of a flat contiguous tensor."""
    return flat.view(torch.uint8)


@dataclass(slots=True)
class RingSlot:
    """One buffer of a ring. Its next writer must run after the events in `free`."""

    buffer: Buffer
    free: tuple[Event, ...] = ()


class Ring:
    """Buffers of equal size, taken in turn. The number is bounded: the writer of a slot waits, by events, for its last
    reader."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._slots = [RingSlot(buffer) for buffer in buffers]
        self._next = 0

    def __len__(self) -> int:
        return len(self._slots)

    def take(self) -> RingSlot:
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        return slot


class MemorySlice(Region):
    """A region whose memory belongs to a larger piece; `tensor` is uint8."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor, label: str) -> None:
        super().__init__(tensor.numel(), label)
        self.tensor = tensor


class Arena:
    """Memory taken before the first step and held until the lanes close.

    Memory that copies read or write (host memory, slots) is acquired from the lanes. Memory that only the compute lane
    uses (resident states, device accumulators) is plain device memory, charged to the ledger under its purpose.
    """

    def __init__(self, lanes: Lanes, ledger: DeviceLedger, device: torch.device) -> None:
        self._lanes, self._ledger, self._device = lanes, ledger, device
        self._held: Counter[Tier] = Counter()

    def parts(self, tier: Tier, sizes_bytes: Sequence[int], purpose: str) -> list[MemorySlice]:
        """Returns consecutive parts of one piece of memory, each a region of its own; sizes are multiples of 64."""
        nbytes = sum(sizes_bytes)
        if not nbytes:
            return []
        self._held[tier] += nbytes
        whole = self._on_device(nbytes, purpose) if tier is Tier.DEVICE else self._on_host(nbytes, purpose)
        return [
            MemorySlice(part, f"{purpose} {index}") for index, part in enumerate(torch.split(whole, list(sizes_bytes)))
        ]

    def ring(self, tier: Tier, num_slots: int, nbytes: int, label: str) -> Ring:
        """Returns a ring of `num_slots` buffers of `nbytes` each."""
        self._held[tier] += num_slots * nbytes
        return Ring([self._lanes.acquire(tier, nbytes, f"{label} {index}") for index in range(num_slots)])

    def held_bytes(self) -> dict[str, int]:
        return {tier.value: self._held[tier] for tier in (Tier.DEVICE, Tier.HOST)}

    def _on_host(self, nbytes: int, purpose: str) -> Tensor:
        return self._lanes.acquire(Tier.HOST, nbytes, purpose).tensor

    def _on_device(self, nbytes: int, purpose: str) -> Tensor:
        self._ledger.charge(purpose, nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
