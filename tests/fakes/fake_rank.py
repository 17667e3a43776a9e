"""A rank without a model: it does what DIRECTORY/script.json says for its rank, after all ranks have begun.

    python fake_rank.py DIRECTORY        {"0": {"wait": "SIGTERM", "end": 75}, "1": {"end": "SIGKILL"}}

`wait`: "SIGTERM" (wait for it), "for ever" (ignore SIGTERM), "unready" (SIGTERM ends the rank), a number (wait until
that rank has ended and the launcher knows). `end`: an exit code or a signal's name. `say`: the rank's termination
message. `print`: a line that it prints. `orphan`: it leaves a process without a parent.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

STARTED = "started-{}"
LONGEST_SECONDS = 600
"""after which a rank ends that nobody has ended"""


def main() -> None:
    directory, rank = Path(sys.argv[1]), os.environ["RANK"]
    script: dict[str, Any] = json.loads((directory / "script.json").read_text())
    mine = script.get(rank, {})
    signal.alarm(LONGEST_SECONDS)
    if mine.get("wait") == "SIGTERM":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    if mine.get("wait") == "for ever":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "print" in mine:
        print(mine["print"], flush=True)
    if mine.get("orphan"):
        leave_an_orphan()
    begin(directory, rank, len(script))
    if "wait" in mine:
        wait(directory, mine["wait"])
    if "say" in mine:
        Path(os.environ["SPILLWAY_TERMINATION_PATH"]).write_text(json.dumps(mine["say"]))
    end = mine.get("end", 0)
    if isinstance(end, str):
        os.kill(os.getpid(), signal.Signals[end])
    sys.exit(end)


def begin(directory: Path, rank: str, num_ranks: int) -> None:
    """Writes, atomically, the process id and environment that this rank was started with; waits for the other ranks'
    files."""
    told = directory / f".{rank}"
    told.write_text(json.dumps({"pid": os.getpid(), "environment": dict(os.environ)}))
    told.rename(directory / STARTED.format(rank))
    while not all((directory / STARTED.format(one)).exists() for one in range(num_ranks)):
        time.sleep(0.01)


def leave_an_orphan() -> None:
    """Starts a process that outlives its parent. It ends when this rank ends, which it learns because the pipe's other
    end closes."""
    parent_lives, parents_end = os.pipe()
    child = os.fork()
    if child == 0:
        if os.fork() == 0:
            os.close(parents_end)
            os.read(parent_lives, 1)
        os._exit(0)
    os.close(parents_end)
    os.waitpid(child, 0)


def wait(directory: Path, what: str | int) -> None:
    if what == "SIGTERM":
        signal.sigwait({signal.SIGTERM})
    elif isinstance(what, int):
        process = Path("/proc", str(json.loads((directory / STARTED.format(what)).read_text())["pid"]))
        while process.exists():
            time.sleep(0.01)
    else:
        signal.pause()


if __name__ == "__main__":
    main()
