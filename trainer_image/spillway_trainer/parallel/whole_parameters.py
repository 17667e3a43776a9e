"""Zero1 and Zero2 on CUDA devices: every rank has the whole parameters, and the optimizer states of its rows.

    backward  segment n -> exchange of its gradients (SegmentGradients) -> n - 1 ...
    step      the optimizer updates this rank's rows, in the parameters' memory -> all-gather of every parameter

The all-gather is in place, so a parameter has memory for as many rows as all ranks' parts have together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from spillway.plan import MemoryPlan

from ..models.chain import Chain, allocate
from ..optimizer.plain import Hyperparameters
from ..optimizer.trainable import master_values
from ..ranks import World
from ..tiers.device_ledger import DeviceLedger
from ..trainer import in_order
from .deepspeed.layout import Layout
from .distributed import Peers
from .fsdp import cut_rows
from .reduced_gradients import ReducedGradients
from .run import DividedModel, guarded, refuse, tie
from .segment_gradients import SegmentGradients, largest, pass_on_gradient
from .shards import MakeOptimizer, ShardedOptimizer, as_piece


@dataclass(frozen=True, slots=True)
class WholeParameters:
    """A model with whole parameters on every rank. Implements shards.Division."""

    layout: Layout
    memory: Mapping[str, Tensor]
    """The memory of every parameter, flat; with padding at its end if the parameter is trained."""
    peers: Peers

    def part(self, name: str) -> Tensor:
        """Returns this rank's part of a trained parameter's memory."""
        return self.memory[name].view(self.peers.world.size, -1)[self.peers.world.rank]

    def complete(self) -> None:
        for name in self.layout:
            self.peers.complete(self.memory[name], self.part(name))

    def set(self, name: str, values: Tensor) -> None:
        whole = self.memory[name]
        whole[: values.numel()].copy_(master_values(values.reshape(-1).float(), whole.dtype))


def divide(
    plan: MemoryPlan,
    model: Chain,
    world: World,
    settings: Hyperparameters,
    ledger: DeviceLedger,
    make: MakeOptimizer,
    wire: torch.dtype,
    device: torch.device,
) -> DividedModel:
    """Allocates memory for `model`, which has none yet, on `device`, and shards its states. Every rank calls it."""
    refuse(plan, model, world)
    tie(model)
    allocate(model, device)
    named, peers = dict(model.named_parameters()), Peers.on(device, world)
    layout = {name: cut_rows(one.shape, world.size) for name, one in named.items() if one.requires_grad}
    memory = {name: padded(one, world.size) if name in layout else one.detach().view(-1) for name, one in named.items()}
    ledger.charge("parameters", sum(one.numel() * one.element_size() for one in memory.values()))
    whole = WholeParameters(layout, memory, peers)
    used = set[str]()
    trained = {}
    for segment, names in model.parameters_of().items():
        # The gradient of a tied parameter is complete when backward leaves the first segment that uses it.
        trained[segment] = [name for name in names if name in layout and name not in used]
        used.update(names)
    own = {name: pieces[world.rank].size for name, pieces in layout.items()}
    pieces = [(name, as_piece(whole.part(name)[:size], named[name].dim())) for name, size in own.items() if size]
    parameters = {name: named[name] for name in layout}
    optimizer = ShardedOptimizer(make(pieces), whole, peers, parameters, settings)
    reduced = ReducedGradients(
        layout, peers, wire, ledger, optimizer.take, plan.optimizer.num_threads, device, largest=largest(trained, named)
    )
    gradients = SegmentGradients(trained, named, peers, reduced, optimizer.mark, ledger, device)
    gradients.watch(model)
    for name, parameter in parameters.items():
        pass_on_gradient(parameter, name, gradients.take)
    return DividedModel(model, optimizer, None, guarded(partial(in_order, exchange=gradients.finish)))


def padded(parameter: Parameter, world_size: int) -> Tensor:
    """Returns the parameter's memory, flat: new memory, if parts for all ranks take more."""
    size = world_size * cut_rows(parameter.shape, world_size)[0].size
    if size > parameter.numel():
        memory = torch.zeros(size, dtype=parameter.dtype, device=parameter.device)
        parameter.data = memory[: parameter.numel()].view(parameter.shape)
        return memory
    return parameter.detach().view(-1)
