"""WeightStationary: runs a step segment by segment; all micro-batches pass a segment while it is on the device.

    forward    segment 0: micro-batches 0..M-1 | segment 1: 0..M-1 | ...
    turn       last segment: forward and backward of 0, of 1, ... of M-1
    backward   ... | segment 1: 0..M-1 | segment 0: 0..M-1

Parameters are loaded twice per step (the last segment's once), however many micro-batches there are; one micro-batch
after the other would load them twice for each. In exchange, the outputs of segments are held for all micro-batches at
once.

The graph is cut between segments: a segment's inputs come out of an Entrance, where backward leaves their gradients;
these then go into the edges of the outputs that the segment before returned. Each parameter gets its gradients in the
order of the micro-batches, each from the same operations as in a whole graph, so every bit is the same.

Between segments, another model with the same frozen parameters may run: it finds in its slot the segment that this one
has just left (together.py).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from spillway.metrics import Phase

from ..corpus.data import Batch
from ..models.chain import Chain, as_carried
from ..saved_tensors import ForwardVisit, SavedTensors
from ..trainer import Passes, Run, TimedPhase, read
from .boundaries import Boundaries, Boundary


@dataclass(slots=True)
class Entrance:
    """The place where one segment's graph begins, for one micro-batch: backward leaves the gradients of its inputs
    here."""

    gradients: tuple[Tensor | None, ...] = ()
    reloads: list[Callable[[], None]] = field(default_factory=list)
    """One per boundary: submits its reload for backward."""

    def open(self, boundaries: Sequence[Boundary]) -> tuple[Tensor, ...]:
        """The inputs, connected to this entrance where they take a gradient."""
        values = [boundary.tensor() for boundary in boundaries]
        takes = [boundary.requires_grad for boundary in boundaries]
        self.gradients = (None,) * len(values)
        if not (any(takes) and torch.is_grad_enabled()):
            return tuple(values)
        anchor = torch.empty(0, requires_grad=True)  # a Function's outputs take gradients if one of its inputs does
        passed = _Enter.apply(self, takes, anchor, *values)
        return tuple(passed)

    def leave(self, boundaries: Sequence[Boundary]) -> None:
        """Called when the segment's forward is over."""
        self.reloads = [boundary.leave() for boundary in boundaries]

    def prefetch(self) -> None:
        """Submits the reloads, because backward comes here soon."""
        for reload in self.reloads:
            reload()


class _Enter(torch.autograd.Function):
    """Identity whose backward ends here. Not a leaf, because a leaf's accumulated gradient may get another memory
    layout, for which kernels may give other bits. No segment changes its input in place (segments.writing_nothing)."""

    @staticmethod
    def forward(ctx: Any, entrance: Entrance, takes: Sequence[bool], _: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.entrance = entrance
        ctx.set_materialize_grads(False)
        outputs = tuple(value.detach() for value in values)
        ctx.mark_non_differentiable(*(output for output, takes_it in zip(outputs, takes, strict=True) if not takes_it))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.entrance.gradients = gradients
        return (None,) * (3 + len(gradients))


@dataclass(slots=True)
class Passage:
    """One segment's forward for one micro-batch, until its backward."""

    entrance: Entrance
    edges: list[GradientEdge | None]
    """Edges of its outputs; None where no gradient flows."""
    visit: weakref.ref[ForwardVisit] | None

    def backward(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Takes the gradients of the outputs, returns those of the inputs."""
        flows = [
            (edge, gradient)
            for edge, gradient in zip(self.edges, gradients, strict=True)
            if edge is not None and gradient is not None
        ]
        if flows:
            torch.autograd.backward([edge for edge, _ in flows], [gradient for _, gradient in flows])
        return self.entrance.gradients


class WeightStationary:
    """A MicroBatchOrder over a Chain whose segments run under `hook`."""

    def __init__(self, hook: SavedTensors, boundaries: Boundaries) -> None:
        self._hook = hook
        self._boundaries = boundaries

    def __call__(self, run: Run, phase: TimedPhase, micro_batches: Mapping[int, Batch], num_tokens: int) -> Passes:
        assert isinstance(run.model, Chain)
        step = StepInFlight(run, run.model, phase, micro_batches, num_tokens, self._hook, self._boundaries)
        *inner, last = run.model.segments
        for segment, module in inner:
            step.forward(segment, module)
            yield
        losses = step.turn(*last)
        for _ in step.backward():
            yield
        with phase(Phase.BACKWARD):
            return read(losses)


class StepInFlight:
    """One step in progress: what each micro-batch carries now, and the passages behind it."""

    def __init__(
        self,
        run: Run,
        chain: Chain,
        phase: TimedPhase,
        micro_batches: Mapping[int, Batch],
        num_tokens: int,
        hook: SavedTensors,
        boundaries: Boundaries,
    ) -> None:
        self._run, self._chain, self._phase = run, chain, phase
        self._micro_batches, self._num_tokens = micro_batches, num_tokens
        self._hook, self._boundaries = hook, boundaries
        self._following = dict(pairwise(micro_batches))
        self._carried = {number: boundaries.given(batch.tokens_BT) for number, batch in micro_batches.items()}
        self._passages: list[dict[int, Passage]] = []
        """Of the segments that have run forward, by micro-batch."""
        self._gradients: dict[int, tuple[Tensor | None, ...]] = {}
        """By micro-batch: gradients of the outputs of the next segment to run backward."""

    def forward(self, segment: str, module: nn.Module) -> None:
        """Runs all micro-batches through one segment."""
        passages = {}
        for number in self._micro_batches:
            with self._phase(Phase.FORWARD):
                entrance, outputs = self._enter(segment, module, number)
                edges = [get_gradient_edge(output) if output.requires_grad else None for output in outputs]
                passages[number] = Passage(entrance, edges, self._hook.last_visit)
                self._carried[number] = self._boundaries.hold(segment, outputs)
                del outputs
        self._passages.append(passages)

    def turn(self, segment: str, module: nn.Module) -> list[Tensor]:
        """Runs forward and backward of the last segment, one micro-batch after the other: what it saved is needed right
        away. Returns the losses."""
        losses = list[Tensor]()
        ahead = self._chain_visits()
        for number in self._micro_batches:
            with self._phase(Phase.FORWARD):
                entrance, (loss,) = self._enter(segment, module, number)
            with self._phase(Phase.BACKWARD):
                _lead(self._hook.last_visit, None if number in self._following else ahead)
                self._run.techniques.start_backward()
                self._run.loss_scale.scaled(loss).backward()  # type: ignore[no-untyped-call]
                losses.append(loss.detach())
            del loss
            self._gradients[number] = entrance.gradients
        return losses

    def backward(self) -> Iterator[None]:
        """Runs backward of the other segments, in reverse; yields before each."""
        behind = deque(item for passages in reversed(self._passages) for item in passages.items())
        self._passages.clear()
        first = next(iter(self._micro_batches))
        while behind:
            number, passage = behind.popleft()
            if number == first:
                yield
            with self._phase(Phase.BACKWARD):
                passage.entrance.prefetch()
                if behind:
                    behind[0][1].entrance.prefetch()
                self._gradients[number] = passage.backward(self._gradients[number])

    def _enter(self, segment: str, module: nn.Module, number: int) -> tuple[Entrance, tuple[Tensor, ...]]:
        """Runs the forward of one segment for one micro-batch; meanwhile the boundary of the next micro-batch is
        reloaded."""
        self._run.position.micro_batch = number
        batch, boundaries = self._micro_batches[number], self._carried.pop(number)
        entrance = Entrance()
        inputs = entrance.open(boundaries)
        for boundary in self._carried.get(self._following.get(number, number), ()):
            boundary.prefetch()
        arguments = self._chain.arguments(segment, *batch.given(self._num_tokens))
        outputs = as_carried(module(*inputs, *arguments))
        del inputs
        entrance.leave(boundaries)
        return entrance, outputs

    def _chain_visits(self) -> weakref.ref[ForwardVisit] | None:
        """Tells every visit which one backward comes to after it; returns the one after the turn."""
        order = [
            passage.visit
            for passages in reversed(self._passages)
            for passage in passages.values()
            if passage.visit is not None
        ]
        for visit, following in pairwise(order):
            _lead(visit, following)
        return order[0] if order else None


def _lead(visit: weakref.ref[ForwardVisit] | None, following: weakref.ref[ForwardVisit] | None) -> None:
    found = visit() if visit is not None else None
    if found is not None:
        found.following = following
