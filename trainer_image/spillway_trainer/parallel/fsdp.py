"""A TrainingJob's model under FSDP2, torch's `fully_shard`: a group for each segment, and what is ours.

FSDP2 divides parameters by rows, gathers a segment's before its forward and its backward, and puts them away. It never
reduces: a whole gradient is taken from its parameter the moment autograd has it (docs/adr/0012).

    forward   all-gather of segment n -> n -> away ...
    backward  all-gather of n -> n -> exchange of its gradients (SegmentGradients) -> away -> n - 1 ...
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

from spillway.errors import UserError
from spillway.metrics import Phase
from spillway.plan import MemoryPlan
from spillway.planning.workload import NUM_GATHERED_SEGMENTS

from ..corpus.data import Batch
from ..models.chain import Chain, allocate
from ..optimizer.plain import Hyperparameters
from ..optimizer.trainable import master_values
from ..ranks import World
from ..tiers.device_ledger import DeviceLedger
from ..trainer import MicroBatchOrder, Passes, Run, TimedPhase, in_order
from .deepspeed.layout import Layout, ShardPiece
from .distributed import Peers
from .gathered_segments import GatheredSegments
from .reduced_gradients import ReducedGradients
from .run import DividedModel, guarded
from .segment_gradients import SegmentGradients
from .shards import MakeOptimizer, ShardedOptimizer, as_piece


def cut_rows(shape: Sequence[int], world_size: int) -> list[ShardPiece]:
    """One parameter by its first dimension, as torch.chunk cuts it: ceil(rows / ranks) rows each, the last ones fewer
    or none."""
    width = prod(shape[1:])
    most = -(-shape[0] // world_size)
    starts = [min(rank * most, shape[0]) * width for rank in range(world_size + 1)]
    return [ShardPiece(start, end - start) for start, end in pairwise(starts)]


def padded_rows_bytes(parameter: Tensor, world_size: int) -> int:
    """What FSDP2 holds of a parameter on each rank: as many rows as the rank that has most."""
    return -(-parameter.shape[0] // world_size) * prod(parameter.shape[1:]) * parameter.element_size()


def refuse(plan: MemoryPlan, model: Chain, world: World) -> None:
    """Raises UserError for what FSDP2 cannot shard, before it has memory."""
    where = "spec.parallelism.strategy = Fsdp"
    if world.size == 1:
        raise UserError(f"{where}: a run with one rank has nothing to shard; use Auto or Ddp")
    if plan.parameters.streams or plan.parameters.order != "InOrder":
        raise UserError(
            f"{where}: the plan streams parameters from host memory or NVMe, or runs all micro-batches through one "
            "layer before the next layer. This strategy can do neither; plan the job again (spillway plan)"
        )
    if plan.optimizer.overlap == "Backward":
        raise UserError(
            f"{where}: spec.memory.advanced.optimizer.overlap: Backward works only with one rank, because several "
            "ranks must sum their gradients before the update; use Auto or Forward"
        )
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        if not parameter.dim():
            raise UserError(f"{where}: parameter {name} is a scalar and has no rows to shard; give it shape (1,)")
    for segment, names in model.parameters_of().items():
        dtypes = {str(named[name].dtype) for name in names if named[name].requires_grad}
        if len(dtypes) > 1:
            raise UserError(
                f"{where}: segment {segment} trains parameters of {' and '.join(sorted(dtypes))}, but FSDP2 "
                "shards only one type per segment (group of layers); use Ddp, or one type"
            )
    trained = [parameter.shape for name, parameter in named.items() if parameter.requires_grad]
    sizes = [sum(cut_rows(shape, world.size)[rank].size for shape in trained) for rank in range(world.size)]
    if 0 in sizes:
        raise UserError(
            f"{where}: rank {sizes.index(0)} of {world.size} would have no row of any trained parameter, because FSDP2 "
            "shards parameters by rows; use fewer ranks, or Ddp"
        )


class Called(nn.Module):
    """What the step loop calls: the model, and all its segments, which a model of another library does not list among
    its own modules."""

    def __init__(self, model: Chain) -> None:
        super().__init__()
        self.model = model
        self.segments = nn.ModuleList(module for _, module in model.segments)

    def forward(self, tokens_BT: Tensor, labels_BT: Tensor, num_tokens: int) -> Tensor:
        loss: Tensor = self.model(tokens_BT, labels_BT, num_tokens)
        return loss


@dataclass(frozen=True, slots=True)
class FsdpShards:
    """A model sharded by FSDP2. Implements shards.Division."""

    layout: Layout
    """Of the trained parameters that have states."""
    own: Mapping[str, Tensor]
    """This rank's rows of every parameter, flat: FSDP2's memory."""
    tied: Mapping[str, str]
    rank: int
    world_size: int
    shapes: Mapping[str, torch.Size]
    gathered: GatheredSegments
    stale: set[str] = field(default_factory=set)
    """Aliases whose owners have been updated since."""

    def complete(self) -> None:
        self.stale.update(self.tied)
        self.gathered.changed()

    def up_to_date(self, names: Sequence[str]) -> None:
        """The rows of these parameters are about to be gathered, and those of their owners are updated. An alias is
        gathered from memory of its own."""
        for alias in self.stale.intersection(names):
            self.own[alias].copy_(self.own[self.tied[alias]])
        self.stale.difference_update(names)

    def set(self, name: str, values: Tensor) -> None:
        """The trained ones have been set with their masters."""
        own = self.own[name]
        if name not in self.layout:
            piece = cut_rows(self.shapes[name], self.world_size)[self.rank]
            own.copy_(master_values(values.reshape(-1)[piece.offset : piece.end].float(), own.dtype))
        self.stale.update(alias for alias, owner in self.tied.items() if owner == name)


class _Left(torch.autograd.Function):
    """The inputs as they are. Its backward runs when that of all which was made of them is over."""

    @staticmethod
    def forward(ctx: Any, left: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.left = left
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.left()
        return (None, *gradients)


def tell_before(module: nn.Module, gathered: Callable[[], None]) -> None:
    """Call `gathered` whenever the module is called, before FSDP2 gathers its parameters."""

    def watch(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        gathered()

    module.register_forward_pre_hook(watch, prepend=True)


def tell_when_left(module: nn.Module, left: Callable[[], None]) -> None:
    """Call `left` whenever a backward has left `module`, before FSDP2 puts its parameters away. Never for a module
    whose inputs need no gradient."""

    def watch(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        places = [place for place, one in enumerate(inputs) if isinstance(one, Tensor) and one.requires_grad]
        if not (places and torch.is_grad_enabled()):
            return inputs
        watched = list(inputs)
        for place, one in zip(places, _Left.apply(left, *(inputs[place] for place in places)), strict=True):
            watched[place] = one
        return tuple(watched)

    module.register_forward_pre_hook(watch)


def divide(
    plan: MemoryPlan,
    model: Chain,
    world: World,
    settings: Hyperparameters,
    ledger: DeviceLedger,
    make: MakeOptimizer,
    wire: torch.dtype,
) -> DividedModel:
    """Memory for `model`, which has none yet, and FSDP2 around it. Every rank calls it."""
    refuse(plan, model, world)
    segments, named = model.parameters_of(), dict(model.named_parameters())
    charge(model, segments, world.size, ledger)
    called, peers = Called(model), Peers(world)
    peers.shard(with_memory(model), called)
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

    reduced = ReducedGradients(cuts, peers, wire, ledger, optimizer.take, plan.optimizer.num_threads)
    gradients = SegmentGradients(trained, named, peers, reduced, optimizer.mark, ledger)

    def updated(segment: str) -> None:
        optimizer.wait([name for name in trained[segment] if cuts[name][world.rank].size])
        rows.up_to_date(segments[segment])

    for name, module in model.segments:
        tell_before(module, partial(updated, name))
        tell_when_left(module, partial(gradients.end, name))
    return DividedModel(called, optimizer, gathered, order_of(gradients), gathered.ready)


def charge(model: Chain, segments: Mapping[str, Sequence[str]], world_size: int, ledger: DeviceLedger) -> None:
    """This rank's rows, and room for the segments that are whole at once."""
    named = dict(model.named_parameters())
    own = {name: padded_rows_bytes(parameter, world_size) for name, parameter in named.items()}
    largest = max(sum(own[name] for name in names) for names in segments.values())
    ledger.charge("parameters", sum(own.values()) + NUM_GATHERED_SEGMENTS * world_size * largest)


def with_memory(model: Chain) -> Iterator[nn.Module]:
    """Each segment, with memory from the moment it is asked for, so that no rank ever holds the whole model: FSDP2
    keeps a rank's rows of it and lets it go."""
    for _, module in model.segments:
        if any(True for _ in module.parameters()):
            allocate(module)
            yield module


def own_rows(parameter: Any) -> Tensor:
    """This rank's part of a DTensor, flat: the memory itself."""
    with torch.no_grad():
        local: Tensor = parameter.to_local()
    return local.view(-1)


def order_of(gradients: SegmentGradients) -> MicroBatchOrder:
    """One micro-batch after the other, and after each what is left of its gradients."""

    def run(run: Run, phase: TimedPhase, micro_batches: Mapping[int, Batch], num_tokens: int) -> Passes:
        losses = []
        for number, batch in micro_batches.items():
            losses += yield from in_order(run, phase, {number: batch}, num_tokens)
            with phase(Phase.EXCHANGE):
                gradients.finish()
        return losses

    return guarded(run)
