"""Releases: freed memory that operations may still use, waiting for their events."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

Memory = TypeVar("Memory")


class Awaited(Protocol):
    """What a release waits for: an event of the lanes."""

    @property
    def done(self) -> bool: ...

    def wait(self) -> None: ...


class Droppable(Protocol):
    """Memory that can be given up: a region of the lanes."""

    def poison(self) -> None: ...

    def drop(self) -> None: ...


class Releases:
    """Drops a released region when the last event of its release is complete.

    `add` may run in a destructor, which the garbage collector can start inside any other call of the same thread. So
    the lock is re-entrant, is never held while waiting, and what runs under it takes no other lock.
    """

    def __init__(self, *, poisons: bool = False) -> None:
        self._poisons = poisons
        self._pending: dict[int, tuple[Droppable, Sequence[Awaited]]] = {}
        self._numbers = itertools.count()
        self._lock = threading.RLock()

    def add(self, region: Droppable, after: Sequence[Awaited]) -> None:
        """Drop `region` once every event in `after` is complete; now, when they already are."""
        for event in after:
            if not event.done:
                break
        else:
            self._drop(region)
            return
        number = next(self._numbers)
        # Entered first, looked at then: an event that completes in between finds it in the sweep that follows.
        self._pending[number] = (region, after)
        self._drop_if_done(number)

    def sweep(self) -> None:
        """Drop every pending region whose events are complete. An event is marked done before the sweep it causes."""
        for number in list(self._pending):
            self._drop_if_done(number)

    def wait_for_one(self) -> bool:
        """Wait until the oldest pending region is dropped; False when nothing is pending and no drop is under way.

        An operation that failed is complete, too: its error is raised by whoever waits for its result.
        """
        with self._lock:
            numbers = list(self._pending)  # copied at once: `add` takes no lock, and may come between two steps of ours
        if not numbers:
            return False
        number = numbers[0]
        _, after = self._pending.get(number, (None, ()))
        for event in after:
            with contextlib.suppress(Exception):
                event.wait()
        self._drop_if_done(number)
        return True

    def _drop_if_done(self, number: int) -> None:
        with self._lock:
            entry = self._pending.get(number)
            if entry is None or not all(event.done for event in entry[1]):
                return
            del self._pending[number]
            self._drop(entry[0])

    def _drop(self, region: Droppable) -> None:
        if self._poisons:
            region.poison()
        region.drop()


def obtain(attempt: Callable[[], Memory | None], reclaim: Callable[[], bool] | None) -> Memory | None:
    """What `attempt` returns, tried again after each release in flight that `reclaim` waits for; None when none helped.

    The last try comes after the last refusal of `reclaim`: another thread may have dropped memory just before it.
    """
    while (memory := attempt()) is None:
        if reclaim is None or not reclaim():
            return attempt()
    return memory
