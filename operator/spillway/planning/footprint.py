"""Footprint: bytes of one rank in each tier, as the trainer holds them. Arithmetic only; each function is one row.

P = trained parameters of this rank's shard; b = bytes of the compute type, w = bytes of a trained parameter; c, g, s,
n = shares of the optimizer that are updated by the CPU, streamed through the device, resident on it, on NVMe. In order,
micro-batches run one after the other, and the activations of one are alive; in weight-stationary order, those of all M
are alive between forward and backward. docs/planning.md states the rows as formulas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from spillway.plan import NCCL_BYTES, OptimizerPlan, ParameterPlan, Policy, Tier, TierBytes
from spillway.planning.model_shape import FLOAT32_BYTES
from spillway.planning.workload import (
    ALLOCATOR_BYTES,
    CACHE_LINE_BYTES,
    DEVICE_EXCHANGE_PARAMETERS,
    EXCHANGE_PARAMETERS,
    LOSS_BYTES,
    NUM_GATHERED_SEGMENTS,
    NUM_RELOADED_SEGMENTS,
    NUM_SLOTS,
    NUM_STAGING_BUFFERS,
    NUM_STATE_BUFFERS,
    PAGE_BYTES,
    PIECE_BYTES,
    RESIDENT,
    ZERO_STRATEGIES,
    BlockBytes,
    Blocks,
    Streaming,
    Workload,
    padded,
)
from spillway.update_rules import REST_BITS, STATE_BYTES

# --- streamed parameters ----------------------------------------------------------------------------------------------


def homes(work: Workload, streaming: Streaming) -> tuple[Tier, ...]:
    """The home of each segment, in forward order; empty if all are resident."""
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
    """Bytes of the device slots, each as large as the largest streamed segment."""
    return streaming.num_slots * work.units.largest[streaming.units]


def host_home_bytes(work: Workload, streaming: Streaming) -> int:
    sums = work.units.host
    return sums[streaming.units] - sums[streaming.nvme]


def nvme_home_bytes(work: Workload, streaming: Streaming) -> int:
    return work.units.nvme[streaming.nvme]


def home_staging_bytes(work: Workload, streaming: Streaming) -> int:
    """Bytes of the host buffers through which segments on NVMe pass: one is read while the other is copied to the
    device."""
    return NUM_SLOTS * padded(work.units.largest_nvme[streaming.nvme])


def forced_share(work: Workload, streaming: Streaming) -> float:
    """x: share of the trained parameters that the CPU updates because their home is in host memory or on NVMe."""
    return work.units.trained[streaming.units] / work.rank_parameters if streaming.units else 0.0


# --- parameters, gradients, optimizer states --------------------------------------------------------------------------


def parameter_bytes(work: Workload, streaming: Streaming = RESIDENT) -> int:
    """Bytes of resident parameters and position tables on the device."""
    shape = work.shape
    if work.is_cut_by_rows:
        whole = work.world_size // work.shards("parameters") * work.rank_parameter_bytes
    else:
        whole = ceil(shape.parameter_bytes / work.shards("parameters"))
    return whole - work.units.own[streaming.units] + shape.table_bytes(work.sequence_length)


def gathered_parameter_bytes(work: Workload) -> int:
    """Bytes of whole copies of the largest segments' parameters, if ranks hold only shards; else 0."""
    if work.shards("parameters") == 1:
        return 0
    return NUM_GATHERED_SEGMENTS * work.largest_gathered_bytes


def transient_gradient_bytes(work: Workload) -> int:
    """Bytes of gradients between backward and their accumulators: w x the largest parameter. Under ZeRO also one more
    bucket, which is sent to its owners, and the float32 sum of one piece. If sharded by rows, instead a whole segment,
    and the float32 sums of two pieces: the current one, and the previous one, which the optimizer still reads. On CUDA
    devices two segments: one is exchanged behind the backward of the other (Workload.exchanged_bytes)."""
    shape, w = work.shape, work.shape.trained_bytes
    if work.is_cut_by_rows and work.on_cuda:
        return work.exchanged_bytes
    if work.is_cut_by_rows:
        return w * work.largest_segment + 2 * FLOAT32_BYTES * work.largest_piece
    if work.strategy in ZERO_STRATEGIES and work.world_size > 1:
        bucket = EXCHANGE_PARAMETERS // work.world_size
        return w * (shape.largest_parameter + bucket) + FLOAT32_BYTES * work.largest_piece
    return w * shape.largest_parameter


def cpu_accumulated(work: Workload, optimizer: OptimizerPlan, streaming: Streaming = RESIDENT) -> float:
    """Number of values whose accumulator is in host memory: all values of streamed segments, and the CPU's share of the
    others."""
    forced, total = work.units.accumulated[streaming.units], work.shape.num_accumulated
    x = forced_share(work, streaming)
    rest = max(0.0, optimizer.updated_by_cpu - x) / (1.0 - x) if x < 1.0 else 0.0
    return forced + rest * (total - forced)


def accumulator_bytes(work: Workload, values: float) -> int:
    """Bytes of the float32 accumulators of `values`, one per use: tied parameters have two."""
    if work.is_cut_by_rows:
        return ceil(FLOAT32_BYTES * values * work.rank_accumulated / work.shape.num_accumulated)
    return ceil(FLOAT32_BYTES * values / work.shards("gradients"))


def states_bytes_per_parameter(work: Workload, on_cpu: bool) -> float:
    """Bytes of a parameter's moments and float32 master; a float32 parameter on the device is its own master. This is
    an average over many parameters: `_short_blocks_bytes` counts the scales of short blocks."""
    return work.rule.states_bytes(has_master(work, on_cpu), work.moments)


def streamed_bytes_per_parameter(work: Workload) -> float:
    """Bytes of a parameter's states that pass through the device: of a split master only its lower half and one bit."""
    whole = states_bytes_per_parameter(work, on_cpu=False)
    return whole - STATE_BYTES + REST_BITS / 8 if work.splits_masters else whole


def has_master(work: Workload, on_cpu: bool) -> bool:
    return on_cpu or work.shape.trained_bytes == 2


def state_row_bytes(work: Workload, size: int, on_cpu: bool) -> list[int]:
    """Bytes of each state of a chunk of `size` parameters; the trainer keeps each state in a row of its own."""
    moments = [work.moments.bytes_of(size) for _ in work.rule.moments]
    return [STATE_BYTES * size, *moments] if has_master(work, on_cpu) else moments


def streamed_row_bytes(work: Workload, size: int) -> list[int]:
    """The same for a chunk that is streamed."""
    rows = state_row_bytes(work, size, on_cpu=False)
    return [ceil(REST_BITS * size / 8), *rows[1:]] if work.splits_masters else rows


def accumulator_slack_bytes(work: Workload, optimizer: OptimizerPlan, share: float) -> int:
    """Bytes that the accumulators of a path may take beyond its share, because chunks are whole and each begins on a
    cache line."""
    if share == 0.0 or not optimizer.offloads:
        return 0
    return FLOAT32_BYTES * _whole_chunk(work, optimizer, share) + CACHE_LINE_BYTES * _num_chunks(work, optimizer)


def _num_chunks(work: Workload, optimizer: OptimizerPlan) -> int:
    return work.shape.num_tensors + work.rank_parameters // optimizer.chunk_parameters


def _whole_chunk(work: Workload, optimizer: OptimizerPlan, share: float) -> int:
    return min(optimizer.chunk_parameters, work.rank_parameters) if share < 1.0 else 0


def _short_blocks_bytes(work: Workload, num_chunks: int) -> int:
    """Bytes of the scales of partly filled blocks: one per moment and chunk (or per parameter that is a single
    chunk)."""
    return work.moments.scale_bytes * len(work.rule.moments) * num_chunks


def states_bytes(
    work: Workload, optimizer: OptimizerPlan, share: float, on_cpu: bool, *, streamed: bool = False
) -> int:
    """Bytes of the optimizer states of one path, in whole chunks; each state of a chunk begins on a cache line."""
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
    """Bytes of the device slots through which streamed states pass."""
    if optimizer.streamed_share == 0.0:
        return 0
    rows = streamed_row_bytes(work, _chunk(work, optimizer))
    return NUM_SLOTS * sum(padded(row, CACHE_LINE_BYTES) for row in rows)


def staging_bytes(work: Workload, optimizer: OptimizerPlan) -> int:
    """Bytes of the ring in host memory through which gradients are copied to the CPU's accumulators; 0 if the device's
    memory is host memory."""
    if optimizer.updated_by_cpu == 0.0 or work.in_place:
        return 0
    gradient = FLOAT32_BYTES if work.is_divided else work.shape.trained_bytes
    return NUM_STAGING_BUFFERS * padded(gradient * _chunk(work, optimizer))


def upload_bytes(work: Workload, optimizer: OptimizerPlan, streaming: Streaming = RESIDENT) -> int:
    """Bytes of the ring in host memory for updated values that the CPU cannot write in place, because the parameters
    are on a separate device or on NVMe."""
    if optimizer.updated_by_cpu == 0.0 or (work.in_place and not streaming.nvme):
        return 0
    return NUM_STAGING_BUFFERS * padded(work.shape.trained_bytes * _chunk(work, optimizer))


def speculation_bytes(work: Workload, optimizer: OptimizerPlan) -> int:
    """Bytes of the second states of parameters that backward updates, and of the values made from them; every row of a
    chunk begins on a cache line."""
    window = optimizer.speculative_parameters
    if not window:
        return 0
    num_chunks = work.shape.num_tensors + window // optimizer.chunk_parameters + 1
    states = states_bytes_per_parameter(work, on_cpu=True) * window + 3 * CACHE_LINE_BYTES * num_chunks
    states += _short_blocks_bytes(work, num_chunks)
    return padded(ceil(states)) + padded(work.shape.trained_bytes * window + CACHE_LINE_BYTES * num_chunks)


def state_window_bytes(work: Workload, optimizer: OptimizerPlan) -> int:
    """Bytes of the host buffers through which states on NVMe pass; each state of a chunk takes whole pages."""
    if optimizer.nvme_share == 0.0:
        return 0
    return NUM_STATE_BUFFERS * sum(padded(row) for row in state_row_bytes(work, _chunk(work, optimizer), on_cpu=True))


def nvme_states_bytes(work: Workload, optimizer: OptimizerPlan, streaming: Streaming = RESIDENT) -> int:
    """Bytes of states in the spill file; each state of a chunk takes whole pages. The states of streamed parameters are
    split separately from the others, so each of the two groups may exceed its share by a chunk."""
    share = optimizer.nvme_share
    if share == 0.0:
        return 0
    num_chunks = _num_chunks(work, optimizer)
    pages = len(work.rule.state_kinds) * PAGE_BYTES * num_chunks + padded(_short_blocks_bytes(work, num_chunks))
    groups = 2 if 0.0 < forced_share(work, streaming) < 1.0 else 1
    parameters = min(work.rank_parameters, share * work.rank_parameters + groups * _whole_chunk(work, optimizer, share))
    return padded(ceil(states_bytes_per_parameter(work, on_cpu=True) * parameters)) + pages


def _chunk(work: Workload, optimizer: OptimizerPlan) -> int:
    """Parameters of the largest chunk; chunks never span parameters."""
    return min(optimizer.chunk_parameters, work.shape.largest_parameter, work.rank_parameters)


def exchange_bytes(work: Workload) -> int:
    """Bytes of the buffers for the sum of gradients over ranks: one bucket being sent, one being received, the sums and
    this rank's share of them. The sums overwrite what was sent, except on devices with a 16-bit wire type. If gradients
    are sharded, two buckets are exchanged at once."""
    if work.world_size == 1:
        return 0
    most = DEVICE_EXCHANGE_PARAMETERS if work.exchanges_on_device else EXCHANGE_PARAMETERS
    num_values = work.largest_segment if work.is_cut_by_rows else work.shape.num_accumulated
    segment = ceil(min(most, num_values) / work.world_size)
    if work.is_divided:
        return segment * (work.wire_bytes * 4 * work.world_size + FLOAT32_BYTES)
    num_buffers = 1 + (work.exchanges_on_device and work.wire_bytes < FLOAT32_BYTES)
    return segment * (work.wire_bytes * work.world_size * num_buffers + FLOAT32_BYTES * (work.world_size + 1))


# --- activations ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DevicePeak:
    """Device bytes for activations: the most that is held for backward, and the temporaries beyond that at the peak,
    which the trainer reserves for the whole run."""

    activations: int
    buffers: int
    """Activations that are being copied out of the device or reloaded."""
    workspace: int
    holes: int = 0
    """What the allocator takes in addition at the peak, between blocks in use."""

    @property
    def total(self) -> int:
        return self.activations + self.buffers + self.workspace + self.holes


def device_peak(work: Workload, blocks: Blocks, window_bytes: int, streaming: Streaming = RESIDENT) -> DevicePeak:
    """Peak device bytes over forward and backward."""
    return device_peaks(work, blocks, (window_bytes,), streaming)[0]


def device_peaks(
    work: Workload, blocks: Blocks, windows_bytes: Sequence[int], streaming: Streaming = RESIDENT
) -> list[DevicePeak]:
    """Peak device bytes over forward and backward, for each window.

    This goes through the events of a pass instead of adding maxima, because kept activations of late blocks are gone
    when spilled ones of early blocks come back. Within a run of equal blocks with equal policies the bytes only rise or
    only fall, so it is enough to look at the ends of the run.
    """
    shape, tokens = work.shape, work.tokens
    stationary = streaming.order == "WeightStationary"
    alive = work.alive(streaming)
    resident = alive * tokens * shape.embedding.saved_bytes_per_token
    resident += frontier_bytes(work) if stationary else 0
    inputs_leave = streaming.boundaries is not Policy.KEEP
    resident += alive * held_input_bytes(work, blocks, inputs_leave=inputs_leave)
    previous = 0
    forward: list[tuple[int, int, int]] = []
    backward: list[tuple[int, int, int]] = []
    """(activations, copies in flight or returning, workspace) of each block."""
    for answer, block, count in _intervals(work, blocks):
        recomputes, moves = answer is Policy.RECOMPUTE, answer in (Policy.HOST, Policy.NVME)
        if recomputes:
            kept = block.new_small if inputs_leave else block.new_input
            moving = block.input_large * inputs_leave
            now, workspace = kept + block.output, block.lean
        else:
            copies = block.passed_large * inputs_leave
            kept, moving = (block.held - block.moved, block.moved + copies) if moves else (block.held + copies, 0)
            now, workspace = block.saved + copies, block.forward
        others = (count - 1) * alive + alive - 1
        in_flight = moving if others else previous
        forward.append((resident + others * kept + now, in_flight, workspace))
        # Storages are rebuilt one by one; all of them at once is the most that they can take.
        again, workspace = block.rebuilt, block.backward
        if recomputes:
            again, workspace = block.saved, max(block.forward, block.backward)
        # While a block is in backward, the activations of the block before it are being reloaded.
        backward.append((resident + alive * kept + again, moving + previous, workspace))
        resident += count * alive * kept
        if count > 1 or alive > 1:
            backward.append((resident + again, 2 * moving, workspace))
        previous = moving
    head = resident + tokens * shape.head.saved_bytes_per_token + LOSS_BYTES
    forward.append((head, previous, tokens * shape.head.forward_workspace_bytes))
    workspace, logits = tokens * shape.head.backward_workspace_bytes, 0
    if work.on_cuda:
        # The space that the head's logits in the compute type leave is too small for a block of float32 values.
        logits = workspace * shape.compute_bytes // (2 * FLOAT32_BYTES) * (shape.compute_bytes < FLOAT32_BYTES)
        # This is the beginning of backward: gradients of parameters do not exist yet (Assembly.start_backward) but are
        # counted elsewhere, so they are subtracted. When they exist, the gradient of the projection's input does, too.
        hidden = work.tokens * shape.compute_bytes * shape.hidden_size
        workspace = max(hidden, workspace - transient_gradient_bytes(work))
    backward.append((head, previous, workspace))
    # Copies out are planned to end during the forward of the next block. If they are slower, or still leaving while
    # others come back, whatever would exceed the plan waits for them (DeviceLedger).
    around = 0
    if work.on_cuda:
        # Storages come back to other places than those that they left; and when the gradients of the previous
        # micro-batch are freed, their space is enclosed by what the next micro-batch has allocated since.
        moved, gradients = 2 * work.largest_block.moved, transient_gradient_bytes(work)
        around = max(moved * (blocks.moved > 0), gradients * (work.num_micro_batches > 1))
    found = []
    for window_bytes in windows_bytes:
        events = [(held, min(window_bytes, in_flight), space) for held, in_flight, space in forward] + backward
        activations, buffers, _ = max(events, key=lambda event: event[0] + event[1])
        fullest = max(map(sum, events))
        holes = max(0, sum(backward[-1]) + logits - fullest) + around
        found.append(DevicePeak(activations, buffers, fullest - activations - buffers, holes))
    return found


def _intervals(work: Workload, blocks: Blocks) -> Iterator[tuple[Policy, BlockBytes, int]]:
    """The policy, the block and the number of blocks of each run of equal neighbours with equal policies, in forward
    order."""
    for answer, start, end in blocks.pieces:
        for run in work.runs:
            count = min(end, run.end) - max(start, run.start)
            if count > 0:
                yield answer, run.block, count


def held_input_bytes(work: Workload, blocks: Blocks, *, inputs_leave: bool) -> int:
    """Bytes of one micro-batch that the first recomputed block gets and that stay on the device, although the segment
    before it did not make them. If inputs leave the device, those without a gradient are included: they belong to the
    caller, so they stay."""
    if not blocks.recomputed:
        return 0
    first = next(run.block for run in work.runs if run.end > blocks.moved)
    if not inputs_leave:
        return first.passed_input
    is_constant = not blocks.moved and not work.shape.embedding.num_accumulated
    return first.passed_small + (first.new_input - first.new_small) * is_constant


def frontier_bytes(work: Workload) -> int:
    """Bytes of the frontier in weight-stationary order: what one segment hands on to the next, for every micro-batch,
    and one more that is being made. In backward the gradients of these take as much."""
    return (work.num_micro_batches + 1) * work.tokens * work.shape.widest_output_bytes


def spilled_boundary_bytes(work: Workload, blocks: Blocks, streaming: Streaming) -> int:
    """Bytes of boundaries that are off the device in weight-stationary order: the frontier, and inputs that are kept
    for backward. Tensors that are not worth moving stay on the device."""
    if streaming.boundaries is Policy.KEEP:
        return 0
    return waiting_frontier_bytes(work) + kept_boundary_bytes(work, blocks, streaming.boundaries)


def waiting_frontier_bytes(work: Workload) -> int:
    """Bytes of the part of the frontier that is worth moving."""
    return (work.num_micro_batches + 1) * padded(max(work.handed_on_bytes))


def kept_boundary_bytes(work: Workload, blocks: Blocks, tier: Policy) -> int:
    """Bytes of the inputs of all recomputed blocks, which wait on `tier` until backward needs them. A tensor that
    segments hand on unchanged is copied once for each of them, also for moved blocks."""
    copies = padded(work.sum_of("passed_large", 0, blocks.moved))
    return work.num_micro_batches * (recomputed_input_bytes(work, blocks, tier) + copies)


def recomputed_input_bytes(work: Workload, blocks: Blocks, tier: Policy) -> int:
    """Bytes of the recomputed blocks' inputs that wait on `tier`, for one micro-batch."""
    field = "input_nvme" if tier is Policy.NVME else "input_host"
    return work.sum_of(field, blocks.moved, blocks.moved + blocks.recomputed)


# --- the tiers --------------------------------------------------------------------------------------------------------


def device_bytes(
    work: Workload, optimizer: OptimizerPlan, peak: DevicePeak, streaming: Streaming = RESIDENT
) -> TierBytes:
    """Peak device bytes of one rank, with all accumulators allocated."""
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
        + exchange_bytes(work)
        + peak.buffers,
        workspace=peak.workspace,
        allocator=peak.holes
        + ALLOCATOR_BYTES * work.on_cuda
        + (NCCL_BYTES + work.largest_gathered_bytes * work.is_cut_by_rows) * work.exchanges_on_device,
    )


def host_bytes(
    work: Workload, optimizer: OptimizerPlan, blocks: Blocks, window_bytes: int, streaming: Streaming = RESIDENT
) -> TierBytes:
    """Bytes of one rank in host memory, all of it pinned now or later; the process itself is not counted."""
    slack = accumulator_slack_bytes(work, optimizer, optimizer.updated_by_cpu)
    accumulators = accumulator_bytes(work, cpu_accumulated(work, optimizer, streaming)) + slack
    has_aliases = work.shape.num_accumulated > work.shape.num_trained
    on_cpu = states_bytes(work, optimizer, optimizer.cpu_share, on_cpu=True)
    streamed = states_bytes(work, optimizer, optimizer.streamed_share, on_cpu=False, streamed=True)
    in_host = streaming.boundaries is Policy.HOST
    return TierBytes(
        parameters=host_home_bytes(work, streaming),
        gradients=padded(accumulators + (PAGE_BYTES if has_aliases and accumulators else 0)),
        optimizer_states=padded(on_cpu + streamed),
        activations=work.alive(streaming) * work.sum_of("moved_host", blocks.nvme, blocks.moved)
        + (spilled_boundary_bytes(work, blocks, streaming) if in_host else 0),
        buffers=staging_bytes(work, optimizer)
        + upload_bytes(work, optimizer, streaming)
        + speculation_bytes(work, optimizer)
        + state_window_bytes(work, optimizer)
        + home_staging_bytes(work, streaming)
        + (nvme_staging_bytes(work, window_bytes) if blocks.nvme or streaming.boundaries is Policy.NVME else 0),
    )


def nvme_staging_bytes(work: Workload, window_bytes: int) -> int:
    """Bytes of the host buffers between device and NVMe: for copies out, or for the segments being reloaded. If the
    device's memory is host memory, only one piece at a time is aligned for the file, and reads need no buffer."""
    if work.in_place:
        return PIECE_BYTES
    return max(window_bytes, NUM_RELOADED_SEGMENTS * work.largest_block.moved_nvme)


def nvme_bytes(work: Workload, optimizer: OptimizerPlan, blocks: Blocks, streaming: Streaming = RESIDENT) -> TierBytes:
    """Bytes of one rank on NVMe."""
    boundaries = spilled_boundary_bytes(work, blocks, streaming) if streaming.boundaries is Policy.NVME else 0
    return TierBytes(
        parameters=nvme_home_bytes(work, streaming),
        optimizer_states=nvme_states_bytes(work, optimizer, streaming),
        activations=work.alive(streaming) * work.sum_of("moved_nvme", 0, blocks.nvme) + boundaries,
    )


def tier_bytes(
    work: Workload, optimizer: OptimizerPlan, blocks: Blocks, window_bytes: int, streaming: Streaming = RESIDENT
) -> dict[Tier, TierBytes]:
    """Bytes of one rank in all tiers."""
    return {
        Tier.DEVICE: device_bytes(work, optimizer, device_peak(work, blocks, window_bytes, streaming), streaming),
        Tier.HOST: host_bytes(work, optimizer, blocks, window_bytes, streaming),
        Tier.NVME: nvme_bytes(work, optimizer, blocks, streaming),
    }
