"""Footprint: bytes of one rank in each tier, as the trainer holds them. Arithmetic only; every function is one row.

P = trained parameters of this rank's shard; b = bytes of the compute type, w = of a trained parameter's; c, g, s, n =
shares of the optimizer updated by the CPU, streamed through the device, resident on it, on NVMe. In order,
micro-batches run one after the other and activations of one are alive; weight-stationary, those of all M between
forward and backward are. docs/planning.md writes the rows down as formulas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from spillway.plan import OptimizerPlan, ParameterPlan, Policy, Tier, TierBytes
from spillway.planning.model_shape import FLOAT32_BYTES
from spillway.planning.workload import (
    ALLOCATOR_BYTES,
    CACHE_LINE_BYTES,
    DIVIDING_STRATEGIES,
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
    """x: share of the trained parameters that the CPU updates because their home is in host memory or on NVMe."""
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
    """w x the largest parameter, between backward and its accumulator. Under ZeRO: one more bucket, sent to its owners,
    and the float32 sum of one piece. Under FSDP2: a whole segment, and the sum of one piece in addition to the previous
    one, which the optimizer still reads."""
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
    """Scales of partly filled blocks: one per moment and chunk (or per parameter that is a single chunk)."""
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
    """Host ring of gradients copied down to the CPU's accumulators, where they are not the host's own."""
    if optimizer.updated_by_cpu == 0.0 or work.in_place:
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
    """States in the spill file, each of every chunk in whole pages. Those of streamed parameters are split separately,
    so they may be off by a chunk of their own."""
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
    """Buffers of the sum of gradients over ranks: one bucket being sent, one being received, this rank's share of the
    sum. In float32; bfloat16 takes less. In host memory, which may be the device's."""
    if work.world_size == 1:
        return 0
    segment = ceil(min(EXCHANGE_PARAMETERS, work.shape.num_accumulated) / work.world_size)
    return FLOAT32_BYTES * segment * (2 * work.world_size + 1)


# --- activations ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DevicePeak:
    """Device bytes for activations: the most that is held for later, and the temporaries of the peak beyond that, which
    the trainer reserves for the whole run."""

    activations: int
    buffers: int
    """Copies in flight out of the device, and reloads."""
    workspace: int
    holes: int = 0
    """What the allocator takes beyond them at the peak, between blocks in use."""

    @property
    def total(self) -> int:
        return self.activations + self.buffers + self.workspace + self.holes


def device_peak(work: Workload, blocks: Blocks, window_bytes: int, streaming: Streaming = RESIDENT) -> DevicePeak:
    """Peak over forward and backward."""
    return device_peaks(work, blocks, (window_bytes,), streaming)[0]


def device_peaks(
    work: Workload, blocks: Blocks, windows_bytes: Sequence[int], streaming: Streaming = RESIDENT
) -> list[DevicePeak]:
    """Peak over forward and backward, for each window.

    An event sweep, not a sum: kept activations of late blocks are gone when spilled ones of early blocks come back.
    Where equal blocks with equal answers follow one another the bytes rise or fall steadily: the ends are looked at.
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
    forward.append((head, previous, tokens * shape.head.forward_workspace_bytes))
    workspace, logits = tokens * shape.head.backward_workspace_bytes, 0
    if work.on_cuda:
        # Where the head's logits lay in the compute type no block of float32 fits.
        logits = workspace * shape.compute_bytes // (2 * FLOAT32_BYTES) * (shape.compute_bytes < FLOAT32_BYTES)
        # The first of backward: no gradient is there yet (Assembly.start_backward), and they are counted beside. With
        # them comes the gradient of the projection's input.
        hidden = work.tokens * shape.compute_bytes * shape.hidden_size
        workspace = max(hidden, workspace - transient_gradient_bytes(work))
    backward.append((head, previous, workspace))
    # Copies have the forward of the next block to leave in. Where they are later than that, or on their way out beside
    # what comes back, whoever would go beyond the plan waits for them (DeviceLedger).
    around = 0
    if work.on_cuda:
        # Storages come back into other places than they left; and when the gradients of the micro-batch before are
        # gone, what the next one has allocated since lies around them.
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
    """Weight-stationary with boundaries off the device: the frontier, and what of it is kept for backward. Tensors that
    are not worth moving stay on the device."""
    if streaming.boundaries is Policy.KEEP:
        return 0
    return waiting_frontier_bytes(work) + kept_boundary_bytes(work, blocks, streaming.boundaries)


def waiting_frontier_bytes(work: Workload) -> int:
    """The part of the frontier that is worth moving."""
    return (work.num_micro_batches + 1) * padded(max(work.handed_on_bytes))


def kept_boundary_bytes(work: Workload, blocks: Blocks, tier: Policy) -> int:
    """The inputs of every recomputed block, which wait on `tier` until backward needs them. What segments hand on
    unchanged is copied once for each of them, also for moved blocks."""
    copies = padded(work.sum_of("passed_large", 0, blocks.moved))
    return work.num_micro_batches * (recomputed_input_bytes(work, blocks, tier) + copies)


def recomputed_input_bytes(work: Workload, blocks: Blocks, tier: Policy) -> int:
    """Of one micro-batch, those that wait on `tier`."""
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
    in_host = streaming.boundaries is Policy.HOST
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
        + (nvme_staging_bytes(work, window_bytes) if blocks.nvme or streaming.boundaries is Policy.NVME else 0),
    )


def nvme_staging_bytes(work: Workload, window_bytes: int) -> int:
    """Host buffers between device and NVMe: for copies out, or for the segments being reloaded. Where the device's
    memory is the host's, one piece at a time is aligned for the file, and reads need none."""
    if work.in_place:
        return PIECE_BYTES
    return max(window_bytes, NUM_RELOADED_SEGMENTS * work.largest_block.moved_nvme)


def nvme_bytes(work: Workload, optimizer: OptimizerPlan, blocks: Blocks, streaming: Streaming = RESIDENT) -> TierBytes:
    """Everything of one rank on NVMe."""
    boundaries = spilled_boundary_bytes(work, blocks, streaming) if streaming.boundaries is Policy.NVME else 0
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
