"""A real training step whose optimizer states are on NVMe, over the larger of its compute time and its disk time.

One compute thread, one update thread, a model of 100 million parameters (--quick: 13 million), bfloat16, all states on
NVMe: every step reads 12 bytes per parameter and writes them back. Three runs of this model take one step each, in
turn:

  compute  without the update: forward, backward, sums of gradients, norm
  disk     the update alone, with a kernel that computes nothing: the same bytes, chunks, checksums and threads
  step     the complete step with overlap: Forward, so that the disk works during the next forward

nvme_step_ratio = step / max(compute, disk), the median over rounds; the goal is 1.15 on a quiet machine. The update's
computation is only in `step`, so it makes our ratio worse. disk_over_compute shows which of the two limited the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import paired
from measured_runs import HUNDRED_MILLION, MeasuredRuns, WithoutUpdate
from spillway.units import format_seconds
from spillway_trainer import probe
from spillway_trainer.kernels import dispatch as kernels
from spillway_trainer.optimizer.plain import StepOptimizer
from spillway_trainer.probe import Cell

CELL = replace(HUNDRED_MILLION, micro_batch_size=4, optimizer="Nvme")
QUICK_CELL = Cell(384, 6, 4096, 256, 2, optimizer="Nvme", num_micro_batches=1)
LIMITS = {"nvme_step_ratio": 1.15}


class UpdateTimed:
    """An optimizer that measures how long its update took, from the first to the last byte."""

    def __init__(self, optimizer: StepOptimizer) -> None:
        self._optimizer = optimizer
        self.seconds = 0.0

    def step(self, learning_rate: float, gradient_scale: float) -> None:
        begin = time.perf_counter()
        self._optimizer.step(learning_rate, gradient_scale)
        self._optimizer.flush()
        self.seconds = time.perf_counter() - begin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def computes_nothing(*_: object, **__: object) -> None:
    """Takes the place of the update kernel."""


def compute(runs: MeasuredRuns) -> Callable[[], float]:
    return paired.timed(runs.make("None", WithoutUpdate).step)


def disk(runs: MeasuredRuns) -> Callable[[], float]:
    with mock.patch.object(kernels, "update", computes_nothing):
        run = runs.make("None", UpdateTimed)

    def update_alone() -> float:
        run.step()
        seconds: float = run.optimizer.seconds
        return seconds

    return update_alone


def step(runs: MeasuredRuns) -> Callable[[], float]:
    run = runs.make("Forward")

    def one_after_another() -> float:
        run.step()  # not measured: unlike a usual step, it begins with nothing in flight
        seconds = paired.timed(run.step)()
        run.optimizer.flush()  # so that none of its work runs during another contestant's turn
        return seconds

    return one_after_another


def measure(quick: bool) -> dict[str, float]:
    probe.as_the_trainer(1)
    with ExitStack() as opened:
        runs = MeasuredRuns(QUICK_CELL if quick else CELL, opened, directory=".")
        contestants = {"compute": compute(runs), "disk": disk(runs), "step": step(runs)}
        rounds = paired.alternate(contestants, seconds=30.0 if quick else 180.0)
    both = list(zip(rounds["compute"], rounds["disk"], rounds["step"], strict=True))
    for name, seconds in rounds.items():
        print(f"{name:8}{format_seconds(paired.median(seconds)):>10}   median of {len(both)} rounds")
    return {
        "nvme_step_ratio": paired.median(step / max(compute, disk) for compute, disk, step in both),
        "step_over_sum": paired.median(step / (compute + disk) for compute, disk, step in both),
        "disk_over_compute": paired.median(disk / compute for compute, disk, _ in both),
        "rounds": float(len(both)),
    }


if __name__ == "__main__":
    assert __doc__ is not None
    paired.main("nvme_states", __doc__, measure, at_most=LIMITS)
