"""Attempts that end themselves with SIGKILL: at the n-th call of a function, in whichever thread that is."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from harness import local_runs
from spillway.api.job_file import JobFile
from spillway.plan import MemoryPlan

OFFLOAD, STREAMING = "spillway_trainer.optimizer_offload", "spillway_trainer.model_spill"
POINTS = {
    "a step": ("spillway_trainer.trainer", "", "train_step"),
    "a segment of one of several": ("spillway_trainer.sweep.together", "", "goes_on"),
    "the load of a base": ("spillway_trainer.sweep.shared_base", "", "load"),
    "parking": ("spillway_trainer.sweep.parking", "Parking", "park"),
    "attaching": ("spillway_trainer.sweep.turn", "Device", "_attach"),
    "a segment's forward": (f"{STREAMING}.weight_stationary", "StepInFlight", "_enter"),
    "the last segment's backward": ("spillway_trainer.assemble", "Assembly", "start_backward"),
    "a segment's backward": (f"{STREAMING}.weight_stationary", "Passage", "backward"),
    "an evaluation": ("spillway_trainer.trainer", "", "evaluate"),
    "a commit": ("spillway_trainer.trainer", "", "commit"),
    "a record of values": ("spillway_trainer.sweep.record", "SweepRecord", "write"),
    "a durable file": ("spillway_trainer.checkpoints.durable_files", "DurableFiles", "write"),
    "a file's name": ("spillway_trainer.checkpoints.durable_files", "DurableFiles", "rename"),
    "an update on the CPU": ("spillway_trainer.kernels.dispatch", "", "update"),
    "a commit of what backward updated": (f"{OFFLOAD}.speculation", "Speculation", "commit"),
    "states on their way from NVMe": (f"{OFFLOAD}.nvme_states", "NvmeStates", "read"),
    "states on their way to NVMe": (f"{OFFLOAD}.nvme_states", "NvmeStates", "write"),
}
"""point -> module, class and name of the function at whose call an attempt can be killed"""


@dataclass(frozen=True)
class Kill:
    """Kills an attempt just before call number `call` of the function POINTS[point]. Calls of an attempt are counted
    from 1; 0: never."""

    point: str
    call: int = 0
    by: signal.Signals = signal.SIGKILL


def calls_file(job: JobFile, point: str) -> Path:
    """The file with one byte for every call of the point's function that the attempt made."""
    return Path(job.output_directory) / f"{point}.{job.epoch}.calls"


def num_calls(job: JobFile, point: str) -> int:
    return calls_file(job, point).stat().st_size


def _counted(function: Callable[..., Any], kill: Kill, file: int) -> Callable[..., Any]:
    calls = 0

    def run(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        os.write(file, b".")
        if calls == kill.call:
            os.kill(os.getpid(), kill.by)
        return function(*arguments, **options)

    return run


def _run(job: JobFile, plan: MemoryPlan, kills: list[Kill]) -> None:
    """Entry point of a forked attempt; never returns."""
    for kill in kills:
        module, owner, name = POINTS[kill.point]
        place: Any = importlib.import_module(module)
        place = getattr(place, owner) if owner else place
        file = os.open(calls_file(job, kill.point), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        setattr(place, name, _counted(getattr(place, name), kill, file))
    local_runs.run_attempt(job, plan)


def start(job: JobFile, plan: MemoryPlan, kills: list[Kill]) -> BaseProcess:
    process = local_runs.CONTEXT.Process(target=_run, args=(job, plan, kills))
    process.start()
    return process
