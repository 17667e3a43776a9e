"""`spillway demo` as a newcomer runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.local_runs import write_text
from spillway.api.training_job import TrainingJob
from spillway.errors import ExitCode
from spillway_cli import demo_command
from spillway_cli.console import Format


def test_a_shortened_demo_is_killed_resumes_and_proves_its_claims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Uses the demo's model and budgets with a fifth of its steps, on less text."""
    document = demo_command.demo_job().model_dump(mode="json", by_alias=True, exclude_unset=True)
    document["spec"]["data"] = {"text": {"path": str(write_text(tmp_path / "text"))}}
    document["spec"]["training"] |= {"steps": 8, "schedule": {"name": "Constant"}}
    document["spec"]["checkpoint"]["everySteps"] = 4
    monkeypatch.setattr(demo_command, "demo_job", lambda: TrainingJob.model_validate(document))
    monkeypatch.setattr(demo_command, "STEPS_AFTER_CHECKPOINT", 2)
    monkeypatch.setattr(demo_command, "CLEARLY_BELOW", 1.0)
    code = demo_command.demo(tmp_path / "demo", keep=False, output=Format.JSON)
    verdict = json.loads(capsys.readouterr().out)
    assert [claim for claim in verdict["claims"] if not claim["holds"]] == []
    assert (code, len(verdict["claims"])) == (ExitCode.COMPLETED, 7)


@pytest.mark.full
def test_every_claim_of_the_demo_holds_and_nothing_is_left_outside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workplace = tmp_path / "workplace"
    workplace.mkdir()
    command = [sys.executable, "-m", "spillway_cli", "demo", "--output", "demo", "-o", "json"]
    done = subprocess.run(command, cwd=workplace, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = json.loads(done.stdout)
    with capsys.disabled():
        print(f"\nspillway demo: {verdict['seconds']:.0f} s (its promise: 120 s on 2 quiet cores)")
    assert all(claim["holds"] for claim in verdict["claims"])
    assert [path.name for path in workplace.iterdir()] == ["demo"]
