"""Releases: memory that was given back while operations may still use it, waiting for their events."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol


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

    `add` may run in a destructor at any point of any thread. So nothing here waits for a lock: one thread sweeps at a
    time, and whoever finds the sweep taken leaves its entry to the next sweep.
    """

    def __init__(self, *, poisons: bool = False) -> None:
        self._poisons = poisons
        self._pending: deque[tuple[Droppable, Sequence[Awaited]]] = deque()
        self._sweeping = threading.Lock()

    def add(self, region: Droppable, after: Sequence[Awaited]) -> None:
        """Drop `region` once every event in `after` is complete; now, when they already are."""
        if all(event.done for event in after):
            self._drop(region)
        else:
            self._pending.append((region, after))

    def sweep(self) -> None:
        """Drop every pending region whose events are complete."""
        if not self._sweeping.acquire(blocking=False):
            return
        try:
            for _ in range(len(self._pending)):
                region, after = self._pending.popleft()
                if all(event.done for event in after):
                    self._drop(region)
                else:
                    self._pending.append((region, after))
        finally:
            self._sweeping.release()

    def wait_for_one(self) -> bool:
        """Wait until the oldest pending region is dropped; False when nothing is pending.

        An operation that failed is complete, too: its error is raised by whoever waits for its result.
        """
        try:
            region, after = self._pending.popleft()
        except IndexError:
            return False
        for event in after:
            with contextlib.suppress(Exception):
                event.wait()
        self._drop(region)
        return True

    def _drop(self, region: Droppable) -> None:
        if self._poisons:
            region.poison()
        region.drop()
