"""Which gradients are exchanged together, in which order, and when: the same on ranks whose backwards differ."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, cast

import pytest
from torch import Tensor, ones

from harness.depth import at
from spillway_trainer.ending import PeerLost
from spillway_trainer.optimizer.plain import WholeSum
from spillway_trainer.parallel.backward_exchange import BackwardExchange
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.lanes import CpuLanes, Event, Region, Submission

SIZES = {"embedding": 9, "up": 4, "down": 5, "norm": 1, "head": 6}
MICRO_BATCHES = 2
BACKWARD = ["head", "norm", "down", "up", "embedding"]


class Optimizer:
    """Has one value of each use."""

    def __init__(self) -> None:
        self.has: set[str] = set()

    def arrived(self) -> Collection[str]:
        return frozenset(self.has)

    def parts(self, names: Sequence[str]) -> list[WholeSum]:
        assert self.has.issuperset(names), "what has not arrived is exchanged"
        return [WholeSum(ones(SIZES[name]), Region(0, name)) for name in names]


class Total:
    bucket = 8

    def __init__(self, work: Callable[[Sequence[int]], None]) -> None:
        self._work = work

    def __call__(self, gradients: Iterable[Tensor]) -> None:
        self._work([gradient.numel() for gradient in gradients])

    def sent_bytes(self, num_values: int) -> int:
        return 6 * num_values


class Rank:
    """What one rank exchanges, in order, as sizes."""

    def __init__(self, work: Callable[[Sequence[int]], None] | None = None) -> None:
        self.exchanged: list[Sequence[int]] = []
        host, ledger = HostSlab(0), DeviceLedger(None)
        self.lanes, self.optimizer = CpuLanes(host, ledger), Optimizer()
        total = Total(work or self.exchanged.append)
        self.exchange = BackwardExchange(total, cast(Any, self.optimizer), self.lanes, SIZES, MICRO_BATCHES)

    def take(self, names: Sequence[str]) -> None:
        for name in names:
            self.optimizer.has.add(name)
            self.exchange.taken(name)

    def end(self, arrived: Collection[str] = ()) -> None:
        """`arrived`: on other ranks."""
        self.optimizer.has |= {*arrived}
        self.exchange()
        self.optimizer.has.clear()

    def settle(self) -> None:
        """Return when all that was submitted is done."""
        self.lanes.close()


def warm(rank: Rank) -> Rank:
    """After one step, which tells it what comes."""
    rank.take(BACKWARD * MICRO_BATCHES)
    rank.end()
    rank.exchanged.clear()
    return rank


def test_the_first_step_exchanges_everything_at_its_end() -> None:
    rank = Rank()
    rank.take(BACKWARD * MICRO_BATCHES)
    rank.settle()
    assert rank.exchanged == []
    rank.end()
    assert rank.exchanged == [[6, 1, 5], [4, 9]]


def test_what_fills_a_bucket_is_exchanged_in_the_last_backward() -> None:
    rank = warm(Rank())
    rank.take(BACKWARD)
    rank.take(["head", "norm", "down", "up"])
    rank.settle()
    assert rank.exchanged == [[6, 1, 5]]
    rank.take(["embedding"])
    rank.settle()
    assert rank.exchanged == [[6, 1, 5], [4, 9]]


def test_bytes_sent_and_seconds_are_those_of_the_network_lane() -> None:
    rank = warm(Rank())
    assert rank.lanes.moved_bytes() == {"network": 6 * sum(SIZES.values())}
    assert rank.lanes.busy_seconds().keys() == {"network"}


def test_a_use_that_is_not_final_holds_up_those_behind_it() -> None:
    rank = warm(Rank())
    rank.take(BACKWARD)
    rank.take(["head", "down", "up", "embedding"])  # no second one of norm
    rank.settle()
    assert rank.exchanged == []
    rank.end()
    assert rank.exchanged == [[6, 1, 5], [4, 9]]


@pytest.mark.parametrize("seed", range(at(20, 100, 1000)))
def test_ranks_that_differ_exchange_the_same_in_the_same_order(seed: int) -> None:
    """Each use comes 0 to 2 times on each rank, in any order: else ranks would wait for one another."""
    chosen = random.Random(seed)
    ranks = [warm(Rank()), warm(Rank()), warm(Rank())]
    for _ in range(4):
        takes = [chosen.choices(BACKWARD, k=chosen.randrange(12)) for _ in ranks]
        takes = [[name for at, name in enumerate(of) if of[:at].count(name) < MICRO_BATCHES] for of in takes]
        for rank, names in zip(ranks, takes, strict=True):
            rank.take(names)
        assert not any(rank.exchange.is_late for rank in ranks)
        for rank in ranks:
            rank.end({name for names in takes for name in names})
        first, *others = [rank.exchanged for rank in ranks]
        assert all(other == first for other in others)
        assert sum(sum(sizes) for sizes in first) == sum(SIZES[name] for name in {n for of in takes for n in of})
        for rank in ranks:
            rank.exchanged.clear()


def test_a_gradient_after_its_sum_was_begun_is_late_once() -> None:
    rank = warm(Rank())
    for is_late in (True, False):
        rank.take([*BACKWARD * MICRO_BATCHES, "down"])
        assert rank.exchange.is_late == is_late
        rank.end()


def test_operations_follow_one_another_and_what_adds_the_gradients_up() -> None:
    """They share buffers, and lanes order nothing by themselves."""
    rank, submitted = warm(Rank()), list[Submission]()
    events = list[Event]()
    enqueue = rank.lanes.enqueue

    def kept(given: Submission) -> Event:
        submitted.append(given)
        events.append(enqueue(given))
        return events[-1]

    rank.lanes.enqueue = kept  # type: ignore[method-assign]
    rank.take(BACKWARD * MICRO_BATCHES)
    rank.end()
    assert len(submitted) == 2
    assert events[0] in submitted[1].after
    assert [region.label for region in submitted[0].writes] == ["head", "norm", "down"]


def test_a_rank_that_is_lost_ends_the_step_and_nothing_more_is_sent() -> None:
    sent = list[Sequence[int]]()

    def lose(sizes: Sequence[int]) -> None:
        sent.append(sizes)
        raise PeerLost("another rank ended")

    rank = Rank(lose)
    rank.take(BACKWARD * MICRO_BATCHES)
    with pytest.raises(PeerLost, match="another rank ended"):
        rank.end()
    assert sent == [[6, 1, 5]]
