"""A TrainingJob's model under FSDP2 (torch's `fully_shard`), with one group per segment.

FSDP2 shards parameters by rows, gathers a segment's parameters before its forward and its backward, and frees them
afterwards. It never reduces gradients: we take a whole gradient from its parameter as soon as autograd has it
(docs/adr/0012).

    forward   all-gather of segment n -> n -> free ...
    backward  all-gather of n -> n -> exchange of its gradients (SegmentGradients) -> free -> n - 1 ...
    step      the optimizer of this rank's rows writes into the DTensors' memory, from which the next all-gather sends
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from spillway.plan import MemoryPlan
from spillway.planning.workload import NUM_GATHERED_SEGMENTS

from ..models.chain import Chain, allocate
from ..optimizer.plain import Hyperparameters
from ..optimizer.trainable import master_values
from ..ranks import World
from ..tiers.device_ledger import DeviceLedger
from ..trainer import in_order
from .deepspeed.layout import Layout, ShardPiece
from .distributed import Peers
from .gathered_segments import GatheredSegments
from .run import DividedModel, guarded, reject
from .segment_gradients import exchanged_gradients
from .shards import DeviceTier, MakeOptimizer, ShardedOptimizer, as_piece


def cut_rows(shape: Sequence[int], world_size: int) -> list[ShardPiece]:
    """Cuts one parameter along its first dimension, as torch.chunk does: ceil(rows / ranks) rows each, the last ones
    fewer or none."""
    width = prod(shape[1:])
    most = -(-shape[0] // world_size)
    starts = [min(rank * most, shape[0]) * width for rank in range(world_size + 1)]
    return [ShardPiece(start, end - start) for start, end in pairwise(starts)]


def padded_rows_bytes(parameter: Tensor, world_size: int) -> int:
    """Returns the bytes that FSDP2 holds of a parameter on each rank: as many rows as the rank with the most rows
    has."""
    return -(-parameter.shape[0] // world_size) * prod(parameter.shape[1:]) * parameter.element_size()


class Called(nn.Module):
    """The module that the step loop calls: the model, and all its segments, because a model of another library does not
    list them among its own modules."""

    def __init__(self, model: Chain) -> None:
        super().__init__()
        self.model = model
        self.segments = nn.ModuleList(module for _, module in model.segments)

    def forward(self, *batch: Any) -> Tensor:
        loss: Tensor = self.model(*batch)
        return loss


@dataclass(frozen=True, slots=True)
class FsdpShards:
    """A model sharded by FSDP2. Implements shards.Division."""

    layout: Layout
    """The pieces of the trained parameters that have states."""
    own: Mapping[str, Tensor]
    """This rank's rows of every parameter, flat, in FSDP2's memory."""
    tied: Mapping[str, str]
    rank: int
    world_size: int
    shapes: Mapping[str, torch.Size]
    gathered: GatheredSegments
    stale: set[str] = field(default_factory=set)
    """Aliases whose owners have been updated since the alias was last copied."""

    def complete(self) -> None:
        self.stale.update(self.tied)
        self.gathered.changed()

    def up_to_date(self, names: Sequence[str]) -> None:
        """Called when the rows of these parameters are about to be gathered and those of their owners are updated.
        Copies owners to aliases, which are gathered from memory of their own."""
        for alias in self.stale.intersection(names):
            self.own[alias].copy_(self.own[self.tied[alias]])
        self.stale.difference_update(names)

    def set(self, name: str, values: Tensor) -> None:
        """Sets only parameters that are not trained: the trained ones have been set with their masters."""
        own = self.own[name]
        if name not in self.layout:
            piece = cut_rows(self.shapes[name], self.world_size)[self.rank]
            own.copy_(master_values(values.reshape(-1)[piece.offset : piece.end].float(), own.dtype))
        self.stale.update(alias for alias, owner in self.tied.items() if owner == name)


def tell_before(module: nn.Module, gathered: Callable[[], None]) -> None:
    """Has `gathered` called whenever the module is called, before FSDP2 gathers its parameters."""

    def watch(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        gathered()

    module.register_forward_pre_hook(watch, prepend=True)


def divide(
    plan: MemoryPlan,
    model: Chain,
    world: World,
    settings: Hyperparameters,
    tiers: DeviceTier,
    make: MakeOptimizer,
    wire: torch.dtype,
) -> DividedModel:
    """Allocates device memory for `model`, which has none yet, and shards it with FSDP2. Every rank calls it."""
    reject(plan, model, world)
    segments, named = model.parameters_of(), dict(model.named_parameters())
    charge(model, segments, world.size, tiers.ledger)
    called, peers = Called(model), Peers.on(tiers.device, world)
    peers.shard(with_memory(model, tiers.device), called)
    trained = {segment: [name for name in names if named[name].requires_grad] for segment, names in segments.items()}
    cuts = {name: cut_rows(named[name].shape, world.size) for names in trained.values() for name in names}
    own = {name: own_rows(model.get_parameter(name)) for name in named}
    pieces = [
        (name, as_piece(own[model.tied.get(name, name)], named[name].dim()))
        for name in named
        if name in cuts and cuts[name][world.rank].size
    ]

    def take_whole(name: str, gradient: Tensor) -> None:
        gradients.take(name, gradient)

    gathered = GatheredSegments(model, segments, take_whole)
    layout = {name: cuts[name] for name in named if name in cuts and name not in model.tied}
    shapes = {name: parameter.shape for name, parameter in named.items()}
    rows = FsdpShards(layout, own, model.tied, world.rank, world.size, shapes, gathered)
    parameters = {name: model.get_parameter(name) for name in layout}
    optimizer = ShardedOptimizer(make(pieces), rows, peers, parameters, settings, flushes=False)
    gradients = exchanged_gradients(model, trained, named, cuts, optimizer, tiers, wire, plan.optimizer.num_threads)

    def updated(gathered: Sequence[str]) -> None:
        for segment in gathered:
            optimizer.wait([name for name in trained[segment] if cuts[name][world.rank].size])
            rows.up_to_date(segments[segment])

    sharded = [(name, module) for name, module in model.segments if segments[name]]
    for place, (_, module) in enumerate(sharded):
        tell_before(module, partial(updated, [name for name, _ in sharded[place : place + peers.num_gathered]]))
    order = guarded(partial(in_order, exchange=gradients.finish))
    return DividedModel(called, optimizer, gathered, order, gathered.ready)


def charge(model: Chain, segments: Mapping[str, Sequence[str]], world_size: int, ledger: DeviceLedger) -> None:
    """Charges this rank's rows, and room for the segments that are whole at the same time."""
    named = dict(model.named_parameters())
    own = {name: padded_rows_bytes(parameter, world_size) for name, parameter in named.items()}
    largest = max(sum(own[name] for name in names) for names in segments.values())
    ledger.charge("parameters", sum(own.values()) + NUM_GATHERED_SEGMENTS * world_size * largest)


def with_memory(model: Chain, device: torch.device) -> Iterator[nn.Module]:
    """Yields each segment, whose memory is allocated just before, so that no rank ever holds the whole model: FSDP2
    keeps a rank's rows of the segment and frees the rest."""
    for _, module in model.segments:
        if any(True for _ in module.parameters()):
            allocate(module, device)
            yield module


def own_rows(parameter: Any) -> Tensor:
    """Returns this rank's part of a DTensor, flat, in its own memory."""
    with torch.no_grad():
        local: Tensor = parameter.to_local()
    return local.view(-1)
