"""`spillway top` beside a real `spillway run`, with and without a terminal; `spillway doctor` with real torch."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.patience import wait_until

JOB = """
apiVersion: spillway.dev/v1alpha1
kind: TrainingJob
metadata: {name: tiny}
spec:
  model:
    config: {architecture: llama, hiddenSize: 32, numLayers: 2, numHeads: 2, intermediateSize: 64, vocabSize: 300}
  data: {text: {claim: corpus}}
  training: {steps: STEPS, sequenceLength: 32, globalBatchSize: 4, microBatchSize: 2}
  memory: {budget: {device: 8Mi, host: 32Mi, nvme: 32Mi}, advanced: {optimizer: {placement: Host}}}
  checkpoint: {everySteps: 50, keep: 2}
"""
START_SECONDS, END_SECONDS = 60.0, 30.0
ENTER_SCREEN, LEAVE_SCREEN, SHOW_CURSOR = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25h"


def spillway(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "spillway_cli", *arguments]


@dataclass(frozen=True, slots=True)
class Running:
    """A run that continues until a test stops it."""

    process: subprocess.Popen[bytes]
    path: Path

    def kill(self) -> None:
        """Kills the trainer and its supervisor together, so that nobody notes the end."""
        self.process.send_signal(signal.SIGSTOP)  # so that it cannot record how its trainer ended
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for child in (*map(int, children), self.process.pid):
            os.kill(child, signal.SIGKILL)
        self.process.wait()


def started(directory: Path, steps: int) -> Running:
    (directory / "corpus").mkdir()
    (directory / "corpus" / "a.txt").write_text("the quick brown fox jumps over the lazy dog and runs away " * 400)
    (directory / "job.yaml").write_text(JOB.replace("STEPS", str(steps)))
    output, claim = directory / "out", f"corpus={directory / 'corpus'}"
    command = spillway("run", str(directory / "job.yaml"), "--output", str(output), "--claim", claim)
    with (directory / "run.log").open("wb") as log:
        return Running(subprocess.Popen(command, stdout=log, stderr=log), output)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    run = started(tmp_path, steps=1_000_000)
    journal, log = run.path / "run.jsonl", tmp_path / "run.log"

    def look() -> None:
        assert run.process.poll() is None, log.read_text()

    wait_until(lambda: journal.exists() and b'"step"' in journal.read_bytes(), look, log.read_text, START_SECONDS)
    yield run
    if run.process.poll() is None:
        run.process.terminate()
        run.process.wait(END_SECONDS)


def look(path: Path) -> dict[str, object]:
    done = subprocess.run(spillway("top", str(path), "--once", "-o", "json"), capture_output=True, check=True)
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_a_run_is_followed_killed_and_stopped_in_its_own_words(running: Running) -> None:
    first = look(running.path)
    assert (first["name"], first["state"], first["attempt"], first["steps"]) == ("tiny", "Running", 1, 1_000_000)
    assert isinstance(first["step"], int) and first["step"] > 0
    assert first["loss"] is not None and first["eta"] is not None and first["unknown"] == []
    assert first["rates"], "a CPU run computes, even where it moves nothing"
    running.kill()
    killed = look(running.path)
    assert (killed["state"], killed["ended"]) == ("Killed", True)
    assert isinstance(killed["step"], int) and killed["step"] >= first["step"]


@pytest.mark.ci
def test_a_run_goes_on_while_it_is_looked_at_and_is_stopped_orderly(running: Running) -> None:
    command = spillway("top", str(running.path), "--interval", "0.1", "-o", "json")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as view:
        assert view.stdout is not None
        steps = [json.loads(view.stdout.readline())["step"] for _ in range(5)]
        running.process.terminate()
        running.process.wait(END_SECONDS)
        rest = [json.loads(line) for line in view.stdout]
        assert view.wait(END_SECONDS) == 0
    assert steps == sorted(steps) and steps[-1] > steps[0]
    assert rest[-1]["state"] == "Stopped" and rest[-1]["step"] >= steps[-1]


@pytest.mark.ci
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_the_view_and_restores_the_terminal(running: Running, number: signal.Signals) -> None:
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(side)
    environment = {**os.environ, "TERM": "xterm-256color"}
    view = subprocess.Popen(
        spillway("top", str(running.path), "--interval", "0.2"),
        stdin=side, stdout=side, stderr=side, env=environment, start_new_session=True,
    )  # fmt: skip
    shown = b""
    deadline = time.monotonic() + START_SECONDS
    while shown.count(b"tok/s") < 2:
        assert time.monotonic() < deadline, shown
        shown += os.read(main, 65536)
    view.send_signal(number)
    assert view.wait(END_SECONDS) == 0
    os.set_blocking(main, False)
    try:
        while piece := os.read(main, 65536):
            shown += piece
    except BlockingIOError:
        pass
    assert shown.count(ENTER_SCREEN) == shown.count(LEAVE_SCREEN) == 1
    assert shown.rindex(SHOW_CURSOR) > shown.index(ENTER_SCREEN)
    assert b"Traceback" not in shown and termios.tcgetattr(side) == before
    os.close(main)
    os.close(side)
    assert running.process.poll() is None, "looking stops nobody"


@pytest.mark.ci
def test_doctor_asks_the_trainer(tmp_path: Path) -> None:
    environment = {**os.environ, "KUBECONFIG": str(tmp_path / "none"), "XDG_STATE_HOME": str(tmp_path)}
    environment.pop("KUBERNETES_SERVICE_HOST", None)
    command = spillway("doctor", "--directory", str(tmp_path), "-o", "json")
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    findings = {one["check"]: one for one in json.loads(done.stdout)["findings"]}
    assert done.returncode == 0, done.stdout
    assert findings["native"]["severity"] in ("ok", "warning")
    assert findings["kubeconfig"]["severity"] == "note"
    assert list(tmp_path.iterdir()) == []
