"""`spillway run` with documents from the user's own function."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cases.killed_model import MARKER
from harness import local_runs
from harness.places import IMPORTABLE
from spillway.errors import ExitCode

pytestmark = pytest.mark.ci


def run(output: Path, entry_point: str, **environment: str) -> subprocess.CompletedProcess[str]:
    document = yaml.safe_load(local_runs.JOB)
    document["spec"]["model"] = {"entrypoint": "cases.killed_model:build"}
    document["spec"]["data"] = {"entrypoint": entry_point, "evaluation": {"fraction": "0.05", "everySteps": 5}}
    output.parent.mkdir(exist_ok=True)
    job = output.with_suffix(".yaml")
    job.write_text(yaml.safe_dump(document))
    command = [sys.executable, "-P", "-m", "spillway_cli", "run", str(job), "--output", str(output)]
    given = {**os.environ, **IMPORTABLE, **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=given)


def curves(output: Path) -> list[dict[int, float]]:
    return [
        {entry["step"]: entry["loss"] for entry in local_runs.events(output, kind)} for kind in ("step", "evaluation")
    ]


def test_a_killed_run_on_an_entry_point_goes_on_as_the_uninterrupted_one(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for output, environment in ((whole, {}), (cut, {MARKER: str(cut.with_suffix(".killed"))})):
        done = run(output, "cases.user_data:texts", **environment)
        assert done.returncode == 0, done.stdout + done.stderr
    assert [one["resumed_from_step"] for one in local_runs.events(whole, "start")] == [0]
    starts = [one["resumed_from_step"] for one in local_runs.events(cut, "start")]
    assert len(starts) == 2 and starts[1] > 0
    assert curves(cut) == curves(whole)
    logs = [(cut / "attempts" / f"attempt-{epoch}" / "trainer.log").read_text() for epoch in (1, 2)]
    assert [log.count("corpus: building from cases.user_data:texts") for log in logs] == [1, 0]
    files = [sorted((output / "corpus").iterdir()) for output in (whole, cut)]
    assert [one.name for one in files[0]] == [one.name for one in files[1]]
    tokens = [(output / "corpus" / "tokens-00000.bin").read_bytes() for output in (whole, cut)]
    assert tokens[0] == tokens[1]


def test_a_run_whose_entry_point_raises_ends_with_one_error(tmp_path: Path) -> None:
    done = run(tmp_path / "run", "cases.user_data:raises")
    said = "spec.data.entrypoint = cases.user_data:raises: raised FileNotFoundError after 1 document: no such shard"
    assert done.returncode == ExitCode.USER_ERROR and said in done.stderr, done.stdout + done.stderr
    assert [one for one in (tmp_path / "run").iterdir() if one.name.startswith("corpus")] == []
