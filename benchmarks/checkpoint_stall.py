"""What a checkpoint every 20 steps costs a run: `spillway run` with these checkpoints and with the last one only, in
turn.

The model is a llama of 102 million parameters in float32: 14 blocks of width 768 with an intermediate size of 2048, a
vocabulary of 2048, 256 tokens a step; a step takes about a second on two cores. With AdamW a checkpoint has 1.2 GB of
masters and moments, and the budget has room for a copy of them. The benchmark compares the 20 steps after step 20. They
include the first checkpoint: the time for its copy, and the time that the thread which hashes, writes, syncs and
verifies it takes from the steps that run meanwhile. --quick: three rounds, about eight minutes on a quiet machine.

    checkpoint_cost          median of the paired ratios of these 20 steps' seconds, minus 1
    checkpoint_cpu_cost      the same for CPU seconds, including the writing thread's; a busy machine changes it less
    checkpoint_stall         share of these seconds in which training was stopped, according to run.jsonl
    checkpoint_behind_steps  number of steps until the checkpoint was committed
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import paired
import spillway

SPILLWAY = Path(sys.executable).with_name("spillway")
EVERY, STEPS = 20, 41
LIMITS = {"checkpoint_cost": 0.05}
JOB: dict[str, Any] = {
    "apiVersion": "spillway.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "checkpoints"},
    "spec": {
        "model": {
            "config": {"architecture": "llama", "hiddenSize": 768, "numLayers": 14, "numHeads": 12,
                       "intermediateSize": 2048, "vocabSize": 2048},
            "precision": {"compute": "float32"},
        },
        "data": {"text": {"path": str(Path(spillway.__file__).parent)}},
        "training": {"steps": STEPS, "sequenceLength": 128, "globalBatchSize": 2, "microBatchSize": 2},
        "memory": {"budget": {"device": "3Gi", "host": "2Gi"}},
    },
}  # fmt: skip


class Measured(NamedTuple):
    """Figures of the steps from EVERY + 1 to 2 * EVERY."""

    seconds: float
    cpu_seconds: float
    stalled_seconds: float = 0.0
    behind_steps: int = 0


def run(root: Path, every: int) -> Measured:
    with tempfile.TemporaryDirectory(dir=root) as directory:
        job, output = Path(directory) / "job.json", Path(directory) / "run"
        spec = {**JOB["spec"], "checkpoint": {"everySteps": every}}
        job.write_text(json.dumps({**JOB, "spec": spec}), encoding="utf-8")
        run_to = [SPILLWAY, "run", job, "--output", output]
        subprocess.run(run_to, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        lines = (output / "run.jsonl").read_text(encoding="utf-8").splitlines()
        return measured([json.loads(line) for line in lines])


def measured(events: list[dict[str, Any]]) -> Measured:
    steps = [event for event in events if event["event"] == "step"]
    window = [event for event in steps if EVERY < event["step"] <= 2 * EVERY]
    seconds = window[-1]["time"] - next(event["time"] for event in steps if event["step"] == EVERY)
    cpu_seconds = sum(event["cpu_seconds"] for event in window)
    taken = [event for event in events if event["event"] == "checkpoint" and event["step"] == EVERY]
    found, said = Measured(seconds, cpu_seconds), "no checkpoint"
    if taken:
        behind = sum(event["time"] < taken[0]["time"] for event in window)
        found = found._replace(stalled_seconds=taken[0]["stalled_seconds"], behind_steps=behind)
        said = f"{taken[0]['bytes'] / 1e9:.2f} GB in {taken[0]['seconds']:.2f} s"
    print(f"{said}: {found}", flush=True)
    return found


def measure(quick: bool) -> Mapping[str, float]:
    with tempfile.TemporaryDirectory() as root:
        taken = {"every 20": partial(run, Path(root), EVERY), "the last": partial(run, Path(root), STEPS)}
        results = paired.alternate(taken, seconds=0 if quick else 1200, min_rounds=3 if quick else paired.MIN_ROUNDS)
    ours, rivals = results.values()
    cost = paired.paired_ratio([one.seconds for one in rivals], [one.seconds for one in ours])
    of_cpu = paired.paired_ratio([one.cpu_seconds for one in rivals], [one.cpu_seconds for one in ours])
    print(f"seconds {cost}\nCPU seconds {of_cpu}")
    return {
        "checkpoint_cost": cost.median - 1.0,
        "checkpoint_cpu_cost": of_cpu.median - 1.0,
        "checkpoint_stall": paired.median([one.stalled_seconds / one.seconds for one in ours]),
        "checkpoint_behind_steps": paired.median([one.behind_steps for one in ours]),
    }


if __name__ == "__main__":
    paired.main("checkpoint_stall", __doc__, measure, at_most=LIMITS)
