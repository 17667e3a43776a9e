"""A sweep on two devices compared with the same sweep on one: whole `spillway run`s, in turn.

The sweep has 12 models of unequal sizes and numbers of steps on real text; none fits its device without spilling. A
device is a CPU core: one compute thread, and all lanes of its process on the same core.

  one      all members on one device                            taskset -c A    spillway run --ranks 1
  two      all members on two devices                           taskset -c A,B  spillway run --ranks 2
  static   one run per device, members divided alternately      taskset -c A    spillway run, and -c B the same

Seconds are those of the command, from its start to its end: start-up, corpus, turns, parking, checkpoints.

  two_vs_one          seconds of two over one; 0.5 is the bound
  two_vs_static       seconds of two over static; the limit is on the upper end of its interval
  cpu_vs_one          CPU seconds of two over one
  devices_busy        share of the time from the first turn to the last in which devices had a member; the lowest of all
                      rounds
  members_identical   1 if every member has the same losses, bit for bit, in every run

Sizes, seed, rounds and limits were committed before the first figure was measured. --quick: 4 members of 4 steps, one
round; it shows that everything works, but is too short for ratios.
"""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

import paired
from paired import Ratio, paired_ratio
from spillway_cli.record.log import read_run_log
from spillway_cli.report.charts import Span
from spillway_cli.report.page import busy_share

SEED = 31
NUM_MEMBERS, ROUNDS = 12, 6
MODULES = ("argparse.py", "dataclasses.py", "enum.py", "inspect.py", "typing.py", "tarfile.py")
DEVICE_BUDGET = "14Mi"
"""less than the smallest member takes if all of it stays on the device"""
AT_MOST = {"two_vs_one": 0.60, "two_vs_static_upper": 1.05, "cpu_vs_one": 1.05}
AT_LEAST = {"devices_busy": 0.85, "members_identical": 1.0}


@dataclass(frozen=True, slots=True)
class Ran:
    seconds: float
    cpu_seconds: float
    busy: float
    losses: Mapping[str, Sequence[float]]
    """the loss of every step, by member"""


def members(quick: bool) -> list[dict[str, Any]]:
    drawn = random.Random(SEED)
    return [
        {
            "name": f"m{index:02}",
            "model": {"config": {"numLayers": drawn.randint(3, 8)}},
            "training": {"steps": 4 if quick else drawn.randint(20, 60), "seed": index},
        }
        for index in range(4 if quick else NUM_MEMBERS)
    ]


def job(text: Path, listed: Sequence[dict[str, Any]], num_devices: int) -> dict[str, Any]:
    """Returns a job whose host and NVMe budgets grow with `num_devices`, so that each device has the same share."""
    sizes = {"hiddenSize": 128, "numHeads": 4, "intermediateSize": 344, "vocabSize": 1024, "numLayers": 3}
    return {
        "apiVersion": "spillway.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "many"},
        "spec": {
            "model": {"config": {"architecture": "llama", **sizes}},
            "data": {"text": {"path": str(text)}},
            "training": {"steps": 20, "sequenceLength": 128, "globalBatchSize": 8, "microBatchSize": 4},
            "parallelism": {"device": "Cpu"},
            "memory": {
                "budget": {"device": DEVICE_BUDGET, "host": f"{128 * num_devices}Mi", "nvme": f"{1024 * num_devices}Mi"}
            },
            "checkpoint": {"everySteps": 1000},
            "members": list(listed),
        },
    }


class Laboratory:
    def __init__(self, root: Path, quick: bool) -> None:
        self._root, self._members, self._number = root, members(quick), 0
        self._text = root / "text"
        self._text.mkdir()
        for name in MODULES:
            (self._text / name).write_bytes((Path(sysconfig.get_path("stdlib")) / name).read_bytes())
        self._cores = sorted(os.sched_getaffinity(0))[:2]
        if len(self._cores) < 2:
            sys.exit("two cores are needed, one for each device")

    def one(self) -> Ran:
        return self._run([(self._members, self._cores[:1])])

    def two(self) -> Ran:
        return self._run([(self._members, self._cores)])

    def static(self) -> Ran:
        return self._run([(self._members[device::2], [core]) for device, core in enumerate(self._cores)])

    def _run(self, parts: Sequence[tuple[Sequence[dict[str, Any]], Sequence[int]]]) -> Ran:
        """Runs all `parts` at the same time. Each part has the members of one run and the cores that it may use."""
        self._number += 1
        begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        started, outputs = list[subprocess.Popen[bytes]](), list[Path]()
        for index, (listed, cores) in enumerate(parts):
            output = self._root / f"run-{self._number}-{index}"
            file = output.with_suffix(".yaml")
            file.write_text(yaml.safe_dump(job(self._text, listed, len(cores))), encoding="utf-8")
            command = [
                "taskset",
                "-c",
                ",".join(map(str, cores)),
                sys.executable,
                "-m",
                "spillway_cli",
                "run",
                str(file),
            ]
            command += ["--output", str(output), "--ranks", str(len(cores))]
            with output.with_suffix(".log").open("wb") as log:
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                started.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))
            outputs.append(output)
        for process, output in zip(started, outputs, strict=True):
            if process.wait():
                sys.exit(output.with_suffix(".log").read_text(encoding="utf-8"))
        seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = sum(getattr(after, name) - getattr(before, name) for name in ("ru_utime", "ru_stime"))
        losses = {path.parent.name: losses_of(path) for each in outputs for path in each.glob("members/*/run.jsonl")}
        return Ran(seconds, cpu, busy_in(outputs[0], len(parts[0][1])), losses)


def losses_of(path: Path) -> list[float]:
    return [step.metrics.loss for step in read_run_log(path).curve]


def busy_in(output: Path, num_devices: int) -> float:
    turns = [turn for turn in read_run_log(output / "run.jsonl").turns if turn.end is not None]
    spans = [Span(turn.device, turn.begin, turn.end or turn.begin, turn.member, "") for turn in turns]
    return busy_share(spans, num_devices, max(span.end for span in spans) - min(span.begin for span in spans))


def over(ran: Sequence[Ran], rivals: Sequence[Ran], what: str) -> Ratio:
    """Returns the ratio of figure `what`, ours over the rival's, paired by round."""
    return paired_ratio([getattr(one, what) for one in rivals], [getattr(one, what) for one in ran])


def measure(quick: bool) -> dict[str, float]:
    with TemporaryDirectory(prefix="many-devices-") as root:
        laboratory = Laboratory(Path(root), quick)
        contestants = {"one": laboratory.one, "two": laboratory.two, "static": laboratory.static}
        ran = paired.alternate(contestants, seconds=0.0, min_rounds=1 if quick else ROUNDS)
    for name, runs in ran.items():
        for each in runs:
            print(f"{name:8}{each.seconds:8.1f} s {each.cpu_seconds:8.1f} CPU s   busy {each.busy:.3f}")
    ratios = {
        "two_vs_one": over(ran["two"], ran["one"], "seconds"),
        "two_vs_static": over(ran["two"], ran["static"], "seconds"),
        "cpu_vs_one": over(ran["two"], ran["one"], "cpu_seconds"),
    }
    for name, ratio in ratios.items():
        print(f"{name:16}{ratio}")
    every = [each.losses for runs in ran.values() for each in runs]
    return {
        **{name: ratio.median for name, ratio in ratios.items()},
        "two_vs_static_upper": ratios["two_vs_static"].high,
        "devices_busy": min(each.busy for each in ran["two"]),
        "members_identical": float(all(losses == every[0] for losses in every)),
    }


if __name__ == "__main__":
    paired.main("many_devices", __doc__, measure, AT_MOST, AT_LEAST, not_quick=(*AT_MOST, "devices_busy"))
