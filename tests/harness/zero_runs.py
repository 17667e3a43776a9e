"""Divided models for tests: one process imports DeepSpeed, which takes seconds, and forks all ranks of all cases.

python tests/harness/zero_runs.py cases.json directory        prints the results as JSON on the last line
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from harness import local_runs, rank_runs
from harness.patience import wait_until
from harness.places import IMPORTABLE
from spillway.api.job_file import JobFile
from spillway.api.load import parse_job
from spillway.plan import ActivationPlan, MemoryPlan, Strategy, Tier
from spillway.planning.hardware import local_node
from spillway.planning.planner import Overrides, make_plan
from spillway.units import GIB
from spillway_trainer.checkpoints.directory import choose_resume
from spillway_trainer.checkpoints.tensors import read

SHORT = {"gradientReduce: bfloat16": "gradientReduce: float32", "steps: 4": "steps: 2"}
ONE_MICRO_BATCH = {"globalBatchSize: 8": "globalBatchSize: 4"}
"""per rank, with two ranks"""
UNTIED = {'tieWordEmbeddings: true, dropout: "0.1"': 'tieWordEmbeddings: false, dropout: "0.1"'}


@dataclass(frozen=True)
class Attempt:
    """One attempt of a case."""

    strategy: str
    placement: str | None = None
    world: int = 2
    stop_at: int = 0
    """sends SIGTERM to the last rank once this step is done; 0: never"""
    kill_at: int = 0
    """sends SIGKILL, likewise"""
    block_step: int = 0
    """makes the checkpoint of this step impossible to write; 0: none"""
    own_disk: bool = False
    """the last rank does not see the checkpoint directory of rank 0"""
    overlap: str = "None"
    keeps: bool = False
    """keeps all activations, for a model that the placement's answers do not fit"""
    planned: dict[str, str] = field(default_factory=dict)
    """if not empty, the planner makes the plan, with this optimizer placement and activations policy
    (spec.memory.advanced); the budget is exactly what it planned"""


@dataclass(frozen=True)
class Case:
    """A run of several attempts, one after the other."""

    attempts: list[Attempt]
    changes: Mapping[str, str] = field(default_factory=lambda: SHORT)


@dataclass(frozen=True)
class Found:
    """The results of a case."""

    exit_codes: list[list[int]]
    """of each attempt, of each rank"""
    terminations: list[list[dict[str, Any]]]
    logs: list[str]
    """of each rank in the last attempt"""
    losses: dict[str, float]
    evaluations: dict[str, float]
    norms: dict[str, float]
    tensors: dict[str, str]
    """name -> digest, of the last checkpoint"""
    files: list[str]
    """of the last checkpoint"""
    checkpoints: list[int]
    missed: list[int]
    tier_bytes: dict[str, int]
    """tier -> bytes of rank 0 in the last step"""
    peaks: dict[str, int]
    """tier -> highest peak of rank 0 in any step"""
    planned: dict[str, int]
    """tier -> planned bytes in the last attempt"""

    @property
    def figures(self) -> tuple[object, ...]:
        """Everything that must be equal bit by bit for cases that differ only in placement."""
        return self.losses, self.evaluations, self.norms, self.tensors


def run_all(cases: Sequence[Case], directory: Path) -> list[Found]:
    """Runs `cases` in a separate process. Called by tests."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "cases.json"
    path.write_text(json.dumps([asdict(case) for case in cases]))
    environment = {**os.environ, **IMPORTABLE, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-m", "harness.zero_runs", str(path), str(directory)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return [Found(**found) for found in json.loads(ended.stdout.splitlines()[-1])]


def plan_for(job: JobFile, attempt: Attempt) -> MemoryPlan:
    if attempt.planned:
        return tight_plan(job, attempt)
    plan = rank_runs.plan_for(job, attempt.placement)
    optimizer = plan.optimizer.model_copy(update={"overlap": attempt.overlap})
    activations = ActivationPlan() if attempt.keeps else plan.activations
    changed = {"strategy": attempt.strategy, "optimizer": optimizer, "activations": activations}
    return plan.model_copy(update=changed)


def tight_plan(job: JobFile, attempt: Attempt) -> MemoryPlan:
    """The planner's plan, with a budget of exactly the bytes that it planned."""
    document = job.spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    optimizer, activations = {"placement": attempt.planned["placement"]}, {"policy": attempt.planned["policy"]}
    document["memory"] = {"advanced": {"optimizer": optimizer, "activations": activations}}
    head = {"apiVersion": "spillway.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "planned"}}
    wanted = parse_job(json.dumps({**head, "spec": document}), "planned job")
    overrides = Overrides(world_size=job.world_size, strategy=cast(Strategy, attempt.strategy))
    plan = make_plan(wanted, local_node(1, GIB, GIB, GIB), overrides)
    assert isinstance(plan, MemoryPlan), plan
    slabs = {tier: plan.slab_bytes(tier) for tier in (Tier.HOST, Tier.NVME)}
    return plan.model_copy(update={"budget": {Tier.DEVICE: plan.bytes[Tier.DEVICE].total, **slabs}})


def run_case(case: Case, directory: Path, text: Path, corpus: Path) -> Found:
    ended: list[list[rank_runs.Ended]] = []
    for epoch, attempt in enumerate(case.attempts, start=1):
        job = rank_runs.job_file(directory, text, corpus, epoch, attempt.world, case.changes)
        ended.append(run_attempt(attempt, job))
    steps = local_runs.events(directory, "step")
    last = choose_resume(directory / "checkpoints").checkpoint
    return Found(
        exit_codes=[[rank.exit_code for rank in ranks] for ranks in ended],
        terminations=[[rank.termination for rank in ranks] for ranks in ended],
        logs=[rank.log for rank in ended[-1]],
        losses={str(entry["step"]): entry["loss"] for entry in steps},
        evaluations={str(e["step"]): e["loss"] for e in local_runs.events(directory, "evaluation")},
        norms={str(entry["step"]): entry["gradient_norm"] for entry in steps},
        tensors={name: digest(value) for name, value in read(last, last.manifest.tensors)} if last else {},
        files=[entry.name for entry in last.manifest.files] if last else [],
        checkpoints=[entry["step"] for entry in local_runs.events(directory, "checkpoint")],
        missed=[entry["step"] for entry in local_runs.events(directory, "checkpoint_missed")],
        tier_bytes=steps[-1]["tier_bytes"] if steps else {},
        peaks={tier: max(entry["tier_peak_bytes"][tier] for entry in steps) for tier in Tier} if steps else {},
        planned={tier: held.total for tier, held in plan_for(job, case.attempts[-1]).bytes.items()},
    )


def run_attempt(attempt: Attempt, job: JobFile) -> list[rank_runs.Ended]:
    more = {rank_runs.OWN_DISK_VARIABLE: str(attempt.world - 1)} if attempt.own_disk else {}
    started = rank_runs.start(job, plan_for(job, attempt), **more)
    step = attempt.stop_at or attempt.kill_at or min(attempt.block_step, 1)

    def look() -> None:
        assert any(process.is_alive() for process in started.processes.values()), [one.log for one in started.join()]
        started.look()

    wait_until(lambda: max(rank_runs.losses(job), default=0) >= step, look)
    if attempt.block_step:
        (Path(job.checkpoint_directory) / f"step-{attempt.block_step}.e{job.epoch}").mkdir()
    elif step:
        os.kill(started.pid(attempt.world - 1), signal.SIGTERM if attempt.stop_at else signal.SIGKILL)
    return started.join()


def digest(value: Any) -> str:
    import torch
    import xxhash

    return xxhash.xxh3_128_hexdigest(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def imported_by(strategies: set[str]) -> Iterator[str]:
    """Modules to import before the ranks are forked; otherwise each rank would import them again."""
    yield "spillway_trainer.run_job"
    if "Fsdp" in strategies:
        yield from ("torch.distributed.fsdp", "torch._dynamo")
    if any(strategy.startswith("Zero") for strategy in strategies):
        yield from ("deepspeed", "spillway_trainer.parallel.deepspeed.adopted", "torch._inductor.compile_fx")
        yield "deepspeed.runtime.zero.muon.muon_optimizer"


def main(path: Path, directory: Path) -> None:
    cases = [
        Case([Attempt(**one) for one in case["attempts"]], case["changes"]) for case in json.loads(path.read_text())
    ]
    for module in imported_by({attempt.strategy for case in cases for attempt in case.attempts}):
        importlib.import_module(module)
    from spillway_trainer.corpus.text_source import text_source
    from spillway_trainer.corpus.tokens import build_corpus

    local_runs.CONTEXT = multiprocessing.get_context("fork")  # type: ignore[assignment]
    text, corpus = local_runs.write_text(directory / "text"), directory / "corpus"
    build_corpus(text_source(text), corpus, 300, lambda line: None)
    found = []
    for index, case in enumerate(cases):
        found.append(asdict(run_case(case, directory / f"case-{index}", text, corpus)))
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
