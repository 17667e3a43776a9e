"""`hack/supervised.py`, which runs the suite: all processes that its command started have ended when it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.patience import wait_until
from harness.places import ROOT
from testbed.processes import start_ticks_of

LEAVES = "setsid sleep 600 & echo $! > pid; setsid sh -c 'sleep 600 & echo $! > inner; wait' & "


def start(directory: Path, script: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "hack" / "supervised.py"), "sh", "-c", script]
    return subprocess.Popen(command, cwd=directory, stderr=subprocess.PIPE, text=True)


def started(directory: Path) -> list[int]:
    """Waits until both processes, which are in separate sessions, have begun; returns their process ids."""
    files = [directory / name for name in ("pid", "inner")]
    wait_until(lambda: all(file.exists() and file.read_text().endswith("\n") for file in files))
    return [int(file.read_text()) for file in files]


def test_processes_left_behind_are_killed_and_make_it_fail(tmp_path: Path) -> None:
    both_sleep = "for f in pid inner; do until [ $(cat /proc/$(cat $f)/comm) = sleep ]; do :; done; done"
    process = start(tmp_path, LEAVES + f"while [ ! -s inner ]; do :; done; {both_sleep}; exit 0")
    pids = started(tmp_path)
    _, said = process.communicate()
    assert process.returncode == 1
    assert said.count("left running and killed: sleep 600") == 2
    assert [start_ticks_of(pid) for pid in pids] == [None, None]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_command_end_and_kills_the_rest(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, "trap 'echo yes > ended; exit 3' INT; " + LEAVES + "while :; do :; done")
    pids = started(tmp_path)
    process.send_signal(number)
    process.communicate()
    assert process.returncode == 128 + number
    assert (tmp_path / "ended").read_text() == "yes\n"
    assert [start_ticks_of(pid) for pid in pids] == [None, None]


def test_an_orphan_that_ends_is_buried_at_once(tmp_path: Path) -> None:
    script = "sh -c 'sleep 0 & echo $! > orphan'; while [ -e /proc/$(cat orphan) ]; do :; done"
    assert start(tmp_path, script).wait() == 0


def test_the_exit_code_is_that_of_the_command(tmp_path: Path) -> None:
    assert [start(tmp_path, f"exit {code}").wait() for code in (0, 7)] == [0, 7]
