"""Plans for models of 1 B to 13 B parameters on one GPU, and a few steps of each at full size on the fake CUDA device
without numbers (`fakes.cuda_without_numbers`): what is planned beside what torch's allocator took.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fakes import cuda_without_numbers
from fakes.cuda_kernels import take_counts
from spillway.api.job_file import JobFile
from spillway.api.training_job import TrainingJob
from spillway.errors import DeviceOutOfMemory, HostOutOfMemory
from spillway.plan import Infeasible, MemoryPlan, Tier
from spillway.planning.hardware import resolve_node
from spillway.planning.planner import make_plan
from spillway.units import GIB, MIB
from spillway_trainer import config
from spillway_trainer.assemble import assemble
from spillway_trainer.corpus.data import Batch
from spillway_trainer.models.build import build_model
from spillway_trainer.reporting.recorder import Recorder
from spillway_trainer.tiers import cuda
from spillway_trainer.trainer import Run, RunProgress, StopRequest, train_step

DEVICE_MIB = 1000 * 1024
"""more than any shape needs: what limits it is its budget"""
NUM_STEPS = 3
"""the last one is counted: the first ones allocate"""


def llama(hidden: int, layers: int, heads: int, kv_heads: int, wide: int, vocabulary: int, **more: Any) -> Any:
    return {
        "architecture": "llama", "hiddenSize": hidden, "numLayers": layers, "numHeads": heads,
        "numKeyValueHeads": kv_heads, "intermediateSize": wide, "vocabSize": vocabulary, **more,
    }  # fmt: skip


def gpt2(hidden: int, layers: int, heads: int, positions: int) -> Any:
    return {
        "architecture": "gpt2", "hiddenSize": hidden, "numLayers": layers, "numHeads": heads, "vocabSize": 50257,
        "maxPositions": positions, "dropout": "0.1",
    }  # fmt: skip


MODELS = {
    "llama-1b": llama(2048, 16, 32, 8, 8192, 128256, tieWordEmbeddings=True),
    "llama-3b": llama(3072, 28, 24, 8, 8192, 128256, tieWordEmbeddings=True),
    "llama-7b": llama(4096, 32, 32, 32, 11008, 32000),
    "llama-8b": llama(4096, 32, 32, 8, 14336, 128256),
    "llama-13b": llama(5120, 40, 40, 40, 13824, 32000),
    "gpt2-1.5b": gpt2(1600, 48, 25, 1024),
    "gpt2-2.7b": gpt2(2560, 32, 32, 2048),
    "gpt2-6.7b": gpt2(4096, 32, 32, 2048),
    "qwen-1.5b": llama(1536, 28, 12, 2, 8960, 151936, tieWordEmbeddings=True),
    "qwen-3b": llama(2048, 36, 16, 2, 11008, 151936, tieWordEmbeddings=True),
    "qwen-7b": llama(3584, 28, 28, 4, 18944, 152064),
}
"""by the sizes that were published under these names"""


@dataclass(frozen=True, slots=True)
class Shape:
    """One plan."""

    model: str
    technique: str
    device_gib: float = 0.0
    """budget; 0: what the plan needs, so that it fills it"""
    length: int = 2048
    batch: int = 1
    num_micro_batches: int = 1
    compute: str = "bfloat16"
    clips: bool = True
    host_gib: int = 400
    lora: bool = False

    @property
    def name(self) -> str:
        parts = [self.model, self.technique, f"{self.batch}x{self.length}"]
        parts += [f"{self.num_micro_batches} micro-batches"] * (self.num_micro_batches > 1)
        parts += [self.compute] * (self.compute != "bfloat16") + ["free"] * (not self.clips) + ["lora"] * self.lora
        parts += [f"{self.device_gib:g} GiB"] * bool(self.device_gib)
        return ", ".join(parts)


TECHNIQUES: Mapping[str, Mapping[str, Any]] = {
    "disabled": {"mode": "Disabled"},
    "auto": {},
    "states on host": {"advanced": {"optimizer": {"placement": "Host", "overlap": "None"}}},
    "beside forward": {"advanced": {"optimizer": {"placement": "Host", "overlap": "Forward"}}},
    "beside backward": {"advanced": {"optimizer": {"placement": "Host", "overlap": "Backward"}}},
    "interleaved": {"advanced": {"optimizer": {"placement": "Interleaved"}}},
    "states on nvme": {"advanced": {"optimizer": {"placement": "Nvme"}}},
    "recompute": {"advanced": {"optimizer": {"placement": "Host"}, "activations": {"policy": "Recompute"}}},
    "activations on host": {"advanced": {"optimizer": {"placement": "Host"}, "activations": {"policy": "Host"}}},
    "activations on nvme": {"advanced": {"optimizer": {"placement": "Host"}, "activations": {"policy": "Nvme"}}},
    "streamed": {"advanced": {"parameters": {"placement": "Stream"}}},
    "streamed, recompute": {
        "advanced": {"parameters": {"placement": "Stream"}, "activations": {"policy": "Recompute"}}
    },
}
RESIDENT = {"advanced": {"parameters": {"placement": "Resident"}}}

SHAPES = [
    Shape("llama-1b", "disabled"),
    Shape("llama-1b", "disabled", compute="float32", clips=False),
    Shape("llama-1b", "states on host", batch=4),
    Shape("llama-1b", "beside forward", length=8192),
    Shape("llama-1b", "beside backward", clips=False, batch=2),
    Shape("llama-1b", "interleaved", compute="float32"),
    Shape("llama-1b", "auto", 12, batch=2),
    Shape("llama-1b", "auto", 24, batch=4, clips=False, num_micro_batches=2),
    Shape("llama-1b", "auto", 16, lora=True, batch=4),
    Shape("llama-3b", "disabled", compute="float16"),
    Shape("llama-3b", "states on nvme", length=4096),
    Shape("llama-3b", "recompute", length=8192, num_micro_batches=2),
    Shape("llama-3b", "activations on host", batch=2, length=4096),
    Shape("llama-3b", "activations on nvme", length=4096),
    Shape("llama-3b", "streamed", batch=2, num_micro_batches=4),
    Shape("llama-3b", "auto", 16, length=4096, compute="float16"),
    Shape("llama-3b", "auto", 40, batch=4, clips=False),
    Shape("llama-3b", "beside backward", clips=False, compute="float16"),
    Shape("llama-7b", "disabled"),
    Shape("llama-7b", "states on host", length=4096),
    Shape("llama-7b", "beside forward", batch=4),
    Shape("llama-7b", "beside backward", clips=False),
    Shape("llama-7b", "interleaved", batch=2),
    Shape("llama-7b", "states on nvme", num_micro_batches=4),
    Shape("llama-7b", "recompute", batch=4, length=4096),
    Shape("llama-7b", "activations on host", length=4096),
    Shape("llama-7b", "activations on nvme", batch=2),
    Shape("llama-7b", "streamed", num_micro_batches=4),
    Shape("llama-7b", "streamed, recompute", length=8192),
    Shape("llama-7b", "auto", 12, num_micro_batches=8),
    Shape("llama-7b", "auto", 24, length=4096, clips=False),
    Shape("llama-7b", "auto", 24, compute="float32"),
    Shape("llama-7b", "auto", 80, batch=8),
    Shape("llama-7b", "auto", 24, lora=True, batch=2),
    Shape("llama-8b", "states on host", length=8192),
    Shape("llama-8b", "interleaved", length=4096),
    Shape("llama-8b", "recompute", length=8192, compute="float16"),
    Shape("llama-8b", "activations on host", length=4096, num_micro_batches=2),
    Shape("llama-8b", "streamed, recompute", length=4096, num_micro_batches=4),
    Shape("llama-8b", "auto", 24, length=4096, num_micro_batches=4),
    Shape("llama-8b", "auto", 80, length=8192, clips=False),
    Shape("llama-13b", "states on host"),
    Shape("llama-13b", "recompute", batch=2, length=4096),
    Shape("llama-13b", "streamed", num_micro_batches=2),
    Shape("llama-13b", "auto", 24, num_micro_batches=4),
    Shape("llama-13b", "auto", 80, batch=4),
    Shape("gpt2-1.5b", "disabled", length=1024, batch=4),
    Shape("gpt2-1.5b", "auto", 16, length=1024, batch=4, clips=False),
    Shape("gpt2-1.5b", "activations on nvme", length=1024, batch=8),
    Shape("gpt2-2.7b", "states on host", batch=2),
    Shape("gpt2-2.7b", "recompute", batch=4, compute="float16"),
    Shape("gpt2-2.7b", "auto", 24, batch=2, compute="float32"),
    Shape("gpt2-6.7b", "interleaved"),
    Shape("gpt2-6.7b", "activations on host", batch=2),
    Shape("gpt2-6.7b", "auto", 24, num_micro_batches=4),
    Shape("qwen-1.5b", "states on host", length=4096),
    Shape("qwen-1.5b", "auto", 16, lora=True, length=4096),
    Shape("qwen-3b", "activations on host", length=4096),
    Shape("qwen-3b", "auto", 24, batch=2, length=4096),
    Shape("qwen-7b", "beside forward", length=4096),
    Shape("qwen-7b", "streamed, recompute", length=8192, num_micro_batches=2),
    Shape("qwen-7b", "auto", 40, batch=2, clips=False),
]


def job_of(shape: Shape, device_gib: float) -> TrainingJob:
    memory = {**TECHNIQUES[shape.technique], "budget": {
        "device": f"{int(device_gib * 1024)}Mi", "host": f"{shape.host_gib}Gi", "nvme": "2000Gi"
    }}  # fmt: skip
    if shape.technique not in ("auto", "disabled") and "parameters" not in memory:
        memory |= RESIDENT
    model: dict[str, Any] = {"config": MODELS[shape.model], "precision": {"compute": shape.compute}}
    if shape.lora:
        model["lora"] = {"rank": 16}
    return TrainingJob.model_validate({
        "apiVersion": "spillway.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "plan"}, "spec": {
            "model": model,
            "data": {"builtin": "PythonStdlib"},
            "training": {
                "steps": NUM_STEPS, "sequenceLength": shape.length, "microBatchSize": shape.batch,
                "globalBatchSize": shape.batch * shape.num_micro_batches, "nonFinite": "SkipStep",
                "gradientClipping": "1" if shape.clips else "0",
            },
            "memory": memory,
        },
    })  # fmt: skip


def plan_of(shape: Shape) -> tuple[TrainingJob, MemoryPlan]:
    """With the budget that it fills."""
    node = replace(resolve_node("1xh100"), device_bytes=DEVICE_MIB * MIB, host_bytes=1000 * GIB, nvme_bytes=4000 * GIB)
    device_gib = shape.device_gib
    if not device_gib:
        needed = planned(job_of(shape, DEVICE_MIB / 1024), node)
        device_gib = -(-needed.bytes[Tier.DEVICE].total // MIB) / 1024
    job = job_of(shape, device_gib)
    return job, planned(job, node)


def planned(job: TrainingJob, node: Any) -> MemoryPlan:
    found = make_plan(job, node, explained=False)
    assert not isinstance(found, Infeasible), found
    return found


class Batches:
    """Of one kind of token."""

    def __init__(self, length: int) -> None:
        self.length = length

    def batch(self, samples: range) -> Batch:
        tokens, labels = (torch.zeros(len(samples), self.length, dtype=torch.int64) for _ in range(2))
        return Batch(tokens, labels, self.num_unmasked(samples))

    def num_unmasked(self, samples: range) -> int:
        return len(samples) * self.length


def run_shape(shape: Shape) -> dict[str, Any]:
    """A few steps of it, in a process over the fake CUDA device: bytes of the device, and counts of the last step."""
    cuda_without_numbers.install()
    started = time.perf_counter()
    job, plan = plan_of(shape)
    device = plan.bytes[Tier.DEVICE]
    found: dict[str, Any] = {
        "shape": shape.name,
        "budget": plan.budget[Tier.DEVICE],
        "predictedReserved": device.total,
        "predictedAllocated": device.total - device.allocator,
        "allocated": 0,
        "reserved": 0,
        "retries": 0,
        "outOfMemory": "",
    }
    with tempfile.TemporaryDirectory() as directory:
        try:
            run_plan(job, plan, directory, found)
        except (DeviceOutOfMemory, HostOutOfMemory, torch.OutOfMemoryError) as error:
            found["outOfMemory"] = str(error)
    return found | {"seconds": round(time.perf_counter() - started, 1)}


def run_plan(job: TrainingJob, plan: MemoryPlan, directory: str, found: dict[str, Any]) -> None:
    device = cuda.device_of(0)
    cuda.prepare(device, plan.budget[Tier.DEVICE])
    file = JobFile(
        name="plan", uid="plan", epoch=1, spec=job.spec, output_directory=directory, corpus_directory=directory,
        checkpoint_directory=directory, spill_directory=directory,
        termination_message_path=f"{directory}/termination.json", compute_threads=1,
    )  # fmt: skip
    assembly = assemble(file, plan, build_model(job.spec), device=device)
    ledger, tells = assembly.tiers.ledger, cuda.peak_bytes

    def told(device: torch.device) -> int:
        """Before the trainer counts anew."""
        found["allocated"] = max(found["allocated"], torch.cuda.max_memory_allocated(device))
        return tells(device)

    cuda.peak_bytes = told
    run = Run(
        model=assembly.called,
        optimizer=assembly.optimizer,
        techniques=assembly,
        position=assembly.position,
        batches=Batches(job.spec.training.sequence_length),  # type: ignore[arg-type]
        learning_rate=config.learning_rate(job.spec),
        checkpoints=None,  # type: ignore[arg-type]
        recorder=Recorder(None),
        order=assembly.order,
        device=device,
        loss_scale=config.loss_scale(job.spec),
    )
    settings, progress, held = config.loop_settings(job.spec, plan), RunProgress(), ledger.held_bytes
    found["contexts"] = take_counts()["contexts"]
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(NUM_STEPS):
        metrics, _ = train_step(run, settings, progress, StopRequest())
        counts = take_counts()
        found["contexts"] += counts.get("contexts", 0)
        found["retries"] += metrics.allocator_retries
        found["reserved"] = max(found["reserved"], metrics.tier_peak_bytes[Tier.DEVICE])
    run.optimizer.flush()
    found["synchronisations"] = counts.get("synchronisations", 0)
    found["pageableCopies"] = counts.get("pageable copies above 4 KiB", 0)
    found["ledgerAtTheEnd"] = ledger.held_bytes - held
    assembly.tiers.close()


def misses(found: dict[str, Any]) -> list[str]:
    """What of a shape's figures is not as it must be."""
    wrong = {
        "out of memory": found["outOfMemory"],
        "reserved beyond the budget": found["reserved"] > found["budget"],
        "allocated": abs(found["predictedAllocated"] / max(1, found["allocated"]) - 1) > 0.05,
        "reserved": abs(found["predictedReserved"] / max(1, found["reserved"]) - 1) > 0.10,
        "pageable copies": found.get("pageableCopies"),
        "synchronisations": found.get("synchronisations", 0) > 2,
        "contexts": found.get("contexts") != 1,
        "ledger": found.get("ledgerAtTheEnd") != 0,
    }
    return [what for what, is_wrong in wrong.items() if is_wrong]
