"""The plan of a sweep: every member's own plan, what all of them need together, and how they take turns.

On each device one member at a time has memory, or several with one frozen base (shared_base.py); the others wait with
their states (masters and moments) on NVMe. So of each device, and of the host for each device, a sweep needs what its
largest member needs, or the largest members that are attached together. Of NVMe it needs the same, and in addition the
device's part of the states of all members.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from typing import Literal

from spillway.api.sweep.members import member_training_job
from spillway.api.training_job import TrainingJob, TrainingJobSpec
from spillway.plan import SLAB_EXTRA_BYTES, Infeasible, MemberPlan, MemoryPlan, Prediction, Tier, TierBytes, Turns
from spillway.planning.hardware import NodeSpec
from spillway.planning.model_shape import ModelShape, shape_of
from spillway.planning.shared_base import PlanOne, Together, bases, planned_together
from spillway.planning.workload import PAGE_BYTES, padded
from spillway.units import MIB, format_bytes, format_quantity, format_seconds

DAY_SECONDS = 86400.0

PARKING_SHARE, REPORTING_SHARE = 0.02, 0.1
"""Shares of a turn's seconds that parking may take; turns are made longer until it takes no more. The second share
applies if others wait for the figures at the end of a turn; predicted seconds of a turn are too short for small
models."""
TURNS = 5
"""Number of turns of a member if the spec does not say after how many steps its figures are needed."""
SECONDS_PER_TENSOR, SECONDS_PER_PARKED_BYTE = 3e-4, 3e-9
"""Seconds of parking per turn on one core: per parameter tensor, for building a model, its memory and hooks; per byte,
for copying states out and in, with fresh pages and checksums. Measured once, on a busy 2-core machine: 21 to 219
tensors, 0.4 to 545 MiB."""
PARKING_BUFFER_BYTES = 4 * MIB
"""Host memory through which states pass to NVMe and back."""


def plan_sweep(
    job: TrainingJob,
    node: NodeSpec,
    shape: ModelShape | None,
    nvme_budget_bytes: int,
    num_devices: int,
    plan_one: PlanOne,
) -> MemoryPlan | Infeasible:
    """The plan of a sweep. Budget and plan are those of one of `num_devices`. Infeasible, with the member's name, if a
    member does not fit. `shape`: the shape of the job's own model, if it was inspected."""
    jobs = {member.name: member_training_job(job, member) for member in job.spec.members}
    shapes = {name: _shape(one, job, shape, node) for name, one in jobs.items()}
    parked = {name: parked_bytes(one.spec, shapes[name]) for name, one in jobs.items()}
    part = padded(ceil(sum(parked.values()) / num_devices), PAGE_BYTES)
    reserved = {Tier.HOST: PARKING_BUFFER_BYTES, Tier.NVME: part} if len(jobs) > 1 else {}
    if reserved.get(Tier.NVME, 0) > nvme_budget_bytes:
        return _no_room_to_park(job, node, parked, nvme_budget_bytes, part)
    sharing = dict(_sharing(jobs, shapes, reserved, num_devices, plan_one))
    members = list[MemberPlan]()
    for name, one in jobs.items():
        base, together = sharing.get(name, ("", None))
        plan = together.plan if together is not None else plan_one(one, reserved, False)
        if isinstance(plan, Infeasible):
            return _of_member(plan, name, reserved)
        members.append(
            MemberPlan(
                name=name,
                plan=plan.model_copy(update={"job": one.metadata.name, "alternatives": ()}),
                parked_bytes=parked[name],
                num_steps=one.spec.training.num_steps,
                parking_seconds=_parking_seconds(parked[name], shapes[name].num_tensors, node) if reserved else 0.0,
                base=base,
                num_attached=1 if together is None else together.num_attached,
            )
        )
    return _envelope(job, node, members, turns(job.spec, members, num_devices))


def _sharing(
    jobs: Mapping[str, TrainingJob],
    shapes: Mapping[str, ModelShape],
    reserved: Mapping[Tier, int],
    num_devices: int,
    plan_one: PlanOne,
) -> Iterator[tuple[str, tuple[str, Together]]]:
    """For each member that shares its base: the first member on that base, and how its members are attached."""
    for first, names in bases({name: one.spec for name, one in jobs.items()}).items():
        of_names = [jobs[name] for name in names]
        most = ceil(len(names) / num_devices)  # spread evenly over the devices
        together = planned_together(of_names, [shapes[name] for name in names], most, reserved, plan_one)
        if together is not None:
            yield from ((name, (first, together)) for name in names)


def parked_bytes(spec: TrainingJobSpec, shape: ModelShape) -> int:
    """Bytes of a parked member: masters and moments of everything that is trained, one after the other, in whole
    pages."""
    optimizer = spec.training.optimizer
    short_blocks = optimizer.moment_type.scale_bytes * len(optimizer.rule.moments) * shape.num_tensors
    states = ceil(optimizer.rule.states_bytes(True, optimizer.moment_type) * shape.num_trained)
    return padded(states + short_blocks, PAGE_BYTES)


def turns(spec: TrainingJobSpec, members: Sequence[MemberPlan], num_devices: int = 1) -> Turns:
    """Turns end when a member reports figures: at its evaluations, else at rounds of successive halving; they are
    longer if parking would take more than REPORTING_SHARE of them. Members that report nothing get turns of a fifth of
    their steps, longer if parking would take more than PARKING_SHARE."""
    reports = _reporting_steps(spec)
    wanted = reports or max(1, min(one.num_steps for one in members) // TURNS)
    share = REPORTING_SHARE if reports else PARKING_SHARE
    least = max(
        ceil(one.parking_seconds / (share * one.plan.prediction.step_seconds))
        if one.plan.prediction.step_seconds
        else 1
        for one in members
    )
    longest = max(one.num_steps for one in members)
    num_steps = min(longest, wanted * max(1, ceil(least / wanted)))
    num_attached = max(one.num_attached for one in members)
    never_parks = num_attached * num_devices >= len(members) and not (spec.objective and spec.objective.halving)
    training = [one.num_steps * one.plan.prediction.step_seconds for one in members]
    alone = [
        seconds + (0.0 if never_parks else one.parking_seconds * (ceil(one.num_steps / num_steps) - 1))
        for one, seconds in zip(members, training, strict=True)
    ]
    in_turn: Literal["RoundRobin", "LongestFirst"] = "RoundRobin" if num_devices == 1 else "LongestFirst"
    return Turns(
        policy=in_turn if num_steps < longest and len(members) > 1 else "Sequential",
        num_devices=num_devices,
        num_steps=num_steps,
        num_attached=num_attached,
        seconds=max(sum(alone) / num_devices, *alone, 0.0),
        bound_seconds=max(sum(training) / num_devices, *training),
    )


def _reporting_steps(spec: TrainingJobSpec) -> int:
    """Steps after which a member reports figures; 0: the spec does not say."""
    if spec.data.evaluation is not None:
        return spec.data.evaluation.every_steps
    return (spec.objective.halving or 0) if spec.objective is not None else 0


def _parking_seconds(nbytes: int, num_tensors: int, node: NodeSpec) -> float:
    """Seconds of writing states out and reading them in again, into a rebuilt model."""
    disk = nbytes * (1 / node.nvme_write_bytes_per_second + 1 / node.nvme_read_bytes_per_second)
    return disk + nbytes * SECONDS_PER_PARKED_BYTE + num_tensors * SECONDS_PER_TENSOR


def _shape(one: TrainingJob, job: TrainingJob, shape: ModelShape | None, node: NodeSpec) -> ModelShape:
    inspected = shape and shape.of_member(one.spec, job.spec)
    return inspected or shape_of(one.spec, node.device_kind)


def _envelope(job: TrainingJob, node: NodeSpec, members: Sequence[MemberPlan], how: Turns) -> MemoryPlan:
    """The plan for which the pod and the budgets are made; all else is from the plan of the member that needs most."""
    largest = max(members, key=lambda one: (one.plan.bytes[Tier.DEVICE].total, one.plan.bytes[Tier.HOST].total)).plan
    slowest = max((one.plan.prediction for one in members), key=lambda one: one.step_seconds)
    halves = job.spec.objective is not None and job.spec.objective.halving is not None
    parks = len(members) > 1 and (how.num_devices > 1 or how.policy != "Sequential" or halves)
    parked = padded(ceil(sum(one.parked_bytes for one in members) / how.num_devices), PAGE_BYTES) * parks
    return largest.model_copy(
        update={
            "job": job.metadata.name,
            "bytes": {
                Tier.DEVICE: largest.bytes[Tier.DEVICE],
                Tier.HOST: _with(_largest(members, Tier.HOST), buffers=PARKING_BUFFER_BYTES * parks),
                Tier.NVME: _with(
                    _largest(members, Tier.NVME),
                    optimizer_states=parked,
                    buffers=SLAB_EXTRA_BYTES * parks,
                ),
            },
            "budget": _budget(largest, parked, parks=parks),
            "prediction": _prediction(slowest, members, how, node),
            "reasons": tuple(_reasons(members, how, node)),
            "members": tuple(members),
            "turns": how,
        }
    )


def _largest(members: Sequence[MemberPlan], tier: Tier) -> TierBytes:
    return max((one.plan.bytes[tier] for one in members), key=lambda one: one.total)


def _with(held: TierBytes, **more: int) -> TierBytes:
    return held.model_copy(update={part: getattr(held, part) + nbytes for part, nbytes in more.items()})


def _budget(largest: MemoryPlan, parked: int, *, parks: bool) -> dict[Tier, int]:
    """The budgets before bytes for parking were subtracted."""
    taken = {Tier.HOST: PARKING_BUFFER_BYTES * parks, Tier.NVME: parked}
    return {tier: largest.budget[tier] + taken.get(tier, 0) for tier in Tier}


def _prediction(slowest: Prediction, members: Sequence[MemberPlan], how: Turns, node: NodeSpec) -> Prediction:
    """The prediction of a step of the slowest member. Its writes are those of one device to its share of the drives: of
    the member that writes most, and of parking."""
    share = 1.0 / how.num_devices
    parked = share * sum(one.parked_bytes * (ceil(one.num_steps / how.num_steps) - 1) for one in members)
    most = max((one.plan.prediction for one in members), key=lambda one: one.nvme_written_bytes_per_day)
    written = most.nvme_written_bytes_per_day + parked * min(1.0, DAY_SECONDS / max(how.seconds, 1e-9))
    rated, capacity = share * node.nvme_rated_bytes, share * max(1, node.nvme_bytes)
    return slowest.model_copy(
        update={
            "nvme_written_bytes_per_day": written,
            "drive_writes_per_day": written / capacity,
            "years_until_rated_writes": rated / written / 365.0 if rated and written else None,
            "nvme_read_bytes_per_second": most.nvme_read_bytes_per_second,
            "nvme_write_bytes_per_second": most.nvme_write_bytes_per_second,
        }
    )


def _reasons(members: Sequence[MemberPlan], how: Turns, node: NodeSpec) -> Iterator[str]:
    names = ", ".join(one.name for one in members)
    on = f" on {how.num_devices} devices" if how.num_devices > 1 else ""
    if how.policy == "Sequential":
        yield f"members: {names}{on}, one after the other"
    else:
        most = max(one.parking_seconds for one in members)
        yield (
            f"members: {names}{on} take turns of {how.num_steps} steps; between its turns a member's states are on "
            f"NVMe, and to store and load them takes at most {format_seconds(most)} a turn"
        )
    for one in members:
        if one.base == one.name:
            yield _said_of_base(one, [other.name for other in members if other.base == one.base])
    said = dict.fromkeys(reason for one in members for reason in one.plan.reasons)
    for reason in said:
        of = [one.name for one in members if reason in one.plan.reasons]
        yield f"{'all members' if len(of) == len(members) > 1 else ', '.join(of)}: {reason}"


def _said_of_base(first: MemberPlan, names: Sequence[str]) -> str:
    streams = first.plan.parameters.streams
    held = "each layer of it is loaded once for these" if streams else "it is on the device once for these"
    return (
        f"{', '.join(names)} share a frozen base model: {first.num_attached} of them train together, and {held}; their "
        "bytes and micro-batches are those of all that train together"
    )


def _no_room_to_park(
    job: TrainingJob, node: NodeSpec, parked: Mapping[str, int], budget_bytes: int, part_bytes: int
) -> Infeasible:
    """The outcome if NVMe cannot hold the parked states. `budget_bytes`: the budget of one device; `part_bytes`: its
    part of all parked states."""
    needed = sum(parked.values())
    largest = max(parked, key=lambda name: parked[name])
    return Infeasible(
        job=job.metadata.name,
        node=node.name,
        missing_bytes={Tier.NVME: part_bytes - budget_bytes},
        budget={Tier.NVME: budget_bytes},
        nearest=f"spec.memory.budget.nvme: more than {format_quantity(needed)}, which the states of the {len(parked)} "
        f"members take while others train (the largest: {largest}, {format_bytes(parked[largest])}), or fewer members",
    )


def _of_member(found: Infeasible, name: str, reserved: Mapping[Tier, int]) -> Infeasible:
    """`found` with the name of the member that does not fit, and with the budgets as given."""
    budget = {tier: amount + reserved.get(tier, 0) for tier, amount in found.budget.items()}
    return found.model_copy(update={"job": f"member {name} of {found.job}", "budget": budget})
