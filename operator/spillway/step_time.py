"""Step time: seconds of one optimizer step of one rank, resource by resource, phase by phase.

    forward, per micro-batch    compute | d2h, disk write of spilled activations | gather of sharded parameters
    backward, per micro-batch   compute, recompute | h2d, disk read of activations | d2h and accumulation of gradients
    update, once                CPU, device, h2d and d2h of the shares, host memory under all of them
    exchange, once              gradients and parameters between ranks, where they are not part of the above

Inside a phase resources work side by side, so the phase takes as long as the busiest; phases follow one another,
because the update needs the norm of all gradients and the next forward needs the update. Loads of all techniques are
summed per link first. On a CPU device copies take the cores that compute, so there they add to compute.

Bounds per parameter (c, g, s = CPU, streamed, resident share; b = bytes of the compute type):
    CPU 28c + bc    h2d bc + 12g    d2h 12g    host memory 28c + 2bc + 24g    device memory (28 + b)(s + g)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations

from spillway.footprint import Blocks, Workload, states_bytes_per_parameter
from spillway.hardware import NodeSpec
from spillway.model_shape import FLOAT32_BYTES
from spillway.plan import OptimizerPlan, Prediction

SECONDS_PER_DAY = 86400.0
UPDATE_BYTES = 28
"""AdamW on float32: reads gradient, master and two moments (16), writes master and two moments (12)"""


class Resource(StrEnum):
    """What can bound a step; the names that Prediction.bound_by uses."""

    COMPUTE = "compute"
    H2D = "H2D"
    D2H = "D2H"
    DRAM = "DRAM"
    CPU = "CPU update"
    READ = "disk read"
    WRITE = "disk write"
    NETWORK = "network"


Loads = dict[Resource, float]
"""seconds of work per resource"""


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes and FLOPs per second that one rank gets."""

    flops: float
    device: float
    h2d: float
    d2h: float
    duplex: float
    dram: float
    cpu: float
    read: float
    write: float
    network: float
    copies_use_cores: bool


def rank_rates(node: NodeSpec, local_ranks: int, num_nodes: int, compute: str) -> Rates:
    """Host memory and disks are divided by the ranks of the node, links by the devices behind one root port."""
    on_cpu = node.device_kind == "Cpu"
    device_share = local_ranks if on_cpu else 1
    link_share = min(local_ranks, node.link.devices_per_root_port)
    return Rates(
        flops=node.flops_per_second(compute) / device_share,
        device=node.device_bytes_per_second / device_share,
        h2d=node.link.h2d_bytes_per_second / link_share,
        d2h=node.link.d2h_bytes_per_second / link_share,
        duplex=node.link.duplex_efficiency,
        dram=node.dram_bytes_per_second / local_ranks,
        cpu=node.cpu_bytes_per_second / local_ranks,
        read=node.nvme_read_bytes_per_second / local_ranks,
        write=node.nvme_write_bytes_per_second / local_ranks,
        network=node.network_bytes_per_second if num_nodes > 1 else node.interconnect_bytes_per_second,
        copies_use_cores=node.copies_use_cores,
    )


# --- loads of each phase, in seconds per resource ---------------------------------------------------------------------


def forward_loads(work: Workload, rates: Rates, blocks: Blocks) -> Loads:
    out, written = blocks.moved * work.moved_bytes, blocks.nvme * work.moved_nvme_bytes
    return {
        Resource.COMPUTE: work.tokens * work.shape.forward_flops_per_token(work.sequence_length) / rates.flops,
        Resource.D2H: out / rates.d2h,
        Resource.WRITE: written / rates.write if written else 0.0,
        Resource.DRAM: (out + written) / rates.dram,
        Resource.NETWORK: gather_seconds(work, rates),
    }


def backward_loads(work: Workload, rates: Rates, blocks: Blocks, optimizer: OptimizerPlan) -> Loads:
    shape, tokens = work.shape, work.tokens
    forward = shape.forward_flops_per_token(work.sequence_length)
    recompute = blocks.recomputed * shape.block_flops_per_token(work.sequence_length)
    back, read = blocks.moved * work.moved_bytes, blocks.nvme * work.moved_nvme_bytes
    on_cpu = optimizer.cpu_share * work.rank_parameters
    accumulate = on_cpu * (shape.compute_bytes + 2 * FLOAT32_BYTES)
    return {
        Resource.COMPUTE: tokens * (2 * forward + recompute) / rates.flops,
        Resource.H2D: back / rates.h2d,
        Resource.READ: read / rates.read if read else 0.0,
        Resource.D2H: on_cpu * shape.compute_bytes / rates.d2h,
        Resource.CPU: accumulate / rates.cpu,
        Resource.DRAM: (back + read + on_cpu * shape.compute_bytes + accumulate) / rates.dram,
        Resource.NETWORK: gather_seconds(work, rates) + scatter_seconds(work, rates),
    }


def update_loads(work: Workload, rates: Rates, optimizer: OptimizerPlan) -> Loads:
    parameters, b = work.rank_parameters, work.shape.compute_bytes
    c, g, s = (
        share * parameters for share in (optimizer.cpu_share, optimizer.streamed_share, optimizer.resident_share)
    )
    streamed = g * states_bytes_per_parameter(work, on_cpu=False)
    duplex = rates.duplex if streamed else 1.0
    return {
        Resource.CPU: c * (UPDATE_BYTES + b) / rates.cpu,
        Resource.H2D: (b * c + streamed) / (duplex * rates.h2d),
        Resource.D2H: streamed / (duplex * rates.d2h),
        Resource.DRAM: (c * (UPDATE_BYTES + 2 * b) + 2 * streamed) / rates.dram,
        Resource.COMPUTE: (s + g) * (UPDATE_BYTES + b) / rates.device,
    }


def gather_seconds(work: Workload, rates: Rates) -> float:
    """All-gather of sharded parameters, once per forward and once per backward of a micro-batch."""
    return _exchanged(work, work.shape.compute_bytes) / rates.network if work.shards("parameters") > 1 else 0.0


def scatter_seconds(work: Workload, rates: Rates) -> float:
    """Reduce-scatter of gradients, per micro-batch, where ranks hold only shards of them."""
    return _exchanged(work, work.shape.compute_bytes) / rates.network if work.shards("gradients") > 1 else 0.0


def exchange_loads(work: Workload, rates: Rates) -> Loads:
    """Once per step: the sum of whole gradients (out in the wire's type, back in float32, docs/ranks.md), or their
    reduction into shards; gather of parameters that were updated in shards."""
    bytes_per_parameter = 0
    if work.world_size > 1 and work.shards("gradients") == 1:
        bytes_per_parameter += work.wire_bytes + (FLOAT32_BYTES if work.shards("states") == 1 else 0)
    if work.shards("states") > 1 and work.shards("parameters") == 1:
        bytes_per_parameter += work.shape.compute_bytes
    return {Resource.NETWORK: _exchanged(work, bytes_per_parameter) / rates.network}


def _exchanged(work: Workload, bytes_per_parameter: int) -> float:
    """Bytes that one rank sends in one pass of a ring."""
    return (work.world_size - 1) / work.world_size * bytes_per_parameter * work.shape.num_parameters


# --- from loads to seconds --------------------------------------------------------------------------------------------

_COPIES = (Resource.H2D, Resource.D2H)


def phase_seconds(loads: Loads, rates: Rates, overlapped: bool = True) -> float:
    """The busiest resource; copies that use the computing cores, or that forward waits for, come on top of compute."""
    copies = sum(loads.get(copy, 0.0) for copy in _COPIES)
    if not overlapped:
        return loads.get(Resource.COMPUTE, 0.0) + copies + loads.get(Resource.WRITE, 0.0)
    if rates.copies_use_cores:
        cores = loads.get(Resource.COMPUTE, 0.0) + copies + loads.get(Resource.CPU, 0.0)
        return max(cores, *loads.values())
    return max(loads.values())


def update_seconds(work: Workload, rates: Rates, optimizer: OptimizerPlan) -> float:
    """The update by itself: CPU, streamed and resident shares run side by side, also on a CPU device, where the cores
    share the memory bandwidth that bounds them all."""
    loads = update_loads(work, rates, optimizer)
    if not rates.copies_use_cores:
        return max(loads.values())
    shared = loads[Resource.DRAM] + loads[Resource.COMPUTE]
    return max(shared, *loads.values())


def balanced_streamed_share(work: Workload, rates: Rates) -> float:
    """The g of c + g = 1, with nothing resident, at which the update is fastest; 0 when that saves less than 2 %.

    Every load is a line in g: the CPU's falls, the links' rise, host memory falls on a GPU node (a streamed parameter
    moves 24 bytes there, one updated by the CPU 32). The least maximum of lines lies where two of them cross.
    (Deep Optimizer States, arXiv 2410.21316, section 4, real-valued instead of every k-th subgroup.)
    """
    starts, ends = (update_loads(work, rates, _split(g)) for g in (_EPSILON, 1.0 - _EPSILON))
    lines = [(starts[resource], ends[resource] - starts[resource]) for resource in starts]
    crossings = [
        (start - other_start) / (other_slope - slope)
        for (start, slope), (other_start, other_slope) in combinations(lines, 2)
        if slope != other_slope
    ]
    shares = [share for share in crossings if 0.0 < share < 1.0]
    fastest = min(shares, key=lambda share: update_seconds(work, rates, _split(share)), default=0.0)
    saves = update_seconds(work, rates, _split(fastest)) < 0.98 * update_seconds(work, rates, _split(0.0))
    return fastest if saves else 0.0


_EPSILON = 1e-9
"""of either path: with both in use, both directions of the link are busy"""


def _split(streamed_share: float) -> OptimizerPlan:
    return OptimizerPlan(cpu_share=1.0 - streamed_share, streamed_share=streamed_share, resident_share=0.0)


def predict(
    work: Workload,
    rates: Rates,
    optimizer: OptimizerPlan,
    blocks: Blocks,
    *,
    overlapped: bool,
    steps: int,
    drive_bytes: float,
) -> Prediction:
    """One optimizer step. `overlapped` is False when no spilled byte may be in flight while forward goes on;
    `drive_bytes` is this rank's part of the drives; `steps` bounds what a short job writes in a day."""
    forward, backward = forward_loads(work, rates, blocks), backward_loads(work, rates, blocks, optimizer)
    update, exchange = update_loads(work, rates, optimizer), exchange_loads(work, rates)
    batches = work.num_micro_batches
    forward_seconds = phase_seconds(forward, rates, overlapped or not blocks.moved)
    compute = batches * (forward[Resource.COMPUTE] + backward[Resource.COMPUTE])
    passes = batches * (forward_seconds + phase_seconds(backward, rates))
    update_time = update_seconds(work, rates, optimizer)
    step_seconds = passes + update_time + exchange[Resource.NETWORK]
    total = _summed(((forward, batches), (backward, batches), (update, 1), (exchange, 1)))
    written = batches * blocks.nvme * work.moved_nvme_bytes
    per_day = written * min(steps, SECONDS_PER_DAY / step_seconds)
    return Prediction(
        step_seconds=step_seconds,
        compute_seconds=compute,
        exposed_optimizer_seconds=update_time,
        exposed_transfer_seconds=passes - compute + exchange[Resource.NETWORK],
        bound_by=max(total, key=total.__getitem__).value,
        link_bytes=_link_bytes(work, rates, total, optimizer, blocks),
        nvme_written_bytes_per_day=per_day,
        drive_writes_per_day=per_day / drive_bytes if drive_bytes else 0.0,
    )


def _summed(phases: Sequence[tuple[Mapping[Resource, float], int]]) -> Loads:
    return {resource: sum(count * loads.get(resource, 0.0) for loads, count in phases) for resource in Resource}


def _link_bytes(work: Workload, rates: Rates, total: Loads, optimizer: OptimizerPlan, blocks: Blocks) -> dict[str, int]:
    batches, parameters = work.num_micro_batches, work.rank_parameters
    activations = batches * blocks.moved * work.moved_bytes
    compute_copy = optimizer.cpu_share * parameters * work.shape.compute_bytes
    streamed = optimizer.streamed_share * parameters * states_bytes_per_parameter(work, on_cpu=False)
    disk = batches * blocks.nvme * work.moved_nvme_bytes
    return {
        "h2d": round(activations + compute_copy + streamed),
        "d2h": round(activations + batches * compute_copy + streamed),
        "dram": round(total[Resource.DRAM] * rates.dram),
        "nvme_read": disk,
        "nvme_write": disk,
    }
