"""Corrects a node's rates by comparing measured with predicted times. Pure.

    probe     small training steps measured -> `fitted`: one price for each unit of ComputeWork (compute_work.py)
    training  the steps of a run, and what its plan says they ask for -> `corrections`: how much slower than planned
              each resource was -> `corrected`: the node with those rates

A run measures whole phases, not single prices, so every figure is corrected by a factor, and figures that determine the
same phase share one. Factors are computed from medians over steps; a factor beyond LARGEST_FACTOR is cut to it and
marked (Correction.is_cut).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import combinations

from spillway.errors import UserError
from spillway.metrics import Phase, StepMetrics
from spillway.plan import Overlap
from spillway.planning.hardware import NodeSpec
from spillway.planning.step_time import DEVICE_BYTES, Rates, Resource, busy_seconds, phase_seconds, side_by_side

WARM_UP_STEPS = 2
"""First steps of every attempt; they are left out, because memory pages are touched, kernels chosen and files
opened."""
LEAST_STEPS = 5
"""Fewest steps after warm-up that are evaluated; a median of fewer says little."""
LARGEST_FACTOR = 20.0
"""Largest deviation from the plan, in either direction; beyond it, something other than the resource was measured."""
LEAST_SHARE = 0.02
"""Smallest share of the step's time that is evaluated; less cannot be distinguished from noise."""
LEAST_BYTES = 2**20
"""Fewest bytes per step that are evaluated; fewer measure the cost of an operation, not a rate."""

Work = Mapping[str, Mapping[str, float]]
"""Prediction.work: phase -> name of an amount -> amount."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Medians over the steps of a run."""

    num_steps: int
    step_seconds: float
    phase_seconds: Mapping[str, float]
    lane_seconds: Mapping[str, float]
    moved_bytes: Mapping[str, float]


def measured_step(attempts: Sequence[Sequence[StepMetrics]]) -> MeasuredStep:
    """Returns the medians over the steps of all attempts; `attempts` has the steps of each attempt in order. Skipped
    steps and the first WARM_UP_STEPS of an attempt do not count.

    Raises UserError when fewer than LEAST_STEPS are left.
    """
    steps = [step for attempt in attempts for step in attempt[WARM_UP_STEPS:] if not step.skipped]
    if len(steps) < LEAST_STEPS:
        raise UserError(
            f"only {len(steps)} step times can be used, because the first {WARM_UP_STEPS} steps of each attempt and "
            f"skipped steps are left out; at least {LEAST_STEPS} are required, so train longer"
        )
    return MeasuredStep(
        num_steps=len(steps),
        step_seconds=statistics.median(step.step_seconds for step in steps),
        phase_seconds=_medians([step.phase_seconds for step in steps]),
        lane_seconds=_medians([step.lane_seconds for step in steps]),
        moved_bytes=_medians([step.moved_bytes for step in steps]),
    )


def _medians(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = sorted({name for figure in figures for name in figure})
    return {name: statistics.median(figure.get(name, 0.0) for figure in figures) for name in names}


# --- training: corrections --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Correction:
    """Predicted and measured seconds of one resource of a node, and their ratio."""

    resource: str
    """One of: compute, update, update on the CPU, network, h2d, d2h, disk read, disk write."""
    predicted_seconds: float
    measured_seconds: float
    factor: float
    """Measured over predicted seconds, cut to LARGEST_FACTOR in either direction; rates are divided by it, fixed costs
    are multiplied by it."""

    @property
    def is_cut(self) -> bool:
        return self.factor in {LARGEST_FACTOR, 1.0 / LARGEST_FACTOR}


COMPUTE, UPDATE, NETWORK = "compute", "update", "network"
CPU_UPDATE = "update on the CPU"
"""The CPU's part of the update, for a discrete device: there only the CPU lane measures the update."""
H2D, D2H, READ, WRITE = "h2d", "d2h", "disk read", "disk write"
_LANES = {READ: "nvme_read", WRITE: "nvme_write", H2D: "h2d", D2H: "d2h"}


class _Told(Enum):
    """How compute and update are distinguished in measurements."""

    BY_PHASES = auto()
    """The phase optimizer measures the update, and no other phase does."""
    BY_LANE = auto()
    """The CPU lane's busy time measures the update, because the phase also waits for the disk, or ends before the
    update."""
    BY_SUM = auto()
    """Backward contains no update; the phases forward, wait and optimizer together measure forward and the update."""
    TOGETHER = auto()
    """The update runs in all phases, so compute and update share one factor."""
    COMPUTE_ALONE = auto()
    """Only compute is measured, by backward."""
    NOTHING = auto()


def _told(work: Work, rates: Rates, overlap: Overlap) -> _Told:
    """Returns how compute and update can be distinguished. On a discrete device, an update that overlaps forward takes
    no time from it. On a CPU both use the same cores, so neither phase shows the time of its work alone, but the sum of
    both is right."""
    update = work.get(Phase.OPTIMIZER, {})
    if overlap == "None":
        return _Told.BY_LANE if update.get(Resource.READ) else _Told.BY_PHASES
    if not rates.copies_use_cores:
        return _Told.BY_LANE
    forward = work.get(Phase.FORWARD, {})
    waits = [forward.get(name) for name in (Resource.H2D, Resource.D2H, *_DISK)] + [update.get(name) for name in _DISK]
    if any(waits):  # the phase wait does not only wait for the update
        return _Told.COMPUTE_ALONE if overlap == "Forward" else _Told.NOTHING
    return _Told.BY_SUM if overlap == "Forward" else _Told.TOGETHER


_DISK = (Resource.READ, Resource.WRITE)


def corrections(work: Work, rates: Rates, step: MeasuredStep, overlap: Overlap = "None") -> list[Correction]:
    """Returns how far each resource deviated from `rates`, the rates with which the planner would plan the run today.
    Leaves out resources that the run did not use, or used too little to tell, and those that `not_told` names.
    `overlap` is the plan's, but Forward instead of Backward if no parameter is updated during backward."""
    cores = _of_cores(work, rates, step, _told(work, rates, overlap))
    network = _network(work, rates, step)
    disk = _disk(work, rates, step, overlap)
    return [*disk, *_links(rates, step), *cores, *([] if network is None else [network])]


def not_told(work: Work, rates: Rates, overlap: Overlap) -> list[str]:
    """Returns the rates that a run used but cannot correct, each with the reason."""
    told, found = _told(work, rates, overlap), []
    if told is _Told.COMPUTE_ALONE:
        found.append(
            "update: the update ran on the same cores as forward, and forward also waited for copies or the disk, so "
            "the time of the update alone is not known"
        )
    if told is _Told.NOTHING:
        found.append(
            "compute, update: the update ran on the same cores as backward and forward, which also waited for copies "
            "or the disk, so the time of each alone is not known"
        )
    if told is _Told.BY_LANE and not rates.copies_use_cores and work.get(Phase.OPTIMIZER, {}).get(DEVICE_BYTES):
        found.append("device memory: the device's part of the update was not measured on its own")
    if _disk_is_shared(work):
        found.append(
            "disk read, disk write: optimizer states were read and written at the same time, and activations or "
            "parameters used the disk at other times, so the time of reads and of writes alone is not known"
        )
    return found


def _links(rates: Rates, step: MeasuredStep) -> Iterator[Correction]:
    """Yields the corrections of copies to and from the device. On a CPU, copies share the cores with compute, so the
    time of their lanes says more about compute; there they are corrected by compute's factor (`corrected`)."""
    if not rates.copies_use_cores:
        yield from _of_lanes({H2D: rates.h2d, D2H: rates.d2h}, step)


def _of_lanes(planned: Mapping[str, float], step: MeasuredStep) -> Iterator[Correction]:
    """Yields a correction for each resource in `planned` (resource -> bytes per second): the seconds of its lane's
    bytes at that rate, compared with the seconds in which the lane was busy."""
    for resource, rate in planned.items():
        nbytes, seconds = _of_lane(_LANES[resource], step)
        if seconds:
            yield _correction(resource, nbytes / rate, seconds)


def _of_lane(lane: str, step: MeasuredStep) -> tuple[float, float]:
    """Returns the bytes and busy seconds of a lane; 0 seconds if too few bytes were moved to tell."""
    nbytes = step.moved_bytes.get(lane, 0.0)
    return nbytes, step.lane_seconds.get(lane, 0.0) if nbytes >= LEAST_BYTES else 0.0


def _disk(work: Work, rates: Rates, step: MeasuredStep, overlap: Overlap) -> Iterator[Correction]:
    """Yields the corrections of disk reads and writes. With optimizer states on NVMe, one drive reads and writes at the
    same time, so a lane's busy seconds are not the time that its bytes take alone. Together, reads and writes take at
    most as long as both lanes were busy, and at most as long as the update: both get the same factor from that."""
    planned = {READ: rates.read, WRITE: rates.write}
    if not work.get(Phase.OPTIMIZER, {}).get(Resource.READ):
        yield from _of_lanes(planned, step)
    elif not _disk_is_shared(work):
        lanes = {name: _of_lane(_LANES[name], step) for name in planned}
        predicted = {name: nbytes / planned[name] for name, (nbytes, seconds) in lanes.items() if seconds}
        update = step.phase_seconds.get(Phase.OPTIMIZER, 0.0) if overlap == "None" else step.step_seconds
        together = min(sum(seconds for _, seconds in lanes.values()), update)
        for name, seconds in predicted.items():
            yield _correction(name, seconds, together * seconds / sum(predicted.values()))


def _disk_is_shared(work: Work) -> bool:
    """Whether the disk is used both by optimizer states, which are read and written at the same time, and by forward or
    backward."""
    passes = (work.get(phase, {}) for phase in (Phase.FORWARD, Phase.BACKWARD))
    states = work.get(Phase.OPTIMIZER, {}).get(Resource.READ)
    return bool(states) and any(amounts.get(name) for amounts in passes for name in _DISK)


def _of_cores(work: Work, rates: Rates, step: MeasuredStep, told: _Told) -> Iterator[Correction]:
    """Yields the corrections of compute and update. Each has a phase of its own and, on a CPU, a share of the other's
    phase: gradients are added up at the rate of updates during backward, and the operations of an update cost as much
    as those of compute. So the factors solve

        compute x passes.compute + update x passes.update = measured passes
        compute x optimizer.compute + update x optimizer.update = measured optimizer

    if phases tell the two apart. With BY_SUM, forward moves from the first line to the second, with the time it waited.
    """
    optimizer = _planned_optimizer(work.get(Phase.OPTIMIZER, {}), rates)
    forward, backward = (_planned_pass(work.get(phase, {}), rates) for phase in (Phase.FORWARD, Phase.BACKWARD))
    took = {phase: step.phase_seconds.get(phase, 0.0) for phase in Phase}
    least = LEAST_SHARE * step.step_seconds
    in_passes, in_update = took[Phase.FORWARD] + took[Phase.BACKWARD], took[Phase.OPTIMIZER]
    beside_forward = took[Phase.FORWARD] + took[Phase.WAIT] + took[Phase.OPTIMIZER]
    if told is _Told.BY_PHASES:
        yield from _of_pair(forward + backward, optimizer, in_passes, in_update, least)
    elif told is _Told.BY_SUM:
        yield from _of_pair(backward, forward + optimizer, took[Phase.BACKWARD], beside_forward, least)
    elif told is _Told.TOGETHER:
        planned, measured = forward + backward + optimizer, beside_forward + took[Phase.BACKWARD]
        factor = measured / planned.sum if planned.sum else 1.0
        yield from _told_of(planned, compute=factor, update=factor)
    elif told is _Told.COMPUTE_ALONE:
        yield from _of_pair(backward, _Planned(0.0, 0.0), took[Phase.BACKWARD], 0.0, least)
    elif told is _Told.BY_LANE:
        nbytes, seconds = _of_lane("cpu", step)
        update = seconds * rates.cpu / nbytes if seconds >= max(least, _SHORTEST) else 0.0
        if update:
            resource = UPDATE if rates.copies_use_cores else CPU_UPDATE
            yield _correction(resource, nbytes / rates.cpu, seconds)
        passes = forward + backward
        if passes.compute and in_passes >= least:
            compute = max(0.0, in_passes - (update or 1.0) * passes.update)
            yield _correction(COMPUTE, passes.compute, compute)


_SHORTEST = 1e-9
"""Seconds; a shorter time counts as not measured."""


def _of_pair(first: _Planned, second: _Planned, took: float, second_took: float, least: float) -> Iterator[Correction]:
    """Yields the corrections from two sums of phases: `first`, mostly compute, took `took` seconds, and `second`,
    mostly update, `second_took`. Sums that took less than `least` seconds are not evaluated."""
    computes, updates = first.compute > 0.0 and took >= least, second.update > 0.0 and second_took >= least
    compute, update = 1.0, 1.0
    if computes and updates:
        compute, update = _solved_pair(first, second, took, second_took)
    elif computes:
        compute = max(0.0, took - first.update) / first.compute
    elif updates:
        update = max(0.0, second_took - second.compute) / second.update
    told = _Planned(first.compute if computes else 0.0, second.update if updates else 0.0)
    yield from _told_of(told, compute=compute, update=update)


def _told_of(planned: _Planned, *, compute: float, update: float) -> Iterator[Correction]:
    if planned.update:
        yield _correction(UPDATE, planned.update, update * planned.update)
    if planned.compute:
        yield _correction(COMPUTE, planned.compute, compute * planned.compute)


@dataclass(frozen=True, slots=True)
class _Planned:
    """Predicted seconds of a phase, split by the factor that corrects them."""

    compute: float
    update: float

    @property
    def sum(self) -> float:
        return self.compute + self.update

    def __add__(self, other: _Planned) -> _Planned:
        return _Planned(self.compute + other.compute, self.update + other.update)


def _planned_pass(amounts: Mapping[str, float], rates: Rates) -> _Planned:
    load = loads_of(amounts, rates)
    updates = load[Resource.CPU] if rates.copies_use_cores else 0.0
    return _Planned(busy_seconds(load, rates) - updates, updates)


def _planned_optimizer(amounts: Mapping[str, float], rates: Rates) -> _Planned:
    return _Planned(amounts.get("operations", 0.0) * rates.operation_overhead, _update_seconds(amounts, rates))


def _update_seconds(amounts: Mapping[str, float], rates: Rates) -> float:
    """Returns the seconds of the update like step_time.update_seconds, but without the overhead of its operations."""
    return side_by_side(loads_of({**amounts, "operations": 0.0}, rates), rates)


def _solved_pair(passes: _Planned, optimizer: _Planned, took: float, update_took: float) -> tuple[float, float]:
    """Returns the factors of compute and update that solve both equations; if there are none of at least 1 /
    LARGEST_FACTOR, one factor per phase."""
    determinant = passes.compute * optimizer.update - passes.update * optimizer.compute
    if determinant > 0.0:
        compute = (took * optimizer.update - update_took * passes.update) / determinant
        update = (update_took * passes.compute - took * optimizer.compute) / determinant
        if min(compute, update) >= 1.0 / LARGEST_FACTOR:
            return compute, update
    return took / (passes.compute + passes.update), update_took / (optimizer.compute + optimizer.update)


def _network(work: Work, rates: Rates, step: MeasuredStep) -> Correction | None:
    """Returns the network's correction; the measured seconds include the time that ranks wait for one another."""
    predicted = _exchange_seconds(work, rates)
    seconds = step.lane_seconds.get("network", 0.0) or step.phase_seconds.get(Phase.EXCHANGE, 0.0)
    if not predicted or seconds < LEAST_SHARE * step.step_seconds:
        return None
    return _correction(NETWORK, predicted, seconds)


def _exchange_seconds(work: Work, rates: Rates) -> float:
    """Returns the seconds of the exchange, with the copies of sums in host memory to a device and back."""
    loads = loads_of(work.get(Phase.EXCHANGE, {}), rates)
    return sum(loads[resource] for resource in (Resource.NETWORK, Resource.H2D, Resource.D2H))


def predicted_seconds(work: Work, rates: Rates) -> float:
    """Returns the seconds of a step at `rates`, from what its phases ask for: what would be predicted today."""
    passes = [phase_seconds(loads_of(work.get(each, {}), rates), rates) for each in (Phase.FORWARD, Phase.BACKWARD)]
    update = work.get(Phase.OPTIMIZER, {})
    updates = _update_seconds(update, rates) + update.get("operations", 0.0) * rates.operation_overhead
    return sum(passes) + updates + _exchange_seconds(work, rates)


def loads_of(amounts: Mapping[str, float], rates: Rates) -> dict[Resource, float]:
    """Returns seconds per resource for amounts in the form of step_time.amounts."""
    prices = {
        Resource.H2D: rates.h2d,
        Resource.D2H: rates.d2h,
        Resource.DRAM: rates.dram,
        Resource.CPU: rates.cpu,
        Resource.READ: rates.read,
        Resource.WRITE: rates.write,
        Resource.NETWORK: rates.network,
    }
    loads = {resource: amounts.get(resource.value, 0.0) / price for resource, price in prices.items()}
    loads[Resource.COMPUTE] = (
        amounts.get("flops", 0.0) / rates.flops
        + amounts.get("values", 0.0) / rates.elementwise
        + amounts.get("operations", 0.0) * rates.operation_overhead
        + amounts.get(DEVICE_BYTES, 0.0) / rates.device
    )
    return loads


def _correction(resource: str, predicted: float, measured: float) -> Correction:
    factor = min(max(measured / predicted, 1.0 / LARGEST_FACTOR), LARGEST_FACTOR)
    return Correction(resource, predicted, measured, factor)


def medians(of_runs: Sequence[Sequence[Correction]]) -> list[Correction]:
    """Returns one correction per resource: that of the run with the median factor."""
    by_resource: dict[str, list[Correction]] = {}
    for one in (one for found in of_runs for one in found):
        by_resource.setdefault(one.resource, []).append(one)
    return [sorted(ones, key=lambda one: one.factor)[len(ones) // 2] for ones in by_resource.values()]


def corrected(node: NodeSpec, found: Sequence[Correction], *, across_nodes: bool = False) -> NodeSpec:
    """Returns `node` with its rates divided, and its fixed costs multiplied, by their factors. The network's factor
    applies within a node, or with `across_nodes` between nodes."""
    factor = {one.resource: one.factor for one in found}
    inside, across = (1.0, factor.get(NETWORK, 1.0)) if across_nodes else (factor.get(NETWORK, 1.0), 1.0)
    compute, update = factor.get(COMPUTE, 1.0), factor.get(UPDATE, 1.0)
    on_cpu = factor.get(CPU_UPDATE, update)
    copies = compute if node.copies_use_cores else 1.0
    link = replace(
        node.link,
        h2d_bytes_per_second=node.link.h2d_bytes_per_second / factor.get(H2D, copies),
        d2h_bytes_per_second=node.link.d2h_bytes_per_second / factor.get(D2H, copies),
    )
    return replace(
        node,
        link=link,
        bfloat16_flops_per_second=node.bfloat16_flops_per_second / compute,
        float32_flops_per_second=node.float32_flops_per_second / compute,
        bfloat16_values_per_second=node.bfloat16_values_per_second / compute,
        float32_values_per_second=node.float32_values_per_second / compute,
        operation_overhead_seconds=node.operation_overhead_seconds * compute,
        device_bytes_per_second=node.device_bytes_per_second / update,
        dram_bytes_per_second=node.dram_bytes_per_second / on_cpu,
        cpu_bytes_per_second=node.cpu_bytes_per_second / on_cpu,
        nvme_read_bytes_per_second=node.nvme_read_bytes_per_second / factor.get(READ, 1.0),
        nvme_write_bytes_per_second=node.nvme_write_bytes_per_second / factor.get(WRITE, 1.0),
        interconnect_bytes_per_second=node.interconnect_bytes_per_second / inside,
        network_bytes_per_second=node.network_bytes_per_second / across,
    )


# --- probe: prices ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """One phase of a measured step: the work that it asked for, and its seconds."""

    compute: str
    """Type of the matrix products: bfloat16 or float32."""
    amounts: Mapping[str, float]
    seconds: float


@dataclass(frozen=True, slots=True)
class MeasuredPrices:
    """Seconds per unit of work; 0 if indistinguishable from noise."""

    flop: Mapping[str, float]
    """Type -> price, never below that of the fastest matrix product."""
    value: Mapping[str, float]
    """Type -> price."""
    operation: float
    error: float
    """Median of |predicted - measured| / measured over the samples."""


def fitted(samples: Sequence[Sample], rates: Rates, fastest: Mapping[str, float]) -> MeasuredPrices:
    """Returns the non-negative prices with the smallest sum of squared relative errors. `fastest`: type -> FLOPs per
    second of the fastest matrix product. Copies and updates in the samples are subtracted at the prices of `rates`.

    Raises UserError when too few samples take longer than the work in them that already has a price, as on a busy
    machine.
    """
    types = sorted(fastest)
    rows, targets = [], []
    for sample in samples:
        flops = sample.amounts.get("flops", 0.0)
        rest = sample.seconds - _priced(sample.amounts, rates) - flops / fastest[sample.compute]
        if rest > 0.0:
            own = [float(name == sample.compute) for name in types]
            values, operations = (sample.amounts.get(name, 0.0) for name in ("values", "operations"))
            row = [*(flops * mine for mine in own), *(values * mine for mine in own), operations]
            rows.append([amount / sample.seconds for amount in row])
            targets.append(rest / sample.seconds)
    if len(rows) < max(1, len(samples) / 2):
        raise UserError(
            f"only {len(rows)} of {len(samples)} measured times are plausible, because the machine is too busy; "
            "calibrate again when the machine is idle"
        )
    prices = _least_squares(rows, targets)
    flop = {name: 1.0 / fastest[name] + more for name, more in zip(types, prices, strict=False)}
    value = dict(zip(types, prices[len(types) :], strict=False))
    errors = [abs(_dot(row, prices) - target) for row, target in zip(rows, targets, strict=True)]
    return MeasuredPrices(flop, value, prices[-1], statistics.median(errors))


def _priced(amounts: Mapping[str, float], rates: Rates) -> float:
    """Returns the seconds of the work that already has a price: copies and updates."""
    loads = loads_of({name: amount for name, amount in amounts.items() if name in _PRICED}, rates)
    return sum(loads.values())


_PRICED = (Resource.H2D.value, Resource.D2H.value, Resource.CPU.value, DEVICE_BYTES)


def _least_squares(rows: list[list[float]], targets: list[float]) -> list[float]:
    """Returns the x >= 0 that minimizes |rows x - targets|^2.

    There are few columns, so every subset of them is tried: the best solution without a negative entry solves the
    problem with bounds (Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23).
    """
    width = len(rows[0])
    scale = [max(abs(row[column]) for row in rows) for column in range(width)]
    used = [column for column in range(width) if scale[column]]
    best, least = [0.0] * width, math.fsum(target**2 for target in targets)
    for size in range(1, min(len(used), len(rows)) + 1):
        for columns in combinations(used, size):
            solved = _solved([[row[column] / scale[column] for column in columns] for row in rows], targets)
            if solved is None or min(solved) < 0.0:
                continue
            found = [0.0] * width
            for column, value in zip(columns, solved, strict=True):
                found[column] = value / scale[column]
            error = math.fsum((_dot(row, found) - target) ** 2 for row, target in zip(rows, targets, strict=True))
            if error < least:
                best, least = found, error
    return best


def _solved(rows: list[list[float]], targets: list[float]) -> list[float] | None:
    """Solves least squares by the normal equations, for columns scaled to 1; returns None if they are singular."""
    width = len(rows[0])
    matrix = [
        [math.fsum(row[i] * row[j] for row in rows) for j in range(width)]
        + [math.fsum(row[i] * target for row, target in zip(rows, targets, strict=True))]
        for i in range(width)
    ]
    for i in range(width):
        pivot = max(range(i, width), key=lambda row: abs(matrix[row][i]))
        if abs(matrix[pivot][i]) < SINGULAR:
            return None
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        for below in range(i + 1, width):
            part = matrix[below][i] / matrix[i][i]
            matrix[below] = [a - part * b for a, b in zip(matrix[below], matrix[i], strict=True)]
    solution = [0.0] * width
    for i in reversed(range(width)):
        solution[i] = (matrix[i][width] - _dot(matrix[i][i + 1 : width], solution[i + 1 :])) / matrix[i][i]
    return solution


SINGULAR = 1e-12


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(left, right, strict=True))
