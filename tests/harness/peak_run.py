"""One run of the real assembly and step loop in a fresh process, and its peak memory by several measures.

    python peak_run.py DIRECTORY [torch]         prints one JSON object of bytes

DIRECTORY holds cell-job.json and cell-plan.json, whose run is measured, and tiny-job.json and tiny-plan.json, whose run
comes first, so that code, kernels and threads are in memory before the measurement.

rss         growth of the process's peak resident set since just before anything was assembled (kernel)
host        resident pages of the host slab's mapping (kernel, smaps)
nvme        blocks of the spill file (kernel, stat of the open file)
torch       peak of torch's CPU allocator in a second run under its memory profiler, which sees only the main thread
own_...     peak that the trainer itself reports for each tier
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from fakes.no_checkpoints import NoCheckpoints
from harness.allocator_peak import allocated_peak
from spillway.api.job_file import JobFile
from spillway.metrics import StepMetrics
from spillway.plan import MemoryPlan, Tier
from spillway_trainer import config
from spillway_trainer.assemble import Assembly, assemble, fill
from spillway_trainer.corpus.data import Batch
from spillway_trainer.kernels import half_products, native
from spillway_trainer.optimizer.schedule import LearningRate
from spillway_trainer.reporting.recorder import Recorder
from spillway_trainer.trainer import Run, RunProgress, StopRequest, train

STEPS = 1


class RandomBatches:
    """Random tokens that depend only on the sample's number."""

    def __init__(self, job: JobFile, vocab_size: int) -> None:
        self._length, self._vocab_size = job.spec.training.sequence_length, vocab_size

    def batch(self, samples: Sequence[int]) -> Batch:
        generator = torch.Generator().manual_seed(samples[0])
        tokens = torch.randint(0, self._vocab_size, (len(samples), self._length), generator=generator)
        return Batch(tokens, tokens.clone(), tokens.numel())

    def num_unmasked(self, samples: Sequence[int]) -> int:
        return len(samples) * self._length

    def evaluation_batches(self, micro_batch_size: int) -> Iterator[Batch]:
        return iter(())


class Listener(Recorder):
    """A recorder that writes nothing, and keeps the highest peaks of tiers that the trainer reports."""

    def __init__(self) -> None:
        super().__init__(None)
        self.peaks: Counter[str] = Counter()

    def step(self, step: StepMetrics) -> None:
        self.peaks |= Counter(step.tier_peak_bytes)


def run(job: JobFile, plan: MemoryPlan, listener: Recorder) -> Assembly:
    """Runs all steps; returns the assembly, which is still open."""
    assembly = assemble(job, plan)
    fill(assembly, seed=0)
    loop = Run(
        model=assembly.model,
        optimizer=assembly.optimizer,
        techniques=assembly,
        position=assembly.position,
        batches=RandomBatches(job, assembly.model.vocab_size),
        learning_rate=LearningRate("Constant", 1e-3, STEPS, 0, 1.0),
        checkpoints=NoCheckpoints(),
        recorder=listener,
        order=assembly.order,
    )
    train(loop, config.loop_settings(job.spec, plan), RunProgress(), StopRequest())
    return assembly


def resident(name: str) -> int:
    """VmRSS or VmHWM (`name`) of this process, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


def mapping_bytes(address: int) -> int:
    """Resident bytes of the mapping that holds `address`."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, _, rest = line.partition(" ")
        if "-" in head and not head.endswith(":"):
            start, end = (int(part, 16) for part in head.split("-"))
            found = start <= address < end
        elif found and head == "Rss:":
            return 1024 * int(rest.split()[0])
    raise AssertionError(f"nothing is mapped at {address:#x}")


def spill_file_bytes(directory: Path) -> int:
    """Bytes on disk of the files in `directory` that this process has open, including deleted ones."""
    held = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            is_ours = os.readlink(entry).startswith(f"{directory}/")
        except OSError:
            continue  # the descriptor that iterdir itself used
        held += 512 * entry.stat().st_blocks if is_ours else 0
    return held


def read(directory: Path, name: str) -> tuple[JobFile, MemoryPlan]:
    job, plan = (directory / f"{name}-{what}.json" for what in ("job", "plan"))
    return JobFile.model_validate_json(job.read_text()), MemoryPlan.model_validate_json(plan.read_text())


def main(here: str, *yardsticks: str) -> None:
    directory = Path(here)
    job, plan = read(directory, "cell")
    native.return_freed_memory()
    half_products.fix_products(1)
    run(
        *read(directory, "tiny"), Listener()
    ).tiers.close()  # code, kernels and threads are in memory before the baseline
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    listener = Listener()
    assembly = run(job, plan, listener)
    slab = assembly.tiers.host
    figures = {
        "rss": resident("VmHWM") - before,
        "host": mapping_bytes(slab.memory.data_ptr()) if slab.capacity_bytes else 0,
        "nvme": spill_file_bytes(directory),
        **{f"own_{tier}": listener.peaks[tier] for tier in Tier},
    }
    assembly.tiers.close()
    del assembly, slab
    gc.collect()
    if "torch" in yardsticks:

        def again() -> None:
            run(job, plan, Listener()).tiers.close()

        figures["torch"] = allocated_peak(again, directory)
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
