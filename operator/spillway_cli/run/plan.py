"""Plans a job for this machine: its budgets, its cores, and the memory that device and host share on CPU nodes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from spillway.api.profiles import NodeProfileSpec
from spillway.api.training_job import TrainingJob, TrainingJobSpec
from spillway.errors import DoesNotFit, UserError
from spillway.feedback.profiles import with_rates
from spillway.placement.device_choice import because, devices, on_device
from spillway.plan import DeviceKind, Infeasible, MemoryPlan, Tier
from spillway.planning.candidates import run_strategies
from spillway.planning.corrections import NO_CORRECTIONS, Corrections
from spillway.planning.explain import lacking, shortfall
from spillway.planning.hardware import NodeSpec, gpu_node, local_node
from spillway.planning.model_shape import ModelShape
from spillway.planning.planner import Overrides, make_plan, plan_run
from spillway.planning.pod_resources import pod_runtime_bytes
from spillway.units import format_bytes, parse_bytes

from ..machine.gpus import Gpus
from ..machine.local_node import LocalResources
from ..machine.node_profile import Profiles, no_profile


@dataclass(frozen=True, slots=True)
class BudgetOverrides:
    """`--device`, `--host`, `--nvme`: quantities as in the YAML; None = the job's."""

    device: str | None = None
    host: str | None = None
    nvme: str | None = None


def with_budget(job: TrainingJob, overrides: BudgetOverrides) -> TrainingJob:
    """The job with the command line's budgets in spec.memory.budget. Raises UserError if one of them is not a
    quantity."""
    given = {"device": overrides.device, "host": overrides.host, "nvme": overrides.nvme}
    changes = {tier: quantity(tier, text) for tier, text in given.items() if text is not None}
    budget = job.spec.memory.budget.model_copy(update=changes)
    memory = job.spec.memory.model_copy(update={"budget": budget})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"memory": memory})})


def quantity(tier: str, text: str) -> int:
    """The bytes of `--TIER TEXT`. Raises UserError for what spec.memory.budget would also reject."""
    try:
        num_bytes = parse_bytes(text)
    except ValueError as error:
        raise UserError(f"--{tier}: {error}") from error
    if tier == "device" and not num_bytes:
        raise UserError(
            f"--device {text}: the memory budget of a device must be more than 0; leave --device out to use the "
            "job's budget or the default"
        )
    return num_bytes


def local_devices(
    spec: TrainingJobSpec, gpus: Gpus, num_ranks: int, before: MemoryPlan | None = None
) -> list[tuple[DeviceKind, str]]:
    """Like `devices`, for this machine. Raises UserError when the job needs GPUs that are missing here."""
    lacking_gpus = gpus.lacking(num_ranks)
    found = devices(spec, lacking_gpus, gpus.said, None if before is None else before.device)
    if found[0][0] == "Cuda" and lacking_gpus:
        began = "the run began on a GPU, but " if before else ""
        raise UserError(
            f"spec.parallelism.device = {spec.parallelism.device}: {began}no GPU can be used here: {lacking_gpus}; see "
            "`spillway doctor`, use Auto or Cpu, or plan for another machine (`spillway plan --node`)"
        )
    return found


def plan_for_this_machine(
    job: TrainingJob,
    resources: LocalResources,
    num_ranks: int = 1,
    shape: ModelShape | None = None,
    profiles: Profiles = no_profile,
) -> MemoryPlan:
    """Plans the job for this machine. `shape`: that of a model that had to be built; `profiles`: measured rates of this
    machine, else the catalog's.

    Raises DoesNotFit with the missing bytes per tier and the nearest configuration that fits.
    """
    outcome = decided_for_this_machine(job, resources, num_ranks, shape, profiles)
    if isinstance(outcome, Infeasible):
        raise DoesNotFit(describe(outcome))
    return outcome


def decided_for_this_machine(
    job: TrainingJob,
    resources: LocalResources,
    num_ranks: int = 1,
    shape: ModelShape | None = None,
    profiles: Profiles = no_profile,
    corrections: Corrections = NO_CORRECTIONS,
    before: MemoryPlan | None = None,
) -> MemoryPlan | Infeasible:
    """The plan for the first device kind on which the job fits; if none, what the preferred kind lacks."""
    found = list[Infeasible]()
    for device, why in local_devices(job.spec, resources.gpus, num_ranks, before):
        kept = None if before is None else before.kept_strategy
        asked = Overrides(world_size=num_ranks, shape=shape, corrections=corrections, kept=kept)
        outcome = _decided_on(device, job, resources, num_ranks, asked, profiles(device).spec)
        if isinstance(outcome, MemoryPlan):
            gpus = f"no plan fits on the GPU ({resources.gpus.said})"
            return because(outcome, f"{gpus}: {shortfall(found[0])}" if found else why)
        found.append(outcome)
    return found[0]


def _decided_on(
    device: DeviceKind,
    job: TrainingJob,
    resources: LocalResources,
    num_ranks: int,
    asked: Overrides,
    profile: NodeProfileSpec | None,
) -> MemoryPlan | Infeasible:
    runtime = pod_runtime_bytes(job.spec, num_ranks, device, run_strategies(job.spec, num_ranks, device)[0])
    memory_bytes = max(0, int(resources.memory_bytes / asked.corrections.pod) - runtime)
    if device == "Cuda":
        node = cuda_node(resources, memory_bytes, num_ranks)
    else:
        node = local_node(resources.cores, memory_bytes, memory_bytes, resources.disk_bytes)
    node = node if profile is None else with_rates(profile, node)
    own = on_device(job, device)
    outcome = plan_run(own, node, asked, memory_bytes, num_ranks, planned=make_plan, explained=True)
    if isinstance(outcome, Infeasible) and outcome.missing_bytes.get(Tier.NVME, 0) > 0:
        budget, free = job.spec.memory.budget.nvme, resources.disk_bytes
        disk = (
            f"; the disk to spill to has only {format_bytes(free)} free; free space there, or spill to another disk "
            "(spillway run --spill)"
        )
        if budget is None or free < budget:
            outcome = outcome.model_copy(update={"nearest": outcome.nearest + disk})
    if isinstance(outcome, Infeasible) and memory_bytes < runtime:
        left = "this container's memory limit leaves" if resources.is_limited else "this machine has free"
        takes = f"{format_bytes(resources.memory_bytes)}, but the trainer itself needs {format_bytes(runtime)}"
        return outcome.model_copy(update={"nearest": f"{outcome.nearest}; {left} {takes}; provide more memory"})
    return outcome


def cuda_node(resources: LocalResources, memory_bytes: int, num_ranks: int) -> NodeSpec:
    """This machine with the catalog's class of the first GPU, and the least free memory among the GPUs in use."""
    used = resources.gpus.found[:num_ranks]
    product = used[0].name.replace(" ", "-")  # as feature discovery names it in a cluster
    node = gpu_node(product, min(gpu.free_bytes for gpu in used), len(resources.gpus.found))
    here: dict[str, Any] = {
        "num_cores": resources.cores,
        "host_bytes": memory_bytes,
        "nvme_bytes": resources.disk_bytes,
    }
    return replace(node, name=f"local-{node.name}", nvme_rated_bytes=0.0, **here)


def describe(outcome: Infeasible) -> str:
    return lacking(outcome, "this machine")
