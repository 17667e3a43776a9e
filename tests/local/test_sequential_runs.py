"""A ResNet, as an entry point returns it: planned by inspection, trained with everything that can move, and resumed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from harness import local_runs
from spillway.api.job_file import JobFile
from spillway.api.memory import Advanced
from spillway.api.training_job import TrainingJob
from spillway.errors import UserError
from spillway.plan import MemoryPlan
from spillway.planning.hardware import local_node
from spillway.planning.planner import Overrides, make_plan
from spillway.units import GIB, MIB
from spillway_trainer import running_statistics
from spillway_trainer.assemble import reject_divided_statistics
from spillway_trainer.inspect import inspect
from spillway_trainer.models.build import build_model

pytestmark = pytest.mark.ci

STEPS = 7
NUM_BLOCKS = 2
"""number of stages of sequential_models.resnet"""


def job_of(text: Path) -> TrainingJob:
    document = yaml.safe_load(local_runs.JOB.replace("TEXT", str(text)))
    document["spec"]["model"] = {"entrypoint": "cases.sequential_models:resnet_of_text"}
    document["spec"]["training"]["steps"] = STEPS
    document["spec"]["data"]["evaluation"]["everySteps"] = 2
    return TrainingJob.model_validate(document)


def file_of(output: Path, text: Path, epoch: int) -> JobFile:
    job = local_runs.job_file(output, text, output.parent / "corpus", epoch)
    return job.model_copy(update={"spec": job_of(text).spec})


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    return {name: t for file in checkpoint.glob("*.safetensors") for name, t in load_file(file).items()}


def evaluations(output: Path) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in local_runs.events(output, "evaluation")}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return local_runs.write_text(tmp_path_factory.mktemp("resnet") / "text")


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything resident."""
    output = tmp_path_factory.mktemp("run") / "whole"
    code = local_runs.complete(file_of(output, text, 1), local_runs.disabled_plan(NUM_BLOCKS))
    assert code == 0, local_runs.log_of(output, 1)
    return output


def test_a_resumed_resnet_is_the_uncut_one_running_statistics_and_all(whole: Path, text: Path) -> None:
    """The run resumes at step 6 under another plan; its evaluations use the running statistics."""
    cut = whole.parent / "cut"
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints" / f"step-{STEPS}.e1")
    expected = evaluations(cut)
    (cut / "run.jsonl").unlink()
    code = local_runs.complete(file_of(cut, text, 2), local_runs.spread_plan(NUM_BLOCKS))
    assert code == 0, local_runs.log_of(cut, 2)
    uncut = tensors_of(whole / "checkpoints" / f"step-{STEPS}.e1")
    resumed = tensors_of(cut / "checkpoints" / f"step-{STEPS}.e2")
    assert uncut.keys() == resumed.keys()
    assert len([name for name in uncut if name.startswith(running_statistics.PREFIX)]) == 30
    assert [name for name, tensor in uncut.items() if not torch.equal(tensor, resumed[name])] == []
    assert {7: expected[7]} == evaluations(cut)


def test_its_inspected_shape_plans_a_streamed_run_with_the_same_bits(whole: Path, text: Path, tmp_path: Path) -> None:
    job = job_of(text)
    memory = job.spec.memory.model_copy(
        update={"advanced": Advanced.model_validate({"parameters": {"placement": "Stream"}})}
    )
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"memory": memory})})
    plan = make_plan(job, local_node(1, GIB, 64 * MIB, GIB), Overrides(shape=inspect(job.spec, {})), explained=False)
    assert isinstance(plan, MemoryPlan) and plan.parameters.streams
    output = tmp_path / "streamed"
    file = file_of(output, text, 1).model_copy(update={"corpus_directory": str(whole.parent / "corpus")})
    assert local_runs.complete(file, plan) == 0, local_runs.log_of(output, 1)
    ours, theirs = (tensors_of(run / "checkpoints" / f"step-{STEPS}.e1") for run in (output, whole))
    assert [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])] == []
    assert evaluations(output) == evaluations(whole)


def test_several_ranks_are_rejected_with_a_sentence(text: Path) -> None:
    plan = local_runs.disabled_plan(NUM_BLOCKS).model_copy(update={"world_size": 2, "num_micro_batches": 1})
    with pytest.raises(UserError, match=r"layers\.0\.stem\.2\.running_mean is a running statistic .* 2 ranks"):
        reject_divided_statistics(plan, build_model(job_of(text).spec))
