"""Resolves `spec.parallelism.device: Auto`: a GPU if there is one that can run the job, else a CPU. Pure."""

from __future__ import annotations

from typing import TypeVar

from spillway.api.job_spec import JobSpec
from spillway.api.script import ScriptJob
from spillway.api.training_job import TrainingJob
from spillway.plan import DeviceKind, MemoryPlan

Job = TypeVar("Job", TrainingJob, ScriptJob, TrainingJob | ScriptJob)


def devices(
    spec: JobSpec, lacking: str, has: str, before: DeviceKind | None, num_ranks: int
) -> list[tuple[DeviceKind, str]]:
    """What the job may run on, best first, each with why where it leaves that open. `lacking`: why there are no GPUs;
    `has`: which there are; `before`: what its attempts ran on, for another kind rounds otherwise."""
    asked, strategy = spec.parallelism.device, spec.parallelism.strategy
    if asked != "Auto":
        return [(asked, "")]
    if before is not None:
        return [(before, "as in earlier attempts")]
    if num_ranks > 1 and strategy not in ("Auto", "Ddp"):
        lacking = f"{strategy} runs on CPUs only so far"
    return [("Cpu", lacking)] if lacking else [("Cuda", has), ("Cpu", "")]


def on_device(job: Job, kind: DeviceKind) -> Job:
    """The job for exactly this kind of device."""
    parallelism = job.spec.parallelism.model_copy(update={"device": kind})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"parallelism": parallelism})})


def because(plan: MemoryPlan, why: str) -> MemoryPlan:
    """The plan with this device's reason first; unchanged if there was no choice."""
    reasons = (f"device: {plan.device}, {why}", *plan.reasons)
    return plan.model_copy(update={"reasons": reasons}) if why else plan
