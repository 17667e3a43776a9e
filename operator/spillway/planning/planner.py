"""Planner: candidates -> those that fit every tier -> the fastest; says why the others lost. Pure, without torch.

job + node + overrides -> Question -> candidates (candidates.py) -> MemoryPlan | Infeasible, explained (explain.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

from spillway.api.sweep.members import devices_problems
from spillway.api.training_job import TrainingJob, TrainingJobSpec
from spillway.errors import UserError
from spillway.plan import ActivationPlan, Alternative, Infeasible, MemoryPlan, Policy, Strategy, Tier
from spillway.planning.candidates import Question, Timed, best, run_strategies, timed
from spillway.planning.corrections import NO_CORRECTIONS, Corrections, corrected
from spillway.planning.explain import alternatives, infeasible, reasons, reasons_unplanned, unexplained
from spillway.planning.footprint import parameter_plan
from spillway.planning.hardware import NodeSpec
from spillway.planning.model_shape import ModelShape, shape_of
from spillway.planning.pod_resources import checkpoint_bytes, memory_bytes, pod_runtime_bytes, with_snapshot
from spillway.planning.search import Search, as_specified
from spillway.planning.step_time import amounts
from spillway.planning.sweep_plan import plan_sweep
from spillway.planning.workload import STREAMING_STRATEGIES, ZERO_STRATEGIES, sharding_problem
from spillway.units import format_bytes

DEVICE_SHARE = 0.75
"""The device's share of a CPU node's memory if no budget names it; the rest is the host tier."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """What a caller knows better than the spec: budgets in bytes per device and per node, ranks of a local run."""

    device_bytes: int | None = None
    host_bytes: int | None = None
    nvme_bytes: int | None = None
    world_size: int | None = None
    member_devices: int | None = None
    """Devices of a sweep; each member is planned for one of them. Budgets are those of all."""
    strategy: Strategy | None = None
    """The strategy to plan for; None: the spec's, or for Auto the first that fits."""
    kept: Strategy | None = None
    """The strategy of earlier attempts, which Auto keeps."""
    shape: ModelShape | None = None
    """Shape of an inspected model; None: by the sizes of spec.model."""
    corrections: Corrections = NO_CORRECTIONS
    """Corrections of predicted bytes, for mode Auto."""


NO_OVERRIDES = Overrides()


def shared_memory(
    job: TrainingJob, memory_bytes: int, num_local_ranks: int = 1, device_share: float = DEVICE_SHARE
) -> Overrides:
    """Overrides for a run on a CPU, where device and host are the same memory: the host tier of the node cannot use
    what the ranks' devices may take. `memory_bytes` is the node's memory without that of the processes; the devices get
    the share `device_share` of it if the job does not say."""
    budget, share = job.spec.memory.budget, memory_bytes // num_local_ranks
    wanted = int(share * device_share) if budget.device is None else budget.device
    device_bytes = min(wanted, share)
    left = memory_bytes - num_local_ranks * device_bytes
    host_bytes = left if budget.host is None else min(budget.host, left)
    return Overrides(device_bytes=device_bytes, host_bytes=host_bytes)


class Planned(Protocol):
    """make_plan, or known_plan, which remembers its answers."""

    def __call__(
        self, job: TrainingJob, node: NodeSpec, overrides: Overrides, *, explained: bool
    ) -> MemoryPlan | Infeasible: ...


def plan_run(
    job: TrainingJob,
    node: NodeSpec,
    overrides: Overrides,
    shared_bytes: int,
    num_local_ranks: int,
    *,
    planned: Planned,
    explained: bool,
) -> MemoryPlan | Infeasible:
    """The plan of a run on `node`, in a cluster or on this machine, with `shared_bytes` of memory for device and host.

    On CPU nodes without a device budget the memory is split 75/25 between device and host; if that does not fit, 25/75.
    Raises UserError as make_plan does.
    """
    strategies = _strategies(job.spec, node, overrides)
    # What callers have subtracted already.
    first = run_strategies(job.spec, overrides.world_size or job.spec.num_ranks, node.device_kind)[0]
    runtimes = {
        one: pod_runtime_bytes(job.spec, num_local_ranks, node.device_kind, one) for one in {first, *strategies}
    }

    def plan(strategy: Strategy, *, explained: bool) -> MemoryPlan | Infeasible:
        asked, more = replace(overrides, strategy=strategy), runtimes[strategy] - runtimes[first]
        if node.device_kind != "Cpu":
            left = replace(node, host_bytes=max(0, node.host_bytes - more))
            return planned(job, left, asked, explained=explained)

        def split(device_share: float, *, explained: bool) -> MemoryPlan | Infeasible:
            shared = shared_memory(job, max(0, shared_bytes - more), num_local_ranks, device_share)
            both = replace(asked, device_bytes=shared.device_bytes, host_bytes=shared.host_bytes)
            return planned(job, node, both, explained=explained)

        found = split(DEVICE_SHARE, explained=explained)
        is_split = bool(shared_bytes) and job.spec.memory.budget.device is None
        if isinstance(found, MemoryPlan) or not is_split or Tier.HOST not in found.missing_bytes:
            return found
        other = split(1.0 - DEVICE_SHARE, explained=False)  # what would make it fit is computed for one split only
        if isinstance(other, Infeasible):
            return found
        return split(1.0 - DEVICE_SHARE, explained=True) if explained else other

    return _first_that_fits(strategies, plan, explained=explained)


def _strategies(spec: TrainingJobSpec, node: NodeSpec, overrides: Overrides) -> Sequence[Strategy]:
    found = run_strategies(spec, overrides.world_size or spec.num_ranks, node.device_kind)
    for one in (overrides.strategy, overrides.kept):
        if one in found:
            return (one,)
    return found


def _first_that_fits(
    strategies: Sequence[Strategy], plan: Callable[..., MemoryPlan | Infeasible], *, explained: bool
) -> MemoryPlan | Infeasible:
    """The plan of the first strategy that fits; if none does, what the strategy lacks that lacks least. A strategy
    that the other parts of the spec exclude counts only if it is the first."""
    nearest = plan(strategies[0], explained=explained)
    for strategy in strategies[1:]:
        if isinstance(nearest, MemoryPlan):
            break
        with suppress(UserError):
            found = plan(strategy, explained=False)
            if isinstance(found, MemoryPlan) or sum(found.missing_bytes.values()) < sum(nearest.missing_bytes.values()):
                nearest = plan(strategy, explained=True) if explained else found
    return nearest


NOT_PLANNED_FOR: Mapping[str, Mapping[str, bool | Mapping[str, bool]]] = {
    "training": {"seed": True, "schedule": True, "optimizer": {"learning_rate": True}}
}
"""Fields of a spec that change no plan: members of a sweep that differ only in these share one plan."""


def make_plan(
    job: TrainingJob, node: NodeSpec, overrides: Overrides = NO_OVERRIDES, *, explained: bool = True
) -> MemoryPlan | Infeasible:
    """The plan for `job` on nodes like `node`; Infeasible when mode Auto finds none that fits. Without `explained`, a
    plan has no alternatives and an Infeasible says only what is missing, because it takes many plans to find out more.

    Raises UserError when the job asks for devices that the node does not have, or for parts that exclude one another.
    """
    strategies = _strategies(job.spec, node, overrides)
    if overrides.strategy not in strategies:

        def plan(strategy: Strategy, *, explained: bool) -> MemoryPlan | Infeasible:
            return make_plan(job, node, replace(overrides, strategy=strategy), explained=explained)

        return _first_that_fits(strategies, plan, explained=explained)
    found = _planned(job, node, overrides, explained=explained)
    if isinstance(found, Infeasible):
        return found
    if not found.members and not overrides.corrections.after_failure:
        found = with_snapshot(job.spec, found)
    ranks = overrides.world_size or job.spec.parallelism.devices_per_node
    processes = pod_runtime_bytes(job.spec, ranks, found.device, found.strategy)
    machine = memory_bytes(job.spec, found, ranks)
    return found.model_copy(update={"process_bytes": processes, "machine_bytes": machine})


def _planned(job: TrainingJob, node: NodeSpec, overrides: Overrides, *, explained: bool) -> MemoryPlan | Infeasible:
    if not job.spec.members:
        return _plan_of_one(job, node, overrides, explained=explained)
    num_devices = overrides.world_size or job.spec.parallelism.devices_per_node
    for problem in devices_problems(job.spec, num_devices):
        raise UserError(str(problem))
    overrides = replace(overrides, world_size=None, member_devices=num_devices)
    budget = ask(job, node, overrides).budget
    known: dict[tuple[str, tuple[tuple[Tier, int], ...], bool], MemoryPlan] = {}

    def plan_one(member: TrainingJob, reserved: Mapping[Tier, int], together: bool) -> MemoryPlan | Infeasible:
        """Plans a member; explained only if it does not fit, because the alternatives of members are not part of a
        sweep's plan."""
        what = member.spec.model_dump_json(exclude=NOT_PLANNED_FOR), tuple(sorted(reserved.items())), together
        if what in known:
            return known[what]
        device, host, nvme = (max(0, budget[tier] - reserved.get(tier, 0)) for tier in Tier)
        shape = overrides.shape and overrides.shape.of_member(member.spec, job.spec)
        # Corrections are those of the whole sweep; none are known for single members.
        left = replace(
            overrides,
            device_bytes=device,
            host_bytes=host * num_devices,
            nvme_bytes=nvme * num_devices,
            shape=shape,
            corrections=NO_CORRECTIONS,
        )
        found = _plan_of_one(member, node, left, explained=False, together=together)
        if isinstance(found, Infeasible):
            explains = explained and not together
            return _plan_of_one(member, node, left, explained=True, reserved=reserved) if explains else found
        known[what] = found
        return found

    return plan_sweep(job, node, overrides.shape, budget[Tier.NVME], num_devices, plan_one)


def _plan_of_one(
    job: TrainingJob,
    node: NodeSpec,
    overrides: Overrides,
    *,
    explained: bool,
    together: bool = False,
    reserved: Mapping[Tier, int] = MappingProxyType({}),
) -> MemoryPlan | Infeasible:
    """Like `make_plan`, for one model. `together`: whether its micro-batches are those of several members on its base.
    `reserved`: what was subtracted from the budgets in `overrides`."""
    question, corrections = replace(ask(job, node, overrides), reserved=reserved), overrides.corrections
    search = Search(replace(question, budget=corrections.searched(question.budget)))
    search = search.visited_once() if together else search
    if search.is_empty:
        raise UserError(_contradiction(question))
    if question.mode != "Auto":
        chosen = timed(question, as_specified(question))
        advised = _advised(search.question) if question.mode == "Advise" else None
        unplanned = _plan(question, chosen, reasons_unplanned(search, chosen, advised), ())
        if 0 < (budget := question.budget[Tier.DEVICE]) <= unplanned.nccl_bytes:
            raise UserError(
                f"spec.memory.budget.device = {format_bytes(budget)}: with several ranks on Cuda devices, NCCL alone "
                f"needs {format_bytes(unplanned.nccl_bytes)} of it; raise it"
            )
        return unplanned
    choices = search.choices()
    if not choices and not corrections.change_nothing:
        return corrections.lacking(unexplained(search), question.budget)
    if not choices:
        return infeasible(search) if explained else unexplained(search)
    chosen = best(choices)
    others = alternatives(search, chosen) if explained else ()
    return corrected(_plan(question, chosen, reasons(search, chosen), others), corrections)


def _advised(question: Question) -> Timed | None:
    for strategy in run_strategies(question.job.spec, question.world_size, question.node.device_kind):
        if choices := Search(replace(question, strategy=strategy)).choices():
            return best(choices)
    return None


def _contradiction(question: Question) -> str:
    """Why no candidate has all that the question forces. Parameters are streamed only if the CPU updates them, and if
    every rank has whole segments."""
    if question.placement == "Device":
        return (
            "spec.memory.advanced.optimizer.placement = Device: conflicts with "
            "spec.memory.advanced.parameters.placement = Stream, because the CPU updates streamed parameters; use "
            "Auto, or spec.memory.advanced.parameters.placement: Resident"
        )
    if question.overlap == "Backward":
        return (
            "spec.memory.advanced.optimizer.overlap = Backward: streamed parameters cannot be updated during backward, "
            "because their old values would be lost if the update has to be discarded; use overlap Auto or Forward, or "
            "spec.memory.advanced.parameters.placement: Resident"
        )
    return (
        f"spec.parallelism.strategy = {question.strategy}: parameters cannot be streamed with a strategy that shards "
        f"them; use "
        f"{' or '.join(sorted(STREAMING_STRATEGIES))}, or spec.memory.advanced.parameters.placement: Resident"
    )


def ask(job: TrainingJob, node: NodeSpec, overrides: Overrides = NO_OVERRIDES) -> Question:
    """Resolve spec, node and overrides into one question."""
    spec = job.spec
    parallelism, memory = spec.parallelism, spec.memory
    local_ranks = overrides.member_devices or overrides.world_size or parallelism.devices_per_node
    world_size = 1 if overrides.member_devices else overrides.world_size or parallelism.world_size
    _check_devices(job, node, local_ranks)
    micro_batch_size = spec.training.micro_batch_size
    if spec.training.global_batch_size % (micro_batch_size * world_size):
        raise UserError(
            f"spec.training.globalBatchSize = {spec.training.global_batch_size}: must be a multiple of "
            f"microBatchSize x ranks ({micro_batch_size} x {world_size})"
        )
    if memory.advanced.optimizer.overlap == "Backward" and world_size > 1:
        raise UserError(
            f"spec.memory.advanced.optimizer.overlap = Backward: {world_size} ranks must sum their gradients before "
            "any update, so updates cannot overlap backward; use Auto or Forward"
        )
    strategy = overrides.strategy or run_strategies(spec, world_size, node.device_kind)[0]
    all_devices = node.num_devices if node.device_kind == "Cuda" else local_ranks

    def of_node(override: int | None, budget: int | None, capacity: int) -> int:
        """Bytes of a rank. If neither `override` nor `budget` is given, a rank gets the same share of a GPU node's
        memory as of its devices."""
        if override is None and budget is None:
            return capacity // all_devices
        return _least(override, budget, capacity) // local_ranks

    if memory.advanced.optimizer.overlap == "Forward" and world_size > 1 and strategy in ZERO_STRATEGIES:
        raise UserError(
            f"spec.memory.advanced.optimizer.overlap = Forward: with spec.parallelism.strategy = {strategy} "
            "updates cannot overlap the next forward, which needs the updates of all ranks; use Auto or None, or "
            "strategy Ddp or Fsdp"
        )
    shape = overrides.shape or shape_of(spec, node.device_kind)
    parameters = {segment.name: segment.parameters for segment in shape.segments}
    if problem := sharding_problem(strategy, node.device_kind, world_size, parameters):
        raise UserError(f"spec.parallelism.strategy = {strategy}: {problem}")
    return Question(
        job=job,
        shape=shape,
        node=node,
        budget={
            Tier.DEVICE: _least(overrides.device_bytes, memory.budget.device, node.bytes_of_device(local_ranks)),
            Tier.HOST: of_node(overrides.host_bytes, memory.budget.host, node.host_bytes),
            Tier.NVME: of_node(overrides.nvme_bytes, memory.budget.nvme, node.nvme_bytes),
        },
        world_size=world_size,
        local_ranks=local_ranks,
        num_nodes=max(1, world_size // local_ranks),
        micro_batch_size=micro_batch_size,
        mode=memory.mode,
        strategy=strategy,
        is_kept=strategy == overrides.kept,
        placement=memory.advanced.optimizer.placement,
        overlap=memory.advanced.optimizer.overlap,
        policy=memory.advanced.activations.policy,
        parameters=memory.advanced.parameters.placement,
    )


def _check_devices(job: TrainingJob, node: NodeSpec, local_ranks: int) -> None:
    device = job.spec.parallelism.device
    if device not in ("Auto", node.device_kind):
        raise UserError(
            f"spec.parallelism.device = {device}: node {node.name} has {node.device_kind} devices; use Auto"
        )
    if node.device_kind == "Cuda" and local_ranks > node.num_devices:
        raise UserError(
            f"spec.parallelism.devicesPerNode = {local_ranks}: node {node.name} has {node.num_devices} "
            f"{'device' if node.num_devices == 1 else 'devices'}; use at most {node.num_devices}"
        )


def _least(override: int | None, budget: int | None, capacity: int) -> int:
    """The caller's figure, else the spec's, but no more than the node has."""
    wanted = override if override is not None else budget
    return capacity if wanted is None else min(wanted, capacity)


def _plan(question: Question, chosen: Timed, why: Iterable[str], others: Iterable[Alternative]) -> MemoryPlan:
    candidate = chosen.candidate
    blocks, work = candidate.blocks, candidate.work
    if not work.sum_of("moved", 0, blocks.num_layers):  # no tensor is worth moving: what was to be moved stays
        blocks = replace(blocks, host=0, nvme=0)
    asked = amounts(work, candidate.optimizer, blocks, candidate.streaming)
    keeps_all = blocks.kept == blocks.num_layers
    return MemoryPlan(
        job=question.job.metadata.name,
        node=question.node.name,
        device=question.node.device_kind,
        mode=question.job.spec.memory.mode,
        strategy=work.strategy,
        world_size=question.world_size,
        micro_batch_size=work.micro_batch_size,
        num_micro_batches=work.num_micro_batches,
        num_segments=work.shape.num_segments,
        optimizer=candidate.optimizer,
        activations=ActivationPlan(
            answers=() if keeps_all else (Policy.KEEP, *blocks.answers, Policy.KEEP),
            minimum_bytes=work.minimum_bytes,
            window_bytes=candidate.window_bytes,
            lean=work.lean and blocks.recomputed < blocks.num_layers,
        ),
        parameters=parameter_plan(work, candidate.streaming),
        bytes=candidate.bytes,
        budget=question.budget,
        checkpoint_bytes=checkpoint_bytes(question.job.spec, question.node.device_kind, question.shape),
        prediction=chosen.prediction.model_copy(update={"work": asked}),
        reasons=tuple(why),
        alternatives=tuple(others),
    )
