"""How long a test waits for other processes: until they hang, however busy the machine is.

A hang shows in the CPU time that the processes take, not in the time that passes: on a machine that is busy with other
work, or was frozen, time passes without the processes running.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

IDLE_SECONDS = 120.0
"""if no process runs for so long, all of them wait for something that never comes; longer than ranks wait for each
other"""
CPU_SECONDS = 600.0
"""if all processes together take so much, one of them is in an endless loop"""
LEAST_CPU_SECONDS = 0.5
"""a process that takes so much CPU time counts as running; a thread that only polls now and then takes less"""
LONGEST_LOOK_SECONDS = 1.0
"""time between two looks counts as idle up to here; in a longer pause, the waiting process did not run either"""
HANG_SECONDS = 120.0
"""limit for a wait that does not look at processes; far more than is needed on the busiest machine"""
POLL_SECONDS = 0.01
STOPPED = ("T", "t")
"""states of a process that somebody froze"""


@dataclass(frozen=True, slots=True)
class Taken:
    """The CPU time that processes have taken so far."""

    cpu_seconds: float
    is_stopped: bool
    """whether one of them is frozen, and will continue later"""


class Patience:
    """Tells a hang from a long wait; whoever waits calls `look` again and again."""

    def __init__(
        self, taken: Callable[[], Taken], clock: Callable[[], float] = time.monotonic, waits_for: str = "the processes"
    ) -> None:
        self._taken, self._clock, self._waits_for = taken, clock, waits_for
        self._cpu_seconds, self._idle_seconds, self._looked = 0.0, 0.0, clock()

    def look(self) -> None:
        """Raises AssertionError once the processes hang."""
        now, taken = self._clock(), self._taken()
        if taken.is_stopped or abs(taken.cpu_seconds - self._cpu_seconds) >= LEAST_CPU_SECONDS:
            self._cpu_seconds, self._idle_seconds = taken.cpu_seconds, 0.0
        else:
            self._idle_seconds += min(now - self._looked, LONGEST_LOOK_SECONDS)
        self._looked = now
        assert self._idle_seconds < IDLE_SECONDS, f"{self._waits_for}: none ran for {IDLE_SECONDS:.0f} s"
        assert taken.cpu_seconds < CPU_SECONDS, f"{self._waits_for}: took {CPU_SECONDS:.0f} CPU-seconds"


def nothing() -> None:
    """The default `look`, if only the time limit can tell that a wait is in vain."""


def wait_until(
    reached: Callable[[], object],
    look: Callable[[], object] = nothing,
    why: Callable[[], object] = nothing,
    seconds: float = HANG_SECONDS,
    pause: float = POLL_SECONDS,
) -> None:
    """Polls until `reached()`; AssertionError after `seconds`. `look` raises if that can no longer happen; `why`
    describes the present state for the error."""
    deadline = time.monotonic() + seconds
    while not reached():
        look()
        assert time.monotonic() < deadline, f"not reached in {seconds:.0f} s: {why() or ''}"
        time.sleep(pause)


async def until(
    reached: Callable[[], object | Awaitable[object]],
    look: Callable[[], object] = nothing,
    why: Callable[[], object] = nothing,
    seconds: float = HANG_SECONDS,
) -> None:
    """Like `wait_until`, but the event loop continues to run meanwhile."""
    deadline = time.monotonic() + seconds
    while not (await found if isinstance(found := reached(), Awaitable) else found):
        look()
        assert time.monotonic() < deadline, f"not reached in {seconds:.0f} s: {why() or ''}"
        await asyncio.sleep(POLL_SECONDS)


def taken_by(pids: Iterable[int]) -> Taken:
    """CPU time of those processes that still exist, with all their threads (Linux)."""
    found = [fields for pid in pids if (fields := _stat(Path(f"/proc/{pid}/stat")))]
    ticks = sum(int(fields[11]) + int(fields[12]) for fields in found)
    return Taken(ticks / os.sysconf("SC_CLK_TCK"), any(fields[0] in STOPPED for fields in found))


def _stat(path: Path) -> list[str]:
    """The fields of a stat file after the process's name, which may contain any character: the state is first
    (proc(5)). Empty if there is no such process."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
