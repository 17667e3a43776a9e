"""Predicted and measured seconds of a step, after calibration, for jobs that calibration has not seen.

The cells of `spillway calibrate` and other jobs (other sizes, micro-batches, placements, activation policies) train
step by step in turn, so that a busy moment affects all of them. From the measurements three profiles are made, and the
planner predicts each of the other jobs with each profile:

  catalog  nothing measured: the rates of the catalog's CPU node
  probe    `spillway calibrate`: prices fitted to its own cells
  run      `spillway calibrate --from`: the probe's profile corrected by the first of the other jobs, which is then not
           counted

measured is the median step. Predicted over measured is printed; the goal is 0.75 to 1.25 (a job counts as within 25 %
from 1 / 1.25 to 1.25). The measurements are real; the predictions are what this benchmark judges. If the machine does
other work meanwhile, the measurements are disturbed: the load is printed, and `noise` is half of the interquartile
range of a job's steps over their median, for the worst job. STEP_TIME_DIRECTORY names the directory to spill to
(default: this one).
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import paired
from spillway.api.profiles import NodeProfileSpec
from spillway.feedback.calibration import corrected, corrections, fitted, measured_step
from spillway.feedback.profiles import rates_from, with_rates
from spillway.plan import MemoryPlan
from spillway.planning.hardware import NodeSpec, local_node
from spillway.planning.planner import make_plan
from spillway.planning.step_time import rank_rates
from spillway.units import GIB, MIB, format_seconds
from spillway_cli.calibrate.command import fastest, priced, probed_node, samples_of, spread
from spillway_cli.record.log import step_metrics
from spillway_trainer import probe
from spillway_trainer.cgroup import usable_cores
from spillway_trainer.probe import Cell

DIRECTORY = Path(os.environ.get("STEP_TIME_DIRECTORY", "."))
QUICK_ROUNDS, ROUNDS = 9, 17
QUICK_JOBS: Mapping[str, Cell] = {
    "first": Cell(192, 4, 2048, 128, 4),
    "wide, one micro-batch": Cell(384, 2, 1024, 128, 4, num_micro_batches=1),
    "narrow, many micro-batches": Cell(96, 6, 1024, 64, 4, num_micro_batches=4),
    "recomputed": Cell(192, 6, 1024, 128, 4, activations="Recompute"),
    "activations in host memory": Cell(192, 6, 1024, 128, 4, activations="Host"),
    "all spilled": Cell(256, 4, 2048, 128, 4, optimizer="Host", activations="Nvme"),
    "float32": Cell(192, 3, 1024, 128, 4, "float32"),
}
JOBS: Mapping[str, Cell] = {
    **QUICK_JOBS,
    "demo": Cell(256, 6, 4096, 256, 2, optimizer="Host", activations="Nvme", num_micro_batches=4),
    "demo, resident": Cell(256, 6, 4096, 256, 2, num_micro_batches=4),
    "long sequences": Cell(128, 4, 1024, 1024, 1),
    "large vocabulary": Cell(128, 2, 16384, 128, 4),
    "optimizer on the CPU": Cell(384, 4, 2048, 128, 2, optimizer="Host"),
    "tiny": Cell(64, 2, 512, 32, 4),
}


def node_of(threads: int) -> NodeSpec:
    return local_node(threads, 4 * GIB, 4 * GIB, GIB)


def measure(quick: bool) -> dict[str, float]:
    threads = usable_cores(Path("/"))
    probe.as_the_trainer(threads)
    jobs, cells = (QUICK_JOBS, probe.QUICK_CELLS) if quick else (JOBS, probe.CELLS)
    figures, backend = probe.disk(DIRECTORY, 64 * MIB)
    figures |= probe.matrices(probe.MATRIX_SIZES[:3]) | probe.memory(threads) | probe.update(threads)
    trained = list(probe.training([*cells, *jobs.values()], DIRECTORY, threads, QUICK_ROUNDS if quick else ROUNDS))
    references, others = trained[: len(cells)], dict(zip(jobs, trained[len(cells) :], strict=True))
    catalog, probed = node_of(threads), calibrated(figures, references, threads)
    first = next(iter(others))
    run = corrected_by(probed, others[first])
    print(f"{threads} threads, I/O {backend}\n")
    print(f"{'':28}{'measured':>10}{'catalog':>9}{'probe':>9}{'run':>9}   predicted over measured")
    ratios: dict[str, list[float]] = {"catalog": [], "probe": [], "run": []}
    for name, job in others.items():
        seconds = measured(job).step_seconds
        found = {of: predicted(jobs[name], node) / seconds for of, node in
                 (("catalog", catalog), ("probe", probed), ("run", run))}  # fmt: skip
        for of, ratio in found.items():
            if of != "run" or name != first:
                ratios[of].append(ratio)
        shown = "".join(f"{found[of]:9.2f}" for of in ("catalog", "probe"))
        after = f"{found['run']:9.2f}" if name != first else f"{'-':>9}"
        print(f"{name:28}{format_seconds(seconds):>10}{shown}{after}")
    return {
        **{f"{of}_{name}": value for of, found in ratios.items() for name, value in summary(found).items()},
        "noise": max(spread([step["step_seconds"] for step in job["steps"][2:]]) for job in others.values()),
        "jobs": float(len(others)),
    }  # fmt: skip


def summary(ratios: Sequence[float]) -> dict[str, float]:
    distances = [max(ratio, 1.0 / ratio) for ratio in ratios]
    return {
        "median_ratio": statistics.median(ratios),
        "worst_distance": max(distances),
        "within_25_percent": sum(distance <= 1.25 for distance in distances) / len(distances),
    }


def calibrated(figures: probe.Figures, references: Sequence[Mapping[str, Any]], threads: int) -> NodeSpec:
    """Returns the node that `spillway calibrate` would write and a plan would read."""
    node = probed_node({"figures": figures}, threads)
    samples = [sample for cell in references for sample in samples_of(cell)]
    node = priced(node, fitted(samples, rank_rates(node, 1, 1, "bfloat16"), fastest(figures)))
    return through_a_profile(node, threads)


def corrected_by(node: NodeSpec, job: Mapping[str, Any]) -> NodeSpec:
    """Returns the node that `spillway calibrate --from` would make from `node` and `job`."""
    found = corrections(job["work"], rank_rates(node, 1, 1, job["compute"]), measured(job))
    return corrected(node, found)


def through_a_profile(node: NodeSpec, threads: int) -> NodeSpec:
    profile = NodeProfileSpec.model_validate({"deviceKind": "Cpu"})
    return with_rates(rates_from(node, node_of(threads), profile), node_of(threads))


def measured(job: Mapping[str, Any]) -> Any:
    return measured_step([[step_metrics(fields) for fields in job["steps"]]])


def predicted(cell: Cell, node: NodeSpec) -> float:
    plan = make_plan(cell.job(), node)
    assert isinstance(plan, MemoryPlan), "4 GiB are enough for every job"
    return plan.prediction.step_seconds


if __name__ == "__main__":
    assert __doc__ is not None
    paired.main("step_time", __doc__, measure)
