"""CudaLanes: copies and device updates on streams, CPU work and disk transfers on threads, ordered by events both ways.

    compute      what the host launches itself: the current stream, forward and backward
    streams      one each for h2d, d2h and what is submitted to lane compute, so that an update runs beside a forward
    workers      one thread each for cpu, nvme_read and nvme_write (CpuLanes)

A stream gets an operation when its predecessors that are host work are done and the others are in their streams, for
which it then waits by their events. What is so when it is submitted is launched at once, by who submits it. All else is
launched by one *launcher*, in the order in which it becomes so: what waits for a CPU's update or a disk holds nothing
behind it. Each stream has a *watcher*, which waits for each operation's event. Only then is the operation complete for
the host: what it holds (its work's tensors, its regions) is let go, releases are swept, errors that came late are kept
for whoever waits. So nothing needs `record_stream`. As in CpuLanes it cannot deadlock: of all queued operations the one
submitted first waits for none of the others.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

from torch import Tensor

from spillway.errors import DeviceOutOfMemory
from spillway.plan import Tier
from spillway.units import format_bytes

from .device_ledger import DeviceLedger
from .host_slab import HostSlab
from .lanes import (
    DEVICE_BUFFERS,
    Buffer,
    CpuLanes,
    Event,
    Lane,
    LaneQueue,
    Operation,
    QueuedOperation,
    Region,
    Submission,
)
from .releases import obtain

STREAM_LANES = (Lane.COMPUTE, Lane.H2D, Lane.D2H)

Stream = Any
"""Made by a Streams; the lanes only pass it back."""


class DeviceEvent(Protocol):
    """A mark in a stream."""

    def query(self) -> bool:
        """Whether the stream has reached it. Raises the device's error."""

    def synchronize(self) -> None:
        """Block the host until the stream has reached it. Raises the device's error."""


class Streams(Protocol):
    """What the lanes need of one device; cuda.CudaStreams has it, and in tests a fake that records the order."""

    def compute(self) -> Stream:
        """The stream on which the caller's kernels go: one for the whole run. Raises RuntimeError on any other."""

    def enter_thread(self) -> None:
        """Called first in each thread of the lanes: it works on this device, and makes no context on another."""

    def make(self, label: str) -> Stream:
        """A stream of its own."""

    def launch(self, stream: Stream, work: Callable[[], None]) -> None:
        """Call `work`, whose copies and kernels go to `stream`."""

    def record(self, stream: Stream, *, timed: bool = False) -> DeviceEvent:
        """An event that is complete when `stream` has done all it was given until now; `timed`: for seconds_between."""

    def wait(self, stream: Stream, event: DeviceEvent) -> None:
        """Whatever `stream` is given from now on runs after `event`; the host continues."""

    def seconds_between(self, first: DeviceEvent, second: DeviceEvent) -> float:
        """On the device; both are timed and complete."""

    def allocate(self, nbytes: int) -> Tensor | None:
        """uint8 memory of the device, in order with the compute stream; None: there is not enough."""

    def pin(self, memory: Tensor) -> None:
        """Register host memory, so that copies from and to it need no staging. Raises HostOutOfMemory."""

    def unpin(self, memory: Tensor) -> None:
        """Undo `pin`."""


class Mark:
    """How far the compute stream was."""

    __slots__ = ("event",)

    def __init__(self, event: DeviceEvent) -> None:
        self.event = event

    @property
    def done(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()


class DeviceBuffer(Buffer):
    """Device memory of the lanes. The allocator hands it out in order with the compute stream, which may still use what
    lay there before: other streams run after `born`."""

    __slots__ = ("born",)

    def __init__(self, tensor: Tensor, label: str, free: Callable[[Tensor], None], born: DeviceEvent) -> None:
        super().__init__(Tier.DEVICE, tensor, label, free)
        self.born = born


class StreamOperation(Operation):
    """An operation of a stream."""

    __slots__ = ("_launching", "begin", "end", "is_launched", "lane", "regions")

    def __init__(
        self, lane: Lane, work: Callable[[], None], after: Sequence[Event], regions: Sequence[Region], label: str
    ) -> None:
        super().__init__(work, after, label)
        self.lane = lane
        self.regions = regions
        """Held until it is complete, like its work."""
        self.is_launched = False
        """It is in its stream, or failed before."""
        self._launching: threading.Event | None = None
        self.begin: DeviceEvent | None = None
        self.end: DeviceEvent | None = None
        """None: it has not come so far as to use the stream"""

    def blocker(self) -> StreamOperation | QueuedOperation | None:
        """A predecessor that is host work and not done, or not in its stream yet: this may be in none before."""
        for event in self._after:
            if isinstance(event, StreamOperation):
                if not event.is_launched:
                    return event
            elif isinstance(event, QueuedOperation) and not event.done:
                return event
        return None

    def first_of(self, awaited: Mapping[Operation, object]) -> StreamOperation | QueuedOperation | None:
        """Its first predecessor that is in `awaited`."""
        for event in self._after:
            if isinstance(event, StreamOperation | QueuedOperation) and event in awaited:
                return event
        return None

    def put_off(self) -> None:
        """It will be launched by another thread."""
        self._launching = threading.Event()

    def wait_for_launch(self) -> None:
        if self._launching is not None:
            self._launching.wait()

    def launch(self, streams: Streams, stream: Stream) -> None:
        """Put it into `stream`, behind its predecessors. One whose predecessor failed fails with the same error."""
        assert self._work is not None
        try:
            for event in self._after:
                order(streams, stream, event)
            for region in self.regions:
                if isinstance(region, DeviceBuffer):
                    streams.wait(stream, region.born)
            self.begin = streams.record(stream, timed=True)
            streams.launch(stream, self._work)
        except BaseException as error:
            self.fail(error)
        try:
            if self.begin is not None:  # also after an error: what was launched before it still uses the memory
                self.end = streams.record(stream, timed=True)
        except BaseException as error:
            self.fail(error)
        self.is_launched = True
        if self._launching is not None:
            self._launching.set()

    def wait(self) -> None:
        self.wait_for_launch()
        self.complete()
        self.raise_error()

    def complete(self) -> None:
        """Wait for the stream, then let go of all that it held. Several threads may."""
        try:
            if self.begin is not None and self.end is not None:
                self.end.synchronize()
        except BaseException as error:
            self.fail(error)
        with _LETTING_GO:
            self._work, self._after, self.regions = None, (), ()
        self.done = True


_LETTING_GO = threading.RLock()
"""Guarantees that nothing of an operation is left for whoever has waited for it, even if another thread let go of
it."""


def order(streams: Streams, stream: Stream, event: Event) -> None:
    """What `stream` is given next runs after `event`. Blocks the host until host work is done, and until an operation
    of another stream is in that stream. Raises the event's error, where it is known by now."""
    if isinstance(event, StreamOperation):
        event.wait_for_launch()
        event.raise_error()
        if event.end is not None:
            streams.wait(stream, event.end)
    elif isinstance(event, Mark):
        streams.wait(stream, event.event)
    else:
        event.wait()


class CudaLanes(CpuLanes):
    """Lanes of one CUDA device."""

    direct_io = False

    def __init__(self, host: HostSlab, ledger: DeviceLedger, streams: Streams) -> None:
        super().__init__(host, ledger)
        self._streams = streams
        self._compute = streams.compute()
        self._own_threads: set[int] = set()
        """By threading.get_ident(); including threads of host lanes and launching threads."""
        self._in_streams: dict[Lane, SimpleQueue[Any]] = {lane: SimpleQueue() for lane in STREAM_LANES}
        """Launched, not known to be complete."""
        self._lane_streams = {lane: streams.make(f"lane-{lane}") for lane in STREAM_LANES}
        self._launching = {lane: threading.Lock() for lane in STREAM_LANES}
        """Between an operation's first event and its last a stream gets nothing else."""
        self._news: SimpleQueue[StreamOperation | QueuedOperation | None] = SimpleQueue()
        """For the launcher: operations to launch later, and completed ones that others waited for."""
        self._marks: SimpleQueue[Mark | None] = SimpleQueue()
        """Marks that releases wait for: nothing else might ever check them."""
        self._stream_threads: list[threading.Thread] = []
        self._stalls: deque[tuple[DeviceEvent, DeviceEvent]] = deque()
        """Around each wait of the compute stream."""
        self._device_stalled_seconds = 0.0
        streams.pin(host.memory)
        self._pinned: Tensor | None = host.memory
        for lane in STREAM_LANES:
            self._start_thread(f"lane-{lane}-done", partial(self._watch, lane, self._in_streams[lane]))
        self._start_thread("lane-releases", self._watch_marks)
        self._start_thread("lane-launch", self._launch_later)

    def acquire(self, tier: Tier, nbytes: int, label: str) -> Buffer:
        if tier is not Tier.DEVICE:
            return super().acquire(tier, nbytes, label)
        self._ledger.charge(DEVICE_BUFFERS, nbytes)
        tensor = obtain(lambda: self._streams.allocate(nbytes), self.reclaim)
        if tensor is None:
            self._ledger.release(DEVICE_BUFFERS, nbytes)
            raise DeviceOutOfMemory(
                f"device memory: {format_bytes(nbytes)} for {label} cannot be allocated; this rank holds "
                f"{format_bytes(self._ledger.held_bytes)}. Lower spec.memory.budget.device, or see what else uses the "
                "device (nvidia-smi)",
                purpose=DEVICE_BUFFERS,
                wanted_bytes=nbytes,
                held_bytes=self._ledger.held_bytes,
            )
        born = self._streams.record(self._streams.compute())
        return DeviceBuffer(tensor, label, lambda freed: self._ledger.release(DEVICE_BUFFERS, freed.numel()), born)

    def release(self, region: Region, after: Sequence[Event] = ()) -> None:
        super().release(region, after)
        for event in after:
            if isinstance(event, Mark):
                self._marks.put(event)

    def enqueue(self, given: Submission) -> Event:
        if given.lane not in STREAM_LANES:
            return super().enqueue(given)
        regions = (*given.reads, *given.writes)
        operation = StreamOperation(given.lane, given.work, given.after, regions, given.label)
        self._moved[given.lane.value] += given.nbytes
        if operation.blocker() is None:
            self._launch(operation)
        else:
            operation.put_off()
            self._news.put(operation)
        return operation

    def computed(self) -> Event:
        # A destructor that the collector runs in a thread of the lanes, inside another stream, may come here, too.
        is_ours = threading.get_ident() in self._own_threads
        return Mark(self._streams.record(self._compute if is_ours else self._streams.compute()))

    def wait(self, event: Event) -> None:
        """Host work, and what is not in its stream yet, blocks the host; all else only the compute stream."""
        compute = self._streams.compute()
        if isinstance(event, Mark):
            return  # of this very stream
        if event.done:
            event.wait()
            return
        begin = self._streams.record(compute, timed=True)
        order(self._streams, compute, event)
        self._stalls.append((begin, self._streams.record(compute, timed=True)))

    def stalled_seconds(self) -> float:
        """Of the compute stream in `wait`, as far as it has come, and of the host for memory."""
        while self._stalls and self._stalls[0][1].query():
            self._device_stalled_seconds += self._streams.seconds_between(*self._stalls.popleft())
        return self._stalled_seconds + self._device_stalled_seconds

    def close(self) -> None:
        super().close()  # the workers of host lanes, on which the launcher may still wait
        while self._stream_threads:  # the launcher first
            self._news.put(None)
            self._stream_threads.pop().join()
            for queue in self._in_streams.values():
                queue.put(None)
            self._marks.put(None)
        with suppress(RuntimeError):  # of a device that failed: its memory goes with the process
            while self._releases.wait_for_one():
                pass
        if self._pinned is not None:
            self._streams.unpin(self._pinned)
            self._pinned = None

    def _start_thread(self, name: str, work: Callable[[], None]) -> None:
        def run() -> None:
            self._enter_thread()
            work()

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._stream_threads.append(thread)
        thread.start()

    def _enter_thread(self) -> None:
        self._own_threads.add(threading.get_ident())
        self._streams.enter_thread()

    def _work(self, queue: LaneQueue) -> None:
        self._enter_thread()
        super()._work(queue)

    def _launch(self, operation: StreamOperation) -> None:
        me = threading.get_ident()
        is_guest = me not in self._own_threads
        with self._launching[operation.lane]:
            self._own_threads.add(me)
            operation.launch(self._streams, self._lane_streams[operation.lane])
            if is_guest:
                self._own_threads.discard(me)
            self._in_streams[operation.lane].put(operation)

    def _launch_later(self) -> None:
        behind: dict[Operation, list[StreamOperation]] = {}
        """By their predecessor, as far as it is known; in order of submission."""
        while (news := self._news.get()) is not None:
            ready = deque([news] if isinstance(news, StreamOperation) else behind.pop(news, ()))
            del news
            while ready:
                operation = ready.popleft()
                blocker = operation.blocker()
                while isinstance(blocker, QueuedOperation) and not blocker.is_awaited:
                    blocker.is_awaited = True
                    blocker = operation.blocker()  # the first may have ended before it saw that
                blocker = blocker or operation.first_of(behind)  # nothing overtakes those that wait for the same
                if blocker is None:
                    self._launch(operation)
                    ready.extend(behind.pop(operation, ()))
                else:
                    behind.setdefault(blocker, []).append(operation)
            del operation

    def _run(self, operation: QueuedOperation) -> None:
        super()._run(operation)
        if operation.is_awaited:
            self._news.put(operation)

    def _watch(self, lane: Lane, in_stream: SimpleQueue[StreamOperation | None]) -> None:
        while (operation := in_stream.get()) is not None:
            operation.complete()
            try:
                if operation.begin is not None and operation.end is not None:
                    self._busy_seconds[lane] += self._streams.seconds_between(operation.begin, operation.end)
                self._releases.sweep()
            except BaseException as error:  # a thread that dies would leave memory held
                operation.fail(error)
            del operation

    def _watch_marks(self) -> None:
        while (mark := self._marks.get()) is not None:
            with suppress(Exception):  # a device that failed says so to whoever waits for it next
                mark.wait()
                self._releases.sweep()
            del mark
