"""A sweep of small models that are really trained on real text: one member after the other, in turns, and with halving.

    alone    every member's solo run (run_job), one after the other
    turns    the same members as one sweep (run_sweep); each first reports after 20 % of its steps
    halving  the same sweep, in which rounds at 12.5, 25 and 50 % of the steps stop the worse half

All run in this process, with the planner's plans for a device that has room for one member. The measured seconds of all
three exclude start-up and corpus, and include models, tiers, initial values, evaluations and checkpoints; those of the
sweeps also include parking on NVMe.
"""

from __future__ import annotations

import json
import os
import shutil
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# isort: off
from spillway_trainer import environment  # noqa: F401 - before torch is imported
# isort: on

import torch
from safetensors.torch import load_file
from torch import Tensor

from spillway.api.job_file import JobFile
from spillway.api.load import parse_job
from spillway.api.sweep.members import member_directory, member_job
from spillway.api.training_job import TrainingJob
from spillway.plan import MemoryPlan, Tier
from spillway.planning.hardware import NodeSpec, local_node
from spillway.planning.planner import make_plan
from spillway.units import GIB, MIB, format_bytes, format_seconds
from spillway_trainer import probe
from spillway_trainer.ranks import World
from spillway_trainer.reporting.recorder import Recorder
from spillway_trainer.run_job import run_job
from spillway_trainer.sweep.attempt import open_sweep_recorder, run_sweep
from spillway_trainer.trainer import RunProgress, StopRequest

MODULES = ("argparse.py", "dataclasses.py", "enum.py", "inspect.py", "typing.py", "tarfile.py")
"""sources of the standard library that are the text"""
RATES = ("3e-2", "1e-2", "3e-3", "1e-3", "3e-4", "1e-4")
DROPOUTS = ("0", "0.1")
REPORTS = 5
"""number of evaluations of a member; the first is after 20 % of its steps"""
FIRST_ROUND = 8
"""the rounds of halving are after one eighth, two eighths and four eighths of the steps"""
JOB = """
apiVersion: spillway.dev/v1alpha1
kind: TrainingJob
metadata: {{name: sweep}}
spec:
  model:
    config: {{architecture: llama, hiddenSize: 128, numLayers: 4, numHeads: 4, intermediateSize: 344, vocabSize: 1024}}
  data: {{text: {{path: "{text}"}}, evaluation: {{fraction: "0.0125", everySteps: {every}}}}}
  training: {{steps: {steps}, sequenceLength: 128, globalBatchSize: {batch}, microBatchSize: 4, seed: {seed},
             gradientClipping: "1.0", schedule: {{name: Cosine, warmupSteps: 4}}}}
  memory:
    budget: {{device: {device}, host: 256Mi, nvme: 4Gi}}
    advanced:
      {{optimizer: {{placement: Device}}, activations: {{policy: Keep}}, parameters: {{placement: Resident}}}}
  checkpoint: {{everySteps: {steps}}}
  objective: {{metric: EvaluationLoss, halving: {halving}}}
  members:
{members}
"""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is trained."""

    rates: Sequence[str] = RATES
    num_steps: int = 80
    num_sequences: int = 12
    """per step"""


FULL, OF_SEEDS, QUICK = Size(), Size(num_sequences=8), Size(RATES[2:3], 10, 8)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one way to train the members gave."""

    seconds: float
    reported_seconds: float
    """seconds until every member has an evaluation"""
    best: str
    curves: dict[str, tuple[dict[int, float], dict[int, float]]]
    """by member: losses and evaluations by step"""
    tensors: dict[str, dict[str, Tensor]]
    """by member: the tensors in its checkpoint of the last step, for members that reached it"""
    device_bytes: int
    """the most that any step held on the device"""


@dataclass(frozen=True, slots=True)
class Found:
    alone: list[Outcome]
    turns: list[Outcome]
    halving: list[Outcome]
    """by round"""
    differences: list[str]
    """what is not bit for bit equal to the solo run, and of which member"""
    device_budget_bytes: int


class Laboratory:
    """Has one corpus, and gives each run a directory that is removed after the run."""

    def __init__(self, root: Path, size: Size) -> None:
        self._root, self._size = root, size
        self._text = root / "text"
        self._text.mkdir()
        library = Path(sysconfig.get_path("stdlib"))
        for name in MODULES:
            shutil.copy(library / name, self._text)
        self.device_bytes = largest_device_bytes(self._plan(self._job(0, 0, 8 * GIB)))

    def warm_up(self) -> None:
        """Makes the corpus and loads all code into memory, so that no measured run does."""
        with self._run(0, 0) as (file, plan):
            solo = member_job(file, file.spec.members[0])
            run_job(solo, plan.members[0].plan, recorder(solo), RunProgress(), StopRequest(), World())

    def alone(self, seed: int) -> Outcome:
        with self._run(seed, 0) as (file, plan):
            begin = time.time()
            for member, planned in zip(file.spec.members, plan.members, strict=True):
                solo = member_job(file, member)
                run_job(solo, planned.plan, recorder(solo), RunProgress(), StopRequest(), World())
            return outcome(file, begin, time.time())

    def sweep(self, seed: int, *, halves: bool) -> Outcome:
        with self._run(seed, self._size.num_steps // FIRST_ROUND if halves else 0) as (file, plan):
            begin = time.time()
            told = open_sweep_recorder(file)
            run_sweep(file, plan, told, RunProgress(), StopRequest(), World())
            return outcome(file, begin, time.time())

    @contextmanager
    def _run(self, seed: int, halving: int) -> Iterator[tuple[JobFile, MemoryPlan]]:
        job = self._job(seed, halving, self.device_bytes)
        with TemporaryDirectory(dir=self._root) as directory, redirect_stdout(None):
            yield self._file(job, Path(directory)), self._plan(job)

    def _job(self, seed: int, halving: int, device_bytes: int) -> TrainingJob:
        size = self._size
        members = "\n".join(
            f'  - {{name: r{rate}-d{dropout.replace(".", "")}, training: {{optimizer: {{learningRate: "{rate}"}}}}, '
            f'model: {{config: {{dropout: "{dropout}"}}}}}}'
            for dropout in DROPOUTS
            for rate in size.rates
        )
        document = JOB.format(
            text=self._text, steps=size.num_steps, every=size.num_steps // REPORTS, batch=size.num_sequences, seed=seed,
            device=device_bytes, halving=halving or "null", members=members,
        )  # fmt: skip
        return parse_job(document, "the benchmark's job")

    def _plan(self, job: TrainingJob) -> MemoryPlan:
        plan = make_plan(job, node(), explained=False)
        assert isinstance(plan, MemoryPlan), plan
        return plan

    def _file(self, job: TrainingJob, directory: Path) -> JobFile:
        return JobFile(
            name="sweep", uid="benchmark", epoch=1, spec=job.spec, output_directory=str(directory),
            corpus_directory=str(self._root / "corpus"), checkpoint_directory=str(directory / "checkpoints"),
            spill_directory=str(directory), termination_message_path=str(directory / "termination.json"),
            compute_threads=1,
        )  # fmt: skip


def node() -> NodeSpec:
    return local_node(1, 8 * GIB, 4 * GIB, 16 * GIB)


def largest_device_bytes(plan: MemoryPlan) -> int:
    """Returns a budget for one member, in whole MiB. Two do not fit, because all members have the same size."""
    needed = [one.plan.bytes[Tier.DEVICE].total for one in plan.members]
    budget = -(-max(needed) // MIB) * MIB
    assert budget < 2 * min(needed), "two members would fit at once"
    return budget


def recorder(file: JobFile) -> Recorder:
    output = Path(file.output_directory)
    output.mkdir(parents=True, exist_ok=True)
    return Recorder(output / "run.jsonl")


def outcome(file: JobFile, begin: float, end: float) -> Outcome:
    """Reads an outcome from the files that the runs wrote."""
    reported, device, curves, tensors = list[float](), 0, {}, {}
    values = dict[str, float]()
    for member in file.spec.members:
        events = events_of(Path(member_directory(file.output_directory, member.name)) / "run.jsonl")
        steps = [event for event in events if event["event"] == "step"]
        evaluations = [event for event in events if event["event"] == "evaluation"]
        reported.append(min(event["time"] for event in evaluations))
        device = max(device, *(event["tier_peak_bytes"]["device"] for event in steps))
        curves[member.name] = (
            {event["step"]: event["loss"] for event in steps},
            {event["step"]: event["loss"] for event in evaluations},
        )
        num_steps = member_job(file, member).spec.training.steps
        if steps[-1]["step"] == num_steps:
            tensors[member.name] = tensors_of(Path(member_directory(file.checkpoint_directory, member.name)), num_steps)
            values[member.name] = evaluations[-1]["loss"]
    best = min(values, key=lambda name: values[name])
    return Outcome(end - begin, max(reported) - begin, best, curves, tensors, device)


def events_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def tensors_of(checkpoints: Path, step: int) -> dict[str, Tensor]:
    return {
        name: tensor
        for file in sorted(checkpoints.glob(f"step-{step}.e*/*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def differences(alone: Outcome, other: Outcome, what: str) -> list[str]:
    """Compares every member of `other`, as far as it trained, with its solo run: losses, evaluations that both have,
    and final tensors."""
    found = []
    for name, curves in other.curves.items():
        for kind, expected, seen in zip(("loss", "evaluation"), alone.curves[name], curves, strict=True):
            missing = expected.keys() - seen.keys() if name in other.tensors else set[int]()
            if missing or any(expected[step] != seen[step] for step in expected.keys() & seen.keys()):
                found.append(f"{what}: {kind} of {name}")
        if not curves[0] or not curves[0].keys() <= alone.curves[name][0].keys():
            found.append(f"{what}: steps of {name}")
    for name, tensors in other.tensors.items():
        mine = alone.tensors[name]
        if not mine or mine.keys() != tensors.keys() or not all(torch.equal(mine[key], tensors[key]) for key in mine):
            found.append(f"{what}: final tensors of {name}")
    return found


def in_rotation(ways: Mapping[str, Callable[[], Outcome]], num_rounds: int) -> dict[str, list[Outcome]]:
    """Runs all ways in every round and returns their outcomes by round. Each round begins with another way."""
    names, found = list(ways), {name: list[Outcome]() for name in ways}
    for number in range(num_rounds):
        for position in range(len(names)):
            name = names[(position + number) % len(names)]
            found[name].append(ways[name]())
            print(f"  round {number + 1}: {name} took {format_seconds(found[name][-1].seconds)}", flush=True)
    return found


@contextmanager
def laboratory(size: Size) -> Iterator[Laboratory]:
    probe.as_the_trainer(1)
    with TemporaryDirectory(dir=os.environ.get("MODEL_SPILL_DIRECTORY", ".")) as directory:
        yield Laboratory(Path(directory), size)


def measured(size: Size, num_rounds: int) -> Found:
    """Measures the three ways in turns."""
    print("\na sweep, measured", flush=True)
    with laboratory(size) as here:
        here.warm_up()
        rounds = in_rotation(
            {
                "alone": lambda: here.alone(0),
                "turns": lambda: here.sweep(0, halves=False),
                "halving": lambda: here.sweep(0, halves=True),
            },
            num_rounds,
        )
    differ = [
        one
        for alone, turns, halving in zip(rounds["alone"], rounds["turns"], rounds["halving"], strict=True)
        for one in (*differences(alone, turns, "turns"), *differences(alone, halving, "halving"))
    ]
    return Found(**rounds, differences=differ, device_budget_bytes=here.device_bytes)


def halving_misses(size: Size, seeds: range) -> list[str]:
    """Returns a sentence for each seed with which halving and the full sweep find different best members."""
    with laboratory(size) as here:
        pairs = {seed: compared(seed, here) for seed in seeds}
    return [miss(seed, *pair) for seed, pair in pairs.items() if pair[0].best != pair[1].best]


def compared(seed: int, here: Laboratory) -> tuple[Outcome, Outcome]:
    full, halving = here.sweep(seed, halves=False), here.sweep(seed, halves=True)
    print(f"  seed {seed}: best of the full sweep {full.best}, of halving {halving.best}", flush=True)
    return full, halving


def miss(seed: int, full: Outcome, halving: Outcome) -> str:
    def final(name: str) -> float:
        evaluations = full.curves[name][1]
        return evaluations[max(evaluations)]

    return (
        f"seed {seed}: halving's best is {halving.best}, {final(halving.best):.4f} at the end of the full sweep, whose "
        f"best is {full.best}, {final(full.best):.4f}"
    )


def show(found: Found) -> None:
    print(f"\n{len(found.alone[0].curves)} members; medians of {len(found.alone)} rounds")
    for name, outcomes in (("alone", found.alone), ("turns", found.turns), ("halving", found.halving)):
        seconds, reported, held = (
            sorted(values)[len(values) // 2]
            for values in zip(*((one.seconds, one.reported_seconds, one.device_bytes) for one in outcomes), strict=True)
        )
        print(
            f"  {name:8}{format_seconds(seconds):>10}, all have reported after {format_seconds(reported):>8}; on the "
            f"device {format_bytes(held)} of {format_bytes(found.device_budget_bytes)}"
        )
    for line in found.differences:
        print(f"  not bit for bit: {line}")
