"""MemoryPlan -> model, optimizer, hooks: the one place that branches on the plan.

ledger, slabs, lanes   what the plan allows in each tier
model                  plain; its segments are wrapped for the random fork and, unless Disabled, the saved tensors
optimizer              resident, or offloaded with the plan's shares
hooks                  every parameter's gradient goes to the optimizer the moment it is complete
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from spillway.api import TrainingJobSpec
from spillway.job import JobFile
from spillway.plan import Answer, MemoryPlan, Tier

from . import activation_spill, config, kernels
from .models.build import build_model
from .models.chain import Chain, allocate
from .optimizer import Optimizer, ResidentOptimizer
from .optimizer_offload import OptimizerOffload
from .ranks import GradientSum, Ranks
from .segments import Position, wrap_segments
from .spill_file import SpillFile
from .tiers.device_ledger import DeviceLedger
from .tiers.host_slab import HostSlab
from .tiers.lanes import CpuLanes, Lanes
from .tiers.nvme_slab import NvmeSlab


@dataclass(frozen=True, slots=True)
class Tiers:
    """The memory that a run may use."""

    ledger: DeviceLedger
    host: HostSlab
    nvme: NvmeSlab | None
    lanes: Lanes

    def held_bytes(self) -> dict[str, int]:
        nvme = self.nvme.held_bytes if self.nvme else 0
        return {Tier.DEVICE: self.ledger.held_bytes, Tier.HOST: self.host.held_bytes, Tier.NVME: nvme}

    def peak_bytes(self) -> dict[str, int]:
        """Highest bytes held since the last call."""
        nvme = self.nvme.peak_bytes if self.nvme else 0
        peaks: dict[str, int] = {Tier.DEVICE: self.ledger.peak_bytes, Tier.HOST: self.host.peak_bytes, Tier.NVME: nvme}
        for tier in (self.ledger, self.host, self.nvme):
            if tier is not None:
                tier.reset_peak()
        return peaks

    def close(self) -> None:
        self.lanes.close()
        if self.nvme is not None:
            self.nvme.close()


@dataclass(frozen=True, slots=True)
class Assembly:
    """What a plan came to: a model to call, an optimizer to step, and what the step loop tells both."""

    model: Chain
    optimizer: Optimizer
    position: Position
    tiers: Tiers
    spill: activation_spill.ActivationSpill | None
    """None in mode Disabled: no saved-tensor hooks at all"""

    def gradient_sum(self, ranks: Ranks, wire: torch.dtype, num_threads: int) -> GradientSum:
        """The sum over `ranks`, with its buffers, for gradients that travel as `wire`."""
        num_values = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        return ranks.gradient_sum(num_values, wire, self.tiers.ledger, num_threads)

    def start_backward(self) -> None:
        if self.spill is not None:
            self.spill.start_backward()

    def end_step(self) -> None:
        if self.spill is not None:
            self.spill.end_step()

    def held_bytes(self) -> dict[str, int]:
        return self.tiers.held_bytes()

    def peak_bytes(self) -> dict[str, int]:
        return self.tiers.peak_bytes()

    def moved_bytes(self) -> dict[str, int]:
        return self.tiers.lanes.moved_bytes()

    def waited_seconds(self) -> float:
        return self.tiers.lanes.stalled_seconds()

    def io_backend(self) -> str:
        return self.tiers.nvme.backend if self.tiers.nvme else "none"

    def parameter_shapes(self) -> dict[str, torch.Size]:
        """The parameters that have states of their own: tied aliases are left out."""
        return {name: p.shape for name, p in self.model.named_parameters() if name not in self.model.tied}


def assemble(job: JobFile, plan: MemoryPlan) -> Assembly:
    """Build everything that `plan` asks for. Parameters are allocated and not filled: `fill` or a checkpoint does that.

    Raises DeviceOutOfMemory, HostOutOfMemory, SpillVolumeFull before the first step when a tier is too small.
    """
    tiers = make_tiers(job, plan)
    model = make_model(job.spec, tiers.ledger)
    tiers.ledger.charge("workspace", plan.bytes[Tier.DEVICE].workspace)
    position = Position(job.spec.training.seed)
    names = [name for name, _ in model.segments]
    spill = None
    if plan.mode != "Disabled":
        spill = activation_spill.build(
            plan.activations, names, model.named_parameters(), tiers.lanes, tiers.ledger, tiers.nvme
        )
    wrap_segments(model.segments, position, spill.hook if spill else None)
    optimizer = make_optimizer(job.spec, plan, model, tiers)
    send_gradients(model, optimizer)
    return Assembly(model, optimizer, position, tiers, spill)


def make_tiers(job: JobFile, plan: MemoryPlan) -> Tiers:
    ledger = DeviceLedger(plan.budget[Tier.DEVICE])
    host = HostSlab(plan.slab_bytes(Tier.HOST))
    nvme = None
    if Answer.NVME in plan.activations.uses:
        open_file = partial(SpillFile, listed=job.spill_is_listed)
        num_threads, directory = plan.activations.num_io_threads, Path(job.spill_directory)
        nvme = NvmeSlab(directory, plan.slab_bytes(Tier.NVME), num_threads, open_file=open_file)
    return Tiers(ledger, host, nvme, CpuLanes(host, ledger))


def make_model(spec: TrainingJobSpec, ledger: DeviceLedger) -> Chain:
    """The model with its parameters allocated in the compute dtype, charged to the ledger; tied ones share storage."""
    model = build_model(spec)
    allocate(model)
    model.tie()
    owned = [p for name, p in model.named_parameters() if name not in model.tied]
    ledger.charge("parameters", sum(p.numel() * p.element_size() for p in owned))
    return model


def make_optimizer(spec: TrainingJobSpec, plan: MemoryPlan, model: Chain, tiers: Tiers) -> Optimizer:
    parameters, settings = list(model.named_parameters()), config.adamw_settings(spec)
    if plan.optimizer.offloads:
        return OptimizerOffload(parameters, model.tied, settings, plan.optimizer, tiers.lanes, tiers.ledger)
    update = partial(kernels.adamw, num_threads=plan.optimizer.num_threads)
    return ResidentOptimizer(parameters, model.tied, settings, tiers.ledger, update)


def send_gradients(model: Chain, optimizer: Optimizer) -> None:
    """From now on no gradient stays on a parameter: the optimizer takes it as soon as autograd has it whole."""

    def take(name: str, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        optimizer.take(name, gradient)

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(partial(take, name))  # type: ignore[no-untyped-call]


def initial_states(model: Chain, seed: int) -> Iterator[tuple[str, Tensor]]:
    """For a run from the start: float32 masters from `seed`; moments are 0."""
    return ((f"master.{name}", value) for name, value in model.initial_values(seed))


def fill(assembly: Assembly, seed: int) -> None:
    """Start from `seed`, parameters rounded from the masters."""
    for name, value in initial_states(assembly.model, seed):
        assembly.optimizer.load(name, value)
