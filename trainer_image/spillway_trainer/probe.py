"""Measures this machine's rates with the trainer's own parts; started by `spillway calibrate`.

    python -m spillway_trainer.probe --directory SPILL --threads N [--quick]

disk      batches of 16 MiB through our I/O engine into a nameless file, which vanishes even if the process is killed
matrices  products of the sizes that transformers have
memory    a copy by one thread, as a lane makes it; a copy by all threads
update    our AdamW kernel on more bytes than caches hold
links     on a GPU: copies up, down, both ways at once, and within the device
training  whole steps of small models, in turn, so that other load on the machine affects all of them

Prints one JSON object per line: {"doing": ...} before each part, and {"result": ...} or {"error": ...} at the end.
"""

from __future__ import annotations

# isort: off
from . import environment  # noqa: F401 - before torch is imported
# isort: on

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from spillway.api.job_file import JobFile
from spillway.api.load import parse_job
from spillway.api.training_job import TrainingJob
from spillway.errors import SpillVolumeFull, SpillwayError
from spillway.feedback.calibration import LEAST_STEPS, WARM_UP_STEPS
from spillway.metrics import StepMetrics
from spillway.plan import MemoryPlan
from spillway.planning.hardware import gpu_node, local_node
from spillway.planning.planner import make_plan
from spillway.units import GIB, MIB, format_bytes

from . import config
from .assemble import Assembly, assemble, fill
from .corpus.data import Batch, TokenBatches
from .kernels import dispatch as kernels
from .kernels import half_products, native
from .kernels.reference import UpdateScalars
from .reporting.recorder import Recorder
from .tiers import cuda
from .tiers.host_slab import HostSlab
from .tiers.spill_file import SpillFile
from .trainer import Run, RunProgress, StopRequest, Written, train_step

DISK_BYTES, QUICK_DISK_BYTES = 256 * MIB, 64 * MIB
BATCH_BYTES, REQUEST_BYTES = 16 * MIB, 4 * MIB
IO_THREADS = 2
"""The plan's default."""
COPY_BYTES = 64 * MIB
UPDATE_PARAMETERS = 4 * 2**20
"""112 MiB of states and gradients"""
MATRIX_SIZES = (256, 512, 1024, 2048)
REPEATS = 7
ROUNDS = WARM_UP_STEPS + LEAST_STEPS + 2

CPU = torch.device("cpu")
Figures = dict[str, list[float]]
"""Name -> samples."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A model to train, and how."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    sequence_length: int
    micro_batch_size: int
    compute: str = "bfloat16"
    optimizer: str = "Device"
    activations: str = "Keep"
    """`optimizer` and `activations` are the placement and the policy in spec.memory.advanced; host memory means many
    small operations."""
    num_micro_batches: int = 2

    def job(self) -> TrainingJob:
        sizes = f"hiddenSize: {self.hidden_size}, numLayers: {self.num_layers}, vocabSize: {self.vocab_size}"
        heads = f"numHeads: {max(2, self.hidden_size // 64)}, intermediateSize: {self.hidden_size * 8 // 3 // 8 * 8}"
        batches = self.num_micro_batches * self.micro_batch_size
        batch = f"globalBatchSize: {batches}, microBatchSize: {self.micro_batch_size}"
        tiers = f"optimizer: {{placement: {self.optimizer}}}, activations: {{policy: {self.activations}}}"
        return parse_job(
            f"""
apiVersion: spillway.dev/v1alpha1
kind: TrainingJob
metadata: {{name: probe}}
spec:
  model:
    config: {{architecture: llama, {sizes}, {heads}}}
    precision: {{compute: {self.compute}}}
  data: {{builtin: PythonStdlib}}
  training: {{steps: {ROUNDS}, sequenceLength: {self.sequence_length}, {batch}}}
  memory: {{advanced: {{{tiers}, parameters: {{placement: Resident}}}}}}
""",
            "the probe's job",
        )


QUICK_CELLS = (
    Cell(64, 4, 512, 64, 2),
    Cell(256, 4, 2048, 256, 2),
    Cell(128, 8, 1024, 128, 2, optimizer="Host", activations="Host"),
    Cell(128, 4, 512, 128, 2, "float32"),
    Cell(256, 2, 1024, 128, 2, "float32"),
)
CELLS = (
    *QUICK_CELLS,
    Cell(512, 2, 2048, 256, 4),
    Cell(128, 8, 4096, 128, 8),
    Cell(256, 4, 2048, 256, 2, optimizer="Host", activations="Host"),
    Cell(256, 4, 2048, 256, 2, "float32"),
)


DEVICE_CELLS = (Cell(1024, 4, 8192, 1024, 4), Cell(1024, 4, 8192, 1024, 2, "float32"))
"""Additional cells for a GPU: large enough that it needs more time for their steps than the host needs to launch
them."""


def main() -> None:
    arguments = argparse.ArgumentParser(prog="spillway_trainer.probe")
    arguments.add_argument("--directory", type=Path, required=True)
    arguments.add_argument("--threads", type=int, required=True)
    arguments.add_argument("--device", choices=("Cpu", "Cuda"), default="Cpu")
    arguments.add_argument("--quick", action="store_true")
    given = arguments.parse_args()
    as_the_trainer(given.threads)
    try:
        say({"result": measure(given.directory, given.threads, given.quick, device_named(given.device))})
    except SpillwayError as error:
        say({"error": {"exitCode": int(error.exit_code), "message": str(error)}})
        sys.exit(error.exit_code)


def as_the_trainer(threads: int) -> None:
    """Sets threads, products and allocator as in a run; importing `environment` in this module did the rest."""
    half_products.fix_products(threads)
    native.return_freed_memory()


def device_named(kind: str) -> torch.device:
    """Returns the device, ready for work. Raises UserError if there is none of this kind."""
    if kind == "Cpu":
        return CPU
    device = cuda.device_of(0)
    cuda.prepare(device, cuda.memory_bytes(device))
    return device


def say(document: Mapping[str, Any]) -> None:
    print(json.dumps(document, allow_nan=False), flush=True)


def measure(directory: Path, threads: int, quick: bool, device: torch.device = CPU) -> dict[str, Any]:
    """Measures everything. Raises SpillVolumeFull or UserError before any other measurement if `directory` cannot be
    probed."""
    load = os.getloadavg()[0]
    say({"doing": f"disk: writing and reading {format_bytes(disk_bytes(quick))} in {directory}"})
    figures, backend = disk(directory, disk_bytes(quick))
    say({"doing": "matrix products"})
    sizes = MATRIX_SIZES[:3] if quick else MATRIX_SIZES
    figures |= matrices(sizes if device == CPU else [4 * size for size in sizes], device)
    say({"doing": "memory and the optimizer's update"})
    figures |= memory(threads) | update(threads)
    cells: tuple[Cell, ...] = QUICK_CELLS if quick else CELLS
    if device != CPU:
        say({"doing": "links of the device"})
        figures |= links(device)
        cells += DEVICE_CELLS
    measured = list(training(cells, directory, threads, device=device))
    return {
        "figures": figures,
        "cells": measured,
        "backend": backend,
        "isa": native.isa(),
        "threads": threads,
        "loadBefore": load,
    }


def disk_bytes(quick: bool) -> int:
    return QUICK_DISK_BYTES if quick else DISK_BYTES


# --- single figures ---------------------------------------------------------------------------------------------------


def seconds_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def repeated(work: Callable[[], object]) -> list[float]:
    """Seconds of REPEATS calls after one that warms up."""
    work()
    return [seconds_of(work) for _ in range(REPEATS)]


def disk(directory: Path, nbytes: int) -> tuple[Figures, str]:
    """Returns the bytes per second of each batch, and the I/O backend. The volume must have twice `nbytes` free, so
    that the probe does not fill it for others."""
    room = os.statvfs(directory) if directory.is_dir() else None
    if room is not None and room.f_bavail * room.f_frsize < 2 * nbytes:
        free = room.f_bavail * room.f_frsize
        raise SpillVolumeFull(
            f"--directory {directory}: {format_bytes(free)} free, but the probe writes "
            f"{format_bytes(nbytes)} and needs twice as much free; delete files, or name another directory"
        )
    slab = HostSlab(BATCH_BYTES)
    buffer = slab.allocate(BATCH_BYTES, "probe")
    buffer.copy_(torch.randint(0, 256, (BATCH_BYTES,), dtype=torch.uint8))  # so that compression does not help
    file = SpillFile(directory, nbytes, num_threads=IO_THREADS)
    try:
        writes, reads, checksums = [], [], dict[int, int]()
        parts = [(start, buffer[start : start + REQUEST_BYTES]) for start in range(0, BATCH_BYTES, REQUEST_BYTES)]
        for offset in range(0, nbytes, BATCH_BYTES):
            requests = [(offset + start, part) for start, part in parts]
            started = time.perf_counter()
            found = file.write_batch(requests)
            writes.append(BATCH_BYTES / (time.perf_counter() - started))
            checksums.update(zip((at for at, _ in requests), found, strict=True))
        for offset in range(0, nbytes, BATCH_BYTES):
            wanted = [(offset + start, part, checksums[offset + start], "") for start, part in parts]
            reads.append(BATCH_BYTES / seconds_of(lambda wanted=wanted: file.read_batch(wanted)))  # type: ignore[misc]
        return {"disk write": writes, "disk read": reads}, file.backend
    finally:
        file.close()


def links(device: torch.device) -> Figures:
    """Returns bytes per second between device and host, and within the device: REPEATS medians of each."""
    found = [cuda.link_rates(device, HostSlab(2 * COPY_BYTES), COPY_BYTES) for _ in range(REPEATS)]
    return {name: [one[name] for one in found] for name in found[0]}


def matrices(sizes: Sequence[int], device: torch.device = CPU) -> Figures:
    """Returns the FLOPs per second of products of square matrices."""
    figures: Figures = {}
    for dtype in (torch.bfloat16, torch.float32):
        for size in sizes:
            left, right = (torch.randn(size, size).to(device, dtype) for _ in range(2))
            work = lambda left=left, right=right: left @ right  # noqa: E731
            seconds = repeated(work) if device == CPU else cuda.seconds_of([work] * (REPEATS + 1))[1:]
            figures[f"matrix product {str(dtype).removeprefix('torch.')} {size}"] = [2 * size**3 / s for s in seconds]
    return figures


def memory(threads: int) -> Figures:
    """Returns bytes per second: copied by a lane's thread; read and written by all threads."""
    source, target = torch.ones(COPY_BYTES, dtype=torch.uint8), torch.zeros(COPY_BYTES, dtype=torch.uint8)
    one = repeated(lambda: kernels.copy(target, source))
    every = repeated(lambda: kernels.copy(target, source, num_threads=threads))
    return {
        "copy": [COPY_BYTES / seconds for seconds in one],
        "host memory": [2 * COPY_BYTES / seconds for seconds in every],
    }


def update(threads: int) -> Figures:
    """Returns the bytes per second that AdamW moves: 28 per parameter, and 2 for the bfloat16 copy."""
    master, exp_avg, exp_avg_sq, gradient = (torch.full((UPDATE_PARAMETERS,), 0.01) for _ in range(4))
    out = torch.empty(UPDATE_PARAMETERS, dtype=torch.bfloat16)
    scalars = UpdateScalars(1e-3, 0.9, 0.95, 1e-8, 0.1, 0.9, 0.95)
    moments = (exp_avg, exp_avg_sq)
    seconds = repeated(lambda: kernels.update(scalars, master, moments, gradient, out, num_threads=threads))
    return {"optimizer update": [30 * UPDATE_PARAMETERS / second for second in seconds]}


# --- training steps ---------------------------------------------------------------------------------------------------


class RandomTokens:
    """The part of TokenBatches that a step uses, without a corpus."""

    def __init__(self, cell: Cell) -> None:
        shape = (cell.micro_batch_size, cell.sequence_length)
        tokens, labels = (torch.randint(0, cell.vocab_size, shape) for _ in range(2))
        self._batch = Batch(tokens, labels, tokens.numel())

    def batch(self, samples: range) -> Batch:
        return self._batch

    def num_unmasked(self, samples: range) -> int:
        return len(samples) * self._batch.num_unmasked // len(self._batch.tokens_BT)


def training(
    cells: Sequence[Cell], directory: Path, threads: int, num_rounds: int = ROUNDS, device: torch.device = CPU
) -> Iterator[dict[str, Any]]:
    """Yields the steps of every cell, as in run.jsonl, and the work that its plan predicts for a step. `directory` only
    gets nameless spill files."""
    node = local_node(threads, 4 * GIB, 4 * GIB, GIB)
    if device != CPU:
        on_device = gpu_node("", cuda.memory_bytes(device), 1)
        node = dataclasses.replace(on_device, num_cores=threads, host_bytes=4 * GIB, nvme_bytes=GIB)
    with ExitStack() as opened:
        runs = []
        for cell in cells:
            job = cell.job()
            plan = make_plan(job, node)
            assert isinstance(plan, MemoryPlan), "4 GiB are enough for every cell"
            assembly = opened.enter_context(assembled(job, plan, directory, threads, device))
            runs.append((cell, plan, run_of(job, cell, assembly), config.loop_settings(job.spec, plan), RunProgress()))
        steps: list[list[StepMetrics]] = [[] for _ in runs]
        for number in range(num_rounds):
            say({"doing": f"training steps, round {number + 1} of {num_rounds}"})
            for measured, (_, _, run, settings, progress) in zip(steps, runs, strict=True):
                measured.append(train_step(run, settings, progress, StopRequest())[0])
        for (cell, plan, *_), measured in zip(runs, steps, strict=True):
            spread = [step.step_seconds for step in measured[WARM_UP_STEPS:]]
            yield {
                **dataclasses.asdict(cell),
                "device": node.device_kind,
                "work": plan.prediction.work,
                "steps": [finite(step) for step in measured],
                "medianSeconds": statistics.median(spread),
            }


def finite(step: StepMetrics) -> dict[str, Any]:
    """Returns what calibration reads of a step, with a finite loss: on random tokens, the loss may be anything."""
    return dataclasses.asdict(dataclasses.replace(step, loss=0.0, gradient_norm=0.0, clip_factor=1.0))


@contextmanager
def assembled(
    job: TrainingJob, plan: MemoryPlan, directory: Path, threads: int, device: torch.device
) -> Iterator[Assembly]:
    file = JobFile(
        name="probe",
        uid="probe",
        epoch=1,
        spec=job.spec,
        output_directory=str(directory),
        corpus_directory=str(directory),
        checkpoint_directory=str(directory),
        spill_directory=str(directory),
        termination_message_path=str(directory / "termination.json"),
        compute_threads=threads,
    )
    assembly = assemble(file, plan, device=device)
    try:
        fill(assembly, seed=0)
        yield assembly
    finally:
        assembly.tiers.close()


class NoCheckpoints:
    def commit(self, progress: RunProgress, *, behind: bool) -> Written | None:
        raise AssertionError("the probe runs single steps, which must not write checkpoints")

    def written(self, *, wait: bool) -> Written | None:
        raise AssertionError("the probe runs single steps, which must not write checkpoints")


def run_of(job: TrainingJob, cell: Cell, assembly: Assembly) -> Run:
    return Run(
        model=assembly.model,
        optimizer=assembly.optimizer,
        techniques=assembly,
        position=assembly.position,
        batches=cast(TokenBatches, RandomTokens(cell)),
        learning_rate=config.learning_rate(job.spec),
        checkpoints=NoCheckpoints(),
        recorder=Recorder(None),
        order=assembly.order,
        device=assembly.tiers.device,
    )


if __name__ == "__main__":
    main()
