"""Candidates: every way to run the step that is worth comparing, each with its bytes, what is missing, and its seconds.

A candidate answers three questions:
    strategy      what ranks share (one answer when there is one rank, or the spec names it)
    activations   how many blocks are recomputed and how many are moved; of the moved ones, as many as fit go to host
                  memory and the others to NVMe (order in the model: footprint.Blocks)
    optimizer     as much resident as the device has left; the rest split between CPU and device so that both end
                  together (step_time.balanced_streamed_share)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import floor

from spillway.api import TrainingJob
from spillway.footprint import (
    Blocks,
    DevicePeak,
    Strategy,
    Workload,
    accumulator_bytes,
    device_bytes,
    device_peak,
    host_bytes,
    nvme_bytes,
    nvme_staging_bytes,
    states_bytes_per_parameter,
)
from spillway.hardware import NodeSpec
from spillway.model_shape import DTYPE_BYTES, model_shape
from spillway.plan import OptimizerPlan, Prediction, Tier, TierBytes
from spillway.step_time import Rates, balanced_streamed_share, predict, rank_rates

TIE = 1.01
"""plans within 1 % of the fastest count as equally fast; of those, the one that moves fewest bytes wins"""
MAX_GROUPS = 32
"""blocks change their answer in groups, so that deep models have no more candidates than this, squared and halved"""
FORCED_SHARE = 0.1
"""least CPU and streamed share of placement Interleaved, which asks for both whatever is faster"""
LARGEST_PARTLY_RESIDENT_SHARE = 0.9999
LEAST_RESIDENT_SHARE = 1e-3
"""smaller resident shares are not worth a third path"""
AUTO_STRATEGIES: tuple[Strategy, ...] = ("Ddp", "Zero1", "Zero2", "Fsdp")
"""Zero3 shares what Fsdp shares: the same arithmetic"""
_ALL_STRATEGIES: tuple[Strategy, ...] = ("Ddp", "Fsdp", "Zero1", "Zero2", "Zero3")
_NO_ACTIVATIONS = DevicePeak(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Question:
    """Everything a plan depends on, once resolved; parts that are forced are not searched."""

    job: TrainingJob
    node: NodeSpec
    budget: dict[Tier, int]
    """of one rank"""
    world_size: int
    local_ranks: int
    num_nodes: int
    micro_batch_size: int
    mode: str
    strategy: str
    placement: str
    policy: str

    @property
    def num_layers(self) -> int:
        return self.job.spec.model.transformer.num_layers

    @property
    def drive_bytes(self) -> float:
        """This rank's part of the node's drives: what endurance is measured against."""
        return self.node.nvme_bytes / self.local_ranks


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run the step."""

    work: Workload
    optimizer: OptimizerPlan
    blocks: Blocks
    window_bytes: int
    bytes: dict[Tier, TierBytes]
    missing: dict[Tier, int] = field(default_factory=dict)
    """bytes above the budget; empty when it fits"""

    @property
    def effort(self) -> tuple[int, int, int, int]:
        """What breaks ties: bytes on NVMe, bytes in host memory, recomputed blocks, complexity of the strategy."""
        strategy = self.work.strategy
        order = AUTO_STRATEGIES.index(strategy) if strategy in AUTO_STRATEGIES else 0
        return (self.bytes[Tier.NVME].total, self.bytes[Tier.HOST].total, self.blocks.recomputed, order)


@dataclass(frozen=True, slots=True)
class Timed:
    """A candidate that fits its budgets, with its prediction."""

    candidate: Candidate
    prediction: Prediction
    wears_out: bool
    """writes more drive capacities a day than the spec allows"""

    @property
    def seconds(self) -> float:
        return self.prediction.step_seconds


def timed(question: Question, candidate: Candidate) -> Timed:
    prediction = predict(
        candidate.work,
        rates_of(question),
        candidate.optimizer,
        candidate.blocks,
        overlapped=candidate.window_bytes > 0,
        steps=question.job.spec.training.steps,
        drive_bytes=question.drive_bytes,
    )
    limit = question.job.spec.memory.endurance.drive_writes_per_day
    return Timed(candidate, prediction, question.policy == "Auto" and prediction.drive_writes_per_day > limit)


def best(choices: Sequence[Timed]) -> Timed:
    """The least effort among the fastest."""
    fastest = min(choice.seconds for choice in choices)
    near = (choice for choice in choices if choice.seconds <= TIE * fastest)
    return min(near, key=lambda choice: (choice.candidate.effort, choice.seconds))


def fitting(question: Question, found: Sequence[Candidate]) -> list[Timed]:
    """Those that fit every budget and spare the drives."""
    times = (timed(question, candidate) for candidate in found if not candidate.missing)
    return [choice for choice in times if not choice.wears_out]


# --- the search -------------------------------------------------------------------------------------------------------


def candidates(question: Question) -> Iterator[Candidate]:
    """The same set for every budget but for the optimizer's resident share, which grows with it: more memory never
    gives a slower plan."""
    rates = rates_of(question)
    layouts = list(_layouts(question))
    for strategy in _strategies(question):
        work = workload(question, strategy)
        ratio = _streamed_ratio(question, work, rates)
        for blocks, window_bytes, peak in layouts:
            for optimizer in _optimizers(question, work, question.budget[Tier.DEVICE] - peak.total, ratio):
                yield _candidate(question, work, optimizer, blocks, window_bytes, peak)


def workload(question: Question, strategy: Strategy) -> Workload:
    spec = question.job.spec
    return Workload(
        shape=model_shape(spec.model.transformer, spec.model.precision.compute, question.node.device_kind),
        micro_batch_size=question.micro_batch_size,
        sequence_length=spec.training.sequence_length,
        num_micro_batches=spec.training.global_batch_size // (question.micro_batch_size * question.world_size),
        world_size=question.world_size,
        local_ranks=question.local_ranks,
        strategy=strategy,
        wire_bytes=DTYPE_BYTES[spec.model.precision.gradient_reduce],
    )


def rates_of(question: Question) -> Rates:
    compute = question.job.spec.model.precision.compute
    return rank_rates(question.node, question.local_ranks, question.num_nodes, compute)


def _strategies(question: Question) -> tuple[Strategy, ...]:
    if question.world_size == 1:
        return ("Ddp",)
    if question.strategy == "Auto":
        return AUTO_STRATEGIES
    return tuple(strategy for strategy in _ALL_STRATEGIES if strategy == question.strategy)


def _layouts(question: Question) -> Iterator[tuple[Blocks, int, DevicePeak]]:
    """Blocks with their in-flight window and what they need on the device; moved blocks are counted as host ones.

    Two windows: a whole block, so that its copy overlaps the next block's forward; or none, for the tightest budgets.
    """
    work = workload(question, "Ddp")
    for recomputed, moved in _block_counts(question):
        blocks = Blocks(question.num_layers, recomputed=recomputed, host=moved)
        for window_bytes in (work.moved_bytes, 0) if moved else (0,):
            yield blocks, window_bytes, device_peak(work, blocks, window_bytes)


def _block_counts(question: Question) -> Iterator[tuple[int, int]]:
    """(recomputed, moved) blocks; the rest is kept."""
    layers = question.num_layers
    forced = {"Keep": (0, 0), "Recompute": (layers, 0), "Host": (0, layers), "Nvme": (0, layers)}
    if question.policy in forced:
        yield forced[question.policy]
        return
    group = -(-layers // MAX_GROUPS)
    counts = [*range(0, layers, group), layers]
    yield from ((recomputed, moved) for recomputed in counts for moved in counts if recomputed + moved <= layers)


def _candidate(
    question: Question, work: Workload, optimizer: OptimizerPlan, blocks: Blocks, window_bytes: int, peak: DevicePeak
) -> Candidate:
    blocks = _between_host_and_nvme(question, work, optimizer, blocks, window_bytes)
    held = {
        Tier.DEVICE: device_bytes(work, optimizer, peak),
        Tier.HOST: host_bytes(work, optimizer, blocks, window_bytes),
        Tier.NVME: nvme_bytes(work, blocks),
    }
    missing = {tier: held[tier].total - question.budget[tier] for tier in Tier}
    missing = {tier: amount for tier, amount in missing.items() if amount > 0}
    return Candidate(work, optimizer, blocks, window_bytes, held, missing)


def _between_host_and_nvme(
    question: Question, work: Workload, optimizer: OptimizerPlan, blocks: Blocks, window_bytes: int
) -> Blocks:
    """Of the moved blocks, as many in host memory as fit; the others on NVMe if they fit there."""
    moved = blocks.moved
    if question.policy == "Nvme":
        return replace(blocks, host=0, nvme=moved)
    if question.policy == "Host" or not moved:
        return blocks
    size = max(1, work.moved_host_bytes)
    room = question.budget[Tier.HOST] - host_bytes(work, optimizer, Blocks(blocks.num_layers), 0).total
    if moved * size <= room:
        return blocks
    host = max(0, (room - nvme_staging_bytes(work, window_bytes)) // size)
    nvme = moved - host
    if question.budget[Tier.NVME] < nvme * work.moved_nvme_bytes:
        return blocks  # no room on NVMe either: what is missing in host memory is what to say
    return replace(blocks, host=host, nvme=nvme)


def as_specified(question: Question) -> Candidate:
    """What Disabled and Advise run: what the spec names, all else on the device. Not checked against budgets."""
    placement = "Device" if question.placement == "Auto" else question.placement
    policy = "Keep" if question.policy == "Auto" else question.policy
    strategy = "Ddp" if question.strategy == "Auto" else question.strategy
    return next(candidates(replace(question, placement=placement, policy=policy, strategy=strategy)))


# --- the optimizer's shares -------------------------------------------------------------------------------------------


def _streamed_ratio(question: Question, work: Workload, rates: Rates) -> float:
    """g / (c + g) of whatever is not resident."""
    if question.placement == "Host":
        return 0.0
    balanced = balanced_streamed_share(work, rates)
    if question.placement == "Interleaved":
        return min(max(balanced, FORCED_SHARE), 1.0 - FORCED_SHARE)
    return balanced


def _optimizers(question: Question, work: Workload, free_bytes: int, ratio: float) -> Iterator[OptimizerPlan]:
    """Splits for a device with `free_bytes` beside the activations, from the least offloaded that fits."""
    resident = _split(question, work, 0.0, 1.0)
    if question.placement == "Device":
        yield resident
        return
    if question.placement == "Auto" and _fits(work, resident, free_bytes):
        yield resident
        return
    if question.placement == "Auto":
        yield from _partly_resident(question, work, free_bytes, ratio)
    interleaved = _split(question, work, ratio, 0.0)
    if ratio and (question.placement == "Interleaved" or _fits(work, interleaved, free_bytes)):
        yield interleaved
    if question.placement != "Interleaved":
        yield _split(question, work, 0.0, 0.0)


def _partly_resident(question: Question, work: Workload, free_bytes: int, ratio: float) -> Iterator[OptimizerPlan]:
    """The largest resident share that fits: device bytes grow linearly with it."""
    for streamed in dict.fromkeys((ratio, 0.0)):
        none, some = _split(question, work, streamed, 0.0), _split(question, work, streamed, 0.5)
        left = free_bytes - _optimizer_device_bytes(work, some)
        per_share = _device_bytes_per_share(work, streamed)
        share = min(0.5 + left / per_share, LARGEST_PARTLY_RESIDENT_SHARE)
        if share > LEAST_RESIDENT_SHARE and _fits(work, none, free_bytes):
            found = _split(question, work, streamed, share)
            if _fits(work, found, free_bytes):
                yield found


def _device_bytes_per_share(work: Workload, ratio: float) -> float:
    """Device bytes that one more resident share costs: its states, and the accumulators that leave the CPU."""
    states = states_bytes_per_parameter(work, on_cpu=False) * work.rank_parameters
    return states + (1.0 - ratio) * accumulator_bytes(work, 1.0)


def _optimizer_device_bytes(work: Workload, optimizer: OptimizerPlan) -> int:
    """Everything on the device but activations."""
    return device_bytes(work, optimizer, _NO_ACTIVATIONS).total


def _fits(work: Workload, optimizer: OptimizerPlan, free_bytes: int) -> bool:
    return _optimizer_device_bytes(work, optimizer) <= free_bytes


def _split(question: Question, work: Workload, ratio: float, resident: float) -> OptimizerPlan:
    """c + g + s = 1 with s = `resident` and g = `ratio` of the rest; four digits, rounded towards the CPU."""
    resident_share = floor(resident * 1e4) / 1e4
    streamed_share = floor(ratio * (1.0 - resident_share) * 1e4) / 1e4
    return OptimizerPlan(
        cpu_share=round(1.0 - resident_share - streamed_share, 4),
        streamed_share=streamed_share,
        resident_share=resident_share,
        chunk_parameters=_chunk_parameters(work),
        num_threads=max(1, question.node.num_cores // question.local_ranks),
    )


def _chunk_parameters(work: Workload) -> int:
    """A power of two near 1/64 of the parameters, between 64 Ki and 4 Mi (16 MiB of float32)."""
    return min(max(1 << (work.rank_parameters // 64).bit_length(), 1 << 16), 1 << 22)
