"""A compute lane that waits for the CPU's work does what is queued ahead of it; which operations it may take."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.lanes import DONE, CpuLanes, Event, Lane, LaneQueue, QueuedOperation

A_LOCK_UP_SECONDS = 30.0
"""after which a gate opens by itself, and the test fails instead of hanging"""


def nothing() -> None:
    return


def operation(after: tuple[Event, ...] = (), lane: Lane = Lane.CPU) -> QueuedOperation:
    return QueuedOperation(lane, nothing, after, "")


def queue_of(*operations: QueuedOperation) -> LaneQueue:
    queue = LaneQueue()
    for each in operations:
        queue.put(each)
    return queue


class BusyWorker:
    """Lanes whose worker of `lane` is at work until the gate opens, or somebody has to be missed."""

    def __init__(self, lane: Lane) -> None:
        self.lanes, self.gate, self._begun = (
            CpuLanes(HostSlab(4096), DeviceLedger(4096)),
            threading.Event(),
            threading.Event(),
        )
        self.first = self.lanes.submit(lane, self._hold)
        assert self._begun.wait(A_LOCK_UP_SECONDS)

    def _hold(self) -> None:
        self._begun.set()
        self.gate.wait(A_LOCK_UP_SECONDS)


@contextmanager
def busy(lane: Lane) -> Iterator[BusyWorker]:
    worker = BusyWorker(lane)
    try:
        yield worker
    finally:
        worker.gate.set()
        worker.lanes.close()


def test_who_waits_does_what_is_ahead_while_the_worker_is_busy() -> None:
    ran = list[tuple[str, int]]()

    def noting(name: str) -> Callable[[], None]:
        return lambda: ran.append((name, threading.get_ident()))

    with busy(Lane.CPU) as worker:
        worker.lanes.submit(Lane.CPU, noting("ahead"))
        last = worker.lanes.submit(Lane.CPU, noting("last"))
        worker.lanes.submit(Lane.CPU, noting("behind"))
        worker.lanes.wait(last)
        me = threading.get_ident()
        assert ran == [("ahead", me), ("last", me)]
        assert not worker.first.done
    assert [name for name, _ in ran] == ["ahead", "last", "behind"]
    assert ran[2][1] != me


def test_an_error_of_what_who_waits_did_is_raised_by_the_wait() -> None:
    def fail() -> None:
        raise OSError("cable")

    with busy(Lane.CPU) as worker:
        failed = worker.lanes.submit(Lane.CPU, fail)
        worker.lanes.submit(Lane.CPU, nothing)
        for _ in range(2):
            with pytest.raises(OSError, match="cable"):
                worker.lanes.wait(failed)


def test_who_waits_for_a_copy_takes_nothing() -> None:
    """Copies and I/O are no work of the cores that compute."""
    ran = list[int]()
    with busy(Lane.D2H) as worker:
        copied = worker.lanes.submit(Lane.D2H, lambda: ran.append(threading.get_ident()))
        threading.Timer(0.0, worker.gate.set).start()
        worker.lanes.wait(copied)
    assert ran and ran != [threading.get_ident()]


def test_the_seconds_of_what_who_waits_did_count_as_the_lanes() -> None:
    with busy(Lane.CPU) as worker:
        worker.lanes.wait(worker.lanes.submit(Lane.CPU, lambda: sum(range(10_000))))
        assert worker.lanes.busy_seconds()["cpu"] > 0.0


def test_nothing_is_taken_that_would_have_to_wait() -> None:
    undone = operation()
    head, last = operation(after=(DONE, undone)), operation()
    queue = queue_of(head, last)
    assert queue.take_ahead_of(last) is None
    undone.run()
    assert queue.take_ahead_of(last) is head


def test_nothing_is_taken_once_somebody_has_what_is_waited_for() -> None:
    first, last, behind = operation(), operation(), operation()
    queue = queue_of(first, last, behind)
    assert (queue.take(), queue.take()) == (first, last)
    assert queue.take_ahead_of(last) is None
    assert queue.take() is behind


def test_a_worker_ends_when_others_took_what_was_queued() -> None:
    first, last = operation(), operation()
    queue = queue_of(first, last)
    assert (queue.take_ahead_of(last), queue.take_ahead_of(last)) == (first, last)
    queue.close()
    assert queue.take() is None
