"""Explains why a plan was chosen, why others lost, and what would make an infeasible job fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from spillway.plan import Alternative, Infeasible, Policy, Prediction, Tier
from spillway.planning.candidates import (
    AUTO_STRATEGIES,
    TIE,
    Candidate,
    Question,
    Timed,
    best,
    rates_of,
    run_strategies,
    timed,
    why_not_lean,
)
from spillway.planning.footprint import (
    forced_share,
    frontier_bytes,
    host_home_bytes,
    nvme_home_bytes,
    states_bytes_per_parameter,
    streamed_slot_bytes,
    waiting_frontier_bytes,
)
from spillway.planning.hardware import TIER_NAMES
from spillway.planning.search import Search
from spillway.planning.step_time import stored_states_bytes, update_seconds
from spillway.planning.workload import ZERO_STRATEGIES, Streaming, Workload
from spillway.units import MIB, counted, format_bytes, format_quantity

# --- reasons ----------------------------------------------------------------------------------------------------------


def reasons(search: Search, chosen: Timed) -> Iterator[str]:
    """One sentence per decision."""
    question = search.question
    yield from _strategy_reasons(search, chosen)
    yield from _parameter_reasons(question, chosen.candidate)
    yield _optimizer_reason(question, chosen.candidate)
    if question.placement == "Auto" and chosen.candidate.optimizer.nvme_share:
        yield (
            "host memory cannot hold all optimizer states: each update reads and writes "
            f"{format_bytes(stored_states_bytes(chosen.candidate.work, chosen.candidate.optimizer))} of them on NVMe"
        )
    yield from _overlap_reasons(question, chosen)
    yield from _activation_reasons(question, chosen.candidate)
    if chosen.prediction.nvme_written_bytes_per_day:
        yield f"NVMe: {endurance(chosen.prediction)}" + (", by each rank" if question.local_ranks > 1 else "")


def reasons_unplanned(search: Search, chosen: Timed, advised: Timed | None) -> Iterator[str]:
    """Reasons for the modes in which the spec decides; `advised` is what Auto would do, None when nothing fits."""
    question = search.question
    yield f"memory.mode {question.mode}: the spec decides, budgets are not checked"
    yield from _not_as_asked(question, chosen.candidate)
    for tier, amount in chosen.candidate.missing.items():
        yield f"needs {format_bytes(amount)} more {TIER_NAMES[tier]} than the budget"
    if question.mode == "Advise" and advised is None:
        yield "mode Auto would find no plan within these budgets"
    elif question.mode == "Advise" and advised is not None:
        yield f"mode Auto would take {advised.prediction.step} per step:"
        said = {*_not_as_asked(question, chosen.candidate)}
        of_auto = Search(replace(question, strategy=advised.candidate.work.strategy))
        yield from (reason for reason in reasons(of_auto, advised) if reason not in said)


def _not_as_asked(question: Question, chosen: Candidate) -> Iterator[str]:
    """Differences between the plan and the spec, and between the plan and a run."""
    strategy, asked = chosen.work.strategy, question.job.spec.parallelism.strategy
    if question.world_size == 1 and asked not in ("Auto", strategy):
        yield f"strategy {strategy}: one rank has nothing to shard (the spec asks for {asked})"
    elif _replaces_zero3(question):
        yield f"strategy {strategy}: on Cuda devices it shards what Zero3 shards (the spec asks for Zero3)"
    if question.job.spec.model.precision.compute == "float16" and question.node.device_kind == "Cpu":
        yield "predicted seconds: computed with the rates of bfloat16, but a CPU computes float16 more slowly"
    if question.overlap in ("Forward", "Backward") and not chosen.optimizer.offloads:
        yield (
            "overlap: none, because all states are on the device, which updates them itself (the spec asks for "
            f"{question.overlap})"
        )


def _replaces_zero3(question: Question) -> bool:
    return question.strategy == "Fsdp" and question.job.spec.parallelism.strategy == "Zero3"


def _strategy_reasons(search: Search, chosen: Timed) -> Iterator[str]:
    if search.question.world_size > 1 and not _replaces_zero3(search.question):
        yield _strategy_reason(search.question)
    yield from _not_as_asked(search.question, chosen.candidate)


def _strategy_reason(question: Question) -> str:
    strategy, spec = question.strategy, question.job.spec
    if spec.parallelism.strategy == strategy:
        why = "the spec asks for it"
    elif question.is_kept:
        why = "as in earlier attempts"
    elif spec.model.precision.compute == "float16":
        why = "the only one with a loss scale for float16"
    elif spec.training.optimizer.moments == "int8":
        why = "the only one that works with int8 moments"
    else:
        why = "it fits" if strategy == AUTO_STRATEGIES[0] else f"{AUTO_STRATEGIES[0]} does not fit"
    return f"strategy {strategy}: {why}"


def _parameter_reasons(question: Question, chosen: Candidate) -> Iterator[str]:
    work, streaming = chosen.work, chosen.streaming
    if not streaming.units:
        return
    asked = "" if question.parameters == "Auto" else f" (the spec asks for {question.parameters})"
    homes = _counted(
        ("host", streaming.host, f"({format_bytes(host_home_bytes(work, streaming))})"),
        ("NVMe", streaming.nvme, f"({format_bytes(nvme_home_bytes(work, streaming))})"),
    )
    slots = f"{streaming.num_slots} slots" if streaming.num_slots > 1 else "one slot"
    slot = format_bytes(streamed_slot_bytes(work, streaming) // streaming.num_slots)
    count, total = work.units.count[streaming.units], work.shape.num_segments
    yield f"parameters: {count} of {total} layers offloaded to {homes}, streamed through {slots} of {slot}{asked}"
    if count < total:
        yield f"kept on device: {_resident(work, streaming)}"
    if streaming.num_slots == 1:
        yield "no device memory for a second slot: compute waits for each load"
    if work.num_micro_batches > 1:
        yield _order_reason(work, streaming)
    forced = forced_share(work, streaming)
    if forced:
        yield f"the CPU updates offloaded layers: {forced:.0%} of all trained parameters"


def _resident(work: Workload, streaming: Streaming) -> str:
    """The segments that stay on the device, by name, and why."""
    stay = [index for unit in work.units.segments[streaming.units :] for index in unit]
    shape, last = work.shape, work.shape.num_segments - 1
    tied = {index for pair in shape.tied for index in pair}
    ends = " and ".join(name for index, name in ((0, "embedding"), (last, "head")) if index in stay)
    sharing = ", ".join(shape.segments[index].name for index in stay if index in tied and 0 < index < last)
    parts = (
        (ends, "because it would need larger slots"),
        (sharing, "because they share parameters"),
        (
            "the last blocks" if any(index not in tied | {0, last} for index in stay) else "",
            "because backward needs them first",
        ),
    )
    return "; ".join(f"{what}, {why}" for what, why in parts if what)


def _order_reason(work: Workload, streaming: Streaming) -> str:
    batches = work.num_micro_batches
    if streaming.order == "InOrder":
        return (
            f"order: one micro-batch at a time; each offloaded layer is loaded again for each of the {batches} "
            "micro-batches"
        )
    stays = streaming.boundaries is Policy.KEEP
    held = format_bytes(frontier_bytes(work) if stays else waiting_frontier_bytes(work))
    where = "on the device" if stays else f"on {streaming.boundaries}"
    return (
        f"order: weight-stationary, a layer runs all {batches} micro-batches while it is loaded: two loads per step "
        f"instead of {2 * batches}; {held} of layer outputs are held {where}"
    )


def _optimizer_reason(question: Question, chosen: Candidate) -> str:
    plan = chosen.optimizer
    asked = "" if question.placement == "Auto" else f" (the spec asks for {question.placement})"
    if not plan.offloads:
        return f"optimizer states: device{asked}"
    by_cpu = f"(CPU {chosen.work.rule})"
    shares = (
        (plan.resident_share, "device"),
        (plan.streamed_share, f"host memory (device {chosen.work.rule})"),
        (plan.cpu_share, f"host memory {by_cpu}"),
        (plan.nvme_share, f"NVMe {by_cpu}"),
    )
    used = [(f"{share:.0%}", share, where) for share, where in shares if share]
    parts = _counted(*used) if len(used) > 1 else used[0][2]
    states = states_bytes_per_parameter(chosen.work, on_cpu=False) * chosen.work.rank_parameters
    balance = "; CPU and device finish together" if plan.streamed_share else ""
    return f"optimizer states: {parts}{asked}{balance}; all on the device would take {format_bytes(ceil(states))}"


def _overlap_reasons(question: Question, chosen: Timed) -> Iterator[str]:
    candidate, prediction = chosen.candidate, chosen.prediction
    if not candidate.optimizer.offloads:
        return
    asked = "" if question.overlap == "Auto" else f" (the spec asks for {question.overlap})"
    if candidate.optimizer.overlap == "None":
        why = asked or _why_not_overlapped(question, candidate)
        yield f"overlap: none, the next forward begins after the update{why}"
        return
    if question.overlap == "Backward" and candidate.optimizer.overlap == "Forward":
        asked = " (the spec asks for Backward, which needs spare CPU time and host memory)"
    whole = update_seconds(candidate.work, rates_of(question), candidate.optimizer, candidate.streaming)
    hidden = whole - prediction.exposed_optimizer_seconds
    window, backward = candidate.optimizer.speculative_parameters, ""
    if window:
        early = window / (candidate.optimizer.updated_by_cpu * candidate.work.rank_parameters)
        backward = f"{early:.0%} of the CPU's update runs during backward, and is discarded if gradients are clipped; "
    yield (
        f"overlap: {backward}each layer of the next forward waits only for its own parameters' update{asked}; "
        f"that hides {prediction.format(hidden)} of the update's {prediction.format(whole)}"
    )


def _why_not_overlapped(question: Question, chosen: Candidate) -> str:
    if rates_of(question).copies_use_cores:
        return "; on a CPU forward and update use the same cores"
    if chosen.work.strategy in ZERO_STRATEGIES:
        return "; forward needs the updates of all ranks"
    return "; loads of offloaded layers would queue behind the update's uploads"


def _activation_reasons(question: Question, chosen: Candidate) -> Iterator[str]:
    blocks, work = chosen.blocks, chosen.work
    asked = "" if question.policy == "Auto" else f" (the spec asks for {question.policy})"
    parts = _counted(
        (str(blocks.nvme), blocks.nvme, "to NVMe"),
        (str(blocks.host), blocks.host, "to host memory"),
        (str(blocks.recomputed), blocks.recomputed, "recomputed"),
        (str(blocks.kept), blocks.kept, "kept"),
    )
    total = work.sum_of("saved", 0, blocks.num_layers)
    each = f"{format_bytes(total / max(1, blocks.num_layers))} each" + ("" if len(work.runs) < 2 else " on average")
    yield f"activations of {counted(blocks.num_layers, 'block')}, {each}; from first to last: {parts}{asked}"
    if blocks.moved and not work.sum_of("moved", 0, blocks.num_layers):
        smallest = format_bytes(work.minimum_bytes)
        yield f"all their tensors are smaller than {smallest}, which is too small to move: all are kept on the device"
        return
    if blocks.nvme and question.policy == "Auto":
        yield "host memory is filled first; NVMe takes the blocks that backward needs last"
    if work.lean:
        yield _lean_reason(chosen)
    elif question.policy == "Auto" and blocks.kept < blocks.num_layers and question.node.device_kind == "Cpu":
        yield from _why_not_lean(question, work)
    if reserve := chosen.bytes[Tier.HOST].reserve:
        yield f"host memory: {format_bytes(reserve)} reserved for activations that a live correction moves from NVMe"
    if blocks.moved and chosen.window_bytes == 0:
        yield "no device memory is left for copies in flight: forward waits for each copy"


def _why_not_lean(question: Question, work: Workload) -> Iterator[str]:
    if (why := why_not_lean(question, work)) is not None:
        yield f"no selective recomputation: {why}"


def _lean_reason(chosen: Candidate) -> str:
    blocks, work = chosen.blocks, chosen.work
    ends = ((0, blocks.moved), (blocks.moved + blocks.recomputed, blocks.num_layers))
    rebuilt, saved = (sum(work.sum_of(field, *each) for each in ends) for field in ("rebuilt", "saved"))
    return (
        f"selective recomputation: {format_bytes(rebuilt)} of {format_bytes(saved)} of saved tensors (outputs of "
        "norms, activation functions and elementwise products) are recomputed in backward instead of stored"
    )


def endurance(prediction: Prediction) -> str:
    """What one rank writes to its share of the drives, and how long these last at that rate, if the catalog has their
    rated total."""
    years = prediction.years_until_rated_writes
    lasts = "" if years is None else f"; the drives reach their rated total writes in {years:.2g} years"
    written = format_bytes(prediction.nvme_written_bytes_per_day)
    return f"at most {written} written per day, {prediction.drive_writes_per_day:.2g} drive writes per day{lasts}"


def _counted(*parts: tuple[str, float, str]) -> str:
    """("2", 2, "kept"), ("0", 0, "recomputed") -> "2 kept"."""
    return ", ".join(f"{shown} {what}" for shown, amount, what in parts if amount)


# --- alternatives -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Variant:
    """A plan that people would try by hand: some parts are forced, the others planned."""

    summary: str
    placement: str = "Auto"
    policy: str = "Auto"
    parameters: str = "Auto"

    def of(self, question: Question) -> Question | None:
        """`question` with the variant's parts forced; None where the spec forces one of them otherwise."""
        forced = {"placement": self.placement, "policy": self.policy, "parameters": self.parameters}
        asked = {name: value for name, value in forced.items() if value != "Auto"}
        if any(getattr(question, name) not in ("Auto", value) for name, value in asked.items()):
            return None
        return replace(question, **asked)  # type: ignore[arg-type]


_VARIANTS = (
    _Variant("everything on the device", "Device", "Keep", "Resident"),
    _Variant("every block recomputed", policy="Recompute"),
    _Variant("all activations to host memory", policy="Host"),
    _Variant("all activations to NVMe", policy="Nvme"),
    _Variant("all optimizer states in host memory", placement="Host"),
    _Variant("all optimizer states on NVMe", placement="Nvme"),
    _Variant("all parameters resident", parameters="Resident"),
    _Variant("parameters of every block streamed", parameters="Stream"),
)


def alternatives(search: Search, chosen: Timed | None) -> Iterator[Alternative]:
    """Alternatives that lost, with their seconds or missing bytes. `chosen` is None when nothing fits."""
    question = search.question
    for variant in _VARIANTS:
        varied = variant.of(question)
        if varied is not None:
            yield from _lost(Search(varied), variant.summary, chosen)
    if chosen is not None and chosen.candidate.streaming.units:
        order = chosen.candidate.streaming.order
        names = {"InOrder": "weight-stationary", "WeightStationary": "one micro-batch after the other"}
        yield from _lost(search.not_in(order), f"streamed {names[order]}", chosen)
    for strategy in run_strategies(question.job.spec, question.world_size, question.node.device_kind):
        if strategy != question.strategy:
            yield from _lost(Search(replace(question, strategy=strategy)), f"strategy {strategy}", chosen)


def _lost(search: Search, summary: str, chosen: Timed | None) -> Iterator[Alternative]:
    if search.is_empty:
        return
    in_budget = search.choices() or search.choices(spare_drives=False)
    if not in_budget:
        missing = search.nearest_miss().missing
        yield Alternative(summary=summary, missing_bytes=missing, reason=f"does not fit: {_missing(missing)} missing")
        return
    choice = best(in_budget)
    per_day, limit = choice.prediction.drive_writes_per_day, search.question.job.spec.memory.endurance
    if per_day > limit.drive_writes_per_day and (chosen is None or choice.wears_out):
        reason = (
            f"{per_day:.2g} drive writes per day, above the limit of {limit.drive_writes_per_day:g} "
            "(spec.memory.endurance.driveWritesPerDay)"
        )
    elif chosen is None:  # the strategy is kept, or make_plan excludes the other one
        if not search.question.is_kept:
            return
        reason = "fits, but earlier attempts used another strategy"
    elif choice.candidate == chosen.candidate:
        return
    elif choice.seconds < chosen.seconds and choice.priced_seconds > chosen.priced_seconds:
        faster = f"{1 - choice.seconds / chosen.seconds:.1%} faster"
        reason = f"{faster}, which does not justify {per_day:.2g} drive writes per day"
    elif choice.seconds > TIE * chosen.seconds:
        reason = f"{choice.seconds / chosen.seconds - 1:.0%} slower, bound by {choice.prediction.bound_by}"
    else:
        reason = f"same speed, more offloading or recomputation; bound by {choice.prediction.bound_by}"
    yield Alternative(summary=summary, step_seconds=choice.seconds, bound_by=choice.prediction.bound_by, reason=reason)


def _missing(missing: dict[Tier, int]) -> str:
    return ", ".join(f"{format_bytes(amount)} of {TIER_NAMES[tier]}" for tier, amount in missing.items())


# --- nothing fits -----------------------------------------------------------------------------------------------------


def infeasible(search: Search) -> Infeasible:
    """Missing bytes of the nearest candidate, and changes that make the job fit."""
    nearest = search.nearest_miss()
    remedies = list(_remedies(search, nearest))
    return unexplained(search).model_copy(
        update={
            "nearest": " or ".join(remedies) if remedies else _larger_node(search, nearest),
            "alternatives": tuple(alternatives(search, None)),
        }
    )


def unexplained(search: Search) -> Infeasible:
    """Missing bytes of the nearest candidate, without a search for what would fit."""
    question = search.question
    return Infeasible(
        job=question.job.metadata.name,
        node=question.node.name,
        missing_bytes=search.nearest_miss().missing,
        budget=question.budget,
        nearest="",
        segment=_too_large(question),
    )


def _too_large(question: Question) -> str:
    """A sentence about the largest segment if its parameters alone exceed the device's budget, so that streaming does
    not help; else empty."""
    largest = max(question.shape.segments, key=lambda one: one.parameter_bytes)
    budget = question.budget[Tier.DEVICE]
    if largest.parameter_bytes <= budget:
        return ""
    held = format_bytes(largest.parameter_bytes)
    return f"the parameters of segment {largest.name} alone take {held}; the device budget is {format_bytes(budget)}"


def lacking(outcome: Infeasible, where: str) -> str:
    """An Infeasible in one sentence: what is missing on `where`, and what would fit."""
    segment = f"; {outcome.segment}" if outcome.segment else ""
    return f"{outcome.job} does not fit {where}: {shortfall(outcome)}{segment}; what would fit: {outcome.nearest}"


TOO_MANY_WRITES = "every plan within the budgets writes more than spec.memory.endurance.driveWritesPerDay allows"


def shortfall(outcome: Infeasible) -> str:
    """Why no plan fits."""
    amounts = (
        f"{format_bytes(amount)} of {TIER_NAMES[tier]} missing (budget {format_bytes(outcome.budget.get(tier, 0))})"
        for tier, amount in outcome.missing_bytes.items()
    )
    return ", ".join(amounts) or TOO_MANY_WRITES


_FIELDS = {
    "placement": "spec.memory.advanced.optimizer.placement",
    "policy": "spec.memory.advanced.activations.policy",
    "parameters": "spec.memory.advanced.parameters.placement",
    "overlap": "spec.memory.advanced.optimizer.overlap",
}
"""Parts of a Question that a job may force, and the fields that force them."""
_FIT_AS_WELL = ("Auto", "None", "Forward")
"""Values of these parts that take no memory."""


def _remedies(search: Search, nearest: Candidate) -> Iterator[str]:
    """Changes of one kind each, with which the planner found a plan that fits, as YAML."""
    question = search.question
    if not nearest.missing:
        limit = timed(question, nearest).prediction.drive_writes_per_day
        yield f'spec.memory.endurance.driveWritesPerDay: "{1.05 * limit:.2g}"'
    for tier in Tier:
        needed = _needed_budget(search, tier)
        if needed is not None:
            yield f"spec.memory.budget.{tier}: {format_quantity(needed)}{_parked(question, tier)}"
    size = _smaller_micro_batch(question)
    if size is not None:
        yield f"spec.training.microBatchSize: {size}"
    forced = [part for part in _FIELDS if getattr(question, part) not in _FIT_AS_WELL]
    if forced and Search(replace(question, **dict.fromkeys(forced, "Auto"))).fits():  # type: ignore[arg-type]
        yield " and ".join(f"{_FIELDS[part]}: Auto" for part in forced)


def _parked(question: Question, tier: Tier) -> str:
    parked = question.reserved.get(tier, 0) * question.local_ranks
    return f" (with {format_bytes(parked)} for parked members)" if parked and tier is Tier.NVME else ""


def _smaller_micro_batch(question: Question) -> int | None:
    """The largest micro-batch size, at most half of the present one, that divides the batch and with which the job
    fits; it changes nothing but rounding. None if there is none."""
    per_rank = question.job.spec.training.global_batch_size // question.world_size
    sizes = (size for size in range(question.micro_batch_size // 2, 0, -1) if per_rank % size == 0)
    return next((size for size in sizes if Search(replace(question, micro_batch_size=size)).fits()), None)


def _needed_budget(search: Search, tier: Tier) -> int | None:
    """The smallest budget of `tier` with which the job fits, within 1 %, in whole MiB; per node for host and NVMe,
    with what a sweep reserves. None when the node does not have it."""
    question = search.question
    capacity, reserved = _capacities(question)[tier], question.reserved.get(tier, 0)
    ranks = 1 if tier is Tier.DEVICE else question.local_ranks

    def fits(budget_bytes: int) -> bool:
        return search.within({**question.budget, tier: budget_bytes}).fits()

    low, high = question.budget[tier], capacity // ranks - reserved
    if high <= low or not fits(high):
        return None
    while high - low > max(MIB, high // 100):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return min(-(-(high + reserved) * ranks // MIB) * MIB, capacity)


def _capacities(question: Question) -> dict[Tier, int]:
    node = question.node
    device = node.bytes_of_device(question.local_ranks)
    return {Tier.DEVICE: device, Tier.HOST: node.host_bytes, Tier.NVME: node.nvme_bytes}


def _larger_node(search: Search, nearest: Candidate) -> str:
    """What would make a job fit if no change of one field on this node does: all memory of the node, or a larger
    node."""
    question = search.question
    capacities = _capacities(question)
    ranks = {tier: 1 if tier is Tier.DEVICE else question.local_ranks for tier in Tier}
    reserved = {tier: question.reserved.get(tier, 0) for tier in Tier}
    if search.within({tier: max(0, capacities[tier] // ranks[tier] - reserved[tier]) for tier in Tier}).fits():
        return (
            "larger budgets in spec.memory.budget for several tiers (the job fits if it may use all memory of the node)"
        )
    wanted = {tier: (nearest.bytes[tier].total + reserved[tier]) * ranks[tier] for tier in nearest.missing}
    needs = (
        f"{format_bytes(amount)} of {TIER_NAMES[tier]} (this node has {format_bytes(capacities[tier])})"
        for tier, amount in wanted.items()
    )
    return f"a node with {' and '.join(needs)}"
