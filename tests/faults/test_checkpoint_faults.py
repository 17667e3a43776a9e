"""kill -9, power cuts, a full disk and flipped bits, at every place where they can happen to a checkpoint."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from cases.checkpoint_cases import commit, flip_bit
from fakes.failing_files import CountingFiles, LosingFiles, PowerCut, full_at, killed_at
from spillway.errors import Fenced
from spillway_trainer.checkpoints.directory import CheckpointNotWritten, Epoch, choose_resume, verify
from spillway_trainer.checkpoints.durable_files import DurableFiles

STEPS = (10, 20, 30, 40)


def train(directory: Path, epoch_number: int, acknowledged: Path, files: DurableFiles) -> None:
    """One attempt: resume, then commit and prune up to the last step, noting each commit once it has returned."""
    epoch = Epoch.start(directory, epoch_number, files)
    first = 0 if epoch.resume.checkpoint is None else epoch.resume.checkpoint.manifest.name.step
    for step in (step for step in STEPS if step > first):
        commit(epoch, step)
        acknowledged.write_text(str(step))
        epoch.prune(2)


def num_operations(directory: Path) -> int:
    numbers: list[int] = []
    train(directory, 1, directory.with_name("count.acknowledged"), CountingFiles(numbers.append))
    return len(numbers)


def last_acknowledged(path: Path) -> int:
    return int(path.read_text()) if path.exists() else 0


def assert_resumable(directory: Path, acknowledged: Path) -> None:
    """A next attempt loses nothing that was acknowledged, clears up, and comes to the end."""
    resume = choose_resume(directory)
    step = 0 if resume.checkpoint is None else resume.checkpoint.manifest.name.step
    assert step >= last_acknowledged(acknowledged)
    assert not resume.passed_over, "a kill must not leave something that looks like a checkpoint and is none"
    train(directory, 2, acknowledged, DurableFiles())
    final = choose_resume(directory).checkpoint
    assert final is not None
    assert final.manifest.name.step == STEPS[-1]
    assert not verify(directory)
    assert not list(directory.glob("*.tmp"))


def run_and_kill(directory: Path, acknowledged: Path, operation: int) -> None:
    child = os.fork()
    if child == 0:
        try:
            train(directory, 1, acknowledged, killed_at(operation))
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 137


def test_kill_at_every_operation_loses_nothing_committed(tmp_path: Path) -> None:
    total = num_operations(tmp_path / "count")
    for operation in range(total):
        directory, acknowledged = tmp_path / f"run-{operation}", tmp_path / f"acknowledged-{operation}"
        run_and_kill(directory, acknowledged, operation)
        assert_resumable(directory, acknowledged)
    print(f"kill -9 at each operation of an attempt: {total} of {total} resumed at or after the last commit")


def test_power_cut_at_every_operation_loses_nothing_committed(tmp_path: Path) -> None:
    """Names that were not synced are lost: fails if a commit returns before its rename is durable."""
    operation = 0
    while True:
        directory, acknowledged = tmp_path / f"run-{operation}", tmp_path / f"acknowledged-{operation}"
        try:
            train(directory, 1, acknowledged, LosingFiles(operation))
        except PowerCut:
            assert_resumable(directory, acknowledged)
            operation += 1
        else:
            break
    assert operation > 4 * len(STEPS)
    print(f"power cut at each operation of an attempt: {operation} of {operation} resumed at or after the last commit")


def test_power_cut_after_a_commit_returned_keeps_it(tmp_path: Path) -> None:
    files = LosingFiles(operation=10**6)
    epoch = Epoch.start(tmp_path, 1, files)
    commit(epoch, 10)
    with pytest.raises(PowerCut):
        files.cut()
    checkpoint = choose_resume(tmp_path).checkpoint
    assert str(checkpoint) == "step-10.e1"


def test_power_cut_after_an_epoch_started_keeps_its_fence(tmp_path: Path) -> None:
    files = LosingFiles(operation=10**6)
    Epoch.start(tmp_path, 1, files)
    with pytest.raises(PowerCut):
        files.cut()
    with pytest.raises(Fenced):
        Epoch.start(tmp_path, 1)


def test_full_disk_at_any_operation_of_a_commit_costs_only_that_checkpoint(tmp_path: Path) -> None:
    def prepared(directory: Path) -> Epoch:
        epoch = Epoch.start(directory, 1)
        commit(epoch, 10)
        return epoch

    numbers: list[int] = []
    counting = prepared(tmp_path / "count")
    counting.files = CountingFiles(numbers.append)
    commit(counting, 20)
    for operation in numbers:
        epoch = prepared(tmp_path / str(operation))
        epoch.files = full_at(operation)
        with pytest.raises(CheckpointNotWritten, match=r"(?s)No space left.*earlier checkpoints are intact"):
            commit(epoch, 20)
        assert not list(epoch.directory.glob("*.tmp")), "room taken by half a checkpoint must be given back"
        assert not verify(epoch.directory)
        commit(epoch, 30)
        assert str(choose_resume(epoch.directory).checkpoint) == "step-30.e1"
    print(f"full disk at each operation of a commit: {len(numbers)} of {len(numbers)} left the older checkpoint intact")


def damage(path: Path, random_source: random.Random) -> None:
    size = path.stat().st_size
    if random_source.random() < 0.25:
        with path.open("r+b") as file:
            file.truncate(random_source.randrange(size))
    else:
        flip_bit(path, random_source.randrange(8 * size))


def test_every_flipped_bit_and_truncation_is_detected(tmp_path: Path) -> None:
    trials, seed = 300, 3
    random_source = random.Random(seed)
    epoch = Epoch.start(tmp_path / "run", 1)
    commit(epoch, 10)
    newest = commit(epoch, 20).path
    good = tmp_path / "good"
    shutil.copytree(newest, good)
    files = sorted(path.name for path in newest.iterdir())
    detected = 0
    for _ in range(trials):
        name = random_source.choice(files)
        damage(newest / name, random_source)
        resume = choose_resume(epoch.directory)
        detected += str(resume.checkpoint) == "step-10.e1" and [p.file for p in resume.passed_over] == [name]
        shutil.copyfile(good / name, newest / name)
    print(f"bit flips and truncations (seed {seed}): {detected} of {trials} detected, the previous checkpoint used")
    assert detected == trials
    assert str(choose_resume(epoch.directory).checkpoint) == "step-20.e1"
