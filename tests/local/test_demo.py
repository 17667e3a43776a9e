"""`spillway demo` as a newcomer runs it: the whole of it, since it is the first thing that anybody does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


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
