"""Real trainer runs for tests: a small job on real text, under a plan that uses every technique and every tier.

Attempts are forked from a server that has already imported torch, so that a hundred kills take only minutes.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
import sysconfig
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from spillway.api.job_file import JobFile
from spillway.api.load import parse_job
from spillway.plan import ActivationPlan, MemoryPlan, OptimizerPlan, Policy, Prediction, Tier, TierBytes
from spillway.units import MIB

JOB = """
apiVersion: spillway.dev/v1alpha1
kind: TrainingJob
metadata: {name: small}
spec:
  model:
    config: {architecture: llama, hiddenSize: 64, numLayers: 4, numHeads: 4, numKeyValueHeads: 2,
             intermediateSize: 160, vocabSize: 512, tieWordEmbeddings: true, dropout: "0.1"}
  data:
    text: {path: TEXT}
    evaluation: {fraction: "0.05", everySteps: 7}
  training: {steps: 12, sequenceLength: 64, globalBatchSize: 8, microBatchSize: 4, gradientClipping: "0.5",
             optimizer: {learningRate: "2e-3"}, schedule: {name: Cosine, warmupSteps: 3}}
  memory: {budget: {host: 64Mi}}
  checkpoint: {everySteps: 3}
"""
MODULES = ("argparse.py", "dataclasses.py", "enum.py", "inspect.py", "typing.py", "tarfile.py")
"""a small amount of real text: these source files of the standard library"""


def write_text(directory: Path) -> Path:
    """Writes a small amount of real text; returns `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    library = Path(sysconfig.get_path("stdlib"))
    for name in MODULES:
        (directory / name).write_bytes((library / name).read_bytes())
    return directory


def spread_plan(num_layers: int = 4) -> MemoryPlan:
    """A plan that takes every path of both techniques at once, and is optimal in no respect."""
    answers = (Policy.KEEP, *[Policy.NVME, Policy.HOST, Policy.RECOMPUTE, Policy.NVME][:num_layers], Policy.KEEP)
    return MemoryPlan(
        job="small",
        node="local",
        mode="Auto",
        micro_batch_size=4,
        num_micro_batches=2,
        num_segments=num_layers + 2,
        optimizer=OptimizerPlan(
            cpu_share=0.5, streamed_share=0.2, resident_share=0.3, chunk_parameters=4096, num_threads=1
        ),
        activations=ActivationPlan(answers=answers, minimum_bytes=4096, window_bytes=2 * MIB, num_io_threads=1),
        bytes={tier: TierBytes(buffers=32 * MIB) for tier in Tier},
        budget=dict.fromkeys(Tier, 64 * MIB),
        snapshot_bytes=8 * MIB,
        prediction=PREDICTION,
    )


def disabled_plan(num_layers: int = 4) -> MemoryPlan:
    """The plan of memory.mode Disabled: everything is resident, and there are no hooks."""
    return spread_plan(num_layers).model_copy(
        update={"mode": "Disabled", "optimizer": OptimizerPlan(), "activations": ActivationPlan(), "snapshot_bytes": 0}
    )


PREDICTION = Prediction(
    step_seconds=1.0,
    compute_seconds=1.0,
    exposed_optimizer_seconds=0.0,
    exposed_transfer_seconds=0.0,
    bound_by="compute",
)


def job_file(output: Path, text: Path, corpus: Path, epoch: int) -> JobFile:
    spec = parse_job(JOB.replace("TEXT", str(text)), "small job").spec
    output.mkdir(parents=True, exist_ok=True)
    return JobFile(
        name="small",
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


def run_attempt(job: JobFile, plan: MemoryPlan) -> None:
    """Entry point of a forked attempt; never returns."""
    log = os.open(f"{job.output_directory}/trainer-{job.epoch}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from spillway_trainer.__main__ import attempt

    gc.freeze()  # nothing of the server is ever garbage
    sys.stdout.flush()
    code = attempt(job, lambda: plan)
    sys.stdout.flush()
    os._exit(code)


CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = ["spillway_trainer.__main__", "spillway_trainer.models.families", "sympy"]
"""what a trainer imports, at the latest in its first step; no module of tests, because the server does not find them"""
CONTEXT.set_forkserver_preload(PRELOADED)


def start_attempt(
    job: JobFile, plan: MemoryPlan, run: Callable[[JobFile, MemoryPlan], None] = run_attempt
) -> BaseProcess:
    process = CONTEXT.Process(target=run, args=(job, plan))
    process.start()
    return process


def complete(job: JobFile, plan: MemoryPlan) -> int:
    """Run one attempt to its end; returns its exit code (negative: killed by that signal)."""
    process = start_attempt(job, plan)
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def events(output: Path, event: str) -> list[dict[str, Any]]:
    """The events of one kind from complete lines of run.jsonl, in order."""
    path = output / "run.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # a kill cut this line off
        if entry["event"] == event:
            found.append(entry)
    return found


def log_of(output: Path, epoch: int) -> str:
    path = output / f"trainer-{epoch}.log"
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else "(no log)"
