"""Resolves `spec.parallelism.device: Auto`: a GPU if there is one that can run the job, else a CPU. Pure."""

from __future__ import annotations

from typing import TypeVar

from spillway.api.job_spec import JobSpec
from spillway.api.script import ScriptJob
from spillway.api.training_job import TrainingJob
from spillway.plan import DeviceKind, MemoryPlan

Job = TypeVar("Job", TrainingJob, ScriptJob, TrainingJob | ScriptJob)


def devices(spec: JobSpec, lacking: str, has: str, before: DeviceKind | None) -> list[tuple[DeviceKind, str]]:
    """Returns the kinds of device that the job may run on, best first, each with the reason if the job leaves the kind
    open. `lacking`: why there are no GPUs; `has`: which GPUs there are; `before`: what earlier attempts ran on, which
    is kept because another kind rounds differently."""
    asked = spec.parallelism.device
    if asked != "Auto":
        return [(asked, "")]
    if before is not None:
        return [(before, "as in earlier attempts")]
    return [("Cpu", lacking)] if lacking else [("Cuda", has), ("Cpu", "")]


def on_device(job: Job, kind: DeviceKind) -> Job:
    """Returns the job for exactly this kind of device."""
    parallelism = job.spec.parallelism.model_copy(update={"device": kind})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"parallelism": parallelism})})


def because(plan: MemoryPlan, why: str) -> MemoryPlan:
    """Returns the plan with the reason for its device first; unchanged if there was no choice."""
    reasons = (f"device: {plan.device}, {why}", *plan.reasons)
    return plan.model_copy(update={"reasons": reasons}) if why else plan
