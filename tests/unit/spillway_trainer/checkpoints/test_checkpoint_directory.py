"""Lineage, commit, fence, prune and verify of the checkpoint directory."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.checkpoint_cases import commit, flip_bit, history, training_state
from spillway.errors import CheckpointCorrupt, Fenced, UserError
from spillway_trainer.checkpoints.directory import (
    CheckpointNotWritten,
    Epoch,
    Owner,
    choose_resume,
    lineage,
    list_checkpoints,
    verify,
)
from spillway_trainer.checkpoints.manifest import CheckpointName, Manifest, TensorEntry, open_checkpoint
from spillway_trainer.checkpoints.sealed_json import Unsealed, seal, unseal


def resumed(directory: Path) -> str | None:
    checkpoint = choose_resume(directory).checkpoint
    return None if checkpoint is None else str(checkpoint)


def names(directory: Path) -> list[str]:
    return [summary.name for summary in list_checkpoints(directory)]


def test_first_epoch_in_an_empty_directory_starts_from_nothing(tmp_path: Path) -> None:
    assert Epoch.start(tmp_path / "checkpoints", 1).resume.checkpoint is None


def test_next_epoch_resumes_from_the_newest_checkpoint(tmp_path: Path) -> None:
    history(tmp_path, (1, (10, 20)))
    epoch = Epoch.start(tmp_path, 2)
    assert str(epoch.resume.checkpoint) == "step-20.e1"


def test_epoch_file_says_what_the_epoch_resumes_from(tmp_path: Path) -> None:
    history(tmp_path, (1, (10,)), (2, ()))
    assert unseal((tmp_path / "epoch-2.json").read_bytes())["resumes_from"] == "step-10.e1"


def test_manifest_names_the_checkpoint_it_continues(tmp_path: Path) -> None:
    history(tmp_path, (1, (10,)), (2, (20, 30)))
    parents = [summary.parent for summary in list_checkpoints(tmp_path)]
    assert parents == ["step-20.e2", "step-10.e1", None]


def test_state_comes_back_exactly(tmp_path: Path) -> None:
    history(tmp_path, (1, (10,)))
    checkpoint = choose_resume(tmp_path).checkpoint
    assert checkpoint is not None
    assert checkpoint.manifest.state == training_state(10)


@settings(deadline=None)
@given(st.floats(allow_nan=False))
def test_scalars_survive_bit_for_bit(value: float) -> None:
    state = training_state(1, scalars={"beta1_power": value})
    text = json.dumps(state.to_json())
    assert type(state).from_json(json.loads(text)).scalars["beta1_power"].hex() == value.hex()


def commit_late(directory: Path, step: int, epoch: int) -> None:
    """What a zombie leaves whose rename was already on its way when it was superseded: an intact checkpoint."""
    name = CheckpointName(epoch, step)
    manifest = Manifest(name, None, (), {}, training_state(step), "0")
    (directory / str(name)).mkdir()
    (directory / str(name) / "manifest.json").write_bytes(manifest.to_bytes())


def test_late_commit_of_a_superseded_epoch_is_ignored(tmp_path: Path) -> None:
    history(tmp_path, (1, (10,)), (2, ()))
    commit_late(tmp_path, 20, epoch=1)
    assert resumed(tmp_path) == "step-10.e1"


def test_late_commit_is_listed_outside_the_lineage(tmp_path: Path) -> None:
    history(tmp_path, (1, (10,)), (2, ()))
    commit_late(tmp_path, 20, epoch=1)
    listed = {summary.name: summary.in_lineage for summary in list_checkpoints(tmp_path)}
    assert listed == {"step-20.e1": False, "step-10.e1": True}


def test_superseded_epoch_cannot_commit(tmp_path: Path) -> None:
    zombie = history(tmp_path, (1, (10,)))
    Epoch.start(tmp_path, 2)
    with pytest.raises(Fenced, match="attempt 2 has taken over the run"):
        commit(zombie, 20)


def test_epoch_superseded_while_it_writes_cannot_commit(tmp_path: Path) -> None:
    zombie = history(tmp_path, (1, (10,)))

    def write() -> None:
        with zombie.pending(20) as pending:
            Epoch.start(tmp_path, 2)
            pending.path.mkdir(exist_ok=True)  # a zombie whose temporary directory was not even cleared
            pending.commit(training_state(20))

    with pytest.raises(Fenced):
        write()
    assert names(tmp_path) == ["step-10.e1"]


def test_superseded_epoch_is_fenced_when_its_files_were_deleted(tmp_path: Path) -> None:
    zombie = history(tmp_path, (1, (10,)))

    def write() -> None:
        with zombie.pending(20) as pending:
            Epoch.start(tmp_path, 2)
            pending.files.write(pending.path / "tensors-00000.safetensors", [memoryview(b"late")])

    with pytest.raises(Fenced):
        write()


def test_superseded_epoch_cannot_prune(tmp_path: Path) -> None:
    zombie = history(tmp_path, (1, (10, 20, 30)))
    Epoch.start(tmp_path, 2)
    with pytest.raises(Fenced):
        zombie.prune(2)


@pytest.mark.parametrize("number", [1, 2])
def test_epoch_that_is_not_the_newest_cannot_start(tmp_path: Path, number: int) -> None:
    Epoch.start(tmp_path, 2)
    with pytest.raises(Fenced):
        Epoch.start(tmp_path, number)


def test_lineage_leads_through_an_epoch_that_committed_nothing(tmp_path: Path) -> None:
    history(tmp_path, (1, (10,)), (2, ()), (5, ()))
    assert resumed(tmp_path) == "step-10.e1"


def test_run_that_began_anew_ignores_what_came_later_from_before(tmp_path: Path) -> None:
    history(tmp_path, (1, ()), (2, ()))
    commit_late(tmp_path, 20, epoch=1)
    assert resumed(tmp_path) is None


def test_corrupt_checkpoint_is_passed_over_and_reported(tmp_path: Path) -> None:
    history(tmp_path, (1, (10, 20)))
    flip_bit(tmp_path / "step-20.e1" / "tensors-00001.safetensors", 77)
    resume = choose_resume(tmp_path)
    assert str(resume.checkpoint) == "step-10.e1"
    assert [(problem.checkpoint, problem.file) for problem in resume.passed_over] == [
        ("step-20.e1", "tensors-00001.safetensors")
    ]


def test_missing_file_is_named_with_what_was_expected(tmp_path: Path) -> None:
    history(tmp_path, (1, (10,)))
    (tmp_path / "step-10.e1" / "tensors-00000.safetensors").unlink()
    (problem,) = verify(tmp_path / "step-10.e1")
    assert str(problem) == "step-10.e1/tensors-00000.safetensors: expected 280 bytes, found no such file"


@pytest.mark.parametrize("name", ["manifest.json", "tensors-00000.safetensors"])
def test_a_pipe_in_place_of_a_file_is_a_problem_and_not_waited_for(tmp_path: Path, name: str) -> None:
    history(tmp_path, (1, (10,)))
    (tmp_path / "step-10.e1" / name).unlink()
    os.mkfifo(tmp_path / "step-10.e1" / name)
    (problem,) = verify(tmp_path / "step-10.e1")
    assert (problem.file, problem.found) == (name, "not a regular file")


def test_checkpoint_under_another_name_does_not_verify(tmp_path: Path) -> None:
    history(tmp_path, (1, (10,)))
    (tmp_path / "step-10.e1").rename(tmp_path / "step-99.e1")
    assert [problem.found for problem in verify(tmp_path)] == ["the manifest of another checkpoint, step-10.e1"]


def test_no_usable_checkpoint_is_an_error_with_every_problem(tmp_path: Path) -> None:
    history(tmp_path, (1, (10, 20)))
    for name in ("step-10.e1", "step-20.e1"):
        (tmp_path / name / "manifest.json").unlink()
    with pytest.raises(CheckpointCorrupt, match=r"(?s)step-20\.e1/manifest\.json.*step-10\.e1/manifest\.json"):
        Epoch.start(tmp_path, 2)


def test_vanished_checkpoints_are_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    epoch = history(tmp_path, (1, (10,)), (2, ()))
    epoch.files.remove_tree(tmp_path / "step-10.e1")
    with pytest.raises(CheckpointCorrupt, match=r"step-10\.e1"):
        choose_resume(tmp_path)


def test_corrupt_epoch_file_costs_nothing_but_is_reported(tmp_path: Path) -> None:
    history(tmp_path, (1, (10,)), (2, ()))
    flip_bit(tmp_path / "epoch-2.json", 300)
    assert resumed(tmp_path) == "step-10.e1"
    assert [problem.file for problem in verify(tmp_path)] == ["epoch-2.json"]


def test_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    epoch = history(tmp_path, (1, (10,)))
    with pytest.raises(CheckpointNotWritten, match="never overwritten"):
        commit(epoch, 10)
    assert not verify(tmp_path)


def test_failure_in_the_middle_leaves_nothing_behind(tmp_path: Path) -> None:
    epoch = history(tmp_path, (1, (10,)))
    with pytest.raises(ZeroDivisionError), epoch.pending(20):
        raise ZeroDivisionError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch-1.json", "step-10.e1"]


def test_prune_keeps_the_newest_of_its_epoch(tmp_path: Path) -> None:
    epoch = history(tmp_path, (1, (10, 20, 30, 40)))
    assert [str(name) for name in epoch.prune(2)] == ["step-10.e1", "step-20.e1"]
    assert names(tmp_path) == ["step-40.e1", "step-30.e1"]


def test_prune_keeps_the_newest_checkpoint_of_the_best_step(tmp_path: Path) -> None:
    epoch = history(tmp_path, (1, (10, 20)), (2, (10, 20, 30, 40)))
    epoch.prune(2, best_step=10)
    assert names(tmp_path) == ["step-40.e2", "step-30.e2", "step-10.e2"]


def test_prune_never_keeps_fewer_than_two(tmp_path: Path) -> None:
    epoch = history(tmp_path, (1, (10, 20, 30)))
    epoch.prune(0)
    assert names(tmp_path) == ["step-30.e1", "step-20.e1"]


def test_prune_counts_only_checkpoints_that_verify(tmp_path: Path) -> None:
    epoch = history(tmp_path, (1, (10, 20, 30)))
    flip_bit(tmp_path / "step-30.e1" / "tensors-00000.safetensors", 5)
    assert epoch.prune(2) == []


def test_prune_keeps_earlier_epochs_until_its_own_checkpoints_suffice(tmp_path: Path) -> None:
    epoch = history(tmp_path, (1, (10, 20)), (2, (30,)))
    assert epoch.prune(2) == []
    commit(epoch, 40)
    epoch.prune(2)
    assert names(tmp_path) == ["step-40.e2", "step-30.e2"]


def test_prune_touches_nothing_of_a_later_epoch(tmp_path: Path) -> None:
    epoch = history(tmp_path, (1, (10, 20, 30)))
    (tmp_path / "step-5.e2").mkdir()
    with pytest.raises(Fenced):
        epoch.prune(2)
    assert "step-5.e2" in names(tmp_path)


def test_start_clears_what_killed_writers_left(tmp_path: Path) -> None:
    history(tmp_path, (1, (10,)))
    (tmp_path / "step-20.e1.tmp").mkdir()
    (tmp_path / "step-20.e1.tmp" / "tensors-00000.safetensors").write_bytes(b"half")
    (tmp_path / "epoch-2.json.tmp").write_bytes(b"half")
    Epoch.start(tmp_path, 2)
    assert not list(tmp_path.glob("*.tmp"))


def test_strange_files_are_left_alone(tmp_path: Path) -> None:
    for name in ("lost+found", "notes.txt", "step-01.e1", "step-3", "step-3.e1.old"):
        (tmp_path / name).write_text("mine")
    history(tmp_path, (1, (10, 20, 30))).prune(2)
    assert {path.name for path in tmp_path.iterdir()} >= {"lost+found", "notes.txt", "step-01.e1", "step-3.e1.old"}


def test_directory_that_cannot_be_one_is_rejected_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot keep checkpoints in this directory"):
        Epoch.start(tmp_path / "file" / "checkpoints", 1)


def test_manifest_of_a_later_format_is_rejected_not_passed_over(tmp_path: Path) -> None:
    history(tmp_path, (1, (10,)))
    path = tmp_path / "step-10.e1" / "manifest.json"
    fields = unseal(path.read_bytes()) | {"version": 3}
    path.write_bytes(seal(fields))
    with pytest.raises(UserError, match="checkpoint format 3"):
        choose_resume(tmp_path)


def test_a_manifest_of_a_later_format_hides_no_other_checkpoint(tmp_path: Path) -> None:
    history(tmp_path, (1, (10, 20)))
    path = tmp_path / "step-20.e1" / "manifest.json"
    path.write_bytes(seal(unseal(path.read_bytes()) | {"version": 3}))
    assert [(one.step, "checkpoint format 3" in one.problem) for one in list_checkpoints(tmp_path)] == [
        (20, True),
        (10, False),
    ]
    (problem,) = verify(tmp_path)
    assert (problem.checkpoint, "checkpoint format 3" in problem.found) == ("step-20.e1", True)


def test_manifest_is_plain_json(tmp_path: Path) -> None:
    history(tmp_path, (1, (10,)))
    fields = json.loads((tmp_path / "step-10.e1" / "manifest.json").read_text())
    assert (fields["step"], fields["epoch"], fields["parent"]) == (10, 1, None)


@settings(deadline=None)
@given(st.dictionaries(st.text(), st.integers() | st.text()), st.data())
def test_sealed_file_notices_every_flipped_bit(fields: dict[str, int | str], data: st.DataObject) -> None:
    content = bytearray(seal({"version": 1} | fields))
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Unsealed):
        unseal(bytes(content))


@settings(deadline=None)
@given(st.data())
def test_lineage_is_what_a_run_without_zombies_would_hold(data: st.DataObject) -> None:
    """Random histories: each epoch resumes from one of the lineage (the newest may be corrupt), commits, and goes on
    committing after it was superseded. The oracle carries the lineage along instead of deriving it from names."""
    bases: dict[int, CheckpointName | None] = {}
    committed: list[CheckpointName] = []
    heirs: list[CheckpointName] = []
    step_of: dict[int, int] = {}
    for number in range(1, data.draw(st.integers(1, 7)) + 1):
        chosen = data.draw(st.integers(0, len(heirs)))
        heirs = heirs[chosen:]
        bases[number] = heirs[0] if heirs else None
        step_of[number] = heirs[0].step if heirs else 0
        writers = data.draw(st.lists(st.sampled_from([number, *range(1, number)]), max_size=6))
        for writer in writers:
            step_of[writer] += data.draw(st.integers(1, 3))
            name = CheckpointName(epoch=writer, step=step_of[writer])
            committed.append(name)
            if writer == number:
                heirs = [name, *heirs]
    assert lineage(bases, data.draw(st.permutations(committed))) == heirs


def test_opened_checkpoint_knows_its_size(tmp_path: Path) -> None:
    history(tmp_path, (1, (10,)))
    assert open_checkpoint(tmp_path / "step-10.e1").manifest.nbytes == 2 * 280


@pytest.mark.parametrize(
    "content",
    [b"{\n no JSON", seal({"version": 1}), seal({"version": 1, "files": 3, "state": []})],
    ids=["no JSON", "fields missing", "fields of other kinds"],
)
def test_a_sealed_file_that_is_no_manifest_is_passed_over(tmp_path: Path, content: bytes) -> None:
    history(tmp_path, (1, (10, 20)))
    body = content if content.startswith(b'{"xxh3') else seal_bytes(content)
    (tmp_path / "step-20.e1" / "manifest.json").write_bytes(body)
    assert resumed(tmp_path) == "step-10.e1"


def seal_bytes(body: bytes) -> bytes:
    return b'{"xxh3_128": "' + xxhash.xxh3_128_hexdigest(body).encode() + b'",\n' + body + b"\n"


@pytest.mark.parametrize("file", ["../../elsewhere.safetensors", "/etc/passwd", "tensors-00009.safetensors"])
def test_a_tensor_in_a_file_that_the_manifest_does_not_list_is_a_problem(tmp_path: Path, file: str) -> None:
    history(tmp_path, (1, (10,)))
    checkpoint = open_checkpoint(tmp_path / "step-10.e1")
    manifest = replace(
        checkpoint.manifest, tensors={"master.a": TensorEntry(("tensors-00000.safetensors", file), (1,), (0, 1))}
    )
    (checkpoint.path / "manifest.json").write_bytes(manifest.to_bytes())
    assert [problem.found for problem in verify(checkpoint.path)] == [repr(file)]


def test_a_directory_of_another_job_is_not_written(tmp_path: Path) -> None:
    mine, other = Owner("team", "mine", "uid-1"), Owner("team", "other", "uid-2")
    Epoch.start(tmp_path, 1, owner=mine)
    with pytest.raises(UserError, match=r"TrainingJob, team/mine \(uid uid-1\); set another spec.checkpoint.subPath"):
        Epoch.start(tmp_path, 2, owner=other)
    assert not (tmp_path / "epoch-2.json").exists()
    Epoch.start(tmp_path, 2, owner=mine)
    Epoch.start(tmp_path, 3)  # a local run on what a cluster wrote
    with pytest.raises(UserError, match="team/mine"):
        Epoch.start(tmp_path, 4, owner=other)
