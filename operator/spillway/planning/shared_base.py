"""Members that share one frozen base model: which of them, and how many are loaded together.

Members with the same base are planned as one model with the micro-batches of all of them, because activations,
boundaries and streamed segments need the same whether micro-batches belong to one member or to several. What each
member has of its own (adapters, their gradients and states) is subtracted from the budgets before, for each member.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from spillway.api.training_job import TrainingJob, TrainingJobSpec
from spillway.plan import Infeasible, MemoryPlan, OptimizerPlan, Prediction, Tier, TierBytes
from spillway.planning.candidates import LARGEST_PARTLY_RESIDENT_SHARE
from spillway.planning.footprint import DevicePeak, device_bytes, host_bytes, nvme_bytes
from spillway.planning.model_shape import ModelShape
from spillway.planning.workload import Blocks, Workload, chunk_parameters

OWN_ROWS = ("gradients", "optimizer_states", "buffers")
NO_SLOWER = 1.01
"""Members share a base unless a member's step would then take more than this many of its steps alone."""

PlanOne = Callable[[TrainingJob, Mapping[Tier, int], bool], MemoryPlan | Infeasible]
"""Plans one model with budgets reduced by some bytes per tier; the flag says whether its micro-batches are those of
several members."""


@dataclass(frozen=True, slots=True)
class Together:
    """How members on one base are attached."""

    plan: MemoryPlan
    """The plan of each member; its bytes are those of all members that are attached at the same time."""
    num_attached: int


def bases(specs: Mapping[str, TrainingJobSpec]) -> dict[str, tuple[str, ...]]:
    """Names of members that have the same frozen base, in their order, by the name of the first; only bases of several
    members.

    Members with one base may differ in adapters, seed, learning rate, schedule, data and coefficients of the update,
    but not in frozen parameters, the shape of a step, or the kinds of states.
    """
    found: dict[str, list[str]] = {}
    for name, spec in specs.items():
        if spec.model.lora is not None and spec.memory.mode == "Auto":
            found.setdefault(_base_of(spec), []).append(name)
    return {names[0]: tuple(names) for names in found.values() if len(names) > 1}


def _base_of(spec: TrainingJobSpec) -> str:
    """A key that is equal if frozen parameters and the shape of a step are equal. Without a source, the base depends on
    the seed."""
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
    most: int,
    reserved: Mapping[Tier, int],
    plan_one: PlanOne,
) -> Together | None:
    """The plan with which as many as possible of `jobs`, which have one base, are attached together: `most` of them, or
    a half, a quarter and so on.

    None if not even two fit, or if a step of each would take longer than alone.
    """
    by_width = sorted(range(len(jobs)), key=lambda index: -shapes[index].num_trained)
    widest = by_width[0]
    alone = plan_one(jobs[widest], reserved, False)
    for num_attached in _counts(most):
        attached = by_width[:num_attached]
        own = _most_own_bytes([_work(jobs[index], shapes[index], in_place=False) for index in attached])
        taken = {tier: reserved.get(tier, 0) + own[tier] for tier in Tier}
        plan = plan_one(_with_batches_of(jobs[widest], num_attached), taken, True)
        if isinstance(plan, Infeasible):
            continue
        works = [_work(jobs[index], shapes[index], in_place=plan.device == "Cpu") for index in attached]
        shared = _of_each(plan, alone.budget, own_bytes(works, plan.optimizer), num_attached)
        if isinstance(alone, Infeasible) or (
            shared.prediction.step_seconds <= NO_SLOWER * alone.prediction.step_seconds
        ):
            return Together(shared, num_attached)
    return None


def own_bytes(works: Sequence[Workload], optimizer: OptimizerPlan) -> dict[Tier, TierBytes]:
    """Bytes that members have of their own in addition to what the plan of the first counts: adapters of all members,
    which stay on the device; gradients, states and the update's buffers of all but the first, where `optimizer` places
    them. `works`: the work of each member."""
    nothing = Blocks(works[0].shape.num_layers)
    others = works[1:]
    held = {
        Tier.DEVICE: [device_bytes(work, optimizer, DevicePeak(0, 0, 0)) for work in others],
        Tier.HOST: [host_bytes(work, optimizer, nothing, 0) for work in others],
        Tier.NVME: [nvme_bytes(work, optimizer, nothing) for work in others],
    }
    adapters = sum(work.shape.trained_bytes * work.shape.num_trained for work in works)
    rows = {tier: {row: sum(getattr(one, row) for one in each) for row in OWN_ROWS} for tier, each in held.items()}
    return {tier: TierBytes(**rows[tier], parameters=adapters if tier is Tier.DEVICE else 0) for tier in Tier}


def _most_own_bytes(works: Sequence[Workload]) -> dict[Tier, int]:
    """The most that `own_bytes` can be with any split: nearly everything that is updated is on one of the four paths,
    and a chunk of it on another, which takes the buffers of both."""
    chunk, shares = chunk_parameters(works[0]), ("resident_share", "streamed_share", "cpu_share", "nvme_share")
    most, none = LARGEST_PARTLY_RESIDENT_SHARE, dict.fromkeys(shares, 0.0)
    paths = ({**none, one: most, "cpu_share" if one != "cpu_share" else "streamed_share": 1.0 - most} for one in shares)
    taken = [own_bytes(works, OptimizerPlan.model_validate({**path, "chunk_parameters": chunk})) for path in paths]
    return {tier: max(own[tier].total for own in taken) for tier in Tier}


def _work(job: TrainingJob, shape: ModelShape, *, in_place: bool) -> Workload:
    """The work of a member's update; nothing else is the member's own."""
    training = job.spec.training
    return Workload(
        shape,
        training.micro_batch_size,
        training.sequence_length,
        num_micro_batches=1,
        rule=training.optimizer.rule,
        moments=training.optimizer.moment_type,
        in_place=in_place,
    )


def _counts(num_members: int) -> Iterator[int]:
    while num_members > 1:
        yield num_members
        num_members = ceil(num_members / 2) if num_members > 2 else 1


def _with_batches_of(job: TrainingJob, num_attached: int) -> TrainingJob:
    """`job` with as many micro-batches per step as `num_attached` members have together."""
    training = job.spec.training
    wider = training.model_copy(update={"global_batch_size": num_attached * training.global_batch_size})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"training": wider})})


def _of_each(
    plan: MemoryPlan, budget: Mapping[Tier, int], own: Mapping[Tier, TierBytes], num_attached: int
) -> MemoryPlan:
    """The plan of each member, from the plan of all of them together: with its own micro-batches, and its part of a
    step. `budget`: the budgets before anything was subtracted."""
    held = {
        tier: plan.bytes[tier].model_copy(
            update={row: getattr(plan.bytes[tier], row) + getattr(own[tier], row) for row in ("parameters", *OWN_ROWS)}
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
    """A member's part of one round of all members: of everything except its own update, which the plan of all counts
    once."""
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
