"""The ranks of a run: this process's place among them, and collective operations. `OneRank` is a run of one.

docs/ranks.md says what all ranks agree on, and when. distributed.py has the ranks that talk to each other.
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
"""Allocates uint8 host memory for the whole run."""


@dataclass(frozen=True, slots=True)
class World:
    """Which of how many ranks this process is, and where they meet: torchrun's environment variables."""

    rank: int = 0
    local_rank: int = 0
    """Among the ranks of this node."""
    size: int = 1
    master_address: str = "127.0.0.1"
    """Host of rank 0."""
    master_port: int = 0
    num_nodes: int = 1

    @staticmethod
    def of(environment: Mapping[str, str]) -> World:
        """One rank without variables. Raises UserError if they make no sense."""
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
        """Rank 0 decides, reads and writes for all."""
        return self.rank == 0

    @property
    def corpus_turn(self) -> int:
        """0 for rank 0; 1 for the first rank of every other node, which may have a disk of its own; 2 for the rest."""
        return min(self.rank, 1) + min(self.local_rank, 1)

    def share(self, count: int) -> range:
        """Which of `count` micro-batches per rank are this rank's, by their number in the world: dealt out in turn."""
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
    """The values of all ranks, equally many each, in the order of the micro-batches that `World.share` dealt out."""
    return [value for in_turn in zip(*per_rank, strict=True) for value in in_turn]


class GradientSum(Protocol):
    """Sums gradients over the ranks."""

    bucket: int
    """Values that are exchanged at once."""

    def __call__(self, gradients: Iterable[Tensor]) -> None:
        """`gradients` are flat float32 accumulators, the same sizes in the same order on every rank; summed in place,
        to the same bits everywhere. Raises PeerLost."""

    def sent_bytes(self, num_values: int) -> int:
        """To the other ranks, for so many values."""


class Exchange(Protocol):
    """Sums all gradients of a step over the ranks; part of it may be done in backward."""

    @property
    def is_late(self) -> bool:
        """A gradient has come whose sum was begun without it: the step must be repeated."""

    def __call__(self) -> None:
        """Return when all is summed; the same uses have arrived on every rank. Raises PeerLost."""


class NoExchange:
    """One rank's gradients are the sum; ranks with shards of a model sum their own."""

    is_late = False

    def __call__(self) -> None:
        return


NO_EXCHANGE = NoExchange()


class Ranks(Protocol):
    """What the ranks of one run do together. Every rank makes the same calls in the same order.

    `first`, `tell` and `agree` may wait for long (a corpus, a checkpoint) and let a signal through meanwhile; the rest
    is part of the step and bounded by a time limit. Each raises PeerLost when a rank that it needs is gone.
    """

    @property
    def world(self) -> World: ...

    def first(self, label: str, work: Callable[[], Result]) -> Result | None:
        """Rank 0 does `work`; the others wait for it and get None. Its SpillwayError is raised on every rank."""

    def tell(self, label: str, work: Callable[[], str]) -> str:
        """As `first`, and every rank gets the result."""

    def agree(self, what: str, value: str) -> None:
        """Wait for all ranks. Raises UserError on every rank unless all have the same `value`."""

    def share(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Rank 0's named float32 tensors, one after the other, on every rank; the others' `tensors` are not read."""

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """The values of every rank, by rank; equally many on each."""

    def gradient_sum(
        self, num_values: int, wire: torch.dtype, buffer: TakeBuffer, num_threads: int
    ) -> GradientSum | None:
        """Takes its buffers now, for gradients of `num_values` values in all that travel as `wire`. None: there is
        nothing to add. May be called while other operations go on."""


@dataclass(frozen=True, slots=True)
class OneRank:
    """A run without other ranks: nothing is exchanged, nothing is rounded."""

    world: World = World()

    def first(self, label: str, work: Callable[[], Result]) -> Result | None:
        return work()

    def tell(self, label: str, work: Callable[[], str]) -> str:
        return work()

    def agree(self, what: str, value: str) -> None:
        return

    def share(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        yield from tensors

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        return [list(values)]

    def gradient_sum(self, num_values: int, wire: torch.dtype, buffer: TakeBuffer, num_threads: int) -> None:
        return None


ONE_RANK = OneRank()
