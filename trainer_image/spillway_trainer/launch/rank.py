"""Starts the program of one rank so that it dies with its launcher: prctl, then exec.

    python -P -m spillway_trainer.launch.rank LAUNCHER_PID PROGRAM ARGUMENT ...

Inside a pod, the kernel kills everything when PID 1 ends. Elsewhere, a launcher that is killed with SIGKILL would leave
ranks behind that continue to train, hold the cores and wait for one another. The request to the kernel outlives exec,
needs no thread in the rank, and works for any program.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from spillway.errors import ExitCode

PR_SET_PDEATHSIG = 1
"""linux/prctl.h."""


def die_with_parent(parent: int) -> None:
    """Asks the kernel for SIGKILL when the parent ends, or sends it at once if the parent has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    launcher, program, *arguments = sys.argv[1:]
    die_with_parent(int(launcher))
    try:
        os.execvp(program, [program, *arguments])  # noqa: S606 - no shell is wanted
    except OSError as error:
        print(f"{program}: cannot be started: {error.strerror}; spec.command names it", file=sys.stderr)
        sys.exit(ExitCode.USER_ERROR)


if __name__ == "__main__":
    main()
