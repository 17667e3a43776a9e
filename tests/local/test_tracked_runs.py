"""A real run, killed and resumed, in three trackers at once; and a run whose trackers cannot be reached."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import local_runs, tracked_points
from harness.patience import wait_until
from spillway.api.job_file import JobFile
from spillway.api.tracking import Tracking
from spillway_trainer.reporting import trackers

pytestmark = pytest.mark.ci
STEPS = 200
"""enough that trackers have some steps long before the last one"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    with tracked_points.mlflow_server(tmp_path) as uri:
        yield uri


def tracked_job(root: Path, tracking: dict[str, Any], epoch: int, name: str = "run", steps: int = STEPS) -> JobFile:
    text = root / "text" if (root / "text").is_dir() else local_runs.write_text(root / "text")
    job = local_runs.job_file(root / name, text, root / "corpus", epoch)
    update = {
        "tracking": Tracking.model_validate(tracking),
        "training": job.spec.training.model_copy(update={"steps": steps}),
    }
    return job.model_copy(update={"spec": job.spec.model_copy(update=update)})


def points(output: Path) -> dict[str, tracked_points.Curve]:
    """The curves in run.jsonl; for a repeated step, its first value."""
    found: dict[str, dict[int, float]] = {}
    for event in (*local_runs.events(output, "step"), *local_runs.events(output, "evaluation")):
        for name, value in trackers.figures(event):
            found.setdefault(name, {}).setdefault(event["step"], value)
    return {name: sorted(curve.items()) for name, curve in found.items()}


def test_a_killed_run_is_one_run_in_every_tracker_without_a_step_twice_or_missing(server: str, tmp_path: Path) -> None:
    wandb = {"project": "p", "mode": "offline"}
    asked = {"tensorBoard": {}, "mlflow": {"uri": server}, "wandb": wandb}
    output = tmp_path / "run"
    killed = local_runs.start_attempt(tracked_job(tmp_path, asked, epoch=1), local_runs.spread_plan())

    def sent() -> list[int]:
        files = [output / f"tracker-{kind}.json" for kind in trackers.KINDS]
        return [json.loads(file.read_text())["test"]["step"] if file.exists() else 0 for file in files]

    wait_until(lambda: any(sent()))
    assert killed.pid is not None
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    assert 0 < max(sent()) < STEPS
    resumed = tracked_job(tmp_path, asked, epoch=2)
    assert local_runs.complete(resumed, local_runs.spread_plan()) == 0, local_runs.log_of(output, 2)
    expected = points(output)
    assert [step for step, _ in expected["train/loss"]] == [*range(1, STEPS + 1)]
    (run,) = tracked_points.mlflow_runs(server, "Default").values()
    assert tracked_points.mlflow_curves(server, run) == expected
    assert tracked_points.wandb_curves(output) == expected
    single = {name: [(step, float(np.float32(value))) for step, value in curve] for name, curve in expected.items()}
    assert tracked_points.tensorboard_curves(output / "tensorboard") == single
    assert run.info.status == "FINISHED"
    said = [line for line in local_runs.log_of(output, 2).splitlines() if line.startswith("tracker ")]
    late = [line for line in said if not line.endswith(": events are sent now")]
    assert all("timed out" in line for line in late), said  # a server on a busy machine may answer late


def test_trackers_out_of_reach_change_neither_the_end_nor_a_bit(tmp_path: Path) -> None:
    nowhere = {"uri": "http://127.0.0.1:9", "experiment": "e"}
    curves = []
    for name, asked in (("with", {"mlflow": nowhere}), ("without", {"tensorBoard": {}})):
        job = tracked_job(tmp_path, asked, epoch=1, name=name, steps=6)
        assert local_runs.complete(job, local_runs.spread_plan()) == 0, local_runs.log_of(tmp_path / name, 1)
        curves.append(points(tmp_path / name)["train/loss"])
    assert curves[0] == curves[1]
    said = [line for line in local_runs.log_of(tmp_path / "with", 1).splitlines() if line.startswith("tracker")]
    assert len(said) == 2
    assert "training continues" in said[0] and "events not sent" in said[1]
