"""Sums gradients over ranks; each sum is on the rank that owns the value.

The sum is that of Ddp (distributed.ExchangedSum), value by value: each rank's value is rounded to the wire type and
added in float32, in the order of the ranks. It is made after every micro-batch, because no rank has room for whole
gradients; the optimizer of the part adds these sums up over micro-batches. So with one micro-batch per rank, it equals
Ddp's bit by bit.

    backward -> bucket -> all-to-all (part s of every rank's bucket to rank s) -> add, in order -> optimizer of the part

A bucket is on its way while backward fills the next one; it is added when that one is sent. On a CUDA device, a whole
segment is exchanged behind the backward of the next one (GradientsBehind).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import xxhash
from torch import Tensor

from spillway.errors import UserError
from spillway.planning.workload import DEVICE_EXCHANGE_PARAMETERS, EXCHANGE_PARAMETERS

from ..kernels import dispatch as kernels
from ..models.chain import CPU
from ..tiers.device_ledger import DeviceLedger
from ..tiers.lanes import Event, Lane, Lanes
from .deepspeed.layout import Layout
from .distributed import Peers


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of one gradient that goes to one rank."""

    name: str
    owner: int
    offset: int
    """Position in the owner's piece of the parameter."""
    values: Tensor


@dataclass(frozen=True, slots=True)
class Sent:
    """A bucket on its way."""

    arrived: Callable[[], None]
    """Waits for `received`."""
    received: Tensor
    """This rank's part of every rank's bucket, in the order of the ranks."""
    own: Sequence[tuple[str, int, int]]
    """What this rank's part consists of: (parameter, position in this rank's piece of it, number of values)."""


@dataclass(slots=True)
class Sum:
    """The part of the sum for this rank's piece of one gradient that has arrived."""

    values: Tensor
    num_values: int = 0


class ReducedGradients:
    """Takes whole gradients from backward and passes sums, float32 and flat, to `owned` as soon as they are
    complete."""

    def __init__(
        self,
        layout: Layout,
        peers: Peers,
        wire: torch.dtype,
        ledger: DeviceLedger,
        owned: Callable[[str, Tensor], None],
        num_threads: int = 1,
        device: torch.device = CPU,
        *,
        largest: int | None = None,
    ) -> None:
        """`device`: where gradients are. `largest`: the most values that are taken before the caller calls `send`, on
        all ranks the same gradients in the same order; None: the caller calls only `finish`, and ranks compare every
        bucket."""
        self._layout, self._peers, self._wire, self._owned = layout, peers, wire, owned
        self._ledger, self._num_threads, self._device, self._compares = ledger, num_threads, device, largest is None
        num_values = largest or sum(piece.size for pieces in layout.values() for piece in pieces)
        most = DEVICE_EXCHANGE_PARAMETERS if device.type == "cuda" else EXCHANGE_PARAMETERS
        world_size = peers.world.size
        self._part = -(-min(most, num_values) // world_size)
        """Number of values for each rank in a bucket."""
        wire_bytes = wire.itemsize * 2 * self._part * world_size
        ledger.charge("gradient exchange", 2 * wire_bytes + torch.float32.itemsize * self._part)
        make = partial(torch.empty, self._part * world_size, dtype=wire, device=device)
        self._buffers = deque((make(), make()) for _ in range(2))
        """(outgoing, incoming) of the next bucket, then of the one on its way."""
        self._own = torch.empty(self._part, dtype=torch.float32, device=device)
        self._rooms = [self._part] * world_size
        """Number of values that the bucket can still take for each rank."""
        self._sent: Sent | None = None
        self._slices: list[Slice] = []
        self._held_bytes = 0
        self._sums: dict[str, Sum] = {}

    def take(self, name: str, gradient: Tensor) -> None:
        """Takes the whole, complete gradient of one micro-batch. The caller must not use it again."""
        nbytes = gradient.numel() * gradient.element_size()
        self._ledger.charge("gradients", nbytes)
        self._cut(name, gradient)
        self._held_bytes += nbytes

    def _cut(self, name: str, gradient: Tensor) -> None:
        """Puts the gradient into buckets, and sends those that are full."""
        flat = gradient.detach().reshape(-1)
        pieces, offsets = self._layout[name], [0] * self._peers.world.size
        while True:
            for owner, piece in enumerate(pieces):
                size, start = min(piece.size - offsets[owner], self._rooms[owner]), piece.offset + offsets[owner]
                if size:
                    self._slices.append(Slice(name, owner, offsets[owner], flat[start : start + size]))
                offsets[owner], self._rooms[owner] = offsets[owner] + size, self._rooms[owner] - size
            if offsets == [piece.size for piece in pieces]:
                break
            self.send()

    def exchange(self, gradients: Mapping[str, Callable[[], Tensor]]) -> None:
        """Exchanges a segment's whole, complete gradients: those that these functions hand over. `finish` comes after
        the last segment."""
        for name, handed_over in gradients.items():
            self.take(name, handed_over())
        self.send()

    def finish(self) -> None:
        """Exchanges what is left when the micro-batch's backward is over on this rank. Every rank calls it after every
        micro-batch."""
        self.send()
        self._add()
        assert not self._sums, "every piece is whole at the end of a micro-batch"

    def _release(self) -> None:
        self._ledger.release("gradients", self._held_bytes)
        self._held_bytes = 0

    def send(self) -> None:
        """Sends the bucket, and adds the one before. A gradient that is still being divided stays charged."""
        slices, self._slices, self._rooms = self._slices, [], [self._part] * self._peers.world.size
        if self._compares:
            self._check_same(slices)
        sent = self._begin(slices) if slices else None
        slices.clear()
        self._release()
        if sent is not None:
            self._add()
            self._sent = sent

    def _begin(self, slices: list[Slice]) -> Sent:
        rank, sizes = self._peers.world.rank, [0] * self._peers.world.size
        for one in slices:
            sizes[one.owner] += one.values.numel()
        outgoing, incoming = self._buffers[0]
        self._buffers.rotate()
        sent, offset = outgoing[: sum(sizes)], 0
        for one in sorted(slices, key=lambda one: one.owner):
            sent[offset : offset + one.values.numel()].copy_(one.values)
            offset += one.values.numel()
        received = incoming[: sizes[rank] * self._peers.world.size]
        own = [(one.name, one.offset, one.values.numel()) for one in slices if one.owner == rank]
        return Sent(self._peers.scatter(received, sent, sizes), received, own)

    def _add(self) -> None:
        """Adds what has arrived of the bucket on its way, if there is one."""
        if self._sent is None:
            return
        arrived, received, pieces = self._sent.arrived, self._sent.received, self._sent.own
        self._sent = None
        arrived()
        own = self._own[: sum(size for *_, size in pieces)]
        for rank, part in enumerate(torch.split(received, own.numel()) if own.numel() else ()):
            kernels.accumulate(own, part, rank == 0, num_threads=self._num_threads)
        for (name, offset, _), values in zip(pieces, torch.split(own, [size for *_, size in pieces]), strict=True):
            self._place(name, offset, values)

    def _place(self, name: str, offset: int, values: Tensor) -> None:
        """Passes the piece on once it is whole. Values at the start of a piece begin a new sum."""
        size = self._layout[name][self._peers.world.rank].size
        if name not in self._sums:
            self._sums[name] = Sum(torch.empty(size, dtype=torch.float32, device=self._device))
            self._ledger.charge("gradients", torch.float32.itemsize * size)
        found = self._sums[name]
        found.values[offset : offset + values.numel()].copy_(values)
        found.num_values += values.numel()
        if found.num_values == size:
            del self._sums[name]
            self._pass_on(name, found.values)

    def _pass_on(self, name: str, values: Tensor) -> None:
        self._owned(name, values)
        self._ledger.release("gradients", torch.float32.itemsize * values.numel())

    def _check_same(self, slices: list[Slice]) -> None:
        """Raises UserError, on every rank, if the ranks' buckets hold gradients of different parameters."""
        brought = "\n".join(f"{one.name} {one.owner} {one.offset} {one.values.numel()}" for one in slices)
        if not self._peers.same(xxhash.xxh64_intdigest(brought.encode()) >> 1):
            first = slices[0].name if slices else "no parameter"
            raise UserError(
                "spec.parallelism.strategy: Zero1, Zero2 and Zero3 need gradients in the same order on all ranks, but "
                f"rank {self._peers.world.rank} has a gradient (of {first}) where other ranks have another one. The "
                "model branches by its input or its rank; remove the branch, or use strategy Ddp"
            )


@dataclass(frozen=True, slots=True)
class Behind:
    """The gradients that lane network exchanges."""

    exchanged: Event
    gradients: dict[str, Tensor]
    """Emptied when the exchange is over, so that their memory can be used again."""
    num_bytes: int
    """Bytes of `gradients`."""
    sums: dict[str, Tensor]
    """This rank's sums of them, valid after `exchanged`."""


class GradientsBehind(ReducedGradients):
    """Exchanges the gradients of one segment on lane network, behind the backward of the next one (CUDA devices)."""

    def __init__(self, lanes: Lanes, *given: Any, **named: Any) -> None:
        """`given`, `named`: what ReducedGradients gets."""
        super().__init__(*given, **named)
        self._lanes = lanes
        self._behind: Behind | None = None

    def exchange(self, gradients: Mapping[str, Callable[[], Tensor]]) -> None:
        """Begins to exchange; compute goes on meanwhile. First passes on the sums of the call before."""
        whole = {name: handed_over() for name, handed_over in gradients.items()}
        nbytes = sum(one.numel() * one.element_size() for one in whole.values())
        self._ledger.charge("gradients", nbytes)
        self.collect()
        rank, float32 = self._peers.world.rank, torch.float32
        sizes = {name: size for name in whole if (size := self._layout[name][rank].size)}
        self._ledger.charge("gradients", float32.itemsize * sum(sizes.values()))
        sums = {name: torch.empty(size, dtype=float32, device=self._device) for name, size in sizes.items()}
        sent = self._wire.itemsize * sum(piece.size for name in whole for piece in self._layout[name])
        exchanged = self._lanes.submit(
            Lane.NETWORK,
            partial(self._exchange, whole, sums),
            after=[self._lanes.computed()],
            nbytes=sent * (self._peers.world.size - 1) // self._peers.world.size,
            label=f"exchange {next(iter(whole), 'nothing')} and others",
        )
        self._behind = Behind(exchanged, whole, nbytes, sums)

    def _exchange(self, gradients: Mapping[str, Tensor], sums: Mapping[str, Tensor]) -> None:
        self._sums = {name: Sum(values) for name, values in sums.items()}
        for name, gradient in gradients.items():
            self._cut(name, gradient)
        self.send()
        self._add()

    def collect(self) -> None:
        """Passes on the sums of the last `exchange`: what compute does next comes after that exchange."""
        if self._behind is None:
            return
        found, self._behind = self._behind, None
        self._lanes.wait(found.exchanged)
        found.gradients.clear()
        self._ledger.release("gradients", found.num_bytes)
        for name in [*found.sums]:
            super()._pass_on(name, found.sums.pop(name))

    def _pass_on(self, name: str, values: Tensor) -> None:
        """Does nothing: `collect` passes sums on."""

    def finish(self) -> None:
        self.collect()
