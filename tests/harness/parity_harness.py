"""Trains a parity model with activation spilling on or off; all that must be equal is compared bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from cases.parity_models import PARITY_MODELS, VOCABULARY
from fakes.fake_spill_file import FakeSpillFile
from fakes.lazy_lanes import LazyLanes
from fakes.tracing import TracedSchedule, TracingLanes
from spillway.plan import ActivationPlan, Policy
from spillway_trainer import activation_spill
from spillway_trainer.activation_spill import ActivationSpill
from spillway_trainer.resident_parameters import ResidentParameters
from spillway_trainer.segments import Position, wrap_segments
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.lanes import CpuLanes, Lane, Lanes
from spillway_trainer.tiers.nvme_slab import NvmeSlab, OpenFile

MINIMUM_BYTES = 256
BATCH, LENGTH = 2, 8
MIXED = (Policy.KEEP, Policy.NVME, Policy.RECOMPUTE, Policy.HOST)
"""of embedding, block0, block1 and head"""
RATES = {
    Lane.COMPUTE: 4e9,
    Lane.H2D: 1e9,
    Lane.D2H: 1e9,
    Lane.NVME_READ: 5e8,
    Lane.NVME_WRITE: 5e8,
}

MakeLanes = Callable[[HostSlab, DeviceLedger], Lanes]


def tracing(host: HostSlab, ledger: DeviceLedger) -> TracingLanes:
    return TracingLanes(host, ledger, RATES)


LANES: dict[str, MakeLanes] = {"cpu": CpuLanes, "lazy": LazyLanes, "tracing": tracing}
ANSWERS: dict[str, tuple[Policy, ...]] = {
    "keep": (),
    "host": (Policy.HOST,) * 4,
    "nvme": (Policy.NVME,) * 4,
    "recompute": (Policy.RECOMPUTE,) * 4,
    "mixed": MIXED,
}


@dataclass
class Outcome:
    """All tensors that must be equal bit by bit under every plan, and what the run left behind."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    schedule: TracedSchedule | None = None
    moved_bytes: dict[str, int] = field(default_factory=dict)
    left_behind: dict[str, int] = field(default_factory=dict)

    def differing(self, other: Outcome) -> list[str]:
        assert self.tensors.keys() == other.tensors.keys()
        return [name for name, value in self.tensors.items() if not torch.equal(value, other.tensors[name])]


class Spilling:
    """Lanes, slabs and the technique for one run."""

    def __init__(
        self,
        model: nn.Module,
        answers: tuple[Policy, ...],
        make_lanes: MakeLanes,
        *,
        window_bytes: int = 1 << 30,
        budget_bytes: int | None = None,
        open_file: OpenFile = FakeSpillFile,
        lean: bool = False,
    ) -> None:
        self.host, self.ledger = HostSlab(8 << 20), DeviceLedger(budget_bytes)
        self.lanes = make_lanes(self.host, self.ledger)
        self.nvme = NvmeSlab(Path("/spill"), 8 << 20, 1, open_file=open_file)
        plan = ActivationPlan(answers=answers, minimum_bytes=MINIMUM_BYTES, window_bytes=window_bytes, lean=lean)
        self.technique: ActivationSpill = activation_spill.build(
            plan,
            [name for name, _ in model.segments],
            ResidentParameters(model.named_parameters()),
            self.lanes,
            self.ledger,
            self.nvme,
        )

    def finish(self, outcome: Outcome) -> None:
        self.technique.end_step()
        if isinstance(self.lanes, TracingLanes):
            outcome.schedule = self.lanes.schedule()
        self.lanes.close()
        outcome.moved_bytes = self.lanes.moved_bytes()
        outcome.left_behind = {
            "device": self.ledger.held_bytes,
            "host": self.host.held_bytes,
            "nvme": self.nvme.held_bytes,
        }
        self.nvme.close()


def batches(steps: int, micro_batches: int) -> Tensor:
    """Tokens of shape (steps, micro_batches, inputs and labels, BATCH, LENGTH)."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, VOCABULARY, (steps, micro_batches, 2, BATCH, LENGTH), generator=generator)


def train(
    name: str,
    attach: Callable[[nn.Module], Spilling] | None,
    *,
    micro_batches: int = 1,
    steps: int = 2,
    before_backward: Callable[[Spilling], None] = lambda _: None,
) -> Outcome:
    """Makes `steps` SGD steps with parity model `name`. If `attach` is None, it runs plain autograd without any
    hook."""
    model = PARITY_MODELS[name]()
    spilling = attach(model) if attach else None
    position = Position(seed=3)
    wrap_segments(model.segments, position, spilling.technique.hook if spilling else None)
    data, outcome = batches(steps, micro_batches), Outcome()
    for step in range(steps):
        for micro_batch in range(micro_batches):
            position.step, position.micro_batch = step, micro_batch
            tokens, labels = data[step, micro_batch]
            loss = model(tokens, labels, BATCH * LENGTH * micro_batches)
            if spilling:
                spilling.technique.start_backward()
                before_backward(spilling)
            loss.backward()
            outcome.tensors[f"loss.{step}.{micro_batch}"] = loss.detach()
            del loss
        _update(model, outcome, step)
    if spilling:
        spilling.finish(outcome)
    return outcome


def _update(model: nn.Module, outcome: Outcome, step: int) -> None:
    for alias, owner in model.tied.items():
        gradient = model.get_parameter(alias).grad
        model.get_parameter(owner).grad.add_(gradient)
        model.get_parameter(alias).grad = None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                outcome.tensors[f"grad.{step}.{name}"] = parameter.grad
                parameter.sub_(parameter.grad * 0.05)
                parameter.grad = None
            outcome.tensors[f"parameter.{step}.{name}"] = parameter.detach().clone()
