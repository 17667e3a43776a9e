"""Lanes: all copies, CPU updates and disk transfers are submitted and ordered here.

The ordering rule: an operation runs after the events in its `after`, after everything that the host has waited for, and
after nothing else. Two operations on one lane have no order unless an event gives them one. CUDA streams guarantee
more, but schedules must not rely on it. Tests enforce the rule with lanes that run operations as late as possible and
lanes that report races (tests/fakes/lazy_lanes.py, tests/fakes/tracing.py).

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
    """The completion of one submitted operation."""

    @property
    def done(self) -> bool: ...

    def wait(self) -> None:
        """Blocks the host until the operation is complete. Raises the operation's error at every call."""


class Region:
    """Memory that operations read and write. A region is identified by its object, which tracing uses as a key.

    A plain Region names memory that somebody else owns (a parameter, a file's extent). Subclasses whose memory
    `Lanes.release` can give up override `drop`, and also `poison` if their bytes can be accessed.
    """

    __slots__ = ("__weakref__", "label", "nbytes")

    def __init__(self, nbytes: int, label: str) -> None:
        self.nbytes = nbytes
        self.label = label

    def drop(self) -> None:
        """Called once by the lanes when the region was released and its last user is complete."""

    def poison(self) -> None:
        """Overwrites the bytes with 0xFF (NaN in every float format), so that a read in the wrong order is noticed."""


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
        """Adds an owner; the buffer is dropped once every owner has dropped it. For an operation that reads the buffer
        and finds that its bytes exist nowhere else."""
        self._num_owners += 1

    def drop(self) -> None:
        self._num_owners -= 1
        if self._num_owners:
            return
        tensor, self.tensor = self.tensor, _RELEASED
        self._free(tensor)

    def poison(self) -> None:
        # Host buffers belong to the slab alone. A device buffer may still be visible through autograd (a gradient that
        # is a view of a saved tensor): then it stays alive by its storage's reference count, like any tensor.
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
    """Must not call the lanes. In a lane's worker, torch's CPU operations run on that thread alone
    (native.compute_alone)."""
    reads: Sequence[Region] = ()
    writes: Sequence[Region] = ()
    after: Sequence[Event] = ()
    """The operation runs after these."""
    nbytes: int = 0
    """Bytes that it moves or, on the cpu lane, reads and writes: its cost for tracing and counters."""
    label: str = ""


class Lanes(Protocol):
    direct_io: bool
    """Whether device memory is host memory in whole blocks of the file, which moves to and from the file without
    staging."""

    def acquire(self, tier: Tier, nbytes: int, label: str) -> Buffer:
        """Returns memory of `tier` (device or host) whose earlier users are complete.

        Waits for releases in flight before it raises DeviceOutOfMemory or HostOutOfMemory, which name the holders.
        """

    def release(self, region: Region, after: Sequence[Event] = ()) -> None:
        """Gives `region` up. It is dropped, and its memory reused, only when every event in `after` is complete.

        Safe in a destructor. For a buffer that the compute lane used, `after` must include `computed()`.
        """

    def reclaim(self) -> bool:
        """Waits for the oldest release in flight; False if there is none. For callers that are out of memory."""

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
        """Queues `given`: `submit` calls this, and implementations define it."""

    def compute(self, *, reads: Sequence[Region] = (), writes: Sequence[Region] = (), label: str = "") -> None:
        """Declares that the compute lane now reads and writes these regions, after everything it was given before."""

    def computed(self) -> Event:
        """Returns an event that is complete when the compute lane has done everything it was given until now."""

    def wait(self, event: Event) -> None:
        """Makes the compute lane continue only after `event`; on a CPU device this blocks the host."""

    def moved_bytes(self) -> dict[str, int]:
        """Returns the bytes submitted per lane since the lanes were made."""

    def stalled_seconds(self) -> float:
        """Returns the seconds that the compute lane has waited, in `wait` and for memory, since the lanes were made."""

    def busy_seconds(self) -> dict[str, float]:
        """Returns the seconds that each lane has worked, without waiting, since the lanes were made; empty if not
        timed."""

    def close(self) -> None:
        """Finishes queued operations, stops the threads and frees the memory. Idempotent."""


DEVICE_BUFFERS = "buffers"
"""The ledger's purpose for buffers of the lanes: staging, reload windows, slots of streamed subgroups."""


def acquire(host: HostSlab, ledger: DeviceLedger, tier: Tier, nbytes: int, label: str) -> Buffer:
    """Returns a buffer of host slab or device memory. Raises HostOutOfMemory or DeviceOutOfMemory."""
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
    """Device memory of a CPU. Its storage is returned once no tensor shares it."""

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
    """Returns device memory of a CPU, in whole blocks. Sizes of `pooled_bytes` or more come from torch's tensor pool.
    Smaller ones are mapped, and so are those for which the pool is full. Raises DeviceOutOfMemory."""
    ledger.charge(DEVICE_BUFFERS, nbytes)
    whole = round_up(max(nbytes, 1))
    memory = torch.empty(whole, dtype=torch.uint8) if nbytes >= pooled_bytes else None
    if memory is None or memory.data_ptr() % ALIGNMENT_BYTES:
        memory = mapped(whole)
    return LentBuffer(memory, label, ledger, nbytes)


class Done:
    """An event that is already complete: on a CPU device the host itself is the compute lane."""

    __slots__ = ()
    done = True

    def wait(self) -> None:
        return


DONE = Done()


class Operation:
    """One submitted operation of the CPU and the lazy lanes; it is its own event."""

    __slots__ = ("_after", "_error", "_work", "done", "label", "seconds")

    def __init__(self, work: Callable[[], None], after: Sequence[Event], label: str) -> None:
        self._work: Callable[[], None] | None = work
        self._after = after
        self._error: BaseException | None = None
        self.label = label
        self.seconds = 0.0
        """Duration of `work`, once it is done."""
        self.done = False

    def run(self) -> None:
        """Waits for `after`, then calls `work`. If a predecessor failed, fails with the same error without calling
        `work`."""
        assert self._work is not None
        try:
            for event in self._after:
                event.wait()
            started = time.perf_counter()
            self._work()
            self.seconds = time.perf_counter() - started
        except BaseException as error:
            self.fail(error)
        self._work, self._after = None, ()  # they refer to memory that can be freed now
        self.done = True

    def fail(self, error: BaseException) -> None:
        """Makes every wait from now on raise `error`."""
        self._error = kept_error(error)

    def raise_error(self) -> None:
        if self._error is not None:
            raise copy.copy(self._error)


def kept_error(error: AnyError) -> AnyError:
    """Returns `error` without its traceback frames, which refer to memory that must not outlive the step.

    Every raise adds frames, so an operation raises a copy each time. Unless the error is a SpillwayError or already has
    notes, its frames are first kept as a note.
    """
    if not isinstance(error, SpillwayError) and not getattr(error, "__notes__", None):
        error.add_note("in a lane:\n" + "".join(traceback.format_tb(error.__traceback__)))
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


class QueuedOperation(Operation):
    """An operation run by a lane's worker, or by a compute lane that waits for it; any thread may wait for it."""

    __slots__ = ("_finished", "is_awaited", "lane", "taken")

    def __init__(self, lane: Lane, work: Callable[[], None], after: Sequence[Event], label: str) -> None:
        super().__init__(work, after, label)
        self.lane = lane
        self.taken = False
        """Whether it runs or has run."""
        self.is_awaited = False
        """Whether the device's launcher must be told when it has run."""
        self._finished = threading.Event()

    @property
    def ready(self) -> bool:
        """Whether a thread could run it now without waiting."""
        return all(event.done for event in self._after)

    def finish(self) -> None:
        self._finished.set()

    def wait(self) -> None:
        self._finished.wait()
        self.raise_error()


class LaneQueue:
    """The operations of one lane, first in first out. Its worker takes them, or a thread that waits for one of them."""

    def __init__(self) -> None:
        self._operations: deque[QueuedOperation] = deque()
        self._turns: SimpleQueue[bool] = SimpleQueue()
        """One entry per operation, including operations that other threads take; False: no more will come."""
        self._taking = threading.Lock()

    def put(self, operation: QueuedOperation) -> None:
        self._operations.append(operation)
        self._turns.put(True)

    def close(self) -> None:
        for _ in range(len(self._operations)):  # an interrupt in `put` may have lost a turn
            self._turns.put(True)
        self._turns.put(False)

    def take(self) -> QueuedOperation | None:
        """Returns the worker's next operation and waits for one if necessary. None: the queue is closed and empty."""
        while self._turns.get():
            with self._taking:
                if self._operations:
                    return self._pop()
        return None

    def take_ahead_of(self, last: QueuedOperation) -> QueuedOperation | None:
        """Returns the next operation, for a thread that waits for `last`; None if `last` is taken or the next one would
        wait."""
        with self._taking:
            if last.taken or not self._operations[0].ready:
                return None
            return self._pop()

    def _pop(self) -> QueuedOperation:
        operation = self._operations.popleft()
        operation.taken = True
        return operation


class CpuLanes(Lanes):
    """Lanes with one worker thread each, first in first out.

    A worker blocks on the `after` events of the operation at its head. That cannot deadlock: an event exists only once
    its operation is queued, so of all queued operations the one submitted first never waits for another.

    A compute lane that has to wait for CPU work helps the worker with the operations queued ahead of it; otherwise its
    core would be idle.

    Device buffers are 4096-aligned, so that files can be read into them directly. Large ones come from the pool from
    which torch takes tensors of that size, so that they reuse memory that backward has freed.
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
                self._queues[lane] = queue  # before the thread: `close` would wait forever for one without a queue
                self._threads.append(thread)
            return self._queues[lane]

    def _work(self, queue: LaneQueue) -> None:
        native.compute_alone()
        while (operation := queue.take()) is not None:
            self._run(operation)
            del operation  # else the idle worker keeps the last event alive, and with it whatever its error refers to

    def _run(self, operation: QueuedOperation) -> None:
        operation.run()
        with self._counting:
            self._busy_seconds[operation.lane] += operation.seconds
        # Before anybody wakes up, so that a thread that waited for memory finds it free.
        try:
            self._releases.sweep()
        except BaseException as error:  # if the worker died, everybody would wait forever
            operation.fail(error)
        operation.finish()
