"""Runs that start from the parameters of another: spec.checkpoint.from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from harness import local_runs
from spillway_cli.__main__ import run_app
from spillway_trainer.checkpoints.directory import choose_resume
from spillway_trainer.checkpoints.manifest import StoredCheckpoint

EARLIER = local_runs.JOB.replace("steps: 12", "steps: 4")
LATER = (
    local_runs.JOB.replace("steps: 12", "steps: 1")
    .replace("warmupSteps: 3", "warmupSteps: 1")
    .replace('{learningRate: "2e-3"}', '{learningRate: "1e-30", weightDecay: "0"}')  # leaves every parameter unchanged
    .replace("checkpoint: {", "checkpoint: {from: {path: EARLIER}, ")
)


def run(root: Path, name: str, document: str, **places: Path) -> int:
    for word, place in places.items():
        document = document.replace(word, str(place))
    (root / f"{name}.yaml").write_text(document, encoding="utf-8")
    return run_app(["run", str(root / f"{name}.yaml"), "--output", str(root / name)])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a finished run, `earlier`, and a text on which it was not trained."""
    root = tmp_path_factory.mktemp("from")
    text = local_runs.write_text(root / "text")
    (root / "new").mkdir()
    (text / "tarfile.py").rename(root / "new" / "tarfile.py")
    assert run(root, "earlier", EARLIER, TEXT=text) == 0
    return root


def newest(output: Path) -> StoredCheckpoint:
    found = choose_resume(output / "checkpoints").checkpoint
    assert found is not None
    return found


def tensors(output: Path) -> dict[str, Tensor]:
    files = newest(output).path.glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("named", ["the run", "its checkpoints", "a checkpoint"])
def test_a_run_starts_from_the_parameters_of_another(root: Path, named: str) -> None:
    earlier = root / "earlier"
    place = {"the run": earlier, "its checkpoints": earlier / "checkpoints", "a checkpoint": newest(earlier).path}
    name = named.replace(" ", "-")
    assert run(root, name, LATER, TEXT=root / "new", EARLIER=place[named]) == 0
    before, after = tensors(earlier), tensors(root / name)
    masters = [one for one in before if one.startswith("master.")]
    assert len(masters) > 20 and all(torch.equal(after[one], before[one]) for one in masters)
    assert not any(torch.equal(after[one], before[one]) for one in before if one.startswith("exp_avg."))
    state = newest(root / name).manifest.state
    assert (state.step, state.scalars["num_updates"]) == (1, 1.0)
    assert state.tokenizer_xxh3 == newest(earlier).manifest.state.tokenizer_xxh3


def test_a_run_that_has_begun_resumes_its_own_checkpoint(root: Path) -> None:
    more = LATER.replace("steps: 1,", "steps: 2,").replace("everySteps: 3}", "everySteps: 1}")
    assert run(root, "gone", LATER, TEXT=root / "new", EARLIER=root / "earlier") == 0
    assert run(root, "gone", more, TEXT=root / "new", EARLIER=root / "earlier") == 0
    assert [one["resumed_from_step"] for one in local_runs.events(root / "gone", "start")] == [0, 1]


@pytest.mark.ci
def test_a_damaged_newest_checkpoint_is_passed_over_and_told(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = Path(shutil.copytree(root / "earlier", root / "half"))
    (file,) = damaged.glob("checkpoints/step-4.e1/tensors-00000.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    assert run(root, "older", LATER, TEXT=root / "new", EARLIER=damaged) == 0
    said = capsys.readouterr().err
    assert "skipped checkpoint: step-4.e1/tensors-00000.safetensors: expected" in said
    assert f"loading the parameters of {damaged}/checkpoints/step-3.e1" in said


@pytest.mark.ci
def test_another_start_is_another_run_until_there_is_a_checkpoint(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(root, "begun", LATER, TEXT=root / "new", EARLIER=root / "earlier") == 0
    other = LATER.replace("steps: 1,", "steps: 2,")
    assert run(root, "begun", other, TEXT=root / "new", EARLIER=root / "earlier" / "checkpoints") == 0
    shutil.rmtree(root / "begun" / "checkpoints")
    capsys.readouterr()
    assert run(root, "begun", LATER, TEXT=root / "new", EARLIER=newest(root / "earlier").path) == 64
    assert "spec.checkpoint.from.path was " in capsys.readouterr().err


def rejection(root: Path, capsys: pytest.CaptureFixture[str], document: str, earlier: Path, code: int) -> str:
    shutil.rmtree(root / "rejected", ignore_errors=True)
    assert run(root, "rejected", document, TEXT=root / "new", EARLIER=earlier) == code
    return capsys.readouterr().err


@pytest.mark.ci
def test_what_cannot_be_the_start_is_an_error(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = rejection(root, capsys, LATER.replace("hiddenSize: 64", "hiddenSize: 32"), root / "earlier", 64)
    assert "belongs to another model" in other
    said = rejection(root, capsys, LATER, root / "text", 64)
    assert f"spec.checkpoint.from.path = {root}/text: contains no checkpoint; name a checkpoint" in said
    assert "contains no checkpoint; name a checkpoint" in rejection(
        root, capsys, LATER, root / "new" / "tarfile.py", 64
    )
    assert not (root / "rejected").exists()
    adapters = LATER.replace("  data:", "    lora: {rank: 2}\n  data:", 1).replace(', dropout: "0.1"', "")
    said = rejection(root, capsys, adapters, root / "earlier", 64)
    assert "spec.checkpoint.from: " in said and "exp_avg" not in said and "as spec.model.source" in said
    damaged = Path(shutil.copytree(root / "earlier", root / "damaged"))
    for file in damaged.glob("checkpoints/step-*/*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    said = rejection(root, capsys, LATER, damaged, 64)
    assert (
        f"spec.checkpoint.from = {damaged}: the checkpoint is damaged: step-4.e1/tensors-00000.safetensors: expected"
        in said
    )
    one = rejection(root, capsys, LATER, damaged / "checkpoints" / "step-3.e1", 64)
    assert "the checkpoint is damaged: step-3.e1/tensors-00000.safetensors" in one
    lost = Path(shutil.copytree(root / "earlier", root / "lost"))
    shutil.rmtree(lost / "corpus")
    assert "its tokenizer.json was not found" in rejection(root, capsys, LATER, lost, 64)
