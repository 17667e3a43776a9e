"""Sweeps on several devices, each with a process of its own, for tests that end an attempt with a signal."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import local_runs, sweep_runs
from spillway.api.job_file import JobFile
from spillway.plan import MemoryPlan

POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Blow:
    """A signal that ends an attempt once its members have made `after` steps, if so many are left. It goes to the
    process of `device`, or to the sweep's own process if that is None."""

    after: int
    device: int | None = None
    by: signal.Signals = signal.SIGKILL


class Forked:
    """A worker of sweep/workers.py that is forked: what that needs of subprocess.Popen."""

    def __init__(self, command: Sequence[str], pass_fds: Sequence[int]) -> None:
        self._process = multiprocessing.get_context("fork").Process(target=_work, args=(os.getpid(), command[-1]))
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a worker", timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)


def _work(sweep: int, descriptor: str) -> None:
    from spillway_trainer.launch.rank import die_with_parent
    from spillway_trainer.sweep import worker

    die_with_parent(sweep)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os._exit(worker.main([descriptor]))


def _run_attempt(job: JobFile, plan: MemoryPlan) -> None:
    from spillway_trainer.sweep import workers

    workers.subprocess.Popen = Forked  # type: ignore[misc,assignment]
    local_runs.run_attempt(job, plan)


def plan_on(job: JobFile, num_devices: int, turn_steps: int) -> MemoryPlan:
    plan = sweep_runs.sweep_plan(job, turn_steps)
    assert plan.turns is not None
    turns = plan.turns.model_copy(update={"num_devices": num_devices, "policy": "LongestFirst"})
    return plan.model_copy(update={"turns": turns})


def attempt(job: JobFile, num_devices: int, turn_steps: int, blow: Blow | None = None, *, forks: bool = False) -> int:
    """Runs one attempt to its end; returns its exit code, or minus the number of the signal that ended it. If `forks`,
    it forks its workers, which saves each of them the import of torch."""
    before = num_steps(job) if blow is not None else 0
    plan = plan_on(job, num_devices, turn_steps)
    process = local_runs.start_attempt(job, plan, _run_attempt if forks else local_runs.run_attempt)
    assert process.pid is not None
    while blow is not None and process.is_alive():
        if num_steps(job) - before >= blow.after:
            pids = [process.pid] if blow.device is None else workers(process.pid)[blow.device : blow.device + 1]
            for pid in pids:
                os.kill(pid, blow.by)
            break
        time.sleep(POLL_SECONDS)
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def num_steps(job: JobFile) -> int:
    """Number of steps that all members made in all attempts."""
    return sum(
        len(local_runs.events(sweep_runs.member_output(job, member.name), "step")) for member in job.spec.members
    )


def workers(pid: int) -> list[int]:
    """Process ids of the devices of sweep `pid`, in the devices' order."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
