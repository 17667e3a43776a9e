"""`spillway ckpt gc`: what is listed, what is deleted, and what never is."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from spillway_cli import unused_checkpoints
from spillway_cli.__main__ import run_app
from spillway_trainer.checkpoints.directory import Epoch, Owner, owner_of

GONE, THERE = Owner("team", "gone", "uid-1"), Owner("team", "there", "uid-2")
OLD = time.time() - 3 * 86400


def kept(path: Path, owner: Owner | None, seconds: float = OLD) -> Path:
    """A checkpoint directory that was last written then."""
    Epoch.start(path, 1, owner=owner)
    (path / "step-1.e1").mkdir()
    (path / "step-1.e1" / "tensors.safetensors").write_bytes(b"x" * 1000)
    for file in (*path.rglob("*"), path):
        os.utime(file, (seconds, seconds))
    return path


@pytest.fixture
def claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A claim; in the cluster there is only the job `there`."""

    class Cluster:
        def items(self, path: str) -> list[dict[str, Any]]:
            assert path.endswith("/trainingjobs") and "namespaces" not in path
            return [{"metadata": {"name": "there", "uid": THERE.uid}}]

    monkeypatch.setattr(unused_checkpoints, "connect", lambda context: Cluster())
    return tmp_path / "claim"


def collected(claim: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, str]:
    assert run_app(["ckpt", "gc", str(claim), "-o", "json", *options]) == 0
    found = json.loads(capsys.readouterr().out)["directories"]
    return {str(Path(one["path"]).relative_to(claim)): one["state"].partition(":")[0] for one in found}


def test_only_what_belongs_to_a_job_that_is_gone_is_deleted(claim: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept(claim / "gone-uid-1", GONE)
    kept(claim / "there-uid-2", THERE)
    kept(claim / "local", None)
    kept(claim / "deep" / "team" / "gone", GONE)
    kept(claim / "sweep" / "members" / "a", GONE)
    kept(claim / "sweep" / "members" / "b", GONE)
    kept(claim / "lately", GONE, seconds=time.time())
    kept(claim / "below", GONE)
    kept(claim / "below" / "another", THERE)
    (claim / "notes").mkdir()
    (claim / "link").symlink_to(claim / "gone-uid-1")
    states = {
        "gone-uid-1": "unused", "deep/team/gone": "unused", "sweep": "unused", "there-uid-2": "in use",
        "local": "kept", "lately": "kept", "below": "in use",
    }  # fmt: skip
    assert collected(claim, capsys) == states
    assert (claim / "gone-uid-1").is_dir(), "nothing is deleted without --delete"
    assert collected(claim, capsys, "--older-than", "4d")["gone-uid-1"] == "kept"
    assert collected(claim, capsys, "--delete") == states
    left = {name: state for name, state in states.items() if state != "unused"}
    assert collected(claim, capsys) == left
    assert (claim / "notes").is_dir() and (claim / "below" / "another" / "step-1.e1").is_dir()


def test_table_says_how_much_could_be_freed(claim: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept(claim / "gone", GONE)
    assert run_app(["ckpt", "gc", str(claim)]) == 0
    printed = capsys.readouterr().out
    assert "team/gone" in printed and "1 of 1 directories" in printed and "--delete" in printed


@pytest.mark.parametrize(
    ("arguments", "said"), [(["--older-than", "soon"], "for example 7d"), (["--older-than", "0d"], "for example 7d")]
)
def test_an_age_that_is_none_is_an_error(
    claim: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    claim.mkdir()
    assert run_app(["ckpt", "gc", str(claim), *arguments]) == 64
    assert said in capsys.readouterr().err
    assert run_app(["ckpt", "gc", str(claim / "none")]) == 64


def test_an_owner_is_read_from_the_newest_epoch_file_that_is_intact(tmp_path: Path) -> None:
    kept(tmp_path, GONE)
    assert owner_of(tmp_path) == GONE
    (tmp_path / "epoch-2.json").write_text("{}")
    assert owner_of(tmp_path) == GONE
    assert owner_of(tmp_path / "none") is None
