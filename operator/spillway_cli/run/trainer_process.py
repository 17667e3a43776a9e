"""Runs a module as the child of `spillway run`, and ends it when its parent dies.

    python -m spillway_cli.run.trainer_process spillway_trainer OUTPUT

Standard input is a pipe whose other end only the parent holds. End of file means that the parent is gone: the child
then sends itself SIGTERM (checkpoint, exit 75), and SIGKILL if that takes too long.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

GRACE_SECONDS = 120.0
"""Time for the current step and its checkpoint after the parent has died."""


def end_with_parent(pipe: int, grace_seconds: float = GRACE_SECONDS) -> None:
    """Blocks until `pipe` reports end of file, then stops this process: SIGTERM, later SIGKILL."""
    while os.read(pipe, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    module, *arguments = sys.argv[1:]
    threading.Thread(target=end_with_parent, args=(sys.stdin.fileno(),), daemon=True, name="parent-watch").start()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
