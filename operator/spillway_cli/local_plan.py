"""The plan of a job for this machine: its budgets, its cores, and the memory that device and host share here."""

from __future__ import annotations

from dataclasses import dataclass

from spillway.api import TrainingJob
from spillway.errors import DoesNotFit, UserError
from spillway.hardware import local_node
from spillway.plan import Infeasible, MemoryPlan
from spillway.planner import Overrides, make_plan
from spillway.units import MIB, format_bytes, parse_quantity

from .local_node import LocalResources

RUNTIME_BYTES = 512 * MIB
"""the interpreter, torch and the corpus, before the first parameter"""
DEVICE_SHARE = 0.75
"""of the machine's memory that counts as the device where no budget says so; the rest is the host tier"""


@dataclass(frozen=True, slots=True)
class BudgetOverrides:
    """`--device`, `--host`, `--nvme`: quantities as in the YAML; none = what the job says."""

    device: str | None = None
    host: str | None = None
    nvme: str | None = None


def with_budget(job: TrainingJob, overrides: BudgetOverrides) -> TrainingJob:
    """The job with the command line's budgets in spec.memory.budget. Raises UserError for what is no quantity."""
    given = {"device": overrides.device, "host": overrides.host, "nvme": overrides.nvme}
    changes = {tier: quantity(tier, text) for tier, text in given.items() if text is not None}
    budget = job.spec.memory.budget.model_copy(update=changes)
    memory = job.spec.memory.model_copy(update={"budget": budget})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"memory": memory})})


def quantity(tier: str, text: str) -> int:
    """The bytes of `--TIER TEXT`. Raises UserError for what spec.memory.budget would refuse, too."""
    try:
        num_bytes = parse_quantity(text)
    except ValueError as error:
        raise UserError(f"--{tier}: {error}") from error
    if tier == "device" and not num_bytes:
        raise UserError(f"--device: {text} is too little, more than 0 is needed; leave it out for what the node has")
    return num_bytes


def plan_for_this_machine(job: TrainingJob, resources: LocalResources) -> MemoryPlan:
    """Raises DoesNotFit with the missing bytes per tier and the nearest configuration that fits."""
    memory_bytes = max(0, resources.memory_bytes - RUNTIME_BYTES)
    node = local_node(resources.cores, memory_bytes, memory_bytes, resources.disk_bytes)
    outcome = make_plan(job, node, shared_memory(job, memory_bytes))
    if isinstance(outcome, Infeasible):
        raise DoesNotFit(describe(outcome))
    return outcome


def shared_memory(job: TrainingJob, memory_bytes: int) -> Overrides:
    """On a CPU, device and host are the same memory: what the device may take, the host tier cannot."""
    budget = job.spec.memory.budget
    wanted = int(memory_bytes * DEVICE_SHARE) if budget.device is None else budget.device
    device_bytes = min(wanted, memory_bytes)
    left = memory_bytes - device_bytes
    host_bytes = left if budget.host is None else min(budget.host, left)
    return Overrides(device_bytes=device_bytes, host_bytes=host_bytes, world_size=1)


def describe(outcome: Infeasible) -> str:
    missing = ", ".join(
        f"{tier} lacks {format_bytes(lacking)} (budget {format_bytes(outcome.budget.get(tier, 0))})"
        for tier, lacking in outcome.missing_bytes.items()
        if lacking > 0
    )
    return f"{outcome.job} does not fit this machine: {missing}; what would fit: {outcome.nearest}"
