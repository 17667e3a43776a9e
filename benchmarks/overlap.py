"""How much of a CPU update hides behind the next forward, when compute leaves a core free.

One compute thread, one update thread, a model of 100 million parameters (--quick: 26 million) whose optimizer states
are all updated by the CPU. Three runs of it make three steps each, in turn:

  free     the same run whose update is left out: gradients are accumulated, the norm is taken, and the step skipped
  none     overlap: None, forward begins when the update is done
  forward  overlap: Forward, each segment of the next forward waits for its own parameters

What a step takes more than `free` is exposed update, whatever it is spent on (also on slower compute, where both want
the same memory). hidden_share = 1 - exposed of `forward` / exposed of `none`, the median over rounds; the goal is 0.8
on a quiet machine with two cores. hidden_by_waits = 1 - what forward waited for / what the update takes alone: the same
from the inside, blind to compute that got slower. Where other processes take the second core, nothing can hide there.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import paired

from spillway.hardware import local_node
from spillway.metrics import Phase, StepMetrics
from spillway.plan import MemoryPlan, Overlap
from spillway.planner import make_plan
from spillway.units import GIB, format_seconds
from spillway_trainer import config, probe
from spillway_trainer.assemble import Assembly
from spillway_trainer.optimizer import Optimizer
from spillway_trainer.probe import Cell
from spillway_trainer.trainer import Progress, StopRequest, train_step

CELL = Cell(768, 12, 10240, 512, 1, optimizer="Host", num_micro_batches=1)
QUICK_CELL = Cell(512, 8, 1024, 512, 1, optimizer="Host", num_micro_batches=1)
STEPS = 3
"""of each run in a round, after one that is not counted: it begins with whatever the round before left"""


class WithoutUpdate:
    """An optimizer that takes gradients and never updates."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def step(self, learning_rate: float, gradient_scale: float) -> None:
        self._optimizer.skip()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class Taken(NamedTuple):
    """Of one step, a mean over those of a round."""

    seconds: float
    waiting: float
    updating: float
    """in phase optimizer: the norm, and the update as far as the phase waits for it"""


def contestant(cell: Cell, assembly: Assembly, plan: MemoryPlan, optimizer: Optimizer) -> Callable[[], Taken]:
    job = cell.job()
    run = replace(probe.run_of(job, cell, assembly), optimizer=optimizer)
    settings, progress = config.loop_settings(job.spec, plan), Progress()

    def step() -> StepMetrics:
        return train_step(run, settings, progress, StopRequest())[0]

    def some_steps() -> Taken:
        step()
        started = time.perf_counter()
        steps = [step() for _ in range(STEPS)]
        seconds = (time.perf_counter() - started) / STEPS
        optimizer.flush()  # nothing of it runs in the turn of another one
        return Taken(seconds, mean(steps, Phase.WAIT), mean(steps, Phase.OPTIMIZER))

    return some_steps


def mean(steps: Sequence[StepMetrics], phase: Phase) -> float:
    return sum(step.phase_seconds[phase.value] for step in steps) / len(steps)


def measure(quick: bool) -> dict[str, float]:
    probe.as_the_trainer(1)
    cell = QUICK_CELL if quick else CELL
    node, job = local_node(1, 4 * GIB, 4 * GIB, GIB), cell.job()
    planned = make_plan(job, node)
    assert isinstance(planned, MemoryPlan), "4 GiB are enough"
    modes: dict[str, Overlap] = {"free": "None", "none": "None", "forward": "Forward"}
    with ExitStack() as opened:
        directory = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        contestants: dict[str, Callable[[], Taken]] = {}
        for name, overlap in modes.items():
            optimizer_plan = planned.optimizer.model_copy(update={"overlap": overlap})
            plan = planned.model_copy(update={"optimizer": optimizer_plan})
            assembly = opened.enter_context(probe.assembled(job, plan, directory, 1))
            optimizer = assembly.optimizer
            if name == "free":
                optimizer = cast(Optimizer, WithoutUpdate(optimizer))
            contestants[name] = contestant(cell, assembly, plan, optimizer)
        rounds = paired.alternate(contestants, seconds=30.0 if quick else 180.0)
    return figures(rounds)


def figures(rounds: dict[str, list[Taken]]) -> dict[str, float]:
    both = list(zip(rounds["free"], rounds["none"], rounds["forward"], strict=True))
    print(f"{'':10}{'a step':>10}{'waited':>10}{'optimizer':>11}   medians of {len(both)} rounds")
    for name, taken in rounds.items():
        waiting, updating = (paired.median(getattr(one, what) for one in taken) for what in ("waiting", "updating"))
        seconds = paired.median(one.seconds for one in taken)
        print(f"{name:10}{format_seconds(seconds):>10}{format_seconds(waiting):>10}{format_seconds(updating):>11}")

    def median(of: Callable[[Taken, Taken, Taken], float]) -> float:
        return paired.median(of(*taken) for taken in both)

    def exposed(free: Taken, none: Taken, forward: Taken) -> float:
        return (forward.seconds - free.seconds) / (none.seconds - free.seconds)

    def waited(free: Taken, none: Taken, forward: Taken) -> float:
        return (forward.waiting - free.waiting) / (none.updating - free.updating)

    return {
        "hidden_share": 1.0 - median(exposed),
        "hidden_by_waits": 1.0 - median(waited),
        "none_over_forward": median(lambda free, none, forward: none.seconds / forward.seconds),
        "update_share_of_step": median(lambda free, none, forward: (none.seconds - free.seconds) / none.seconds),
        "rounds": float(len(both)),
    }


if __name__ == "__main__":
    assert __doc__ is not None
    paired.main("overlap", __doc__, measure)
