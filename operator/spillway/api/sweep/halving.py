"""Successive halving of a sweep: which members continue to which step, which are stopped and why, and the best.

Rounds are held at `objective.halving` steps, at twice as many, at four times as many, and so on. Each compares members
that have all trained that long and lets the better half continue (12 -> 6 -> 3 -> 1), as in the algorithm of Jamieson
and Talwalkar (arXiv 1502.07943). The decisions are a pure function of recorded values, so a sweep that is killed and
resumed decides the same again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from spillway.api.pod import Objective
from spillway.api.progress import MemberProgress, MemberState

METRIC_WORDS = {"EvaluationLoss": "evaluation loss", "Loss": "loss"}


@dataclass(frozen=True, slots=True)
class Contender:
    """A member of the sweep, as rounds compare it."""

    name: str
    num_steps: int
    """Steps that it trains unless a round stops it."""
    failed: bool = False
    """A failed member reports no more values, and no round waits for it. A round for which it had reported a value uses
    that value, so that earlier decisions stay valid; in any other round it ranks behind all members with a value."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value of the objective that a member reported."""

    member: str
    step: int
    """Optimizer steps of the member, including the reported one."""
    value: float
    """May be non-finite; such a value is the worst in either direction."""


@dataclass(frozen=True, slots=True)
class Stop:
    """A round stopped this member."""

    member: str
    step: int
    """Optimizer steps that it trained."""
    reason: str
    """A sentence: "stopped after 20 steps: evaluation loss 5.3100, best 4.9000"."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What follows from the values known so far."""

    until: Mapping[str, int]
    """Member that is neither stopped nor failed, in the order of the list -> the step up to which it may train: that of
    the next round, where it waits for the others, or its last. A member that has reached this step is parked or
    complete."""
    stops: tuple[Stop, ...]
    """Sorted by round, then in the order of the list."""
    best: str
    """Name of the best member: the one that survived the most rounds and, among equals, has the best newest value; "":
    none."""


def round_steps(halving: int | None, num_steps: int) -> tuple[int, ...]:
    """Steps before the last of `num_steps` at which rounds can be held; members must report their values there.

    (10, 100) -> (10, 20, 40, 80); nothing without halving.
    """
    found: list[int] = []
    step = halving or 0
    while 0 < step < num_steps:
        found.append(step)
        step *= 2
    return tuple(found)


def standing(contenders: Sequence[Contender], values: Iterable[Value], objective: Objective) -> Standing:
    """Decides all rounds for which `values` suffice. If one member has several values for a step, the last one counts,
    because a resumed member repeats its steps. A round waits until every remaining member has a value at the round's
    step (or at the member's last step, if it trains fewer). Names of `contenders` must differ."""
    known: dict[str, dict[int, float]] = {one.name: {} for one in contenders}
    for one in values:
        if one.member in known:
            known[one.member][one.step] = one.value
    table = _Table(tuple(contenders), known, objective)
    left, stops, survived = list(contenders), [], dict.fromkeys(known, 0)
    last = max((one.num_steps for one in contenders), default=0)
    next_round: int | None = None
    for step in round_steps(objective.halving, last):
        present = [one for one in left if not one.failed or table.reported(one, step)]
        if len(present) < 2 or all(one.num_steps <= step for one in present):
            break
        if not all(table.reported(one, step) for one in present):
            next_round = step
            break
        kept = table.better_half(left, step)
        stops += table.stops(left, kept, step)
        left = kept
        survived |= {one.name: survived[one.name] + 1 for one in left}
    stopped = {stop.member for stop in stops}
    until = {
        one.name: one.num_steps if next_round is None or one not in left else min(next_round, one.num_steps)
        for one in contenders
        if not one.failed and one.name not in stopped
    }
    return Standing(until, tuple(stops), table.best(survived))


def steps_ahead(members: Iterable[MemberProgress], halving: int | None) -> dict[str, float]:
    """Expected number of remaining steps of each member that continues. It is unknown which members future rounds will
    stop, so steps after a round are weighted by the fraction of members that the round lets continue."""
    known = tuple(members)
    going = [one for one in known if not one.state.is_over]
    last = max((one.num_steps for one in going), default=0)
    undecided = [
        step for step in round_steps(halving, last) if any(one.step < min(step, one.num_steps) for one in going)
    ]
    ahead = dict.fromkeys((one.name for one in going), 0.0)
    share, num_left = 1.0, sum(one.state not in (MemberState.STOPPED, MemberState.FAILED) for one in known)
    for begin, end in pairwise((0, *undecided, last)):
        for one in going:
            ahead[one.name] += share * max(0, min(end, one.num_steps) - max(begin, one.step))
        num_kept = max(1, num_left // 2)
        share, num_left = share * num_kept / max(1, num_left), num_kept
    return ahead


@dataclass(frozen=True, slots=True)
class _Table:
    """The known values, and how they compare."""

    contenders: tuple[Contender, ...]
    values: Mapping[str, Mapping[int, float]]
    objective: Objective

    def reported(self, one: Contender, step: int) -> bool:
        return min(step, one.num_steps) in self.values[one.name]

    def better_half(self, left: Sequence[Contender], step: int) -> list[Contender]:
        """The better half of two or more members, in the order of the list. Sorting is stable: of equal members, the
        earlier one is kept."""
        ranked = sorted(left, key=lambda one: self._rank(self._at(one, step)))
        kept = {one.name for one in ranked[: len(ranked) // 2]}
        return [one for one in left if one.name in kept]

    def stops(self, left: Sequence[Contender], kept: Sequence[Contender], step: int) -> list[Stop]:
        """Stops of those members that are not kept and would otherwise train on."""
        best = min((self._at(one, step) for one in kept), key=self._rank)
        return [
            Stop(one.name, step, self._sentence(step, self._at(one, step), best))
            for one in left
            if one not in kept and not one.failed and one.num_steps > step
        ]

    def best(self, survived: Mapping[str, int]) -> str:
        """The best member by rounds survived, then by newest value. Failed members, and values that are not finite, do
        not count."""
        newest = {
            one.name: found[max(found)]
            for one in self.contenders
            if not one.failed and (found := self.values[one.name])
        }
        finite = {name: value for name, value in newest.items() if math.isfinite(value)}
        return min(finite, key=lambda name: (-survived[name], self._rank(finite[name])), default="")

    def _at(self, one: Contender, step: int) -> float | None:
        """The value of a member in a round. None, the worst of all, for a member that failed before the round."""
        return self.values[one.name].get(min(step, one.num_steps))

    def _rank(self, value: float | None) -> tuple[int, float]:
        """A sort key: smaller is better."""
        if value is None or not math.isfinite(value):
            return (2 if value is None else 1, 0.0)
        return (0, value if self.objective.direction == "Minimize" else -value)

    def _sentence(self, step: int, value: float | None, best: float | None) -> str:
        metric = METRIC_WORDS[self.objective.metric]
        return f"stopped after {step} steps: {metric} {_figure(value)}, best {_figure(best)}"


def _figure(value: float | None) -> str:
    """5.31 -> "5.3100"."""
    return f"{value:.4f}" if value is not None and math.isfinite(value) else "not finite"
