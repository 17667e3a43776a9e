"""Attempts of a local run: one trainer process after another, until the job is done or a restart cannot help.

    attempt E: start -> follow run.jsonl -> exit code -> done | restart as attempt E+1 | give up

spillway.feedback.retries decides which ends are worth another attempt, from the last intact checkpoint. After an
attempt that ran out of memory the next one uses another plan (ladder.py), which does not count as a restart. An attempt
stopped on request ends the run: unlike in a cluster, the user asked for it.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

from spillway.errors import ExitCode

from ..record.attempt_ends import NO_RUNG, Attempt, Rung, describe_end, record_end
from ..record.directory import RunDirectory, explained_if_disk_is_full, next_epoch
from ..record.follower import RunFollower
from ..record.log import Event, RunLog

POLL_SECONDS = 0.2
MAXIMUM_BACKOFF_SECONDS = 30.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Watcher(Protocol):
    """Callbacks for what happens during a run (the progress line, the demo)."""

    def attempt_started(self, epoch: int, pid: int) -> None: ...

    def event(self, event: Event, log: RunLog) -> None: ...

    def attempt_ended(self, attempt: Attempt, restarts_left: int) -> None: ...

    def replanned(self, rung: Rung) -> None: ...

    def stopping(self, signal_number: int, pid: int) -> None: ...


class StopSignals:
    """Passes Ctrl-C, SIGTERM or a closed terminal on to the trainer once, as SIGTERM.

    The handler only records the signal; the rest happens in the loop, where printing and locking are safe.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._signalled_pid: int | None = None

    @property
    def requested(self) -> bool:
        return self.signal_number is not None

    @contextmanager
    def listening(self) -> Iterator[None]:
        previous = {number: signal.signal(number, self._receive) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def pass_on(self, process: subprocess.Popen[bytes], watcher: Watcher) -> None:
        """Asks this trainer to stop, once, if a stop was requested, even before it started."""
        if self.signal_number is not None and process.pid != self._signalled_pid:
            self._signalled_pid = process.pid
            watcher.stopping(self.signal_number, process.pid)
            process.send_signal(signal.SIGTERM)

    def wait(self, seconds: float) -> bool:
        """Waits that long, or until a stop is requested; returns whether it is."""
        deadline = time.monotonic() + seconds
        while not self.requested and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return self.requested

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number


@dataclass(frozen=True, slots=True)
class Trainer:
    """How to start an attempt."""

    prepare: Callable[[int], None]
    """Writes job.json for an attempt."""
    command: Sequence[str]
    replan: Callable[[Attempt], Rung]
    """Chooses another plan, if one exists, after an attempt that ran out of memory."""
    lock: int
    """Descriptor that the trainer inherits: the run directory stays locked while the trainer lives."""

    def start(self, run: RunDirectory, epoch: int) -> subprocess.Popen[bytes]:
        directory = run.attempt(epoch)
        with explained_if_disk_is_full(run, directory, run.attempts):
            directory.mkdir(parents=True)
            self.prepare(epoch)
            log_file = (directory / "trainer.log").open("wb")
        with log_file as log:
            return subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,  # its end of file tells the trainer that we died: see trainer_process
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C reaches only us; we pass it on once
                pass_fds=(self.lock,),
            )


def run_attempts(
    run: RunDirectory,
    trainer: Trainer,
    watcher: Watcher,
    stop: StopSignals,
    max_restarts: int,
    first_backoff_seconds: float = 1.0,
) -> list[Attempt]:
    """Runs attempts and returns them in order; the last one decides how the run ended."""
    follower = RunFollower(run)
    for _ in follower.new_events():
        pass  # skip what earlier runs wrote in this directory
    ended: list[Attempt] = []
    while True:
        attempt = one_attempt(run, next_epoch(run), trainer, watcher, stop, follower)
        restarts = sum(earlier.worth_restarting for earlier in ended)
        restarts_left = max_restarts - restarts if attempt.worth_restarting and not stop.requested else 0
        ended.append(attempt)
        with suppress(OSError):  # on a full disk, how it ended is still shown
            record_end(run, attempt)
        watcher.attempt_ended(attempt, restarts_left)
        rung = trainer.replan(attempt) if attempt.ran_out_of_memory and not stop.requested else NO_RUNG
        if rung.sentence:
            watcher.replanned(rung)
        if restarts_left <= 0 and not rung.taken:
            return ended
        backoff_seconds = min(first_backoff_seconds * 2 ** (len(ended) - 1), MAXIMUM_BACKOFF_SECONDS)
        if stop.wait(backoff_seconds):
            ended.append(stopped_before_training(attempt.epoch))
            return ended


def one_attempt(
    run: RunDirectory, epoch: int, trainer: Trainer, watcher: Watcher, stop: StopSignals, follower: RunFollower
) -> Attempt:
    process = trainer.start(run, epoch)
    try:
        watcher.attempt_started(epoch, process.pid)
        while process.poll() is None:
            stop.pass_on(process, watcher)
            follow(follower, watcher)
            wait_for_exit(process, POLL_SECONDS)
        follow(follower, watcher)
    finally:
        close_life_line(process)
    if stop.requested and process.returncode == -signal.SIGTERM:
        return stopped_before_training(epoch)
    return describe_end(run.attempt(epoch), epoch, process.returncode)


def follow(follower: RunFollower, watcher: Watcher) -> None:
    for event in follower.new_events():
        watcher.event(event, follower.log)


def wait_for_exit(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def close_life_line(process: subprocess.Popen[bytes]) -> None:
    """Closes the pipe, which makes a trainer that is still alive stop; it has no effect on one that has ended."""
    assert process.stdin is not None
    process.stdin.close()


def stopped_before_training(epoch: int) -> Attempt:
    """The stop request came before the trainer could handle it: no step was trained since the last checkpoint."""
    code = ExitCode.PREEMPTED
    return Attempt(epoch, code, code.reason, "stopped on request before training continued")
