"""Footprint: bytes of one rank in each tier, as the trainer holds them. Arithmetic only; every function is one row.

P = trained parameters of this rank's shard; b = bytes of the compute type, w = of a trained parameter's; c, g, s, n =
shares of the optimizer updated by the CPU, streamed through the device, resident on it, on NVMe. In order,
micro-batches run one after the other and activations of one are alive; weight-stationary, those of all M between
forward and backward are. docs/planning.md writes the rows down as formulas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import ceil
from typing import Literal

from spillway.plan import Answer, OptimizerPlan, ParameterPlan, Tier, TierBytes
from spillway.planning.model_shape import FLOAT32_BYTES, ModelShape, ParameterShape, Segment
from spillway.update_rules import REST_BITS, STATE_BYTES, MomentType, UpdateRule

Strategy = Literal["Ddp", "Fsdp", "Zero1", "Zero2", "Zero3"]
SHARDS: dict[Strategy, tuple[str, ...]] = {
    "Ddp": (),
    "Zero1": ("states", "gradients"),
    "Zero2": ("states", "gradients"),
    "Zero3": ("states", "gradients", "parameters"),
    "Fsdp": ("states", "gradients", "parameters"),
}
"""what each strategy divides among the ranks; sums of gradients are added up by their owners under Zero1, too"""
RUN_STRATEGY: Strategy = "Ddp"
"""what a run takes for Auto: the others add gradients in another order, and a plan changes no bit"""
ZERO_STRATEGIES: frozenset[Strategy] = frozenset({"Zero1", "Zero2", "Zero3"})
"""those that DeepSpeed divides"""
DIVIDING_STRATEGIES: frozenset[Strategy] = frozenset({"Fsdp", *ZERO_STRATEGIES})
"""those whose optimizer gets float32 sums over ranks, a micro-batch each"""
STREAMING_STRATEGIES: frozenset[Strategy] = frozenset({"Ddp"})
"""those under which model_spill runs: every rank has whole segments at home"""
LEAN_STRATEGIES: frozenset[Strategy] = frozenset({"Ddp"})
"""those under which blocks are lean: every rank has whole parameters from forward to backward"""

NUM_SLOTS = 2
"""device slots of streamed optimizer states, and of streamed parameters: one is filled while the other is used"""
NUM_STAGING_BUFFERS = 4
"""host buffers of one chunk for gradients on their way down, and as many for parameters that go up or to NVMe"""
NUM_STATE_BUFFERS = 4
"""host buffers of one chunk's states that are on NVMe: one is read, one updated, one written, and one more, so that a
small chunk between large ones leaves no lane idle"""
NUM_RELOADED_SEGMENTS = 2
"""spilled segments that are back on the device at once: the one in backward and the one before it"""
NUM_GATHERED_SEGMENTS = 2
"""segments whose sharded parameters are whole at once: the one in use and the next"""
LARGE_STORAGE_BYTES = 2 * 2**20
"""a huge page: from here on a storage stays in no cache, and its pages are new every time"""
CACHE_LINE_BYTES = 64
"""storages that lie in one piece of host memory start on one"""
PARAMETER_UNIT_BYTES = 512
"""a streamed parameter starts on one, as torch's CUDA allocator places them: cuBLAS chooses kernels by alignment"""
LOSS_BYTES = CACHE_LINE_BYTES
"""scalars that the loss saves: the sum of its labels' weights"""
EXCHANGE_PARAMETERS = 2**20
"""gradients that ranks exchange at once"""
ALLOCATOR_BYTES = 192 * 2**20
"""of torch's CUDA allocator, whatever the plan: two workspaces of 32 MiB that it lends to cuBLAS (one a thread that
launches products: torch before 2.15 keeps them), and pages of 20 MiB, of each stream and of small and large blocks,
that are not full. Measured with kernels that do nothing, 60 plans (benchmarks/gpu_plans.py)"""
PAGE_BYTES = 4096
"""pieces of host memory and NVMe extents are multiples of this"""

Order = Literal["InOrder", "WeightStationary"]
Sizes = tuple[int, ...]


def _without(sizes: list[int], taken: list[int]) -> list[int]:
    """`sizes` less those of `taken`, each once, in the same order."""
    left, out = Counter(taken), []
    for size in sizes:
        if left[size]:
            left[size] -= 1
        else:
            out.append(size)
    return out


def padded(nbytes: int, unit: int = PAGE_BYTES) -> int:
    """`nbytes` rounded up to whole units."""
    return -(-nbytes // unit) * unit


def one_piece(sizes: Iterable[int]) -> int:
    """Storages of these sizes in one piece of host memory."""
    return padded(sum(padded(size, CACHE_LINE_BYTES) for size in sizes))


# --- what a rank does -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """One kind of block, bytes of one micro-batch."""

    saved: int
    """what it saves for backward"""
    rebuilt: int
    """the part of it that is not held, because backward rebuilds it from the rest; 0 where the plan is not lean"""
    rebuilding: int
    """what that reads and writes"""
    moved: int
    """the part of what is held that is worth moving"""
    moved_host: int
    """the same in host memory: one piece of whole pages"""
    moved_nvme: int
    """the same on NVMe, where every storage takes whole pages"""
    output: int
    new_input: int
    """what it gets that the segment before it made; small: the part that stays on the device, being not worth moving"""
    new_small: int
    passed_input: int
    """what it gets that an earlier segment made"""
    passed_small: int
    input_host: int
    """all that it gets and is worth moving, in host memory: one piece of whole pages"""
    input_nvme: int
    """the same on NVMe"""
    forward: int
    """workspace"""
    backward: int
    lean: int
    flops: float
    """of one forward"""

    @property
    def held(self) -> int:
        return self.saved - self.rebuilt

    @property
    def passed_large(self) -> int:
        return self.passed_input - self.passed_small

    @property
    def input_large(self) -> int:
        """All that it gets and is worth moving."""
        return self.new_input - self.new_small + self.passed_large


NO_BLOCK = BlockBytes(*(0,) * 16, flops=0.0)


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive equal blocks, [start, end)."""

    start: int
    end: int
    block: BlockBytes


@dataclass(frozen=True)
class Workload:
    """What one rank does in a step, apart from where bytes live. Sums over blocks are computed once."""

    shape: ModelShape
    micro_batch_size: int
    sequence_length: int
    num_micro_batches: int
    world_size: int = 1
    local_ranks: int = 1
    strategy: Strategy = "Ddp"
    minimum_bytes: int = 64 * 1024
    """storages smaller than this stay on the device"""
    wire_bytes: int = FLOAT32_BYTES
    """of a gradient on its way to other ranks: precision.gradientReduce"""
    rule: UpdateRule = UpdateRule.ADAMW
    moments: MomentType = MomentType.FLOAT32
    in_place: bool = False
    """the device's memory is the host's: the CPU's update writes the parameter itself, and nothing goes up"""
    is_float16: bool = False
    """weights are in it: no half of their masters"""
    lean: bool = False
    """blocks that are not recomputed rebuild what their shape says"""
    on_cuda: bool = False
    """device memory comes from torch's CUDA allocator"""

    @property
    def splits_masters(self) -> bool:
        """Of a streamed parameter's master only what its bfloat16 weight does not say crosses the link."""
        return self.shape.trained_bytes == 2 and not self.is_float16 and not self.in_place

    @cached_property
    def tokens(self) -> int:
        """of one micro-batch"""
        return self.micro_batch_size * self.sequence_length

    @cached_property
    def rank_parameters(self) -> int:
        """Parameters that this rank's optimizer updates."""
        if self.is_cut_by_rows:
            return sum(self.most_rows(one) for one in self._parameters if one.is_trained and not one.is_alias)
        return ceil(self.shape.num_trained / self.shards("states"))

    @property
    def is_cut_by_rows(self) -> bool:
        """Every parameter by itself, so that the first rank has more where rows are uneven."""
        return self.strategy == "Fsdp" and self.world_size > 1

    @property
    def _parameters(self) -> Iterator[ParameterShape]:
        return (one for segment in self.shape.segments for one in segment.parameters)

    def most_rows(self, one: ParameterShape) -> int:
        """Values of those rows that the first rank has, cut by rows. No other one has more."""
        return ceil(one.num_rows / self.world_size) * one.row_values

    @cached_property
    def rank_accumulated(self) -> int:
        """Values with an accumulator, cut by rows."""
        return sum(self.most_rows(one) for one in self._parameters if one.is_trained)

    @cached_property
    def rank_parameter_bytes(self) -> int:
        """Cut by rows; a tied alias is gathered from memory of its own."""
        return sum(self.most_rows(one) * one.value_bytes for one in self._parameters)

    @cached_property
    def largest_gathered_bytes(self) -> int:
        """A segment's whole parameters, when ranks hold only shards; cut by rows, those that fill up are sent too."""
        if not self.is_cut_by_rows:
            return self.shape.largest_segment_bytes
        sizes = (sum(self.most_rows(one) * one.value_bytes for one in s.parameters) for s in self.shape.segments)
        return self.world_size * max(sizes)

    @cached_property
    def largest_piece(self) -> int:
        """Values of one parameter that one rank updates."""
        if self.is_cut_by_rows:
            return max(self.most_rows(one) for one in self._parameters if one.is_trained)
        return ceil(self.shape.largest_parameter / self.shards("parameters"))

    def shards(self, part: str) -> int:
        """Ranks that share `part`: parameters, gradients, states."""
        return self.world_size if part in SHARDS[self.strategy] else 1

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The blocks, equal neighbours together."""
        kinds: dict[tuple[Segment, Sizes, Sizes], BlockBytes] = {}
        found: list[Run] = []
        for index, (before, block) in enumerate(pairwise(self.shape.segments[:-1])):
            kind = (block, before.made_bytes, before.passed_bytes)
            if kind not in kinds:
                kinds[kind] = self._block_bytes(*kind)
            if found and found[-1].block is kinds[kind]:
                found[-1] = Run(found[-1].start, index + 1, kinds[kind])
            else:
                found.append(Run(index, index + 1, kinds[kind]))
        return tuple(found)

    def _block_bytes(self, block: Segment, made: Sizes, passed: Sizes) -> BlockBytes:
        """Of `block`, which gets tensors of these sizes."""
        sizes = [self.tokens * per_token for per_token in block.saved_bytes]
        rebuilt = self._rebuilt_sizes(block)
        moved = [size for size in _without(sizes, rebuilt) if size >= self.minimum_bytes]
        new, old = self._sizes(made), self._sizes(passed)
        waiting = [size for size in (*new, *old) if size >= self.minimum_bytes]
        return BlockBytes(
            saved=sum(sizes),
            rebuilt=sum(rebuilt),
            rebuilding=self.tokens * block.rebuilding_bytes if rebuilt else 0,
            moved=sum(moved),
            moved_host=one_piece(moved),
            moved_nvme=sum(padded(size) for size in moved),
            output=self.tokens * block.output_bytes,
            new_input=sum(new),
            new_small=sum(size for size in new if size < self.minimum_bytes),
            passed_input=sum(old),
            passed_small=sum(size for size in old if size < self.minimum_bytes),
            input_host=one_piece(waiting),
            input_nvme=sum(padded(size) for size in waiting),
            forward=self.tokens * block.forward_workspace_bytes,
            backward=self.tokens * block.backward_workspace_bytes,
            lean=self.tokens * block.lean_forward_bytes,
            flops=self.tokens * block.forward_flops_per_token(self.sequence_length),
        )

    def _rebuilt_sizes(self, block: Segment) -> list[int]:
        """Small storages are held."""
        sizes = (self.tokens * per_token for per_token in block.rebuilt_bytes if self.lean)
        return [size for size in sizes if size >= self.minimum_bytes]

    @property
    def can_be_lean(self) -> bool:
        """Whether backward could rebuild anything of a block."""
        sizes = {size for block in set(self.shape.blocks) for size in block.rebuilt_bytes}
        return any(self.tokens * size >= self.minimum_bytes for size in sizes)

    def _sizes(self, per_token: Sizes) -> list[int]:
        return [self.tokens * size for size in per_token]

    @cached_property
    def handed_on_bytes(self) -> tuple[int, ...]:
        """Of one micro-batch, what each segment hands on and is worth moving."""
        found = (self._sizes((*one.made_bytes, *one.passed_bytes)) for one in self.shape.segments)
        return tuple(sum(size for size in sizes if size >= self.minimum_bytes) for sizes in found)

    @cached_property
    def forward_flops(self) -> float:
        """of one micro-batch"""
        return self.tokens * self.shape.forward_flops_per_token(self.sequence_length)

    @cached_property
    def forward_order(self) -> tuple[tuple[float, float], ...]:
        """Of each segment that has trained parameters: the share of all of them up to and with it, and the share of
        forward's FLOPs before it."""
        segments, length = self.shape.segments, self.sequence_length
        flops = [segment.forward_flops_per_token(length) for segment in segments]
        trained = [*accumulate(segment.num_trained for segment in segments)]
        before = [0.0, *accumulate(flops)]
        return tuple(
            (trained[index] / trained[-1], before[index] / max(1.0, before[-1]))
            for index, segment in enumerate(segments)
            if segment.num_trained
        )

    @cached_property
    def largest_segment(self) -> int:
        """values that have accumulators in it"""
        return max(segment.num_accumulated for segment in self.shape.segments)

    @cached_property
    def saved_bytes(self) -> int:
        """of one micro-batch, everything kept"""
        return self.tokens * self.shape.saved_bytes_per_token()

    @cached_property
    def large_saved_bytes(self) -> int:
        """of those, in storages of at least LARGE_STORAGE_BYTES"""
        sizes = (self.tokens * each for segment in self.shape.segments for each in segment.saved_bytes)
        return sum(size for size in sizes if size >= LARGE_STORAGE_BYTES)

    @cached_property
    def backward_flops(self) -> float:
        return self.tokens * self.shape.backward_flops_per_token(self.sequence_length)

    @cached_property
    def units(self) -> Units:
        return _units(self)

    def alive(self, streaming: Streaming) -> int:
        """Micro-batches whose activations are held at once."""
        return self.num_micro_batches if streaming.order == "WeightStationary" else 1

    @cached_property
    def sums(self) -> dict[str, list[float]]:
        """Prefix sums over blocks by field of BlockBytes: sums[field][n] is that of the first n blocks."""
        kinds = [run.block for run in self.runs for _ in range(run.start, run.end)]
        fields = (
            "saved", "rebuilt", "rebuilding", "moved", "moved_host", "moved_nvme", "input_host", "input_nvme",
            "passed_large", "flops",
        )  # fmt: skip
        return {field: [0, *accumulate(getattr(kind, field) for kind in kinds)] for field in fields}

    def sum_of(self, field: str, start: int, end: int) -> int:
        """Of BlockBytes.`field` over blocks [start, end)."""
        return int(self.sums[field][end] - self.sums[field][start])

    @cached_property
    def largest_block(self) -> BlockBytes:
        """The one that moves most."""
        return max((run.block for run in self.runs), key=lambda block: block.moved, default=NO_BLOCK)


@dataclass(frozen=True, slots=True)
class Blocks:
    """How many blocks have each answer. Order in the model: NVMe first (longest until backward needs it), then host,
    then recompute; the last ones are kept, because backward starts there."""

    num_layers: int
    recomputed: int = 0
    host: int = 0
    nvme: int = 0

    @property
    def moved(self) -> int:
        return self.host + self.nvme

    @property
    def kept(self) -> int:
        return self.num_layers - self.recomputed - self.moved

    @property
    def pieces(self) -> tuple[tuple[Answer, int, int], ...]:
        """(answer, first block, end) in forward order, empty ones left out."""
        counts = (
            (Answer.NVME, self.nvme),
            (Answer.HOST, self.host),
            (Answer.RECOMPUTE, self.recomputed),
            (Answer.KEEP, self.kept),
        )
        ends = accumulate(count for _, count in counts)
        return tuple((answer, end - count, end) for (answer, count), end in zip(counts, ends, strict=True) if count)

    @property
    def answers(self) -> tuple[Answer, ...]:
        """One a block, in forward order."""
        return tuple(answer for answer, start, end in self.pieces for _ in range(start, end))


# --- streamed parameters ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Streaming:
    """How many units of the eviction order (below) are not resident, and how they pass through the device. Those that
    are evicted first, being worth least on the device, lie on NVMe, the others in host memory."""

    host: int = 0
    nvme: int = 0
    num_slots: int = NUM_SLOTS
    order: Order = "InOrder"
    boundaries: Answer = Answer.KEEP

    @property
    def units(self) -> int:
        return self.host + self.nvme


RESIDENT = Streaming()
"""all parameters stay on the device"""


@dataclass(frozen=True, slots=True)
class Units:
    """Prefix sums over the eviction order: entry n is of the n units that are evicted first."""

    segments: list[tuple[int, ...]]
    """of each unit: one segment, or all that share parameters, whose home is one"""
    count: list[int]
    """of segments"""
    own: list[int]
    """bytes of parameters that leave the device"""
    trained: list[int]
    accumulated: list[int]
    host: list[int]
    """bytes of homes in host memory"""
    nvme: list[int]
    """bytes of homes on NVMe, at most: every chunk of every parameter takes whole pages"""
    loaded: list[int]
    """bytes of one load of each, aliases included"""
    returning: list[int]
    """of those, what backward needs again: not an embedding, whose gradient needs the indices alone"""
    largest: list[int]
    """bytes of the largest slot"""
    largest_nvme: list[int]
    """bytes of the largest segment as read from NVMe"""


def eviction_order(shape: ModelShape) -> list[tuple[int, ...]]:
    """Units of segments by what a resident byte of them saves, least first: a knapsack by saved seconds per byte.

    A byte that is not resident is loaded in every pass, so all are worth the same but for: tied parameters, loaded once
    for each use; embedding and head, which set the size of the slots and whose loads nothing precedes or follows;
    late blocks, which backward needs again before anything else. Segments without parameters are not listed.
    """
    members = {index: {index} for index, segment in enumerate(shape.segments) if segment.num_tensors}
    for alias, owner in shape.tied:
        together = members[alias] | members[owner]
        members.update(dict.fromkeys(together, together))
    units = {tuple(sorted(unit)) for unit in members.values()}
    ends = {0, shape.num_segments - 1}

    def worth(unit: tuple[int, ...]) -> tuple[float, bool, int]:
        own = sum(shape.segments[index].parameter_bytes for index in unit)
        loaded = own + shape.compute_bytes * sum(shape.segments[index].num_aliased for index in unit)
        return loaded / max(1, own), bool(ends.intersection(unit)), max(unit)

    return sorted(units, key=worth)


def _units(work: Workload) -> Units:
    shape, chunk = work.shape, chunk_parameters(work)
    made = Units([], [0], [0], [0], [0], [0], [0], [0], [0], [0], [0])
    for unit in eviction_order(shape):
        segments = [shape.segments[index] for index in unit]
        own = [home_bytes(segment) for segment in segments]
        slots = [
            home + padded(shape.compute_bytes * segment.num_aliased)
            for home, segment in zip(own, segments, strict=True)
        ]
        extents = [
            segment.parameter_bytes + PAGE_BYTES * (segment.num_tensors + segment.num_parameters // chunk)
            for segment in segments
        ]
        made.segments.append(unit)
        for sums, amount in (
            (made.count, len(unit)),
            (made.own, sum(segment.parameter_bytes for segment in segments)),
            (made.trained, sum(segment.num_trained for segment in segments)),
            (made.accumulated, sum(segment.num_accumulated for segment in segments)),
            (made.host, sum(own)),
            (made.nvme, sum(extents)),
            (made.loaded, sum(slots)),
            (
                made.returning,
                sum(slot for slot, segment in zip(slots, segments, strict=True) if segment.matrix_parameters),
            ),
        ):
            sums.append(sums[-1] + amount)
        made.largest.append(max(made.largest[-1], *slots))
        made.largest_nvme.append(max(made.largest_nvme[-1], *extents, *slots))
    return made


def home_bytes(segment: Segment) -> int:
    """Of one segment in host memory, and in a slot before its aliases: each parameter is padded to its unit."""
    return padded(segment.parameter_bytes + PARAMETER_UNIT_BYTES * segment.num_tensors) if segment.num_parameters else 0


def homes(work: Workload, streaming: Streaming) -> tuple[Tier, ...]:
    """One a segment, in forward order; empty when all are resident."""
    if not streaming.units:
        return ()
    found = [Tier.DEVICE] * work.shape.num_segments
    for index, unit in enumerate(work.units.segments[: streaming.units]):
        for segment in unit:
            found[segment] = Tier.NVME if index < streaming.nvme else Tier.HOST
    return tuple(found)


def parameter_plan(work: Workload, streaming: Streaming) -> ParameterPlan:
    return ParameterPlan(
        homes=homes(work, streaming),
        num_slots=streaming.num_slots,
        order=streaming.order,
        boundaries=streaming.boundaries,
    )


def streamed_slot_bytes(work: Workload, streaming: Streaming) -> int:
    """Device slots of the largest streamed segment."""
    return streaming.num_slots * work.units.largest[streaming.units]


def host_home_bytes(work: Workload, streaming: Streaming) -> int:
    sums = work.units.host
    return sums[streaming.units] - sums[streaming.nvme]


def nvme_home_bytes(work: Workload, streaming: Streaming) -> int:
    return work.units.nvme[streaming.nvme]


def home_staging_bytes(work: Workload, streaming: Streaming) -> int:
    """Host buffers that segments on NVMe pass through: one is read while the other goes up."""
    return NUM_SLOTS * padded(work.units.largest_nvme[streaming.nvme])


def forced_share(work: Workload, streaming: Streaming) -> float:
    """x: share of the trained parameters that the CPU updates because they are at home beside it."""
    return work.units.trained[streaming.units] / work.rank_parameters if streaming.units else 0.0


# --- parameters, gradients, optimizer states --------------------------------------------------------------------------


def parameter_bytes(work: Workload, streaming: Streaming = RESIDENT) -> int:
    """What is resident, and the position tables."""
    shape = work.shape
    whole = (
        work.rank_parameter_bytes if work.is_cut_by_rows else ceil(shape.parameter_bytes / work.shards("parameters"))
    )
    return whole - work.units.own[streaming.units] + shape.table_bytes(work.sequence_length)


def gathered_parameter_bytes(work: Workload) -> int:
    """Whole copies of the largest segments' parameters, when ranks hold only shards."""
    if work.shards("parameters") == 1:
        return 0
    return NUM_GATHERED_SEGMENTS * work.largest_gathered_bytes


def transient_gradient_bytes(work: Workload) -> int:
    """w x the largest parameter: on its way from backward to its accumulator. Under ZeRO: one bucket more, on its way
    to its owners, and the float32 sum of one piece as it comes together. Under FSDP2 a whole segment is on its way, and
    the sum of one piece beside that of the one before it, which the optimizer still reads."""
    shape, w = work.shape, work.shape.trained_bytes
    if work.is_cut_by_rows:
        return w * work.largest_segment + 2 * FLOAT32_BYTES * work.largest_piece
    if work.strategy in ZERO_STRATEGIES and work.world_size > 1:
        bucket = EXCHANGE_PARAMETERS // work.world_size
        return w * (shape.largest_parameter + bucket) + FLOAT32_BYTES * work.largest_piece
    return w * shape.largest_parameter


def cpu_accumulated(work: Workload, optimizer: OptimizerPlan, streaming: Streaming = RESIDENT) -> float:
    """Values whose accumulator is in host memory: all of the streamed ones, and the CPU's share of the others."""
    forced, total = work.units.accumulated[streaming.units], work.shape.num_accumulated
    x = forced_share(work, streaming)
    rest = max(0.0, optimizer.updated_by_cpu - x) / (1.0 - x) if x < 1.0 else 0.0
    return forced + rest * (total - forced)


def accumulator_bytes(work: Workload, values: float) -> int:
    """float32, one per use: tied parameters have two."""
    if work.is_cut_by_rows:
        return ceil(FLOAT32_BYTES * values * work.rank_accumulated / work.shape.num_accumulated)
    return ceil(FLOAT32_BYTES * values / work.shards("gradients"))


def states_bytes_per_parameter(work: Workload, on_cpu: bool) -> float:
    """Moments and the float32 master; with float32 parameters the device's parameter is the master. Of many: a short
    block is counted by `_short_blocks_bytes`."""
    return work.rule.states_bytes(has_master(work, on_cpu), work.moments)


def streamed_bytes_per_parameter(work: Workload) -> float:
    """States that pass through the device: of a master that is split, its lower half and a bit."""
    whole = states_bytes_per_parameter(work, on_cpu=False)
    return whole - STATE_BYTES + REST_BITS / 8 if work.splits_masters else whole


def has_master(work: Workload, on_cpu: bool) -> bool:
    return on_cpu or work.shape.trained_bytes == 2


def state_row_bytes(work: Workload, size: int, on_cpu: bool) -> list[int]:
    """Of each state of a chunk of `size` parameters: the trainer keeps each in a row of its own."""
    moments = [work.moments.bytes_of(size) for _ in work.rule.moments]
    return [STATE_BYTES * size, *moments] if has_master(work, on_cpu) else moments


def streamed_row_bytes(work: Workload, size: int) -> list[int]:
    """The same of a chunk that is streamed."""
    rows = state_row_bytes(work, size, on_cpu=False)
    return [ceil(REST_BITS * size / 8), *rows[1:]] if work.splits_masters else rows


def chunk_parameters(work: Workload) -> int:
    """A power of two near 1/64 of the parameters, between 64 Ki and 4 Mi (16 MiB of float32), or 32 Mi on a device
    apart: the host needs as long for an operation there as the link for several MiB. Large ones are no more than 1/64,
    for a plan counts a chunk beyond a path's share."""
    near = 1 << (work.rank_parameters // 64).bit_length()
    most = 1 << 22 if work.in_place else min(max(near >> 1, 1 << 22), 1 << 25)
    return min(max(near, 1 << 16), most)


def accumulator_slack_bytes(work: Workload, optimizer: OptimizerPlan, share: float) -> int:
    """What accumulators of a path may take beyond its share: chunks are whole, and each begins on a cache line."""
    if share == 0.0 or not optimizer.offloads:
        return 0
    return FLOAT32_BYTES * _whole_chunk(work, optimizer, share) + CACHE_LINE_BYTES * _num_chunks(work, optimizer)


def _num_chunks(work: Workload, optimizer: OptimizerPlan) -> int:
    return work.shape.num_tensors + work.rank_parameters // optimizer.chunk_parameters


def _whole_chunk(work: Workload, optimizer: OptimizerPlan, share: float) -> int:
    return min(optimizer.chunk_parameters, work.rank_parameters) if share < 1.0 else 0


def _short_blocks_bytes(work: Workload, num_chunks: int) -> int:
    """Scales of blocks that are not full: of each moment one a chunk, or a parameter that is not cut."""
    return work.moments.scale_bytes * len(work.rule.moments) * num_chunks


def states_bytes(
    work: Workload, optimizer: OptimizerPlan, share: float, on_cpu: bool, *, streamed: bool = False
) -> int:
    """Optimizer states of one path: whole chunks, each state of which begins on a cache line."""
    each = streamed_bytes_per_parameter(work) if streamed else states_bytes_per_parameter(work, on_cpu)
    if share == 0.0:
        return 0
    if not optimizer.offloads:
        return ceil(each * share * work.rank_parameters) + _short_blocks_bytes(work, work.shape.num_tensors)
    num_chunks = _num_chunks(work, optimizer)
    lines = CACHE_LINE_BYTES * len(state_row_bytes(work, 1, on_cpu)) * num_chunks
    lines += _short_blocks_bytes(work, num_chunks)
    return ceil(each * (share * work.rank_parameters + _whole_chunk(work, optimizer, share))) + lines


def slot_bytes(work: Workload, optimizer: OptimizerPlan) -> int:
    """Device slots that streamed states pass through."""
    if optimizer.streamed_share == 0.0:
        return 0
    rows = streamed_row_bytes(work, _chunk(work, optimizer))
    return NUM_SLOTS * sum(padded(row, CACHE_LINE_BYTES) for row in rows)


def staging_bytes(work: Workload, optimizer: OptimizerPlan) -> int:
    """Host ring of gradients on their way down to the CPU's accumulators."""
    if optimizer.updated_by_cpu == 0.0:
        return 0
    is_float32 = work.strategy in DIVIDING_STRATEGIES and work.world_size > 1
    gradient = FLOAT32_BYTES if is_float32 else work.shape.trained_bytes
    return NUM_STAGING_BUFFERS * padded(gradient * _chunk(work, optimizer))


def upload_bytes(work: Workload, optimizer: OptimizerPlan, streaming: Streaming = RESIDENT) -> int:
    """Host ring of updated values that the CPU cannot write where they live: on a device apart, on NVMe."""
    if optimizer.updated_by_cpu == 0.0 or (work.in_place and not streaming.nvme):
        return 0
    return NUM_STAGING_BUFFERS * padded(work.shape.trained_bytes * _chunk(work, optimizer))


def speculation_bytes(work: Workload, optimizer: OptimizerPlan) -> int:
    """Second states of what backward updates, and the values made of them; every row of a chunk on a cache line."""
    window = optimizer.speculative_parameters
    if not window:
        return 0
    num_chunks = work.shape.num_tensors + window // optimizer.chunk_parameters + 1
    states = states_bytes_per_parameter(work, on_cpu=True) * window + 3 * CACHE_LINE_BYTES * num_chunks
    states += _short_blocks_bytes(work, num_chunks)
    return padded(ceil(states)) + padded(work.shape.trained_bytes * window + CACHE_LINE_BYTES * num_chunks)


def state_window_bytes(work: Workload, optimizer: OptimizerPlan) -> int:
    """Host buffers that states on NVMe pass through: each state of a chunk in whole pages."""
    if optimizer.nvme_share == 0.0:
        return 0
    return NUM_STATE_BUFFERS * sum(padded(row) for row in state_row_bytes(work, _chunk(work, optimizer), on_cpu=True))


def nvme_states_bytes(work: Workload, optimizer: OptimizerPlan, streaming: Streaming = RESIDENT) -> int:
    """States in the spill file, each of every chunk in whole pages. Those of streamed parameters are divided by
    themselves, and so may be a chunk off by themselves."""
    share = optimizer.nvme_share
    if share == 0.0:
        return 0
    num_chunks = _num_chunks(work, optimizer)
    pages = len(work.rule.state_kinds) * PAGE_BYTES * num_chunks + padded(_short_blocks_bytes(work, num_chunks))
    groups = 2 if 0.0 < forced_share(work, streaming) < 1.0 else 1
    parameters = min(work.rank_parameters, share * work.rank_parameters + groups * _whole_chunk(work, optimizer, share))
    return padded(ceil(states_bytes_per_parameter(work, on_cpu=True) * parameters)) + pages


def _chunk(work: Workload, optimizer: OptimizerPlan) -> int:
    """Chunks never span parameters."""
    return min(optimizer.chunk_parameters, work.shape.largest_parameter, work.rank_parameters)


def exchange_bytes(work: Workload) -> int:
    """Buffers of the sum of gradients over ranks: one bucket on its way out, one on its way in, this rank's own
    share of the sum. In float32; what travels as bfloat16 takes less. In host memory, which may be the device's."""
    if work.world_size == 1:
        return 0
    segment = ceil(min(EXCHANGE_PARAMETERS, work.shape.num_accumulated) / work.world_size)
    return FLOAT32_BYTES * segment * (2 * work.world_size + 1)


# --- activations ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DevicePeak:
    """What activations need on the device: the moment at which most is held for later, and what the fullest moment
    takes beyond that for temporaries. The trainer sets the latter aside for the whole run."""

    activations: int
    buffers: int
    """copies in flight out of the device, and reloads"""
    workspace: int
    holes: int = 0
    """what the allocator takes beyond them at its fullest moment, between blocks that are in use"""

    @property
    def total(self) -> int:
        return self.activations + self.buffers + self.workspace + self.holes


def device_peak(work: Workload, blocks: Blocks, window_bytes: int, streaming: Streaming = RESIDENT) -> DevicePeak:
    """Peak over forward and backward.

    An event sweep, not a sum: kept activations of late blocks are gone when spilled ones of early blocks come back.
    Where equal blocks with equal answers follow one another the bytes rise or fall steadily: the ends are looked at.
    """
    shape, tokens = work.shape, work.tokens
    stationary = streaming.order == "WeightStationary"
    alive = work.alive(streaming)
    resident = alive * tokens * shape.embedding.saved_bytes_per_token
    resident += frontier_bytes(work) if stationary else 0
    inputs_leave = streaming.boundaries is not Answer.KEEP
    resident += alive * held_input_bytes(work, blocks, inputs_leave=inputs_leave)
    previous = 0
    forward: list[tuple[int, int, int]] = []
    backward: list[tuple[int, int, int]] = []
    """each (activations, copies in flight or coming back, workspace)"""
    for answer, block, count in _intervals(work, blocks):
        recomputes, moves = answer is Answer.RECOMPUTE, answer in (Answer.HOST, Answer.NVME)
        if recomputes:
            kept = block.new_small if inputs_leave else block.new_input
            moving = block.input_large * inputs_leave
            now, workspace = kept + block.output, block.lean
        else:
            copies = block.passed_large * inputs_leave
            kept, moving = (block.held - block.moved, block.moved + copies) if moves else (block.held + copies, 0)
            now, workspace = block.saved + copies, block.forward
        others = (count - 1) * alive + alive - 1
        in_flight = min(window_bytes, moving if others else previous)
        forward.append((resident + others * kept + now, in_flight, workspace))
        # What is rebuilt comes back piece by piece; all of it at once is the most that this can take.
        again, workspace = block.rebuilt, block.backward
        if recomputes:
            again, workspace = block.saved, max(block.forward, block.backward)
        # While a block is in backward, the one before it is on its way back.
        backward.append((resident + alive * kept + again, moving + previous, workspace))
        resident += count * alive * kept
        if count > 1 or alive > 1:
            backward.append((resident + again, 2 * moving, workspace))
        previous = moving
    head = resident + tokens * shape.head.saved_bytes_per_token + LOSS_BYTES
    forward.append((head, min(window_bytes, previous), tokens * shape.head.forward_workspace_bytes))
    workspace, logits = tokens * shape.head.backward_workspace_bytes, 0
    if work.on_cuda:
        # Where the head's logits lay in the compute type no block of float32 fits.
        logits = workspace * shape.compute_bytes // (2 * FLOAT32_BYTES) * (shape.compute_bytes < FLOAT32_BYTES)
        # The first of backward: no gradient is there yet (Assembly.start_backward), and they are counted beside.
        workspace = max(0, workspace - transient_gradient_bytes(work))
    backward.append((head, previous, workspace))
    # Copies have the forward of the next block to leave in. Where they are later than that, or on their way out beside
    # what comes back, whoever would go beyond the plan waits for them (DeviceLedger).
    events = [*forward, *backward]
    activations, buffers, _ = max(events, key=lambda event: event[0] + event[1])
    fullest = max(map(sum, events))
    holes = max(0, sum(backward[-1]) + logits - fullest)
    if work.on_cuda:
        # Storages come back into other places than they left; and when the gradients of the micro-batch before are
        # gone, what the next one has allocated since lies around them.
        moved, gradients = 2 * work.largest_block.moved, transient_gradient_bytes(work)
        holes += max(moved * (blocks.moved > 0), gradients * (work.num_micro_batches > 1))
    return DevicePeak(activations, buffers, fullest - activations - buffers, holes)


def _intervals(work: Workload, blocks: Blocks) -> Iterator[tuple[Answer, BlockBytes, int]]:
    """Equal neighbours with equal answers, in forward order, and how many they are."""
    for answer, start, end in blocks.pieces:
        for run in work.runs:
            count = min(end, run.end) - max(start, run.start)
            if count > 0:
                yield answer, run.block, count


def held_input_bytes(work: Workload, blocks: Blocks, *, inputs_leave: bool) -> int:
    """Of one micro-batch, what the first recomputed block gets and stays on the device though the segment before it
    did not make it; and, where inputs leave, what comes without gradient: it belongs to the caller, and stays."""
    if not blocks.recomputed:
        return 0
    first = next(run.block for run in work.runs if run.end > blocks.moved)
    if not inputs_leave:
        return first.passed_input
    is_constant = not blocks.moved and not work.shape.embedding.num_accumulated
    return first.passed_small + (first.new_input - first.new_small) * is_constant


def frontier_bytes(work: Workload) -> int:
    """Weight-stationary: what one segment hands on to the next, of every micro-batch, and one more that is being made;
    in backward as much of gradients."""
    return (work.num_micro_batches + 1) * work.tokens * work.shape.widest_output_bytes


def spilled_boundary_bytes(work: Workload, blocks: Blocks, streaming: Streaming) -> int:
    """Weight-stationary, with boundaries that wait beside the device: the frontier, and what stays of it for backward.
    Tensors that are not worth moving stay on the device."""
    if streaming.boundaries is Answer.KEEP:
        return 0
    return waiting_frontier_bytes(work) + kept_boundary_bytes(work, blocks, streaming.boundaries)


def waiting_frontier_bytes(work: Workload) -> int:
    """The part of the frontier that is worth moving."""
    return (work.num_micro_batches + 1) * padded(max(work.handed_on_bytes))


def kept_boundary_bytes(work: Workload, blocks: Blocks, tier: Answer) -> int:
    """The inputs of every recomputed block, which wait on `tier` until backward needs them. What segments hand on
    unchanged is copied once for each of them, also for moved blocks."""
    copies = padded(work.sum_of("passed_large", 0, blocks.moved))
    return work.num_micro_batches * (recomputed_input_bytes(work, blocks, tier) + copies)


def recomputed_input_bytes(work: Workload, blocks: Blocks, tier: Answer) -> int:
    """Of one micro-batch, those that wait on `tier`."""
    field = "input_nvme" if tier is Answer.NVME else "input_host"
    return work.sum_of(field, blocks.moved, blocks.moved + blocks.recomputed)


# --- the tiers --------------------------------------------------------------------------------------------------------


def device_bytes(
    work: Workload, optimizer: OptimizerPlan, peak: DevicePeak, streaming: Streaming = RESIDENT
) -> TierBytes:
    """Everything of one rank on the device at its fullest moment, with all accumulators allocated."""
    on_device = 1.0 - optimizer.updated_by_cpu
    slack = accumulator_slack_bytes(work, optimizer, on_device)
    accumulated = work.shape.num_accumulated - cpu_accumulated(work, optimizer, streaming)
    return TierBytes(
        parameters=parameter_bytes(work, streaming) + gathered_parameter_bytes(work),
        gradients=accumulator_bytes(work, accumulated) + slack + transient_gradient_bytes(work),
        optimizer_states=states_bytes(work, optimizer, optimizer.resident_share, on_cpu=False),
        activations=peak.activations,
        buffers=slot_bytes(work, optimizer)
        + streamed_slot_bytes(work, streaming)
        + exchange_bytes(work) * (not work.on_cuda)
        + peak.buffers,
        workspace=peak.workspace,
        allocator=peak.holes + ALLOCATOR_BYTES * work.on_cuda,
    )


def host_bytes(
    work: Workload, optimizer: OptimizerPlan, blocks: Blocks, window_bytes: int, streaming: Streaming = RESIDENT
) -> TierBytes:
    """Everything of one rank in host memory, pinned or about to be; the process itself is not counted."""
    slack = accumulator_slack_bytes(work, optimizer, optimizer.updated_by_cpu)
    accumulators = accumulator_bytes(work, cpu_accumulated(work, optimizer, streaming)) + slack
    has_aliases = work.shape.num_accumulated > work.shape.num_trained
    on_cpu = states_bytes(work, optimizer, optimizer.cpu_share, on_cpu=True)
    streamed = states_bytes(work, optimizer, optimizer.streamed_share, on_cpu=False, streamed=True)
    in_host = streaming.boundaries is Answer.HOST
    return TierBytes(
        parameters=host_home_bytes(work, streaming),
        gradients=padded(accumulators + (PAGE_BYTES if has_aliases and accumulators else 0)),
        optimizer_states=padded(on_cpu + streamed),
        activations=work.alive(streaming) * work.sum_of("moved_host", blocks.nvme, blocks.moved)
        + (spilled_boundary_bytes(work, blocks, streaming) if in_host else 0),
        buffers=padded(exchange_bytes(work) * work.on_cuda)
        + staging_bytes(work, optimizer)
        + upload_bytes(work, optimizer, streaming)
        + speculation_bytes(work, optimizer)
        + state_window_bytes(work, optimizer)
        + home_staging_bytes(work, streaming)
        + (nvme_staging_bytes(work, window_bytes) if blocks.nvme or streaming.boundaries is Answer.NVME else 0),
    )


def nvme_staging_bytes(work: Workload, window_bytes: int) -> int:
    """Host buffers between device and NVMe: of what is on its way out, or of the segments on their way back, which wait
    for it."""
    return max(window_bytes, NUM_RELOADED_SEGMENTS * work.largest_block.moved_nvme)


def nvme_bytes(work: Workload, optimizer: OptimizerPlan, blocks: Blocks, streaming: Streaming = RESIDENT) -> TierBytes:
    """Everything of one rank on NVMe."""
    boundaries = spilled_boundary_bytes(work, blocks, streaming) if streaming.boundaries is Answer.NVME else 0
    return TierBytes(
        parameters=nvme_home_bytes(work, streaming),
        optimizer_states=nvme_states_bytes(work, optimizer, streaming),
        activations=work.alive(streaming) * work.sum_of("moved_nvme", 0, blocks.nvme) + boundaries,
    )


def tier_bytes(
    work: Workload, optimizer: OptimizerPlan, blocks: Blocks, window_bytes: int, streaming: Streaming = RESIDENT
) -> dict[Tier, TierBytes]:
    """All tiers of one rank."""
    return {
        Tier.DEVICE: device_bytes(work, optimizer, device_peak(work, blocks, window_bytes, streaming), streaming),
        Tier.HOST: host_bytes(work, optimizer, blocks, window_bytes, streaming),
        Tier.NVME: nvme_bytes(work, optimizer, blocks, streaming),
    }
