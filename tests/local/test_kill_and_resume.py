"""kill -9 at any moment loses at most the steps since the last commit, and changes no bit of the later results."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness import killed_runs, local_runs
from harness.depth import at
from harness.killed_runs import Kill
from harness.patience import wait_until
from spillway.api.load import parse_job
from spillway.errors import ExitCode
from spillway_trainer.checkpoints.directory import choose_resume, names_in
from spillway_trainer.checkpoints.manifest import StoredCheckpoint, open_checkpoint

TRIALS = at(2, 12, 100)


@dataclass(frozen=True)
class Reference:
    """A run that is not interrupted."""

    text: Path
    corpus: Path
    losses: dict[int, float]
    evaluations: dict[int, float]
    last: StoredCheckpoint
    seconds: float


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    root = tmp_path_factory.mktemp("reference")
    text = local_runs.write_text(root / "text")
    warm_up = local_runs.job_file(root / "warm-up", text, root / "corpus", epoch=1)
    assert local_runs.complete(warm_up, local_runs.spread_plan()) == 0, local_runs.log_of(root / "warm-up", 1)
    job = local_runs.job_file(root / "run", text, root / "corpus", epoch=1)
    started = time.monotonic()
    assert local_runs.complete(job, local_runs.spread_plan()) == 0, local_runs.log_of(root / "run", 1)
    seconds = time.monotonic() - started
    return Reference(text, root / "corpus", *curves(root / "run"), last_checkpoint(root / "run"), seconds)


def curves(output: Path) -> tuple[dict[int, float], dict[int, float]]:
    steps = {entry["step"]: entry["loss"] for entry in local_runs.events(output, "step")}
    evaluations = {entry["step"]: entry["loss"] for entry in local_runs.events(output, "evaluation")}
    return steps, evaluations


def last_checkpoint(output: Path) -> StoredCheckpoint:
    found = choose_resume(output / "checkpoints").checkpoint
    assert found is not None
    return found


def tensor_hashes(checkpoint: StoredCheckpoint) -> list[str]:
    return [entry.xxh3_128 for entry in checkpoint.manifest.files]


def test_disabled_mode_gives_the_same_bits(reference: Reference, tmp_path: Path) -> None:
    """The reference's plan used host, NVMe, recompute and all three optimizer paths; Disabled uses none of them."""
    job = local_runs.job_file(tmp_path, reference.text, reference.corpus, epoch=1)
    assert local_runs.complete(job, local_runs.disabled_plan()) == 0, local_runs.log_of(tmp_path, 1)
    assert curves(tmp_path) == (reference.losses, reference.evaluations)
    assert tensor_hashes(last_checkpoint(tmp_path)) == tensor_hashes(reference.last)
    behind = reference.last.path.parent
    assert hashes_of_all(tmp_path / "checkpoints") == hashes_of_all(behind), "written behind training, and not"
    assert [one["stalled_seconds"] < one["seconds"] for one in local_runs.events(behind.parent, "checkpoint")] == [
        True, True, True, False
    ]  # fmt: skip


def hashes_of_all(directory: Path) -> dict[str, list[str]]:
    names = names_in(directory)
    assert len(names) > 1
    return {str(name): tensor_hashes(open_checkpoint(directory / str(name))) for name in names}


def test_fewer_steps_than_are_trained_are_an_error(tmp_path: Path) -> None:
    text = local_runs.write_text(tmp_path / "text")
    for epoch, steps, code in ((1, 4, ExitCode.COMPLETED), (2, 3, ExitCode.USER_ERROR)):
        document = local_runs.JOB.replace("TEXT", str(text)).replace("steps: 12", f"steps: {steps}")
        job = local_runs.job_file(tmp_path, text, tmp_path / "corpus", epoch)
        job = job.model_copy(update={"spec": parse_job(document, "small job").spec})
        assert local_runs.complete(job, local_runs.disabled_plan()) == code, local_runs.log_of(tmp_path, epoch)
    assert "spec.training.steps is 3, but 4 steps are already trained; raise it" in local_runs.log_of(tmp_path, 2)


def test_text_to_evaluate_on_may_not_change_between_attempts(tmp_path: Path) -> None:
    text, held = local_runs.write_text(tmp_path / "text"), tmp_path / "held.txt"
    held.write_text("some words that nobody trains on\n" * 40)
    document = local_runs.JOB.replace("TEXT", str(text)).replace('fraction: "0.05"', f"text: {{path: {held}}}")
    spec = parse_job(document.replace("steps: 12", "steps: 4"), "small job").spec
    for epoch, code in ((1, ExitCode.COMPLETED), (2, ExitCode.USER_ERROR)):
        job = local_runs.job_file(tmp_path, text, tmp_path / "corpus", epoch).model_copy(update={"spec": spec})
        assert local_runs.complete(job, local_runs.disabled_plan()) == code, local_runs.log_of(tmp_path, epoch)
        held.write_text("other words\n" * 40)
    said = [local_runs.log_of(tmp_path, epoch) for epoch in (1, 2)]
    assert "held-out sequences, fewer than the 64 of data.evaluation.sequences" in said[0]
    assert "corpus/evaluation: built from" in said[1] and "but the data is now" in said[1]


def test_the_spread_plan_uses_every_tier(reference: Reference) -> None:
    peaks = [entry["tier_peak_bytes"] for entry in local_runs.events(reference.last.path.parents[1], "step")]
    assert all(peak[tier] > 0 for peak in peaks for tier in ("device", "host", "nvme"))


def test_sigterm_commits_and_exits_75_and_the_next_attempt_goes_on(reference: Reference, tmp_path: Path) -> None:
    process = local_runs.start_attempt(
        local_runs.job_file(tmp_path, reference.text, reference.corpus, epoch=1), local_runs.spread_plan()
    )
    wait_for_step(tmp_path, 2)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)
    process.join()
    stopped_at = local_runs.events(tmp_path, "end")[-1]["step"]
    assert process.exitcode == ExitCode.PREEMPTED, local_runs.log_of(tmp_path, 1)
    assert last_checkpoint(tmp_path).manifest.state.step == stopped_at
    second = local_runs.job_file(tmp_path, reference.text, reference.corpus, epoch=2)
    assert local_runs.complete(second, local_runs.disabled_plan()) == 0, local_runs.log_of(tmp_path, 2)
    assert local_runs.events(tmp_path, "start")[-1]["resumed_from_step"] == stopped_at
    assert curves(tmp_path)[0] == reference.losses


def test_sigterm_while_the_corpus_is_built_ends_the_attempt_at_once(reference: Reference, tmp_path: Path) -> None:
    job = local_runs.job_file(tmp_path, reference.text, tmp_path / "corpus", epoch=1)
    process = local_runs.start_attempt(job, local_runs.spread_plan())
    wait_until((tmp_path / "checkpoints" / "epoch-1.json").exists, why=lambda: local_runs.log_of(tmp_path, 1))
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)
    process.join()
    assert process.exitcode == ExitCode.PREEMPTED, local_runs.log_of(tmp_path, 1)
    assert local_runs.events(tmp_path, "end")[-1]["step"] == 0
    assert not local_runs.events(tmp_path, "step")


def wait_for_step(output: Path, step: int) -> None:
    wait_until(
        lambda: any(entry["step"] >= step for entry in local_runs.events(output, "step")),
        why=lambda: local_runs.log_of(output, 1),
    )


def test_an_earlier_epoch_is_fenced(reference: Reference, tmp_path: Path) -> None:
    job = local_runs.job_file(tmp_path, reference.text, reference.corpus, epoch=2)
    assert local_runs.complete(job, local_runs.spread_plan()) == 0
    zombie = local_runs.job_file(tmp_path, reference.text, reference.corpus, epoch=1)
    assert local_runs.complete(zombie, local_runs.spread_plan()) == ExitCode.FENCED


@pytest.mark.parametrize("call", at((3,), (2, 4, 7), range(2, 8)))
def test_killed_while_a_checkpoint_is_written_behind_training(reference: Reference, tmp_path: Path, call: int) -> None:
    """The first durable file is the epoch's; then each checkpoint writes a file of tensors and its manifest."""
    step, first = 3 * (call // 2), local_runs.job_file(tmp_path, reference.text, reference.corpus, 1)
    process = killed_runs.start(first, local_runs.spread_plan(), [Kill("a durable file", call)])
    process.join()
    assert process.exitcode == -signal.SIGKILL, local_runs.log_of(tmp_path, 1)
    assert (tmp_path / "checkpoints" / f"step-{step}.e1.tmp").is_dir()
    assert [entry["step"] for entry in local_runs.events(tmp_path, "checkpoint")] == list(range(3, step, 3))
    second = local_runs.job_file(tmp_path, reference.text, reference.corpus, 2)
    assert local_runs.complete(second, local_runs.spread_plan()) == 0, local_runs.log_of(tmp_path, 2)
    assert local_runs.events(tmp_path, "start")[-1]["resumed_from_step"] == step - 3
    assert curves(tmp_path)[0] == reference.losses
    assert tensor_hashes(last_checkpoint(tmp_path)) == tensor_hashes(reference.last)
    assert not list((tmp_path / "checkpoints").glob("*.tmp"))


def test_sigterm_while_a_checkpoint_is_written_behind_training_commits_it_and_one_more(
    reference: Reference, tmp_path: Path
) -> None:
    first = local_runs.job_file(tmp_path, reference.text, reference.corpus, 1)
    process = killed_runs.start(first, local_runs.spread_plan(), [Kill("a durable file", 3, signal.SIGTERM)])
    process.join()
    assert process.exitcode == ExitCode.PREEMPTED, local_runs.log_of(tmp_path, 1)
    stopped_at = local_runs.events(tmp_path, "end")[-1]["step"]
    assert {entry["step"] for entry in local_runs.events(tmp_path, "checkpoint")} == {3, stopped_at}
    assert last_checkpoint(tmp_path).manifest.state.step == stopped_at
    second = local_runs.job_file(tmp_path, reference.text, reference.corpus, 2)
    assert local_runs.complete(second, local_runs.spread_plan()) == 0, local_runs.log_of(tmp_path, 2)
    assert curves(tmp_path)[0] == reference.losses


@pytest.mark.parametrize("trial", range(TRIALS))
def test_killed_at_a_random_moment_the_curve_is_the_same(reference: Reference, tmp_path: Path, trial: int) -> None:
    """One or two attempts are killed, each at a uniformly random moment; then an attempt runs to its end."""
    moments = random.Random(trial)
    epoch = 1
    for epoch in range(1, moments.choice((2, 3))):
        process = local_runs.start_attempt(
            local_runs.job_file(tmp_path, reference.text, reference.corpus, epoch), local_runs.spread_plan()
        )
        process.join(moments.uniform(0.0, reference.seconds))
        process.kill()
        process.join()
    committed = max((entry["step"] for entry in local_runs.events(tmp_path, "checkpoint")), default=0)
    final = local_runs.job_file(tmp_path, reference.text, reference.corpus, epoch + 1)
    assert local_runs.complete(final, local_runs.spread_plan()) == 0, local_runs.log_of(tmp_path, epoch + 1)
    assert local_runs.events(tmp_path, "start")[-1]["resumed_from_step"] >= committed
    all_losses = {(entry["step"], entry["loss"]) for entry in local_runs.events(tmp_path, "step")}
    assert all_losses == set(reference.losses.items())
    assert tensor_hashes(last_checkpoint(tmp_path)) == tensor_hashes(reference.last)


def test_print_how_many_kills_were_tried(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\nkill -9 at {TRIALS} random moments (100 in `make test-all`)")
