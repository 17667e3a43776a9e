"""Workload: what one rank does in a step, in bytes by segment. Blocks: the policy of each block's activations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import ceil

from spillway.plan import DeviceKind, Order, Policy, Strategy
from spillway.planning.model_shape import FLOAT32_BYTES, ModelShape, ParameterShape, Segment
from spillway.update_rules import MomentType, UpdateRule

SHARDS: dict[Strategy, tuple[str, ...]] = {
    "Ddp": (),
    "Zero1": ("states", "gradients"),
    "Zero2": ("states", "gradients"),
    "Zero3": ("states", "gradients", "parameters"),
    "Fsdp": ("states", "gradients", "parameters"),
}
"""What each strategy shards among ranks. Gradients count as sharded with Zero1, too, because their owners add the
sums."""
ZERO_STRATEGIES: frozenset[Strategy] = frozenset({"Zero1", "Zero2", "Zero3"})
"""Strategies in which DeepSpeed shards the model on CPUs. On CUDA devices Spillway does, by rows."""
DIVIDING_STRATEGIES: frozenset[Strategy] = frozenset({"Fsdp", *ZERO_STRATEGIES})
"""Strategies whose optimizer gets float32 sums over ranks after each micro-batch."""
STREAMING_STRATEGIES: frozenset[Strategy] = frozenset({"Ddp"})
"""Strategies that support model_spill: every rank has whole segments at home."""
LEAN_STRATEGIES: frozenset[Strategy] = frozenset({"Ddp"})
"""Strategies with selective recomputation: every rank has whole parameters from forward to backward."""
LARGE_STORAGE_BYTES = 2 * 2**20
"""One huge page. Larger storages do not fit in caches, and have page faults every time."""
CACHE_LINE_BYTES = 64
"""Each storage within one piece of host memory begins on a cache line."""
LOSS_BYTES = CACHE_LINE_BYTES
"""Bytes of the scalar that the loss saves: the sum of its labels' weights."""
PAGE_BYTES = 4096
"""Pieces of host memory and NVMe extents are multiples of this."""
Sizes = tuple[int, ...]

NUM_SLOTS = 2
"""Device slots of streamed optimizer states, and of streamed parameters: one is filled while the other is used."""
NUM_STAGING_BUFFERS = 4
"""Host buffers, each for the gradients of one chunk that are copied to the host, and as many for updated parameters
that are copied to the device or to NVMe."""
NUM_STATE_BUFFERS = 4
"""Host buffers, each for one chunk's states on NVMe: one is read, one updated, one written, and one more, so that a
small chunk between large ones leaves no lane idle."""
PIECE_BYTES = 4 * 2**20
"""Bytes of the aligned memory through which storages are spilled from a CPU device."""
NUM_RELOADED_SEGMENTS = 2
"""Spilled segments on the device at once: the one in backward and the one before it."""
NUM_GATHERED_SEGMENTS = 2
"""Segments whose sharded parameters are gathered at once: the one in use and the next."""
PARAMETER_UNIT_BYTES = 512
"""Streamed parameters are aligned to this, like allocations of torch's CUDA allocator: cuBLAS chooses kernels by
alignment."""
EXCHANGE_PARAMETERS = 2**20
"""Number of gradients that ranks on CPUs exchange at once."""
DEVICE_EXCHANGE_PARAMETERS = 2**24
"""The same between devices, where each exchange is launched as kernels."""
ALLOCATOR_BYTES = 192 * 2**20
"""Bytes that torch's CUDA allocator takes with any plan: two workspaces of 32 MiB that it lends to cuBLAS (one for each
thread that launches products; torch before 2.15 keeps them), and pages of 20 MiB, for each stream and for small and
large blocks, that are partly filled. Measured with kernels that do nothing, 60 plans (benchmarks/gpu_plans.py)."""


def sharding_problem(
    strategy: Strategy, device: DeviceKind, world_size: int, parameters: Mapping[str, Sequence[ParameterShape]]
) -> str:
    """Why `strategy` cannot shard the parameters of these segments, with what to do instead; "": it can."""
    every = [one for segment in parameters.values() for one in segment]
    if is_cut_by_rows(strategy, device):
        return next(_not_by_rows(parameters, every, world_size), "")
    return next(_not_for_zero(every), "") if strategy in ZERO_STRATEGIES else ""


def is_cut_by_rows(strategy: Strategy, device: DeviceKind) -> bool:
    """Whether `strategy` shards every parameter, or its states, by the parameter's own rows."""
    return strategy == "Fsdp" or (strategy in ZERO_STRATEGIES and device == "Cuda")


def _not_for_zero(every: Sequence[ParameterShape]) -> Iterator[str]:
    if not all(one.is_trained for one in every):
        yield (
            "this strategy must train every parameter, but some are frozen (spec.model.lora also freezes parameters); "
            "use Ddp or Fsdp, or train every parameter"
        )
    if len({one.value_bytes for one in every}) > 1:
        yield "the model has parameters of several types, but DeepSpeed shards only one; use Ddp or Fsdp"


def _not_by_rows(
    parameters: Mapping[str, Sequence[ParameterShape]], every: Sequence[ParameterShape], world_size: int
) -> Iterator[str]:
    for name, segment in parameters.items():
        if not all(one.num_rows for one in segment):
            yield (
                f"segment {name} (group of layers) has a scalar or empty parameter, without rows to shard; give a "
                "scalar shape (1,)"
            )
        if len({one.value_bytes for one in segment if one.is_trained}) > 1:
            yield (
                f"segment {name} (group of layers) trains parameters of several types, but only one type per segment "
                "can be sharded; use Ddp, or one type"
            )
    rows = [one.num_rows for one in every if one.is_trained and one.row_values]
    with_rows = max((ceil(count / ceil(count / world_size)) for count in rows), default=0)
    if with_rows < world_size:
        yield (
            f"{world_size - with_rows} of {world_size} ranks would have no row of any trained parameter, and "
            "parameters are sharded by rows; use fewer ranks, or Ddp"
        )


def _without(sizes: list[int], taken: list[int]) -> list[int]:
    """`sizes` without those of `taken`, each removed once, in the same order."""
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
    """Bytes of one piece of host memory with storages of these sizes."""
    return padded(sum(padded(size, CACHE_LINE_BYTES) for size in sizes))


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """Bytes of one kind of block, for one micro-batch."""

    saved: int
    """Saved for backward."""
    rebuilt: int
    """The part of `saved` that backward rebuilds instead of holding it; 0 if the plan does not rebuild."""
    rebuilding: int
    """Bytes that backward reads and writes to rebuild it."""
    moved: int
    """The part of `held` that is worth moving."""
    moved_host: int
    """The same in host memory: one piece of whole pages."""
    moved_nvme: int
    """The same on NVMe, where every storage takes whole pages."""
    output: int
    new_input: int
    """Inputs made by the previous segment; `new_small` is the part that is not worth moving, and stays on the
    device."""
    new_small: int
    passed_input: int
    """Inputs made by an earlier segment; `passed_small` is the part that stays on the device."""
    passed_small: int
    input_host: int
    """All inputs that are worth moving, in host memory: one piece of whole pages."""
    input_nvme: int
    """The same on NVMe."""
    forward: int
    """Workspace of forward, of backward, and (lean) of a forward that saves nothing."""
    backward: int
    lean: int
    flops: float
    """FLOPs of one forward."""

    @property
    def held(self) -> int:
        return self.saved - self.rebuilt

    @property
    def passed_large(self) -> int:
        return self.passed_input - self.passed_small

    @property
    def input_large(self) -> int:
        """All inputs that are worth moving."""
        return self.new_input - self.new_small + self.passed_large


NO_BLOCK = BlockBytes(*(0,) * 16, flops=0.0)


@dataclass(frozen=True, slots=True)
class BlockRun:
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
    """Smaller storages stay on the device."""
    wire_bytes: int = FLOAT32_BYTES
    """Bytes of a gradient sent to other ranks: precision.gradientReduce."""
    rule: UpdateRule = UpdateRule.ADAMW
    moments: MomentType = MomentType.FLOAT32
    in_place: bool = False
    """Whether the device's memory is host memory: the CPU's updates then write parameters directly, and nothing is
    copied."""
    is_float16: bool = False
    """Whether weights are float16, which (unlike bfloat16) is not the upper half of a master."""
    lean: bool = False
    """Whether backward rebuilds what the shapes of blocks allow, in blocks that are not recomputed."""
    on_cuda: bool = False
    """Whether device memory comes from torch's CUDA allocator."""

    @property
    def splits_masters(self) -> bool:
        """Whether of the master of a parameter in share g only those bits cross the link that its bfloat16 weight
        lacks."""
        return self.shape.trained_bytes == 2 and not self.is_float16 and not self.in_place and not self.is_divided

    @cached_property
    def tokens(self) -> int:
        """Tokens of one micro-batch."""
        return self.micro_batch_size * self.sequence_length

    @cached_property
    def rank_parameters(self) -> int:
        """Parameters that this rank's optimizer updates."""
        if self.is_cut_by_rows:
            return sum(self.most_rows(one) for one in self._parameters if one.is_trained and not one.is_alias)
        return ceil(self.shape.num_trained / self.shards("states"))

    @property
    def is_divided(self) -> bool:
        """Whether the optimizer gets float32 sums over ranks, of this rank's shard."""
        return self.strategy in DIVIDING_STRATEGIES and self.world_size > 1

    @property
    def is_cut_by_rows(self) -> bool:
        """Whether every parameter is sharded by its own rows, so that the first rank has more if rows do not divide
        evenly."""
        return is_cut_by_rows(self.strategy, "Cuda" if self.on_cuda else "Cpu") and self.world_size > 1

    @property
    def exchanges_on_device(self) -> bool:
        """Whether ranks exchange gradients and parameters between CUDA devices, by NCCL."""
        return self.on_cuda and self.world_size > 1

    @property
    def _parameters(self) -> Iterator[ParameterShape]:
        """With Fsdp, a tied alias has memory and gradients of its own."""
        every = (one for segment in self.shape.segments for one in segment.parameters)
        return (one for one in every if self.strategy == "Fsdp" or not one.is_alias)

    def most_rows(self, one: ParameterShape) -> int:
        """Number of values of `one` in the rows of the first rank, which has the most."""
        return ceil(one.num_rows / self.world_size) * one.row_values

    @cached_property
    def rank_accumulated(self) -> int:
        """Number of this rank's values with an accumulator, if parameters are sharded by rows."""
        return sum(self.most_rows(one) for one in self._parameters if one.is_trained)

    @cached_property
    def rank_parameter_bytes(self) -> int:
        """Bytes of this rank's parameters, if sharded by rows."""
        return sum(self.most_rows(one) * one.value_bytes for one in self._parameters)

    @cached_property
    def largest_gathered_bytes(self) -> int:
        """Bytes of the whole parameters of the largest segment, if ranks hold shards; rows that pad the shards are
        sent, too."""
        if not self.is_cut_by_rows:
            return self.shape.largest_segment_bytes
        sizes = (sum(self.most_rows(one) * one.value_bytes for one in s.parameters) for s in self.shape.segments)
        return self.world_size * max(sizes)

    @cached_property
    def exchanged_bytes(self) -> int:
        """The most bytes of gradients and of this rank's float32 sums of them, if a segment, sharded by rows, is
        exchanged behind the backward of the one before it. Of the sums that it was given last, the optimizer still
        reads at most the largest piece. Except with Fsdp, autograd holds a tied alias's gradient until its owner's is
        there, too."""
        segments = self.shape.segments
        every = (one for segment in segments for one in segment.parameters)
        aliases = [one for one in every if one.is_alias and one.is_trained and self.strategy != "Fsdp"]
        held = self.shape.trained_bytes * sum(one.num_rows * one.row_values for one in aliases)
        whole = [self.shape.trained_bytes * one.num_accumulated for one in segments] + [0, 0]
        own = [
            sum(self.most_rows(one) for one in each.parameters if one.is_trained and one not in aliases)
            for each in segments
        ] + [0, 0]
        sums = [FLOAT32_BYTES * values for values in own]
        read = [min(each, FLOAT32_BYTES * self.largest_piece) for each in sums]
        return held + max(
            whole[n] + max(whole[n + 1] + sums[n + 1] + read[n + 2], sums[n] + read[n + 1])
            for n in range(len(segments))
        )

    @cached_property
    def largest_piece(self) -> int:
        """The most values of one parameter that one rank updates."""
        if self.is_cut_by_rows:
            return max(self.most_rows(one) for one in self._parameters if one.is_trained)
        return ceil(self.shape.largest_parameter / self.shards("parameters"))

    def shards(self, part: str) -> int:
        """Number of ranks that share `part`: parameters, gradients or states."""
        return self.world_size if part in SHARDS[self.strategy] else 1

    @cached_property
    def runs(self) -> tuple[BlockRun, ...]:
        """The blocks, with equal neighbours combined."""
        kinds: dict[tuple[Segment, Sizes, Sizes], BlockBytes] = {}
        found: list[BlockRun] = []
        for index, (before, block) in enumerate(pairwise(self.shape.segments[:-1])):
            kind = (block, before.made_bytes, before.passed_bytes)
            if kind not in kinds:
                kinds[kind] = self._block_bytes(*kind)
            if found and found[-1].block is kinds[kind]:
                found[-1] = BlockRun(found[-1].start, index + 1, kinds[kind])
            else:
                found.append(BlockRun(index, index + 1, kinds[kind]))
        return tuple(found)

    def _block_bytes(self, block: Segment, made: Sizes, passed: Sizes) -> BlockBytes:
        """Bytes of `block`, whose inputs have these sizes per token: `made` by the segment before it, or `passed` on by
        it."""
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
        """Sizes of the storages that backward rebuilds; small ones are held instead."""
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
        """Bytes of one micro-batch that each segment hands on and that are worth moving."""
        found = (self._sizes((*one.made_bytes, *one.passed_bytes)) for one in self.shape.segments)
        return tuple(sum(size for size in sizes if size >= self.minimum_bytes) for sizes in found)

    @cached_property
    def forward_flops(self) -> float:
        """FLOPs of the forward of one micro-batch."""
        return self.tokens * self.shape.forward_flops_per_token(self.sequence_length)

    @cached_property
    def forward_order(self) -> tuple[tuple[float, float], ...]:
        """For each segment with trained parameters: the share of all trained parameters up to and including it, and the
        share of forward's FLOPs before it."""
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
        """The most values with accumulators in one segment."""
        return max(segment.num_accumulated for segment in self.shape.segments)

    @cached_property
    def saved_bytes(self) -> int:
        """Bytes that one micro-batch saves for backward if everything is kept."""
        return self.tokens * self.shape.saved_bytes_per_token()

    @cached_property
    def large_saved_bytes(self) -> int:
        """The part of `saved_bytes` in storages of at least LARGE_STORAGE_BYTES."""
        sizes = (self.tokens * each for segment in self.shape.segments for each in segment.saved_bytes)
        return sum(size for size in sizes if size >= LARGE_STORAGE_BYTES)

    @cached_property
    def backward_flops(self) -> float:
        return self.tokens * self.shape.backward_flops_per_token(self.sequence_length)

    @cached_property
    def units(self) -> Units:
        return _units(self)

    def alive(self, streaming: Streaming) -> int:
        """Number of micro-batches whose activations are held at once."""
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
        """The sum of BlockBytes.`field` over blocks [start, end)."""
        return int(self.sums[field][end] - self.sums[field][start])

    @cached_property
    def largest_block(self) -> BlockBytes:
        """The block that moves most."""
        return max((run.block for run in self.runs), key=lambda block: block.moved, default=NO_BLOCK)


@dataclass(frozen=True, slots=True)
class Blocks:
    """How many blocks have each policy. Order in the model: NVMe first (longest until backward needs it), then host,
    then recompute; the last blocks are kept, because backward starts there."""

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
    def pieces(self) -> tuple[tuple[Policy, int, int], ...]:
        """(answer, first block, end) in forward order, empty ones left out."""
        counts = (
            (Policy.NVME, self.nvme),
            (Policy.HOST, self.host),
            (Policy.RECOMPUTE, self.recomputed),
            (Policy.KEEP, self.kept),
        )
        ends = accumulate(count for _, count in counts)
        return tuple((answer, end - count, end) for (answer, count), end in zip(counts, ends, strict=True) if count)

    @property
    def answers(self) -> tuple[Policy, ...]:
        """The policy of each block, in forward order."""
        return tuple(answer for answer, start, end in self.pieces for _ in range(start, end))


@dataclass(frozen=True, slots=True)
class Streaming:
    """How many units of the eviction order (below) are not resident, and how they pass through the device. The units
    that are evicted first, because they are worth least on the device, have homes on NVMe, the others in host
    memory."""

    host: int = 0
    nvme: int = 0
    num_slots: int = NUM_SLOTS
    order: Order = "InOrder"
    boundaries: Policy = Policy.KEEP

    @property
    def units(self) -> int:
        return self.host + self.nvme


RESIDENT = Streaming()
"""All parameters are on the device."""


@dataclass(frozen=True, slots=True)
class Units:
    """Prefix sums over the eviction order: entry n is for the n units that are evicted first."""

    segments: list[tuple[int, ...]]
    """Segments of each unit: one, or all that share parameters and therefore a home."""
    count: list[int]
    """Number of segments."""
    own: list[int]
    """Bytes of parameters that leave the device."""
    trained: list[int]
    accumulated: list[int]
    host: list[int]
    """Bytes of homes in host memory."""
    nvme: list[int]
    """The most bytes of homes on NVMe: every chunk of every parameter takes whole pages."""
    loaded: list[int]
    """Bytes of loading each unit once, including aliases."""
    returning: list[int]
    """The part of `loaded` that backward needs again; not an embedding, whose gradient needs only the indices."""
    largest: list[int]
    """Bytes of the largest slot."""
    largest_nvme: list[int]
    """Bytes of the largest segment as read from NVMe."""


def eviction_order(shape: ModelShape) -> list[tuple[int, ...]]:
    """Units of segments in the order in which they are evicted: those first for which a resident byte saves least, as
    in a knapsack by saved seconds per byte.

    A byte that is not resident is loaded in every pass, so all are worth the same, with three exceptions: tied
    parameters are loaded once for each use; embedding and head set the size of the slots, and no computation hides
    their loads; late blocks are needed by backward before anything else. Segments without parameters are not listed.
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
    """Bytes of one segment's home in host memory, or of its own parameters in a slot, each padded to
    PARAMETER_UNIT_BYTES."""
    return padded(segment.parameter_bytes + PARAMETER_UNIT_BYTES * segment.num_tensors) if segment.num_parameters else 0


def chunk_parameters(work: Workload) -> int:
    """Parameters per chunk: a power of two near 1/64 of the parameters, between 64 Ki and 4 Mi (16 MiB of float32). On
    a separate device up to 32 Mi, because the host needs as long for an operation there as the link for several MiB.
    Chunks above 4 Mi are at most 1/64, because a plan counts one chunk more than a path's share."""
    near = 1 << (work.rank_parameters // 64).bit_length()
    most = 1 << 22 if work.in_place else min(max(near >> 1, 1 << 22), 1 << 25)
    return min(max(near, 1 << 16), most)
