"""The ranks of a run: this process's place among them, and collective operations. `OneRank` is a run of one.

docs/ranks.md says what all ranks agree on, and when. parallel/distributed.py implements ranks that communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from spillway.errors import UserError

Result = TypeVar("Result")
TakeBuffer = Callable[[int], Tensor]
"""Allocates uint8 memory for the whole run."""


@dataclass(frozen=True, slots=True)
class World:
    """This process's rank, the number of ranks, and where they meet, from torchrun's environment variables."""

    rank: int = 0
    local_rank: int = 0
    """Number among the ranks of this node."""
    size: int = 1
    master_address: str = "127.0.0.1"
    """Host of rank 0."""
    master_port: int = 0
    num_nodes: int = 1

    @staticmethod
    def of(environment: Mapping[str, str]) -> World:
        """Reads the variables; a process without them is the only rank. Raises UserError if they make no sense."""
        rank, size = _number(environment, "RANK", 0), _number(environment, "WORLD_SIZE", 1)
        if rank >= size:
            raise UserError(
                f"environment variable RANK = {rank}, but WORLD_SIZE = {size}: RANK must be from 0 to WORLD_SIZE - 1; "
                "start the trainer with `python -m spillway_trainer.launch`, which sets both"
            )
        return World(
            rank=rank,
            local_rank=_number(environment, "LOCAL_RANK", rank),
            size=size,
            master_address=environment.get("MASTER_ADDR", "127.0.0.1"),
            master_port=_number(environment, "MASTER_PORT", 0),
            num_nodes=_number(environment, "GROUP_WORLD_SIZE", 1),
        )

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which decides, reads and writes for all."""
        return self.rank == 0

    @property
    def corpus_turn(self) -> int:
        """When this rank may build the corpus. 0: rank 0; 1: the first rank of every other node, which may have a disk
        of its own; 2: all others."""
        return min(self.rank, 1) + min(self.local_rank, 1)

    def share(self, count: int) -> range:
        """Returns the numbers, among those of all ranks, of this rank's `count` micro-batches: they are dealt out in
        turn."""
        return range(self.rank, count * self.size, self.size)


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    if not text.isdecimal():
        raise UserError(
            f"environment variable {name} is {text!r}, but must be a whole number, 0 or more; start the trainer "
            "with `python -m spillway_trainer.launch`, which sets it"
        )
    return int(text)


def dealt(per_rank: Sequence[Sequence[float]]) -> list[float]:
    """Returns the values of all ranks (the same number from each) in the order of the micro-batches that `World.share`
    dealt out."""
    return [value for in_turn in zip(*per_rank, strict=True) for value in in_turn]


class GradientSum(Protocol):
    """Sums gradients over the ranks."""

    bucket: int
    """Number of values that are exchanged at once."""

    def __call__(self, gradients: Iterable[Tensor]) -> None:
        """Sums `gradients` in place, to the same bits on every rank. They are flat float32 accumulators, of the same
        sizes and in the same order on every rank. Raises PeerLost."""

    def sent_bytes(self, num_values: int) -> int:
        """Returns the bytes that this rank sends to the others for `num_values` values."""


class Exchange(Protocol):
    """Sums all gradients of a step over the ranks; part of the sum may run during backward."""

    @property
    def is_late(self) -> bool:
        """Whether a gradient came after its sum had begun without it: the step must then be repeated."""

    def __call__(self) -> None:
        """Returns when everything is summed. The same uses must have arrived on every rank. Raises PeerLost."""


class NoExchange:
    """For one rank, whose gradients are the sum, and for ranks with shards of a model, which sum their own
    gradients."""

    is_late = False

    def __call__(self) -> None:
        return


NO_EXCHANGE = NoExchange()


class Ranks(Protocol):
    """What the ranks of one run do together. Every rank makes the same calls in the same order.

    `first`, `tell`, `each` and `agree` may wait long (for a corpus or a checkpoint), and a signal interrupts them; all
    others are part of a step and have a time limit. Each raises PeerLost if a rank that it needs is gone.
    """

    @property
    def world(self) -> World: ...

    def first(self, label: str, work: Callable[[], Result]) -> Result | None:
        """Rank 0 does `work`; the others wait for it and get None. If it raises a SpillwayError, every rank raises
        it."""

    def tell(self, label: str, work: Callable[[], str]) -> str:
        """Like `first`, but every rank gets the result."""

    def each(self, label: str, work: Callable[[], str]) -> list[str]:
        """Every rank does `work`, and gets the results of all, in the order of ranks. If some raise a SpillwayError,
        every rank raises that of the first of them."""

    def agree(self, what: str, value: str) -> None:
        """Wait for all ranks. Raises UserError on every rank unless all have the same `value`."""

    def share(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields rank 0's named float32 tensors, one after another, on every rank; the others' `tensors` are not
        read."""

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Returns the values of every rank, in the order of ranks; each gives the same number of values."""

    def gradient_sum(
        self, num_values: int, wire: torch.dtype, buffer: TakeBuffer, num_threads: int, device: torch.device
    ) -> GradientSum | None:
        """Returns a sum of gradients of `num_values` values in total, which are sent as `wire`, and allocates its
        buffers now; None if there is nothing to add. `device`: where the buffers are. May be called while other
        operations are running."""


@dataclass(frozen=True, slots=True)
class OneRank:
    """A run without other ranks: nothing is exchanged, nothing is rounded."""

    world: World = World()

    def first(self, label: str, work: Callable[[], Result]) -> Result | None:
        return work()

    def tell(self, label: str, work: Callable[[], str]) -> str:
        return work()

    def each(self, label: str, work: Callable[[], str]) -> list[str]:
        return [work()]

    def agree(self, what: str, value: str) -> None:
        return

    def share(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        yield from tensors

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        return [list(values)]

    def gradient_sum(
        self, num_values: int, wire: torch.dtype, buffer: TakeBuffer, num_threads: int, device: torch.device
    ) -> None:
        return None


ONE_RANK = OneRank()
