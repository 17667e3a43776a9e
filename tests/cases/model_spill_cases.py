"""Runs of the real assembly and step loop with streamed parameters, and the same runs with everything resident."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fakes.fake_spill_file import FakeSpillFile
from fakes.lazy_lanes import LazyLanes
from fakes.no_checkpoints import NoCheckpoints
from fakes.tracing import TracingLanes
from harness import local_runs
from spillway.plan import ActivationPlan, MemoryPlan, OptimizerPlan, Overlap, ParameterPlan, Policy, Tier, TierBytes
from spillway.units import MIB
from spillway_trainer import assemble as assembly_module
from spillway_trainer.assemble import Assembly, assemble, fill
from spillway_trainer.corpus.data import Batch
from spillway_trainer.models.chain import Chain, as_carried
from spillway_trainer.models.transformer import Block, Transformer, TransformerConfig
from spillway_trainer.optimizer.schedule import LearningRate
from spillway_trainer.reporting.recorder import Recorder
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.lanes import CpuLanes, Lane, Lanes
from spillway_trainer.trainer import LoopSettings, Run, RunProgress, StopRequest, train

HIDDEN, HEADS, VOCABULARY, NUM_BLOCKS = 16, 2, 61, 6
BATCH, LENGTH, STEPS = 2, 8, 2
RATES = {Lane.COMPUTE: 4e9, Lane.H2D: 1e9, Lane.D2H: 1e9, Lane.CPU: 4e9, Lane.NVME_READ: 5e8, Lane.NVME_WRITE: 5e8}

MakeLanes = Callable[[HostSlab, DeviceLedger], Lanes]
LANES: dict[str, MakeLanes] = {
    "cpu": CpuLanes,
    "lazy": LazyLanes,
    "tracing": lambda host, ledger: TracingLanes(host, ledger, RATES),
}


class Group(nn.Module):
    """Consecutive segments of a chain, joined to one segment."""

    def __init__(self, inner: Sequence[tuple[str, nn.Module]], num_arguments: Sequence[int]) -> None:
        super().__init__()
        self.names = [name for name, _ in inner]
        self.inner = nn.ModuleList(module for _, module in inner)
        self.num_arguments = num_arguments

    def forward(self, *inputs: Any) -> Tensor:
        rest = list(inputs[len(inputs) - sum(self.num_arguments) :])
        carried: tuple[Tensor, ...] = inputs[: len(inputs) - sum(self.num_arguments)]
        for module, count in zip(self.inner, self.num_arguments, strict=True):
            carried = as_carried(module(*carried, *rest[:count]))
            del rest[:count]
        return carried if len(carried) > 1 else carried[0]  # type: ignore[return-value]


class Grouped(Chain):
    """A transformer's segments in `num_segments` groups of the same size."""

    def __init__(self, model: Transformer, num_segments: int) -> None:
        super().__init__()
        self.model = [model]  # in a list, so that its parameters belong only to the groups
        size = len(model.segments) // num_segments
        arguments = {"embedding": 0, "head": 2}
        self.groups = nn.ModuleList()
        for start in range(0, len(model.segments), size):
            inner = model.segments[start : start + size]
            self.groups.append(Group(inner, [arguments.get(name, 2) for name, _ in inner]))
        self.aliases = {
            self._name(model.get_parameter(alias)): self._name(model.get_parameter(owner))
            for alias, owner in model.tied.items()
        }

    def _name(self, parameter: nn.Parameter) -> str:
        return next(name for name, each in self.named_parameters() if each is parameter)

    @property
    def segments(self) -> list[tuple[str, nn.Module]]:
        return [("+".join(group.names), group) for group in self.groups]

    @property
    def tied(self) -> dict[str, str]:
        return self.aliases

    def arguments(self, segment: str, tokens_BT: Tensor, labels_BT: Tensor, num_tokens: int) -> tuple[object, ...]:
        inner = self.model[0]
        return tuple(
            value for name in segment.split("+") for value in inner.arguments(name, tokens_BT, labels_BT, num_tokens)
        )

    def deviation(self, name: str) -> float:
        return 0.2  # makes the model far from linear, so that a wrong bit changes results


class Adapted(nn.Module):
    """A frozen projection in bfloat16 and its float32 adapter (LoRA, arXiv 2106.09685)."""

    RANK = 4

    def __init__(self, base: nn.Module, dropout: float) -> None:
        super().__init__()
        out_features, in_features = base.weight.shape
        self.base, self.dropout = base, dropout
        self.down = nn.Parameter(torch.empty(self.RANK, in_features, dtype=torch.float32))
        self.up = nn.Parameter(torch.empty(out_features, self.RANK, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        dropped = F.dropout(x, self.dropout, self.training)
        return self.base(x) + F.linear(F.linear(dropped, self.down), self.up)


@dataclass(frozen=True)
class Model:
    """The model and the settings that do not depend on the technique."""

    num_segments: int = 8
    num_micro_batches: int = 2
    dropout: float = 0.0
    tied: bool = False
    clipping: float | None = None
    lora: bool = False
    dtype: torch.dtype = torch.float32
    num_blocks: int = NUM_BLOCKS
    hidden: int = HIDDEN

    def batches(self) -> Any:
        return RandomBatches()

    def build(self) -> Chain:
        config = TransformerConfig(self.hidden, self.num_blocks, HEADS, 1, 24, VOCABULARY, self.tied, self.dropout)
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16 if self.lora else self.dtype)
        try:
            with torch.device("meta"):
                model = Transformer(config)
                if self.lora:
                    adapt(model, self.dropout)
                chain = Grouped(model, self.num_segments)
        finally:
            torch.set_default_dtype(default)
        if self.lora:
            chain.autocast = torch.bfloat16
        return chain


def adapt(model: Transformer, dropout: float) -> None:
    model.requires_grad_(False)
    for block in model.layers:
        assert isinstance(block, Block)
        block.self_attn.q_proj = Adapted(block.self_attn.q_proj, dropout)  # type: ignore[assignment]
        block.mlp.down_proj = Adapted(block.mlp.down_proj, dropout)  # type: ignore[assignment]


@dataclass(frozen=True)
class Technique:
    """The plan and the lanes of a run."""

    homes: str = "host"
    num_slots: int = 2
    order: str = "InOrder"
    boundaries: Policy = Policy.KEEP
    answers: str = "keep"
    lanes: str = "lazy"
    chunk_parameters: int = 211
    """no parameter's size is a multiple of it, so that chunks end inside rows"""
    overlap: Overlap = "None"

    def plan(self, model: Model) -> MemoryPlan:
        count = model.num_segments
        homes = HOMES[self.homes](count)
        answers = ANSWERS[self.answers]
        # The tied head and embedding need homes of the same tier.
        homes = (*homes[:-1], homes[0]) if model.tied else homes
        return RESIDENT.model_copy(
            update={
                "mode": "Auto",
                "num_segments": count,
                "num_micro_batches": model.num_micro_batches,
                "optimizer": OptimizerPlan(
                    cpu_share=1.0, resident_share=0.0, chunk_parameters=self.chunk_parameters, overlap=self.overlap
                ),
                "activations": ActivationPlan(
                    answers=tuple(answers[index % len(answers)] for index in range(count)), minimum_bytes=256
                ),
                "parameters": ParameterPlan(
                    homes=homes, num_slots=self.num_slots, order=self.order, boundaries=self.boundaries
                ),
            }
        )


HOST, NVME, DEVICE = Tier.HOST, Tier.NVME, Tier.DEVICE
HOMES: dict[str, Callable[[int], tuple[Tier, ...]]] = {
    "host": lambda count: (HOST,) * count,
    "nvme": lambda count: (NVME,) * count,
    "mixed": lambda count: (HOST, NVME, DEVICE, NVME, HOST, DEVICE, NVME, HOST)[:count],
}
ANSWERS = {
    "keep": (Policy.KEEP,),
    "recompute": (Policy.RECOMPUTE,),
    "host": (Policy.HOST,),
    "nvme": (Policy.NVME,),
    "mixed": (Policy.NVME, Policy.RECOMPUTE, Policy.HOST, Policy.KEEP, Policy.RECOMPUTE),
}
RESIDENT = MemoryPlan(
    job="small",
    node="local",
    mode="Disabled",
    micro_batch_size=BATCH,
    num_micro_batches=1,
    num_segments=8,
    optimizer=OptimizerPlan(),
    activations=ActivationPlan(),
    bytes={tier: TierBytes(buffers=24 * MIB) for tier in Tier} | {Tier.DEVICE: TierBytes()},
    budget=dict.fromkeys(Tier, 64 * MIB),
    prediction=local_runs.PREDICTION,
)


class RandomBatches:
    """Random tokens that depend only on the sample's number; no label is masked."""

    def batch(self, samples: Sequence[int]) -> Batch:
        rows = [torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=_generator(sample)) for sample in samples]
        tokens = torch.stack(rows)
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), len(samples) * LENGTH)

    def num_unmasked(self, samples: Sequence[int]) -> int:
        return len(samples) * LENGTH

    def evaluation_batches(self, micro_batch_size: int) -> Iterator[Batch]:
        for number in range(2):
            yield self.batch(range(10_000 + number * micro_batch_size, 10_000 + (number + 1) * micro_batch_size))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass
class Outcome:
    """Everything that must be equal bit by bit under every technique, and figures of the run."""

    figures: dict[str, list[float]]
    tensors: dict[str, Tensor]
    lanes: Lanes
    moved_bytes: dict[str, int] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)

    def differences(self, other: Outcome) -> list[str]:
        """Names of figures and tensors that differ in any bit; NaN counts as a difference."""
        found = [name for name in self.figures if self.figures[name] != other.figures[name]]
        assert self.tensors.keys() == other.tensors.keys()
        return found + [name for name, value in self.tensors.items() if not torch.equal(value, other.tensors[name])]


class Listener(Recorder):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.figures: dict[str, list[float]] = {"loss": [], "norm": [], "evaluation": [], "skipped": []}
        self.peaks: list[dict[str, int]] = []

    def step(self, metrics: Any) -> None:
        self.figures["loss"].append(metrics.loss)
        self.figures["norm"].append(metrics.gradient_norm)
        self.figures["skipped"].append(float(metrics.skipped))
        self.peaks.append(metrics.tier_peak_bytes)

    def evaluation(self, step: int, loss: float, tokens: int, seconds: float) -> None:
        self.figures["evaluation"].append(loss)


def settings_of(model: Model, num_steps: int = STEPS) -> LoopSettings:
    return LoopSettings(
        num_steps=num_steps,
        micro_batch_size=BATCH,
        num_micro_batches=model.num_micro_batches,
        gradient_clipping=model.clipping,
        skip_non_finite=True,
        checkpoint_every=10**6,
        evaluate_every=num_steps,
    )


@dataclass
class Laboratory:
    """Runs models in one directory, and keeps the outcome of each model's resident run."""

    directory: Path
    text: Path
    _resident: dict[Model, Outcome] = field(default_factory=dict)

    def resident(self, model: Model) -> Outcome:
        if model not in self._resident:
            plan = RESIDENT.model_copy(update={"num_micro_batches": model.num_micro_batches})
            self._resident[model] = self.run(model, plan, LazyLanes)
        return self._resident[model]

    def streamed(self, model: Model, technique: Technique) -> Outcome:
        return self.run(model, technique.plan(model), LANES[technique.lanes])

    def run(
        self,
        model: Model,
        plan: MemoryPlan,
        make_lanes: MakeLanes,
        *,
        open_file: Any = None,
        during: Callable[[Run, Assembly], None] = lambda run, assembly: None,
    ) -> Outcome:
        job = local_runs.job_file(self.directory, self.text, self.directory / "corpus", epoch=1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(assembly_module, "CpuLanes", make_lanes)
            patch.setattr(assembly_module, "SpillFile", open_file or _fake_file)
            assembly = assemble(job, plan, model.build())
        try:
            fill(assembly, seed=3)
            listener = Listener(self.directory / "run.jsonl")
            run = Run(
                model=assembly.model,
                optimizer=assembly.optimizer,
                techniques=assembly,
                position=assembly.position,
                batches=model.batches(),
                learning_rate=LearningRate("Constant", 1e-2, STEPS, 0, 1.0),
                checkpoints=NoCheckpoints(),
                recorder=listener,
                order=assembly.order,
            )
            during(run, assembly)
            train(run, settings_of(model), RunProgress(), StopRequest())
            tensors = {name: value.clone() for name, value in assembly.states()}
            tensors |= parameters(assembly)
            peaks = {tier: max(peak[tier] for peak in listener.peaks) for tier in Tier}
            assert all(math.isfinite(loss) for loss in listener.figures["loss"])
            moved = assembly.moved_bytes()
        finally:
            assembly.tiers.close()
        return Outcome(listener.figures, tensors, assembly.tiers.lanes, moved, peaks)


def parameters(assembly: Assembly) -> dict[str, Tensor]:
    """The values of every parameter; those of streamed parameters are read from their slots."""
    found = {}
    source = assembly.residence
    for segment, names in assembly.model.parameters_of().items():
        with source.pinned(segment):
            found |= {f"parameter.{name}": assembly.model.get_parameter(name).detach().clone() for name in names}
    return found


def _fake_file(directory: Path, nbytes: int, *, num_threads: int, listed: bool) -> FakeSpillFile:
    return FakeSpillFile(directory, nbytes, num_threads=num_threads)
