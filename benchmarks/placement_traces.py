"""Traces of jobs for the placement benchmark: which jobs arrive when, and what they really take. Seeded; the only
effect is reading the recorded runs.

Jobs are the recorded ones (traces/, record_placement.py), unchanged or with 2 or 4 times the layers. What they take
beside their tiers, their page cache and their seconds are those of the recorded runs. The ratio of the device tier's
bytes to the predicted ones depends on the trace:

  recorded     that of the recorded run; the job is exactly as it was recorded
  xmem         errors with a median of 1.4 %: xMem (2025) claims 91 % below earlier estimators, of which DNNMem is one
  llmem        errors with a mean of 3.0 %: LLMem (2024), on several GPUs
  dnnmem       errors with a mean of 16 %: DNNMem (2020)
  adversarial  2, for device and host, for every model; no model comes twice; all jobs come in bursts

The published figures are means or medians of the absolute error, whose distribution is assumed to be normal around 0.
Each model has its own error, so that its plans are always wrong in the same way. The differences between runs of one
job are drawn from those of the recorded runs.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import pi, sqrt
from pathlib import Path
from statistics import mean, median
from typing import Any

from placement_simulation import Arrival, Ask, Truth
from spillway.api.load import parse_job
from spillway.api.training_job import TrainingJob
from spillway.placement.cluster_view import NodeView
from spillway.plan import Tier
from spillway.units import GIB

RECORDED = Path(__file__).parent / "traces" / "placement-2-core-vm.json"

MEDIAN_OF_NORMAL, MEAN_OF_NORMAL = 0.6745, sqrt(2.0 / pi)
"""median and mean of the absolute value of a normal variable, in standard deviations"""
DEVIATIONS = {
    "recorded": None,
    "xmem": (1.0 - 0.91) * 0.16 / MEDIAN_OF_NORMAL,
    "llmem": 0.030 / MEAN_OF_NORMAL,
    "dnnmem": 0.16 / MEAN_OF_NORMAL,
}
"""standard deviation of the error of a model's predicted device bytes; None means the errors of the recorded runs"""
REALISTIC = tuple(DEVIATIONS)
ADVERSARIAL = "adversarial"
TRACES = (*REALISTIC, ADVERSARIAL)

NUM_JOBS = 120
LOAD = 1.2
"""counted bytes of the jobs times their seconds, over bytes of the nodes times the seconds in which jobs arrive; above
1, so that some jobs must wait"""
NUM_BURSTS = 3
WRONG = 2.0
"""real over predicted bytes in the adversarial trace"""
RECURRING = 0.27
"""share of groups with MANY jobs. With these sizes 65 % of all jobs are in a group of at least five, as in Alibaba's
cluster (Weng et al., MLaaS in the Wild, 2022)"""
FEW, MANY = (1, 4), (5, 20)
"""least and largest number of jobs of a group; uniformly distributed"""
LAYERS = (1, 2, 4)
VARIANTS = 8
"""number of vocabulary sizes of each job, which make models of nearly equal sizes that share no profile"""
MEDIAN_SECONDS, SPREAD = 600.0, 0.7
"""duration of a job's training: lognormal, between the limits"""
SECONDS_LIMITS = (120.0, 1800.0)
NODES = tuple(
    NodeView(
        name=f"node-{letter}",
        labels={},
        taints=(),
        allocatable_cores=16.0,
        allocatable_memory_bytes=16 * GIB,
        allocatable_ephemeral_bytes=500 * GIB,
        allocatable_devices={},
    )
    for letter in "abc"
)
"""16 cores and 16 GiB, as n2-highcpu-16: memory is scarce"""
CORES = 1.0
"""cores that a pod requests: few, so that cores are not scarce"""


@dataclass(frozen=True, slots=True)
class Run:
    """One recorded run."""

    document: dict[str, Any]
    ratios: dict[Tier, float]
    """by tier: highest over planned bytes"""
    beside_bytes: int
    building_bytes: int
    cached_bytes: int
    seconds: float
    """seconds of a step over the predicted ones"""
    counted_bytes: int
    """bytes that are counted for its pod"""
    used_bytes: int
    """bytes that its pod used, without those that the kernel could have taken back"""


def recorded_runs(file: Path = RECORDED) -> tuple[Run, ...]:
    """Returns the recorded runs that succeeded."""
    runs = json.loads(file.read_text(encoding="utf-8"))["runs"]
    return tuple(_run(one) for one in runs if one["exit_code"] == 0)


def _run(found: dict[str, Any]) -> Run:
    pod, tiers = found["pod"], found["tiers"]
    code = pod["file_pages_bytes"]  # on a fresh node the pod is charged for them, even if it was not here
    building, training = pod["anonymous_building_bytes"] + code, pod["anonymous_training_bytes"] + code
    in_memory = sum(use["peak_bytes"] for tier, use in tiers.items() if tier != Tier.NVME.value)
    most = max(pod["anonymous_building_bytes"], pod["anonymous_training_bytes"])
    return Run(
        document=found["job"],
        ratios={Tier(tier): use["peak_bytes"] / use["planned_bytes"]
                for tier, use in tiers.items() if use["planned_bytes"]},
        beside_bytes=training - in_memory,
        building_bytes=building,
        cached_bytes=max(0, pod["peak_bytes"] - most),
        seconds=found["step_seconds"] / found["predicted_step_seconds"],
        counted_bytes=pod["counted_bytes"],
        used_bytes=max(building, training),
    )  # fmt: skip


def user_factor(runs: Sequence[Run], slack: float) -> float:
    """Returns the requests of a user whose pods leave the share `slack` unused, over what is counted."""
    return median(run.used_bytes / run.counted_bytes for run in runs) / (1.0 - slack)


def _noise(runs: Sequence[Run]) -> tuple[float, ...]:
    """For every job that was run several times: the device bytes of each run over the mean of the job's runs."""
    alike: dict[str, list[float]] = {}
    for run in runs:
        alike.setdefault(json.dumps(run.document["spec"]), []).append(run.ratios[Tier.DEVICE])
    return tuple(ratio / mean(several) for several in alike.values() if len(several) > 1 for ratio in several)


# --- jobs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Group:
    """Jobs of one model that differ only in their seeds."""

    document: dict[str, Any]
    truth: Truth
    """what its jobs take, before the noise of each run"""
    size: int


def arrivals(
    trace: str, seed: int, runs: Sequence[Run], counted: Callable[[TrainingJob], Ask], num_jobs: int = NUM_JOBS
) -> list[Arrival]:
    """Returns the jobs of `trace` by arrival. `counted` returns what is planned for a job of an unknown model."""
    random_ = random.Random(f"{trace}/{seed}")
    noise = (1.0,) if trace == ADVERSARIAL else _noise(runs)
    jobs: list[tuple[TrainingJob, Truth]] = []
    work = 0.0
    for group in _groups(trace, random_, runs, num_jobs):
        seconds = min(max(random_.lognormvariate(0.0, SPREAD) * MEDIAN_SECONDS, SECONDS_LIMITS[0]), SECONDS_LIMITS[1])
        first = counted(_job(group.document, 0, 1))
        steps = max(1, round(seconds / (first.plan.prediction.step_seconds * group.truth.seconds)))
        work += group.size * first.memory_bytes * seconds
        for _ in range(group.size):
            device = group.truth.tiers[Tier.DEVICE] * random_.choice(noise)
            truth = replace(group.truth, tiers={**group.truth.tiers, Tier.DEVICE: device})
            jobs.append((_job(group.document, len(jobs), steps), truth))
    window = work / (LOAD * sum(node.allocatable_memory_bytes for node in NODES))
    found = [Arrival(job, _arrives(trace, random_, window), truth) for job, truth in jobs]
    return sorted(found, key=lambda arrival: arrival.seconds)


def _arrives(trace: str, random_: random.Random, window: float) -> float:
    if trace == ADVERSARIAL:
        return window * random_.randrange(NUM_BURSTS) / NUM_BURSTS
    return random_.uniform(0.0, window)


def _groups(trace: str, random_: random.Random, runs: Sequence[Run], num_jobs: int) -> Iterator[_Group]:
    left, number = num_jobs, 0
    while left:
        few = FEW if random_.random() >= RECURRING else MANY
        size = 1 if trace == ADVERSARIAL else min(left, random_.randint(*few))
        run = random_.choice(runs)
        layers = 1 if trace == "recorded" else random_.choice(LAYERS)
        # No model comes twice in the adversarial trace: each has a vocabulary of its own.
        variant = number if trace == ADVERSARIAL else 0 if trace == "recorded" else random_.randrange(VARIANTS)
        yield _Group(_document(run, layers, variant), _truth(trace, random_, run, layers), size)
        left, number = left - size, number + 1


def _document(run: Run, layers: int, variant: int) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(json.dumps(run.document))
    spec = document["spec"]
    config = spec["model"]["config"]
    config["numLayers"] *= layers
    config["vocabSize"] += 8 * variant
    spec["pod"] = {"resources": {"cpu": str(CORES)}}
    if layers > 1:
        del spec["memory"]["budget"]
    return document


def _truth(trace: str, random_: random.Random, run: Run, layers: int) -> Truth:
    tiers = dict(run.ratios)
    deviation = DEVIATIONS.get(trace)
    if trace == ADVERSARIAL:
        tiers |= {Tier.DEVICE: WRONG, Tier.HOST: WRONG}
    elif deviation is not None:
        # The published error is that of the estimate: (predicted - real) / real.
        tiers[Tier.DEVICE] = 1.0 / max(0.25, 1.0 + random_.gauss(0.0, deviation))
    return Truth(
        tiers=tiers,
        beside_bytes=run.beside_bytes,
        building_bytes=run.building_bytes,
        cached_bytes=run.cached_bytes * layers,  # most of it is checkpoints
        seconds=run.seconds,
    )


def _job(document: dict[str, Any], number: int, steps: int) -> TrainingJob:
    metadata = {"name": f"job-{number}"}
    training = {**document["spec"]["training"], "steps": steps, "seed": number}
    checkpoint = {**document["spec"]["checkpoint"], "everySteps": steps}
    spec = {**document["spec"], "training": training, "checkpoint": checkpoint}
    return parse_job(json.dumps({**document, "metadata": metadata, "spec": spec}), f"job-{number}")
