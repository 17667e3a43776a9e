"""Step time: seconds of one optimizer step of one rank, resource by resource, phase by phase.

    forward, per pass    compute | h2d, disk read of streamed parameters | d2h, disk write of spilled activations |
                         gather of sharded parameters
    backward, per pass   compute, recompute, rebuilds | h2d, disk read of parameters and activations | d2h and
                         accumulation of gradients
    update, once         CPU, device, h2d and d2h of the shares, host memory under all of them, disk read and write of
                         states and disk write of homes
    exchange, once       gradients and parameters between ranks, if they are not part of the above; that of Ddp on
                         CUDA devices, or on CPUs of several nodes, overlaps the last backward

Within a phase, resources work in parallel, so the phase takes as long as the busiest one; the loads of all techniques
are summed per resource first. Phases follow one another, because the update needs the norm of all gradients, and the
next forward needs the update. If the plan overlaps these two, each segment of forward needs only its own part of the
update. On a CPU device copies use the cores that compute, so there they add to compute.

Loads of the update in bytes per parameter (c, g, s, n = CPU, streamed, resident, NVMe share; x = share whose parameters
are streamed; w = bytes of a trained parameter; by rule, u = bytes that an update moves and z = bytes of states: 28 and
12 for AdamW; y = bytes of states in share g: z, or 1.875 less with bfloat16 weights on a separate device):
    CPU (u + w)(c + n)    h2d w(c + n - x) + yg    d2h yg    host memory (u + w)(c + n) + w(c + n - x) + 2yg + 2zn
    device (u + w)(s + g)    disk zn read and zn written, one after the other: the same drives do both
    (with int8 moments, u of CPU and device is 40 bytes more for each moment)
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
from spillway.planning.compute_work import (
    ComputeWork,
    backward_work,
    forward_work,
    rebuilding_on_device,
    update_work,
)
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
    """Seconds per operation."""
    calibrated: bool = False
    """Whether the rates were measured on this node."""


def rank_rates(node: NodeSpec, local_ranks: int, num_nodes: int, compute: str, num_cipher_threads: int = 0) -> Rates:
    """Rates of one rank. Ranks of a node share host memory and disks; devices behind one root port share links.
    `num_cipher_threads`: a rank's threads that encrypt or decrypt spilled bytes; 0: not encrypted."""
    on_cpu = node.device_kind == "Cpu"
    device_share = local_ranks if on_cpu else 1
    link_share = min(local_ranks, node.link.devices_per_root_port)
    core_share = max(1.0, local_ranks / node.num_cores) if on_cpu else 1.0
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
        operation_overhead=node.operation_overhead_seconds * core_share,
        calibrated=node.is_calibrated,
    )


def _encrypted(disk: float, node: NodeSpec, num_cipher_threads: int) -> float:
    """What is left of a disk's rate: every byte goes through the cipher and the disk, one after the other."""
    if num_cipher_threads == 0 or disk == 0:
        return disk
    return 1 / (1 / disk + 1 / (num_cipher_threads * node.cipher_bytes_per_second))


# --- loads of each phase, in seconds per resource ---------------------------------------------------------------------
# A pass is over one micro-batch in order, and over all of them in weight-stationary order.


def forward_loads(work: Workload, rates: Rates, blocks: Blocks, streaming: Streaming = RESIDENT) -> Loads:
    """Loads of one forward pass."""
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
    """Loads of one backward pass."""
    batches, loaded = work.alive(streaming), parameter_loads(work, streaming)
    waits = streaming.boundaries
    inputs = batches * recomputed_input_bytes(work, blocks, waits) if waits is not Policy.KEEP else 0
    spilled = batches * spilled_bytes(work, blocks)
    back = loaded.backward + batches * moved_bytes(work, blocks) + inputs
    back -= spilled if work.in_place else 0  # they are read directly to where backward uses them
    read = loaded.backward_read + spilled
    read += inputs if waits is Policy.NVME else 0
    gradients = batches * cpu_accumulated(work, optimizer, streaming) / work.shards("gradients")
    down = 0.0 if work.in_place else gradients * work.shape.trained_bytes
    accumulate = gradients * (work.shape.trained_bytes + 2 * FLOAT32_BYTES)
    return {
        Resource.COMPUTE: backward_work(work, blocks, optimizer, streaming).seconds(rates)
        + batches * rebuilding_on_device(work, blocks) / rates.device,
        Resource.H2D: back / rates.h2d,
        Resource.READ: read / rates.read if read else 0.0,
        Resource.D2H: down / rates.d2h,
        Resource.CPU: accumulate / rates.cpu,
        Resource.DRAM: (back + read + down + accumulate) / rates.dram,
        Resource.NETWORK: batches * (gather_seconds(work, rates) + scatter_seconds(work, rates)),
    }


def update_loads(work: Workload, rates: Rates, optimizer: OptimizerPlan, streaming: Streaming = RESIDENT) -> Loads:
    """Loads of one update. The CPU updates streamed parameters directly in their homes, so nothing is copied to the
    device, but homes on NVMe are written. If the device's memory is host memory, the same holds for all parameters
    except those that backward has updated: their values are copied once the update is known to be valid."""
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
    """Cost of an update in addition to moving its states, as an equivalent number of moved bytes: for a core, int8
    moments are more work than memory traffic."""
    return QUANTIZING_BYTES * len(work.rule.moments) if work.moments is MomentType.INT8 else 0


def moved_bytes(work: Workload, blocks: Blocks) -> int:
    """Bytes of activations of one micro-batch that leave the device."""
    return work.sum_of("moved", 0, blocks.moved)


def spilled_bytes(work: Workload, blocks: Blocks) -> int:
    """The part of `moved_bytes` that is written to NVMe."""
    return work.sum_of("moved_nvme", 0, blocks.nvme)


def stored_bytes(work: Workload, streaming: Streaming) -> int:
    """Bytes of trained parameters with homes on NVMe, which every update writes."""
    return work.shape.trained_bytes * work.units.trained[streaming.nvme]


def stored_states_bytes(work: Workload, optimizer: OptimizerPlan) -> float:
    """Bytes of optimizer states on NVMe, which every update reads and writes."""
    return optimizer.nvme_share * work.rank_parameters * states_bytes_per_parameter(work, on_cpu=True)


def handed_on_bytes(work: Workload, streaming: Streaming) -> int:
    """Bytes of the boundaries of all micro-batches that leave the device on their way from one segment to the next:
    each is copied out and in again."""
    if streaming.boundaries is Policy.KEEP:
        return 0
    return work.num_micro_batches * sum(work.handed_on_bytes)


@dataclass(frozen=True, slots=True)
class ParameterLoads:
    """Bytes of streamed parameters that one pass brings to the device, averaged over the step's passes."""

    forward: float
    backward: float
    forward_read: float
    """The part of `forward` that comes from NVMe."""
    backward_read: float


NO_LOADS = ParameterLoads(0.0, 0.0, 0.0, 0.0)


def parameter_loads(work: Workload, streaming: Streaming) -> ParameterLoads:
    """Every pass loads all W streamed bytes, except for segments that are still in the slots: at the beginning of
    backward those of the end of forward; at the next forward those of the end of backward, unless an update changed
    them."""
    if not streaming.units:
        return NO_LOADS
    units, passes = work.units, work.num_micro_batches // work.alive(streaming)
    still_there = min(1.0, streaming.num_slots / units.count[streaming.units])
    forward = (1.0 - still_there * (passes - 1) / passes) * units.loaded[streaming.units]
    backward = max(0.0, units.returning[streaming.units] - still_there * units.loaded[streaming.units])
    on_nvme = units.loaded[streaming.nvme] / units.loaded[streaming.units]
    return ParameterLoads(forward, backward, on_nvme * forward, on_nvme * backward)


def gather_seconds(work: Workload, rates: Rates) -> float:
    """Seconds of an all-gather of sharded parameters, which happens once per forward and once per backward of a
    micro-batch."""
    return _exchanged(work, work.shape.parameter_bytes) / rates.network if work.shards("parameters") > 1 else 0.0


def scatter_seconds(work: Workload, rates: Rates) -> float:
    """Seconds of the reduce-scatter of one micro-batch's gradients, if ranks hold only shards of them; else 0."""
    gradients = work.wire_bytes * work.shape.num_trained
    return _exchanged(work, gradients) / rates.network if work.shards("gradients") > 1 else 0.0


def exchange_loads(work: Workload, rates: Rates, in_host: float = 0.0) -> Loads:
    """Loads of the exchange, once per step: the sum of whole gradients (out in the wire's type, back in float32,
    docs/ranks.md) or their reduction into shards; and the gather of parameters that were updated in shards. `in_host`:
    number of accumulated values in host memory, which pass through a CUDA device."""
    copied, shape = 0.0, work.shape
    if work.shards("states") == 1:
        sent = (work.wire_bytes + FLOAT32_BYTES) * shape.num_accumulated
        copied = FLOAT32_BYTES * in_host * work.exchanges_on_device
    else:
        sent = work.wire_bytes * shape.num_trained * (work.shards("gradients") == 1)
        sent += shape.trained_bytes * shape.num_trained * (work.shards("parameters") == 1)
    return {
        Resource.H2D: copied / rates.h2d,
        Resource.D2H: copied / rates.d2h,
        Resource.NETWORK: _exchanged(work, sent) / rates.network,
    }


def exposed_exchange_seconds(
    work: Workload,
    rates: Rates,
    backward_seconds: float = math.inf,
    in_host: float = 0.0,
    forward_seconds: float = math.inf,
) -> float:
    """Seconds of the exchange that one pass of backward, or one of forward, does not hide. Ddp sends a segment's
    gradients as soon as backward has left the segment. But between CPU ranks of one node, the cores that compute send
    them, so nothing is saved. On CUDA devices, forward waits for each segment of parameters that were updated in
    shards, and each micro-batch for the gradients of the segment that its backward leaves last."""
    whole = sum(exchange_loads(work, rates, in_host).values())
    if work.shards("states") == 1:
        is_hidden = work.world_size > work.local_ranks or work.on_cuda
        return _left_over(work, whole, backward_seconds) if is_hidden else whole
    if not work.on_cuda:
        return whole
    last = work.num_micro_batches * work.forward_order[0][0] * scatter_seconds(work, rates)
    return _left_over(work, whole, forward_seconds) + last


def _left_over(work: Workload, whole: float, passing: float) -> float:
    """Seconds of an exchange that takes `whole` seconds, segment by segment, which a pass that takes `passing` seconds
    does not hide."""
    left = (whole * sent - (passing * passed if passed else 0.0) for sent, passed in work.forward_order)
    return max(0.0, *left)


def _exchanged(work: Workload, nbytes: int) -> float:
    """Bytes that one rank sends when `nbytes` go through a ring of all ranks once."""
    return (work.world_size - 1) / work.world_size * nbytes


# --- from loads to seconds --------------------------------------------------------------------------------------------

_COPIES = (Resource.H2D, Resource.D2H)


def phase_seconds(loads: Loads, rates: Rates, overlapped: bool = True) -> float:
    """Seconds of the busiest resource. Copies that use the computing cores, or for which forward waits, are added to
    compute."""
    copies = sum(loads.get(copy, 0.0) for copy in _COPIES)
    if not overlapped:
        return loads.get(Resource.COMPUTE, 0.0) + copies + loads.get(Resource.WRITE, 0.0)
    if rates.copies_use_cores:
        return max(busy_seconds(loads, rates), *loads.values())
    return max(loads.values())


def busy_seconds(loads: Loads, rates: Rates) -> float:
    """Seconds of a phase in which the device computes; the rest is waiting. On a CPU, copies and updates are work of
    the same cores."""
    cores = (Resource.COMPUTE, *_COPIES, Resource.CPU) if rates.copies_use_cores else (Resource.COMPUTE,)
    return sum(loads.get(resource, 0.0) for resource in cores)


def update_seconds(work: Workload, rates: Rates, optimizer: OptimizerPlan, streaming: Streaming = RESIDENT) -> float:
    """Seconds of the update without overlap: for what each share needs, and for its operations."""
    loads = update_loads(work, rates, optimizer, streaming)
    return side_by_side(loads, rates) + update_work(work, optimizer).seconds(rates)


def side_by_side(update: Mapping[Resource, float], rates: Rates) -> float:
    """Seconds of all shares of an update in parallel; also on a CPU device, where the cores share the memory bandwidth
    that bounds all shares. The same drives read and write states, so these two are added."""
    disk = update[Resource.READ] + update[Resource.WRITE]
    shared = update[Resource.DRAM] + update[Resource.COMPUTE] if rates.copies_use_cores else 0.0
    return max(shared, disk, *update.values())


def can_overlap(rates: Rates, optimizer: OptimizerPlan, up_seconds: float, streaming: Streaming = RESIDENT) -> bool:
    """Whether any part of the update can run during the next forward. On a CPU device it cannot, because both use the
    same cores. Nor can it if streamed segments would wait: a lane is first in, first out, so their loads would queue
    behind everything that the update sends to the device."""
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
    """Seconds of the update for which a plan with `overlap` does not wait, because they pass during the next step's
    first forward pass.

    Chunks are updated in forward order, in U seconds for all. Forward, in F seconds, reaches segment i after the
    segments before it. The step waits for the largest value, over all i, of U x (share of the parameters up to and
    including i) - F x (share of forward before i), and at least for the seconds by which update and forward together
    use one resource longer than forward takes. Parameters that backward has updated, the last in forward order, are
    only sent to the device.
    """
    forward, update = forward_loads(work, rates, blocks, streaming), update_loads(work, rates, optimizer, streaming)
    queues = blocks.moved and update[Resource.D2H]  # activations leaving the device would queue behind states
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
    """Number of parameters that the CPU can update during the last pass of backward in addition to its other work. Out
    of place, an update moves as many bytes as in place."""
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
    """Bytes per second that the CPU's part of the update gets: what the cores can stream, but at most the bandwidth of
    host memory that the update's copies and writes leave, averaged over the whole update."""
    loads = update_loads(work, rates, optimizer, streaming)
    seconds = max(loads.values())
    if not seconds:
        return rates.cpu
    copied = loads[Resource.DRAM] * rates.dram - loads[Resource.CPU] * rates.cpu
    return min(rates.cpu, rates.dram - copied / seconds)


LAUNCHING_CORES = 2
"""Cores that a rank with a discrete device needs to launch its work: one for forward and its Python code, one for
backward in autograd's thread."""


def update_threads(num_cores: int, local_ranks: int, copies_use_cores: bool) -> int:
    """CPU threads of one rank's update: its part of the node's cores, minus those that launch the device's work. On a
    CPU device the same cores compute and update, one after the other."""
    cores = num_cores // local_ranks
    return max(1, cores if copies_use_cores else cores - LAUNCHING_CORES)


def balanced_streamed_share(work: Workload, rates: Rates) -> float:
    """The g of c + g = 1, with nothing resident, at which the update is fastest; 0 if that saves less than 2 %.

    Every load is linear in g: the CPU's falls, those of the links rise, that of host memory falls on a GPU node (where
    a streamed parameter moves 20.25 bytes, one updated by the CPU 32). The smallest maximum of lines is where two of
    them cross. (Deep Optimizer States, arXiv 2410.21316, section 4, real-valued instead of every k-th subgroup.)
    """
    share, seconds = _balanced(work, rates)
    return share if seconds < 0.98 * update_seconds(work, rates, _split(0.0)) else 0.0


def least_update_seconds(work: Workload, rates: Rates) -> float:
    """The least seconds of an update with nothing resident: no split between CPU and device is faster."""
    return min(_balanced(work, rates)[1], update_seconds(work, rates, _split(0.0)))


@lru_cache(maxsize=256)
def _balanced(work: Workload, rates: Rates) -> tuple[float, float]:
    """The fastest g of c + g = 1, among 0 and the crossings of two loads with both paths in use; and its seconds."""
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
"""The smallest share of a path at which loads are computed: with both paths in use, both directions of the link are
busy."""


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
    """Predicts one optimizer step. `overlapped`: spilled bytes may be copied while forward continues; `steps` limits
    what a short job writes per day."""
    forward = forward_loads(work, rates, blocks, streaming)
    backward = backward_loads(work, rates, blocks, optimizer, streaming)
    in_host = cpu_accumulated(work, optimizer, streaming)
    update, exchange = update_loads(work, rates, optimizer, streaming), exchange_loads(work, rates, in_host)
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
    exchanging = exposed_exchange_seconds(
        work, rates, phase_seconds(backward, rates), in_host, phase_seconds(forward, rates)
    )
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
            num_passes * work.alive(streaming) * rebuilding_on_device(work, blocks),
        ),
        Phase.OPTIMIZER: (1, update, update_work(work, optimizer), update[Resource.COMPUTE]),
        Phase.EXCHANGE: (1, exchange_loads(work, ONE, cpu_accumulated(work, optimizer, streaming)), ComputeWork(), 0.0),
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
"""Rates with which the seconds of a load are its bytes."""
BY_BYTES = tuple(resource for resource in Resource if resource is not Resource.COMPUTE)
DEVICE_BYTES = "device"
"""Key of the bytes that the device moves for the update of streamed and resident states, and for rebuilds."""


def pass_seconds(
    work: Workload, rates: Rates, forward: Loads, backward: Loads, streaming: Streaming, overlapped: bool
) -> float:
    """Seconds of forward and backward of one pass. With a single slot, nothing is computed while parameters are
    loaded."""
    seconds = phase_seconds(forward, rates, overlapped) + phase_seconds(backward, rates)
    if streaming.units and streaming.num_slots == 1 and not rates.copies_use_cores:
        loaded = parameter_loads(work, streaming)
        seconds += (loaded.forward + loaded.backward) / rates.h2d
    return seconds


def written_bytes(work: Workload, optimizer: OptimizerPlan, blocks: Blocks, streaming: Streaming) -> float:
    """Bytes that one step writes to NVMe."""
    num_passes = work.num_micro_batches // work.alive(streaming)
    boundaries = handed_on_bytes(work, streaming) if streaming.boundaries is Policy.NVME else 0
    activations = work.num_micro_batches * spilled_bytes(work, blocks)
    states = stored_states_bytes(work, optimizer)
    return activations + num_passes * boundaries + stored_bytes(work, streaming) + states


def _summed(phases: Sequence[tuple[Mapping[Resource, float], int]]) -> Loads:
    return {resource: sum(count * loads.get(resource, 0.0) for loads, count in phases) for resource in Resource}


def _link_bytes(rates: Rates, passes: Loads, update: Loads, duplex: float) -> dict[str, int]:
    """Bytes of one step by link. `duplex` makes the update's copies slower, but does not multiply their bytes."""
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
