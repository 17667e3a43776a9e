"""Records what real runs took and what was planned for them: shows how far placement may trust a plan.

    python benchmarks/record_placement.py benchmarks/traces/FILE.json        (Linux, root: memory cgroups are made)

Trains each job of JOBS by `spillway run` on this machine, one after the other, each in a memory cgroup of its own with
the limit of a pod of the job. Records for each: the job as it was written; planned and highest bytes of each tier;
predicted and median seconds of a step; what is counted for the pod, in all and beside the tiers; the cgroup's own peak,
including page cache; and, from samples before and after training began, the most anonymous and shared memory. The most
file pages of any process are recorded, too, because libraries that are already in the page cache are charged to the
process that read them first, which on a fresh node is the pod's.

Everything in the file is measured, or planned by this checkout; nothing is modelled. Of a run that fails, only the job,
its exit code and the figures of its pod are recorded, and the recorder exits with 1 at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import paired
from spillway.api.load import parse_job
from spillway.plan import MemoryPlan
from spillway.planning.pod_resources import pod_resources, tier_memory_bytes
from spillway_cli.record.directory import RunDirectory
from spillway_cli.record.log import read_run_log
from spillway_cli.record.summary import summarize

KIB = 1024
NUM_STEPS = 4
SAMPLE_SECONDS = 0.05
V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


class Recorded(NamedTuple):
    """One job, small enough to run in a minute."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    sequence_length: int
    micro_batch_size: int
    optimizer: str = "Auto"
    activations: str = "Auto"
    compute: str = "bfloat16"
    num_micro_batches: int = 1
    builtin: bool = False


JOBS = (
    Recorded(128, 4, 1024, 128, 2),
    Recorded(256, 4, 2048, 128, 2),
    Recorded(256, 8, 2048, 256, 2),
    Recorded(384, 6, 4096, 128, 4),
    Recorded(384, 6, 4096, 128, 4, activations="Recompute"),
    Recorded(384, 6, 4096, 128, 4, activations="Host"),
    Recorded(384, 6, 4096, 128, 4, activations="Nvme"),
    Recorded(384, 6, 4096, 128, 4, optimizer="Host"),
    Recorded(512, 6, 4096, 128, 2),
    Recorded(512, 6, 4096, 128, 2, compute="float32"),
    Recorded(512, 6, 4096, 128, 2, optimizer="Host"),
    Recorded(512, 6, 4096, 128, 2, optimizer="Nvme"),
    Recorded(512, 8, 8192, 64, 4, activations="Host"),
    Recorded(512, 8, 8192, 64, 4, optimizer="Host", activations="Recompute"),
    Recorded(640, 8, 8192, 64, 2),
    Recorded(640, 8, 8192, 64, 2, optimizer="Host", activations="Host"),
    Recorded(640, 8, 8192, 64, 2, optimizer="Nvme", activations="Nvme"),
    Recorded(768, 8, 8192, 64, 1),
    Recorded(768, 8, 8192, 64, 1, optimizer="Host"),
    Recorded(768, 8, 8192, 64, 2, num_micro_batches=2),
    Recorded(256, 6, 2048, 512, 2),
    Recorded(256, 6, 2048, 512, 2, activations="Recompute"),
    Recorded(256, 6, 2048, 256, 4, activations="Nvme"),
    Recorded(256, 4, 2048, 128, 2, builtin=True),
    Recorded(384, 6, 4096, 128, 4),
    Recorded(384, 6, 4096, 128, 4),
    Recorded(384, 6, 4096, 128, 4, activations="Host"),
    Recorded(384, 6, 4096, 128, 4, activations="Host"),
    Recorded(512, 6, 4096, 128, 2, optimizer="Host"),
    Recorded(512, 6, 4096, 128, 2, optimizer="Host"),
)
"""the last six repeat earlier jobs, to show how much runs of one job differ"""


def document(number: int, job: Recorded, text: str) -> dict[str, Any]:
    """Returns the TrainingJob as it is written to a file."""
    config = {
        "architecture": "llama", "hiddenSize": job.hidden_size, "numLayers": job.num_layers, "numHeads": 8,
        "numKeyValueHeads": 4, "intermediateSize": 8 * (job.hidden_size // 3 // 8) * 8, "vocabSize": job.vocab_size,
    }  # fmt: skip
    spec = {
        "model": {"config": config, "precision": {"compute": job.compute}},
        "data": {"builtin": "PythonStdlib"} if job.builtin else {"text": {"path": text}},
        "training": {
            "steps": NUM_STEPS, "sequenceLength": job.sequence_length, "microBatchSize": job.micro_batch_size,
            "globalBatchSize": job.micro_batch_size * job.num_micro_batches, "optimizer": {"learningRate": "1e-3"},
        },
        "memory": {
            "budget": {"device": "3Gi", "host": "3Gi", "nvme": "3Gi"},
            "advanced": {"optimizer": {"placement": job.optimizer}, "activations": {"policy": job.activations}},
        },
        "checkpoint": {"everySteps": NUM_STEPS, "keep": 2},
    }  # fmt: skip
    metadata = {"name": f"recorded-{number}"}
    return {"apiVersion": "spillway.dev/v1alpha1", "kind": "TrainingJob", "metadata": metadata, "spec": spec}


# --- a pod's memory without a pod -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Pod:
    """A memory cgroup, version 1 or 2, and the highest samples of its memory."""

    path: Path
    is_v1: bool
    anonymous: dict[str, int] = field(default_factory=lambda: {"building": 0, "training": 0})
    """by phase: the most anonymous and shared memory of all samples"""
    file_pages: int = 0
    """bytes of file pages of the process that mapped the most"""

    def limit(self, num_bytes: int) -> None:
        (self.path / ("memory.limit_in_bytes" if self.is_v1 else "memory.max")).write_text(str(num_bytes))

    def peak_bytes(self) -> int:
        return int((self.path / ("memory.max_usage_in_bytes" if self.is_v1 else "memory.peak")).read_text())

    def sample(self, phase: str) -> None:
        found = dict(line.split() for line in (self.path / "memory.stat").read_text().splitlines())
        held = sum(int(found.get(name, 0)) for name in (("rss", "shmem") if self.is_v1 else ("anon", "shmem")))
        self.anonymous[phase] = max(self.anonymous[phase], held)
        for process in (self.path / "cgroup.procs").read_text().split():
            self.file_pages = max(self.file_pages, _file_pages(process))


def _file_pages(process: str) -> int:
    with suppress(OSError):  # it ended meanwhile
        for line in Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("RssFile:"):
                return int(line.split()[1]) * KIB
    return 0


@contextmanager
def pod(number: int) -> Iterator[Pod]:
    is_v1 = V1.is_dir()
    path = (V1 if is_v1 else V2) / f"spillway-recorded-{os.getpid()}-{number}"
    path.mkdir()
    try:
        yield Pod(path, is_v1)
    finally:
        path.rmdir()


# --- one run ----------------------------------------------------------------------------------------------------------


def record(number: int, job: Recorded, directory: Path) -> dict[str, Any]:
    source, output, told = directory / f"job-{number}.yaml", directory / f"run-{number}", directory / f"told-{number}"
    written = document(number, job, str(Path(__file__).resolve().parents[1] / "docs"))
    source.write_text(json.dumps(written), encoding="utf-8")  # JSON is YAML
    spec, run = parse_job(source.read_text(encoding="utf-8"), source.name).spec, RunDirectory(output)
    with pod(number) as own, told.open("wb") as stream:
        command = [sys.executable, "-m", "spillway_cli", "run", str(source), "--output", str(output)]
        script = f'echo $$ > "{own.path}/cgroup.procs" && exec "$@"'
        process = subprocess.Popen(["sh", "-c", script, "sh", *command], stdout=stream, stderr=subprocess.STDOUT)
        limited = False
        while process.poll() is None:
            if not limited and (plan := _plan(run)) is not None:
                own.limit(pod_resources(spec, plan, 1).memory_bytes)
                limited = True
            own.sample("training" if _trains(run) else "building")
            time.sleep(SAMPLE_SECONDS)
        peak = own.peak_bytes()
    found: dict[str, Any] = {"job": document(number, job, "docs"), "exit_code": process.returncode}
    plan = _plan(run)
    if plan is not None:
        counted = pod_resources(spec, plan, 1).memory_bytes
        found["pod"] = {
            "counted_bytes": counted,
            "counted_beside_tiers_bytes": counted - tier_memory_bytes(plan, 1),
            "peak_bytes": peak,
            "anonymous_building_bytes": own.anonymous["building"],
            "anonymous_training_bytes": own.anonymous["training"],
            "file_pages_bytes": own.file_pages,
        }
    if plan is None or process.returncode != 0:
        print(told.read_text(encoding="utf-8", errors="replace")[-3000:], file=sys.stderr)
        return found
    log = read_run_log(run.log)
    summary = summarize(log, plan, log.curve)
    found["tiers"] = {
        use.tier.value: {"planned_bytes": use.planned_bytes, "peak_bytes": use.peak_bytes}
        for use in summary.tiers if use.planned_bytes or use.peak_bytes
    }  # fmt: skip
    found |= {
        "predicted_step_seconds": summary.prediction.step_seconds,
        "step_seconds": summary.step_seconds,
        "num_steps": summary.num_steps,
    }
    return found


def _plan(run: RunDirectory) -> MemoryPlan | None:
    with suppress(OSError, ValueError):  # the file is missing, or half written
        return MemoryPlan.model_validate_json(run.plan_file.read_text(encoding="utf-8"))
    return None


def _trains(run: RunDirectory) -> bool:
    return run.log.exists() and run.log.stat().st_size > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    file = parser.parse_args().file
    runs: list[dict[str, Any]] = []
    commit = paired.commit()
    with tempfile.TemporaryDirectory() as directory:
        for number, job in enumerate(JOBS):
            found = record(number, job, Path(directory))
            runs.append(found)
            shown = {tier: round(use["peak_bytes"] / use["planned_bytes"], 3)
                     for tier, use in found.get("tiers", {}).items() if use["planned_bytes"]}  # fmt: skip
            print(f"{number + 1} of {len(JOBS)}: {job}: {shown} {found.get('pod')}", flush=True)
            trace = {"machine": paired.machine(), "commit": commit, "runs": runs}
            file.write_text(json.dumps(trace, indent=1) + "\n", encoding="utf-8")
    if failed := sum(run["exit_code"] != 0 for run in runs):
        sys.exit(f"{failed} of {len(JOBS)} runs failed")


if __name__ == "__main__":
    main()
