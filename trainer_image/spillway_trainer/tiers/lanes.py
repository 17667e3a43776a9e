"""Lanes: all copies, CPU updates and disk transfers are submitted and ordered here.

The law of ordering: an operation runs after the events in its `after`, after everything the host has waited for, and
after nothing else. Two operations on one lane have no order unless an event gives them one. CUDA streams order more;
schedules must not rely on it. Tests hold them to the law by lanes that run operations as late as possible and by lanes
that report races (tests/fakes/lazy_lanes.py, tests/fakes/tracing.py).

CpuLanes runs one worker thread per lane; native copies and I/O release the GIL.
"""

from __future__ import annotations

import copy
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from queue import SimpleQueue
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from spillway.errors import SpillwayError
from spillway.plan import Tier

from ..kernels import native
from .device_ledger import DeviceLedger
from .extents import ALIGNMENT_BYTES, round_up
from .host_slab import HostSlab, mapped
from .releases import Releases

AnyError = TypeVar("AnyError", bound=BaseException)


class Lane(StrEnum):
    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    CPU = "cpu"
    NVME_READ = "nvme_read"
    NVME_WRITE = "nvme_write"
    NETWORK = "network"


class Event(Protocol):
    """Completion of one submitted operation."""

    @property
    def done(self) -> bool: ...

    def wait(self) -> None:
        """Block the host until the operation is complete. Raises the operation's error, each time."""


class Region:
    """Memory that operations read and write. Identity is what counts: tracing keys on the object.

    A plain Region names memory that somebody else owns (a parameter, a file's extent). What can be given up by
    `Lanes.release` overrides `drop`, and `poison` where its bytes can be reached.
    """

    __slots__ = ("__weakref__", "label", "nbytes")

    def __init__(self, nbytes: int, label: str) -> None:
        self.nbytes = nbytes
        self.label = label

    def drop(self) -> None:
        """Called once by the lanes when the region was released and its last user is complete."""

    def poison(self) -> None:
        """Overwrite the bytes with 0xFF (NaN in every float format), so that a read out of order shows."""


class Buffer(Region):
    """A region acquired from the lanes: `tensor` is uint8 of `nbytes`, at least 64-byte aligned (host: 4096)."""

    __slots__ = ("_free", "_num_owners", "tensor", "tier")

    def __init__(self, tier: Tier, tensor: Tensor, label: str, free: Callable[[Tensor], None]) -> None:
        super().__init__(tensor.numel(), label)
        self.tier = tier
        self.tensor = tensor
        self._free = free
        self._num_owners = 1

    def retain(self) -> None:
        """One owner more: it is dropped once each of them dropped it. For an operation that reads it and finds that its
        bytes have no other place."""
        self._num_owners += 1

    def drop(self) -> None:
        self._num_owners -= 1
        if self._num_owners:
            return
        tensor, self.tensor = self.tensor, _RELEASED
        self._free(tensor)

    def poison(self) -> None:
        # Host buffers belong to the slab alone. A device buffer that autograd still shows to somebody (a gradient that
        # is a view of a saved tensor) lives on by its storage's count, as any tensor does.
        if self._num_owners == 1 and (self.tier is Tier.HOST or owned_once(self.tensor)):
            self.tensor.fill_(0xFF)


_RELEASED = torch.empty(0, dtype=torch.uint8)


def owned_once(tensor: Tensor) -> bool:
    """True when no other tensor shares the storage of `tensor`."""
    storage = tensor.untyped_storage()
    use_count: int = torch._C._storage_Use_Count(storage._cdata)
    return use_count <= 2  # `tensor` and the local `storage`


class Submission(NamedTuple):
    """An operation for a lane."""

    lane: Lane
    work: Callable[[], None]
    """It must not call the lanes. On a CPU torch runs there without other threads (native.compute_alone)."""
    reads: Sequence[Region] = ()
    writes: Sequence[Region] = ()
    after: Sequence[Event] = ()
    """The operation runs after these."""
    nbytes: int = 0
    """Bytes that it moves, or touches on the cpu lane: its cost for tracing and counters."""
    label: str = ""


class Lanes(Protocol):
    direct_io: bool
    """Whether device memory is host memory in whole blocks of the file: it moves to and from the file unstaged."""

    def acquire(self, tier: Tier, nbytes: int, label: str) -> Buffer:
        """Memory of `tier` (device or host) whose earlier users are complete.

        Waits for releases in flight before it gives up. Raises DeviceOutOfMemory or HostOutOfMemory with the holders.
        """

    def release(self, region: Region, after: Sequence[Event] = ()) -> None:
        """Give `region` up; it is dropped, and its memory reused, only when every event in `after` is complete.

        Safe in a destructor. A buffer that the compute lane used is released after `computed()`, too.
        """

    def reclaim(self) -> bool:
        """Wait for the oldest release in flight; False if there is none. For callers that are out of memory."""

    def submit(
        self,
        lane: Lane,
        work: Callable[[], None],
        *,
        reads: Sequence[Region] = (),
        writes: Sequence[Region] = (),
        after: Sequence[Event] = (),
        nbytes: int = 0,
        label: str = "",
    ) -> Event:
        """Queues `work` on `lane`: see Submission."""
        return self.enqueue(Submission(lane, work, reads, writes, after, nbytes, label))

    def enqueue(self, given: Submission) -> Event:
        """What `submit` calls, and implementations define."""

    def compute(self, *, reads: Sequence[Region] = (), writes: Sequence[Region] = (), label: str = "") -> None:
        """Declare that the compute lane, after all it was given before, now reads and writes these regions."""

    def computed(self) -> Event:
        """An event that is complete when the compute lane has done everything it was given until now."""

    def wait(self, event: Event) -> None:
        """The compute lane continues only after `event`; on a CPU device this blocks the host."""

    def moved_bytes(self) -> dict[str, int]:
        """Bytes submitted per lane since the lanes were made."""

    def stalled_seconds(self) -> float:
        """Seconds the compute lane has stood still in `wait` and for memory, since the lanes were made."""

    def busy_seconds(self) -> dict[str, float]:
        """Busy seconds per lane, without waiting, since the lanes were made; empty if they are not timed."""

    def close(self) -> None:
        """Finish what is queued, stop the threads, free the memory. Idempotent."""


DEVICE_BUFFERS = "buffers"
"""The ledger's purpose for buffers of the lanes: staging, reload windows, slots of streamed subgroups."""


def acquire(host: HostSlab, ledger: DeviceLedger, tier: Tier, nbytes: int, label: str) -> Buffer:
    """A buffer of host slab or device memory. Raises HostOutOfMemory or DeviceOutOfMemory."""
    if tier is Tier.HOST:
        return Buffer(tier, host.allocate(nbytes, label), label, host.free)
    if tier is Tier.DEVICE:
        ledger.charge(DEVICE_BUFFERS, nbytes)
        tensor = torch.empty(nbytes, dtype=torch.uint8)
        return Buffer(tier, tensor, label, lambda freed: ledger.release(DEVICE_BUFFERS, freed.numel()))
    raise ValueError(
        f"{label}: a buffer can only be in device or host memory, not in {tier}; use NvmeSlab.allocate for NVMe"
    )


class LentBuffer(Buffer):
    """Device memory of a CPU whose storage is returned once no tensor shares it."""

    __slots__ = ("_charged_bytes", "_ledger")

    def __init__(self, tensor: Tensor, label: str, ledger: DeviceLedger, charged_bytes: int) -> None:
        super().__init__(Tier.DEVICE, tensor, label, _by_itself)
        self._ledger, self._charged_bytes = ledger, charged_bytes

    def drop(self) -> None:
        super().drop()
        if not self._num_owners:
            self._ledger.release(DEVICE_BUFFERS, self._charged_bytes)


def _by_itself(_: Tensor) -> None:
    return


def lent_buffer(ledger: DeviceLedger, nbytes: int, label: str, pooled_bytes: float) -> Buffer:
    """Device memory of a CPU, whole blocks: of `pooled_bytes` or more from where torch takes its tensors; of less, and
    where that is full, mapped. Raises DeviceOutOfMemory."""
    ledger.charge(DEVICE_BUFFERS, nbytes)
    whole = round_up(max(nbytes, 1))
    memory = torch.empty(whole, dtype=torch.uint8) if nbytes >= pooled_bytes else None
    if memory is None or memory.data_ptr() % ALIGNMENT_BYTES:
        memory = mapped(whole)
    return LentBuffer(memory, label, ledger, nbytes)


class Done:
    """An event that is complete: on a CPU device the host itself is the compute lane."""

    __slots__ = ()
    done = True

    def wait(self) -> None:
        return


DONE = Done()


class Operation:
    """One submitted operation of the CPU and the lazy lanes, and its event."""

    __slots__ = ("_after", "_error", "_work", "done", "label", "seconds")

    def __init__(self, work: Callable[[], None], after: Sequence[Event], label: str) -> None:
        self._work: Callable[[], None] | None = work
        self._after = after
        self._error: BaseException | None = None
        self.label = label
        self.seconds = 0.0
        """Of work, once it is done."""
        self.done = False

    def run(self) -> None:
        """Wait for `after`, then work. An operation whose predecessor failed fails with the same error, unworked."""
        assert self._work is not None
        try:
            for event in self._after:
                event.wait()
            started = time.perf_counter()
            self._work()
            self.seconds = time.perf_counter() - started
        except BaseException as error:
            self.fail(error)
        self._work, self._after = None, ()  # they hold memory that may go now
        self.done = True

    def fail(self, error: BaseException) -> None:
        """From now on every wait raises `error`."""
        self._error = kept_error(error)

    def raise_error(self) -> None:
        if self._error is not None:
            raise copy.copy(self._error)


def kept_error(error: AnyError) -> AnyError:
    """`error` without its frames: they, and those that a raise adds, refer to memory that must not outlive the step.

    So an operation raises a copy each time; where an error's own words are not enough, its frames become a note.
    """
    if not isinstance(error, SpillwayError) and not getattr(error, "__notes__", None):
        error.add_note("in a lane:\n" + "".join(traceback.format_tb(error.__traceback__)))
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


class QueuedOperation(Operation):
    """Run by a lane's worker, or by a compute lane that waits for it; any thread may wait."""

    __slots__ = ("_finished", "is_awaited", "lane", "taken")

    def __init__(self, lane: Lane, work: Callable[[], None], after: Sequence[Event], label: str) -> None:
        super().__init__(work, after, label)
        self.lane = lane
        self.taken = False
        """It runs, or has run."""
        self.is_awaited = False
        """The device's launcher must learn when it has run."""
        self._finished = threading.Event()

    @property
    def ready(self) -> bool:
        """Nobody who runs it now would have to wait."""
        return all(event.done for event in self._after)

    def finish(self) -> None:
        self._finished.set()

    def wait(self) -> None:
        self._finished.wait()
        self.raise_error()


class LaneQueue:
    """Operations of one lane, first in, first out: taken by its worker, or by a thread that waits for one of them."""

    def __init__(self) -> None:
        self._operations: deque[QueuedOperation] = deque()
        self._turns: SimpleQueue[bool] = SimpleQueue()
        """One per operation, including those that others take; False: no more will come."""
        self._taking = threading.Lock()

    def put(self, operation: QueuedOperation) -> None:
        self._operations.append(operation)
        self._turns.put(True)

    def close(self) -> None:
        for _ in range(len(self._operations)):  # an interrupt may have kept one from its turn
            self._turns.put(True)
        self._turns.put(False)

    def take(self) -> QueuedOperation | None:
        """The worker's next one; waits for it. None: the queue is closed and empty."""
        while self._turns.get():
            with self._taking:
                if self._operations:
                    return self._pop()
        return None

    def take_ahead_of(self, last: QueuedOperation) -> QueuedOperation | None:
        """The next one, for a thread that waits for `last`; None if `last` is taken or the next one would wait."""
        with self._taking:
            if last.taken or not self._operations[0].ready:
                return None
            return self._pop()

    def _pop(self) -> QueuedOperation:
        operation = self._operations.popleft()
        operation.taken = True
        return operation


class CpuLanes(Lanes):
    """One worker thread a lane, first in first out.

    A worker blocks on the `after` events of the operation at its head. That cannot deadlock: an event exists only once
    its operation is queued, so of all operations in the queues the one submitted first never waits for another.

    A compute lane that has to wait for the CPU's work does what is queued ahead of it, beside the worker: its core
    would stand still.

    Device buffers are 4096-aligned, so that files are read into them; large ones come from the pool that torch takes
    such tensors from, so that they fill the room of what backward has dropped.
    """

    direct_io = True

    def __init__(self, host: HostSlab, ledger: DeviceLedger) -> None:
        self._host, self._ledger, self._pooled_bytes = host, ledger, native.pooled_bytes()
        self._releases = Releases()
        self._moved: Counter[str] = Counter()
        self._stalled_seconds = 0.0
        self._busy_seconds = dict.fromkeys(Lane, 0.0)
        self._counting = threading.Lock()
        self._queues: dict[Lane, LaneQueue] = {}
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()
        host.reclaim = ledger.reclaim = self.reclaim

    def acquire(self, tier: Tier, nbytes: int, label: str) -> Buffer:
        if tier is Tier.DEVICE:
            return lent_buffer(self._ledger, nbytes, label, self._pooled_bytes)
        return acquire(self._host, self._ledger, tier, nbytes, label)

    def release(self, region: Region, after: Sequence[Event] = ()) -> None:
        self._releases.add(region, after)

    def reclaim(self) -> bool:
        started = time.perf_counter()
        self._releases.sweep()
        found = self._releases.wait_for_one()
        self._stalled_seconds += time.perf_counter() - started
        return found

    def enqueue(self, given: Submission) -> Event:
        operation = QueuedOperation(given.lane, given.work, given.after, given.label)
        self._moved[given.lane.value] += given.nbytes
        (self._queues.get(given.lane) or self._start(given.lane)).put(operation)
        return operation

    def compute(self, *, reads: Sequence[Region] = (), writes: Sequence[Region] = (), label: str = "") -> None:
        return

    def computed(self) -> Event:
        return DONE

    def wait(self, event: Event) -> None:
        if event.done:
            event.wait()
            return
        started = time.perf_counter()
        if isinstance(event, QueuedOperation) and event.lane is Lane.CPU:
            while (operation := self._queues[Lane.CPU].take_ahead_of(event)) is not None:
                self._run(operation)
        event.wait()
        self._stalled_seconds += time.perf_counter() - started

    def moved_bytes(self) -> dict[str, int]:
        return dict(self._moved)

    def stalled_seconds(self) -> float:
        return self._stalled_seconds

    def busy_seconds(self) -> dict[str, float]:
        return {lane.value: seconds for lane, seconds in self._busy_seconds.items() if seconds}

    def close(self) -> None:
        for queue in self._queues.values():
            queue.close()
        for thread in self._threads:
            thread.join()
        self._queues.clear()
        self._threads.clear()
        self._releases.sweep()

    def _start(self, lane: Lane) -> LaneQueue:
        with self._starting:
            if lane not in self._queues:
                queue = LaneQueue()
                thread = threading.Thread(target=self._work, args=(queue,), name=f"lane-{lane}", daemon=True)
                thread.start()
                self._queues[lane] = queue  # first, or an interrupt between leaves `close` a thread that never ends
                self._threads.append(thread)
            return self._queues[lane]

    def _work(self, queue: LaneQueue) -> None:
        native.compute_alone()
        while (operation := queue.take()) is not None:
            self._run(operation)
            del operation  # else the idle worker holds the last event, and with it whatever its error refers to

    def _run(self, operation: QueuedOperation) -> None:
        operation.run()
        with self._counting:
            self._busy_seconds[operation.lane] += operation.seconds
        # Before anybody wakes up: who waited for memory finds it free.
        try:
            self._releases.sweep()
        except BaseException as error:  # a worker that dies would leave everybody waiting
            operation.fail(error)
        operation.finish()
