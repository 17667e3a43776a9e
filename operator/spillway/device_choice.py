"""What `spec.parallelism.device: Auto` is: a GPU where one is, unless the job cannot run there. Pure."""

from __future__ import annotations

from spillway.api import TrainingJob, TrainingJobSpec
from spillway.hardware import DeviceKind


def on_device(job: TrainingJob, kind: DeviceKind) -> TrainingJob:
    """The job for exactly this kind of device."""
    parallelism = job.spec.parallelism.model_copy(update={"device": kind})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"parallelism": parallelism})})


def cpu_because(spec: TrainingJobSpec, num_ranks: int | None = None) -> str:
    """Why no GPU can run the job; empty where one can. `num_ranks`: of a local run; None = those of the spec."""
    ranks, strategy = num_ranks or spec.parallelism.world_size, spec.parallelism.strategy
    divides = ranks > 1 and strategy not in ("Auto", "Ddp")
    return f"{strategy} divides a model on CPUs alone so far" if divides else ""
