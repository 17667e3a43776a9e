"""Footprint: bytes of one rank in each tier, as the trainer holds them. Arithmetic only; every function is one row.

P = parameters of this rank's shard; b = bytes of the compute type; c, g, s = shares of the optimizer updated by the
CPU, streamed through the device, resident on it. Micro-batches run one after the other: activations of one are alive.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Literal

from spillway.model_shape import FLOAT32_BYTES, ModelShape, Segment
from spillway.plan import Answer, OptimizerPlan, Tier, TierBytes

Strategy = Literal["Ddp", "Fsdp", "Zero1", "Zero2", "Zero3"]
SHARDS: dict[Strategy, tuple[str, ...]] = {
    "Ddp": (),
    "Zero1": ("states",),
    "Zero2": ("states", "gradients"),
    "Zero3": ("states", "gradients", "parameters"),
    "Fsdp": ("states", "gradients", "parameters"),
}
"""what each strategy divides among the ranks"""
RUN_STRATEGY: Strategy = "Ddp"
"""what the trainer executes so far: a plan that will be run takes it for Auto"""

NUM_SLOTS = 2
"""device slots of streamed optimizer states: one comes in or is updated while the other goes back"""
NUM_STAGING_BUFFERS = 4
"""host buffers of one chunk for gradients on their way down, and as many for parameters on their way up"""
NUM_RELOADED_SEGMENTS = 2
"""spilled segments that are back on the device at once: the one in backward and the one before it"""
NUM_GATHERED_SEGMENTS = 2
"""segments whose sharded parameters are whole at once: the one in use and the next"""
EXCHANGE_PARAMETERS = 2**20
"""gradients that ranks exchange at once"""
PAGE_BYTES = 4096
"""pieces of host memory and NVMe extents are multiples of this"""
CACHE_LINE_BYTES = 64
"""storages that lie in one piece of host memory start on one"""
PADDING_PARAMETERS = CACHE_LINE_BYTES // FLOAT32_BYTES


def padded(nbytes: int, unit: int = PAGE_BYTES) -> int:
    """`nbytes` rounded up to whole units."""
    return -(-nbytes // unit) * unit


@dataclass(frozen=True)
class Workload:
    """What one rank does in a step, apart from where bytes live. Sums over one block are computed once."""

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

    @cached_property
    def tokens(self) -> int:
        """of one micro-batch"""
        return self.micro_batch_size * self.sequence_length

    @cached_property
    def rank_parameters(self) -> int:
        """Parameters that this rank's optimizer updates."""
        return ceil(self.shape.num_parameters / self.shards("states"))

    @cached_property
    def saved_bytes(self) -> int:
        """What one block saves for backward in one micro-batch."""
        return self.tokens * self.shape.block.saved_bytes_per_token

    @cached_property
    def moved_bytes(self) -> int:
        """The part of it that is worth moving."""
        return sum(self._moved_storages())

    @cached_property
    def moved_host_bytes(self) -> int:
        """The same in host memory: one piece of whole pages."""
        return padded(sum(padded(size, CACHE_LINE_BYTES) for size in self._moved_storages()))

    @cached_property
    def moved_nvme_bytes(self) -> int:
        """The same on NVMe, where every storage takes whole pages."""
        return sum(padded(size) for size in self._moved_storages())

    def _moved_storages(self) -> list[int]:
        sizes = [self.tokens * per_token for per_token in self.shape.block.saved_bytes]
        return [size for size in sizes if size >= self.minimum_bytes]

    def shards(self, part: str) -> int:
        """Ranks that share `part`: parameters, gradients, states."""
        return self.world_size if part in SHARDS[self.strategy] else 1


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
    def answers(self) -> tuple[Answer, ...]:
        """One a block, in forward order."""
        counts = (
            (Answer.NVME, self.nvme),
            (Answer.HOST, self.host),
            (Answer.RECOMPUTE, self.recomputed),
            (Answer.KEEP, self.kept),
        )
        return tuple(answer for answer, count in counts for _ in range(count))


# --- parameters, gradients, optimizer states --------------------------------------------------------------------------


def parameter_bytes(work: Workload) -> int:
    """b P, and the rotary tables."""
    shape = work.shape
    own = ceil(shape.num_parameters / work.shards("parameters")) * shape.compute_bytes
    return own + shape.rope_bytes(work.sequence_length)


def gathered_parameter_bytes(work: Workload) -> int:
    """Whole copies of the largest segments' parameters, when ranks hold only shards."""
    if work.shards("parameters") == 1:
        return 0
    return NUM_GATHERED_SEGMENTS * work.shape.compute_bytes * _largest_segment(work.shape).num_parameters


def transient_gradient_bytes(work: Workload) -> int:
    """b x the largest parameter: on its way from backward to its accumulator; a whole segment before it is sharded."""
    shape = work.shape
    sharded = work.shards("gradients") > 1
    return shape.compute_bytes * (_largest_segment(shape).num_parameters if sharded else shape.largest_parameter)


def accumulator_bytes(work: Workload, share: float) -> int:
    """float32, one per use: tied parameters have two."""
    uses = work.shape.num_parameters + work.shape.tied_parameters
    return ceil(FLOAT32_BYTES * share * uses / work.shards("gradients"))


def states_bytes_per_parameter(work: Workload, on_cpu: bool) -> int:
    """Two moments and the float32 master; with float32 compute the device's parameter is the master."""
    return 12 if on_cpu or work.shape.compute_bytes == 2 else 8


def chunk_slack(work: Workload, optimizer: OptimizerPlan, share: float) -> int:
    """Parameters that a path may hold beyond its share: chunks are whole, and each is padded to a cache line."""
    if share == 0.0 or not optimizer.offloads:
        return 0
    num_chunks = work.shape.num_tensors + work.rank_parameters // optimizer.chunk_parameters
    whole = min(optimizer.chunk_parameters, work.rank_parameters) if share < 1.0 else 0
    return whole + num_chunks * PADDING_PARAMETERS


def states_bytes(work: Workload, optimizer: OptimizerPlan, share: float, on_cpu: bool) -> int:
    """Optimizer states of one path."""
    parameters = share * work.rank_parameters + chunk_slack(work, optimizer, share)
    return ceil(states_bytes_per_parameter(work, on_cpu) * parameters)


def slot_bytes(work: Workload, optimizer: OptimizerPlan) -> int:
    """Device slots that streamed states pass through."""
    if optimizer.streamed_share == 0.0:
        return 0
    return NUM_SLOTS * states_bytes_per_parameter(work, on_cpu=False) * _chunk(work, optimizer)


def staging_bytes(work: Workload, optimizer: OptimizerPlan) -> int:
    """Host rings between the device and the CPU's update: gradients down, parameters up."""
    if optimizer.cpu_share == 0.0:
        return 0
    return 2 * NUM_STAGING_BUFFERS * padded(work.shape.compute_bytes * _chunk(work, optimizer))


def _chunk(work: Workload, optimizer: OptimizerPlan) -> int:
    """Chunks never span parameters."""
    return min(optimizer.chunk_parameters, work.shape.largest_parameter, work.rank_parameters)


def _largest_segment(shape: ModelShape) -> Segment:
    return max((shape.embedding, shape.block, shape.head), key=lambda segment: segment.num_parameters)


def exchange_bytes(work: Workload) -> int:
    """Device buffers of the sum of gradients over ranks: one bucket on its way out, one on its way in, this rank's own
    share of the sum. In float32; what travels as bfloat16 takes less."""
    if work.world_size == 1:
        return 0
    segment = ceil(min(EXCHANGE_PARAMETERS, work.shape.num_parameters + work.shape.tied_parameters) / work.world_size)
    return FLOAT32_BYTES * segment * (2 * work.world_size + 1)


# --- activations ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DevicePeak:
    """What activations need on the device in one micro-batch: the moment at which most is held, and the largest
    temporaries, which the trainer sets aside for the whole run."""

    activations: int
    buffers: int
    """copies in flight out of the device, and reloads"""
    workspace: int

    @property
    def total(self) -> int:
        return self.activations + self.buffers + self.workspace


def device_peak(work: Workload, blocks: Blocks, window_bytes: int) -> DevicePeak:
    """Peak over forward and backward of one micro-batch.

    An event sweep, not a sum: kept activations of late blocks are gone when spilled ones of early blocks come back.
    """
    shape, tokens, answers = work.shape, work.tokens, blocks.answers
    saved, moved = work.saved_bytes, work.moved_bytes
    resident_of = {
        Answer.KEEP: saved,
        Answer.RECOMPUTE: tokens * shape.block.output_bytes,
        Answer.HOST: saved - moved,
        Answer.NVME: saved - moved,
    }
    moves = [answer in (Answer.HOST, Answer.NVME) for answer in answers]
    block_forward, block_backward = shape.block.forward_workspace_bytes, shape.block.backward_workspace_bytes
    resident, in_flight = tokens * shape.embedding.saved_bytes_per_token, 0
    events: list[tuple[int, int, int]] = []
    for answer, is_moved in zip(answers, moves, strict=True):
        if answer is Answer.RECOMPUTE:
            lean = tokens * shape.block.lean_forward_bytes
            events.append((resident + resident_of[answer], in_flight, lean))
        else:
            events.append((resident + saved, in_flight, tokens * block_forward))
        resident += resident_of[answer]
        in_flight = min(window_bytes, in_flight + moved) if is_moved else in_flight
    head_saved = tokens * shape.head.saved_bytes_per_token
    events.append((resident + head_saved, in_flight, tokens * shape.head.forward_workspace_bytes))
    reload_last = moved if moves and moves[-1] else 0
    events.append((resident + head_saved, in_flight + reload_last, tokens * shape.head.backward_workspace_bytes))
    for index in reversed(range(len(answers))):
        # While a block is in backward, the one before it is on its way back, and late copies may still be on their way
        # out: until a moved block is needed nothing waits for them. (Afterwards they have ended; less is held by then.)
        reloads = moved * (moves[index] + (index > 0 and moves[index - 1]))
        if answers[index] is Answer.RECOMPUTE:
            workspace = tokens * max(block_forward, block_backward)
            events.append((resident + saved, in_flight + reloads, workspace))
        else:
            events.append((resident, in_flight + reloads, tokens * block_backward))
        resident -= resident_of[answers[index]]
    activations, buffers, _ = max(events, key=lambda event: event[0] + event[1])
    return DevicePeak(activations, buffers, max(workspace for _, _, workspace in events))


# --- the tiers --------------------------------------------------------------------------------------------------------


def device_bytes(work: Workload, optimizer: OptimizerPlan, peak: DevicePeak) -> TierBytes:
    """Everything of one rank on the device at its fullest moment, with all accumulators allocated."""
    on_device = 1.0 - optimizer.cpu_share
    slack = FLOAT32_BYTES * chunk_slack(work, optimizer, on_device)
    return TierBytes(
        parameters=parameter_bytes(work) + gathered_parameter_bytes(work),
        gradients=accumulator_bytes(work, on_device) + slack + transient_gradient_bytes(work),
        optimizer_states=states_bytes(work, optimizer, optimizer.resident_share, on_cpu=False),
        activations=peak.activations,
        buffers=slot_bytes(work, optimizer) + exchange_bytes(work) + peak.buffers,
        workspace=peak.workspace,
    )


def host_bytes(work: Workload, optimizer: OptimizerPlan, blocks: Blocks, window_bytes: int) -> TierBytes:
    """Everything of one rank in host memory, pinned or about to be; the process itself is not counted."""
    slack = FLOAT32_BYTES * chunk_slack(work, optimizer, optimizer.cpu_share)
    accumulators = accumulator_bytes(work, optimizer.cpu_share) + slack
    on_cpu = states_bytes(work, optimizer, optimizer.cpu_share, on_cpu=True)
    streamed = states_bytes(work, optimizer, optimizer.streamed_share, on_cpu=False)
    return TierBytes(
        gradients=padded(accumulators + (PAGE_BYTES if work.shape.tied_parameters and accumulators else 0)),
        optimizer_states=padded(on_cpu + streamed),
        activations=blocks.host * work.moved_host_bytes,
        buffers=staging_bytes(work, optimizer) + (nvme_staging_bytes(work, window_bytes) if blocks.nvme else 0),
    )


def nvme_staging_bytes(work: Workload, window_bytes: int) -> int:
    """Host buffers between device and NVMe: what is on its way out, and the segments on their way back."""
    return max(window_bytes, work.moved_nvme_bytes) + NUM_RELOADED_SEGMENTS * work.moved_nvme_bytes


def nvme_bytes(work: Workload, blocks: Blocks) -> TierBytes:
    """Everything of one rank on NVMe."""
    return TierBytes(activations=blocks.nvme * work.moved_nvme_bytes)


def tier_bytes(work: Workload, optimizer: OptimizerPlan, blocks: Blocks, window_bytes: int) -> dict[Tier, TierBytes]:
    """All tiers of one rank."""
    return {
        Tier.DEVICE: device_bytes(work, optimizer, device_peak(work, blocks, window_bytes)),
        Tier.HOST: host_bytes(work, optimizer, blocks, window_bytes),
        Tier.NVME: nvme_bytes(work, blocks),
    }
