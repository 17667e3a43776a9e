"""Planned bytes of each tier compared with those that runs counted: 25 jobs of all kinds, each run by `spillway run`.

A row of the table is ok if seen <= planned <= max(1.10 x seen, seen + 4 MiB). Seen is the highest of the peaks that the
trainer counts in each step, planned is the total of the plan; both are from the run's own `-o json`. A job that does
not complete, or needs a second attempt, is a miss.

    python benchmarks/planned_bytes.py                  all jobs, some minutes on two cores; exit code 1 on a miss
    python benchmarks/planned_bytes.py --only t5 demo   some jobs, by name
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import spillway
from spillway.units import MIB, format_bytes

RATIO, SLACK_BYTES = 1.10, 4 * MIB
TEXT = Path(spillway.__file__).parent
"""the text of the jobs: Python source, a few hundred kilobytes"""
EXAMPLES = Path(__file__).parent.parent / "examples"
SOURCE = "SOURCE"
"""placeholder for the directory to which DONOR is exported"""

Document = dict[str, Any]


def job(
    config: Document | None = None,
    *,
    memory: Document,
    model: Document | None = None,
    training: Document | None = None,
    parallelism: Document | None = None,
) -> Document:
    """Returns a small job on TEXT: eight steps, with an evaluation and a checkpoint every four."""
    spec: Document = {
        "model": {**({"config": config} if config else {}), **(model or {})},
        "data": {"text": {"path": str(TEXT)}, "evaluation": {"fraction": "0.05", "everySteps": 4}},
        "training": {"steps": 8, "sequenceLength": 128, "globalBatchSize": 8, "microBatchSize": 2, **(training or {})},
        "memory": memory,
        "checkpoint": {"everySteps": 4},
    }
    if parallelism:
        spec["parallelism"] = parallelism
    return {"apiVersion": "spillway.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "job"}, "spec": spec}


def example(name: str, steps: int | None = None) -> Document:
    """Returns a job of examples/, with `steps` steps if given."""
    document: Document = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8"))
    training = document["spec"]["training"]
    if steps is not None:
        training["steps"] = steps
        training["schedule"]["warmupSteps"] = min(steps, training["schedule"]["warmupSteps"])
    return document


def readme() -> Document:
    """Returns the README's "Your own job", with another text and number of steps."""
    text = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    document: Document = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    document["spec"]["data"]["text"]["path"] = str(TEXT)
    document["spec"]["training"]["steps"] = 8
    return document


LLAMA = {"architecture": "llama", "hiddenSize": 192, "numLayers": 6, "numHeads": 4, "numKeyValueHeads": 2,
         "intermediateSize": 512, "vocabSize": 2048}  # fmt: skip
GPT2 = {
    "architecture": "gpt2",
    "hiddenSize": 192,
    "numLayers": 6,
    "numHeads": 4,
    "vocabSize": 2048,
    "maxPositions": 128,
}
BERT = {**GPT2, "architecture": "bert"}
T5 = {"architecture": "t5", "hiddenSize": 128, "numLayers": 4, "numHeads": 4, "intermediateSize": 512,
      "vocabSize": 2048}  # fmt: skip
FORCED = {"optimizer": {"placement": "Host"}, "activations": {"policy": "Nvme"}}


def budget(device: str, host: str = "256Mi", nvme: str = "1Gi", **more: Any) -> Document:
    return {"budget": {"device": device, "host": host, "nvme": nvme}, "advanced": deepcopy(more)}


DONOR = job(GPT2, memory=budget("96Mi"), training={"steps": 2})
"""the job whose exported model `source` jobs start from"""


@dataclass(frozen=True, slots=True)
class Job:
    document: Document
    num_ranks: int = 1

    @property
    def needs_source(self) -> bool:
        return SOURCE in json.dumps(self.document)


JOBS: Mapping[str, Job] = {
    "readme": Job(readme()),
    "demo": Job(example("demo")),
    "tiny-llama": Job(example("tiny-llama", 8)),
    "larger-than-device": Job(example("larger-than-device", 6)),
    "lora": Job(example("lora", 8)),
    "lion": Job(example("lion", 8)),
    "narrow-moments": Job(example("narrow-moments", 8)),
    "sweep": Job(example("sweep")),
    "shared-base": Job(example("shared-base", 12)),
    "llama-float16": Job(
        job(LLAMA, memory=budget("24Mi", activations={"policy": "Host"}), model={"precision": {"compute": "float16"}})
    ),
    "llama-states-on-nvme": Job(
        job(LLAMA, memory=budget("64Mi", optimizer={"placement": "Nvme"}), model={"precision": {"compute": "float32"}})
    ),
    "llama-interleaved": Job(
        job(LLAMA, memory=budget("64Mi", optimizer={"placement": "Interleaved"}, activations={"policy": "Host"}))
    ),
    "llama-resident": Job(job(LLAMA, memory=budget("512Mi"))),
    "llama-homes-on-nvme": Job(
        job(LLAMA, memory=budget("24Mi", "72Mi", parameters={"placement": "Stream"}))
    ),
    "gpt2": Job(job(GPT2, memory=budget("40Mi"))),
    "gpt2-source": Job(job(model={"source": {"path": SOURCE}}, memory=budget("40Mi", **FORCED))),
    "gpt2-source-adapters": Job(
        job(model={"source": {"path": SOURCE}, "lora": {"rank": 8, "alpha": "16"}}, memory=budget("48Mi"))
    ),
    "bert": Job(job(BERT, memory=budget("40Mi"))),
    "bert-spilled": Job(job(BERT, memory=budget("64Mi", **FORCED))),
    "t5": Job(job(T5, memory=budget("40Mi"))),
    "t5-streamed": Job(job(T5, memory=budget("48Mi", parameters={"placement": "Stream"}))),
    "llama-adapters": Job(
        job(LLAMA, memory=budget("40Mi", activations={"policy": "Nvme"}), model={"lora": {"rank": 8, "alpha": "16"}})
    ),
    "2-ranks": Job(job(LLAMA, memory=budget("48Mi", **FORCED)), 2),
    "2-ranks-zero2": Job(job(LLAMA, memory=budget("64Mi", "512Mi"), parallelism={"strategy": "Zero2"}), 2),
    "2-ranks-fsdp": Job(job(LLAMA, memory=budget("64Mi", "512Mi"), parallelism={"strategy": "Fsdp"}), 2),
}  # fmt: skip
"""the jobs were fixed before any of their figures was measured"""


@dataclass(frozen=True, slots=True)
class Row:
    job: str
    tier: str
    planned: int
    seen: int

    @property
    def ok(self) -> bool:
        return self.seen <= self.planned <= max(RATIO * self.seen, self.seen + SLACK_BYTES)

    def __str__(self) -> str:
        ratio = f"{self.planned / self.seen:.3f}" if self.seen else "-"
        cells = (self.job, self.tier, format_bytes(self.planned), format_bytes(self.seen), ratio)
        return f"| {' | '.join(cells)} | {'yes' if self.ok else 'NO'} |"


def spillway_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "spillway_cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def exported_source(directory: Path) -> Path:
    """Trains DONOR and returns the Hugging Face directory to which it is exported."""
    manifest, run, exported = directory / "donor.yaml", directory / "donor", directory / "source"
    manifest.write_text(yaml.safe_dump(DONOR), encoding="utf-8")
    for arguments in (
        ("run", str(manifest), "--output", str(run)),
        ("ckpt", "export", str(run), "--to", str(exported)),
    ):
        done = spillway_command(*arguments)
        if done.returncode:
            raise SystemExit(f"spillway {' '.join(arguments)}: exit code {done.returncode}\n{done.stderr}")
    return exported


def rows_of(name: str, directory: Path, source: Path | None) -> list[Row]:
    """Runs a job in a new directory. Returns its rows; raises RuntimeError if it does not complete in one attempt."""
    wanted, manifest = JOBS[name], directory / f"{name}.yaml"
    manifest.write_text(yaml.safe_dump(wanted.document).replace(SOURCE, str(source)), encoding="utf-8")
    done = spillway_command(
        "run", str(manifest), "--output", str(directory / name), "--ranks", str(wanted.num_ranks), "-o", "json"
    )
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-2000:]}")
    result = json.loads(done.stdout)
    if len(result["attempts"]) != 1:
        raise RuntimeError(f"{len(result['attempts'])} attempts")
    tiers = ((tier, int(one["plannedBytes"]), int(one["peakBytes"])) for tier, one in result["tiers"].items())
    return [Row(name, tier, planned, seen) for tier, planned, seen in tiers if planned or seen]


def measured(names: Sequence[str], directory: Path) -> Iterator[Row | str]:
    """Yields the rows of each job, or the reason why it has none."""
    source = exported_source(directory) if any(JOBS[name].needs_source for name in names) else None
    for name in names:
        try:
            yield from rows_of(name, directory, source)
        except RuntimeError as error:
            yield f"| {name} | {error} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=JOBS, metavar="NAME", help="these jobs alone")
    names = parser.parse_args().only or [*JOBS]
    missed = 0
    print("| job | tier | planned | seen | planned / seen | ok |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        for row in measured(names, Path(directory)):
            print(row, flush=True)
            missed += isinstance(row, str) or not row.ok
    print(f"\n{len(names)} jobs, {missed} misses")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
