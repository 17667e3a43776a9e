"""Supervision of trainer processes, with a fake trainer: real processes and signals, no model."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.places import TESTS
from spillway.errors import UserError
from spillway_cli.record.attempt_ends import NO_RUNG, Attempt, Rung, read_ended
from spillway_cli.record.directory import RunDirectory, exclusive, next_epoch
from spillway_cli.record.log import Event, RunLog, StepEvent, read_run_log
from spillway_cli.run.attempts import StopSignals, Trainer, run_attempts

FAKE_TRAINER = TESTS / "fakes" / "fake_trainer.py"
NOTHING = {"steps": [1, 0], "end": 0}


class Recorder:
    """A watcher that records events, and calls `on_step` for every step."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.ended: list[tuple[int, int]] = []
        self.stopped: list[int] = []
        self.rungs: list[Rung] = []
        self.steps: list[int] = []
        self.on_step = lambda step: None

    def attempt_started(self, epoch: int, pid: int) -> None:
        self.started.append(epoch)

    def event(self, event: Event, log: RunLog) -> None:
        if isinstance(event, StepEvent):
            self.steps.append(event.metrics.step)
            self.on_step(event.metrics.step)

    def attempt_ended(self, attempt: Attempt, restarts_left: int) -> None:
        self.ended.append((attempt.exit_code, restarts_left))

    def replanned(self, rung: Rung) -> None:
        self.rungs.append(rung)

    def stopping(self, signal_number: int, pid: int) -> None:
        self.stopped.append(signal_number)


def supervise(
    path: Path,
    script: dict[str, dict[str, Any]],
    max_restarts: int = 3,
    watcher: Recorder | None = None,
    replan: Callable[[Attempt], Rung] = lambda ended: NO_RUNG,
) -> list[Attempt]:
    """Runs the fake trainer through `script`; returns the attempts."""
    path.mkdir(exist_ok=True)
    run = RunDirectory(path)
    (path / "script.json").write_text(json.dumps(script))

    def prepare(epoch: int) -> None:
        run.job_file.write_text(json.dumps({"epoch": epoch}))

    stop = StopSignals()
    with exclusive(run) as lock, stop.listening():
        trainer = Trainer(prepare, [sys.executable, str(FAKE_TRAINER), str(path)], replan, lock)
        return run_attempts(run, trainer, watcher or Recorder(), stop, max_restarts, first_backoff_seconds=0.0)


def codes(attempts: list[Attempt]) -> list[int]:
    return [attempt.exit_code for attempt in attempts]


def test_completed_trainer_is_not_restarted(tmp_path: Path) -> None:
    assert codes(supervise(tmp_path, {"1": {"steps": [1, 3], "end": 0}})) == [0]


def test_killed_trainer_is_restarted_with_the_next_epoch(tmp_path: Path) -> None:
    attempts = supervise(tmp_path, {"1": {"steps": [1, 5], "end": "kill"}, "2": {"steps": [4, 8], "end": 0}})
    assert [(one.epoch, one.exit_code) for one in attempts] == [(1, 137), (2, 0)]


def test_undocumented_exit_code_is_a_crash_worth_restarting(tmp_path: Path) -> None:
    assert codes(supervise(tmp_path, {"1": {"steps": [1, 1], "end": 1}, "2": NOTHING})) == [1, 0]


@pytest.mark.parametrize("code", [73, 74, 77])
def test_failure_that_may_not_recur_is_restarted(tmp_path: Path, code: int) -> None:
    assert codes(supervise(tmp_path, {"1": {"steps": [1, 0], "end": code}, "2": NOTHING})) == [code, 0]


@pytest.mark.parametrize("code", [64, 70, 71, 72, 75, 76])
def test_documented_failure_is_not_restarted(tmp_path: Path, code: int) -> None:
    assert codes(supervise(tmp_path, {"1": {"steps": [1, 1], "end": code}, "2": NOTHING})) == [code]


def test_restarts_end_with_the_budget(tmp_path: Path) -> None:
    script = {str(epoch): {"steps": [1, 0], "end": "kill"} for epoch in range(1, 9)}
    assert codes(supervise(tmp_path, script, max_restarts=2)) == [137, 137, 137]


def test_watcher_is_told_how_many_restarts_are_left(tmp_path: Path) -> None:
    watcher = Recorder()
    script = {str(epoch): {"steps": [1, 0], "end": "kill"} for epoch in range(1, 9)}
    supervise(tmp_path, script, max_restarts=2, watcher=watcher)
    assert watcher.ended == [(137, 2), (137, 1), (137, 0)]


def test_epochs_go_on_from_an_earlier_invocation(tmp_path: Path) -> None:
    supervise(tmp_path, {"1": NOTHING})
    assert [one.epoch for one in supervise(tmp_path, {"2": NOTHING})] == [2]


@pytest.mark.parametrize("trace", ["checkpoints/epoch-7.json", "checkpoints/step-12.e7/x", "attempts/attempt-7/x"])
def test_next_epoch_is_above_every_trace(tmp_path: Path, trace: str) -> None:
    (tmp_path / trace).parent.mkdir(parents=True)
    (tmp_path / trace).touch()
    assert next_epoch(RunDirectory(tmp_path)) == 8


def test_every_step_is_seen_though_the_trainer_ends_at_once(tmp_path: Path) -> None:
    watcher = Recorder()
    supervise(tmp_path, {"1": {"steps": [1, 500], "end": 0}}, watcher=watcher)
    assert watcher.steps == list(range(1, 501))


def test_steps_of_an_earlier_invocation_are_not_told_again(tmp_path: Path) -> None:
    supervise(tmp_path, {"1": {"steps": [1, 5], "end": 75}})
    watcher = Recorder()
    supervise(tmp_path, {"2": {"steps": [6, 8], "end": 0}}, watcher=watcher)
    assert watcher.steps == [6, 7, 8]


def test_termination_message_of_the_trainer_is_kept(tmp_path: Path) -> None:
    attempts = supervise(tmp_path, {"1": {"steps": [1, 1], "end": 71, "message": "step 2: loss nan"}})
    assert (attempts[0].reason, attempts[0].message) == ("NonFinite", "step 2: loss nan")


def test_crash_without_a_message_quotes_the_log(tmp_path: Path) -> None:
    attempts = supervise(tmp_path, {"1": {"steps": [1, 1], "end": 3}}, max_restarts=0)
    assert "fake trainer, epoch 1" in attempts[0].message


def test_end_of_every_attempt_is_recorded_for_the_report(tmp_path: Path) -> None:
    supervise(tmp_path, {"1": {"steps": [1, 1], "end": "kill"}, "2": NOTHING})
    ended = [read_ended(RunDirectory(tmp_path), epoch) for epoch in (1, 2)]
    assert [one.reason for one in ended if one] == ["RankCrashed", "Completed"]


def test_signal_to_us_reaches_the_trainer_and_ends_the_run(tmp_path: Path) -> None:
    watcher = Recorder()
    watcher.on_step = lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 3 else None
    script = {"1": {"steps": [1, 3], "end": "wait"}, "2": NOTHING}
    assert codes(supervise(tmp_path, script, watcher=watcher)) == [75]


class Signalled:
    """A process that only counts its signals."""

    pid = 4711

    def __init__(self) -> None:
        self.signals: list[int] = []

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


def test_second_signal_is_not_passed_on() -> None:
    stop, process = StopSignals(), Signalled()
    with stop.listening():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            stop.pass_on(process, Recorder())  # type: ignore[arg-type]
    assert process.signals == [signal.SIGTERM]


def test_trainer_killed_while_stopping_is_not_restarted(tmp_path: Path) -> None:
    watcher = Recorder()
    watcher.on_step = lambda step: os.kill(os.getpid(), signal.SIGTERM)
    script = {"1": {"steps": [1, 1], "end": "kill"}, "2": NOTHING}
    assert codes(supervise(tmp_path, script, watcher=watcher)) == [137]


def test_our_signal_handlers_are_gone_afterwards(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    supervise(tmp_path, {"1": NOTHING})
    assert signal.getsignal(signal.SIGTERM) is before


def test_directory_is_rejected_while_another_run_holds_it(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with exclusive(run), pytest.raises(UserError, match="another run"), exclusive(run):
        pass


def test_directory_stays_taken_while_a_trainer_lives_on(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with exclusive(run) as lock:
        command = [sys.executable, "-c", "input()"]
        orphan = Trainer(lambda epoch: None, command, lambda ended: NO_RUNG, lock).start(run, 1)
    with pytest.raises(UserError, match="another run"), exclusive(run):
        pass
    orphan.communicate()
    with exclusive(run):
        pass


PARENT = """
import subprocess, sys
command = [sys.executable, "-P", "-m", "spillway_cli.run.trainer_process", "waits_for_sigterm", sys.argv[1]]
child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
print(child.pid, child.stdout.readline().decode().strip(), flush=True)
child.wait()
"""
CHILD = """
import signal, sys, threading
told = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: told.set())
print("ready", flush=True)
while not told.wait(0.05):
    pass
with open(sys.argv[1], "w") as fifo:
    fifo.write("SIGTERM")
"""


def test_trainer_is_asked_to_stop_when_its_parent_is_killed(tmp_path: Path) -> None:
    (tmp_path / "waits_for_sigterm.py").write_text(CHILD)
    os.mkfifo(tmp_path / "said")
    command = [sys.executable, "-c", PARENT, str(tmp_path / "said")]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert parent.stdout is not None
    assert parent.stdout.readline().split()[1] == b"ready"
    parent.kill()
    parent.wait()
    parent.stdout.close()
    with open(os.open(tmp_path / "said", os.O_RDONLY | os.O_NONBLOCK), "rb") as fifo:
        told, _, _ = select.select([fifo], [], [], 60.0)
        assert told and fifo.read() == b"SIGTERM"


def test_run_log_outlives_a_kill_in_the_middle_of_a_line(tmp_path: Path) -> None:
    supervise(tmp_path, {"1": {"steps": [1, 5], "end": 75}})
    log = tmp_path / "run.jsonl"
    log.write_text(log.read_text()[:-20])
    assert len(read_run_log(log).steps) == 4


def test_another_plan_after_memory_ran_out_is_no_restart(tmp_path: Path) -> None:
    """Such a plan also does not end the run before its tries are used up: max_restarts is 1, and a crash follows."""
    rungs = iter([Rung("more room", taken=True), Rung("less", taken=True), Rung("none fits")])
    watcher = Recorder()
    ends = {"1": 70, "2": 1, "3": 76, "4": 72}
    script = {epoch: {"steps": [1, 0], "end": code} for epoch, code in ends.items()}
    ended = supervise(tmp_path, script, max_restarts=1, watcher=watcher, replan=lambda attempt: next(rungs))
    assert codes(ended) == [70, 1, 76, 72]
    assert [rung.sentence for rung in watcher.rungs] == ["more room", "less", "none fits"]
    assert watcher.ended == [(70, 0), (1, 1), (76, 0), (72, 0)]
