"""Members on one frozen base: adapters of one model, which is there once for all that are attached together.

Members with the same base are planned as one model with the micro-batches of all of them: what activations, boundaries
and streamed segments need is the same whether micro-batches belong to one member or to several. What each member has of
its own (adapters, their gradients and states) is set aside before, for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from spillway.api import TrainingJob, TrainingJobSpec
from spillway.footprint import (
    CACHE_LINE_BYTES,
    NUM_SLOTS,
    NUM_STAGING_BUFFERS,
    NUM_STATE_BUFFERS,
    PAGE_BYTES,
    padded,
)
from spillway.model_shape import FLOAT32_BYTES, ModelShape
from spillway.plan import Infeasible, MemoryPlan, Prediction, Tier

LARGEST_CHUNK, SMALLEST_CHUNK = 1 << 22, 1 << 16
"""parameters: between these a plan cuts its optimizer's update"""
NO_SLOWER = 1.01
"""members share a base unless a member's step would take longer than that many of its steps alone"""
ROWS = 4
"""of a chunk: master, two moments, accumulator"""

PlanOne = Callable[[TrainingJob, Mapping[Tier, int], bool], MemoryPlan | Infeasible]
"""the plan of one model whose budgets are less by some bytes per tier; whether these are several members' batches"""


@dataclass(frozen=True, slots=True)
class Together:
    """How members on one base are attached."""

    plan: MemoryPlan
    """of each; its bytes are those of all that are attached at a time"""
    num_attached: int


def bases(specs: Mapping[str, TrainingJobSpec]) -> dict[str, tuple[str, ...]]:
    """Members that have the same frozen base, in their order, by the name of the first; only where there are several.

    They differ in adapters, seed, learning rate and schedule, in data and numbers of the update: not in what is frozen,
    in the shape of a step, or in what states are kept.
    """
    found: dict[str, list[str]] = {}
    for name, spec in specs.items():
        if spec.model.lora is not None and spec.memory.mode == "Auto":
            found.setdefault(_base_of(spec), []).append(name)
    return {names[0]: tuple(names) for names in found.values() if len(names) > 1}


def _base_of(spec: TrainingJobSpec) -> str:
    """Equal where frozen parameters and the shape of a step are equal. Without a source, the seed draws the base."""
    training = spec.training
    steps = (
        training.sequence_length,
        training.micro_batch_size,
        training.global_batch_size,
        training.optimizer.name,
        training.optimizer.moments,
        None if spec.model.source is not None else training.seed,
    )
    return f"{spec.model.model_dump_json(exclude={'lora': {'rank', 'alpha'}})} {steps}"


def planned_together(
    jobs: Sequence[TrainingJob],
    shapes: Sequence[ModelShape],
    reserved: Mapping[Tier, int],
    plan_one: PlanOne,
) -> Together | None:
    """The plan with which most of `jobs`, which have one base, are attached together: all of them, a half, a quarter.

    None where two do not fit, or where a step of each would take longer than alone.
    """
    widest = max(range(len(jobs)), key=lambda index: shapes[index].num_trained)
    alone = plan_one(jobs[widest], reserved, False)
    for num_attached in _counts(len(jobs)):
        own = own_bytes(jobs[widest].spec, shapes[widest], num_attached)
        taken = {tier: reserved.get(tier, 0) + own[tier] for tier in Tier}
        plan = plan_one(_with_batches_of(jobs[widest], num_attached), taken, True)
        if isinstance(plan, Infeasible):
            continue
        shared = _of_each(plan, alone.budget, own, num_attached)
        if isinstance(alone, Infeasible) or (
            shared.prediction.step_seconds <= NO_SLOWER * alone.prediction.step_seconds
        ):
            return Together(shared, num_attached)
    return None


def own_bytes(spec: TrainingJobSpec, shape: ModelShape, num_attached: int) -> dict[Tier, int]:
    """What `num_attached` members have of their own beyond what the plan of one counts: adapters, which stay on the
    device, and of all but one gradients, states and the buffers of their update, wherever the plan will have them."""
    optimizer = spec.training.optimizer
    trained, largest = shape.num_trained, shape.largest_parameter
    chunk = min(LARGEST_CHUNK, largest)
    states = optimizer.rule.states_bytes(True, optimizer.moment_type)
    num_chunks = shape.num_tensors + trained // SMALLEST_CHUNK
    held = ceil((states + FLOAT32_BYTES) * trained) + CACHE_LINE_BYTES * ROWS * num_chunks
    passing = ROWS * padded(FLOAT32_BYTES * chunk)
    others = num_attached - 1
    return {
        Tier.DEVICE: num_attached * shape.trained_bytes * trained
        + others * (held + shape.trained_bytes * largest + NUM_SLOTS * passing),
        Tier.HOST: others
        * (padded(held) + 2 * NUM_STAGING_BUFFERS * padded(FLOAT32_BYTES * chunk) + NUM_STATE_BUFFERS * passing),
        Tier.NVME: others * (padded(ceil(states * trained)) + PAGE_BYTES * ROWS * num_chunks),
    }


def _counts(num_members: int) -> Iterator[int]:
    while num_members > 1:
        yield num_members
        num_members = ceil(num_members / 2) if num_members > 2 else 1


def _with_batches_of(job: TrainingJob, num_attached: int) -> TrainingJob:
    """`job` with as many micro-batches a step as so many members have together."""
    training = job.spec.training
    wider = training.model_copy(update={"global_batch_size": num_attached * training.global_batch_size})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"training": wider})})


def _of_each(plan: MemoryPlan, budget: Mapping[Tier, int], own: Mapping[Tier, int], num_attached: int) -> MemoryPlan:
    """What each member runs under, of the plan of all of them: its own micro-batches, and its part of a step. `budget`:
    before `own` was set aside."""
    uses = {
        Tier.DEVICE: True,
        Tier.HOST: plan.optimizer.offloads,
        Tier.NVME: plan.optimizer.nvme_share > 0.0,
    }
    held = {
        tier: plan.bytes[tier].model_copy(
            update={"optimizer_states": plan.bytes[tier].optimizer_states + own[tier] * uses[tier]}
        )
        for tier in Tier
    }
    return plan.model_copy(
        update={
            "num_micro_batches": plan.num_micro_batches // num_attached,
            "bytes": held,
            "budget": dict(budget),
            "prediction": _share_of(plan.prediction, num_attached),
        }
    )


def _share_of(whole: Prediction, num_attached: int) -> Prediction:
    """A member's part of a round of all: everything but its own update, which the plan of one counts once."""
    shared = whole.step_seconds - whole.exposed_optimizer_seconds

    def part(phase: str, amount: float) -> float:
        return amount if phase == "optimizer" else amount / num_attached

    return whole.model_copy(
        update={
            "step_seconds": shared / num_attached + whole.exposed_optimizer_seconds,
            "compute_seconds": whole.compute_seconds / num_attached,
            "exposed_transfer_seconds": whole.exposed_transfer_seconds / num_attached,
            "link_bytes": {link: nbytes // num_attached for link, nbytes in whole.link_bytes.items()},
            "phase_seconds": {phase: part(phase, seconds) for phase, seconds in whole.phase_seconds.items()},
            "work": {
                phase: {what: part(phase, amount) for what, amount in asked.items()}
                for phase, asked in whole.work.items()
            },
        }
    )
