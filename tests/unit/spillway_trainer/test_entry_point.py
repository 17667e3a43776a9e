"""python -m spillway_trainer: whatever ends an attempt, it says so in all three places."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness import local_runs
from spillway.errors import UserError
from spillway_trainer import __main__ as entry_point
from spillway_trainer import config, run_job
from spillway_trainer.checkpoints.directory import CheckpointNotWritten
from spillway_trainer.ranks import ONE_RANK
from spillway_trainer.trainer import RunProgress

PLAN = local_runs.spread_plan()


@pytest.fixture(autouse=True)
def own_signal_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def write_files(directory: Path) -> None:
    job = local_runs.job_file(directory, directory / "text", directory / "corpus", epoch=1)
    (directory / "job.json").write_text(job.model_dump_json())
    (directory / "plan.json").write_text(PLAN.model_dump_json())


def termination(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / "termination-1.json").read_text())
    return content


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot be read: No such file"),
        ("{", r"1 wrong field\n  content: Invalid JSON"),
        ("{}", r"\d+ wrong fields\n  name: Field required"),
        ("\udcff", r"1 wrong field\n  content: Invalid JSON"),
    ],
    ids=["absent", "cut off", "of nothing", "no text"],
)
def test_a_bad_job_file_is_a_user_error_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, sentence: str
) -> None:
    if content is not None:
        (tmp_path / "job.json").write_bytes(content.encode(errors="surrogateescape"))
    assert entry_point.main([str(tmp_path)]) == 64
    assert re.search(rf"UserError: \S+job\.json: {sentence}", capsys.readouterr().out)


def test_a_bad_plan_file_ends_the_attempt_in_words(tmp_path: Path) -> None:
    write_files(tmp_path)
    (tmp_path / "plan.json").write_text("{}")
    assert entry_point.main([str(tmp_path)]) == 64
    assert "plan.json" in termination(tmp_path)["message"]
    assert local_runs.events(tmp_path, "end")[0]["reason"] == "UserError"


def test_a_log_that_cannot_be_written_still_leaves_a_termination_message(tmp_path: Path) -> None:
    write_files(tmp_path)
    (tmp_path / "run.jsonl").mkdir()
    assert entry_point.main([str(tmp_path)]) == 64
    assert "run.jsonl: cannot be written" in termination(tmp_path)["message"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_log_that_fills_up_still_leaves_a_termination_message(tmp_path: Path) -> None:
    write_files(tmp_path)
    (tmp_path / "run.jsonl").symlink_to("/dev/full")
    assert entry_point.main([str(tmp_path)]) == 64
    assert termination(tmp_path)["exitCode"] == 64


def test_an_interrupt_from_the_keyboard_leaves_a_termination_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    write_files(tmp_path)
    monkeypatch.setattr(entry_point, "run_job", interrupted)
    assert entry_point.main([str(tmp_path)]) == 1
    assert termination(tmp_path)["reason"] == "RankCrashed"
    assert local_runs.events(tmp_path, "end")[0]["exit_code"] == 1


def test_sigterm_while_an_attempt_says_how_it_ended_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path)
    (tmp_path / "plan.json").write_text("{}")
    write = entry_point.write_termination

    def write_under_sigterm(*what: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        write(*what)

    monkeypatch.setattr(entry_point, "write_termination", write_under_sigterm)
    assert entry_point.main([str(tmp_path)]) == 64
    assert termination(tmp_path)["reason"] == "UserError"


WRONG_PLANS: dict[str, Callable[[Any], Any]] = {
    "activation policies of 3 segments": lambda p: {
        "activations": changed(p.activations, answers=p.activations.answers[:3])
    },
    "micro-batches": lambda p: {"num_micro_batches": 3},
    "2 ranks": lambda p: {"world_size": 2},
    "strategy Zero3 on Cuda devices": lambda p: {"device": "Cuda", "strategy": "Zero3"},
    "no bytes or budget of nvme": lambda p: {"budget": {tier: 1 for tier in p.budget if tier != "nvme"}},
    "on NVMe, but no bytes on NVMe": lambda p: {"bytes": {tier: type(part)() for tier, part in p.bytes.items()}},
}


def changed(part: Any, **values: object) -> Any:
    return part.model_copy(update=values)


@pytest.mark.parametrize("what", WRONG_PLANS)
def test_a_plan_for_another_job_is_rejected_in_a_sentence(tmp_path: Path, what: str) -> None:
    job = local_runs.job_file(tmp_path, tmp_path / "text", tmp_path / "corpus", epoch=1)
    config.check_plan(job, PLAN, num_segments=6)
    with pytest.raises(config.UserError, match=what):
        config.check_plan(job, changed(PLAN, **WRONG_PLANS[what](PLAN)), num_segments=6)


def test_in_a_cluster_a_directory_of_another_job_is_not_trained_in(tmp_path: Path) -> None:
    job = local_runs.job_file(tmp_path, tmp_path / "text", tmp_path / "corpus", epoch=1)
    mine = job.model_copy(update={"in_cluster": True, "namespace": "team", "uid": "uid-1"})
    run_job.start_epoch(mine)
    run_job.start_epoch(mine.model_copy(update={"epoch": 2}))
    with pytest.raises(UserError, match=r"another TrainingJob, team/small \(uid uid-1\)"):
        run_job.start_epoch(mine.model_copy(update={"epoch": 3, "uid": "uid-2"}))
    run_job.start_epoch(job.model_copy(update={"epoch": 4, "uid": "uid-2"}))  # a local run


def test_old_checkpoints_that_stay_cost_no_new_one(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def reject(keep: int, best_step: int) -> None:
        raise CheckpointNotWritten("old checkpoints not removed")

    spec = SimpleNamespace(checkpoint=SimpleNamespace(keep=2, keep_best=False))
    nothing = SimpleNamespace(states=dict, divided=None, prune=reject, spec=spec)
    committed = SimpleNamespace(manifest=SimpleNamespace(nbytes=7, state=RunProgress(step=3)))
    monkeypatch.setattr(run_job.checkpoint, "save", lambda *_, stay: committed)
    monkeypatch.setattr(run_job.RunCheckpoints, "_state", lambda _, progress: progress)
    checkpoints: Any = run_job.RunCheckpoints(*[nothing] * 6, ONE_RANK, nothing)
    assert checkpoints.commit(RunProgress(step=3), behind=True)[:2] == (3, 7)
    assert "old checkpoints not removed" in capsys.readouterr().out
