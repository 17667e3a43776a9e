"""The systems that gpu_optimizer_offload.py compares: each is a cell with a process of its own.

python benchmarks/gpu_systems.py --output DIR --cell JSON
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# isort: off
from spillway_trainer import environment  # noqa: F401 - before torch is imported
# isort: on

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gpu_cells
from gpu_cells import Results, is_fake, measured, say
from gpu_optimizer_offload import Cell
from gpu_rates import positive
from spillway.api.job_file import JobFile
from spillway.api.load import parse_job
from spillway.api.training_job import TrainingJob
from spillway.plan import MemoryPlan, OptimizerPlan, Tier
from spillway.planning.hardware import MEASURED, NodeSpec, gpu_node
from spillway.planning.planner import make_plan
from spillway.units import GIB, MIB
from spillway_trainer.assemble import assemble, fill
from spillway_trainer.cgroup import free_memory_bytes, usable_cores, with_usable_threads
from spillway_trainer.models.transformer import Transformer, TransformerConfig
from spillway_trainer.tiers import cuda

CAP_BYTES = 24 * GIB
NO_CAP_BYTES = 2**50
HOST_MARGIN_BYTES = 4 * GIB
"""free host memory that is left for everything that is not in a slab"""
STEPS, WARM_UPS, TIMED_SECONDS = 10, 3, 15.0
LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY, CLIPPING = 1e-5, (0.9, 0.95), 1e-8, 0.1, 1.0
SEED = 7


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes of a model and the length of its sequences."""

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    vocab_size: int
    sequence_length: int

    def model(self) -> Transformer:
        config = TransformerConfig(
            self.hidden_size, self.num_layers, self.num_heads, self.num_heads, self.intermediate_size, self.vocab_size
        )
        return Transformer(config)


SIZES = {
    "S": Size(2048, 24, 16, 5632, 32000, 2048),
    "M": Size(3072, 30, 24, 10240, 32000, 2048),
    "tiny": Size(128, 2, 4, 512, 512, 64),
}
"""S and M have 1.36 B and 4.16 B parameters, with embedding and head untied; tiny is for a fake device"""


class Unavailable(Exception):
    """Raised for a system that this machine cannot run. The message is shown in the table."""


Step = Callable[[], object]
Make = Callable[[Cell, Path], Step]


def shape_of(cell: Cell) -> Size:
    return SIZES["tiny" if is_fake() else cell.size]


def batch_of(cell: Cell) -> tuple[Tensor, Tensor]:
    shape = (cell.micro_batch, shape_of(cell).sequence_length)
    generator = torch.Generator().manual_seed(SEED)
    tokens, labels = (torch.randint(0, shape_of(cell).vocab_size, shape, generator=generator) for _ in range(2))
    return tokens.to(gpu_cells.device()), labels.to(gpu_cells.device())


def plain_model(cell: Cell) -> Transformer:
    """Returns a bfloat16 model on the device with initial values from SEED; backward recomputes every block."""
    torch.set_default_dtype(torch.bfloat16)
    with gpu_cells.device():
        model = shape_of(cell).model()
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for name, value in model.initial_values(SEED):
            model.get_parameter(name).copy_(value)
    for block in model.layers:
        whole = block.forward

        def again(*inputs: Any, whole: Callable[..., Tensor] = whole) -> Any:
            return checkpoint(whole, *inputs, use_reentrant=False)

        block.forward = again  # type: ignore[method-assign]
    return model


def loss_of(model: Callable[..., Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, labels = batch
    return model(tokens, labels, tokens.numel())


def capped(cap_bytes: int = CAP_BYTES) -> None:
    cuda.prepare(gpu_cells.device(), cap_bytes)


# --- systems ----------------------------------------------------------------------------------------------------------


def bare(cell: Cell, output: Path) -> Step:
    capped()
    model, batch = plain_model(cell), batch_of(cell)

    def step() -> None:
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            parameter.grad = None

    return step


def with_masters(cell: Cell, output: Path) -> Step:
    """torch's fused AdamW over float32 masters, with all states on the device and without the cap."""
    capped(NO_CAP_BYTES)
    model, batch = plain_model(cell), batch_of(cell)
    parameters = list(model.parameters())
    masters = [nn.Parameter(parameter.detach().float()) for parameter in parameters]
    optimizer = torch.optim.AdamW(masters, LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY, fused=True)

    def step() -> None:
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        for master, parameter in zip(masters, parameters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        if cell.clips:
            nn.utils.clip_grad_norm_(masters, CLIPPING)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)

    return step


@dataclass(frozen=True, slots=True)
class Memory:
    """The settings of spec.memory for one of our systems."""

    placement: str = "Auto"
    overlap: str = "None"
    activations: str = "Recompute"
    parameters: str = "Resident"
    is_capped: bool = True

    def text(self, device_bytes: int, node: NodeSpec) -> str:
        bytes_of = f"device: {device_bytes}, host: {node.host_bytes}, nvme: {node.nvme_bytes}"
        return (
            f"budget: {{{bytes_of}}}, advanced: {{optimizer: {{placement: {self.placement}, overlap: {self.overlap}}}, "
            f"activations: {{policy: {self.activations}}}, parameters: {{placement: {self.parameters}}}}}"
        )


OURS = {
    "ours": Memory(overlap="Auto"),
    "ours, CPU alone": Memory("Host"),
    "ours, interleaved": Memory("Interleaved"),
    "ours, beside forward": Memory(overlap="Forward"),
    "ours, beside backward": Memory(overlap="Backward"),
    "ours, all resident": Memory("Device", activations="Keep", is_capped=False),
    "ours, activations on host": Memory("Device", activations="Host", is_capped=False),
    "ours, activations on nvme": Memory("Device", activations="Nvme", is_capped=False),
    "ours, weights streamed": Memory("Host", parameters="Stream"),
    "ours again": Memory(overlap="Auto"),
}


def ours(cell: Cell, output: Path) -> Step:
    node = node_of(Results(output))
    plan, job = plan_of(cell, node, output)
    usable = with_usable_threads(roomy(plan) if is_fake() else plan, node.num_cores, 1)
    optimizer_plan = usable.optimizer
    say(planned_bytes=plan.bytes[Tier.DEVICE].total, host_bytes=plan.bytes[Tier.HOST].total)
    say(optimizer=optimizer_plan.model_dump(mode="json"), predicted_seconds=plan.prediction.step_seconds)
    if rates := measured_rates(Results(output)):
        say(bound_seconds=bound_seconds(num_parameters_of(shape_of(cell)), optimizer_plan, rates))
    cuda.prepare(gpu_cells.device(), usable.budget[Tier.DEVICE])
    assembly = assemble(job, usable, device=gpu_cells.device())
    fill(assembly, SEED)
    batch, optimizer = batch_of(cell), assembly.optimizer

    def step() -> None:
        optimizer.begin(LEARNING_RATE)
        loss = loss_of(assembly.model, batch)
        assembly.start_backward()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = optimizer.norm()
        optimizer.step(LEARNING_RATE, min(1.0, CLIPPING / (norm + 1e-6)) if cell.clips else 1.0)
        assembly.end_step()

    return step


def plan_of(cell: Cell, node: NodeSpec, output: Path) -> tuple[MemoryPlan, JobFile]:
    memory, device_bytes = OURS[cell.system], node.device_bytes
    if memory.is_capped and is_fake():  # the tiny model fits CAP_BYTES: take a cap without room for all states
        resident, _ = planned(cell, Memory("Device"), device_bytes, node)
        device_bytes = resident.bytes[Tier.DEVICE].total - 8 * num_parameters_of(shape_of(cell))
    elif memory.is_capped:
        device_bytes = min(CAP_BYTES, device_bytes)
    plan, job = planned(cell, memory, device_bytes, node)
    directory = tempfile.mkdtemp(dir=output)
    return plan, JobFile(
        name="benchmark",
        uid="benchmark",
        epoch=1,
        spec=job.spec,
        output_directory=directory,
        corpus_directory=directory,
        checkpoint_directory=directory,
        spill_directory=directory,
        termination_message_path=f"{directory}/termination.json",
        compute_threads=torch.get_num_threads(),
    )


def roomy(plan: MemoryPlan) -> MemoryPlan:
    """Adds host buffers for a fake device, whose attention saves more than a real device's does."""
    host = plan.bytes[Tier.HOST]
    more = host.model_copy(update={"buffers": host.buffers + 16 * MIB})
    return plan.model_copy(update={"bytes": {**plan.bytes, Tier.HOST: more}})


def planned(cell: Cell, memory: Memory, device_bytes: int, node: NodeSpec) -> tuple[MemoryPlan, TrainingJob]:
    shape = shape_of(cell)
    sizes = f"hiddenSize: {shape.hidden_size}, numLayers: {shape.num_layers}, vocabSize: {shape.vocab_size}"
    heads = f"numHeads: {shape.num_heads}, intermediateSize: {shape.intermediate_size}"
    job = parse_job(
        f"""
apiVersion: spillway.dev/v1alpha1
kind: TrainingJob
metadata: {{name: benchmark}}
spec:
  model:
    config: {{architecture: llama, {sizes}, {heads}}}
    precision: {{compute: bfloat16}}
  data: {{builtin: PythonStdlib}}
  training:
    steps: 100
    sequenceLength: {shape.sequence_length}
    globalBatchSize: {cell.micro_batch}
    microBatchSize: {cell.micro_batch}
    gradientClipping: "{CLIPPING if cell.clips else 0}"
  memory: {{{memory.text(device_bytes, node)}}}
""",
        "the benchmark's job",
    )
    plan = make_plan(job, node, explained=False)
    if not isinstance(plan, MemoryPlan):
        raise Unavailable(f"no plan fits: {plan}")
    return plan, job


# --- rates ------------------------------------------------------------------------------------------------------------


def measured_rates(results: Results) -> dict[str, float]:
    """Returns the rates of the links, the device, the disk and the CPU; an empty dict until all of them are measured,
    and on a fake device."""
    found = results.figures("rates") | results.figures("disk rates")
    cpu = results.figures("cpu rates")
    found["cpu_update"] = cpu.get(f"update_bytes_per_second_{cpu.get('usable_cores')}_threads")
    wanted = (*LINKS, "bfloat16_flops", "disk_read", "disk_write", "cpu_update")
    return {name: found[name] for name in wanted} if all(isinstance(found.get(one), float) for one in wanted) else {}


LINKS = ("h2d", "d2h", "both_ways", "on_device")


def node_of(results: Results) -> NodeSpec:
    """Describes this machine: the memory and cores that driver and control group allow, and the measured rates instead
    of the catalog's."""
    product = cuda.device_name(gpu_cells.device()).replace(" ", "-")
    node = gpu_node(product, cuda.memory_bytes(gpu_cells.device()), 1)
    free, free_disk = free_memory_bytes(Path("/")), shutil.disk_usage(results.output).free
    node = replace(
        node, num_cores=usable_cores(Path("/")), host_bytes=max(0, free - HOST_MARGIN_BYTES), nvme_bytes=free_disk // 2
    )
    rates, overhead = measured_rates(results), results.figures("spillway calibrate").get("operationOverheadSeconds")
    if isinstance(overhead, float):
        node = replace(node, operation_overhead_seconds=overhead)
    if not rates:
        return node
    h2d, d2h = rates["h2d"], rates["d2h"]
    link = replace(
        node.link,
        h2d_bytes_per_second=h2d,
        d2h_bytes_per_second=d2h,
        duplex_efficiency=min(1.0, rates["both_ways"] / (h2d + d2h)),
        devices_per_root_port=1,
    )
    return replace(
        node,
        name=node.name + MEASURED,
        link=link,
        device_bytes_per_second=rates["on_device"],
        bfloat16_flops_per_second=rates["bfloat16_flops"],
        cpu_bytes_per_second=rates["cpu_update"],
        dram_bytes_per_second=max(node.dram_bytes_per_second, rates["cpu_update"]),
        nvme_read_bytes_per_second=rates["disk_read"],
        nvme_write_bytes_per_second=rates["disk_write"],
    )


# --- others -----------------------------------------------------------------------------------------------------------


def fsdp2(cell: Cell, output: Path) -> Step:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard  # noqa: PLC0415

    capped()
    one_rank("cuda:nccl,cpu:gloo")
    model = plain_model(cell).float()
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.layers:
        fully_shard(block, mp_policy=mixed, offload_policy=CPUOffloadPolicy())
    fully_shard(model, mp_policy=mixed, offload_policy=CPUOffloadPolicy())
    return stepping(model, torch.optim.AdamW(model.parameters(), LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY, fused=True),
                    cell)  # fmt: skip


def torchao(cell: Cell, output: Path) -> Step:
    os.environ["TORCHAO_FORCE_SKIP_LOADING_SO_FILES"] = "1"
    offloads = imported("torchao.optim").CPUOffloadOptimizer
    capped()
    model = plain_model(cell).float()
    optimizer = offloads(model.parameters(), torch.optim.AdamW, lr=LEARNING_RATE, betas=BETAS, eps=EPS, fused=True)

    def autocast(*inputs: Any) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(*inputs)  # type: ignore[no-any-return]

    return stepping(autocast, optimizer, cell, list(model.parameters()))


def bitsandbytes(cell: Cell, output: Path) -> Step:
    paged = imported("bitsandbytes").optim.PagedAdamW8bit
    capped()
    model = plain_model(cell)
    return stepping(model, paged(model.parameters(), LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY), cell)


def deepspeed(stage: int, **offload: object) -> Make:
    def make(cell: Cell, output: Path) -> Step:
        os.environ.update(DS_ACCELERATOR="cuda", DS_SKIP_CUDA_CHECK="1")
        found = imported("deepspeed")
        capped()
        one_rank("nccl")
        zero = {
            "stage": stage,
            "offload_optimizer": {"device": "cpu", "pin_memory": True, **offload},
            "reduce_bucket_size": 10**8,
            "sub_group_size": 10**8,
        }
        settings = {
            "train_micro_batch_size_per_gpu": cell.micro_batch,
            "bf16": {"enabled": True},
            "zero_optimization": zero,
            "gradient_clipping": CLIPPING if cell.clips else 0.0,
            "zero_allow_untested_optimizer": True,
        }
        model = plain_model(cell)
        adam = imported("deepspeed.ops.adam").DeepSpeedCPUAdam
        optimizer = adam(model.parameters(), LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
        engine, *_ = found.initialize(model=model, optimizer=optimizer, config=settings)
        batch = batch_of(cell)

        def step() -> None:
            engine.backward(loss_of(engine, batch))
            engine.step()

        return step

    return make


def stepping(model: Any, optimizer: Any, cell: Cell, parameters: Sequence[nn.Parameter] | None = None) -> Step:
    """Returns a plain training step with an optimizer that has torch's interface."""
    batch, owned = batch_of(cell), parameters or list(model.parameters())

    def step() -> None:
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        if cell.clips:
            nn.utils.clip_grad_norm_(owned, CLIPPING)
        optimizer.step()
        optimizer.zero_grad()

    return step


def imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise Unavailable(f"cannot be imported here: {type(error).__name__}: {error}") from error


def one_rank(backend: str) -> None:
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571"}
    os.environ.update(rank)
    torch.distributed.init_process_group(backend)


def bound_seconds(num_parameters: int, plan: OptimizerPlan, rates: Mapping[str, float]) -> float:
    """A lower bound of the seconds of the update: the slowest of CPU, link each way and device
    (docs/optimizer-offload.md)."""
    by_cpu, streamed, resident = plan.updated_by_cpu, plan.streamed_share, plan.resident_share
    each_way = rates["both_ways"] / 2 if streamed else min(rates["h2d"], rates["d2h"])
    parts = (
        28 * by_cpu / rates["cpu_update"],
        (2 * by_cpu + (12 - 4 + 17 / 8) * streamed) / each_way,  # 17 bits of a streamed master: master_halves.py
        28 * (streamed + resident) / rates["on_device"],
    )
    return num_parameters * max(parts)


def num_parameters_of(shape: Size) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in shape.model().parameters())


# --- one cell ---------------------------------------------------------------------------------------------------------

MAKE: dict[str, Make] = {
    "bare": bare,
    "no offload": with_masters,
    **dict.fromkeys(OURS, ours),
    "DeepSpeed ZeRO-2 offload": deepspeed(2),
    "DeepSpeed ZeRO-3 offload": deepspeed(3),
    "TwinFlow 0.8": deepspeed(3, ratio=0.8),
    "SuperOffload": deepspeed(3, ratio=1.0, super_offload=True),
    "FSDP2 CPU offload": fsdp2,
    "torchao CPU offload": torchao,
    "bitsandbytes paged 8 bit": bitsandbytes,
}


def measure(cell: Cell, output: Path) -> None:
    device = gpu_cells.device()
    torch.manual_seed(SEED)
    step = MAKE[cell.system](cell, output)
    torch.cuda.reset_peak_memory_stats(device)  # one of our plans maps its memory before the first step
    seconds = timed(step)
    tokens = cell.micro_batch * shape_of(cell).sequence_length
    measured(step_seconds=positive(seconds), spread_seconds=max(seconds) - min(seconds))
    measured(tokens_per_second=tokens / positive(seconds))
    memory = torch.cuda.memory_stats(device)
    say(
        tokens=tokens,
        num_steps=len(seconds),
        allocated_bytes=memory["allocated_bytes.all.peak"],
        reserved_bytes=memory["reserved_bytes.all.peak"],
        num_alloc_retries=memory["num_alloc_retries"],
    )
    traced(step, output / "traces" / f"{cell.name.replace(' ', '-').replace(',', '')}.json.gz")


def timed(step: Step) -> list[float]:
    """Returns the seconds of each step after the warm-up steps."""
    for _ in range(WARM_UPS - 1):
        step()
    last = cuda.seconds_of([step])[0]
    return cuda.seconds_of([step] * max(3, min(STEPS, int(TIMED_SECONDS / max(last, 1e-3)))))


def traced(step: Step, path: Path) -> None:
    """Traces one step with torch.profiler; on a fake device only the CPU's activity."""
    activities = torch.profiler.supported_activities()
    if is_fake():
        activities = {torch.profiler.ProfilerActivity.CPU}
    with torch.profiler.profile(activities=activities) as profile:
        step()
        cuda.synchronize()
    path.parent.mkdir(exist_ok=True)
    profile.export_chrome_trace(str(path))
    say(trace=path.name, device_is_traced=not is_fake())


def main() -> None:
    parser = gpu_cells.parser(__doc__)
    given = parser.parse_args()
    try:
        measure(Cell(**json.loads(given.cell)), given.output)
    except Unavailable as error:
        say(unavailable=str(error))
        sys.exit(3)
    sys.stdout.flush()
    os._exit(0)  # lanes and process groups end with the process


if __name__ == "__main__":
    main()
