"""Processes: run one to its end, or start one that outlives us and is found again by its recorded identity.

An id alone is no identity, because the kernel uses it again; id, start time and boot are.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from .errors import Failed
from .layout import POD_RANGE, SERVICE_RANGE, State

SHOWN_LINES = 8
"""of a log, in an error"""
POLL_SECONDS = 0.05
LOCAL = ("127.0.0.1", "localhost", POD_RANGE, SERVICE_RANGE)


@dataclass(frozen=True, slots=True)
class Process:
    name: str
    pid: int
    start_ticks: int
    """clock ticks from boot to the process's start"""
    boot: str
    argv: tuple[str, ...]
    log: str

    @property
    def alive(self) -> bool:
        """A zombie is dead."""
        return self.boot == boot_id() and start_ticks_of(self.pid) == self.start_ticks

    @property
    def resident_bytes(self) -> int:
        with suppress(OSError):
            for line in Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8").splitlines():
                if line.startswith("VmRSS:"):
                    return int(line.split()[1]) * 1024
        return 0


def run(
    argv: Sequence[str | Path],
    *,
    stdin: str | None = None,
    directory: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Standard output of `argv`; raises Failed with its last lines."""
    ended = subprocess.run(
        [str(word) for word in argv],
        input=stdin,
        cwd=directory,
        env=_environment(environment),
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        said = "\n".join((ended.stderr or ended.stdout).strip().splitlines()[-SHOWN_LINES:])
        raise Failed(f"{' '.join(map(str, argv[:4]))}: exit code {ended.returncode}\n{said}")
    return ended.stdout


def start(state: State, name: str, argv: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> Process:
    """Start `argv` in the background unless a process of this name lives."""
    known = recorded(state).get(name)
    if known and known.alive:
        return known
    words = tuple(str(word) for word in argv)
    path = state.logs / f"{name}.log"
    with path.open("ab") as log:
        child = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=_environment(environment),
        )
    # The child is not reaped as long as we do not wait for it, so its start time can be read even when it has ended.
    process = Process(name, child.pid, _stat(child.pid)[1], boot_id(), words, str(path))
    record = state.processes / f"{name}.json"
    unfinished = record.with_suffix(".new")
    unfinished.write_text(json.dumps(asdict(process), indent=1), encoding="utf-8")
    unfinished.rename(record)
    return process


def recorded(state: State) -> dict[str, Process]:
    """Every process that was started and not ended, by name."""
    found = {}
    for path in sorted(state.processes.glob("*.json")):
        fields = json.loads(path.read_text(encoding="utf-8"))
        found[path.stem] = Process(**{**fields, "argv": tuple(fields["argv"])})
    return found


def end(state: State, process: Process, timeout_seconds: float = 10) -> None:
    """Kill it, unless its id belongs to another process by now, and forget it."""
    if process.alive:
        kill(process.pid, process.start_ticks, timeout_seconds)
    (state.processes / f"{process.name}.json").unlink(missing_ok=True)


def kill(pid: int, start_ticks: int | None = None, timeout_seconds: float = 10) -> None:
    """SIGKILL to exactly this process; with no `start_ticks`, to the one that has the id now."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        # Compared after opening: the handle keeps meaning this process when its id is used again.
        if start_ticks is not None and start_ticks_of(pid) != start_ticks:
            return
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    finally:
        os.close(handle)
    wait_until(f"the end of process {pid}", lambda: start_ticks_of(pid) is None, timeout_seconds)


def wait_until(
    what: str, condition: Callable[[], bool], timeout_seconds: float, process: Process | None = None
) -> None:
    """Raise Failed when `condition` stays false, or when the process that is to make it true has ended."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if process and not process.alive:
            raise Failed(f"{process.name} ended while waiting for {what}; {process.log} ends:\n{tail(process.log)}")
        if time.monotonic() > deadline:
            shown = f"; {process.log} ends:\n{tail(process.log)}" if process else ""
            raise Failed(f"{what}: not within {timeout_seconds:.0f} s{shown}")
        time.sleep(POLL_SECONDS)


def tail(path: str) -> str:
    lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-SHOWN_LINES:])


def _environment(added: Mapping[str, str] | None) -> dict[str, str]:
    """Ours, with what `su` leaves out of PATH, and past any proxy for addresses that only this machine has."""
    direct = ",".join(filter(None, [os.environ.get("NO_PROXY"), *LOCAL]))
    path = f"{os.environ.get('PATH', '/usr/bin:/bin')}:/usr/sbin:/sbin"
    return {**os.environ, "PATH": path, "NO_PROXY": direct, "no_proxy": direct, **(added or {})}


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def start_ticks_of(pid: int) -> int | None:
    """None for a process that has ended, reaped or not."""
    try:
        status, ticks = _stat(pid)
    except OSError:
        return None
    return None if status in "ZX" else ticks


def _stat(pid: int) -> tuple[str, int]:
    # The second field is the program's name in parentheses and may contain both spaces and parentheses.
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[19])
