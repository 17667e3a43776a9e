"""Step time: seconds of one optimizer step of one rank, resource by resource, phase by phase.

    forward, per pass    compute | h2d, disk read of streamed parameters | d2h, disk write of spilled activations |
                         gather of sharded parameters
    backward, per pass   compute, recompute, rebuilds | h2d, disk read of parameters and activations | d2h and
                         accumulation of gradients
    update, once         CPU, device, h2d and d2h of the shares, host memory under all of them, disk read and write of
                         states and disk write of homes
    exchange, once       gradients and parameters between ranks, where they are not part of the above; on CPUs of
                         several nodes it runs behind the last backward

Inside a phase resources work side by side, so the phase takes as long as the busiest; phases follow one another,
because the update needs the norm of all gradients and the next forward needs the update, or, where the plan overlaps
the two, each of its segments its own part of the update. Loads of all techniques are
summed per link first. On a CPU device copies take the cores that compute, so there they add to compute.

Bounds of the update per parameter (c, g, s, n = CPU, streamed, resident, NVMe share; x = share whose parameters are
streamed; w = bytes of a trained parameter; u = what an update moves, z = states, by rule: 28 and 12 for AdamW; y =
those of a streamed one, z or, with bfloat16 weights on a device apart, 1.875 less):
    CPU (u + w)(c + n)    h2d w(c + n - x) + yg    d2h yg    host memory (u + w)(c + n) + w(c + n - x) + 2yg + 2zn
    device (u + w)(s + g)    disk zn read and zn written, one after the other: the same drives do both
    (int8 moments: CPU and device as if u were 40 bytes more for each)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import combinations

from spillway.metrics import Phase
from spillway.plan import OptimizerPlan, Policy, Prediction
from spillway.planning.compute_work import ComputeWork, backward_work, forward_work, update_work
from spillway.planning.footprint import (
    cpu_accumulated,
    recomputed_input_bytes,
    states_bytes_per_parameter,
    streamed_bytes_per_parameter,
)
from spillway.planning.hardware import NodeSpec
from spillway.planning.model_shape import FLOAT32_BYTES
from spillway.planning.workload import RESIDENT, Blocks, Streaming, Workload
from spillway.update_rules import MomentType

QUANTIZING_BYTES = 40
"""Bytes that a core could move while it widens and narrows one int8 moment: with AVX2 and AVX-512 an AdamW update takes
2.2 to 2.6 ns longer for two of them, on a core that moves 26 bytes per ns for float32."""
SECONDS_PER_DAY = 86400.0
DAYS_PER_YEAR = 365


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
"""Seconds of work per resource."""


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
    elementwise: float = math.inf
    """Values per second of everything that is not a matrix product."""
    operation_overhead: float = 0.0
    """Seconds."""
    calibrated: bool = False
    """Measured on this node."""


def rank_rates(node: NodeSpec, local_ranks: int, num_nodes: int, compute: str, num_cipher_threads: int = 0) -> Rates:
    """Rates of one rank. Ranks of a node share host memory and disks; devices behind one root port share links.
    `num_cipher_threads`: a rank's threads that encrypt or decrypt spilled bytes; 0: not encrypted."""
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
        read=_encrypted(node.nvme_read_bytes_per_second / local_ranks, node, num_cipher_threads),
        write=_encrypted(node.nvme_write_bytes_per_second / local_ranks, node, num_cipher_threads),
        network=node.network_bytes_per_second if num_nodes > 1 else node.interconnect_bytes_per_second,
        copies_use_cores=node.copies_use_cores,
        elementwise=node.values_per_second(compute) / device_share,
        operation_overhead=node.operation_overhead_seconds,
        calibrated=node.is_calibrated,
    )


def _encrypted(disk: float, node: NodeSpec, num_cipher_threads: int) -> float:
    """What is left of a disk's rate: every byte goes through the cipher and the disk, one after the other."""
    if num_cipher_threads == 0 or disk == 0:
        return disk
    return 1 / (1 / disk + 1 / (num_cipher_threads * node.cipher_bytes_per_second))


# --- loads of each phase, in seconds per resource ---------------------------------------------------------------------
#
# A pass is one micro-batch in order, and all of them weight-stationary.


def forward_loads(work: Workload, rates: Rates, blocks: Blocks, streaming: Streaming = RESIDENT) -> Loads:
    """One pass."""
    batches, loaded = work.alive(streaming), parameter_loads(work, streaming)
    boundaries = handed_on_bytes(work, streaming)
    into = loaded.forward + boundaries
    out = batches * moved_bytes(work, blocks) + boundaries
    on_nvme = boundaries if streaming.boundaries is Policy.NVME else 0
    written, read = batches * spilled_bytes(work, blocks) + on_nvme, loaded.forward_read + on_nvme
    return {
        Resource.COMPUTE: forward_work(work, blocks, streaming).seconds(rates),
        Resource.H2D: into / rates.h2d,
        Resource.D2H: out / rates.d2h,
        Resource.READ: read / rates.read if read else 0.0,
        Resource.WRITE: written / rates.write if written else 0.0,
        Resource.DRAM: (into + read + out + written) / rates.dram,
        Resource.NETWORK: batches * gather_seconds(work, rates),
    }


def backward_loads(
    work: Workload, rates: Rates, blocks: Blocks, optimizer: OptimizerPlan, streaming: Streaming = RESIDENT
) -> Loads:
    """One pass."""
    batches, loaded = work.alive(streaming), parameter_loads(work, streaming)
    waits = streaming.boundaries
    inputs = batches * recomputed_input_bytes(work, blocks, waits) if waits is not Policy.KEEP else 0
    spilled = batches * spilled_bytes(work, blocks)
    back = loaded.backward + batches * moved_bytes(work, blocks) + inputs
    back -= spilled if work.in_place else 0  # read to where backward uses it
    read = loaded.backward_read + spilled
    read += inputs if waits is Policy.NVME else 0
    gradients = batches * cpu_accumulated(work, optimizer, streaming) / work.shards("gradients")
    down = 0.0 if work.in_place else gradients * work.shape.trained_bytes
    accumulate = gradients * (work.shape.trained_bytes + 2 * FLOAT32_BYTES)
    return {
        Resource.COMPUTE: backward_work(work, blocks, optimizer, streaming).seconds(rates)
        + batches * rebuilding_bytes(work, blocks) / rates.device,
        Resource.H2D: back / rates.h2d,
        Resource.READ: read / rates.read if read else 0.0,
        Resource.D2H: down / rates.d2h,
        Resource.CPU: accumulate / rates.cpu,
        Resource.DRAM: (back + read + down + accumulate) / rates.dram,
        Resource.NETWORK: batches * (gather_seconds(work, rates) + scatter_seconds(work, rates)),
    }


def update_loads(work: Workload, rates: Rates, optimizer: OptimizerPlan, streaming: Streaming = RESIDENT) -> Loads:
    """What is streamed is updated by the CPU straight into its home: nothing goes up, NVMe homes are written. So it is
    with all parameters where the device's memory is the host's, but for those that backward has updated: their values
    are copied when they count."""
    parameters, w = work.rank_parameters, work.shape.trained_bytes
    u, g, s = (
        share * parameters for share in (optimizer.updated_by_cpu, optimizer.streamed_share, optimizer.resident_share)
    )
    up = 0.0 if work.in_place else w * max(0.0, u - work.units.trained[streaming.units])
    copied = 2 * w * optimizer.speculative_parameters if work.in_place else 0
    streamed = g * streamed_bytes_per_parameter(work)
    read = stored_states_bytes(work, optimizer)
    written = read + stored_bytes(work, streaming)
    updated = work.rule.update_bytes(work.moments) + w
    computed = updated + quantizing_bytes(work)
    duplex = rates.duplex if streamed else 1.0
    return {
        Resource.CPU: (u * computed + copied) / rates.cpu,
        Resource.H2D: (up + streamed) / (duplex * rates.h2d),
        Resource.D2H: streamed / (duplex * rates.d2h),
        Resource.READ: read / rates.read if read else 0.0,
        Resource.WRITE: written / rates.write if written else 0.0,
        Resource.DRAM: (u * updated + copied + up + 2 * streamed + read + written) / rates.dram,
        Resource.COMPUTE: (s + g) * computed / rates.device,
    }


def quantizing_bytes(work: Workload) -> int:
    """Cost of an update apart from moving its states, as bytes moved: for a core, int8 moments are more work than
    memory traffic."""
    return QUANTIZING_BYTES * len(work.rule.moments) if work.moments is MomentType.INT8 else 0


def moved_bytes(work: Workload, blocks: Blocks) -> int:
    """Activations of one micro-batch that leave the device."""
    return work.sum_of("moved", 0, blocks.moved)


def rebuilding_bytes(work: Workload, blocks: Blocks) -> int:
    """Read and written on the device in backward of one micro-batch, to rebuild what is not held."""
    first, end = blocks.moved, blocks.moved + blocks.recomputed
    return work.sum_of("rebuilding", 0, first) + work.sum_of("rebuilding", end, blocks.num_layers)


def spilled_bytes(work: Workload, blocks: Blocks) -> int:
    """Of those, what is written to NVMe."""
    return work.sum_of("moved_nvme", 0, blocks.nvme)


def stored_bytes(work: Workload, streaming: Streaming) -> int:
    """Trained parameters whose homes on NVMe are written by every update."""
    return work.shape.trained_bytes * work.units.trained[streaming.nvme]


def stored_states_bytes(work: Workload, optimizer: OptimizerPlan) -> float:
    """Optimizer states on NVMe, which every update reads and writes."""
    return optimizer.nvme_share * work.rank_parameters * states_bytes_per_parameter(work, on_cpu=True)


def handed_on_bytes(work: Workload, streaming: Streaming) -> int:
    """Boundaries that leave the device on their way from one segment to the next: out and in again, of every
    micro-batch."""
    if streaming.boundaries is Policy.KEEP:
        return 0
    return work.num_micro_batches * sum(work.handed_on_bytes)


@dataclass(frozen=True, slots=True)
class ParameterLoads:
    """Bytes of streamed parameters that one pass brings to the device, a mean over the step's passes."""

    forward: float
    backward: float
    forward_read: float
    """Of those, from NVMe."""
    backward_read: float


NO_LOADS = ParameterLoads(0.0, 0.0, 0.0, 0.0)


def parameter_loads(work: Workload, streaming: Streaming) -> ParameterLoads:
    """Every pass loads all W streamed bytes, but for the segments that still lie in the slots: those of the turn from
    forward to backward, and from backward to the next forward until an update changes them."""
    if not streaming.units:
        return NO_LOADS
    units, passes = work.units, work.num_micro_batches // work.alive(streaming)
    still_there = min(1.0, streaming.num_slots / units.count[streaming.units])
    forward = (1.0 - still_there * (passes - 1) / passes) * units.loaded[streaming.units]
    backward = max(0.0, units.returning[streaming.units] - still_there * units.loaded[streaming.units])
    on_nvme = units.loaded[streaming.nvme] / units.loaded[streaming.units]
    return ParameterLoads(forward, backward, on_nvme * forward, on_nvme * backward)


def gather_seconds(work: Workload, rates: Rates) -> float:
    """All-gather of sharded parameters, once per forward and once per backward of a micro-batch."""
    return _exchanged(work, work.shape.parameter_bytes) / rates.network if work.shards("parameters") > 1 else 0.0


def scatter_seconds(work: Workload, rates: Rates) -> float:
    """Reduce-scatter of gradients, per micro-batch, where ranks hold only shards of them."""
    gradients = work.shape.trained_bytes * work.shape.num_trained
    return _exchanged(work, gradients) / rates.network if work.shards("gradients") > 1 else 0.0


def exchange_loads(work: Workload, rates: Rates) -> Loads:
    """Once per step: the sum of whole gradients (out in the wire's type, back in float32, docs/ranks.md), or their
    reduction into shards; gather of parameters that were updated in shards."""
    bytes_per_parameter = 0
    if work.world_size > 1 and work.shards("gradients") == 1:
        bytes_per_parameter += work.wire_bytes + (FLOAT32_BYTES if work.shards("states") == 1 else 0)
    if work.shards("states") > 1 and work.shards("parameters") == 1:
        bytes_per_parameter += work.shape.trained_bytes
    return {Resource.NETWORK: _exchanged(work, bytes_per_parameter * work.shape.num_trained) / rates.network}


def exposed_exchange_seconds(work: Workload, rates: Rates, backward_seconds: float = math.inf) -> float:
    """What one pass of backward does not hide of the exchange. On CPUs Ddp sends a segment's gradients once backward
    has left it, but between ranks of one node the cores that compute send them, so that nothing is saved."""
    whole = exchange_loads(work, rates)[Resource.NETWORK]
    if work.on_cuda or work.shards("states") > 1 or work.world_size == work.local_ranks:
        return whole
    left = (whole * sent - (backward_seconds * passed if passed else 0.0) for sent, passed in work.forward_order)
    return max(0.0, *left)


def _exchanged(work: Workload, nbytes: int) -> float:
    """What one rank sends of them in one pass of a ring."""
    return (work.world_size - 1) / work.world_size * nbytes


# --- from loads to seconds --------------------------------------------------------------------------------------------

_COPIES = (Resource.H2D, Resource.D2H)


def phase_seconds(loads: Loads, rates: Rates, overlapped: bool = True) -> float:
    """The busiest resource; copies that use the computing cores, or that forward waits for, come on top of compute."""
    copies = sum(loads.get(copy, 0.0) for copy in _COPIES)
    if not overlapped:
        return loads.get(Resource.COMPUTE, 0.0) + copies + loads.get(Resource.WRITE, 0.0)
    if rates.copies_use_cores:
        return max(busy_seconds(loads, rates), *loads.values())
    return max(loads.values())


def busy_seconds(loads: Loads, rates: Rates) -> float:
    """The part of a phase in which the device computes; the rest is waiting. On a CPU copies and updates are work of
    the same cores."""
    cores = (Resource.COMPUTE, *_COPIES, Resource.CPU) if rates.copies_use_cores else (Resource.COMPUTE,)
    return sum(loads.get(resource, 0.0) for resource in cores)


def update_seconds(work: Workload, rates: Rates, optimizer: OptimizerPlan, streaming: Streaming = RESIDENT) -> float:
    """The update by itself: what each share asks for, and its operations."""
    loads = update_loads(work, rates, optimizer, streaming)
    return side_by_side(loads, rates) + update_work(work, optimizer).seconds(rates)


def side_by_side(update: Mapping[Resource, float], rates: Rates) -> float:
    """All shares of an update at once, also on a CPU device, where the cores share the memory bandwidth that bounds
    them all. The same drives read states and write them, so these add up."""
    disk = update[Resource.READ] + update[Resource.WRITE]
    shared = update[Resource.DRAM] + update[Resource.COMPUTE] if rates.copies_use_cores else 0.0
    return max(shared, disk, *update.values())


def can_overlap(rates: Rates, optimizer: OptimizerPlan, up_seconds: float, streaming: Streaming = RESIDENT) -> bool:
    """Whether any of the update can run behind the next forward. On a CPU device both take the same cores. And a lane
    is first in, first out: loads of streamed segments would queue behind all that the update sends up."""
    return optimizer.offloads and not rates.copies_use_cores and not (streaming.units and up_seconds)


def hidden_seconds(
    work: Workload,
    rates: Rates,
    optimizer: OptimizerPlan,
    blocks: Blocks,
    streaming: Streaming = RESIDENT,
    *,
    overlapped: bool = True,
) -> float:
    """Of the update, what a plan with `overlap` does not wait for: it runs behind the next step's first forward pass.

    Chunks are updated in forward order, U seconds for all; F seconds of forward come to segment i when the segments
    before it are through. What is waited for is the worst of U x (share of the parameters up to and with i) less F x
    (share of forward before i), and no less than what a resource of both does more than forward takes. What backward
    has updated, the end of the forward order, is only sent up.
    """
    forward, update = forward_loads(work, rates, blocks, streaming), update_loads(work, rates, optimizer, streaming)
    queues = blocks.moved and update[Resource.D2H]  # activations on their way out, behind states on theirs
    if queues or not can_overlap(rates, optimizer, update[Resource.H2D], streaming):
        return 0.0
    took, whole = phase_seconds(forward, rates, overlapped or not blocks.moved), side_by_side(update, rates)
    left = 1.0 - optimizer.speculative_parameters / work.rank_parameters
    waited = max((whole * min(left, updated) - took * passed for updated, passed in work.forward_order), default=whole)
    made = {Resource.CPU: 1.0 - left, Resource.DRAM: 1.0 - left}
    crowded = max(forward.get(r, 0.0) + (1.0 - made.get(r, 0.0)) * update.get(r, 0.0) for r in Resource) - took
    disk = sum(forward.get(r, 0.0) + update[r] for r in (Resource.READ, Resource.WRITE)) - took
    return max(0.0, whole - max(waited, crowded, disk if update[Resource.READ] else 0.0))


def speculative_window(work: Workload, rates: Rates, optimizer: OptimizerPlan, backward: Loads) -> int:
    """Parameters that the CPU can update during the last pass of backward in addition to its other work: out of place
    it moves as many bytes as in place."""
    each = work.rule.update_bytes(work.moments) + work.shape.trained_bytes
    seconds = max(backward.values())
    free = min(
        (seconds - backward.get(resource, 0.0)) * rate / moved
        for resource, rate, moved in (
            (Resource.CPU, rates.cpu, each + quantizing_bytes(work)),
            (Resource.DRAM, rates.dram, each),
        )
    )
    return min(int(optimizer.cpu_share * work.rank_parameters), max(0, int(free)))


def beside_copies(work: Workload, rates: Rates, optimizer: OptimizerPlan, streaming: Streaming = RESIDENT) -> float:
    """Bytes per second that the CPU's part of the update gets: what the cores stream, but no more of host memory than
    the update's copies and writes leave, spread over the whole update."""
    loads = update_loads(work, rates, optimizer, streaming)
    seconds = max(loads.values())
    if not seconds:
        return rates.cpu
    copied = loads[Resource.DRAM] * rates.dram - loads[Resource.CPU] * rates.cpu
    return min(rates.cpu, rates.dram - copied / seconds)


LAUNCHING_CORES = 2
"""Cores of a rank with a discrete device: forward and its Python, and backward in autograd's thread."""


def update_threads(num_cores: int, local_ranks: int, copies_use_cores: bool) -> int:
    """CPU threads of one rank's update: its part of the node's cores, less those that launch the device's work. On a
    CPU device the same cores compute and update, in turn."""
    cores = num_cores // local_ranks
    return max(1, cores if copies_use_cores else cores - LAUNCHING_CORES)


def balanced_streamed_share(work: Workload, rates: Rates) -> float:
    """The g of c + g = 1, with nothing resident, at which the update is fastest; 0 when that saves less than 2 %.

    Every load is a line in g: the CPU's falls, the links' rise, host memory falls on a GPU node (a streamed parameter
    moves 20.25 bytes there, one updated by the CPU 32). The least maximum of lines lies where two of them cross.
    (Deep Optimizer States, arXiv 2410.21316, section 4, real-valued instead of every k-th subgroup.)
    """
    share, seconds = _balanced(work, rates)
    return share if seconds < 0.98 * update_seconds(work, rates, _split(0.0)) else 0.0


def least_update_seconds(work: Workload, rates: Rates) -> float:
    """Of an update with nothing resident: no split between CPU and device is faster."""
    return min(_balanced(work, rates)[1], update_seconds(work, rates, _split(0.0)))


@lru_cache(maxsize=256)
def _balanced(work: Workload, rates: Rates) -> tuple[float, float]:
    """The fastest g of c + g = 1 in which both take part, and its seconds."""
    starts, ends = (update_loads(work, rates, _split(g)) for g in (_EPSILON, 1.0 - _EPSILON))
    lines = [(starts[resource], ends[resource] - starts[resource]) for resource in starts]
    crossings = [
        (start - other_start) / (other_slope - slope)
        for (start, slope), (other_start, other_slope) in combinations(lines, 2)
        if slope != other_slope
    ]
    shares = [0.0, *(share for share in crossings if 0.0 < share < 1.0)]
    return min(((share, update_seconds(work, rates, _split(share))) for share in shares), key=lambda pair: pair[1])


_EPSILON = 1e-9
"""Share of either path: with both in use, both directions of the link are busy."""


def _split(streamed_share: float) -> OptimizerPlan:
    return OptimizerPlan(cpu_share=1.0 - streamed_share, streamed_share=streamed_share, resident_share=0.0)


@dataclass(frozen=True, slots=True)
class Drives:
    """One rank's part of the node's drives."""

    capacity_bytes: float
    rated_bytes: float = 0.0
    """Bytes that they are rated for in their lifetime; 0: unknown."""


def predict(
    work: Workload,
    rates: Rates,
    optimizer: OptimizerPlan,
    blocks: Blocks,
    streaming: Streaming = RESIDENT,
    *,
    overlapped: bool,
    steps: int,
    drives: Drives,
) -> Prediction:
    """One optimizer step. `overlapped`: spilled bytes may be copied while forward continues; `steps` bounds what a
    short job writes per day."""
    forward = forward_loads(work, rates, blocks, streaming)
    backward = backward_loads(work, rates, blocks, optimizer, streaming)
    update, exchange = update_loads(work, rates, optimizer, streaming), exchange_loads(work, rates)
    num_passes = work.num_micro_batches // work.alive(streaming)
    compute = num_passes * (forward[Resource.COMPUTE] + backward[Resource.COMPUTE])
    busy: dict[str, float] = {
        Phase.FORWARD: num_passes * busy_seconds(forward, rates),
        Phase.BACKWARD: num_passes * busy_seconds(backward, rates),
    }
    passes = num_passes * pass_seconds(work, rates, forward, backward, streaming, overlapped or not blocks.moved)
    overlaps = optimizer.overlap != "None"
    hidden = hidden_seconds(work, rates, optimizer, blocks, streaming, overlapped=overlapped) if overlaps else 0.0
    exposed = update_seconds(work, rates, optimizer, streaming) - hidden
    waited = exposed - update_work(work, optimizer).seconds(rates) if overlaps else 0.0  # in the next forward
    exchanging = exposed_exchange_seconds(work, rates, phase_seconds(backward, rates))
    step_seconds = passes + exposed + exchanging
    in_passes = _summed(((forward, num_passes), (backward, num_passes)))
    total = _summed(((in_passes, 1), (update, 1), (exchange, 1)))
    per_step = written_bytes(work, optimizer, blocks, streaming)
    per_day = per_step * min(steps, SECONDS_PER_DAY / step_seconds)
    return Prediction(
        step_seconds=step_seconds,
        calibrated=rates.calibrated,
        compute_seconds=compute,
        exposed_optimizer_seconds=exposed,
        exposed_transfer_seconds=passes - compute + exchanging,
        bound_by=max(total, key=total.__getitem__).value,
        link_bytes=_link_bytes(rates, in_passes, update, rates.duplex if optimizer.streamed_share else 1.0),
        phase_seconds={
            **busy,
            Phase.WAIT: max(0.0, passes - sum(busy.values())) + waited,
            Phase.EXCHANGE: exchanging,
            Phase.OPTIMIZER: exposed - waited,
        },
        nvme_read_bytes_per_second=rates.read if total[Resource.READ] else 0.0,
        nvme_write_bytes_per_second=rates.write if total[Resource.WRITE] else 0.0,
        nvme_written_bytes_per_day=per_day,
        drive_writes_per_day=per_day / drives.capacity_bytes if drives.capacity_bytes else 0.0,
        years_until_rated_writes=drives.rated_bytes / (per_day * DAYS_PER_YEAR)
        if per_day * drives.rated_bytes
        else None,
    )


def amounts(
    work: Workload, optimizer: OptimizerPlan, blocks: Blocks, streaming: Streaming = RESIDENT
) -> dict[str, dict[str, float]]:
    """What each phase of a step has to do: bytes by resource, and the computing device's units of ComputeWork.
    Calibration compares it with measured seconds."""
    num_passes = work.num_micro_batches // work.alive(streaming)
    update = update_loads(work, ONE, optimizer, streaming)
    asked = {
        Phase.FORWARD: (
            num_passes, forward_loads(work, ONE, blocks, streaming), forward_work(work, blocks, streaming), 0.0,
        ),
        Phase.BACKWARD: (
            num_passes, backward_loads(work, ONE, blocks, optimizer, streaming),
            backward_work(work, blocks, optimizer, streaming),
            num_passes * work.alive(streaming) * rebuilding_bytes(work, blocks),
        ),
        Phase.OPTIMIZER: (1, update, update_work(work, optimizer), update[Resource.COMPUTE]),
        Phase.EXCHANGE: (1, exchange_loads(work, ONE), ComputeWork(), 0.0),
    }  # fmt: skip
    return {
        phase.value: {
            **{resource.value: count * loads[resource] for resource in BY_BYTES if loads.get(resource)},
            **asdict(compute.times(count)),
            DEVICE_BYTES: on_device,
        }
        for phase, (count, loads, compute, on_device) in asked.items()
    }


ONE = Rates(
    flops=1.0, device=1.0, h2d=1.0, d2h=1.0, duplex=1.0, dram=1.0, cpu=1.0, read=1.0, write=1.0, network=1.0,
    copies_use_cores=True,
)  # fmt: skip
"""Rates at which seconds are bytes."""
BY_BYTES = tuple(resource for resource in Resource if resource is not Resource.COMPUTE)
DEVICE_BYTES = "device"
"""Of the update of streamed and resident states, and of rebuilds."""


def pass_seconds(
    work: Workload, rates: Rates, forward: Loads, backward: Loads, streaming: Streaming, overlapped: bool
) -> float:
    """Forward and backward of one pass. With a single slot nothing is computed while parameters come in."""
    seconds = phase_seconds(forward, rates, overlapped) + phase_seconds(backward, rates)
    if streaming.units and streaming.num_slots == 1 and not rates.copies_use_cores:
        loaded = parameter_loads(work, streaming)
        seconds += (loaded.forward + loaded.backward) / rates.h2d
    return seconds


def written_bytes(work: Workload, optimizer: OptimizerPlan, blocks: Blocks, streaming: Streaming) -> float:
    """To NVMe, in one step."""
    num_passes = work.num_micro_batches // work.alive(streaming)
    boundaries = handed_on_bytes(work, streaming) if streaming.boundaries is Policy.NVME else 0
    activations = work.num_micro_batches * spilled_bytes(work, blocks)
    states = stored_states_bytes(work, optimizer)
    return activations + num_passes * boundaries + stored_bytes(work, streaming) + states


def _summed(phases: Sequence[tuple[Mapping[Resource, float], int]]) -> Loads:
    return {resource: sum(count * loads.get(resource, 0.0) for loads, count in phases) for resource in Resource}


def _link_bytes(rates: Rates, passes: Loads, update: Loads, duplex: float) -> dict[str, int]:
    """Bytes of one step; the update's copies are slowed by `duplex`, not multiplied."""
    ways = {
        "h2d": (Resource.H2D, rates.h2d, duplex),
        "d2h": (Resource.D2H, rates.d2h, duplex),
        "dram": (Resource.DRAM, rates.dram, 1.0),
        "nvme_read": (Resource.READ, rates.read, 1.0),
        "nvme_write": (Resource.WRITE, rates.write, 1.0),
    }
    return {
        name: round(rate * (passes.get(resource, 0.0) + factor * update.get(resource, 0.0)))
        for name, (resource, rate, factor) in ways.items()
    }
