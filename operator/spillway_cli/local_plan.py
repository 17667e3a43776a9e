"""The plan of a job for this machine: its budgets, its cores, and the memory that device and host share here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from spillway.api import NodeProfileSpec, TrainingJob
from spillway.corrections import NO_CORRECTIONS, Corrections
from spillway.errors import DoesNotFit, UserError
from spillway.explain import lacking
from spillway.hardware import local_node
from spillway.model_shape import ModelShape
from spillway.plan import Infeasible, MemoryPlan
from spillway.planner import make_plan, run_strategy, shared_memory
from spillway.pod_resources import pod_runtime_bytes
from spillway.profiles import with_rates
from spillway.units import format_bytes, parse_bytes

from .local_node import LocalResources


@dataclass(frozen=True, slots=True)
class BudgetOverrides:
    """`--device`, `--host`, `--nvme`: quantities as in the YAML; none = what the job says."""

    device: str | None = None
    host: str | None = None
    nvme: str | None = None


def with_budget(job: TrainingJob, overrides: BudgetOverrides) -> TrainingJob:
    """The job with the command line's budgets in spec.memory.budget. Raises UserError for what is not a quantity."""
    given = {"device": overrides.device, "host": overrides.host, "nvme": overrides.nvme}
    changes = {tier: quantity(tier, text) for tier, text in given.items() if text is not None}
    budget = job.spec.memory.budget.model_copy(update=changes)
    memory = job.spec.memory.model_copy(update={"budget": budget})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"memory": memory})})


def quantity(tier: str, text: str) -> int:
    """The bytes of `--TIER TEXT`. Raises UserError for what spec.memory.budget would refuse, too."""
    try:
        num_bytes = parse_bytes(text)
    except ValueError as error:
        raise UserError(f"--{tier}: {error}") from error
    if tier == "device" and not num_bytes:
        raise UserError(f"--device: {text} is too little, more than 0 is needed; leave it out for what the node has")
    return num_bytes


def plan_for_this_machine(
    job: TrainingJob,
    resources: LocalResources,
    num_ranks: int = 1,
    shape: ModelShape | None = None,
    profile: NodeProfileSpec | None = None,
) -> MemoryPlan:
    """`shape`: of a model that had to be inspected; `profile`: what was measured of this machine, else the catalog's.

    Raises DoesNotFit with the missing bytes per tier and the nearest configuration that fits.
    """
    outcome = decided_for_this_machine(job, resources, num_ranks, shape, profile)
    if isinstance(outcome, Infeasible):
        raise DoesNotFit(describe(outcome))
    return outcome


def decided_for_this_machine(
    job: TrainingJob,
    resources: LocalResources,
    num_ranks: int = 1,
    shape: ModelShape | None = None,
    profile: NodeProfileSpec | None = None,
    corrections: Corrections = NO_CORRECTIONS,
) -> MemoryPlan | Infeasible:
    runtime = pod_runtime_bytes(job.spec, num_ranks, "Cpu", run_strategy(job.spec))
    memory_bytes = max(0, int(resources.memory_bytes / corrections.pod) - runtime)
    node = local_node(resources.cores, memory_bytes, memory_bytes, resources.disk_bytes)
    node = node if profile is None else with_rates(profile, node)
    shared = shared_memory(job, memory_bytes, num_ranks)
    outcome = make_plan(job, node, replace(shared, world_size=num_ranks, shape=shape, corrections=corrections))
    if isinstance(outcome, Infeasible) and memory_bytes < runtime:
        left = "the memory limit of this container leaves" if resources.is_limited else "free on this machine are"
        takes = f"{format_bytes(resources.memory_bytes)}, and the trainer itself takes {format_bytes(runtime)}"
        return outcome.model_copy(update={"nearest": f"{outcome.nearest}; {left} {takes}: give it more"})
    return outcome


def describe(outcome: Infeasible) -> str:
    return lacking(outcome, "this machine")
