"""`spillway ckpt`, where its output depends on what is in the directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from cases.checkpoint_cases import history
from spillway_cli import checkpoint_command
from spillway_cli.console import Format


def test_ls_names_a_damaged_checkpoint_also_on_a_narrow_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    history(tmp_path, (1, (10,)))
    (tmp_path / "step-10.e1" / "manifest.json").write_bytes(b"")
    assert checkpoint_command.ls(tmp_path, Format.TEXT) == 0
    table, problem = capsys.readouterr().out.split("step-10.e1: ")
    assert "step-10.e1" in table
    assert "no: damaged" in table
    assert " ".join(problem.split()).startswith("manifest.json: expected an intact manifest, found")
