"""kill -9 in the middle of an update that overlaps forward or backward: the next attempt ends with the bits of a run
that is not interrupted, has no overlap and keeps everything on the device."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness import killed_runs, local_runs
from harness.depth import FULL
from harness.killed_runs import Kill
from spillway.api.job_file import JobFile
from spillway.api.load import parse_job
from spillway.plan import MemoryPlan, OptimizerPlan, Overlap
from spillway_trainer.checkpoints.directory import choose_resume

pytestmark = pytest.mark.ci

TRIALS = 10 if FULL else 1
CHANGES = {
    "steps: 12": "steps: 7",
    "everySteps: 7": "everySteps: 4",
    "everySteps: 3": "everySteps: 2",
    'gradientClipping: "0.5"': 'gradientClipping: "0"',  # a clipped step commits no update that backward made
}
OVERLAPPED: dict[Overlap, OptimizerPlan] = {
    "Forward": OptimizerPlan(
        cpu_share=0.3, streamed_share=0.1, resident_share=0.1, nvme_share=0.5, chunk_parameters=4096, overlap="Forward"
    ),
    "Backward": OptimizerPlan(
        cpu_share=0.8, resident_share=0.1, streamed_share=0.1, chunk_parameters=4096, overlap="Backward",
        speculative_parameters=1 << 16,
    ),
}  # fmt: skip
KILLED: list[tuple[Overlap, str]] = [
    ("Forward", "an update on the CPU"),
    ("Forward", "states on their way from NVMe"),
    ("Forward", "states on their way to NVMe"),
    ("Backward", "an update on the CPU"),
    ("Backward", "a commit of what backward updated"),
]


@dataclass(frozen=True)
class Reference:
    """A run that is not interrupted, with memory.mode Disabled, and how often each overlapped run reaches each
    point."""

    text: Path
    corpus: Path
    figures: tuple[object, ...]
    calls: dict[tuple[Overlap, str], int]


def plan(overlap: Overlap) -> MemoryPlan:
    return local_runs.spread_plan().model_copy(update={"optimizer": OVERLAPPED[overlap]})


def job_file(output: Path, text: Path, corpus: Path, epoch: int) -> JobFile:
    document = local_runs.JOB.replace("TEXT", str(text))
    for old, new in CHANGES.items():
        assert old in document, old
        document = document.replace(old, new)
    job = local_runs.job_file(output, text, corpus, epoch)
    return job.model_copy(update={"spec": parse_job(document, "unclipped job").spec})


def figures(output: Path) -> tuple[object, ...]:
    """The losses of all steps and evaluations (a repeated step adds none if its bits are the same), and the hashes of
    the last checkpoint."""
    losses = {(entry["step"], entry["loss"]) for entry in local_runs.events(output, "step")}
    evaluations = {(entry["step"], entry["loss"]) for entry in local_runs.events(output, "evaluation")}
    last = choose_resume(output / "checkpoints").checkpoint
    assert last is not None
    return losses, evaluations, [entry.xxh3_128 for entry in last.manifest.files]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    root = tmp_path_factory.mktemp("overlapped")
    text, corpus = local_runs.write_text(root / "text"), root / "corpus"
    assert local_runs.complete(job_file(root / "plain", text, corpus, 1), local_runs.disabled_plan()) == 0
    expected, calls = figures(root / "plain"), dict[tuple[Overlap, str], int]()
    for overlap in OVERLAPPED:
        job = job_file(root / overlap, text, corpus, 1)
        points = [point for one, point in KILLED if one == overlap]
        process = killed_runs.start(job, plan(overlap), [Kill(point) for point in points])
        process.join()
        assert process.exitcode == 0, local_runs.log_of(root / overlap, 1)
        assert figures(root / overlap) == expected, overlap
        calls |= {(overlap, point): killed_runs.num_calls(job, point) for point in points}
    return Reference(text, corpus, expected, calls)


def test_an_overlapped_run_comes_to_every_point_in_every_step(reference: Reference) -> None:
    assert min(reference.calls.values()) >= 7, reference.calls


@pytest.mark.parametrize("trial", range(TRIALS))
@pytest.mark.parametrize(("overlap", "point"), KILLED)
def test_kill_during_an_overlapped_update_leaves_the_curve_unchanged(
    reference: Reference, tmp_path: Path, overlap: Overlap, point: str, trial: int
) -> None:
    call = random.Random(f"{overlap} {point} {trial}").randint(1, reference.calls[overlap, point])
    job = job_file(tmp_path, reference.text, reference.corpus, 1)
    process = killed_runs.start(job, plan(overlap), [Kill(point, call)])
    process.join()
    assert process.exitcode == -signal.SIGKILL, local_runs.log_of(tmp_path, 1)
    committed = max((entry["step"] for entry in local_runs.events(tmp_path, "checkpoint")), default=0)
    last = job_file(tmp_path, reference.text, reference.corpus, 2)
    assert local_runs.complete(last, plan(overlap)) == 0, local_runs.log_of(tmp_path, 2)
    assert local_runs.events(tmp_path, "start")[-1]["resumed_from_step"] >= committed
    assert figures(tmp_path) == reference.figures


def test_print_how_many_kills_were_tried(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(
            f"\nkill -9 at {TRIALS * len(KILLED)} moments of overlapped updates ({10 * len(KILLED)} in `make test-all`)"
        )
