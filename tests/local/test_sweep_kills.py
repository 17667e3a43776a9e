"""kill -9 at every segment, step, turn and file of a small sweep whose parameters stream from NVMe: the next attempt
ends with the results of an uninterrupted sweep, and each member with those of its solo run."""

from __future__ import annotations

import random
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness import killed_runs, local_runs, sweep_runs
from harness.depth import FULL
from harness.killed_runs import Kill
from spillway.api.job_file import JobFile
from spillway.plan import (
    ActivationPlan,
    MemberPlan,
    MemoryPlan,
    OptimizerPlan,
    ParameterPlan,
    Policy,
    Tier,
    TierBytes,
    Turns,
)
from spillway.units import MIB
from spillway_trainer.checkpoints.directory import choose_resume

pytestmark = pytest.mark.ci

JOB = """
apiVersion: spillway.dev/v1alpha1
kind: TrainingJob
metadata: {name: killed-sweep}
spec:
  model:
    config: {architecture: llama, hiddenSize: 32, numLayers: 1, numHeads: 2, intermediateSize: 64, vocabSize: 300,
             tieWordEmbeddings: true, dropout: "0.1"}
  data:
    text: {path: TEXT}
    evaluation: {fraction: "0.0005", everySteps: 2}
  training: {steps: 4, sequenceLength: 16, globalBatchSize: 4, microBatchSize: 2, gradientClipping: "0.5",
             optimizer: {learningRate: "2e-3"}, schedule: {name: Cosine, warmupSteps: 1}}
  checkpoint: {everySteps: 2}
  objective: {halving: 2}
  members:
  - {name: slow, training: {optimizer: {learningRate: "1e-5"}}}
  - {name: fast, training: {seed: 7}}
"""
POINTS = (
    "a segment's forward", "the last segment's backward", "a segment's backward", "a step", "an evaluation", "a commit",
    "a record of values", "parking", "attaching", "a file's name",
)  # fmt: skip
REDUCED = ("a segment's forward", "a segment's backward", "a record of values")


@dataclass(frozen=True)
class Trained:
    """The results of a run. A step that was repeated with another loss appears twice."""

    losses: frozenset[tuple[int, float]]
    evaluations: frozenset[tuple[int, float]]
    last: tuple[str, ...]
    """hashes of the files of its last checkpoint"""


@dataclass(frozen=True)
class Outcome:
    """The results of a sweep."""

    members: dict[str, Trained]
    ends: dict[str, tuple[str, int, str]]
    """member -> its last event, step and reason"""
    best: str


@dataclass(frozen=True)
class Reference:
    """A sweep that is not interrupted, and how often it reaches each point."""

    text: Path
    corpus: Path
    outcome: Outcome
    calls: dict[str, int]


def streamed_plan() -> MemoryPlan:
    """A plan with homes of all parameters on NVMe; each segment runs both micro-batches before the next segment."""
    return alone_plan().model_copy(
        update={
            "mode": "Auto",
            "optimizer": OptimizerPlan(cpu_share=1.0, resident_share=0.0, chunk_parameters=5003),
            "activations": ActivationPlan(
                answers=(Policy.KEEP, Policy.RECOMPUTE, Policy.KEEP),
                minimum_bytes=1024,
                window_bytes=1 << 16,
                num_io_threads=1,
            ),
            "parameters": ParameterPlan(homes=(Tier.NVME,) * 3, order="WeightStationary", boundaries=Policy.HOST),
        }
    )


def alone_plan() -> MemoryPlan:
    """A plan with everything on the device."""
    made = local_runs.disabled_plan(1)
    held = {Tier.DEVICE: TierBytes(), Tier.HOST: TierBytes(buffers=8 * MIB), Tier.NVME: TierBytes(buffers=4 * MIB)}
    return made.model_copy(update={"micro_batch_size": 2, "num_micro_batches": 2, "bytes": held})


def sweep_plan(job: JobFile) -> MemoryPlan:
    """The plan of a sweep in which each turn is one step."""
    plan = streamed_plan()
    members = tuple(MemberPlan(name=one.name, plan=plan, parked_bytes=MIB, num_steps=4) for one in job.spec.members)
    turns = Turns(policy="RoundRobin", num_steps=1, seconds=1.0, bound_seconds=1.0)
    return plan.model_copy(update={"members": members, "turns": turns})


def outcome(job: JobFile) -> Outcome:
    output, names = Path(job.output_directory), [one.name for one in job.spec.members]
    states = sweep_runs.states(output)
    return Outcome(
        {one: trained(sweep_runs.member_output(job, one), sweep_runs.member_checkpoints(job, one)) for one in names},
        {name: (states[name]["event"], states[name]["step"], states[name]["reason"]) for name in names},
        local_runs.events(output, "best")[-1]["member"],
    )


def trained(output: Path, checkpoints: Path) -> Trained:
    found = choose_resume(checkpoints).checkpoint
    assert found is not None, checkpoints
    losses, evaluations = (
        frozenset((entry["step"], entry["loss"]) for entry in local_runs.events(output, kind))
        for kind in ("step", "evaluation")
    )
    return Trained(losses, evaluations, tuple(entry.xxh3_128 for entry in found.manifest.files))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    root = tmp_path_factory.mktemp("killed")
    text, corpus = local_runs.write_text(root / "text"), root / "corpus"
    job = sweep_runs.sweep_file(root / "sweep", text, corpus, 1, JOB)
    process = killed_runs.start(job, sweep_plan(job), [Kill(point) for point in POINTS])
    process.join()
    assert process.exitcode == 0, local_runs.log_of(root / "sweep", 1)
    expected = outcome(job)
    for name, found in expected.members.items():
        file = sweep_runs.solo_file(job, name, root / name)
        assert local_runs.complete(file, alone_plan()) == 0, local_runs.log_of(root / name, 1)
        alone, (event, step, _) = trained(root / name, root / name / "checkpoints"), expected.ends[name]
        assert found.losses == {one for one in alone.losses if one[0] <= step}
        assert found.evaluations == {one for one in alone.evaluations if one[0] <= step}
        assert event == "member_stopped" or found.last == alone.last
    return Reference(text, corpus, expected, {point: killed_runs.num_calls(job, point) for point in POINTS})


def test_the_sweep_comes_to_every_point_and_a_round_stops_one_member(reference: Reference) -> None:
    """Two members make two steps, and one makes two more, with three segments and two micro-batches."""
    of_steps = {"a step": 6, "a segment's forward": 36, "the last segment's backward": 12, "a segment's backward": 24}
    assert {point: reference.calls[point] for point in of_steps} == of_steps
    assert min(reference.calls.values()) > 1, reference.calls
    ends = reference.outcome.ends
    assert sorted(event for event, _, _ in ends.values()) == ["member_completed", "member_stopped"]
    assert ends[reference.outcome.best][0] == "member_completed"


@pytest.mark.parametrize("point", POINTS if FULL else REDUCED)
def test_a_sweep_killed_at_any_moment_ends_as_if_nobody_had(reference: Reference, tmp_path: Path, point: str) -> None:
    total = reference.calls[point]
    calls = range(1, total + 1) if FULL else [random.Random(point).randint(1, total)]
    differ = [call for call in calls if not same_after_kill(reference, tmp_path / str(call), Kill(point, call))]
    print(f"\n{point}: {len(calls)} kills of {total}, failures {len(differ)}", flush=True)
    assert not differ


def same_after_kill(reference: Reference, output: Path, kill: Kill) -> bool:
    job = sweep_runs.sweep_file(output, reference.text, reference.corpus, 1, JOB)
    process = killed_runs.start(job, sweep_plan(job), [kill])
    process.join()
    assert process.exitcode == -signal.SIGKILL, local_runs.log_of(output, 1)
    job = sweep_runs.sweep_file(output, reference.text, reference.corpus, 2, JOB)
    ended = local_runs.complete(job, sweep_plan(job))
    if ended or (found := outcome(job)) != reference.outcome:
        print(f"{kill}: {local_runs.log_of(output, 2) if ended else found}")
        return False
    shutil.rmtree(output)
    return True


def test_print_how_many_moments_were_tried(reference: Reference, capsys: pytest.CaptureFixture[str]) -> None:
    total = sum(reference.calls.values())
    with capsys.disabled():
        print(f"\nkill -9 of a sweep at {total if FULL else len(REDUCED)} moments ({total} in `make test-all`)")
