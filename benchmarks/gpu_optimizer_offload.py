"""Optimizer offload on one GPU: ours beside other systems, each in its own fresh process. Resumable; no network.

    PYTHONPATH=operator:trainer_image python benchmarks/gpu_optimizer_offload.py --output DIR [--minutes 25] [--model S]

DIR/results.jsonl gets a line a cell (system, tokens a step, clipping), DIR/table.txt is written anew after each; the
same command goes on with the cells that are missing. Every system trains the same plain llama in bfloat16 (sequences of
2048, 1, 4 and 8 a step, every block recomputed in backward, deterministic kernels) with float32 masters of AdamW,
unless the table says otherwise, under the same cap of device memory. `bare` is forward and backward alone, gradients
dropped; `no offload` has all states on the device, without the cap. A system that cannot be imported, or that fails,
has its reason in the table and no figures.

    step      median seconds over --steps after --warm-ups; the host meets the device once, at the end of them all
    exposed   step minus `bare`'s step at as many tokens: what the update costs, spent on whatever it is
    bound     of the update, at the rates that `probe` measured (links by device events), for our plan's shares
    bits      AdamW over 2^26 values by the device's kernel and by the CPU's, compared bit by bit

--device cpu runs the same cells with a tiny model on the CPU, the systems that need a GPU left out. That is a rehearsal
of this script, says so in its output, and its seconds mean nothing.
"""

from __future__ import annotations

# isort: off
from spillway_trainer import environment  # noqa: F401 - before torch is imported
# isort: on

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spillway.api import parse_job
from spillway.hardware import NodeSpec, local_node, resolve_node
from spillway.job import JobFile
from spillway.plan import MemoryPlan, OptimizerPlan, Tier
from spillway.planner import make_plan
from spillway.units import GIB, MIB
from spillway_trainer import kernels, reference
from spillway_trainer.assemble import assemble, fill
from spillway_trainer.models.transformer import Transformer, TransformerConfig
from spillway_trainer.reference import UpdateScalars
from spillway_trainer.tiers import cuda
from spillway_trainer.tiers.host_slab import HostSlab

REHEARSAL = "REHEARSAL on a CPU with a tiny model: the script's plumbing, no measurement"
CAP_BYTES, HOST_BYTES = 24 * GIB, 100 * GIB
NO_CAP_BYTES = 2**50
CELL_SECONDS = 600
LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY, CLIPPING = 1e-5, (0.9, 0.95), 1e-8, 0.1, 1.0
SEED = 7


@dataclass(frozen=True, slots=True)
class Size:
    """A model and the sequences it is trained on."""

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    vocab_size: int
    sequence_length: int
    micro_batches: tuple[int, ...]
    """sequences a step"""

    def model(self) -> Transformer:
        config = TransformerConfig(
            self.hidden_size, self.num_layers, self.num_heads, self.num_heads, self.intermediate_size, self.vocab_size
        )
        return Transformer(config)


SIZES = {
    "S": Size(2048, 24, 16, 5632, 32000, 2048, (1, 4, 8)),
    "M": Size(3072, 30, 24, 10240, 32000, 2048, (1, 4, 8)),
    "tiny": Size(64, 2, 4, 128, 320, 32, (1, 2)),
}
"""1.36 B and 4.16 B parameters, embedding and head untied; the third for rehearsals"""


@dataclass(frozen=True, slots=True)
class Cell:
    """One process."""

    system: str
    micro_batch: int = 0
    clips: bool = False

    @property
    def name(self) -> str:
        return f"{self.system} {self.micro_batch} {'clip' if self.clips else 'free'}"


@dataclass(frozen=True, slots=True)
class Setting:
    """What all cells share."""

    size: str
    device: str
    steps: int
    warm_ups: int

    @property
    def shape(self) -> Size:
        return SIZES[self.size]

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", 0) if self.device == "cuda" else torch.device("cpu")


class Unavailable(Exception):
    """A system that this machine cannot run: the sentence for the table."""


Step = Callable[[], object]
Make = Callable[[Setting, Cell], Step]


def batch_of(setting: Setting, cell: Cell) -> tuple[Tensor, Tensor]:
    shape = (cell.micro_batch, setting.shape.sequence_length)
    generator = torch.Generator().manual_seed(SEED)
    tokens, labels = (torch.randint(0, setting.shape.vocab_size, shape, generator=generator) for _ in range(2))
    return tokens.to(setting.torch_device), labels.to(setting.torch_device)


def plain_model(setting: Setting) -> Transformer:
    """bfloat16, on the device, filled from the seed; every block recomputed in backward."""
    torch.set_default_dtype(torch.bfloat16)
    with setting.torch_device:
        model = setting.shape.model()
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


def capped(setting: Setting, cap_bytes: int = CAP_BYTES) -> None:
    if setting.device == "cuda":
        cuda.prepare(setting.torch_device, cap_bytes)


# --- systems ----------------------------------------------------------------------------------------------------------


def bare(setting: Setting, cell: Cell) -> Step:
    capped(setting)
    model, batch = plain_model(setting), batch_of(setting, cell)

    def step() -> None:
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            parameter.grad = None

    return step


def with_masters(setting: Setting, cell: Cell) -> Step:
    """All states on the device, without the cap: torch's fused AdamW over float32 masters."""
    capped(setting, NO_CAP_BYTES)
    model, batch = plain_model(setting), batch_of(setting, cell)
    parameters = list(model.parameters())
    masters = [nn.Parameter(parameter.detach().float()) for parameter in parameters]
    fused = setting.device == "cuda"
    optimizer = torch.optim.AdamW(masters, LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY, fused=fused)

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


OURS = {
    "ours": ("Auto", "Auto"),
    "ours, CPU alone": ("Host", "None"),
    "ours, interleaved": ("Interleaved", "None"),
    "ours, beside forward": ("Auto", "Forward"),
    "ours, beside backward": ("Auto", "Backward"),
    "ours again": ("Auto", "Auto"),
}
"""spec.memory.optimizer: placement and overlap"""


def ours(system: str) -> Make:
    def make(setting: Setting, cell: Cell) -> Step:
        plan, job = plan_of(setting, cell, *OURS[system])
        if setting.device == "cuda":
            cuda.prepare(setting.torch_device, plan.budget[Tier.DEVICE])
        assembly = assemble(job, plan, device=setting.torch_device)
        fill(assembly, SEED)
        batch, optimizer = batch_of(setting, cell), assembly.optimizer

        def step() -> None:
            optimizer.begin(LEARNING_RATE)
            loss = loss_of(assembly.model, batch)
            assembly.start_backward()
            loss.backward()  # type: ignore[no-untyped-call]
            norm = optimizer.norm()
            optimizer.step(LEARNING_RATE, min(1.0, CLIPPING / (norm + 1e-6)) if cell.clips else 1.0)
            assembly.end_step()

        return step

    return make


def plan_of(setting: Setting, cell: Cell, placement: str, overlap: str) -> tuple[MemoryPlan, JobFile]:
    shape, directory = setting.shape, tempfile.mkdtemp()
    sizes = f"hiddenSize: {shape.hidden_size}, numLayers: {shape.num_layers}, vocabSize: {shape.vocab_size}"
    heads = f"numHeads: {shape.num_heads}, intermediateSize: {shape.intermediate_size}"
    clipping = CLIPPING if cell.clips else 0
    budget = f"device: {CAP_BYTES // GIB}Gi, host: {HOST_BYTES // GIB}Gi" if setting.device == "cuda" else "device: 1Gi"
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
    gradientClipping: "{clipping}"
  memory:
    budget: {{{budget}}}
    optimizer: {{placement: {placement}, overlap: {overlap}}}
    activations: {{policy: Recompute}}
    parameters: {{placement: Resident}}
""",
        "the benchmark's job",
    )
    plan = make_plan(job, node_of(setting), explained=False)
    if not isinstance(plan, MemoryPlan):
        raise Unavailable(f"no plan fits: {plan}")
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


def node_of(setting: Setting) -> NodeSpec:
    if setting.device == "cpu":
        return local_node(max(1, os.cpu_count() or 1), 2 * GIB, 2 * GIB, 0)
    name = cuda.device_name(setting.torch_device).lower()
    return resolve_node(next((f"1x{known}" for known in ("h200", "a100-80") if known[:4] in name), "1xh100"))


def fsdp2(setting: Setting, cell: Cell) -> Step:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard  # noqa: PLC0415

    capped(setting)
    one_rank("cuda:nccl,cpu:gloo")
    model = plain_model(setting).float()
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.layers:
        fully_shard(block, mp_policy=mixed, offload_policy=CPUOffloadPolicy())
    fully_shard(model, mp_policy=mixed, offload_policy=CPUOffloadPolicy())
    return stepping(model, torch.optim.AdamW(model.parameters(), LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY, fused=True),
                    setting, cell)  # fmt: skip


def torchao(setting: Setting, cell: Cell) -> Step:
    os.environ["TORCHAO_FORCE_SKIP_LOADING_SO_FILES"] = "1"
    offloads = imported("torchao.optim").CPUOffloadOptimizer
    capped(setting)
    model = plain_model(setting).float()
    optimizer = offloads(model.parameters(), torch.optim.AdamW, lr=LEARNING_RATE, betas=BETAS, eps=EPS, fused=True)

    def autocast(*inputs: Any) -> Tensor:
        with torch.autocast(setting.device, dtype=torch.bfloat16):
            return model(*inputs)  # type: ignore[no-any-return]

    return stepping(autocast, optimizer, setting, cell, list(model.parameters()))


def bitsandbytes(setting: Setting, cell: Cell) -> Step:
    paged = imported("bitsandbytes").optim.PagedAdamW8bit
    capped(setting)
    model = plain_model(setting)
    return stepping(model, paged(model.parameters(), LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY), setting, cell)


def deepspeed(stage: int, **offload: object) -> Make:
    def make(setting: Setting, cell: Cell) -> Step:
        os.environ.update(DS_ACCELERATOR="cuda", DS_SKIP_CUDA_CHECK="1")
        found = imported("deepspeed")
        capped(setting)
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
        model = plain_model(setting)
        adam = imported("deepspeed.ops.adam").DeepSpeedCPUAdam
        optimizer = adam(model.parameters(), LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
        engine, *_ = found.initialize(model=model, optimizer=optimizer, config=settings)
        batch = batch_of(setting, cell)

        def step() -> None:
            engine.backward(loss_of(engine, batch))
            engine.step()

        return step

    return make


def stepping(
    model: Any, optimizer: Any, setting: Setting, cell: Cell, parameters: Sequence[nn.Parameter] | None = None
) -> Step:
    """The plain loop around an optimizer of torch's kind."""
    batch, owned = batch_of(setting, cell), parameters or list(model.parameters())

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


SYSTEMS: dict[str, tuple[Make, str]] = {
    "bare": (bare, "no update"),
    "ours": (ours("ours"), ""),
    "no offload": (with_masters, "no cap"),
    "ours, CPU alone": (ours("ours, CPU alone"), ""),
    "ours, interleaved": (ours("ours, interleaved"), ""),
    "ours, beside forward": (ours("ours, beside forward"), ""),
    "ours, beside backward": (ours("ours, beside backward"), ""),
    "DeepSpeed ZeRO-2 offload": (deepspeed(2), ""),
    "DeepSpeed ZeRO-3 offload": (deepspeed(3), ""),
    "TwinFlow 0.8": (deepspeed(3, ratio=0.8), ""),
    "SuperOffload": (deepspeed(3, ratio=1.0, super_offload=True), ""),
    "FSDP2 CPU offload": (fsdp2, "float32 parameters"),
    "torchao CPU offload": (torchao, "float32 parameters, autocast"),
    "bitsandbytes paged 8 bit": (bitsandbytes, "other numerics"),
    "ours again": (ours("ours again"), "drift"),
}
ON_A_CPU = ("bare", "ours", "no offload", "ours, CPU alone", "ours, beside forward", "ours again")
"""what a rehearsal runs"""


# --- one cell, in a process of its own --------------------------------------------------------------------------------


def run_cell(setting: Setting, cell: Cell) -> dict[str, object]:
    torch.manual_seed(SEED)
    if cell.system == "probe":
        return probe(setting)
    if cell.system == "bits":
        return {"equal": same_bits(setting)}
    step = SYSTEMS[cell.system][0](setting, cell)
    seconds = timed(step, setting)
    tokens = cell.micro_batch * setting.shape.sequence_length
    figures: dict[str, object] = {"step_seconds": statistics.median(seconds), "spread": max(seconds) - min(seconds)}
    figures["tokens_per_second"] = tokens / statistics.median(seconds)
    if setting.device == "cuda":
        figures["peak_device_bytes"] = cuda.peak_bytes(setting.torch_device)
    if cell.system in OURS:
        figures["optimizer"] = plan_of(setting, cell, *OURS[cell.system])[0].optimizer.model_dump(mode="json")
    return figures


def timed(step: Step, setting: Setting) -> list[float]:
    """Seconds of each step after the warm-ups."""
    for _ in range(setting.warm_ups):
        step()
    wait = cuda.synchronize if setting.device == "cuda" else lambda: None
    wait()
    if setting.device == "cuda":
        return cuda.seconds_of([step] * setting.steps)
    found = []
    for _ in range(setting.steps):
        started = time.perf_counter()
        step()
        found.append(time.perf_counter() - started)
    return found


def probe(setting: Setting) -> dict[str, object]:
    """Bytes per second: the link each way and both at once, the CPU's update, a copy on the device."""
    nbytes = GIB if setting.device == "cuda" else MIB
    count = nbytes // 28
    states = [torch.full((count,), 0.01) for _ in range(3)]
    gradient, out = torch.full((count,), 0.01).bfloat16(), torch.empty(count, dtype=torch.bfloat16)
    scalars, threads = UpdateScalars(1e-3, 0.9, 0.95, 1e-8, 0.1, 0.9, 0.95), max(1, len(os.sched_getaffinity(0)) - 2)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        kernels.update(scalars, states[0], states[1:], gradient, out, num_threads=threads)
        seconds.append(time.perf_counter() - started)
    found: dict[str, object] = {"cpu_update": 30 * count / statistics.median(seconds[1:]), "threads": threads}
    if setting.device == "cuda":
        host = HostSlab(2 * nbytes)
        return found | cuda.link_rates(setting.torch_device, host, nbytes)
    started = time.perf_counter()
    states[0].copy_(states[1])
    rate = 4 * count / (time.perf_counter() - started)
    return found | dict.fromkeys(("h2d", "d2h", "both_ways", "on_device"), rate)


def same_bits(setting: Setting) -> bool:
    count = 2**26 if setting.device == "cuda" else 2**12
    generator = torch.Generator().manual_seed(SEED)
    values = [torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32) for _ in range(4)]
    states, gradient = [one.view(torch.float32) for one in values[:3]], values[3].view(torch.float32).bfloat16()
    there = [state.to(setting.torch_device, copy=True) for state in states]
    out, out_there = torch.empty_like(gradient), torch.empty_like(gradient, device=setting.torch_device)
    scalars = UpdateScalars(1e-3, 0.9, 0.95, 1e-8, 0.1, 0.9, 0.95, gradient_scale=0.37)
    kernels.update(scalars, there[0], there[1:], gradient.to(setting.torch_device), out_there)
    (kernels if setting.device == "cuda" else reference).update(scalars, states[0], states[1:], gradient, out)
    pairs = zip([*there, out_there], [*states, out], strict=True)
    return all(torch.equal(ours.cpu().view(torch.int16), theirs.view(torch.int16)) for ours, theirs in pairs)


# --- the table --------------------------------------------------------------------------------------------------------


def bound_seconds(num_parameters: int, plan: OptimizerPlan, rates: Mapping[str, Any]) -> float:
    """Of the update alone: the slowest of CPU, link each way and device (docs/optimizer-offload.md)."""
    by_cpu, streamed, resident = plan.updated_by_cpu, plan.streamed_share, plan.resident_share
    each_way = rates["both_ways"] / 2 if streamed else min(rates["h2d"], rates["d2h"])
    parts = (
        30 * by_cpu / rates["cpu_update"],
        (2 * by_cpu + (12 - 4 + 17 / 8) * streamed) / each_way,  # of a streamed master 17 bits: master_halves.py
        28 * (streamed + resident) / rates["on_device"],
    )
    return num_parameters * max(parts)


def num_parameters_of(shape: Size) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in shape.model().parameters())


def table(lines: Sequence[Mapping[str, Any]], setting: Setting) -> str:
    """What is known by now, a row a cell."""
    done = {line["cell"]: line for line in lines}
    rates = done.get(Cell("probe").name, {}).get("figures")
    bits = done.get(Cell("bits").name, {}).get("figures")
    rows = [] if setting.device == "cuda" else [REHEARSAL, ""]
    if rates:
        rows.append("probed: " + ", ".join(f"{name} {value:.3g}" for name, value in rates.items()))
    if bits:
        rows.append(f"bits of CPU and device equal: {'yes' if bits['equal'] else 'NO'}")
    rows += ["", f"{'system':<27}{'tokens':>8}{'clip':>6}{'step':>10}{'exposed':>10}{'bound':>10}{'tok/s':>10}  note"]
    for line in lines:
        cell = Cell(**line["of"])
        if cell.system in SYSTEMS:
            rows.append(row_of(cell, line, done, rates, setting))
    return "\n".join(rows) + "\n"


def row_of(cell: Cell, line: Mapping[str, Any], done: Mapping[str, Any], rates: Any, setting: Setting) -> str:
    tokens = cell.micro_batch * setting.shape.sequence_length
    head = f"{cell.system:<27}{tokens:>8}{'yes' if cell.clips else 'no':>6}"
    if "figures" not in line:
        return f"{head}  {line['why']}"
    figures, without = line["figures"], done.get(Cell("bare", cell.micro_batch).name, {}).get("figures")
    exposed = f"{figures['step_seconds'] - without['step_seconds']:.4f}" if without else "-"
    bound = "-"
    if rates and "optimizer" in figures:
        plan = OptimizerPlan.model_validate(figures["optimizer"])
        bound = f"{bound_seconds(num_parameters_of(setting.shape), plan, rates):.4f}"
    note = SYSTEMS[cell.system][1]
    step, rate = figures["step_seconds"], figures["tokens_per_second"]
    return f"{head}{step:>10.4f}{exposed:>10}{bound:>10}{rate:>10.0f}  {note}"


# --- all cells --------------------------------------------------------------------------------------------------------


def cells_of(setting: Setting) -> list[Cell]:
    """What the rest is measured against comes first; `bare` knows no clipping."""
    found = [Cell("probe"), Cell("bits")]
    for micro_batch in setting.shape.micro_batches:
        for system in SYSTEMS:
            found += [Cell(system, micro_batch, clips) for clips in (False, True) if system != "bare" or not clips]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--minutes", type=float, default=25.0, help="no cell begins later than this (default 25)")
    parser.add_argument("--model", choices=["S", "M"], default="S")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm-ups", type=int, default=4)
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    given = parser.parse_args()
    size = given.model if given.device == "cuda" else "tiny"
    setting = Setting(size, given.device, given.steps, given.warm_ups)
    if given.cell:
        answer(setting, Cell(**json.loads(given.cell)))
        return
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device: --device cpu rehearses this script without one")
    if given.device == "cpu":
        print(REHEARSAL, flush=True)
    given.output.mkdir(parents=True, exist_ok=True)
    run_all(setting, given.output, given.minutes * 60)


def run_all(setting: Setting, output: Path, limit_seconds: float, only: Sequence[Cell] | None = None) -> None:
    """Every cell that has no line yet, or only a failed one."""
    path, begin = output / "results.jsonl", time.monotonic()
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    lines = [line for line in lines if not line.get("failed")]
    for cell in only or cells_of(setting):
        if any(line["cell"] == cell.name for line in lines):
            continue
        if time.monotonic() - begin > limit_seconds:
            print(f"{cell.name}: not begun, the time is over", flush=True)
            continue
        lines.append(
            {"cell": cell.name, "of": asdict(cell), "setting": asdict(setting), **in_own_process(setting, cell)}
        )
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        (output / "table.txt").write_text(table(lines, setting))
        print(json.dumps(lines[-1]), flush=True)
    print(table(lines, setting), flush=True)


def in_own_process(setting: Setting, cell: Cell) -> dict[str, Any]:
    """Its figures, or why there are none."""
    if setting.device == "cpu" and cell.system in SYSTEMS and cell.system not in ON_A_CPU:
        return {"why": "needs a CUDA device"}
    command = [
        sys.executable,
        __file__,
        "--output",
        "-",
        "--device",
        setting.device,
        "--cell",
        json.dumps(asdict(cell)),
    ]
    command += ["--steps", str(setting.steps), "--warm-ups", str(setting.warm_ups)]
    command += ["--model", setting.size] if setting.size != "tiny" else []
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=CELL_SECONDS)
    except subprocess.TimeoutExpired:
        return {"why": f"not done after {CELL_SECONDS} s", "failed": True}
    last = (ended.stdout.splitlines() or [""])[-1]
    if ended.returncode == 0 and last.startswith("{"):
        return dict(json.loads(last))
    return {"why": f"failed: {(ended.stderr.splitlines() or [f'exit code {ended.returncode}'])[-1]}", "failed": True}


def answer(setting: Setting, cell: Cell) -> None:
    """One cell's line, last of all on stdout; lanes and groups end with the process."""
    try:
        found: dict[str, object] = {"figures": run_cell(setting, cell)}
    except Unavailable as error:
        found = {"why": str(error)}
    print(json.dumps(found), flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
