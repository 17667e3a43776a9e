"""Why a plan was chosen, why the others lost, and what would make an impossible job possible; all of it computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from spillway.candidates import AUTO_STRATEGIES, TIE, Candidate, Question, Timed, best, candidates, timed
from spillway.footprint import RUN_STRATEGY, states_bytes_per_parameter
from spillway.plan import Alternative, Infeasible, Tier
from spillway.units import MIB, format_bytes, format_quantity, format_seconds

# --- reasons ----------------------------------------------------------------------------------------------------------


def reasons(question: Question, chosen: Timed, choices: Sequence[Timed]) -> Iterator[str]:
    """One sentence per decision."""
    if question.world_size > 1:
        yield _strategy_reason(question, chosen, choices)
    yield _optimizer_reason(question, chosen.candidate)
    yield from _activation_reasons(question, chosen.candidate)
    if chosen.prediction.nvme_written_bytes_per_day:
        yield _endurance_reason(chosen)


def reasons_unplanned(question: Question, chosen: Timed, advised: Timed | None) -> Iterator[str]:
    """For the modes in which the spec decides; `advised` is what Auto would do, None when nothing fits."""
    yield f"memory.mode {question.mode}: the spec decides, budgets are not checked"
    for tier, amount in chosen.candidate.missing.items():
        yield f"{format_bytes(amount)} more than the {tier} budget are needed"
    if question.mode == "Advise" and advised is None:
        yield "Auto: nothing fits these budgets"
    elif question.mode == "Advise" and advised is not None:
        yield f"Auto would take {format_seconds(advised.seconds)} a step:"
        yield from reasons(replace(question, mode="Auto"), advised, [advised])


def _strategy_reason(question: Question, chosen: Timed, choices: Sequence[Timed]) -> str:
    strategy = chosen.candidate.work.strategy
    unable = "" if strategy == RUN_STRATEGY else f"; a run can only do {RUN_STRATEGY} so far"
    if question.strategy == "Auto":
        fit = sorted({choice.candidate.work.strategy for choice in choices})
        best_of = "the only one that fits" if len(fit) == 1 else f"the best of {', '.join(fit)}"
        return f"strategy {strategy}: {best_of}{unable}"
    asked = question.job.spec.parallelism.strategy == strategy
    return f"strategy {strategy}: " + ("the spec asks for it" if asked else "the one that a run can do so far") + unable


def _optimizer_reason(question: Question, chosen: Candidate) -> str:
    plan = chosen.optimizer
    asked = "" if question.placement == "Auto" else f" (the spec asks for {question.placement})"
    if not plan.offloads:
        return f"optimizer: all states resident on the device{asked}"
    parts = _counted(
        (f"{plan.resident_share:.0%}", plan.resident_share, "resident on the device"),
        (f"{plan.streamed_share:.0%}", plan.streamed_share, "streamed through it"),
        (f"{plan.cpu_share:.0%}", plan.cpu_share, "updated by the CPU"),
    )
    states = states_bytes_per_parameter(chosen.work, on_cpu=False) * chosen.work.rank_parameters
    balance = "; CPU and device end their parts together" if plan.streamed_share else ""
    return f"optimizer: {parts}{asked}{balance}; all states on the device would take {format_bytes(states)}"


def _activation_reasons(question: Question, chosen: Candidate) -> Iterator[str]:
    blocks = chosen.blocks
    asked = "" if question.policy == "Auto" else f" (the spec asks for {question.policy})"
    parts = _counted(
        (str(blocks.nvme), blocks.nvme, "to NVMe"),
        (str(blocks.host), blocks.host, "to host memory"),
        (str(blocks.recomputed), blocks.recomputed, "recomputed"),
        (str(blocks.kept), blocks.kept, "kept"),
    )
    each = format_bytes(chosen.work.saved_bytes)
    yield f"activations of {blocks.num_layers} blocks of {each}, first to last: {parts}{asked}"
    if blocks.moved and not chosen.work.moved_bytes:
        smallest = format_bytes(chosen.work.minimum_bytes)
        yield f"none of their tensors reaches {smallest}, so none is worth moving: all stay on the device"
        return
    if blocks.nvme and question.policy == "Auto":
        yield "host memory is filled first; NVMe takes the blocks that backward needs last"
    if blocks.moved and chosen.window_bytes == 0:
        yield "the device has no room for copies in flight: forward waits for each"


def _endurance_reason(chosen: Timed) -> str:
    written, drives = chosen.prediction.nvme_written_bytes_per_day, chosen.prediction.drive_writes_per_day
    return f"NVMe: {format_bytes(written)} written a day at most, {drives:.2g} drive writes a day"


def _counted(*parts: tuple[str, float, str]) -> str:
    """("2", 2, "kept"), ("0", 0, "recomputed") -> "2 kept"."""
    return ", ".join(f"{shown} {what}" for shown, amount, what in parts if amount)


# --- alternatives -----------------------------------------------------------------------------------------------------

_VARIANTS = (
    ("everything on the device", "Device", "Keep"),
    ("every block recomputed", "Auto", "Recompute"),
    ("all activations to host memory", "Auto", "Host"),
    ("all activations to NVMe", "Auto", "Nvme"),
    ("all optimizer states updated by the CPU", "Host", "Auto"),
)
"""what people would try by hand: placement and policy forced, the rest planned"""


def alternatives(question: Question, chosen: Timed | None, found: Sequence[Candidate]) -> Iterator[Alternative]:
    """What lost, with its seconds or its missing bytes. `chosen` is None when nothing fits."""
    searched = question.strategy == "Auto" and question.world_size > 1
    ours = chosen.candidate.work.strategy if chosen else AUTO_STRATEGIES[-1]
    for summary, placement, policy in _VARIANTS:
        if question.placement in ("Auto", placement) and question.policy in ("Auto", policy):
            varied = replace(
                question, placement=placement, policy=policy, strategy=ours if searched else question.strategy
            )
            yield from _lost(varied, summary, list(candidates(varied)), chosen)
    for strategy in AUTO_STRATEGIES if searched else ():
        if strategy != ours:
            same = [candidate for candidate in found if candidate.work.strategy == strategy]
            yield from _lost(question, f"strategy {strategy}", same, chosen)


def _lost(question: Question, summary: str, found: Sequence[Candidate], chosen: Timed | None) -> Iterator[Alternative]:
    in_budget = [timed(question, candidate) for candidate in found if not candidate.missing]
    if not in_budget:
        missing = nearest_miss(found).missing
        yield Alternative(summary=summary, missing_bytes=missing, reason=f"does not fit: {_missing(missing)} missing")
        return
    choice = best([one for one in in_budget if not one.wears_out] or in_budget)
    if chosen is None or choice.wears_out:
        reason = f"wears the drives out: {choice.prediction.drive_writes_per_day:.2g} drive writes a day"
    elif choice.candidate == chosen.candidate:
        return
    elif choice.seconds > TIE * chosen.seconds:
        reason = f"{choice.seconds / chosen.seconds - 1:.0%} slower, bound by {choice.prediction.bound_by}"
    else:
        reason = "as fast, but more leaves the device or is recomputed"
    yield Alternative(summary=summary, step_seconds=choice.seconds, reason=reason)


def _missing(missing: dict[Tier, int]) -> str:
    return ", ".join(f"{format_bytes(amount)} of {tier} memory" for tier, amount in missing.items())


# --- nothing fits -----------------------------------------------------------------------------------------------------


def nearest_miss(found: Sequence[Candidate]) -> Candidate:
    """The one that lacks least: a byte of host memory is easier to add than one of the device, one of NVMe easiest."""
    weights = {Tier.DEVICE: 16, Tier.HOST: 4, Tier.NVME: 1}
    return min(found, key=lambda c: sum(weights[tier] * amount for tier, amount in c.missing.items()))


def infeasible(question: Question, found: Sequence[Candidate]) -> Infeasible:
    """Missing bytes of the nearest candidate, and changes that make the job fit."""
    nearest = nearest_miss(found)
    remedies = list(_remedies(question, nearest))
    return Infeasible(
        job=question.job.metadata.name,
        node=question.node.name,
        missing_bytes=nearest.missing,
        budget=question.budget,
        nearest=" or ".join(remedies) if remedies else _larger_node(question, nearest),
        alternatives=tuple(alternatives(question, None, found)),
    )


def unexplained(question: Question, found: Sequence[Candidate]) -> Infeasible:
    """Missing bytes of the nearest candidate, without a search for what would fit."""
    missing = nearest_miss(found).missing
    return Infeasible(
        job=question.job.metadata.name,
        node=question.node.name,
        missing_bytes=missing,
        budget=question.budget,
        nearest="",
    )


def lacking(outcome: Infeasible, where: str) -> str:
    """An Infeasible in one sentence: what is missing on `where`, and what would fit."""
    missing = ", ".join(
        f"{tier} lacks {format_bytes(amount)} (budget {format_bytes(outcome.budget.get(tier, 0))})"
        for tier, amount in outcome.missing_bytes.items()
        if amount > 0
    )
    return f"{outcome.job} does not fit {where}: {missing}; what would fit: {outcome.nearest}"


def _remedies(question: Question, nearest: Candidate) -> Iterator[str]:
    """Changes of one kind that were planned and found to fit, as YAML."""
    if not nearest.missing:
        limit = timed(question, nearest).prediction.drive_writes_per_day
        yield f'spec.memory.endurance.driveWritesPerDay: "{1.05 * limit:.2g}"'
    for tier in Tier:
        needed = _needed_budget(question, tier)
        if needed is not None:
            yield f"spec.memory.budget.{tier}: {format_quantity(needed)}"
    size = _smaller_micro_batch(question)
    if size is not None:
        yield f"spec.training.microBatchSize: {size}"
    forced = question.placement != "Auto" or question.policy != "Auto"
    if forced and _any_fits(replace(question, placement="Auto", policy="Auto")):
        yield "spec.memory.optimizer.placement: Auto and spec.memory.activations.policy: Auto"


def _any_fits(question: Question) -> bool:
    fit = (timed(question, candidate) for candidate in candidates(question) if not candidate.missing)
    return any(not choice.wears_out for choice in fit)


def _smaller_micro_batch(question: Question) -> int | None:
    """The largest one below the present that divides the batch and fits; only rounding changes with it."""
    per_rank = question.job.spec.training.global_batch_size // question.world_size
    sizes = (size for size in range(question.micro_batch_size // 2, 0, -1) if per_rank % size == 0)
    return next((size for size in sizes if _any_fits(replace(question, micro_batch_size=size))), None)


def _needed_budget(question: Question, tier: Tier) -> int | None:
    """The smallest budget of `tier` with which the job fits, within 1 %, in whole MiB; per node for host and NVMe.
    None when the node does not have it."""
    capacity = _capacities(question)[tier]
    ranks = 1 if tier is Tier.DEVICE else question.local_ranks

    def fits(budget_bytes: int) -> bool:
        return _any_fits(replace(question, budget={**question.budget, tier: budget_bytes}))

    low, high = question.budget[tier], capacity // ranks
    if high <= low or not fits(high):
        return None
    while high - low > max(MIB, high // 100):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return min(-(-high * ranks // MIB) * MIB, capacity)


def _capacities(question: Question) -> dict[Tier, int]:
    node = question.node
    device = node.bytes_of_device(question.local_ranks)
    return {Tier.DEVICE: device, Tier.HOST: node.host_bytes, Tier.NVME: node.nvme_bytes}


def _larger_node(question: Question, nearest: Candidate) -> str:
    """What no change of one field on this node can give: all of its memory, or that of another one."""
    capacities = _capacities(question)
    ranks = {tier: 1 if tier is Tier.DEVICE else question.local_ranks for tier in Tier}
    if _any_fits(replace(question, budget={tier: capacities[tier] // ranks[tier] for tier in Tier})):
        return "larger budgets of several tiers: with all of the node's memory it fits"
    wanted = {tier: nearest.bytes[tier].total * ranks[tier] for tier in nearest.missing}
    needs = (
        f"{format_bytes(amount)} of {tier} memory (it has {format_bytes(capacities[tier])})"
        for tier, amount in wanted.items()
    )
    return f"a node with {' and '.join(needs)}"
