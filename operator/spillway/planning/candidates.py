"""Candidates: every way to run a step that is worth comparing.

A candidate answers four questions:
    parameters    how many units of segments are streamed (workload.eviction_order), in which order of micro-batches,
                  and where boundaries wait; as many homes as fit are in host memory, the others on NVMe
    activations   how many blocks are recomputed and how many are moved; of the moved ones, as many as fit go to host
                  memory and the others to NVMe (order in the model: workload.Blocks)
    lean          whether blocks that are not recomputed hold what backward could rebuild, or let it rebuild that; both
                  are compared if the shape says what can be rebuilt
    optimizer     as many states resident as the device has space left; the others split between CPU and device so that
                  both finish together (step_time.balanced_streamed_share); those that host memory cannot hold, on NVMe

    Question -> Space (groups of layouts; independent of budgets) -> Search (with budgets): best, fits, nearest miss

Candidates that differ only in activations and optimizer form a group; a group has layouts of activations. The search
visits groups and layouts in the order of a lower bound on their seconds, and ends when that bound exceeds the best that
was found. The result is the same as that of trying all candidates (`Search.all_candidates`; a test compares the two).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import islice
from math import ceil, floor, inf, isqrt
from typing import Literal

from spillway.api.training_job import TrainingJob, TrainingJobSpec
from spillway.plan import DeviceKind, OptimizerPlan, Order, Overlap, Policy, Prediction, Strategy, Tier, TierBytes
from spillway.planning.bounds import Bounds
from spillway.planning.footprint import (
    DevicePeak,
    accumulator_bytes,
    device_bytes,
    device_peaks,
    forced_share,
    host_bytes,
    host_home_bytes,
    speculation_bytes,
    states_bytes_per_parameter,
)
from spillway.planning.hardware import NodeSpec
from spillway.planning.model_shape import DTYPE_BYTES, ModelShape
from spillway.planning.step_time import (
    SECONDS_PER_DAY,
    Drives,
    Rates,
    Resource,
    backward_loads,
    balanced_streamed_share,
    can_overlap,
    exposed_exchange_seconds,
    predict,
    rank_rates,
    speculative_window,
    update_loads,
    update_threads,
)
from spillway.planning.workload import (
    LEAN_STRATEGIES,
    NUM_SLOTS,
    RESIDENT,
    STREAMING_STRATEGIES,
    ZERO_STRATEGIES,
    Blocks,
    Streaming,
    Workload,
    chunk_parameters,
)
from spillway.units import format_bytes

TIE = 1.01
"""Plans within 1 % of the fastest count as equally fast; of those, the one that moves fewest bytes wins."""
SPARED_SHARE = 0.05
"""Endurance penalty: a plan that uses its full daily write allowance must be 5 % faster than one that writes nothing.
Scales linearly."""
MAX_GROUPS = 32
"""The most groups of neighbouring blocks that change their policy together; deep models have at most about half the
square of this many layouts."""
MAX_GROUPS_STREAMED = 8
"""The same if parameters are streamed, which multiplies the number of candidates."""
LEAST_GROUPS, MOST_RUNS_LOOKED_AT = 4, 2**15
"""The least number of groups, and the most runs of equal blocks that all layouts may have together."""
MAX_LEVELS = 16
"""Number of different amounts of streamed parameters that are compared."""
SPECULATION_SLACK = 0.9
"""The part of the free host memory that speculation may use; the rest is for the padding of chunks' rows."""
FORCED_SHARE = 0.1
"""The least CPU share, and streamed share, with placement Interleaved, which uses both even if one is faster."""
LARGEST_PARTLY_RESIDENT_SHARE = 0.9999
LEAST_RESIDENT_SHARE = 1e-3
"""Smaller resident shares are not worth a third path."""
ROUNDING = 2e-4
"""The most by which shares may be off because they are rounded to four digits."""
AUTO_STRATEGIES: tuple[Strategy, ...] = ("Ddp", "Fsdp")
"""Strategies that Auto tries: the first that fits is taken. Fsdp exchanges parameters, too, but shards everything."""
_NO_ACTIVATIONS = DevicePeak(0, 0, 0)
_WEIGHTS = {Tier.DEVICE: 16, Tier.HOST: 4, Tier.NVME: 1}
"""Weights of missing bytes: host memory is easier to add than device memory, NVMe easiest."""


@dataclass(frozen=True, slots=True)
class Question:
    """Everything a plan depends on, once resolved; parts that are forced are not searched."""

    job: TrainingJob
    shape: ModelShape
    node: NodeSpec
    budget: dict[Tier, int]
    """Bytes per rank."""
    world_size: int
    local_ranks: int
    num_nodes: int
    micro_batch_size: int
    mode: Literal["Auto", "Advise", "Disabled"]
    strategy: Strategy
    is_kept: bool
    """Whether the strategy is that of earlier attempts."""
    placement: Literal["Auto", "Device", "Host", "Interleaved", "Nvme"]
    policy: Literal["Auto", "Keep", "Recompute", "Host", "Nvme"]
    parameters: Literal["Auto", "Resident", "Stream"]
    overlap: Literal["Auto", Overlap] = "Auto"
    reserved: Mapping[Tier, int] = field(default_factory=dict)
    """Bytes per rank that a sweep has taken from its budgets; `budget` is what is left."""

    @property
    def num_layers(self) -> int:
        return self.shape.num_layers

    @property
    def host_reserve(self) -> int:
        """The most host memory per rank that is kept free for activations on NVMe."""
        return (self.job.spec.memory.advanced.activations.host_reserve or 0) // self.local_ranks

    @property
    def drives(self) -> Drives:
        """This rank's share of the node's drives, against which endurance is measured."""
        return Drives(self.node.nvme_bytes / self.local_ranks, self.node.nvme_rated_bytes / self.local_ranks)

    @property
    def most_writes_per_day(self) -> float | None:
        """The limit of drive writes; None if the spec asks for NVMe, for activations or optimizer states."""
        asked_for = "Nvme" in (self.policy, self.placement)
        return None if asked_for else self.job.spec.memory.endurance.drive_writes_per_day


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run the step."""

    work: Workload
    optimizer: OptimizerPlan
    blocks: Blocks
    streaming: Streaming
    window_bytes: int
    bytes: dict[Tier, TierBytes]
    missing: dict[Tier, int] = field(default_factory=dict)
    """Bytes above the budget; empty if it fits."""

    @property
    def effort(self) -> tuple[int, int, int, bool]:
        """Decides ties, less is better: bytes on NVMe, bytes in host memory, recomputed blocks, rebuilds."""
        return (self.bytes[Tier.NVME].total, self.bytes[Tier.HOST].total, self.blocks.recomputed, self.work.lean)

    @property
    def weighted_missing(self) -> int:
        return sum(_WEIGHTS[tier] * amount for tier, amount in self.missing.items())


@dataclass(frozen=True, slots=True)
class Timed:
    """A candidate that fits its budgets, with its prediction."""

    candidate: Candidate
    prediction: Prediction
    wears_out: bool
    """Whether it exceeds the spec's limit of drive writes per day."""
    worn_share: float = 0.0
    """The fraction of that limit that it uses, at most 1."""

    @property
    def seconds(self) -> float:
        return self.prediction.step_seconds

    @property
    def priced_seconds(self) -> float:
        """Seconds with the endurance penalty of its writes to the drives; candidates are compared by these."""
        return (1.0 + SPARED_SHARE * self.worn_share) * self.seconds


def timed(question: Question, candidate: Candidate) -> Timed:
    prediction = predict(
        candidate.work,
        rates_of(question),
        candidate.optimizer,
        candidate.blocks,
        candidate.streaming,
        overlapped=candidate.window_bytes > 0,
        steps=question.job.spec.training.num_steps,
        drives=question.drives,
    )
    limit = question.most_writes_per_day
    worn = 0.0 if limit is None else prediction.drive_writes_per_day / limit
    return Timed(candidate, prediction, worn > 1.0, min(1.0, worn))


def best(choices: Sequence[Timed]) -> Timed:
    """The candidate with the least effort among the fastest, by priced seconds."""
    fastest = min(choice.priced_seconds for choice in choices)
    near = (choice for choice in choices if choice.priced_seconds <= TIE * fastest)
    return min(near, key=lambda choice: (choice.candidate.effort, choice.seconds))


def rates_of(question: Question) -> Rates:
    spec = question.job.spec
    compute, threads = spec.model.precision.compute, spec.spill.num_cipher_threads
    return rank_rates(question.node, question.local_ranks, question.num_nodes, compute, threads)


def workload(question: Question, strategy: Strategy) -> Workload:
    spec = question.job.spec
    made = Workload(
        shape=question.shape,
        micro_batch_size=question.micro_batch_size,
        sequence_length=spec.training.sequence_length,
        num_micro_batches=spec.training.global_batch_size // (question.micro_batch_size * question.world_size),
        world_size=question.world_size,
        local_ranks=question.local_ranks,
        strategy=strategy,
        wire_bytes=DTYPE_BYTES[spec.model.precision.gradient_reduce],
        rule=spec.training.optimizer.rule,
        moments=spec.training.optimizer.moment_type,
        in_place=question.node.copies_use_cores,
        is_float16=spec.model.precision.compute == "float16",
        on_cuda=question.node.device_kind == "Cuda",
    )
    return _shared(made)


@lru_cache(maxsize=32)
def _shared(work: Workload) -> Workload:
    """Returns an equal Workload whose sums may be computed already, because alternatives and node classes ask about the
    same work."""
    return work


# --- the space: what is compared, whatever the budgets are ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The policies of the blocks, and what activations need on the device; moved blocks are counted as moved to host
    memory."""

    blocks: Blocks
    window_bytes: int
    peak: DevicePeak


class Layouts(tuple[BlockLayout, ...]):
    """All layouts of a model in one order of micro-batches; groups share them."""

    @cached_property
    def least(self) -> DevicePeak:
        return min((layout.peak for layout in self), key=lambda peak: peak.total)

    @cached_property
    def rows(self) -> list[tuple[BlockLayout, list[int]]]:
        """Rows of layouts with equally many moved blocks and the same window: a layout that needs no more seconds and
        device bytes than any of the row, and the numbers of those in the row."""
        found: dict[tuple[int, int], list[int]] = {}
        for number, layout in enumerate(self):
            found.setdefault((layout.blocks.moved, layout.window_bytes), []).append(number)
        return [
            (BlockLayout(replace(self[row[0]].blocks, recomputed=0), window, Layouts(self[n] for n in row).least), row)
            for (_, window), row in found.items()
        ]


@dataclass(frozen=True)
class CandidateGroup:
    """Candidates with the same strategy, the same streamed parameters (homes not yet divided among tiers), and either
    all or none with selective recomputation."""

    question: Question
    work: Workload
    streaming: Streaming
    layouts: Layouts
    rates: Rates

    @cached_property
    def forced(self) -> float:
        """Share of the trained parameters that the CPU must update, because they are streamed."""
        return forced_share(self.work, self.streaming)

    @cached_property
    def ratio(self) -> float:
        """g / (c + g) of the parameters that are neither resident nor forced."""
        if self.question.placement == "Host":
            return 0.0
        balanced = balanced_streamed_share(self.work, self.rates)
        if self.question.placement == "Interleaved":
            return min(max(balanced, FORCED_SHARE), 1.0 - FORCED_SHARE)
        return balanced

    @cached_property
    def least(self) -> BlockLayout:
        """A lower bound for all layouts, as a layout: with the seconds of keeping everything, and the device bytes of
        the layout that needs least."""
        return BlockLayout(Blocks(self.question.num_layers), 0, self.layouts.least)

    @cached_property
    def least_device_bytes(self) -> int:
        """Device bytes without activations, with the optimizer's split that needs least there."""
        share = {"Device": (0.0, 1.0), "Interleaved": (self.ratio, 0.0)}.get(self.question.placement, (0.0, 0.0))
        return self.optimizer_device_bytes(self.split(*share))

    @cached_property
    def least_host_bytes(self) -> int:
        """The least bytes in host memory: all states that may be on the device are there, and homes and activations are
        on NVMe."""
        placement = self.question.placement
        share = {"Host": (0.0, 0.0), "Interleaved": (self.ratio, 0.0), "Nvme": (0.0, 0.0)}.get(placement, (0.0, 1.0))
        return self.least_host_bytes_of(self.split(*share))

    def least_host_bytes_of(self, optimizer: OptimizerPlan) -> int:
        """The least bytes in host memory without homes: as many of the states of `optimizer` as may be there are on
        NVMe."""
        held = self.host_bytes_beside_homes(optimizer)
        may_spill = self.question.placement in ("Auto", "Nvme") and optimizer.offloads
        return min(held, self.host_bytes_beside_homes(self.spilled(optimizer, 1.0))) if may_spill else held

    def host_bytes_beside_homes(self, optimizer: OptimizerPlan) -> int:
        shares = (optimizer.streamed_share, optimizer.resident_share, optimizer.nvme_share)
        if shares not in self._host_bytes:
            nothing = Blocks(self.question.num_layers)
            held = host_bytes(self.work, optimizer, nothing, 0, self.streaming).total
            self._host_bytes[shares] = held - host_home_bytes(self.work, self.streaming)
        return self._host_bytes[shares]

    # --- bounds of what candidates take

    @cached_property
    def bounds(self) -> Bounds:
        return Bounds(self)

    @cached_property
    def exchange_seconds(self) -> float:
        """Seconds per step of the exchange between ranks that no layout and no split can hide."""
        return exposed_exchange_seconds(self.work, self.rates)

    def least_worn_share(self, written_bytes: float, within: float) -> float:
        """The least share of the limit of drive writes that a step uses if it writes `written_bytes` and takes at most
        `within` seconds."""
        if not self._worn_by_byte or within == inf:
            return 0.0
        return written_bytes * self._worn_by_byte * min(self._steps, SECONDS_PER_DAY / within)

    @cached_property
    def _worn_by_byte(self) -> float:
        """The share of a day's limit of drive writes that one byte uses; 0: there is no limit."""
        capacity, limit = self.question.drives.capacity_bytes, self.question.most_writes_per_day
        return 0.0 if limit is None or not capacity else 1.0 / capacity / limit

    @cached_property
    def _steps(self) -> int:
        return self.question.job.spec.training.num_steps

    def surely_wears_out(self, written_bytes: float, within: float) -> bool:
        return self.least_worn_share(written_bytes, within) > 1.0 + ROUNDING

    def priced(self, seconds: float, written_bytes: float, within: float) -> float:
        """A lower bound on `Timed.priced_seconds` of a candidate that takes `seconds`, at most `within`, and writes
        `written_bytes`."""
        worn = self.least_worn_share(written_bytes, within) / (1.0 + ROUNDING)
        return (1.0 + SPARED_SHARE * min(1.0, worn)) * seconds

    # --- the optimizer's shares

    def optimizers(self, free_bytes: int) -> Iterator[OptimizerPlan]:
        """Splits of the optimizer for a device on which activations leave `free_bytes`, beginning with the least
        offloaded one that fits."""
        placement = self.question.placement
        resident = self.split(0.0, 1.0)
        if placement == "Device":
            yield resident
            return
        if placement == "Nvme":
            yield self.spilled(self.split(0.0, 0.0), 1.0)
            return
        if placement == "Auto" and self._fits(resident, free_bytes):
            yield resident
            return
        if placement == "Auto":
            yield from self._partly_resident(free_bytes)
        interleaved = self.split(self.ratio, 0.0)
        if self.ratio and (placement == "Interleaved" or self._fits(interleaved, free_bytes)):
            yield interleaved
        if placement != "Interleaved":
            yield self.split(0.0, 0.0)

    def _partly_resident(self, free_bytes: int) -> Iterator[OptimizerPlan]:
        """Splits with the largest resident share that fits. Device bytes grow linearly with the share, except for whole
        chunks, which may cost one step of its last digit."""
        for ratio in dict.fromkeys((self.ratio, 0.0)):
            none, share = self.split(ratio, 0.0), self._resident_part(ratio, free_bytes)
            if share > LEAST_RESIDENT_SHARE and self._fits(none, free_bytes):
                step = 1e-4 / (1.0 - self.forced)
                splits = (self.split(ratio, each) for each in (share, share - step))
                yield from islice((split for split in splits if self._fits(split, free_bytes)), 1)

    def _resident_part(self, ratio: float, free_bytes: int) -> float:
        if ratio not in self._halves:
            half = self.optimizer_device_bytes(self.split(ratio, 0.5))
            self._halves[ratio] = half, self._device_bytes_per_share(ratio)
        half, each = self._halves[ratio]
        return min(0.5 + (free_bytes - half) / each, LARGEST_PARTLY_RESIDENT_SHARE)

    @cached_property
    def _halves(self) -> dict[float, tuple[int, float]]:
        return {}

    def most_resident(self, free_bytes: int) -> Iterator[tuple[float, float]]:
        """(g / (c + g), largest resident share) of the splits of `optimizers`; also with share 0, if a smaller share
        might be faster."""
        placement, free = self.question.placement, 1.0 - self.forced
        if placement == "Device" or (placement == "Auto" and self._fits(self.split(0.0, 1.0), free_bytes)):
            yield 0.0, free
        elif placement in ("Host", "Nvme"):
            yield 0.0, 0.0
        elif placement == "Interleaved":
            yield self.ratio, 0.0
        else:
            for ratio in dict.fromkeys((self.ratio, 0.0)):
                part = max(0.0, self._resident_part(ratio, free_bytes))
                yield ratio, part * free
                if part and not self.bounds.prefers_device(ratio):
                    yield ratio, 0.0

    def _device_bytes_per_share(self, ratio: float) -> float:
        """Device bytes by which a split with `resident` 1 exceeds one with 0: its states, and its accumulators that
        leave host memory."""
        work, free = self.work, 1.0 - self.forced
        states = states_bytes_per_parameter(work, on_cpu=False) * work.rank_parameters
        accumulators = accumulator_bytes(work, work.shape.num_accumulated)
        return max(1.0, free * (states + (1.0 - ratio) * accumulators))

    def optimizer_device_bytes(self, optimizer: OptimizerPlan) -> int:
        """All bytes on the device except those of activations."""
        shares = (optimizer.streamed_share, optimizer.resident_share)
        if shares not in self._device_bytes:
            self._device_bytes[shares] = device_bytes(self.work, optimizer, _NO_ACTIVATIONS, self.streaming).total
        return self._device_bytes[shares]

    @cached_property
    def _device_bytes(self) -> dict[tuple[float, float], int]:
        return {}

    @cached_property
    def _host_bytes(self) -> dict[tuple[float, float, float], int]:
        return {}

    @cached_property
    def _spilled(self) -> dict[tuple[float, float, float], OptimizerPlan]:
        return {}

    @cached_property
    def _splits(self) -> dict[tuple[float, float], OptimizerPlan]:
        return {}

    def _fits(self, optimizer: OptimizerPlan, free_bytes: int) -> bool:
        return self.optimizer_device_bytes(optimizer) <= free_bytes

    def split(self, ratio: float, resident: float) -> OptimizerPlan:
        """The split with c + g + s = 1. Of the parameters that are not forced on the CPU, the part `resident` is
        resident; of the others, the part `ratio` is streamed. Shares have four digits, rounded in favour of the CPU."""
        if (ratio, resident) not in self._splits:
            self._splits[ratio, resident] = self._split(ratio, resident)
        return self._splits[ratio, resident]

    def _split(self, ratio: float, resident: float) -> OptimizerPlan:
        free = 1.0 - self.forced
        resident_share = free if resident == 1.0 and free == 1.0 else floor(resident * free * 1e4) / 1e4
        streamed_share = floor(ratio * max(0.0, free - resident_share) * 1e4) / 1e4
        found = OptimizerPlan(
            cpu_share=round(1.0 - resident_share - streamed_share, 4),
            streamed_share=streamed_share,
            resident_share=resident_share,
            chunk_parameters=chunk_parameters(self.work),
            num_threads=update_threads(
                self.question.node.num_cores, self.question.local_ranks, self.rates.copies_use_cores
            ),
        )
        return found.model_copy(update={"overlap": self.overlap(found)})

    def spilled(self, optimizer: OptimizerPlan, part: float) -> OptimizerPlan:
        """`optimizer` with `part` of what is not resident on NVMe; CPU and device share the rest as before. Shares have
        four digits, rounded in favour of NVMe."""
        key = (optimizer.streamed_share, optimizer.resident_share, part)
        if key not in self._spilled:
            self._spilled[key] = self._with_nvme(optimizer, part)
        return self._spilled[key]

    def _with_nvme(self, optimizer: OptimizerPlan, part: float) -> OptimizerPlan:
        left = 1.0 - optimizer.resident_share
        nvme_share = min(left, ceil(part * left * 1e4) / 1e4)
        streamed_share = min(floor((1.0 - part) * optimizer.streamed_share * 1e4) / 1e4, left - nvme_share)
        cpu_share = max(0.0, round(left - nvme_share - streamed_share, 4))
        shares = {"cpu_share": cpu_share, "streamed_share": streamed_share, "nvme_share": round(nvme_share, 4)}
        found = optimizer.model_copy(update=shares)
        return found.model_copy(update={"overlap": self.overlap(found)})

    @cached_property
    def may_speculate(self) -> bool:
        """Whether parameters may be updated during backward: if the spec asks for it, or if no clipping can invalidate
        the update. That requires parameters that the CPU uploads, and gradients to which no other rank adds."""
        if self.streaming.units or self.question.world_size > 1:
            return False
        unclipped = not self.question.job.spec.training.gradient_clipping and not self.rates.copies_use_cores
        return self.question.overlap == "Backward" or (self.question.overlap == "Auto" and unclipped)

    def overlap(self, optimizer: OptimizerPlan) -> Overlap:
        """The overlap that the spec asks for, or with Auto one that saves time; None if nothing is offloaded."""
        asked = self.question.overlap
        if asked == "Auto" and self.work.strategy in ZERO_STRATEGIES:  # forward needs the new values of all ranks
            return "None"
        up = update_loads(self.work, self.rates, optimizer, self.streaming)[Resource.H2D]
        pays = can_overlap(self.rates, optimizer, up, self.streaming) if asked == "Auto" else asked != "None"
        if not (pays and optimizer.offloads):
            return "None"
        return "Backward" if self.may_speculate and optimizer.cpu_share else "Forward"

    def speculating(self, optimizer: OptimizerPlan, blocks: Blocks, room: int) -> OptimizerPlan:
        """`optimizer` with as much of its update in backward as the CPU has time for and `room` bytes of host memory
        allow; with overlap Forward if that is less than a chunk, which is not worth it."""
        backward = backward_loads(self.work, self.rates, blocks, optimizer, self.streaming)
        window = speculative_window(self.work, self.rates, optimizer, backward)
        most = optimizer.model_copy(update={"speculative_parameters": max(1, window)})
        if speculation_bytes(self.work, most) > room:
            window = int(window * room / speculation_bytes(self.work, most) * SPECULATION_SLACK)
        if window < optimizer.chunk_parameters:
            return optimizer.model_copy(update={"overlap": "Forward"})
        return optimizer.model_copy(update={"speculative_parameters": window})


def groups(question: Question) -> list[CandidateGroup]:
    """The groups of all candidates, the same for all budgets. Only the optimizer's resident share depends on the
    budgets and grows with them, so with more memory the fastest candidate never gets slower."""
    rates = rates_of(question)
    made: list[CandidateGroup] = []
    for work in _lean_twins(question):
        if question.parameters != "Stream":
            made.append(CandidateGroup(question, work, RESIDENT, _layouts(question, work, RESIDENT, MAX_GROUPS), rates))
        # Streamed parameters are updated in place, in their homes: none of them can be updated before that is known to
        # be valid.
        may_stream = question.parameters != "Resident" and question.overlap != "Backward"
        if may_stream and question.strategy in STREAMING_STRATEGIES:
            made += _streamed_groups(question, work, rates)
    return made


def _lean_twins(question: Question) -> Iterator[Workload]:
    """The work of a step, and the same with selective recomputation, if the spec leaves that open and a run can do
    it."""
    work = workload(question, question.strategy)
    yield work
    if question.policy == "Auto" and why_not_lean(question, work) is None:
        yield _shared(replace(work, lean=True))


def why_not_lean(question: Question, work: Workload) -> str | None:
    """Why nothing of what `work` saves can be rebuilt; None when something can."""
    if question.node.device_kind != "Cpu":
        return "the time to recompute them on a GPU has not been measured"
    if work.strategy not in LEAN_STRATEGIES:
        return f"with strategy {work.strategy}, a rank has all parameters of only one segment at a time"
    if not any(block.rebuilt_bytes for block in work.shape.blocks):
        return "it is not known which of these operations the model has"
    if not work.can_be_lean:
        return f"all of them are smaller than {format_bytes(work.minimum_bytes)}"
    return None


def _streamed_groups(question: Question, work: Workload, rates: Rates) -> Iterator[CandidateGroup]:
    for order, boundaries in _orders(work):
        waits = Streaming(order=order, boundaries=boundaries)
        layouts = _layouts(question, work, waits, MAX_GROUPS_STREAMED)
        for num_units in _levels(question, work):
            is_tight = num_units >= len(work.units.segments) - 2
            for num_slots in (NUM_SLOTS, 1) if is_tight else (NUM_SLOTS,):
                streaming = replace(waits, host=num_units, num_slots=num_slots)
                group = CandidateGroup(question, work, streaming, layouts, rates)
                if question.placement != "Device" or not group.forced:
                    yield group


def _orders(work: Workload) -> Iterator[tuple[Order, Policy]]:
    yield "InOrder", Policy.KEEP
    if work.num_micro_batches > 1:
        yield "WeightStationary", Policy.KEEP
        if any(work.handed_on_bytes):
            yield "WeightStationary", Policy.HOST


def _levels(question: Question, work: Workload) -> list[int]:
    """Numbers of streamed units to compare: evenly spaced ones, all units but the one or two worth most on the device,
    all. With Stream only the last three, in which every block is streamed."""
    num_units = len(work.units.segments)
    step = -(-num_units // MAX_LEVELS)
    levels = {*range(step, num_units, step), *(level for level in range(num_units - 2, num_units + 1) if level > 0)}
    if question.parameters == "Stream":
        levels = {level for level in levels if level >= num_units - 2}
    return sorted(levels)


def run_strategies(spec: TrainingJobSpec, world_size: int, device: DeviceKind) -> tuple[Strategy, ...]:
    """The strategies with which a job may run on `device`; the first that fits is taken."""
    asked = spec.parallelism.strategy
    divides = spec.model.precision.compute != "float16" and spec.training.optimizer.moments != "int8"
    if world_size == 1 or spec.members or not divides:
        return ("Ddp",)  # strategies that shard a model have no loss scale, and cut int8 blocks
    if asked == "Zero3" and device == "Cuda":
        return ("Fsdp",)  # the same shards; DeepSpeed runs on CPUs only
    return AUTO_STRATEGIES if asked == "Auto" else (asked,)


def _layouts(question: Question, work: Workload, streaming: Streaming, max_groups: int) -> Layouts:
    """All layouts of blocks, the same for every strategy. Moved blocks have one of two windows: a whole block, so that
    its copy overlaps the next block's forward, or none, for the tightest budgets."""
    same = _shared(replace(workload(question, "Ddp"), lean=work.lean))
    return _layouts_of(same, question.policy, streaming, max_groups)


@lru_cache(maxsize=32)
def _layouts_of(work: Workload, policy: str, streaming: Streaming, max_groups: int) -> Layouts:
    layers = work.shape.num_layers
    found = list[BlockLayout]()
    # A layout takes time for each run of equal blocks, so models whose blocks all differ have fewer layouts.
    max_groups = max(LEAST_GROUPS, min(max_groups, isqrt(MOST_RUNS_LOOKED_AT // max(1, len(work.runs)))))
    for recomputed, moved in _block_counts(layers, policy, max_groups):
        if work.lean and recomputed == layers:
            continue  # nothing is rebuilt
        blocks = Blocks(layers, recomputed=recomputed, host=moved)
        windows = (work.largest_block.moved, 0) if moved else (0,)
        peaks = device_peaks(work, blocks, windows, streaming)
        found += (BlockLayout(blocks, window, peak) for window, peak in zip(windows, peaks, strict=True))
    return Layouts(found)


def _block_counts(layers: int, policy: str, max_groups: int) -> Iterator[tuple[int, int]]:
    """Numbers of (recomputed, moved) blocks; the others are kept."""
    forced = {"Keep": (0, 0), "Recompute": (layers, 0), "Host": (0, layers), "Nvme": (0, layers)}
    if policy in forced:
        yield forced[policy]
        return
    group = max(1, -(-layers // max_groups))
    counts = [*range(0, layers, group), layers]
    yield from ((recomputed, moved) for recomputed in counts for moved in counts if recomputed + moved <= layers)
