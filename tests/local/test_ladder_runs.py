"""`spillway run` of a model that takes twice the predicted device memory: it completes by itself, with other plans and
the bits of a run without techniques; and the same command remembers what was learned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.local_runs import write_text
from harness.places import TESTS
from spillway.api.load import load_job
from spillway.api.training_job import TrainingJob
from spillway.errors import ExitCode
from spillway.feedback.ladder import MOST_MEMORY_TRIES
from spillway.plan import Infeasible, MemoryPlan, Tier
from spillway.planning.corrections import Corrections
from spillway.units import GIB, MIB
from spillway_cli.machine.local_node import LocalResources
from spillway_cli.record.directory import RunDirectory
from spillway_cli.record.log import read_run_log
from spillway_cli.run.ladder import earlier_failures, first_plan
from spillway_cli.run.plan import decided_for_this_machine
from spillway_trainer.cgroup import usable_cores

JOB = """
apiVersion: spillway.dev/v1alpha1
kind: TrainingJob
metadata: {{name: tiny}}
spec:
  model:
    config: {{architecture: llama, hiddenSize: 64, numLayers: 4, numHeads: 4, intermediateSize: 160, vocabSize: 300}}
  data: {{text: {{path: {text}}}}}
  training: {{steps: {steps}, sequenceLength: 64, globalBatchSize: 8, microBatchSize: 4}}
  memory: {memory}
  checkpoint: {{everySteps: 2}}
"""
TIGHT = "{budget: {device: 9Mi, host: 64Mi, nvme: 64Mi}}"
ADVISED = "{mode: Advise, budget: {device: 9Mi, host: 64Mi, nvme: 64Mi}}"
DISABLED = "{mode: Disabled, budget: {host: 64Mi}}"
SPILLWAY = [sys.executable, "-m", "spillway_cli"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


def run(directory: Path, memory: str, text: Path, times: float, steps: int = 4) -> subprocess.CompletedProcess[str]:
    directory.mkdir(exist_ok=True)
    job = directory / "job.yaml"
    job.write_text(JOB.format(text=text, memory=memory, steps=steps))
    heavier = {"PYTHONPATH": str(TESTS / "fakes" / "heavier_device"), "TEST_DEVICE_TIMES": str(times)}
    command = [*SPILLWAY, "run", str(job), "--output", str(directory / "out"), "-o", "json"]
    return subprocess.run(command, env={**os.environ, **heavier}, capture_output=True, text=True, check=False)


def losses(directory: Path) -> dict[int, float]:
    return {step: one.metrics.loss for step, one in read_run_log(directory / "out" / "run.jsonl").steps.items()}


def plans(directory: Path) -> list[MemoryPlan]:
    attempts = sorted((directory / "out" / "attempts").iterdir(), key=lambda path: int(path.name.rpartition("-")[2]))
    return [MemoryPlan.model_validate_json((attempt / "plan.json").read_text()) for attempt in attempts]


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory, text: Path) -> tuple[Path, subprocess.CompletedProcess[str]]:
    directory = tmp_path_factory.mktemp("twice")
    return directory, run(directory, TIGHT, text, 2.0)


@pytest.mark.ci
def test_a_prediction_that_is_wrong_by_two_costs_tries_and_no_bit(
    twice: tuple[Path, subprocess.CompletedProcess[str]], text: Path, tmp_path: Path
) -> None:
    directory, ended = twice
    assert ended.returncode == 0, ended.stderr
    attempts = json.loads(ended.stdout)["attempts"]
    assert 1 < len(attempts) <= 1 + MOST_MEMORY_TRIES
    assert {one["reason"] for one in attempts[:-1]} == {"DeviceOutOfMemory"}
    assert ended.stderr.count("replanned: ") == len(attempts) - 1
    plain = run(tmp_path, DISABLED, text, 1.0)
    assert plain.returncode == 0, plain.stderr
    assert losses(directory) == losses(tmp_path)


@pytest.mark.ci
def test_each_plan_asks_for_less_of_the_device(twice: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    found = plans(twice[0])
    predicted = [plan.bytes[Tier.DEVICE].predicted for plan in found]
    assert predicted == sorted(set(predicted), reverse=True)
    assert {plan.budget[Tier.DEVICE] for plan in found} == {9 * MIB}
    assert all(plan.bytes[Tier.DEVICE].total <= 9 * MIB for plan in found)


@pytest.mark.ci
def test_the_same_command_begins_with_what_ran_out(twice: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    directory, found = twice[0], plans(twice[0])
    job = load_job(directory / "job.yaml")

    def planned(asked: TrainingJob, corrections: Corrections) -> MemoryPlan | Infeasible:
        resources = LocalResources(usable_cores(Path("/")), memory_bytes=8 * GIB, disk_bytes=8 * GIB)
        return decided_for_this_machine(asked, resources, corrections=corrections)

    failures = earlier_failures(RunDirectory(directory / "out"), job, 1)
    assert [failure.attempt for failure in failures] == list(range(1, len(found)))
    assert first_plan(job, 1, failures, planned).bytes == found[-1].bytes
    assert first_plan(job, 1, (), planned).bytes == found[0].bytes


@pytest.mark.ci
def test_mode_advise_names_the_plan_and_changes_nothing(text: Path, tmp_path: Path) -> None:
    ended = run(tmp_path, ADVISED, text, 2.0)
    assert ended.returncode == ExitCode.DEVICE_OUT_OF_MEMORY, ended.stderr
    assert len(json.loads(ended.stdout)["attempts"]) == 1
    assert "mode Auto would replan: " in ended.stderr
