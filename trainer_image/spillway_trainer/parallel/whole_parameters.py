"""Zero1 and Zero2 on CUDA devices: every rank has the whole parameters, and the optimizer states of its rows.

    backward  segment n -> exchange of its gradients (SegmentGradients) -> n - 1 ...
    step      the optimizer updates this rank's rows, in the parameters' memory
    forward   all-gather of every parameter, in the order of the segments; segment n waits for its own -> n -> n + 1 ...

The all-gather is in place, so a parameter has memory for as many rows as all ranks' parts have together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from spillway.plan import MemoryPlan

from ..models.chain import Chain, allocate
from ..optimizer.plain import Hyperparameters
from ..optimizer.trainable import master_values
from ..ranks import World
from ..trainer import in_order
from .deepspeed.layout import Layout
from .distributed import Peers
from .fsdp import cut_rows
from .run import DividedModel, guarded, reject, tie
from .segment_gradients import exchanged_gradients, pass_on_gradient
from .shards import DeviceTier, MakeOptimizer, ShardedOptimizer, as_piece


@dataclass(frozen=True, slots=True)
class WholeParameters:
    """A model with whole parameters on every rank. Implements shards.Division."""

    layout: Layout
    memory: Mapping[str, Tensor]
    """The memory of every parameter, flat; with padding at its end if the parameter is trained."""
    peers: Peers
    segments: Mapping[str, Sequence[str]]
    """Segment -> the names of its parameters, in forward order."""
    arriving: dict[str, Callable[[], None]] = field(default_factory=dict)
    """What waits for the parameters that are being gathered."""

    def part(self, name: str) -> Tensor:
        """Returns this rank's part of a trained parameter's memory."""
        return self.memory[name].view(self.peers.world.size, -1)[self.peers.world.rank]

    def complete(self) -> None:
        for wait in self.arriving.values():  # of segments that no forward has used
            wait()
        names = dict.fromkeys(name for segment in self.segments.values() for name in segment if name in self.layout)
        self.arriving.update({name: self.peers.complete(self.memory[name], self.part(name)) for name in names})

    def ready(self, segment: str) -> None:
        """Called when the forward of `segment` begins."""
        for name in self.segments[segment]:
            if name in self.arriving:
                self.arriving.pop(name)()

    def set(self, name: str, values: Tensor) -> None:
        whole = self.memory[name]
        whole[: values.numel()].copy_(master_values(values.reshape(-1).float(), whole.dtype))


def divide(
    plan: MemoryPlan,
    model: Chain,
    world: World,
    settings: Hyperparameters,
    tiers: DeviceTier,
    make: MakeOptimizer,
    wire: torch.dtype,
) -> DividedModel:
    """Allocates device memory for `model`, which has none yet, and shards its states. Every rank calls it."""
    reject(plan, model, world)
    tie(model)
    allocate(model, tiers.device)
    named, peers = dict(model.named_parameters()), Peers.on(tiers.device, world)
    layout = {name: cut_rows(one.shape, world.size) for name, one in named.items() if one.requires_grad}
    memory = {name: padded(one, world.size) if name in layout else one.detach().view(-1) for name, one in named.items()}
    tiers.ledger.charge("parameters", sum(one.numel() * one.element_size() for one in memory.values()))
    segments = model.parameters_of()
    whole = WholeParameters(layout, memory, peers, segments)
    used = set[str]()
    trained = {}
    for segment, names in segments.items():
        # The gradient of a tied parameter is complete when backward leaves the first segment that uses it.
        trained[segment] = [name for name in names if name in layout and name not in used]
        used.update(names)
    own = {name: pieces[world.rank].size for name, pieces in layout.items()}
    pieces = [(name, as_piece(whole.part(name)[:size], named[name].dim())) for name, size in own.items() if size]
    parameters = {name: named[name] for name in layout}
    optimizer = ShardedOptimizer(make(pieces), whole, peers, parameters, settings)
    gradients = exchanged_gradients(model, trained, named, layout, optimizer, tiers, wire, plan.optimizer.num_threads)
    for name, parameter in parameters.items():
        pass_on_gradient(parameter, name, gradients.take)
    return DividedModel(model, optimizer, None, guarded(partial(in_order, exchange=gradients.finish)), whole.ready)


def padded(parameter: Parameter, world_size: int) -> Tensor:
    """Returns the parameter's memory, flat: new memory, if parts for all ranks take more."""
    size = world_size * cut_rows(parameter.shape, world_size)[0].size
    if size > parameter.numel():
        memory = torch.zeros(size, dtype=parameter.dtype, device=parameter.device)
        parameter.data = memory[: parameter.numel()].view(parameter.shape)
        return memory
    return parameter.detach().view(-1)
