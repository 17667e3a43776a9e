"""Releases: memory that was freed but that operations may still use, with the events to wait for."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

Memory = TypeVar("Memory")


class Awaited(Protocol):
    """An event of the lanes that a release waits for."""

    @property
    def done(self) -> bool: ...

    def wait(self) -> None: ...


class Droppable(Protocol):
    """A region of the lanes whose memory can be given up."""

    def poison(self) -> None: ...

    def drop(self) -> None: ...


class Releases:
    """Drops a released region once every event of its release is complete.

    `add` may run in a destructor, which the garbage collector can start inside any other call of the same thread. So
    the lock is re-entrant and never held while waiting, and code that runs under it takes no other lock.
    """

    def __init__(self, *, poisons: bool = False) -> None:
        self._poisons = poisons
        self._pending: dict[int, tuple[Droppable, Sequence[Awaited]]] = {}
        self._numbers = itertools.count()
        self._lock = threading.RLock()

    def add(self, region: Droppable, after: Sequence[Awaited]) -> None:
        """Drops `region` once every event in `after` is complete, at once if they already are."""
        for event in after:
            if not event.done:
                break
        else:
            self._drop(region)
            return
        number = next(self._numbers)
        # The entry is added before its events are checked, so that an event that completes in between finds it in its
        # sweep.
        self._pending[number] = (region, after)
        self._drop_if_done(number)

    def sweep(self) -> None:
        """Drops every pending region whose events are complete. An event is marked done before the sweep it causes."""
        for number in list(self._pending):
            self._drop_if_done(number)

    def wait_for_one(self) -> bool:
        """Waits until the oldest pending region is dropped; False if nothing is pending and no drop is in progress.

        A failed operation counts as complete: whoever waits for its result gets its error.
        """
        with self._lock:
            numbers = list(self._pending)  # one atomic copy: `add` takes no lock and may run at any point here
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
    """Returns the result of `attempt`, repeated after each release in flight that `reclaim` waits for; None if all
    fail.

    After `reclaim` returns False there is one last attempt: another thread may have dropped memory just before.
    """
    while (memory := attempt()) is None:
        if reclaim is None or not reclaim():
            return attempt()
    return memory
