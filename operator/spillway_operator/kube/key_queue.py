"""KeyQueue: the TrainingJobs that need a look. A key is queued at most once, is processed by one worker at a time, and
returns later if it failed or asked for it.

Events for a key that is being processed are merged into one: `done` queues it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar

FIRST_RETRY_SECONDS = 0.4
LONGEST_RETRY_SECONDS = 60.0
LONGEST_UNANSWERED_SECONDS = 15.0
"""Longest back-off while the API server does not answer: as often as progress is written anyway, so that missed updates
are written soon after it is back."""

K = TypeVar("K", bound=Hashable)


class Timer(Protocol):
    def cancel(self) -> None: ...
    def when(self) -> float: ...


class Clock(Protocol):
    """The part of an event loop that delays need."""

    def time(self) -> float: ...
    def call_at(self, when: float, callback: Callable[..., Any], *arguments: Any) -> Timer: ...


class KeyQueue(Generic[K]):
    def __init__(self, clock: Clock | None = None) -> None:
        """`clock` is the running event loop's unless given."""
        self._clock = clock
        self._ready: asyncio.Queue[K] = asyncio.Queue()
        self._waiting: set[K] = set()
        """Keys to process: in _ready, or waiting for their current worker."""
        self._working: set[K] = set()
        self._timers: dict[K, Timer] = {}
        self._failures: dict[K, tuple[bool, int]] = {}
        """Key -> (whether unanswered, failures in a row)."""
        self._open = asyncio.Event()
        self._open.set()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_working(self) -> int:
        return len(self._working)

    def add(self, key: K) -> None:
        if key in self._waiting:
            return
        self._waiting.add(key)
        if key not in self._working:
            self._ready.put_nowait(key)

    def add_after(self, key: K, seconds: float) -> None:
        """Adds `key` in `seconds`, unless an earlier time is already set."""
        clock = self._clock or asyncio.get_running_loop()
        when = clock.time() + seconds
        if (timer := self._timers.get(key)) is not None:
            if timer.when() <= when:
                return
            timer.cancel()
        self._timers[key] = clock.call_at(when, self._due, key)

    def retry(self, key: K, *, unanswered: bool = False) -> float:
        """Adds `key` after its back-off, which doubles with every failure of the same kind in a row; returns its
        seconds.

        `unanswered`: the API server did not answer. Rejections are another kind, so that a 403 just after an outage
        does not get the longest back-off.
        """
        known, failures = self._failures.get(key, (unanswered, 0))
        failures = failures + 1 if known == unanswered else 1
        self._failures[key] = (unanswered, failures)
        longest_seconds = LONGEST_UNANSWERED_SECONDS if unanswered else LONGEST_RETRY_SECONDS
        seconds = min(longest_seconds, FIRST_RETRY_SECONDS * 2.0 ** min(failures - 1, 30))
        self.add_after(key, seconds)
        return seconds

    def succeeded(self, key: K) -> None:
        self._failures.pop(key, None)

    def forget(self, key: K) -> None:
        """Forgets back-off and delay of a deleted job."""
        self._failures.pop(key, None)
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()

    def close(self) -> None:
        """Makes `get` return no more keys."""
        self._open.clear()

    async def get(self) -> K:
        """The next key; no other caller gets it until `done`."""
        key = await self._ready.get()
        await self._open.wait()
        self._waiting.discard(key)
        self._working.add(key)
        return key

    def done(self, key: K) -> None:
        self._working.discard(key)
        if key in self._waiting:
            self._ready.put_nowait(key)

    def _due(self, key: K) -> None:
        self._timers.pop(key, None)
        self.add(key)
