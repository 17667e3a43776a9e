"""Streams without a device: each tracks what comes before its next work, so that races are found.

Every host thread and every stream has a vector clock, which tracks happens-before. A launch comes after everything that
the launching thread knows; `wait` and `synchronize` join the clock that an event has recorded; threads pass their
clocks on by threading.Event and SimpleQueue (`handing_over`). Work is done at once, so its results are right in any
case: only the clocks tell whether a device would have had to keep that order.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor

from spillway_trainer.tiers import cuda_lanes, lanes
from spillway_trainer.tiers.cuda_lanes import CudaLanes
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.lanes import Event, Region, Submission

COMPUTE = "compute stream"

Clock = dict[Hashable, int]


class Clocks:
    """What each host thread and each stream knows to have happened: the number of known accesses by each of them."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._clocks: dict[Hashable, Clock] = {}

    def of(self, actor: Hashable) -> Clock:
        return self._clocks.setdefault(actor, {})

    def mine(self) -> Clock:
        return self.of(threading.get_ident())

    def join(self, actor: Hashable, other: Clock) -> None:
        own = self.of(actor)
        for who, count in other.items():
            own[who] = max(own.get(who, 0), count)

    def hear(self, other: Clock) -> None:
        """Makes the calling thread know what `other` knows."""
        with self.lock:
            self.join(threading.get_ident(), other)

    def told(self) -> Clock:
        with self.lock:
            return dict(self.mine())

    def tick(self, actor: Hashable) -> int:
        own = self.of(actor)
        own[actor] = own.get(actor, 0) + 1
        return own[actor]

    def known_to_a_thread(self, who: Hashable, count: int) -> bool:
        return any(clock.get(who, 0) >= count for actor, clock in self._clocks.items() if isinstance(actor, int))


@dataclass
class Accesses:
    """(actor, its count) of the last write and of the reads since then."""

    write: tuple[Hashable, int] | None = None
    reads: list[tuple[Hashable, int]] = field(default_factory=list)


class FakeEvent:
    def __init__(self, clocks: Clocks, clock: Clock) -> None:
        self._clocks, self._clock = clocks, clock
        self._is_known = False
        self.error: BaseException | None = None

    @property
    def clock(self) -> Clock:
        return self._clock

    def query(self) -> bool:
        """Whether the event is known to be done. That is as late as possible: only after a thread has synchronized with
        it."""
        if self._is_known:
            self._clocks.hear(self._clock)
        return self._is_known

    def synchronize(self) -> None:
        if self.error is not None:
            raise self.error
        self._clocks.hear(self._clock)
        self._is_known = True


class FakeStreams:
    """Streams that work on host memory, and check accesses for races."""

    def __init__(self, room_bytes: int | None = None) -> None:
        self.clocks = Clocks()
        self.races: list[str] = []
        self.room_bytes = room_bytes
        self.pinned_bytes = 0
        self._current = threading.local()
        self._accesses: WeakKeyDictionary[Region, Accesses] = WeakKeyDictionary()

    def compute(self) -> str:
        return COMPUTE

    def enter_thread(self) -> None:
        pass

    def make(self, label: str) -> str:
        return label

    def launch(self, stream: str, work: Callable[[], None]) -> None:
        with self.clocks.lock:
            self.clocks.join(stream, self.clocks.mine())
        self._current.stream = stream
        try:
            work()
        finally:
            self._current.stream = None

    def record(self, stream: str, *, timed: bool = False) -> FakeEvent:
        with self.clocks.lock:
            return FakeEvent(self.clocks, dict(self.clocks.of(stream)))

    def wait(self, stream: str, event: FakeEvent) -> None:
        with self.clocks.lock:
            self.clocks.join(stream, event.clock)

    def seconds_between(self, first: FakeEvent, second: FakeEvent) -> float:
        return 0.25

    def allocate(self, nbytes: int) -> Tensor | None:
        if self.room_bytes is not None and nbytes > self.room_bytes:
            return None
        return torch.empty(nbytes, dtype=torch.uint8)

    def pin(self, memory: Tensor) -> None:
        self.pinned_bytes += memory.numel()

    def unpin(self, memory: Tensor) -> None:
        self.pinned_bytes -= memory.numel()

    def access(self, reads: Sequence[Region], writes: Sequence[Region], label: str) -> None:
        """Records that the present actor, a host thread or the stream of a launch, reads and writes these regions
        now."""
        who = getattr(self._current, "stream", None) or threading.get_ident()
        with self.clocks.lock:
            before = dict(self.clocks.of(who))
            now = (who, self.clocks.tick(who))
            for region in reads:
                accesses = self._of(region)
                self._check(before, accesses.write, f"{label} reads {region.label}")
                accesses.reads.append(now)
            for region in writes:
                accesses = self._of(region)
                for earlier in (accesses.write, *accesses.reads):
                    if earlier != now:
                        self._check(before, earlier, f"{label} writes {region.label}")
                accesses.write, accesses.reads = now, []

    def dropped(self, region: Region) -> None:
        """Checks that every use of the region is known to be complete, because its memory may be reused from now on."""
        with self.clocks.lock:
            accesses = self._of(region)
            for earlier in (accesses.write, *accesses.reads):
                if earlier is not None and not self.clocks.known_to_a_thread(*earlier):
                    self.races.append(f"{region.label} is dropped in use by {earlier[0]}")

    def _check(self, before: Clock, earlier: tuple[Hashable, int] | None, what: str) -> None:
        if earlier is not None and before.get(earlier[0], 0) < earlier[1]:
            self.races.append(f"{what}, which {earlier[0]} still uses")

    def _of(self, region: Region) -> Accesses:
        accesses = self._accesses.get(region)
        if accesses is None:
            accesses = self._accesses[region] = Accesses()
        return accesses


class Watched(Region):
    """A released region that tells the streams when it is dropped."""

    __slots__ = ("_region", "_streams")

    def __init__(self, region: Region, streams: FakeStreams) -> None:
        super().__init__(region.nbytes, region.label)
        self._region, self._streams = region, streams

    def drop(self) -> None:
        self._streams.dropped(self._region)
        self._region.drop()


class RecordedLanes(CudaLanes):
    """CudaLanes on FakeStreams; every operation records what it reads and writes when it runs."""

    def __init__(self, host: HostSlab, ledger: DeviceLedger, streams: FakeStreams | None = None) -> None:
        self.fake = streams or FakeStreams()
        super().__init__(host, ledger, self.fake)

    def enqueue(self, given: Submission) -> Event:
        def recorded_work() -> None:
            self.fake.access(given.reads, given.writes, given.label or given.lane.value)
            given.work()

        return super().enqueue(given._replace(work=recorded_work))

    def compute(self, *, reads: Sequence[Region] = (), writes: Sequence[Region] = (), label: str = "") -> None:
        self.fake.launch(COMPUTE, lambda: self.fake.access(reads, writes, label or "compute"))

    def release(self, region: Region, after: Sequence[Event] = ()) -> None:
        super().release(Watched(region, self.fake), after)


class ClockedEvent(threading.Event):
    """A threading.Event that passes what the setting thread knows to waiting threads."""

    clocks: Clocks

    def __init__(self) -> None:
        super().__init__()
        self._told: Clock = {}

    def set(self) -> None:
        self._told = self.clocks.told()
        super().set()

    def wait(self, timeout: float | None = None) -> bool:
        found = super().wait(timeout)
        self.clocks.hear(self._told)
        return found


class ClockedQueue:
    """A SimpleQueue that passes what the putting thread knows to the getting thread."""

    clocks: Clocks

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Clock, Any]] = queue.SimpleQueue()

    def __class_getitem__(cls, item: object) -> type[ClockedQueue]:
        return cls

    def put(self, item: object) -> None:
        self._queue.put((self.clocks.told(), item))

    def get(self) -> Any:
        told, item = self._queue.get()
        self.clocks.hear(told)
        return item


@contextlib.contextmanager
def handing_over(streams: FakeStreams) -> Iterator[None]:
    """Makes the threads of lanes that are made in the block pass on their clocks."""
    event = type("ThisEvent", (ClockedEvent,), {"clocks": streams.clocks})
    simple_queue = type("ThisQueue", (ClockedQueue,), {"clocks": streams.clocks})
    shim = SimpleNamespace(Event=event, Thread=threading.Thread, Lock=threading.Lock, get_ident=threading.get_ident)
    with pytest.MonkeyPatch.context() as patched:
        for module in (lanes, cuda_lanes):
            patched.setattr(module, "threading", shim)
            patched.setattr(module, "SimpleQueue", simple_queue)
        yield


@contextlib.contextmanager
def recorded(
    host: HostSlab, ledger: DeviceLedger, streams: FakeStreams | None = None, kind: type[RecordedLanes] = RecordedLanes
) -> Iterator[RecordedLanes]:
    """Yields lanes on fake streams, and closes them at the end."""
    fake = streams or FakeStreams()
    with handing_over(fake):
        made = kind(host, ledger, fake)
        try:
            yield made
        finally:
            made.close()


def host_and_ledger(nbytes: int = 1 << 20) -> tuple[HostSlab, DeviceLedger]:
    return HostSlab(nbytes), DeviceLedger(None)
