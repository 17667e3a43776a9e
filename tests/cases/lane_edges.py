"""Finds the edges between operations of CudaLanes by the lines of code that make them, and can leave one edge out."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fakes import fake_streams
from spillway_trainer.model_spill.slots import Contents
from spillway_trainer.tiers import cuda_lanes
from spillway_trainer.tiers.cuda_lanes import CudaLanes, Mark, StreamOperation
from spillway_trainer.tiers.lanes import DONE, Buffer, Event, Lane, QueuedOperation, Region, Submission

Edge = tuple[str, str]
"""(lane and line that made the event, lane and line that wait for it)"""
INSIDE = (__file__, fake_streams.__file__, str(Path(cuda_lanes.__file__).parent))


def line_outside_the_lanes(what: str) -> str:
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(INSIDE):
        assert frame.f_back is not None
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    return f"{what} at {path.parent.name}/{path.name}:{frame.f_lineno} in {frame.f_code.co_qualname}"


def lane_of(end: str) -> str:
    return end.partition(" at ")[0]


def function_of(end: str) -> str:
    return end.partition(" in ")[2]


def place_of(region: Region) -> int:
    """An id of a region's memory, which is the same for a buffer and for its contents."""
    region = getattr(region, "_region", region)  # unwraps fake_streams.Watched
    if isinstance(region, Contents):
        return region._tensor.data_ptr()
    return region.tensor.data_ptr() if isinstance(region, Buffer) else id(region)


class Edges:
    """Records the edges that operations wait for, from `watch` on. All lanes leave out the edge `missing`.

    `early`: releases that do not wait for all users of the region, even if these happened to be complete.
    """

    def __init__(self, missing: Edge | None = None) -> None:
        self.found: dict[Edge, None] = {}
        self.early: list[str] = []
        self._missing = missing
        self._made: dict[int, tuple[Event, str, frozenset[int]]] = {}
        """id -> event, kept so that its id is not reused; lane and line that made it; ids of events that are done once
        it is"""
        self._users: defaultdict[int, set[int]] = defaultdict(set)
        """place_of a region -> ids of the events of operations that use it"""
        self._regions: list[Region] = []
        """kept so that their ids and addresses are not reused"""
        self._last: dict[Lane, int] = {}
        """id of the last event, for lanes that run their operations in order"""
        self._by_luck = False
        self._waited: dict[str, frozenset[int]] = {"host": frozenset(), "compute stream": frozenset()}

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        enqueue, computed, wait, release = CudaLanes.enqueue, CudaLanes.computed, CudaLanes.wait, CudaLanes.release

        def enqueues(lanes: Any, given: Submission) -> Event:
            lane, kept = given.lane, self._kept(given.lane, given.after)
            event = enqueue(lanes, given._replace(after=kept))
            before = self._over(kept) | self._waited["host"]
            if not isinstance(event, StreamOperation):
                before |= self._over_of(self._last.get(lane))
                self._last[lane] = id(event)
            self._name(lane, event, before)
            for region in (*given.reads, *given.writes):
                self._regions.append(region)
                self._users[place_of(region)].add(id(event))
            return event

        def computes(lanes: Any) -> Event:
            event = computed(lanes)
            self._name("mark", event, self._waited["compute stream"])
            return event

        def waits(lanes: Any, event: Event) -> None:
            for kept in self._kept("compute stream", [event]):
                self._by_luck = isinstance(kept, StreamOperation)  # the host may learn by luck that it is complete
                wait(lanes, kept)
                self._by_luck = False
                self._waited["compute stream"] |= self._over([kept])

        def releases(lanes: Any, region: Region, after: Sequence[Event] = ()) -> None:
            kept = self._kept("release", after)
            left = self._users.pop(place_of(region), frozenset()) - self._over(kept) - self._waited["host"]
            self.early += [f"{region.label} is released before {self._made[one][1]} is over" for one in left]
            release(lanes, region, kept)

        for name, function in (("enqueue", enqueues), ("computed", computes), ("wait", waits), ("release", releases)):
            patch.setattr(CudaLanes, name, function)
        for kind in (QueuedOperation, StreamOperation, Mark):
            patch.setattr(kind, "wait", self._heard(kind.wait))

    def _heard(self, wait: Any) -> Any:
        def waits(event: Any) -> None:
            wait(event)
            if not (self._by_luck or threading.current_thread().name.startswith("lane-")):
                self._waited["host"] |= self._over([event])

        return waits

    def _name(self, what: str, event: Event, before: frozenset[int]) -> None:
        self._made[id(event)] = event, line_outside_the_lanes(what), before | {id(event)}

    def _over(self, events: Iterable[Event]) -> frozenset[int]:
        return frozenset().union(*(self._over_of(id(event)) for event in events))

    def _over_of(self, event: int | None) -> frozenset[int]:
        return self._made[event][2] if event in self._made else frozenset()

    def _kept(self, what: str, events: Sequence[Event]) -> list[Event]:
        kept, here = [], line_outside_the_lanes(what)
        for event in events:
            if event is not DONE:
                edge = self._made[id(event)][1], here
                self.found.setdefault(edge)
                if edge == self._missing:
                    continue
            kept.append(event)
        return kept
