"""Real steps of a small model, with one compute thread and one update thread, which the optimizer's benchmarks time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# isort: off
from spillway_trainer import environment  # noqa: F401 - before torch is imported
# isort: on

import torch

from spillway.metrics import StepMetrics
from spillway.plan import MemoryPlan, Overlap
from spillway.planning.hardware import local_node
from spillway.planning.planner import make_plan
from spillway.units import GIB
from spillway_trainer import config, probe
from spillway_trainer.assemble import Assembly
from spillway_trainer.optimizer.plain import StepOptimizer
from spillway_trainer.probe import Cell
from spillway_trainer.trainer import LoopSettings, Run, RunProgress, StopRequest, train_step

CPU = torch.device("cpu")
HUNDRED_MILLION = Cell(768, 12, 10240, 512, 1, num_micro_batches=1)
"""100.7 million parameters, 512 tokens a step"""


class WithoutUpdate:
    """An optimizer that takes gradients but never updates."""

    def __init__(self, optimizer: StepOptimizer) -> None:
        self._optimizer = optimizer

    def step(self, learning_rate: float, gradient_scale: float) -> None:
        self._optimizer.skip()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A model, its wrapped optimizer, and the state of a run that takes steps."""

    assembly: Assembly
    optimizer: Any
    _run: Run
    _settings: LoopSettings
    _progress: RunProgress

    def step(self) -> StepMetrics:
        return train_step(self._run, self._settings, self._progress, StopRequest())[0]


class MeasuredRuns:
    """Makes runs of one cell, each with its own memory and spill file in `directory`, which `opened` closes."""

    def __init__(self, cell: Cell, opened: ExitStack, directory: str | None = None) -> None:
        """`directory` None means the directory for temporary files."""
        self._cell, self._opened, self._job = cell, opened, cell.job()
        planned = make_plan(self._job, local_node(1, 8 * GIB, 4 * GIB, 4 * GIB))
        assert isinstance(planned, MemoryPlan), "that much is enough"
        self._plan = planned
        self._directory = Path(opened.enter_context(tempfile.TemporaryDirectory(dir=directory)))

    def make(
        self,
        overlap: Overlap,
        optimizer: Callable[[Any], Any] = lambda own: own,
        techniques: Callable[[Any], Any] = lambda own: own,
    ) -> MeasuredRun:
        """Makes one more run; `optimizer` and `techniques` wrap the objects that the step loop gets."""
        optimizer_plan = self._plan.optimizer.model_copy(update={"overlap": overlap})
        plan = self._plan.model_copy(update={"optimizer": optimizer_plan})
        assembly = self._opened.enter_context(probe.assembled(self._job, plan, self._directory, 1, CPU))
        wrapped = optimizer(assembly.optimizer)
        run = probe.run_of(self._job, self._cell, assembly)
        run = replace(run, optimizer=wrapped, techniques=techniques(run.techniques))
        return MeasuredRun(assembly, wrapped, run, config.loop_settings(self._job.spec, plan), RunProgress())
