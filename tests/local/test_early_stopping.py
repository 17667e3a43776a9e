"""Runs that end when the evaluation loss no longer falls, and keep the checkpoint at which it was lowest."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness import local_runs
from spillway_cli.__main__ import run_app
from spillway_trainer.checkpoints.directory import list_checkpoints, names_in
from spillway_trainer.checkpoints.manifest import open_checkpoint

EVERY = 2
JOB = (
    local_runs.JOB.replace("everySteps: 7", f"everySteps: {EVERY}")
    .replace("steps: 12", "steps: 40, earlyStopping: {patience: 3}")
    .replace('"2e-3"', '"3"')  # so high that the loss soon rises
    .replace("everySteps: 3}", "everySteps: 1, keepBest: true}")
)


@dataclass(frozen=True)
class Stopped:
    job: Path
    output: Path
    document: dict[str, Any]

    def run(self, output: Path | None = None) -> int:
        return run_app(["run", str(self.job), "--output", str(output or self.output), "-o", "json"])


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    root = tmp_path_factory.mktemp("stopped")
    job, output = root / "job.yaml", root / "out"
    job.write_text(JOB.replace("TEXT", str(local_runs.write_text(root / "text"))), encoding="utf-8")
    made = Stopped(job, output, {})
    with pytest.MonkeyPatch.context() as patch:
        printed: list[Any] = []
        patch.setattr("spillway_cli.run.command.print_json", printed.append)
        assert made.run() == 0
    return Stopped(job, output, printed[0])


def losses(output: Path) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in local_runs.events(output, "evaluation")}


def test_a_run_ends_after_evaluations_without_improvement(stopped: Stopped) -> None:
    evaluated = losses(stopped.output)
    best, last = min(evaluated, key=lambda step: evaluated[step]), max(evaluated)
    assert last == best + 3 * EVERY < 40
    assert stopped.document["message"] == (
        f"stopped early at step {last} of 40: 3 evaluations without improvement; the lowest evaluation loss, "
        f"{evaluated[best]:.4f}, is that of step {best}"
    )
    assert (stopped.document["lowestEvaluationStep"], stopped.document["steps"]) == (best, last)


def test_the_best_checkpoint_outlives_newer_ones(stopped: Stopped) -> None:
    best = stopped.document["lowestEvaluationStep"]
    last = stopped.document["steps"]
    found = list_checkpoints(stopped.output / "checkpoints")
    assert [one.step for one in found] == [last, last - 1, best]
    assert {one.best_step for one in found} == {best}


def test_a_run_that_stopped_early_is_complete(stopped: Stopped, capsys: pytest.CaptureFixture[str]) -> None:
    assert stopped.run() == 0
    assert "already complete, stopped early at step" in capsys.readouterr().err


def test_a_run_resumed_within_its_patience_ends_at_the_same_step(stopped: Stopped, tmp_path: Path) -> None:
    """The run resumes from a checkpoint before its end, as after a crash."""
    output = Path(shutil.copytree(stopped.output, tmp_path / "out"))
    newest = max(names_in(output / "checkpoints"), key=lambda name: name.step)
    before = open_checkpoint(output / "checkpoints" / str(newest)).manifest
    shutil.rmtree(output / "checkpoints" / str(newest))
    assert stopped.run(output) == 0
    assert losses(output) == losses(stopped.output)
    again = max(names_in(output / "checkpoints"), key=lambda name: name.step)
    after = open_checkpoint(output / "checkpoints" / str(again)).manifest
    assert (again.epoch, again.step, after.state) == (2, newest.step, before.state)
    assert [one.xxh3_128 for one in after.files] == [one.xxh3_128 for one in before.files]


def test_the_best_checkpoint_is_listed_and_exported(
    stopped: Stopped, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = stopped.document["lowestEvaluationStep"]
    run_app(["ckpt", "ls", str(stopped.output)])
    assert f"step-{best}.e1 (best)" in capsys.readouterr().out
    exported = ["ckpt", "export", str(stopped.output), "--to", str(tmp_path / "model"), "-o", "json"]
    assert run_app([*exported, "--best"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"] == f"step-{best}.e1"
    assert run_app([*exported, "--best", "--step", "3"]) == 64
    assert "both choose a checkpoint" in capsys.readouterr().out
