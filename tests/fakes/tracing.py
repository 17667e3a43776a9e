"""TracingLanes: tests of the schedule itself, in virtual time, without a GPU.

Happens-before comes only from `after` edges, host waits and the compute lane's own order (the law of lanes.py), so a
schedule that has no races here has none on any lanes. Tests compare the makespan with its bound, the busiest lane's
seconds.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from weakref import WeakKeyDictionary

from spillway.plan import Tier
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.lanes import Buffer, Event, Lane, Lanes, Region, Submission, acquire, kept_error
from spillway_trainer.tiers.releases import Releases


class RaceKind(StrEnum):
    READ_BEFORE_WRITE = "read before its write is complete"
    READ_OF_NOTHING = "read of a buffer that nothing has written"
    WRITE_UNDER_READ = "write while a read is in flight"
    WRITE_OVER_WRITE = "write while a write is in flight"
    RELEASE_IN_FLIGHT = "release that does not wait for a user"
    USE_AFTER_RELEASE = "use after release"


@dataclass(frozen=True, slots=True)
class Race:
    """Two operations on one region without an order between them."""

    kind: RaceKind
    region: str
    first: str
    """label of the operation that is in flight"""
    second: str
    """label of the operation, or release, that came too early"""

    def __str__(self) -> str:
        return f"{self.region}: {self.kind}: {self.second!r} against {self.first!r}"


@dataclass(frozen=True, slots=True)
class TracedSchedule:
    """Races and virtual times of a traced run at the given rates."""

    races: tuple[Race, ...]
    makespan_seconds: float
    busy_seconds: dict[Lane, float]

    @property
    def bound_seconds(self) -> float:
        """Seconds of the busiest lane; no schedule of the same operations can end sooner."""
        return max(self.busy_seconds.values(), default=0.0)


@dataclass(frozen=True, slots=True)
class CompletedSet:
    """A set of operation numbers that are known to be complete: all below `floor`, and floor + i if bit i of `mask` is
    set."""

    floor: int = 0
    mask: int = 0

    def knows(self, number: int) -> bool:
        return number < self.floor or bool(self.mask >> (number - self.floor) & 1)

    def joined(self, other: CompletedSet) -> CompletedSet:
        low, high = (self, other) if self.floor <= other.floor else (other, self)
        mask = high.mask | (low.mask >> (high.floor - low.floor))
        complete = (~mask & (mask + 1)).bit_length() - 1  # number of trailing ones; the floor rises by it
        return CompletedSet(high.floor + complete, mask >> complete)

    def including(self, number: int) -> CompletedSet:
        if number < self.floor:
            return self
        return self.joined(CompletedSet(self.floor, 1 << (number - self.floor)))


@dataclass(slots=True)
class Accesses:
    """The last write of a region and the reads since, as operation numbers."""

    write: int | None = None
    reads: list[int] = field(default_factory=list)
    released_by: str | None = None


class TracedEvent:
    """An event that is complete at virtual time `end_seconds`; waiting for it advances the host to that time."""

    __slots__ = ("_error", "_lanes", "end_seconds", "past")

    def __init__(
        self, lanes: TracingLanes, past: CompletedSet, end_seconds: float, error: BaseException | None
    ) -> None:
        self._lanes = lanes
        self._error = error
        self.past = past
        self.end_seconds = end_seconds

    @property
    def done(self) -> bool:
        return self.end_seconds <= self._lanes.host_seconds

    def wait(self) -> None:
        self._lanes.host_waits(self)
        self.raise_error()

    def raise_error(self) -> None:
        if self._error is not None:
            raise copy.copy(self._error)


class TracingLanes(Lanes):
    """Lanes in virtual time: an operation of n bytes occupies its lane for n / rate seconds (0 without a rate).

    With `run` the work is done at once, in submission order, so that a real training step can be traced; without it,
    only the schedule is traced. Races are checked per region: operations that may work on different parts of one buffer
    at the same time name a Region for each part.
    """

    direct_io = False

    def __init__(
        self,
        host: HostSlab,
        ledger: DeviceLedger,
        bytes_per_second: Mapping[Lane, float],
        *,
        run: bool = True,
    ) -> None:
        self._host, self._ledger = host, ledger
        self._rates = dict(bytes_per_second)
        self._runs = run
        self._releases = Releases()
        self._moved: Counter[str] = Counter()
        self._busy: dict[Lane, float] = dict.fromkeys(Lane, 0.0)
        self._free_at: dict[Lane, float] = dict.fromkeys(Lane, 0.0)
        self._labels: list[str] = []
        self._accesses: WeakKeyDictionary[Region, Accesses] = WeakKeyDictionary()
        self._races: list[Race] = []
        self._host_past = CompletedSet()
        self._compute_past = CompletedSet()
        self.host_seconds = 0.0
        host.reclaim = ledger.reclaim = self.reclaim

    def schedule(self) -> TracedSchedule:
        """Races, makespan and busy seconds of everything submitted until now."""
        return TracedSchedule(tuple(self._races), max(self._free_at.values()), dict(self._busy))

    def set_rate(self, lane: Lane, bytes_per_second: float) -> None:
        """Sets the rate of a lane, for operations that are submitted from now on."""
        self._rates[lane] = bytes_per_second

    def acquire(self, tier: Tier, nbytes: int, label: str) -> Buffer:
        return acquire(self._host, self._ledger, tier, nbytes, label)

    def release(self, region: Region, after: Sequence[Event] = ()) -> None:
        known = self._after(self._host_past, after)
        accesses = self._of(region)
        for number in (*accesses.reads, *([] if accesses.write is None else [accesses.write])):
            if not known.knows(number):
                self._report(RaceKind.RELEASE_IN_FLIGHT, region, number, f"release of {region.label}")
        accesses.released_by = f"release of {region.label}"
        self._releases.add(region, after)

    def reclaim(self) -> bool:
        return self._releases.wait_for_one()

    def enqueue(self, given: Submission) -> Event:
        lane, after = given.lane, given.after
        self._moved[lane.value] += given.nbytes
        past = self._record(self._after(self._host_past, after), given.reads, given.writes, given.label or lane.value)
        ready = max((event.end_seconds for event in after if isinstance(event, TracedEvent)), default=0.0)
        return TracedEvent(self, past, self._occupy(lane, ready, given.nbytes), self._run(given.work, after))

    def compute(self, *, reads: Sequence[Region] = (), writes: Sequence[Region] = (), label: str = "") -> None:
        past = self._compute_past.joined(self._host_past)
        self._compute_past = self._record(past, reads, writes, label or "compute")
        self._occupy(Lane.COMPUTE, 0.0, sum(region.nbytes for region in (*reads, *writes)))

    def computed(self) -> Event:
        return TracedEvent(self, self._compute_past, self._free_at[Lane.COMPUTE], None)

    def wait(self, event: Event) -> None:
        assert isinstance(event, TracedEvent)
        self._compute_past = self._compute_past.joined(event.past)
        self._free_at[Lane.COMPUTE] = max(self._free_at[Lane.COMPUTE], event.end_seconds)
        event.raise_error()

    def host_waits(self, event: TracedEvent) -> None:
        """Blocks the host until `event`: everything that it submits from now on comes after the event."""
        self._host_past = self._host_past.joined(event.past)
        self.host_seconds = max(self.host_seconds, event.end_seconds)
        self._releases.sweep()

    def moved_bytes(self) -> dict[str, int]:
        return dict(self._moved)

    def stalled_seconds(self) -> float:
        """Virtual seconds for which the compute lane was idle before the end of its last operation."""
        return self._free_at[Lane.COMPUTE] - self._busy[Lane.COMPUTE]

    def busy_seconds(self) -> dict[str, float]:
        """Lane -> virtual seconds for which it was busy."""
        return {lane.value: seconds for lane, seconds in self._busy.items()}

    def close(self) -> None:
        while self._releases.wait_for_one():
            pass

    def _after(self, past: CompletedSet, after: Sequence[Event]) -> CompletedSet:
        for event in after:
            assert isinstance(event, TracedEvent)
            past = past.joined(event.past)
        return past

    def _occupy(self, lane: Lane, ready_seconds: float, nbytes: int) -> float:
        """Occupies the lane with `nbytes`, not before `ready_seconds`; returns the virtual time of completion."""
        rate = self._rates.get(lane)
        seconds = nbytes / rate if rate else 0.0
        self._busy[lane] += seconds
        self._free_at[lane] = max(self._free_at[lane], self.host_seconds, ready_seconds) + seconds
        return self._free_at[lane]

    def _run(self, work: Callable[[], None], after: Sequence[Event]) -> BaseException | None:
        if not self._runs:
            return None
        try:
            for event in after:
                assert isinstance(event, TracedEvent)
                event.raise_error()
            work()
        except BaseException as error:
            return kept_error(error)
        return None

    def _record(
        self, past: CompletedSet, reads: Sequence[Region], writes: Sequence[Region], label: str
    ) -> CompletedSet:
        """Checks the accesses of a new operation whose predecessors are `past`; returns the past including the
        operation."""
        number = len(self._labels)
        self._labels.append(label)
        for region in reads:
            self._read(region, number, past)
        for region in writes:
            self._write(region, number, past)
        return past.including(number)

    def _read(self, region: Region, number: int, past: CompletedSet) -> None:
        accesses = self._of(region)
        self._check_released(accesses, region, number)
        if accesses.write is None:
            if isinstance(region, Buffer):
                self._report(RaceKind.READ_OF_NOTHING, region, number, self._labels[number])
        elif not past.knows(accesses.write):
            self._report(RaceKind.READ_BEFORE_WRITE, region, accesses.write, self._labels[number])
        accesses.reads.append(number)

    def _write(self, region: Region, number: int, past: CompletedSet) -> None:
        accesses = self._of(region)
        self._check_released(accesses, region, number)
        if accesses.write is not None and not past.knows(accesses.write):
            self._report(RaceKind.WRITE_OVER_WRITE, region, accesses.write, self._labels[number])
        for read in accesses.reads:
            if read != number and not past.knows(read):
                self._report(RaceKind.WRITE_UNDER_READ, region, read, self._labels[number])
        accesses.write, accesses.reads = number, []

    def _check_released(self, accesses: Accesses, region: Region, number: int) -> None:
        if accesses.released_by is not None:
            self._races.append(
                Race(RaceKind.USE_AFTER_RELEASE, region.label, accesses.released_by, self._labels[number])
            )

    def _report(self, kind: RaceKind, region: Region, first: int, second: str) -> None:
        self._races.append(Race(kind, region.label, self._labels[first], second))

    def _of(self, region: Region) -> Accesses:
        accesses = self._accesses.get(region)
        if accesses is None:
            accesses = self._accesses[region] = Accesses()
        return accesses
