"""Sweeps on several devices, each with its own process: every member equals its solo run bit for bit, on whatever
device its turns are and whatever is killed in between."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from harness import device_sweeps, local_runs, sweep_runs
from harness.depth import at
from harness.device_sweeps import Blow, attempt
from harness.sweep_runs import same_as_alone
from spillway.errors import ExitCode


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return local_runs.write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corpus") / "corpus"


@pytest.fixture(scope="module")
def solo(tmp_path_factory: pytest.TempPathFactory, text: Path, corpus: Path) -> dict[str, Path]:
    return sweep_runs.solo_runs(tmp_path_factory, text, corpus)


def test_members_on_two_devices_are_their_solo_runs_bit_for_bit(
    tmp_path: Path, text: Path, solo: dict[str, Path]
) -> None:
    """The sweep must build two corpora, one of them for two members at the same time."""
    job = sweep_runs.sweep_file(tmp_path, text, tmp_path / "corpus", 1)
    (tmp_path / "spill").mkdir()
    job = job.model_copy(update={"spill_directory": str(tmp_path / "spill"), "spill_is_listed": True})
    assert attempt(job, 2, 3) == 0, local_runs.log_of(tmp_path, 1)
    for name, alone in solo.items():
        same_as_alone(job, name, alone)
    assert {one["event"] for one in sweep_runs.states(tmp_path).values()} == {"member_completed"}
    turns = local_runs.events(tmp_path, "member_started")
    assert {event["device"] for event in turns} == {0, 1}
    assert len(turns) > len(solo), "members take turns"
    assert not list((tmp_path / "spill").iterdir()), "nothing of parked members is left"


NUM_SCHEDULES = at(1, 20, 300)


@pytest.mark.parametrize("seed", range(NUM_SCHEDULES))
def test_whatever_is_killed_each_member_trains_the_same_curve(
    tmp_path: Path, text: Path, corpus: Path, solo: dict[str, Path], seed: int
) -> None:
    """One or two attempts on 2 to 4 devices, with turns of different lengths, end by SIGKILL of a device's process or
    of the sweep's, or are asked to stop. Then an attempt runs to the end. Half of all cases have a round of halving."""
    drawn = random.Random(seed)
    halving = seed % 2
    epoch = 0
    for epoch in range(1, drawn.randint(1, 2) + 1):
        num_devices = drawn.choice([2, 2, 3, 4])
        device = drawn.choice([None, *range(num_devices)])
        by = signal.SIGTERM if device is None and drawn.random() < 0.5 else signal.SIGKILL
        job = sweep_runs.sweep_file(tmp_path, text, corpus, epoch, objective="halving: 4" if halving else "")
        code = attempt(job, num_devices, drawn.randint(1, 3), Blow(drawn.randint(0, 12), device, by), forks=True)
        # The attempt may have completed before, and SIGTERM kills a process that is still starting.
        wanted = {0, -9} if by == signal.SIGKILL else {0, int(ExitCode.PREEMPTED), -15}
        assert code in wanted, local_runs.log_of(tmp_path, epoch)
    job = sweep_runs.sweep_file(tmp_path, text, corpus, epoch + 1, objective="halving: 4" if halving else "")
    code = attempt(job, drawn.randint(1, 4), drawn.randint(1, 3), forks=True)
    assert code == 0, local_runs.log_of(tmp_path, epoch + 1)
    values = {name: sweep_runs.evaluations(alone)[4] for name, alone in solo.items()}
    best = min(values, key=lambda name: values[name])
    states = sweep_runs.states(tmp_path)
    for name, alone in solo.items():
        completes = not halving or name == best
        assert states[name]["event"] == ("member_completed" if completes else "member_stopped")
        ends = local_runs.events(sweep_runs.member_output(job, name), "end")
        assert [end["reason"] for end in ends] == ["Completed" if completes else "Stopped"]
        same_as_alone(job, name, alone, 8 if completes else 4)


@pytest.mark.ci
def test_members_that_fail_end_alone_on_their_device(
    tmp_path: Path, text: Path, corpus: Path, solo: dict[str, Path]
) -> None:
    job = sweep_runs.sweep_file(tmp_path, text, corpus, 1, job=sweep_runs.WITH_FAILING)
    assert attempt(job, 2, 3) == 0, local_runs.log_of(tmp_path, 1)
    for name, alone in solo.items():
        same_as_alone(job, name, alone)
    sweep_runs.failing_ones_failed(tmp_path)


@pytest.mark.ci
def test_a_disk_that_all_members_share_ends_the_attempt_and_no_member(tmp_path: Path, text: Path, corpus: Path) -> None:
    """As on one device, the other members have committed their checkpoints before the attempt ends."""
    job = sweep_runs.sweep_file(tmp_path, text, corpus, 1)
    output = sweep_runs.member_output(job, "other-seed")
    output.mkdir(parents=True)
    (output / "run.jsonl").symlink_to("/dev/full")
    assert attempt(job, 2, 3) == ExitCode.USER_ERROR
    log = local_runs.log_of(tmp_path, 1)
    assert "run.jsonl: cannot be written: No space left on device" in log
    assert "failed, other members continue" not in log
    assert local_runs.events(tmp_path, "member_failed") == []


@pytest.mark.ci
def test_asked_to_stop_every_device_commits_a_checkpoint_of_its_member(
    tmp_path: Path, text: Path, corpus: Path, solo: dict[str, Path]
) -> None:
    job = sweep_runs.sweep_file(tmp_path, text, corpus, 1)
    code = attempt(job, 2, 8, Blow(2, by=signal.SIGTERM))
    assert code == ExitCode.PREEMPTED, local_runs.log_of(tmp_path, 1)
    (end,) = local_runs.events(tmp_path, "end")
    assert end["reason"] == "Preempted"
    trained = {name: max(sweep_runs.losses(sweep_runs.member_output(job, name)), default=0) for name in solo}
    assert any(trained.values())  # the other device may have been building its corpus
    for name, step in trained.items():
        assert not step or list(sweep_runs.member_checkpoints(job, name).glob(f"step-{step}.e1")), (name, step)
    job = sweep_runs.sweep_file(tmp_path, text, corpus, 2)
    assert attempt(job, 2, 8) == 0, local_runs.log_of(tmp_path, 2)
    for name, alone in solo.items():
        same_as_alone(job, name, alone)


def test_devices_of_a_sweep_that_is_gone_end_with_it(tmp_path: Path, text: Path, corpus: Path) -> None:
    job = sweep_runs.sweep_file(tmp_path, text, corpus, 1)
    process = local_runs.start_attempt(job, device_sweeps.plan_on(job, 2, 8))
    assert process.pid is not None
    while device_sweeps.num_steps(job) < 2:
        process.join(device_sweeps.POLL_SECONDS)
    pids = device_sweeps.workers(process.pid)
    process.kill()
    process.join()
    assert len(pids) == 2
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        process.join(device_sweeps.POLL_SECONDS)
