"""Small sweeps for tests: members with different learning rates, seeds and sizes on real text, and the solo run of
each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness import local_runs
from spillway.api.job_file import JobFile
from spillway.api.load import parse_job
from spillway.api.sweep.members import member_job
from spillway.plan import MemberPlan, MemoryPlan, Turns
from spillway.units import MIB
from spillway_trainer.checkpoints.manifest import open_checkpoint
from spillway_trainer.checkpoints.tensors import read

JOB = """
apiVersion: spillway.dev/v1alpha1
kind: TrainingJob
metadata: {name: small-sweep}
spec:
  model:
    config: {architecture: llama, hiddenSize: 32, numLayers: 2, numHeads: 2, intermediateSize: 64, vocabSize: 512,
             tieWordEmbeddings: true, dropout: "0.1"}
  data:
    text: {path: TEXT}
    evaluation: {fraction: "0.05", everySteps: 2}
  training: {steps: 8, sequenceLength: 32, globalBatchSize: 8, microBatchSize: 4, gradientClipping: "0.5",
             optimizer: {learningRate: "2e-3"}, schedule: {name: Cosine, warmupSteps: 3}}
  checkpoint: {everySteps: 3}
  objective: {OBJECTIVE}
  members:
  - {name: slow, training: {optimizer: {learningRate: "1e-5"}}}
  - {name: other-seed, training: {seed: 7}}
  - {name: deeper, model: {config: {numLayers: 3}}, training: {optimizer: {name: Lion, learningRate: "1e-3"}}}
"""
FAILING = """
  - name: exploding
    training: {optimizer: {learningRate: "10", name: SgdMomentum}, nonFinite: Fail, gradientClipping: "0",
               schedule: {name: Constant, warmupSteps: 0}}
  - {name: textless, data: {text: {path: /no/such/text}}}
"""
WITH_FAILING = JOB.replace("  members:\n", f"  members:{FAILING.rstrip()}\n")


def sweep_file(output: Path, text: Path, corpus: Path, epoch: int, job: str = JOB, objective: str = "") -> JobFile:
    spec = parse_job(job.replace("TEXT", str(text)).replace("OBJECTIVE", objective), "small sweep").spec
    output.mkdir(parents=True, exist_ok=True)
    return JobFile(
        name="small-sweep",
        uid="test",
        epoch=epoch,
        spec=spec,
        output_directory=str(output),
        corpus_directory=str(corpus),
        checkpoint_directory=str(output / "checkpoints"),
        spill_directory=str(output),
        termination_message_path=str(output / f"termination-{epoch}.json"),
        compute_threads=1,
    )


def sweep_plan(job: JobFile, turn_steps: int) -> MemoryPlan:
    """The plan of a sweep in which every member's plan uses every tier."""
    members = tuple(
        MemberPlan(
            name=one.name,
            plan=local_runs.spread_plan(member_job(job, one).spec.model.transformer.num_layers),
            parked_bytes=4 * MIB,
            num_steps=member_job(job, one).spec.training.steps,
        )
        for one in job.spec.members
    )
    turns = Turns(policy="RoundRobin", num_steps=turn_steps, seconds=1.0, bound_seconds=1.0)
    return members[0].plan.model_copy(update={"members": members, "turns": turns})


def solo_file(job: JobFile, name: str, output: Path) -> JobFile:
    """The job file of member `name` alone, as `spillway run` writes it."""
    member = next(one for one in job.spec.members if one.name == name)
    output.mkdir(parents=True, exist_ok=True)
    own = {"output_directory": str(output), "checkpoint_directory": str(output / "checkpoints")}
    return member_job(job, member).model_copy(update={**own, "corpus_directory": job.corpus_directory})


def solo_runs(directories: pytest.TempPathFactory, text: Path, corpus: Path) -> dict[str, Path]:
    """Runs each member alone to its end; returns the output directory of each."""
    job, outputs = sweep_file(directories.mktemp("none"), text, corpus, 1), dict[str, Path]()
    for planned in sweep_plan(job, 2).members:
        outputs[planned.name] = directories.mktemp(planned.name)
        file = solo_file(job, planned.name, outputs[planned.name])
        assert local_runs.complete(file, planned.plan) == 0, local_runs.log_of(outputs[planned.name], 1)
    return outputs


def member_output(job: JobFile, name: str) -> Path:
    return Path(job.output_directory) / "members" / name


def member_checkpoints(job: JobFile, name: str) -> Path:
    return Path(job.checkpoint_directory) / "members" / name


def losses(output: Path) -> dict[int, float]:
    """Step -> loss; of a repeated step, the last loss."""
    return {event["step"]: event["loss"] for event in local_runs.events(output, "step")}


def evaluations(output: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in local_runs.events(output, "evaluation")}


def final_tensors(checkpoints: Path, step: int) -> dict[str, Tensor]:
    """The tensors of the newest checkpoint of `step`."""
    newest = open_checkpoint(max(checkpoints.glob(f"step-{step}.e*")))
    return dict(read(newest, newest.manifest.tensors))


def failing_ones_failed(output: Path) -> None:
    """Asserts that the members of FAILING failed, each for its own reason."""
    found = states(output)
    assert "UserError" in found["textless"]["reason"]
    assert "NonFinite" in found["exploding"]["reason"]


def same_as_alone(job: JobFile, name: str, alone: Path, steps: int | None = None) -> None:
    """Asserts that member `name` trained as in its solo run, whose output directory is `alone`. `steps`: the number of
    steps that it made in the sweep (None: all)."""
    last = solo_file(job, name, alone).spec.training.steps
    steps = last if steps is None else steps
    output = member_output(job, name)
    assert losses(output) == {step: loss for step, loss in losses(alone).items() if step <= steps}
    found = evaluations(output)
    expected = {step: loss for step, loss in evaluations(alone).items() if step <= steps}
    assert {step: found[step] for step in expected} == expected
    if steps == last:
        now, then = final_tensors(member_checkpoints(job, name), last), final_tensors(alone / "checkpoints", last)
        assert now.keys() == then.keys()
        for tensor in now:
            assert torch.equal(now[tensor], then[tensor]), tensor


def states(output: Path) -> dict[str, dict[str, Any]]:
    """The last event of each member in the sweep's own run.jsonl."""
    found: dict[str, dict[str, Any]] = {}
    for kind in ("member_started", "member_parked", "member_stopped", "member_failed", "member_completed"):
        for event in local_runs.events(output, kind):
            if event["member"] not in found or event["time"] >= found[event["member"]]["time"]:
                found[event["member"]] = event
    return found
