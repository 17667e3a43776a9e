"""CudaLanes: copies and device updates on streams, CPU work and disk transfers on threads, ordered by events both ways.

    compute      what the host launches itself: the current stream, forward and backward
    streams      one each for h2d, d2h, network (exchanges between devices) and operations submitted to lane compute, so
                 that an update runs beside a forward
    workers      one thread each for cpu, nvme_read and nvme_write (CpuLanes)

A stream is given an operation once its predecessors that are host work are done and its other predecessors are in their
streams; the stream then waits for these by their events. An operation for which that is so when it is submitted is
launched at once, by the submitting thread. All others are launched by one *launcher*, in the order in which they become
ready, so one that waits for a CPU update or a disk delays no other. Each stream has a *watcher*, which waits for each
operation's event. Only then is the operation complete for the host: its references (the tensors of its work, its
regions) are dropped, releases are swept, and late errors are kept for whoever waits. So `record_stream` is never
needed. As in CpuLanes, no deadlock is possible: of all queued operations the one submitted first waits for none of the
others.
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

STREAM_LANES = (Lane.COMPUTE, Lane.H2D, Lane.D2H, Lane.NETWORK)

Stream = Any
"""A stream made by a Streams; the lanes only pass it back."""


class DeviceEvent(Protocol):
    """A position in a stream."""

    def query(self) -> bool:
        """Whether the stream has reached it. Raises the device's error."""

    def synchronize(self) -> None:
        """Blocks the host until the stream has reached it. Raises the device's error."""


class Streams(Protocol):
    """The operations that the lanes need from one device: implemented by cuda.CudaStreams and by a fake in tests, which
    records the order."""

    def compute(self) -> Stream:
        """Returns the stream that the caller's kernels use, the same one for the whole run. Raises RuntimeError on any
        other stream."""

    def enter_thread(self) -> None:
        """Called first in each thread of the lanes, so that the thread uses this device and creates no context on
        another."""

    def make(self, label: str) -> Stream:
        """Returns a new stream."""

    def launch(self, stream: Stream, work: Callable[[], None]) -> None:
        """Calls `work` so that its copies and kernels go to `stream`."""

    def record(self, stream: Stream, *, timed: bool = False) -> DeviceEvent:
        """Returns an event that is complete when `stream` has done all it was given until now; `timed`: usable in
        seconds_between."""

    def wait(self, stream: Stream, event: DeviceEvent) -> None:
        """Makes everything that `stream` is given from now on run after `event`; the host does not wait."""

    def seconds_between(self, first: DeviceEvent, second: DeviceEvent) -> float:
        """Returns the seconds between two events on the device; both are timed and complete."""

    def allocate(self, nbytes: int) -> Tensor | None:
        """Returns uint8 device memory, ordered with the compute stream; None if there is not enough."""

    def pin(self, memory: Tensor) -> None:
        """Registers host memory, so that copies from and to it need no staging. Raises HostOutOfMemory."""

    def unpin(self, memory: Tensor) -> None:
        """Undoes `pin`."""


class Mark:
    """The position of the compute stream when the mark was made."""

    __slots__ = ("event",)

    def __init__(self, event: DeviceEvent) -> None:
        self.event = event

    @property
    def done(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()


class DeviceBuffer(Buffer):
    """Device memory of the lanes. The allocator orders reuse only with the compute stream, which may still use the
    memory's previous contents; so other streams may use it only after `born`."""

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
        """Referenced until the operation is complete, like its work."""
        self.is_launched = False
        """Whether it is in its stream, or failed before."""
        self._launching: threading.Event | None = None
        self.begin: DeviceEvent | None = None
        self.end: DeviceEvent | None = None
        """None if it has not used the stream."""

    def blocker(self) -> StreamOperation | QueuedOperation | None:
        """Returns a predecessor because of which this operation cannot enter its stream yet: one that is host work and
        not done, or one that is not in its own stream yet. None if there is none."""
        for event in self._after:
            if isinstance(event, StreamOperation):
                if not event.is_launched:
                    return event
            elif isinstance(event, QueuedOperation) and not event.done:
                return event
        return None

    def first_of(self, awaited: Mapping[Operation, object]) -> StreamOperation | QueuedOperation | None:
        """Returns its first predecessor that is in `awaited`, or None."""
        for event in self._after:
            if isinstance(event, StreamOperation | QueuedOperation) and event in awaited:
                return event
        return None

    def put_off(self) -> None:
        """Prepares for the launch by another thread."""
        self._launching = threading.Event()

    def wait_for_launch(self) -> None:
        if self._launching is not None:
            self._launching.wait()

    def launch(self, streams: Streams, stream: Stream) -> None:
        """Puts it into `stream`, after its predecessors. If a predecessor failed, it fails with the same error."""
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
            if self.begin is not None:  # also after an error: kernels that were launched before it still use the memory
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
        """Waits for the stream, then drops everything that the operation referred to. Several threads may call it."""
        try:
            if self.begin is not None and self.end is not None:
                self.end.synchronize()
        except BaseException as error:
            self.fail(error)
        with _LETTING_GO:
            self._work, self._after, self.regions = None, (), ()
        self.done = True


_LETTING_GO = threading.RLock()
"""Held while an operation drops its references. So after a wait for an operation none of them is left, even if another
thread dropped them."""


def order(streams: Streams, stream: Stream, event: Event) -> None:
    """Makes everything that `stream` is given next run after `event`. Blocks the host until host work is done, or until
    an operation of another stream is in that stream. Raises the event's error if it is known by now."""
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
        """Threads by threading.get_ident(), including workers of host lanes and threads that are launching."""
        self._in_streams: dict[Lane, SimpleQueue[Any]] = {lane: SimpleQueue() for lane in STREAM_LANES}
        """Operations that were launched and are not known to be complete."""
        self._lane_streams = {lane: streams.make(f"lane-{lane}") for lane in STREAM_LANES}
        self._launching = {lane: threading.Lock() for lane in STREAM_LANES}
        """Held from an operation's first event to its last, so that its stream gets nothing else in between."""
        self._news: SimpleQueue[StreamOperation | QueuedOperation | None] = SimpleQueue()
        """For the launcher: operations to launch later, and completed ones that others waited for."""
        self._marks: SimpleQueue[Mark | None] = SimpleQueue()
        """Marks that releases wait for: without this queue nobody might ever check them."""
        self._stream_threads: list[threading.Thread] = []
        self._stalls: deque[tuple[DeviceEvent, DeviceEvent]] = deque()
        """Events before and after each wait of the compute stream."""
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
        # A destructor that the garbage collector runs in a thread of the lanes, inside another stream, may call this,
        # too.
        is_ours = threading.get_ident() in self._own_threads
        return Mark(self._streams.record(self._compute if is_ours else self._streams.compute()))

    def wait(self, event: Event) -> None:
        """Blocks the host for host work and for operations that are not in their stream yet; otherwise only the compute
        stream."""
        compute = self._streams.compute()
        if isinstance(event, Mark):
            return  # of the compute stream itself
        if event.done:
            event.wait()
            return
        begin = self._streams.record(compute, timed=True)
        order(self._streams, compute, event)
        self._stalls.append((begin, self._streams.record(compute, timed=True)))

    def stalled_seconds(self) -> float:
        """Returns the seconds that the compute stream has waited in `wait`, as far as it has progressed, and the host
        for memory."""
        while self._stalls and self._stalls[0][1].query():
            self._device_stalled_seconds += self._streams.seconds_between(*self._stalls.popleft())
        return self._stalled_seconds + self._device_stalled_seconds

    def close(self) -> None:
        super().close()  # the workers of host lanes, for which the launcher may still wait
        while self._stream_threads:  # the launcher first
            self._news.put(None)
            self._stream_threads.pop().join()
            for queue in self._in_streams.values():
                queue.put(None)
            self._marks.put(None)
        with suppress(RuntimeError):  # from a failed device, whose memory is freed with the process
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
        """Waiting operations by a predecessor that they wait for, in order of submission."""
        while (news := self._news.get()) is not None:
            ready = deque([news] if isinstance(news, StreamOperation) else behind.pop(news, ()))
            del news
            while ready:
                operation = ready.popleft()
                blocker = operation.blocker()
                while isinstance(blocker, QueuedOperation) and not blocker.is_awaited:
                    blocker.is_awaited = True
                    blocker = operation.blocker()  # it may have ended before the flag was set
                blocker = blocker or operation.first_of(behind)  # operations that wait for the same one stay in order
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
            except BaseException as error:  # if the thread died, memory would stay held
                operation.fail(error)
            del operation

    def _watch_marks(self) -> None:
        while (mark := self._marks.get()) is not None:
            with suppress(Exception):  # whoever waits next for a failed device gets the error
                mark.wait()
                self._releases.sweep()
            del mark
