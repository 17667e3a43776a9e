"""Sums gradients over ranks; each sum lies on the rank that owns the value.

The sum is Ddp's (distributed.ExchangedSum): value by value, each rank's value rounded to the type of the wire, added in
float32 in the order of the ranks. It is made after every micro-batch, because no rank has room for whole gradients, and
added up over micro-batches by the optimizer of the part. So with one micro-batch a rank it is Ddp's, bit by bit.

    backward -> bucket -> all-to-all (part s of every rank's bucket to rank s) -> add, in order -> optimizer of the part
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from spillway.errors import UserError
from spillway.planning.workload import EXCHANGE_PARAMETERS

from ..kernels import dispatch as kernels
from ..tiers.device_ledger import DeviceLedger
from .deepspeed.layout import Layout
from .distributed import Peers


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of one gradient that goes to one rank."""

    name: str
    owner: int
    offset: int
    """In the owner's piece of the parameter."""
    values: Tensor


@dataclass(slots=True)
class Sum:
    """What has come of this rank's piece of one gradient."""

    values: Tensor
    num_values: int = 0


class ReducedGradients:
    """Takes whole gradients from backward; hands sums, float32 and flat, to `owned` as soon as they are complete."""

    def __init__(
        self,
        layout: Layout,
        peers: Peers,
        wire: torch.dtype,
        ledger: DeviceLedger,
        owned: Callable[[str, Tensor], None],
        num_threads: int = 1,
    ) -> None:
        self._layout, self._peers, self._wire, self._owned = layout, peers, wire, owned
        self._ledger, self._num_threads = ledger, num_threads
        num_values = sum(piece.size for pieces in layout.values() for piece in pieces)
        self._room = self._bucket = max(1, min(EXCHANGE_PARAMETERS, num_values) // peers.world.size)
        """Values; all of a bucket may be for one rank, which then gets as many from every rank."""
        wire_bytes = wire.itemsize * self._bucket
        ledger.charge("gradient exchange", wire_bytes * (1 + peers.world.size) + torch.float32.itemsize * self._bucket)
        self._outgoing = torch.empty(self._bucket, dtype=wire)
        self._incoming = torch.empty(self._bucket * peers.world.size, dtype=wire)
        self._own = torch.empty(self._bucket, dtype=torch.float32)
        self._slices: list[Slice] = []
        self._held_bytes = 0
        self._sums: dict[str, Sum] = {}

    def take(self, name: str, gradient: Tensor) -> None:
        """The whole gradient of one micro-batch, complete. The caller never touches it again."""
        flat = gradient.detach().reshape(-1)
        nbytes = flat.numel() * flat.element_size()
        self._ledger.charge("gradients", nbytes)
        for owner, piece in enumerate(self._layout[name]):
            offset = 0
            while offset < piece.size:
                size = min(piece.size - offset, self._room)
                start = piece.offset + offset
                self._slices.append(Slice(name, owner, offset, flat[start : start + size]))
                offset, self._room = offset + size, self._room - size
                if not self._room:
                    self._exchange()
        self._held_bytes += nbytes

    def finish(self) -> None:
        """The micro-batch's backward is over on this rank: exchange what is left. Every rank calls it, each time."""
        self._exchange()
        assert not self._sums, "every piece is whole at the end of a micro-batch"

    def _release(self) -> None:
        self._ledger.release("gradients", self._held_bytes)
        self._held_bytes = 0

    def _exchange(self) -> None:
        """Exchanges the bucket. A gradient that is still being divided stays charged."""
        slices, self._slices, self._room = self._slices, [], self._bucket
        self._check_same(slices)
        if slices:
            self._sum(slices)
        self._release()

    def _sum(self, slices: list[Slice]) -> None:
        world, sizes = self._peers.world, [0] * self._peers.world.size
        for one in slices:
            sizes[one.owner] += one.values.numel()
        sent, offset = self._outgoing[: sum(sizes)], 0
        for one in sorted(slices, key=lambda one: one.owner):
            sent[offset : offset + one.values.numel()].copy_(one.values)
            offset += one.values.numel()
        received, own = self._incoming[: sizes[world.rank] * world.size], self._own[: sizes[world.rank]]
        self._peers.scatter(received, sent, sizes)
        for rank, part in enumerate(torch.split(received, own.numel()) if own.numel() else ()):
            kernels.accumulate(own, part, rank == 0, num_threads=self._num_threads)
        offset = 0
        for one in slices:
            if one.owner == world.rank:
                self._place(one, own[offset : offset + one.values.numel()])
                offset += one.values.numel()

    def _place(self, one: Slice, values: Tensor) -> None:
        """Hand the piece on once it is whole. A slice at the start of a piece begins a new sum."""
        size = self._layout[one.name][one.owner].size
        if one.name not in self._sums:
            self._sums[one.name] = Sum(torch.empty(size, dtype=torch.float32))
            self._ledger.charge("gradients", torch.float32.itemsize * size)
        found = self._sums[one.name]
        found.values[one.offset : one.offset + values.numel()].copy_(values)
        found.num_values += values.numel()
        if found.num_values == size:
            del self._sums[one.name]
            self._owned(one.name, found.values)
            self._ledger.release("gradients", torch.float32.itemsize * size)

    def _check_same(self, slices: list[Slice]) -> None:
        """Raises UserError, on every rank, where ranks bring gradients of different parameters."""
        brought = "\n".join(f"{one.name} {one.owner} {one.offset} {one.values.numel()}" for one in slices)
        if not self._peers.same(xxhash.xxh64_intdigest(brought.encode()) >> 1):
            first = slices[0].name if slices else "no parameter"
            raise UserError(
                "spec.parallelism.strategy: Zero1, Zero2 and Zero3 need gradients in the same order on all ranks, but "
                f"rank {self._peers.world.rank} has a gradient (of {first}) where other ranks have another one. The "
                "model branches by its input or its rank; remove the branch, or use strategy Ddp"
            )
