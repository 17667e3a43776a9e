"""Sweeps on several devices, each with a process of its own, for tests: attempts that end as told."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from harness import local_runs, sweep_runs
from spillway.api.job_file import JobFile
from spillway.plan import MemoryPlan

POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Blow:
    """What ends an attempt once its members have made so many steps, or when nothing is left to make. `device`: whose
    process gets the signal; None: the sweep's own."""

    after: int
    device: int | None = None
    by: signal.Signals = signal.SIGKILL


def plan_on(job: JobFile, num_devices: int, turn_steps: int) -> MemoryPlan:
    plan = sweep_runs.sweep_plan(job, turn_steps)
    assert plan.turns is not None
    turns = plan.turns.model_copy(update={"num_devices": num_devices, "policy": "LongestFirst"})
    return plan.model_copy(update={"turns": turns})


def attempt(job: JobFile, num_devices: int, turn_steps: int, blow: Blow | None = None) -> int:
    """The exit code of one attempt; negative: the signal that ended it."""
    before = num_steps(job) if blow is not None else 0
    process = local_runs.start_attempt(job, plan_on(job, num_devices, turn_steps))
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
    """Made by all members in all attempts."""
    return sum(
        len(local_runs.events(sweep_runs.member_output(job, member.name), "step")) for member in job.spec.members
    )


def workers(pid: int) -> list[int]:
    """Processes of the devices, in order."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
