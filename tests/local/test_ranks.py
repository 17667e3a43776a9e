"""Several ranks fail, stop and continue together."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness import local_runs, rank_runs
from harness.depth import some
from harness.patience import wait_until
from spillway.api.job_file import JobFile
from spillway.errors import ExitCode
from spillway_trainer.checkpoints.directory import choose_resume
from spillway_trainer.checkpoints.manifest import StoredCheckpoint
from spillway_trainer.launch.launcher import free_ports

CHANGES: Mapping[str, str] = {
    "steps: 4": "steps: 24",
    "checkpoint: {everySteps: 100}": "checkpoint: {everySteps: 6}",
    "gradientReduce: bfloat16": "gradientReduce: float32",
    "evaluation: {": "# {",
}
LOSS_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Reference:
    """A run of two ranks that is not interrupted."""

    text: Path
    corpus: Path
    job: JobFile
    losses: dict[int, float]
    hashes: list[str]

    def attempt(self, output: Path, epoch: int, world: int = 2) -> JobFile:
        return rank_runs.job_file(output, self.text, self.corpus, epoch, world, CHANGES)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    root = tmp_path_factory.mktemp("reference")
    text = local_runs.write_text(root / "text")
    job = rank_runs.job_file(root / "run", text, root / "corpus", 1, 2, CHANGES)
    rank_runs.complete(job, rank_runs.plan_for(job, "interleaved, mixed"))
    return Reference(text, root / "corpus", job, rank_runs.losses(job), hashes(last_checkpoint(job)))


def last_checkpoint(job: JobFile) -> StoredCheckpoint:
    found = choose_resume(Path(job.checkpoint_directory)).checkpoint
    assert found is not None
    return found


def hashes(checkpoint: StoredCheckpoint) -> list[str]:
    return [entry.xxh3_128 for entry in checkpoint.manifest.files]


def started_until(job: JobFile, reached: Callable[[], bool], placement: str | None = None) -> rank_runs.Started:
    """Starts all ranks, and waits until `reached()`."""
    started = rank_runs.start(job, rank_runs.plan_for(job, placement))
    wait_until(reached, started.look)
    return started


def at_step(job: JobFile, step: int) -> Callable[[], bool]:
    return lambda: max(rank_runs.losses(job), default=0) >= step


@pytest.mark.parametrize("victim", some([1, 0], 1))
def test_killed_rank_ends_the_others_and_all_restart_from_the_checkpoint(
    reference: Reference, tmp_path: Path, victim: int
) -> None:
    first = reference.attempt(tmp_path, epoch=1)
    started = started_until(first, at_step(first, 8))
    os.kill(started.pid(victim), signal.SIGKILL)
    ended = started.join()
    assert ended[victim].exit_code == -signal.SIGKILL
    survivor = ended[1 - victim]
    assert survivor.exit_code == 1, survivor.log
    said = survivor.termination
    assert (said["reason"], said["follower"], said["rank"]) == ("RankCrashed", True, 1 - victim)
    assert "another rank ended" in said["message"]
    assert "Traceback" not in survivor.log
    again = reference.attempt(tmp_path, epoch=2)
    rank_runs.complete(again, rank_runs.plan_for(again, "all streamed, host"))
    assert local_runs.events(tmp_path, "start")[-1]["resumed_from_step"] >= 6
    assert rank_runs.losses(again) == reference.losses
    assert hashes(last_checkpoint(again)) == reference.hashes


@pytest.mark.parametrize(("victim", "bucket"), some([(0, 100), (1, 101), (0, 102), (1, 103)], 1))
def test_rank_killed_in_an_exchange_behind_backward_ends_the_others(
    reference: Reference, tmp_path: Path, victim: int, bucket: int
) -> None:
    """The rank is killed in one of about ten buckets of a step."""
    first = reference.attempt(tmp_path, epoch=1)
    buckets = {rank_runs.BUCKET_VARIABLE: "5003", rank_runs.DIES_VARIABLE: f"{victim} {bucket}"}
    ended = rank_runs.start(first, rank_runs.plan_for(first, "interleaved, mixed"), **buckets).join()
    assert ended[victim].exit_code == -signal.SIGKILL, ended[victim].log
    survivor = ended[1 - victim]
    assert (survivor.exit_code, survivor.termination["reason"]) == (1, "RankCrashed"), survivor.log
    assert survivor.termination["follower"]
    assert "Traceback" not in survivor.log
    again = reference.attempt(tmp_path, epoch=2)
    rank_runs.complete(again, rank_runs.plan_for(again))
    assert local_runs.events(tmp_path, "start")[-1]["resumed_from_step"] in (6, 12)
    assert rank_runs.losses(again) == reference.losses
    assert hashes(last_checkpoint(again)) == reference.hashes


def test_rank_that_fails_in_backward_ends_the_others_and_is_the_cause(reference: Reference, tmp_path: Path) -> None:
    """The failing rank leaves once the others have reached the exchanges that it began; they find that it is gone."""
    job = reference.attempt(tmp_path, epoch=1)
    variables = {rank_runs.BUCKET_VARIABLE: "5003", rank_runs.FAILS_VARIABLE: "1 100"}
    survivor, failed = rank_runs.start(job, rank_runs.plan_for(job, "interleaved, mixed"), **variables).join()
    assert (failed.exit_code, failed.termination["reason"]) == (ExitCode.DEVICE_OUT_OF_MEMORY, "DeviceOutOfMemory")
    assert (survivor.exit_code, survivor.termination["reason"]) == (1, "RankCrashed"), survivor.log
    assert survivor.termination["follower"]


@pytest.mark.parametrize("told", [0, 1])
def test_sigterm_to_one_rank_stops_all_after_the_same_step(reference: Reference, tmp_path: Path, told: int) -> None:
    first = reference.attempt(tmp_path, epoch=1)
    started = started_until(first, at_step(first, 2))
    os.kill(started.pid(told), signal.SIGTERM)
    ended = started.join()
    assert [each.exit_code for each in ended] == [ExitCode.PREEMPTED] * 2, ended[1 - told].log
    (saved,) = {each.termination["savedStep"] for each in ended}
    assert last_checkpoint(first).manifest.state.step == saved < 24
    again = reference.attempt(tmp_path, epoch=2)
    rank_runs.complete(again, rank_runs.plan_for(again))
    assert hashes(last_checkpoint(again)) == reference.hashes


def test_the_number_of_ranks_may_change_with_every_attempt(reference: Reference, tmp_path: Path) -> None:
    """2 -> 1 -> 2 ranks: the checkpoint and the order of samples do not depend on the number of ranks."""
    for epoch, world in ((1, 2), (2, 1)):
        job = reference.attempt(tmp_path, epoch, world)
        started = started_until(job, at_step(job, 8 * epoch))
        os.kill(started.pid(0), signal.SIGTERM)
        assert {each.exit_code for each in started.join()} == {ExitCode.PREEMPTED}
    last = reference.attempt(tmp_path, epoch=3)
    rank_runs.complete(last, rank_runs.plan_for(last))
    assert len({entry["resumed_from_step"] for entry in local_runs.events(tmp_path, "start")}) == 3
    found = rank_runs.losses(last)
    assert found.keys() == reference.losses.keys()
    assert max(abs(found[step] - loss) / loss for step, loss in reference.losses.items()) <= LOSS_TOLERANCE


def test_a_plan_that_only_one_rank_has_is_rejected_by_all(reference: Reference, tmp_path: Path) -> None:
    job = reference.attempt(tmp_path, epoch=1)
    other = (job, rank_runs.plan_for(job, "half and half, NVMe"))
    ended = rank_runs.start(job, rank_runs.plan_for(job), each={1: other}).join()
    for each in ended:
        assert each.exit_code == ExitCode.USER_ERROR, each.log
        assert "plan.json" in each.termination["message"]
        assert "not the same on all ranks (rank 1: " in each.termination["message"]


def test_what_rank_0_may_not_do_no_rank_does(reference: Reference, tmp_path: Path) -> None:
    """A later epoch owns the run. Only rank 0 checks this, and every rank ends as Fenced."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "epoch-5.json").write_bytes(
        (Path(reference.job.checkpoint_directory) / "epoch-1.json").read_bytes()
    )
    job = reference.attempt(tmp_path, epoch=1)
    ended = rank_runs.start(job, rank_runs.plan_for(job)).join()
    assert [each.exit_code for each in ended] == [ExitCode.FENCED] * 2, ended[0].log
    assert len({each.termination["message"] for each in ended}) == 1


@pytest.mark.ci
def test_a_checkpoint_that_rank_0_cannot_write_is_missed_by_all(reference: Reference, tmp_path: Path) -> None:
    job = reference.attempt(tmp_path, epoch=1)
    started = started_until(job, at_step(job, 1))
    (tmp_path / "checkpoints" / "step-12.e1").mkdir()
    assert [each.exit_code for each in started.join()] == [0, 0]
    assert [entry["step"] for entry in local_runs.events(tmp_path, "checkpoint_missed")] == [12]
    assert hashes(last_checkpoint(job)) == reference.hashes


def test_rank_0_alone_writes_the_log_of_the_run(reference: Reference) -> None:
    steps = [entry["step"] for entry in local_runs.events(Path(reference.job.output_directory), "step")]
    assert steps == list(range(1, 25))


def one_of_two(reference: Reference, output: Path, rank: int, **environment: str) -> rank_runs.Started:
    """Starts one rank of two without its peer, and waits until the rank waits for it."""
    job = reference.attempt(output, epoch=1)
    started = rank_runs.start(job, rank_runs.plan_for(job), only=rank, **environment)
    wait_until(lambda: rank_runs.gathers(job, rank), started.look)
    return started


@pytest.mark.parametrize(("rank", "missing"), [(0, "for rank 1"), (1, "connect to rank 0")])
def test_a_rank_that_never_comes_is_named(reference: Reference, tmp_path: Path, rank: int, missing: str) -> None:
    (ended,) = one_of_two(reference, tmp_path, rank, SPILLWAY_RENDEZVOUS_SECONDS="0.5").join()
    assert (ended.exit_code, ended.termination["follower"]) == (1, True), ended.log
    assert missing in ended.termination["message"]


@pytest.mark.parametrize("early", [0, 1])
def test_a_rank_waits_beyond_its_limit_while_a_pod_is_not_ready(
    reference: Reference, tmp_path: Path, early: int
) -> None:
    """The pod's image may still be pulled, or its node created. The rank looks ten times within its limit."""
    looks, port = tmp_path / "looks", str(free_ports(1)[0])
    variables = {"SPILLWAY_RENDEZVOUS_SECONDS": "0.2", "MASTER_PORT": port, rank_runs.LOOKS_VARIABLE: str(looks)}
    waiting = one_of_two(reference, tmp_path, early, **variables)
    wait_until(lambda: looks.exists() and looks.stat().st_size > 12, waiting.look)
    job = waiting.job
    late = rank_runs.start(job, rank_runs.plan_for(job), only=1 - early, **variables)
    assert [each.exit_code for each in (*late.join(), *waiting.join())] == [0, 0]
    assert hashes(last_checkpoint(job)) == reference.hashes


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_while_ranks_gather_ends_at_once(reference: Reference, tmp_path: Path, rank: int) -> None:
    """If the rank continued to wait for its peer, it would hang."""
    started = one_of_two(reference, tmp_path, rank)
    os.kill(started.pid(rank), signal.SIGTERM)
    (ended,) = started.join()
    assert ended.exit_code == ExitCode.PREEMPTED, json.dumps(ended.termination)
