"""Runs whose length is given in epochs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness import local_runs
from spillway_cli.__main__ import run_app
from spillway_trainer.checkpoints.directory import choose_resume

JOB = (
    local_runs.JOB.replace("steps: 12", "epochs: 1")
    .replace(', evaluation: {fraction: "0.05", everySteps: 7}', "")
    .replace("warmupSteps: 3", 'warmupRatio: "0.1"')
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a text of about sixty sequences."""
    root = tmp_path_factory.mktemp("epochs")
    text = local_runs.write_text(root / "all").joinpath("argparse.py").read_text(encoding="utf-8")
    (root / "text").mkdir()
    (root / "text" / "some.txt").write_text(text[:9000], encoding="utf-8")
    return root


def train(root: Path, epochs: int, capsys: pytest.CaptureFixture[str]) -> str:
    job = root / "job.yaml"
    job.write_text(JOB.replace("TEXT", str(root / "text")).replace("epochs: 1", f"epochs: {epochs}"), encoding="utf-8")
    assert run_app(["run", str(job), "--output", str(root / "out")]) == 0
    printed = capsys.readouterr()
    return printed.out + printed.err


def test_epochs_become_steps_and_can_be_raised(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for epochs, ends in ((1, 1), (1, 1), (2, 2)):
        printed = train(root, epochs, capsys)
        log = (root / "out" / "attempts" / f"attempt-{ends}" / "trainer.log").read_text(encoding="utf-8")
        counted = re.search(r"(\d+) epochs? of (\d+) sequences: (\d+) steps", log)
        assert counted is not None
        sequences, steps = int(counted[2]), int(counted[3])
        assert (int(counted[1]), steps) == (epochs, -(-epochs * sequences // 8))
        assert re.search(rf"steps +{steps} of {steps}", printed)
        found = choose_resume(root / "out" / "checkpoints").checkpoint
        assert found is not None
        state = found.manifest.state
        assert (state.step, state.samples_consumed, state.schedule["num_steps"]) == (steps, 8 * steps, steps)
        assert 0 <= state.samples_consumed - epochs * sequences < 8
        assert len(local_runs.events(root / "out", "start")) == ends  # a second invocation has nothing to do
    assert "spec.training.epochs was 1, is now 2" in printed


def test_a_warm_up_longer_than_the_epochs_is_an_error(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = JOB.replace("TEXT", str(root / "text")).replace('warmupRatio: "0.1"', "warmupSteps: 100")
    (root / "long.yaml").write_text(document, encoding="utf-8")
    assert run_app(["run", str(root / "long.yaml"), "--output", str(root / "long")]) == 64
    assert re.search(
        r"warmupSteps is 100, and 1 epoch of this data are only \d+ steps; lower warmupSteps", capsys.readouterr().err
    )


def test_fewer_epochs_than_are_trained_are_an_error(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = root / "job.yaml"
    job.write_text(JOB.replace("TEXT", str(root / "text")), encoding="utf-8")
    assert run_app(["run", str(job), "--output", str(root / "out")]) == 64
    assert re.search(
        r"spec.training.epochs is 1, which is \d+ steps, but \d+ steps are already trained\n", capsys.readouterr().err
    )
    assert len(local_runs.events(root / "out", "end")) == 2, "rejected before an attempt"
