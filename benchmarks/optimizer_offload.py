"""The update of interleaved optimizer offload against its rivals and its bound: *modelled*, without a GPU.

First the model must prove itself: it has to reproduce what the authors of Deep Optimizer States published (six runs, 54
figures, published_optimizer_offload.py) within 20 %, or nothing else is printed. Nine constants are fitted to those
runs (CONSTANTS: four per class of GPU, one shared). From them the model predicts the effects of model size, residency,
non-blocking copies and interleaving.

Then, on the same two nodes, for models of 7 B to 20 B, sequence 2048, micro-batch 1 and four ranks on one node:

  ours       the planner's own plan (placement Interleaved: nothing resident), executed in virtual time by the pipeline
             that trains, on tracing lanes. Backward is represented by its duration and yields gradients layer by layer;
             the norm comes before the update, as with clipping
  bound      the least of max(CPU, H2D, D2H, host memory) over all shares (step_time.least_update_seconds), for the
             bytes that ours moves: it, too, leaves the upper halves of streamed masters on the device
  whole      ours with masters streamed whole, at the best share for that: shows what splitting them gains
  stride     the paper's assignment, every k-th chunk to the GPU, the best of k = 2..10, in the same pipeline with the
             same chunks, and with the CPU path of the published code: 50 bytes of host memory a parameter, not 32
  DeepSpeed  0.19.8: non-blocking gradient copies, then 50 bytes per parameter on the CPU, with nothing in parallel

All figures are exposed update seconds: what the iteration takes beyond forward and backward. Nothing is hidden behind
the next forward, although ours can be (memory.advanced.optimizer.overlap). What DeepSpeed's gradient copies leave
exposed in backward does not count for DeepSpeed; what ours leave counts for ours. The CPU lane runs at the rate that
the copies leave it in host memory (step_time.beside_copies). The column "our path, by stride" is the stride with our
CPU path and split masters: the lead of ours over it is due to the real-valued share alone. The last three columns are
ratios of whole iterations, with forward and backward as modelled: the gain of non-blocking copies, the further gain of
the stride, and the further gain of ours.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch.nn import Parameter

import paired
from published_optimizer_offload import MODELS, NUM_RANKS, ROWS, SEQUENCE_LENGTH, STRIDE, GpuClass, Model, Phases, Row
from spillway.api.training_job import TrainingJob
from spillway.plan import MemoryPlan, OptimizerPlan
from spillway.planning.candidates import rates_of, workload
from spillway.planning.hardware import NodeSpec, resolve_node
from spillway.planning.planner import ask, make_plan
from spillway.planning.step_time import Rates, balanced_streamed_share, beside_copies, least_update_seconds
from spillway.planning.workload import Workload
from spillway_trainer.optimizer.plain import Hyperparameters
from spillway_trainer.optimizer_offload import OptimizerOffload
from spillway_trainer.optimizer_offload.assign import STRIDES, Assignment, assign_by_size, stride
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.lanes import Lane, Region

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from fakes.tracing import TracedEvent, TracingLanes

DEEPSPEED_BYTES, OUR_BYTES, STATE_BYTES, UPLOAD_BYTES = 50, 30, 12, 2
"""bytes per parameter: of host memory in DeepSpeed's CPU step (scale pass, update, cast, pageable upload), and in ours;
over the link, each way, when streamed whole; uploaded when updated by the CPU"""
SPLIT_BYTES = STATE_BYTES - 4 + 17 / 8
"""bytes per parameter over the link, each way, when streamed with the master split"""
LIVE_PARAMETERS = 1e9
"""stage3_max_live_parameters and stage3_max_reuse_distance, DeepSpeed's defaults: this many parameters are not gathered
again. The model assumes that they take no time at all in forward. The A100's runs need something like this, because 7B
is a third faster per parameter than 20B; it causes the largest error"""
AT_MOST = {"model_error_max": 0.20, "modelled_vs_bound_max": 1.20}
AT_LEAST = {"modelled_vs_stride_min": 1.15, "modelled_vs_deepspeed_min": 2.0}


@dataclass(frozen=True, slots=True)
class Constants:
    """Constants of one class of GPU node, fitted to ROWS so that the largest error is least."""

    forward: float
    """seconds per parameter beyond LIVE_PARAMETERS"""
    blocking_gradient: float
    """seconds in backward per parameter that the CPU updates, if gradient copies block"""
    cpu: float
    """bytes per second that the node's cores stream; fitted to the base steps"""
    dram: float
    """bytes per second of cores and copies together; fitted to the interleaved steps"""
    flowing_gradient: float = 76e-12
    """seconds in backward per parameter that the CPU updates, if gradient copies do not block; same for all classes"""


CONSTANTS: Mapping[GpuClass, Constants] = {
    "H100": Constants(forward=15.9e-12, blocking_gradient=0.98e-9, cpu=337e9, dram=440e9),
    "A100": Constants(forward=50.0e-12, blocking_gradient=0.728e-9, cpu=147e9, dram=163e9),
}


def node_of(gpu: GpuClass) -> NodeSpec:
    """Returns the authors' node: fitted rates of host memory, four devices, 503 GB; the link's peak as logged on the
    H100 node, and from the catalog for the A100 node; a root port for each device (assumed); the rest from the catalog.
    """
    catalog = resolve_node("4xh100" if gpu == "H100" else "4xa100")
    link = replace(catalog.link, devices_per_root_port=1)
    if gpu == "H100":
        link = replace(link, h2d_bytes_per_second=55.2e9, d2h_bytes_per_second=55.2e9)
    found = CONSTANTS[gpu]
    return replace(
        catalog, link=link, cpu_bytes_per_second=found.cpu, dram_bytes_per_second=found.dram, host_bytes=int(503e9)
    )


# --- the published runs -----------------------------------------------------------------------------------------------


def forward_seconds(gpu: GpuClass, num_parameters: float) -> float:
    return CONSTANTS[gpu].forward * (num_parameters - LIVE_PARAMETERS)


def backward_seconds(gpu: GpuClass, num_parameters: float, gradient: float, on_cpu: float) -> float:
    """Seconds of backward: recomputation and two products, each as long as forward, and `gradient` seconds for each of
    a rank's parameters whose gradient goes to the CPU, which is the share `on_cpu`."""
    return 3 * forward_seconds(gpu, num_parameters) + gradient * on_cpu * num_parameters / NUM_RANKS


def published_step_seconds(gpu: GpuClass, num_parameters: float, on_cpu: float, streamed: float) -> float:
    """Seconds that the bytes need if DeepSpeed's CPU step updates the share `on_cpu`, while the published code streams
    the share `streamed`."""
    node = node_of(gpu)
    link = node.link.duplex_efficiency * node.link.h2d_bytes_per_second
    return num_parameters / NUM_RANKS * max(
        DEEPSPEED_BYTES * on_cpu * NUM_RANKS / node.cpu_bytes_per_second,
        (DEEPSPEED_BYTES * on_cpu + 2 * STATE_BYTES * streamed) * NUM_RANKS / node.dram_bytes_per_second,
        (UPLOAD_BYTES * on_cpu + STATE_BYTES * streamed) / link if streamed else 0.0,
    )  # fmt: skip


def modelled(row: Row) -> tuple[Phases, Phases, Phases]:
    """Returns the modelled phases of `row` in its three forms: base, flush, interleaved."""
    found, free = CONSTANTS[row.gpu], 1.0 - row.resident_share
    forward, on_cpu = forward_seconds(row.gpu, row.num_parameters), free * (1 - 1 / STRIDE)
    serial = published_step_seconds(row.gpu, row.num_parameters, free, 0.0)
    both = published_step_seconds(row.gpu, row.num_parameters, on_cpu, free / STRIDE)

    def backward(gradient: float, share: float) -> float:
        return backward_seconds(row.gpu, row.num_parameters, gradient, share)

    return (
        Phases(forward, backward(found.blocking_gradient, free), serial),
        Phases(forward, backward(found.flowing_gradient, free), serial),
        Phases(forward, backward(found.flowing_gradient, on_cpu), both),
    )


def model_error(rows: Sequence[Row] = ROWS) -> float:
    """Returns the largest |modelled / published - 1| of all phases of all forms of all rows, and prints all ratios."""
    print("modelled over published seconds      forward                 backward                step")
    print(f"{'':>30}{('base   flush  inter.  ') * 3}")
    errors = []
    for row in rows:
        ratios = [
            tuple(ours / theirs for ours, theirs in zip(made, published, strict=True))
            for made, published in zip(modelled(row), (row.base, row.flush, row.interleaved), strict=True)
        ]
        resident = f", {row.resident_share:.0%} resident" if row.resident_share else ""
        cells = "  ".join("".join(f"{form[phase]:<7.2f}" for form in ratios) for phase in range(3))
        print(f"{row.gpu + ' ' + row.model + resident:<28}  {cells}")
        errors += [abs(ratio - 1.0) for form in ratios for ratio in form]
    return max(errors)


# --- virtual time -----------------------------------------------------------------------------------------------------

SCALE = 64
"""sizes and rates are divided by this: virtual seconds are those of the full size; host memory is reserved, not used"""


@dataclass(frozen=True, slots=True)
class Case:
    """One model on one class of nodes, and the planner's own plan for it."""

    gpu: GpuClass
    model: Model
    work: Workload
    rates: Rates
    optimizer: OptimizerPlan

    @property
    def rank_parameters(self) -> float:
        return self.work.rank_parameters

    def backward_seconds(self, on_cpu: float) -> float:
        return backward_seconds(self.gpu, self.model.num_parameters, CONSTANTS[self.gpu].flowing_gradient, on_cpu)


@cache
def case(gpu: GpuClass, model: Model) -> Case:
    """Returns the case of `model` on `gpu`. Raises SystemExit if no plan fits: the published runs fitted their node."""
    document = {
        "apiVersion": "spillway.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "modelled"},
        "spec": {
            "model": {"config": model.document()},
            "data": {"text": {"claim": "corpus"}},
            "training": {
                "steps": 100, "sequenceLength": SEQUENCE_LENGTH, "globalBatchSize": NUM_RANKS, "microBatchSize": 1,
            },
            "parallelism": {"devicesPerNode": NUM_RANKS, "strategy": "Zero3"},
            "memory": {
                "advanced": {
                    "optimizer": {"placement": "Interleaved"},
                    "activations": {"policy": "Recompute"},
                    "parameters": {"placement": "Resident"},
                },
            },
        },
    }  # fmt: skip
    job, node = TrainingJob.model_validate(document), node_of(gpu)
    plan = make_plan(job, node, explained=False)
    if not isinstance(plan, MemoryPlan):
        raise SystemExit(f"{gpu} {model.name}: {plan.nearest}, missing {plan.missing_bytes}")
    question = ask(job, node)
    return Case(gpu, model, workload(question, "Zero3"), rates_of(question), plan.optimizer)


@dataclass(frozen=True, slots=True)
class CpuPath:
    """What the CPU's update of a parameter costs in bytes, and how other parameters are streamed meanwhile."""

    by_cores: int
    in_memory: int
    """bytes of host memory traffic, including the upload"""
    norm: bool
    """whether the CPU also reads the gradients for their norm, between backward and update"""
    splits: bool
    """whether streamed parameters leave the upper halves of their masters on the device"""

    @property
    def streamed(self) -> float:
        """Bytes of a streamed parameter over the link, each way."""
        return SPLIT_BYTES if self.splits else STATE_BYTES


OURS = CpuPath(OUR_BYTES, OUR_BYTES + UPLOAD_BYTES, norm=True, splits=True)
OURS_WHOLE = replace(OURS, splits=False)
PUBLISHED = CpuPath(DEEPSPEED_BYTES, DEEPSPEED_BYTES, norm=False, splits=False)


def virtual_update(case: Case, optimizer: OptimizerPlan, cpu_rate: float, path: CpuPath, by: Assignment) -> float:
    """Exposed update seconds of one rank: from when backward alone would end, to the end of flush.

    During backward the CPU lane gets the host memory rate that gradient copies at full rate leave; for the norm, when
    nothing is copied, all that the cores can stream; during the update `cpu_rate` (bytes per second). The result is at
    least what host memory takes for all bytes that the update moves. Raises SystemExit at a race.
    """
    rates, streams = case.rates, optimizer.streamed_share > 0.0
    of_cpu = OUR_BYTES / path.by_cores / SCALE  # the pipeline counts OUR_BYTES a parameter
    lane_rates = {
        Lane.CPU: min(rates.cpu, rates.dram - rates.d2h) * of_cpu,
        Lane.H2D: rates.h2d * (rates.duplex if streams else 1.0) / SCALE,
        Lane.D2H: rates.d2h * (rates.duplex if streams else 1.0) / SCALE,
        Lane.COMPUTE: rates.device / SCALE,
    }
    weights, ledger = rank_weights(case), DeviceLedger(None)
    lanes = TracingLanes(HostSlab(int(20 * case.rank_parameters / SCALE)), ledger, lane_rates, run=False)
    scaled = optimizer.model_copy(update={"chunk_parameters": max(1, optimizer.chunk_parameters // SCALE)})
    offload = OptimizerOffload(weights, {}, Hyperparameters(), scaled, lanes, ledger, by=by, splits=path.splits)
    begin, backward = computed_seconds(lanes), case.backward_seconds(optimizer.cpu_share)
    layer = Region(int(backward / len(weights) * lane_rates[Lane.COMPUTE]), "a layer's backward")
    for name, weight in reversed(weights):
        lanes.compute(writes=[layer], label="backward")
        offload.take(name, torch.empty_like(weight))
    if path.norm:
        lanes.set_rate(Lane.CPU, rates.cpu * of_cpu)
        offload.norm()
    lanes.set_rate(Lane.CPU, cpu_rate * of_cpu)
    offload.step(1e-3, 1.0)
    offload.flush()
    if races := lanes.schedule().races:
        raise SystemExit(f"{case.gpu} {case.model.name}: a race in the schedule: {races[0]}")
    in_memory = path.in_memory * optimizer.cpu_share + 2 * path.streamed * optimizer.streamed_share
    return max(lanes.host_seconds - begin - backward, in_memory * case.rank_parameters / rates.dram)


def computed_seconds(lanes: TracingLanes) -> float:
    event = lanes.computed()
    assert isinstance(event, TracedEvent)
    return event.end_seconds


def rank_weights(case: Case) -> list[tuple[str, Parameter]]:
    """Returns a rank's shard: one flat bfloat16 parameter per layer, without memory."""
    size = int(case.rank_parameters / SCALE / case.model.num_layers)
    return [
        (f"layer{index}", Parameter(torch.empty(size, dtype=torch.bfloat16, device="meta")))
        for index in range(case.model.num_layers)
    ]


# --- the contestants --------------------------------------------------------------------------------------------------


def ours(case: Case) -> float:
    return virtual_update(
        case, case.optimizer, beside_copies(case.work, case.rates, case.optimizer), OURS, assign_by_size
    )


def with_whole_masters(case: Case) -> float:
    """Seconds of ours if masters are streamed whole, as in float16, at the best share for that."""
    work = replace(case.work, is_float16=True)
    share = balanced_streamed_share(work, case.rates)
    optimizer = case.optimizer.model_copy(update={"cpu_share": 1.0 - share, "streamed_share": share})
    return virtual_update(case, optimizer, beside_copies(work, case.rates, optimizer), OURS_WHOLE, assign_by_size)


def by_stride(case: Case, every: int, path: CpuPath) -> float:
    """Seconds if every k-th chunk is streamed (k is `every`), in the same pipeline with the same chunks."""
    rates, streamed = case.rates, 1.0 / every
    on_cpu = 1.0 - streamed
    copied = (path.in_memory - path.by_cores) * on_cpu + 2 * path.streamed * streamed
    seconds = max(
        path.by_cores * on_cpu / rates.cpu,
        (path.by_cores * on_cpu + copied) / rates.dram,
        (UPLOAD_BYTES * on_cpu + path.streamed * streamed) / (rates.duplex * rates.h2d),
    )
    split = case.optimizer.model_copy(update={"cpu_share": on_cpu, "streamed_share": streamed})
    return virtual_update(case, split, min(rates.cpu, rates.dram - copied / seconds), path, stride(every))


def best_stride(case: Case, path: CpuPath, strides: Sequence[int]) -> tuple[float, int]:
    """Returns the seconds of the best stride, and its k."""
    return min((by_stride(case, every, path), every) for every in strides)


def deepspeed(case: Case) -> float:
    """Seconds of DeepSpeed 0.19.8: one pass after another over all parameters, while link and GPU are idle."""
    return DEEPSPEED_BYTES * case.rank_parameters / case.rates.cpu


def iteration(case: Case, update: float, on_cpu: float, blocking: bool = False) -> float:
    """Seconds of forward, backward and `update`."""
    found, count = CONSTANTS[case.gpu], case.model.num_parameters
    gradient = found.blocking_gradient if blocking else found.flowing_gradient
    return forward_seconds(case.gpu, count) + backward_seconds(case.gpu, count, gradient, on_cpu) + update


@dataclass(frozen=True, slots=True)
class Compared:
    """Exposed update seconds of one case."""

    case: Case
    bound: float
    ours: float
    stride: float
    every: int
    """the best stride"""
    stride_on_our_path: float
    whole: float
    """ours, with masters streamed whole"""
    deepspeed: float

    def line(self) -> str:
        case, base = self.case, iteration(self.case, self.deepspeed, 1.0, blocking=True)
        flush = iteration(case, self.deepspeed, 1.0)
        interleaved = iteration(case, self.stride, 1.0 - 1.0 / self.every)
        mine = iteration(case, self.ours, case.optimizer.cpu_share)
        return (
            f"{case.gpu} {case.model.name:<5} {case.optimizer.streamed_share:6.2f}{self.bound:9.3f}{self.ours:8.3f}"
            f"{self.stride:8.3f} k={self.every:<2}{self.stride_on_our_path:8.3f}{self.whole:8.3f}{self.deepspeed:9.3f}|"
            f"{self.ours / self.bound:6.3f}{self.whole / self.ours:7.2f}{self.stride / self.ours:7.2f}"
            f"{self.deepspeed / self.ours:6.2f} |"
            f"{base / flush:5.2f}{flush / interleaved:7.2f}{flush / mine:7.2f}"
        )


HEAD = """
*modelled*: exposed update seconds of one rank                           | ratios of them          | of iterations
                                               our path,  ours,   Deep   | ours/whole/stride/DS/   | base/  DS/    DS/
           g share   bound    ours    stride   by stride  whole   Speed  | bound  ours   ours  ours| DS  stride ours"""


def compared(case: Case, strides: Sequence[int]) -> Compared:
    stride_seconds, every = best_stride(case, PUBLISHED, strides)
    return Compared(
        case,
        least_update_seconds(case.work, case.rates),
        ours(case),
        stride_seconds,
        every,
        best_stride(case, OURS, strides)[0],
        with_whole_masters(case),
        deepspeed(case),
    )


def figures(cases: Sequence[Case], strides: Sequence[int] = STRIDES) -> dict[str, float]:
    """Compares all cases, prints a line for each, and returns the figures."""
    print(HEAD)
    found = []
    for each in cases:
        found.append(compared(each, strides))
        print(found[-1].line(), flush=True)
    return {
        "modelled_vs_bound_max": max(each.ours / each.bound for each in found),
        "modelled_vs_stride_min": min(each.stride / each.ours for each in found),
        "modelled_vs_stride_on_our_path_min": min(each.stride_on_our_path / each.ours for each in found),
        "modelled_vs_whole_masters_min": min(each.whole / each.ours for each in found),
        "modelled_vs_deepspeed_min": min(each.deepspeed / each.ours for each in found),
    }


def measure(quick: bool) -> dict[str, float]:
    error = model_error()
    if error > AT_MOST["model_error_max"]:
        return {"model_error_max": error}  # a model that misses the published runs cannot predict others
    models = (MODELS[0], MODELS[-1]) if quick else MODELS
    cases = [case(gpu, model) for gpu in CONSTANTS for model in models]
    return {"model_error_max": error, **figures(cases, (2, 3, 10) if quick else STRIDES)}


if __name__ == "__main__":
    assert __doc__ is not None
    paired.main("optimizer_offload", __doc__, measure, at_most=AT_MOST, at_least=AT_LEAST)
