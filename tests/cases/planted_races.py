"""Lanes that leave out one kind of edge, like a schedule with that defect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spillway.plan import Tier
from spillway_trainer.tiers.lanes import DONE, Buffer, Event, Lane, Lanes, Region, Submission

Edges = Sequence[Event]


@dataclass(frozen=True, slots=True)
class Defect:
    """A defect of the operations of `lane` whose label starts with `label`: of their `after` events, only those that
    `keep` returns are left."""

    name: str
    lane: Lane
    label: str
    keep: Callable[[Edges], Edges]

    def __str__(self) -> str:
        return self.name


class LanesWithDefect(Lanes):
    """Behaves like `lanes`, except that operations of the defect lose edges; `dropped` counts these edges."""

    def __init__(self, lanes: Lanes, defect: Defect) -> None:
        self._lanes, self._defect = lanes, defect
        self.dropped = 0

    def enqueue(self, given: Submission) -> Event:
        if given.lane is self._defect.lane and given.label.startswith(self._defect.label):
            kept = self._defect.keep(given.after)
            self.dropped += len(given.after) - len(kept)
            given = given._replace(after=kept)
        return self._lanes.enqueue(given)

    def acquire(self, tier: Tier, nbytes: int, label: str) -> Buffer:
        return self._lanes.acquire(tier, nbytes, label)

    def release(self, region: Region, after: Sequence[Event] = ()) -> None:
        self._lanes.release(region, after)

    def reclaim(self) -> bool:
        return self._lanes.reclaim()

    def compute(self, *, reads: Sequence[Region] = (), writes: Sequence[Region] = (), label: str = "") -> None:
        self._lanes.compute(reads=reads, writes=writes, label=label)

    def computed(self) -> Event:
        return self._lanes.computed()

    def wait(self, event: Event) -> None:
        self._lanes.wait(event)

    def moved_bytes(self) -> dict[str, int]:
        return self._lanes.moved_bytes()

    def stalled_seconds(self) -> float:
        return self._lanes.stalled_seconds()

    def busy_seconds(self) -> dict[str, float]:
        return self._lanes.busy_seconds()

    def close(self) -> None:
        self._lanes.close()


class LanesThatLose(LanesWithDefect):
    """The operation with this label reports completion but never runs, as in the published implementation."""

    def __init__(self, lanes: Lanes, lane: Lane, label: str) -> None:
        super().__init__(lanes, Defect("lost", lane, label, lambda after: after))

    def enqueue(self, given: Submission) -> Event:
        if given.lane is self._defect.lane and given.label == self._defect.label:
            self.dropped += 1
            return DONE
        return self._lanes.enqueue(given)


class LanesThatGoOn(LanesWithDefect):
    """The compute lane waits for nothing."""

    def __init__(self, lanes: Lanes) -> None:
        super().__init__(lanes, Defect("goes on", Lane.COMPUTE, "", lambda after: after))

    def wait(self, event: Event) -> None:
        self.dropped += 1
