"""PodResources: what one pod of an attempt requests from Kubernetes to execute its plan. Pure.

memory               code + launcher + page cache + /dev/shm + ranks x process, and in addition the largest of: ranks x
                     (host slab, homes of streamed parameters included, snapshot [+ device tier, on a CPU]); building
                     the corpus; budget.host of a Disabled job
ephemeral storage    slab, checkpoints and corpus as far as they are on emptyDirs, and scratch
spill volume         the slabs of all ranks: activations, and homes of streamed parameters
cpu                  a request without limit: the pod's share when cores are short

For memory and ephemeral storage, request = limit: a pod that exceeds its memory is killed by the kernel, one that
exceeds its ephemeral storage is evicted by the kubelet.

The constants are measured (docs/placement.md says how) unless they say "assumed".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from spillway.api.job_spec import JobSpec
from spillway.api.limits import ENTRY_POINT_MEMORY_BYTES
from spillway.api.model import Model
from spillway.api.script import ScriptSpec
from spillway.api.sweep.members import named_specs, num_corpora, solo_specs
from spillway.api.training_job import TrainingJobSpec
from spillway.plan import DeviceKind, MemoryPlan, Tier
from spillway.planning.model_shape import ModelShape, shape_of
from spillway.planning.workload import ZERO_STRATEGIES, padded
from spillway.units import GIB, MIB, format_bytes

CODE_BYTES = 256 * MIB
"""File pages of the interpreter's and torch's libraries, once per pod: 226 MiB mapped by a training rank."""
RANK_BYTES = 336 * MIB
"""A rank's own memory before its first parameter: 325 MiB after import, a gloo group and a matrix product, and the 8
MiB that the tensor pool may have resident in addition to what tensors hold."""
FAMILY_CODE_BYTES, FAMILY_RANK_BYTES = 72 * MIB, 136 * MIB
"""In addition, for a model of `transformers`: 68 and 124 MiB after importing its families."""
DEEPSPEED_CODE_BYTES, DEEPSPEED_RANK_BYTES = 72 * MIB, 176 * MIB
"""In addition, for DeepSpeed's strategies: 67 and 152 MiB after its import."""
FSDP_CODE_BYTES, FSDP_RANK_BYTES = 80 * MIB, 104 * MIB
"""In addition, for Fsdp: 75 and 91 MiB after the first step, which imports torch's compiler."""
TRACKERS_BYTES = 128 * MIB
"""In addition, once per pod, for spec.tracking: 114 MiB with all three trackers, W&B's service included."""
CHECKPOINT_BUFFER_BYTES = 64 * MIB
"""Per rank while it writes or loads a checkpoint: one file."""
SNAPSHOT_SLACK_BYTES = MIB
"""Bytes of the copy of the states in addition to the states: tensors begin at multiples of 8 bytes; running
statistics."""
CUDA_RANK_BYTES = 2 * GIB
"""RANK_BYTES with a CUDA context and NCCL; assumed"""
LAUNCHER_BYTES = 48 * MIB
"""Process 1 of the pod: interpreter and domain (33 MiB, a third of it file pages), its HTTP server and client."""
PAGE_CACHE_BYTES = 64 * MIB
"""Token shards and checkpoints on their way to disk. The slab bypasses the page cache (O_DIRECT), and all of it can be
reclaimed, so this is for speed."""
PLANNED_MARGIN = 0.05
"""Share that is added to the planned tiers in memory: free lists of the allocator, scratch of matrix products, page
tables."""
SHARED_MEMORY_BYTES = 64 * MIB
"""Size of a pod's tmpfs; gloo uses sockets, and none of it."""
NCCL_SHARED_MEMORY_BYTES = 64 * MIB
"""In addition, for each of several CUDA ranks; assumed."""
CORPUS_BUILD_BYTES = 448 * MIB
"""Memory of the child process that trains the tokenizer (346 MiB on 22 MiB of text; its sample is at most 32 MiB),
before any rank allocates a parameter."""

CORPUS_FALLBACK_BYTES = GIB
"""Bytes of token shards if the size of the text is unknown."""
BUILTIN_CORPUS_BYTES = 128 * MIB
"""The same for Python's own sources: 22 MiB of text are 7 MiB of shards."""
BYTES_PER_TEXT_BYTE = 2
"""Most bytes of token shards per byte of text: a token has two bytes and stands for at least one (above 65536 tokens
four, and then for several)."""
SCRATCH_BYTES = 256 * MIB
"""run.jsonl, /tmp and the container's log, which the kubelet cuts at 50 MiB; unless pod.resources.scratch says more."""
SCRIPT_SCRATCH_BYTES = 2 * GIB
"""The same for a script, which may download to /tmp and save to /work."""
FILE_SYSTEM_SHARE = 0.02
"""Share of a volume that the file system takes."""

CORES_PER_THREAD = 0.25
"""Requested cores per thread of the plan: cores are shared, memory is not."""
LEAST_CORES = 0.25
"""The fewest cores to request if the job does not say how many."""
SMALLEST_REQUEST = 0.001
"""The smallest request in cores: the API server stores no smaller parts."""
CHECKPOINT_BYTES_PER_SECOND = 250e6
"""Rate at which a checkpoint is surely written, even over a network; assumed."""
SCRIPT_GRACE_SECONDS = 120
"""Grace period of a script, which may save its state when it is asked to stop."""
GRACE_SECONDS = 30
"""In addition to the step in flight and its checkpoint: ranks end, metrics are scraped a last time."""
LONGEST_GRACE_SECONDS = 3600
"""The longest grace period: a pod that does not end by itself keeps its node no longer."""
STEP_PATIENCE = 3.0
"""A step may take this many times its prediction on a busy node."""


@dataclass(frozen=True, slots=True)
class PodResources:
    """Requests of one pod; bytes unless the name says otherwise. All pods of an attempt are the same."""

    memory_bytes: int
    """Request and limit, including /dev/shm."""
    shared_memory_bytes: int
    """sizeLimit of the tmpfs on /dev/shm."""
    spill_volume_bytes: int
    """emptyDir's sizeLimit, or the request of each ephemeral claim; 0: nothing is spilled to NVMe."""
    ephemeral_storage_bytes: int
    """Request and limit: emptyDirs on disk, and the container's log."""
    cpu_cores: float
    """Request only."""
    devices: int
    """Count of `resource_name`; 0 on a CPU."""
    resource_name: str
    """Empty on a CPU."""
    extended: tuple[tuple[str, int], ...]
    """Further extended resources: (name, count)."""
    grace_seconds: int
    """terminationGracePeriodSeconds: one step, one checkpoint (two if another may be in progress), and GRACE_SECONDS;
    at most LONGEST_GRACE_SECONDS."""


def pod_resources(
    spec: TrainingJobSpec, plan: MemoryPlan, num_local_ranks: int, text_bytes: int | None = None
) -> PodResources:
    """What a pod with `num_local_ranks` ranks of `plan` needs; `text_bytes` is the size of the text, where known."""
    spill = spill_volume_bytes(plan, num_local_ranks, spec.spill.num_volumes)
    on_emptydir = 0 if spec.spill.storage_class_name else spill
    on_cuda = plan.device == "Cuda"
    return PodResources(
        memory_bytes=spec.pod.resources.memory or memory_bytes(spec, plan, num_local_ranks),
        shared_memory_bytes=shared_memory_bytes(spec, num_local_ranks, plan.device),
        spill_volume_bytes=spill,
        ephemeral_storage_bytes=padded(
            _emptydir_bytes(spec, planned_checkpoint_bytes(spec, plan), text_bytes) + on_emptydir, MIB
        ),
        cpu_cores=_cores(spec, plan, num_local_ranks),
        devices=num_local_ranks if on_cuda else 0,
        resource_name=spec.pod.resource_name if on_cuda else "",
        extended=tuple(sorted(spec.pod.resources.extended.items())),
        grace_seconds=grace_seconds(spec, plan),
    )


def script_resources(spec: ScriptSpec, device: DeviceKind) -> PodResources:
    """What a pod of a script needs, as its spec says."""
    ranks, on_cuda, memory = spec.parallelism.devices_per_node, device == "Cuda", spec.pod.resources.memory
    assert memory is not None, "required with command"
    spill = padded(ceil((spec.memory.budget.nvme or 0) / spec.spill.num_volumes), MIB)
    scratch = spec.pod.resources.scratch or SCRIPT_SCRATCH_BYTES
    return PodResources(
        memory_bytes=memory,
        shared_memory_bytes=shared_memory_bytes(spec, ranks, device),
        spill_volume_bytes=spill,
        ephemeral_storage_bytes=padded(scratch + (0 if spec.spill.storage_class_name else spill), MIB),
        cpu_cores=spec.pod.resources.cpu or float(ranks),
        devices=ranks if on_cuda else 0,
        resource_name=spec.pod.resource_name if on_cuda else "",
        extended=tuple(sorted(spec.pod.resources.extended.items())),
        grace_seconds=SCRIPT_GRACE_SECONDS,
    )


# --- memory -----------------------------------------------------------------------------------------------------------


def memory_bytes(spec: TrainingJobSpec, plan: MemoryPlan, num_local_ranks: int) -> int:
    """Memory of a pod, or of a machine for a local run, for processes and plan."""
    runtime = pod_runtime_bytes(spec, num_local_ranks, plan.device, plan.strategy)
    held = max(
        tier_memory_bytes(plan, num_local_ranks), unplanned_bytes(spec), corpus_build_bytes(spec, num_local_ranks)
    )
    return padded(runtime + held + shared_memory_bytes(spec, num_local_ranks, plan.device) + plan.unplanned_bytes, MIB)


def pod_runtime_bytes(spec: TrainingJobSpec, num_local_ranks: int, device: str, strategy: str = "Ddp") -> int:
    """`runtime_bytes` of the member that needs most, because members share the pod, or of a job that is no sweep; and
    the trackers, and the sweep's own process."""
    beside = TRACKERS_BYTES if spec.tracking is not None else 0
    if spec.members and num_local_ranks > 1:
        beside += RANK_BYTES  # the sweep's own process
    return beside + max(runtime_bytes(one.model, num_local_ranks, device, strategy) for one in solo_specs(spec))


def runtime_bytes(model: Model, num_local_ranks: int, device: str, strategy: str = "Ddp") -> int:
    """Memory of a pod, or of a local run, without a model's plan; `device` is Cpu or Cuda, `strategy` the run's."""
    code, rank = CODE_BYTES, CUDA_RANK_BYTES if device == "Cuda" else RANK_BYTES
    if not model.is_own_llama:
        code, rank = code + FAMILY_CODE_BYTES, rank + FAMILY_RANK_BYTES
    if strategy in ZERO_STRATEGIES and device == "Cpu":
        code, rank = code + DEEPSPEED_CODE_BYTES, rank + DEEPSPEED_RANK_BYTES
    if strategy == "Fsdp":
        code, rank = code + FSDP_CODE_BYTES, rank + FSDP_RANK_BYTES
    return code + LAUNCHER_BYTES + PAGE_CACHE_BYTES + num_local_ranks * (rank + CHECKPOINT_BUFFER_BYTES)


def corpus_build_bytes(spec: TrainingJobSpec, num_local_ranks: int) -> int:
    """Memory that building the corpus takes beyond `runtime_bytes`, whose checkpoint buffers are unused meanwhile."""
    entry_point = ENTRY_POINT_MEMORY_BYTES * (spec.data.entrypoint is not None)
    return max(0, CORPUS_BUILD_BYTES + entry_point - num_local_ranks * CHECKPOINT_BUFFER_BYTES)


def tier_memory_bytes(plan: MemoryPlan, num_local_ranks: int) -> int:
    """Bytes that the plan holds in the pod's memory: host slabs, snapshots, and on a CPU the device tier."""
    held = plan.slab_bytes(Tier.HOST) + plan.snapshot_bytes
    if plan.device == "Cpu":
        held += plan.bytes[Tier.DEVICE].total
    return ceil(num_local_ranks * held * (1.0 + PLANNED_MARGIN))


def least_memory_bytes(spec: TrainingJobSpec, runtime: int, device: str) -> int:
    """Memory that a pod needs for the smallest plan; `runtime` is its `pod_runtime_bytes`."""
    num_local_ranks = spec.parallelism.devices_per_node
    shared = shared_memory_bytes(spec, num_local_ranks, device)
    return padded(runtime + corpus_build_bytes(spec, num_local_ranks) + shared, MIB)


def unplanned_bytes(spec: TrainingJobSpec) -> int:
    """Host memory that a node's ranks may use with mode Disabled, as the spec says, because nothing is planned then;
    else 0."""
    return (spec.memory.budget.host or 0) if spec.memory.mode == "Disabled" else 0


def shared_memory_bytes(spec: JobSpec, num_local_ranks: int, device: str) -> int:
    """Size of the tmpfs on the pod's shared-memory mount."""
    if spec.pod.resources.shared_memory is not None:
        return spec.pod.resources.shared_memory
    several = device == "Cuda" and num_local_ranks > 1
    return SHARED_MEMORY_BYTES + (num_local_ranks * NCCL_SHARED_MEMORY_BYTES if several else 0)


def plannable_memory_bytes(spec: TrainingJobSpec, limit_bytes: int, runtime: int, device: str) -> int:
    """Bytes that a plan may hold in the memory of a pod whose limit is `limit_bytes`; negative: the ranks alone need
    more. `runtime` is the pod's `pod_runtime_bytes`."""
    beside = runtime + shared_memory_bytes(spec, spec.parallelism.devices_per_node, device) + MIB
    return int((limit_bytes - beside) / (1.0 + PLANNED_MARGIN))


# --- disk -------------------------------------------------------------------------------------------------------------


def spill_volume_bytes(plan: MemoryPlan, num_local_ranks: int, num_volumes: int = 1) -> int:
    """One volume's share of the slabs of all ranks with the file system's own part; 0 when nothing goes to NVMe."""
    slab = ceil(plan.slab_bytes(Tier.NVME) / num_volumes)
    return padded(ceil(num_local_ranks * slab * (1.0 + FILE_SYSTEM_SHARE)), MIB) if slab else 0


def plannable_spill_bytes(limit_bytes: int, storage_bytes: int) -> int:
    """Bytes that a plan may spill to an emptyDir if the pod's ephemeral storage is limited to `limit_bytes`, after
    everything else of the pod (`emptydir_bytes`); negative: none."""
    return int((limit_bytes - 2 * MIB - storage_bytes) / (1.0 + FILE_SYSTEM_SHARE))


def checkpoint_bytes(spec: TrainingJobSpec, device: str, shape: ModelShape | None = None) -> int:
    """Bytes of one checkpoint, which holds trained parameters alone; they do not depend on the plan or the number of
    ranks. `shape`: the shape of an inspected model."""
    shape = shape or shape_of(spec, "Cuda" if device == "Cuda" else "Cpu")
    optimizer = spec.training.optimizer
    short_blocks = optimizer.moment_type.scale_bytes * len(optimizer.rule.moments) * shape.num_tensors
    return ceil(optimizer.rule.states_bytes(True, optimizer.moment_type) * shape.num_trained) + short_blocks


def with_snapshot(spec: TrainingJobSpec, plan: MemoryPlan) -> MemoryPlan:
    """`plan`, of one model, with memory for a copy of the states, if the host budget has room for it after everything
    else. If it has not, and the job writes checkpoints during training, a reason says so."""
    if plan.mode != "Auto" or spec.checkpoint.every_steps >= spec.training.num_steps:
        return plan
    needed = padded(plan.checkpoint_bytes + SNAPSHOT_SLACK_BYTES)
    lacking = needed - (plan.budget[Tier.HOST] - plan.slab_bytes(Tier.HOST))
    if plan.world_size == 1 and lacking <= 0:
        return plan.model_copy(update={"snapshot_bytes": needed})
    why = (
        "only a run with one rank copies its states first"
        if plan.world_size > 1
        else f"host memory lacks {format_bytes(lacking)} for a copy of the states"
    )
    return stopping_for_checkpoints(plan, why)


def stopping_for_checkpoints(plan: MemoryPlan, why: str) -> MemoryPlan:
    sentence = f"checkpoints: training stops while one is written, because {why}"
    return plan.model_copy(update={"snapshot_bytes": 0, "reasons": (*plan.reasons, sentence)})


def planned_checkpoint_bytes(spec: TrainingJobSpec, plan: MemoryPlan) -> dict[str, int]:
    """Bytes of one checkpoint of each member, by name; for a job that is no sweep, under ""."""
    plans = {one.name: one.plan for one in plan.members}
    return {
        name: plans.get(name, plan).checkpoint_bytes or checkpoint_bytes(one, plan.device)
        for name, one in named_specs(spec).items()
    }


def emptydir_bytes(
    spec: TrainingJobSpec, device: str, text_bytes: int | None = None, shape: ModelShape | None = None
) -> int:
    """Bytes of ephemeral storage without the slab: scratch, and without a claim also checkpoints and corpus. `shape`:
    the shape of spec.model, if it was inspected."""
    if spec.checkpoint.claim is not None:
        return _scratch_bytes(spec)
    members = named_specs(spec)
    sizes = {name: checkpoint_bytes(one, device, shape and shape.of_member(one, spec)) for name, one in members.items()}
    return _emptydir_bytes(spec, sizes, text_bytes)


def _emptydir_bytes(spec: TrainingJobSpec, sizes: Mapping[str, int], text_bytes: int | None) -> int:
    """`sizes`: bytes of one checkpoint of each member."""
    scratch = _scratch_bytes(spec)
    if spec.checkpoint.claim is not None:
        return scratch
    members = named_specs(spec)
    # One more than are kept: the next one is complete before the oldest is deleted. Each member of a sweep keeps its
    # own.
    kept = {name: one.checkpoint.keep + one.checkpoint.keep_best for name, one in members.items()}
    checkpoints = sum((kept[name] + 1) * sizes[name] for name in members)
    return scratch + checkpoints + num_corpora(tuple(members.values())) * corpus_bytes(spec, text_bytes)


def _scratch_bytes(spec: TrainingJobSpec) -> int:
    return spec.pod.resources.scratch or SCRATCH_BYTES


def corpus_bytes(spec: TrainingJobSpec, text_bytes: int | None) -> int:
    """The most bytes of token shards and tokenizer. `text_bytes`: size of the text to train on; None: unknown."""
    evaluation = CORPUS_FALLBACK_BYTES * any(field.startswith("data.evaluation.") for field in spec.texts)
    if spec.data.builtin is not None:
        return BUILTIN_CORPUS_BYTES + evaluation
    return evaluation + (CORPUS_FALLBACK_BYTES if text_bytes is None else BYTES_PER_TEXT_BYTE * text_bytes)


# --- cores, seconds ---------------------------------------------------------------------------------------------------


def _cores(spec: TrainingJobSpec, plan: MemoryPlan, num_local_ranks: int) -> float:
    if spec.pod.resources.cpu is not None:
        return max(SMALLEST_REQUEST, spec.pod.resources.cpu)
    return max(LEAST_CORES, CORES_PER_THREAD * plan.optimizer.num_threads * num_local_ranks)


def grace_seconds(spec: TrainingJobSpec, plan: MemoryPlan) -> int:
    writing = plan.member_devices * max(planned_checkpoint_bytes(spec, plan).values()) / CHECKPOINT_BYTES_PER_SECOND
    writing += plan.snapshot_bytes / CHECKPOINT_BYTES_PER_SECOND  # of a checkpoint being written in the background
    needed = STEP_PATIENCE * plan.prediction.step_seconds + writing + GRACE_SECONDS
    return ceil(min(LONGEST_GRACE_SECONDS, needed))
