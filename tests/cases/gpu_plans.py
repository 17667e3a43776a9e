"""Plans for models of 1 B to 70 B parameters on one GPU or sharded on up to 64, and a few steps of each at full size on
the fake CUDA device without numbers (`fakes.cuda_without_numbers`), to compare planned bytes with those that torch's
allocator used. Of several ranks, only the first one runs: torch's backend "fake" stands in for gloo.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - makes the backend

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
from spillway_trainer.parallel.distributed import ExchangedSum, Peers, device_group
from spillway_trainer.ranks import OneRank, Ranks, World
from spillway_trainer.reporting.recorder import Recorder
from spillway_trainer.tiers import cuda
from spillway_trainer.trainer import Run, RunProgress, StopRequest, train_step

DEVICE_MIB = 1000 * 1024
"""more than any shape needs, so that only its budget limits it"""
NUM_STEPS = 3
"""only the last step is counted, because the first ones allocate"""


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
    "llama-70b": llama(8192, 80, 64, 8, 28672, 128256),
}
"""with the sizes that were published under these names"""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model, a technique and sizes, for which there is one plan."""

    model: str
    technique: str
    device_gib: float = 0.0
    """budget; 0: exactly what the plan needs, so that the plan fills it"""
    length: int = 2048
    batch: int = 1
    num_micro_batches: int = 1
    compute: str = "bfloat16"
    clips: bool = True
    host_gib: int = 400
    """of each rank"""
    lora: bool = False
    ranks: int = 1
    """on nodes of up to eight devices"""
    strategy: str = "Fsdp"
    """of several ranks"""

    @property
    def name(self) -> str:
        parts = [self.model, self.technique, f"{self.batch}x{self.length}"]
        parts += [f"{self.num_micro_batches} micro-batches"] * (self.num_micro_batches > 1)
        parts += [self.compute] * (self.compute != "bfloat16") + ["free"] * (not self.clips) + ["lora"] * self.lora
        parts += [f"{self.ranks} ranks"] * (self.ranks > 1) + [self.strategy] * (self.strategy != "Fsdp")
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

SHARDED = [
    Shape("llama-1b", "disabled", ranks=2),
    Shape("llama-1b", "states on host", ranks=8, batch=4),
    Shape("llama-1b", "auto", 16, ranks=4, lora=True, batch=4),
    Shape("llama-3b", "disabled", ranks=4, length=4096),
    Shape("llama-3b", "beside forward", ranks=2, num_micro_batches=2),
    Shape("llama-3b", "auto", 24, ranks=2, compute="float32"),
    Shape("llama-7b", "disabled", ranks=8),
    Shape("llama-7b", "interleaved", ranks=2, batch=2),
    Shape("llama-7b", "auto", 24, ranks=4, length=4096),
    Shape("llama-7b", "activations on nvme", ranks=2, length=4096),
    Shape("llama-8b", "recompute", ranks=4, length=8192),
    Shape("llama-8b", "auto", 40, ranks=8, batch=2),
    Shape("llama-13b", "states on host", ranks=8, length=4096),
    Shape("llama-13b", "auto", 40, ranks=16),
    Shape("gpt2-6.7b", "disabled", ranks=8),
    Shape("qwen-7b", "activations on host", ranks=4, length=4096),
    Shape("llama-70b", "disabled", ranks=64),
    Shape("llama-70b", "states on host", ranks=8, host_gib=250),
    Shape("llama-70b", "auto", 80, ranks=8, length=4096, host_gib=250),
    Shape("llama-70b", "auto", 80, ranks=16, length=4096, clips=False, num_micro_batches=2, host_gib=250),
    Shape("llama-1b", "disabled", ranks=4, compute="float32", strategy="Ddp"),
    Shape("llama-1b", "auto", 24, ranks=2, batch=2, strategy="Ddp"),
    Shape("llama-3b", "states on host", ranks=8, strategy="Ddp"),
    Shape("llama-7b", "interleaved", ranks=2, num_micro_batches=2, strategy="Ddp"),
    Shape("llama-1b", "disabled", ranks=4, compute="float32", strategy="Zero1"),
    Shape("llama-1b", "auto", 16, ranks=2, batch=2, strategy="Zero2"),
    Shape("llama-3b", "states on host", ranks=8, strategy="Zero2"),
    Shape("llama-7b", "interleaved", ranks=2, num_micro_batches=2, strategy="Zero2"),
]
"""on several devices"""


def job_of(shape: Shape, device_gib: float) -> TrainingJob:
    memory = {**TECHNIQUES[shape.technique], "budget": {
        "device": f"{int(device_gib * 1024)}Mi", "host": f"{shape.host_gib * min(8, shape.ranks)}Gi", "nvme": "2000Gi"
    }}  # fmt: skip
    if shape.technique not in ("auto", "disabled") and "parameters" not in memory:
        memory |= RESIDENT
    model: dict[str, Any] = {"config": MODELS[shape.model], "precision": {"compute": shape.compute}}
    if shape.lora:
        model["lora"] = {"rank": 16}
    devices = min(8, shape.ranks)
    parallelism = {"device": "Cuda", "nodes": shape.ranks // devices, "devicesPerNode": devices}
    if shape.ranks > 1:
        parallelism["strategy"] = shape.strategy
    return TrainingJob.model_validate({
        "apiVersion": "spillway.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "plan"}, "spec": {
            "model": model,
            "data": {"builtin": "PythonStdlib"},
            "training": {
                "steps": NUM_STEPS, "sequenceLength": shape.length, "microBatchSize": shape.batch,
                "globalBatchSize": shape.batch * shape.num_micro_batches * shape.ranks, "nonFinite": "SkipStep",
                "gradientClipping": "1" if shape.clips else "0",
            },
            "memory": memory, "parallelism": parallelism,
        },
    })  # fmt: skip


def plan_of(shape: Shape) -> tuple[TrainingJob, MemoryPlan]:
    """The job and plan of a shape, with the shape's budget or, without one, the budget that the plan fills."""
    name = "1xh100" if shape.ranks == 1 else "8xh100"
    node = replace(resolve_node(name), device_bytes=DEVICE_MIB * MIB, host_bytes=8000 * GIB, nvme_bytes=4000 * GIB)
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
    """A dataset in which all tokens are 0."""

    def __init__(self, length: int) -> None:
        self.length = length

    def batch(self, samples: range) -> Batch:
        tokens, labels = (torch.zeros(len(samples), self.length, dtype=torch.int64) for _ in range(2))
        return Batch(tokens, labels, self.num_unmasked(samples))

    def num_unmasked(self, samples: range) -> int:
        return len(samples) * self.length


def run_shape(shape: Shape) -> dict[str, Any]:
    """Makes a few steps of a shape, in a process over the fake CUDA device; returns bytes of the device and counts of
    the last step."""
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


class FirstRank(OneRank):
    """The first of several ranks; nobody answers it."""

    def gradient_sum(self, *given: Any) -> Any:
        *others, device = given
        return ExchangedSum(self.world, *others, device_group(device), device)


def first_of(size: int) -> Ranks:
    if size == 1:
        return OneRank()
    dist.distributed_c10d._store_based_barrier = lambda *_, **__: None
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=size)
    Peers.add = lambda _, own: own  # type: ignore[method-assign]
    return FirstRank(World(size=size))


def run_plan(job: TrainingJob, plan: MemoryPlan, directory: str, found: dict[str, Any]) -> None:
    device, ranks = cuda.device_of(0), first_of(plan.world_size)
    cuda.prepare(device, plan.budget[Tier.DEVICE] - plan.nccl_bytes)
    file = JobFile(
        name="plan", uid="plan", epoch=1, spec=job.spec, output_directory=directory, corpus_directory=directory,
        checkpoint_directory=directory, spill_directory=directory,
        termination_message_path=f"{directory}/termination.json", compute_threads=1,
    )  # fmt: skip
    assembly = assemble(file, plan, build_model(job.spec), ranks, device)
    ledger, tells = assembly.tiers.ledger, cuda.peak_bytes

    def told(device: torch.device) -> int:
        """Reads the peak of allocated bytes before the trainer resets it."""
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
        ranks=ranks,
        sum_gradients=assembly.exchange(
            ranks, config.gradient_wire(job.spec), plan.optimizer.num_threads, plan.num_micro_batches
        ),
        runs_together=assembly.gathers,
        loss_scale=config.loss_scale(job.spec),
    )
    settings, progress, held = config.loop_settings(job.spec, plan), RunProgress(), ledger.held_bytes
    found["contexts"] = take_counts()["contexts"]
    found["trained"] = sum(shape.numel() for shape in assembly.parameter_shapes().values())
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(NUM_STEPS):
        metrics, _ = train_step(run, settings, progress, StopRequest())
        counts = take_counts()
        found["contexts"] += counts.get("contexts", 0)
        found["retries"] += metrics.allocator_retries
        found["reserved"] = max(found["reserved"], metrics.tier_peak_bytes[Tier.DEVICE])
    run.optimizer.flush()
    for kind in ("all-gather", "send"):
        found[f"nccl {kind} bytes"] = counts.get(f"nccl {kind} bytes", 0)
    found["nccl launches"] = counts.get("nccl launches", 0)
    found["synchronisations"] = counts.get("synchronisations", 0)
    found["pageableCopies"] = counts.get("pageable copies above 4 KiB", 0)
    found["ledgerAtTheEnd"] = ledger.held_bytes - held
    assembly.tiers.close()


def misses(found: dict[str, Any]) -> list[str]:
    """Names of a shape's figures that are not as they must be."""
    # Sharded, the peaks of whole parameters, whole gradients and activations need not come at the same time.
    tolerance = 0.16 if " ranks" in found["shape"] else 0.05
    wrong = {
        "out of memory": found["outOfMemory"],
        "reserved beyond the budget": found["reserved"] > found["budget"],
        "allocated": abs(found["predictedAllocated"] / max(1, found["allocated"]) - 1) > tolerance,
        "reserved": abs(found["predictedReserved"] / max(1, found["reserved"]) - 1) > 0.10,
        "pageable copies": found.get("pageableCopies"),
        "synchronisations": found.get("synchronisations", 0) > 2,
        "contexts": found.get("contexts") != 1,
        "ledger": found.get("ledgerAtTheEnd") != 0,
    }
    return [what for what, is_wrong in wrong.items() if is_wrong]
