"""How long a test waits for other processes: until they hang, however busy the machine is.

A hang shows in what the processes take of the cores, not in time that passes: a machine with other work, or one that
was frozen, passes time without any of it being theirs.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

IDLE_SECONDS = 120.0
"""in which none of them runs: they wait for something that never comes. More than what ranks wait for each other"""
CPU_SECONDS = 600.0
"""of all together: one of them goes round in circles"""
LEAST_CPU_SECONDS = 0.5
"""in that time count as running: a thread that looks around every now and then does not"""
LONGEST_LOOK_SECONDS = 1.0
"""that count between two looks: of more, whoever looks did not run either"""
HANG_SECONDS = 120.0
"""for what is waited for without a look at processes: far more than it takes on the busiest machine"""
POLL_SECONDS = 0.01
STOPPED = ("T", "t")
"""states of a process that somebody froze"""


@dataclass(frozen=True, slots=True)
class Taken:
    """What processes have taken of the cores so far."""

    cpu_seconds: float
    is_stopped: bool
    """one of them is frozen, and will go on"""


class Patience:
    """Asked again and again by whoever waits."""

    def __init__(
        self, taken: Callable[[], Taken], clock: Callable[[], float] = time.monotonic, waits_for: str = "the processes"
    ) -> None:
        self._taken, self._clock, self._waits_for = taken, clock, waits_for
        self._cpu_seconds, self._idle_seconds, self._looked = 0.0, 0.0, clock()

    def look(self) -> None:
        """Raises AssertionError once they hang."""
        now, taken = self._clock(), self._taken()
        if taken.is_stopped or abs(taken.cpu_seconds - self._cpu_seconds) >= LEAST_CPU_SECONDS:
            self._cpu_seconds, self._idle_seconds = taken.cpu_seconds, 0.0
        else:
            self._idle_seconds += min(now - self._looked, LONGEST_LOOK_SECONDS)
        self._looked = now
        assert self._idle_seconds < IDLE_SECONDS, f"{self._waits_for}: none ran for {IDLE_SECONDS:.0f} s"
        assert taken.cpu_seconds < CPU_SECONDS, f"{self._waits_for}: took {CPU_SECONDS:.0f} CPU-seconds"


def nothing() -> None:
    """Where nothing but time tells that waiting is in vain."""


def wait_until(
    reached: Callable[[], object],
    look: Callable[[], object] = nothing,
    why: Callable[[], object] = nothing,
    seconds: float = HANG_SECONDS,
    pause: float = POLL_SECONDS,
) -> None:
    """Poll. `look` raises when what is waited for cannot come any more; `why` says what is there instead of it."""
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
    """As `wait_until`, while the event loop goes on."""
    deadline = time.monotonic() + seconds
    while not (await found if isinstance(found := reached(), Awaitable) else found):
        look()
        assert time.monotonic() < deadline, f"not reached in {seconds:.0f} s: {why() or ''}"
        await asyncio.sleep(POLL_SECONDS)


def taken_by(pids: Iterable[int]) -> Taken:
    """By processes and all their threads, of those that are still there (Linux)."""
    found = [fields for pid in pids if (fields := _stat(Path(f"/proc/{pid}/stat")))]
    ticks = sum(int(fields[11]) + int(fields[12]) for fields in found)
    return Taken(ticks / os.sysconf("SC_CLK_TCK"), any(fields[0] in STOPPED for fields in found))


def _stat(path: Path) -> list[str]:
    """The fields after the name, which may hold anything: state first (proc(5)). Empty where there is no process."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
