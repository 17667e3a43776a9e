"""Collects the gradients of one segment at a time, whole on every rank, and passes them to ReducedGradients once that
segment's backward is over.

Ranks agree on what they exchange: a gradient that only some ranks have counts as 0 on the others, and one that no rank
has is not exchanged. Segments end in the same order on every rank, between FSDP2's own exchanges: the last first, and
those whose inputs need no gradient when the whole backward is over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from spillway.errors import UserError

from ..models.chain import CPU, Chain
from ..tiers.device_ledger import DeviceLedger
from .deepspeed.layout import Layout
from .distributed import Peers
from .reduced_gradients import GradientsBehind, ReducedGradients
from .shards import DeviceTier, ShardedOptimizer

TakeGradient = Callable[[str, Tensor], None]
"""Receives the name of a parameter and its complete gradient as soon as autograd has it."""


class SegmentGradients:
    """Holds the gradients of the segment whose backward is running."""

    def __init__(
        self,
        segments: Mapping[str, Sequence[str]],
        likes: Mapping[str, Tensor],
        peers: Peers,
        reduced: ReducedGradients,
        mark: Callable[[str], None],
        ledger: DeviceLedger,
        device: torch.device = CPU,
    ) -> None:
        """`segments`: segment -> its trained parameters' names, in forward order. `likes`: tensors with the shape and
        type of each gradient. `mark` is called, on every rank, with each parameter that has a gradient on any rank.
        `device`: where gradients are."""
        self._segments, self._likes, self._device = segments, likes, device
        self._peers, self._reduced, self._mark, self._ledger = peers, reduced, mark, ledger
        self._to_come = [*segments]
        """Segments that this micro-batch's backward has not left yet."""
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, gradient: Tensor) -> None:
        """Takes one more part of a parameter's gradient, nearly always all of it; several parts are added in
        float32."""
        held = self._held.pop(name, None)
        if held is not None:  # a backward inside the backward (re-entrant checkpointing) brings several
            self._ledger.release("gradients", _nbytes(held))
            gradient = held.float() + gradient.float()
        self._ledger.charge("gradients", _nbytes(gradient))
        self._held[name] = gradient

    def end(self, segment: str) -> None:
        """Called when backward has left `segment`, and with it all segments after it."""
        while segment in self._to_come:
            self._exchange(self._to_come.pop())

    def finish(self) -> None:
        """Called when the micro-batch's backward is over, by every rank, after every micro-batch."""
        while self._to_come:
            self._exchange(self._to_come.pop())
        if self._held:
            raise UserError(
                f"spec.parallelism.strategy: parameter {next(iter(self._held))} is used by a segment (group of layers) "
                "before its own, so its gradient was complete only after its segment's had been exchanged; use Ddp"
            )
        self._reduced.finish()
        self._to_come = [*self._segments]

    def _exchange(self, segment: str) -> None:
        names = self._segments[segment]
        if not names:
            return
        found = self._peers.any([name in self._held for name in names])
        there = [name for name, is_there in zip(names, found, strict=True) if is_there]
        for name in there:
            self._mark(name)
        self._reduced.exchange({name: partial(self._taken, name) for name in there})

    def _taken(self, name: str) -> Tensor:
        gradient = self._held.pop(name, None)
        if gradient is None:
            like = self._likes[name]
            return torch.zeros(like.shape, dtype=like.dtype, device=self._device)
        self._ledger.release("gradients", _nbytes(gradient))
        return gradient


def exchanged_gradients(
    model: Chain,
    segments: Mapping[str, Sequence[str]],
    likes: Mapping[str, Tensor],
    cuts: Layout,
    optimizer: ShardedOptimizer,
    tiers: DeviceTier,
    wire: torch.dtype,
    num_threads: int,
) -> SegmentGradients:
    """Returns the gradients of `model`, a segment of which ends when backward leaves it. `optimizer` gets the sums of
    this rank's pieces (`cuts`); on a CUDA device, a segment is exchanged behind the backward of the next one.
    `segments`, `likes`: see SegmentGradients."""
    peers, ledger, device = optimizer.peers, tiers.ledger, tiers.device
    largest = max(sum(likes[name].numel() for name in names) for names in segments.values())
    made = partial(GradientsBehind, tiers.lanes) if device.type == "cuda" else ReducedGradients
    reduced = made(cuts, peers, wire, ledger, optimizer.take, num_threads, device, largest=largest)
    gradients = SegmentGradients(segments, likes, peers, reduced, optimizer.mark, ledger, device)
    for name, module in model.segments:
        tell_when_left(module, partial(gradients.end, name))
    return gradients


def pass_on_gradient(parameter: Parameter, name: str, take: TakeGradient) -> None:
    """Has `take` called with every gradient of `parameter`, which does not keep it."""

    def taken(parameter: Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        take(name, gradient)

    parameter.register_post_accumulate_grad_hook(taken)  # type: ignore[no-untyped-call]


class _Left(torch.autograd.Function):
    """Returns the inputs unchanged. Its backward runs when the backward of everything computed from them is over."""

    @staticmethod
    def forward(ctx: Any, left: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.left = left
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.left()
        return (None, *gradients)


def tell_when_left(module: nn.Module, left: Callable[[], None]) -> None:
    """Has `left` called whenever a backward has left `module`, before FSDP2 frees its parameters. It is never called
    for a module whose inputs need no gradient."""

    def watch(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        places = [place for place, one in enumerate(inputs) if isinstance(one, Tensor) and one.requires_grad]
        if not (places and torch.is_grad_enabled()):
            return inputs
        watched = list(inputs)
        for place, one in zip(places, _Left.apply(left, *(inputs[place] for place in places)), strict=True):
            watched[place] = one
        return tuple(watched)

    module.register_forward_pre_hook(watch)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
