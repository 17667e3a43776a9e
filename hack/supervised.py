"""python hack/supervised.py COMMAND …: runs COMMAND and leaves nothing of it behind, however it ends.

Every process that COMMAND starts, in any session, is a descendant of this one, which adopts orphans
(PR_SET_CHILD_SUBREAPER). SIGINT (Ctrl-C), SIGTERM and SIGHUP are passed on to COMMAND once, as SIGINT. COMMAND then has
GRACE_SECONDS to end, or SHORT_GRACE_SECONDS after a second signal. Then the remaining processes are killed, and if
there is a test bed without processes, its changes to the machine are undone. The exit code is COMMAND's; 1 if it
succeeded and left processes; 128 plus the number of the first signal if there was one.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from testbed import bed
from testbed.layout import state
from testbed.processes import kill, start_ticks_of

PR_SET_CHILD_SUBREAPER = 36
GRACE_SECONDS, SHORT_GRACE_SECONDS = 60.0, 1.0
POLL_SECONDS = 0.05


def main(command: list[str]) -> int:
    if not command:
        sys.exit(__doc__)
    if sys.platform != "linux":
        return subprocess.run(command, check=False).returncode
    assert ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: signals.append(received))
    child = subprocess.Popen(command, start_new_session=True)
    code = _wait(child, signals)
    left = _end_all()
    ended_early = bool(left or signals)
    if ended_early and os.access(state().machine, os.W_OK) and not bed.runs(state()):
        bed.down(state())
    if signals:
        return 128 + signals[0]
    for line in left:
        print(f"supervised: left running and killed: {line}", file=sys.stderr)
    return code or (1 if left else 0)


def _wait(child: subprocess.Popen[bytes], signals: list[int]) -> int:
    """Waits for the child. Returns its exit code, or 137 if it did not end in time after a signal."""
    passed_on, deadline = 0, float("inf")
    while True:
        _bury(all_but=child.pid)
        if child.poll() is not None:
            return child.returncode
        if len(signals) > passed_on:
            if not passed_on:
                child.send_signal(signal.SIGINT)
            passed_on = len(signals)
            deadline = time.monotonic() + (GRACE_SECONDS if passed_on == 1 else SHORT_GRACE_SECONDS)
        if time.monotonic() > deadline:
            return 137
        time.sleep(POLL_SECONDS)


def _bury(all_but: int | None = None) -> None:
    """Reaps orphans that have ended, as init does: a process that waits for one to go would see a zombie forever."""
    with suppress(ChildProcessError):
        while (dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and dead.si_pid != all_but:
            os.waitpid(dead.si_pid, 0)


def _end_all() -> list[str]:
    """Kills all descendants, including those that they start meanwhile. Returns their command lines."""
    left = {}
    while living := _descendants(os.getpid()):
        for pid in living:
            ticks = start_ticks_of(pid)
            with suppress(OSError):  # it ended meanwhile
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                left[pid, ticks] = command.decode(errors="replace")[:120]
            if ticks is not None:
                kill(pid, ticks)
        _bury()
    return [line for line in left.values() if line]


def _descendants(pid: int) -> list[int]:
    """Returns the living descendants of a process, parents before their children."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(word) for word in task.read_text().split()]
        except OSError:
            continue
        for child in children:
            found += [child, *_descendants(child)]
    return [child for child in found if start_ticks_of(child) is not None]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
