"""The memory ladder of a local run: replans after an attempt that ran out of memory (spillway.feedback.ladder decides).

Each attempt's plan and end are stored next to its log, so that the same command, run again, continues from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from spillway.api.training_job import TrainingJob
from spillway.errors import DoesNotFit, ExitCode, UserError
from spillway.feedback.ladder import (
    MemoryFailure,
    change,
    corrections_after,
    repeats,
    smaller_micro_batches,
    tries_are_used_up,
)
from spillway.feedback.retries import MEMORY_ERRORS
from spillway.plan import Infeasible, MemoryPlan
from spillway.planning.corrections import Corrections
from spillway.planning.explain import lacking
from spillway.planning.pod_resources import pod_resources
from spillway.units import counted

from ..record.attempt_ends import PLAN, Attempt, Rung, plan_of_attempt, read_ended
from ..record.directory import RunDirectory, epochs_of, write_atomic
from ..record.log import read_run_log
from .local_run import LocalFiles, steps_trained

Planned = Callable[[TrainingJob, Corrections], MemoryPlan | Infeasible]
"""Plans a job for this machine."""


def first_plan(job: TrainingJob, num_ranks: int, earlier: Sequence[MemoryFailure], planned: Planned) -> MemoryPlan:
    """The plan of the first attempt. Raises DoesNotFit with the missing bytes and the nearest plan that fits."""
    found = _fastest(job, num_ranks, earlier, planned)
    if isinstance(found, Infeasible):
        raise DoesNotFit(lacking(found, "this machine"))
    return found


def earlier_failures(run: RunDirectory, job: TrainingJob, num_ranks: int) -> tuple[MemoryFailure, ...]:
    """Memory failures of earlier attempts in the directory, except full spill volumes: space may be free again."""
    found = []
    for epoch in epochs_of(run.attempts):
        ended = read_ended(run, epoch)
        if ended is not None and ended.reason in MEMORY_ERRORS - {ExitCode.SPILL_VOLUME_FULL.reason}:
            plan = plan_of_attempt(run, epoch)
            found.extend([] if plan is None else [_failure(job, plan, num_ranks, ended)])
    return tuple(found)


def trained_with(run: RunDirectory) -> MemoryPlan | None:
    """The plan of the last attempt; None before the first step."""
    epochs = epochs_of(run.attempts) if steps_trained(run, read_run_log(run.log)) else []
    return plan_of_attempt(run, epochs[-1]) if epochs else None


def _failure(job: TrainingJob, plan: MemoryPlan, num_ranks: int, ended: Attempt) -> MemoryFailure:
    return MemoryFailure(ended.epoch, ended.reason, plan, pod_resources(job.spec, plan, num_ranks).memory_bytes)


def _fastest(
    job: TrainingJob, num_ranks: int, failures: Sequence[MemoryFailure], planned: Planned
) -> MemoryPlan | Infeasible:
    corrections = corrections_after(failures)
    found = first = planned(job, corrections)
    for smaller in smaller_micro_batches(job, num_ranks) if failures else ():
        if isinstance(found, MemoryPlan):
            break
        found = planned(smaller, corrections)
    return found if isinstance(found, MemoryPlan) else first


@dataclass(slots=True)
class LocalLadder:
    """Holds the plan of the current attempt and replans for the next one."""

    files: LocalFiles
    planned: Planned
    reject: Callable[[MemoryPlan], None]
    """Raises UserError for a plan that this command may not use."""
    failures: list[MemoryFailure] = field(default_factory=list)
    ran_out: list[str] = field(default_factory=list)
    """Reasons of the memory failures of this command's attempts."""

    def write(self, epoch: int) -> None:
        """Writes the files that attempt `epoch` reads, and its plan for later replans."""
        self.files.write(epoch)
        write_atomic(self.files.run.attempt(epoch) / PLAN, self.files.plan.model_dump_json(indent=2) + "\n")

    def replan(self, ended: Attempt) -> Rung:
        """Chooses the next plan after an attempt that ran out of memory."""
        job, num_ranks, before = self.files.local.job, self.files.local.num_ranks, self.files.plan
        self.failures.append(_failure(job, before, num_ranks, ended))
        mode = job.spec.memory.mode
        if mode == "Disabled":
            return Rung()
        self.ran_out.append(ended.reason)
        if tries_are_used_up(self.ran_out):
            return Rung(f"giving up: {counted(len(self.ran_out) - 1, 'other plan')} ran out of memory, too")
        found = _fastest(_as_auto(job), num_ranks, self.failures, self.planned)
        if isinstance(found, Infeasible):
            return Rung(f"no other plan fits: {lacking(found, 'this machine')}")
        if obstacle := self._obstacle(found):
            return Rung(f"no other plan can be used: {obstacle}")
        sentence = change(before, found)
        if mode == "Advise":
            return Rung(f"mode Auto would replan: {sentence}")
        self.files = replace(self.files, plan=found)
        return Rung(f"replanned: {sentence}", taken=True)

    def _obstacle(self, found: MemoryPlan) -> str:
        """Why the plan cannot be used; empty = it can."""
        local = self.files.local
        if repeats(self.failures, found, pod_resources(local.job.spec, found, local.num_ranks).memory_bytes):
            return "it would need at least as much of the memory that ran out"
        try:
            self.reject(found)
        except UserError as error:
            return str(error)
        return ""


def _as_auto(job: TrainingJob) -> TrainingJob:
    memory = job.spec.memory.model_copy(update={"mode": "Auto"})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"memory": memory})})
