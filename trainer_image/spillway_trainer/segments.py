"""The wrapper around each segment's forward, and the random state it forks.

Every run uses it, with or without a technique, because the random state is forked per (seed, step, micro-batch,
segment): dropout then draws the same bits whether a block runs once, runs again for recompute, or runs in another
order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from spillway.errors import UserError

from . import running_statistics
from .seeds import fork_seed
from .tiers.cuda import generator

Block = Callable[..., Tensor]


class SegmentHook(Protocol):
    """What a technique does around a segment's forward; SavedTensors implements it."""

    def run(self, segment: str, block: Block, *inputs: object) -> Tensor:
        """Call `block(*inputs)`, now and possibly again during backward, and return the result of the first call."""


class Residence(Protocol):
    """Where parameters are. The classes that are a ParameterSource are also a Residence."""

    def pinned(self, segment: str) -> AbstractContextManager[None]:
        """Inside, the parameters of `segment` are on the device."""


Around = Callable[[], AbstractContextManager[None]]
Ready = Callable[[str], None]
"""Called with a segment's name each time its forward runs, before the forward reads a parameter."""


def device_of(inputs: Sequence[object]) -> torch.device:
    """Returns where a forward with these inputs runs."""
    return next((value.device for value in inputs if isinstance(value, Tensor)), CPU)


CPU = torch.device("cpu")


@dataclass(slots=True)
class Position:
    """How far the run has come; part of every random seed."""

    seed: int
    step: int = 0
    micro_batch: int = 0


def wrap_segments(
    segments: list[tuple[str, nn.Module]],
    position: Position,
    hook: SegmentHook | None,
    *,
    autocast: torch.dtype | None = None,
    residence: Residence | None = None,
    ready: Ready | None = None,
) -> None:
    """Route every segment's forward through the random fork and, if there is one, the technique's hook.

    `hook` None is `memory.mode: Disabled`: only the fork, and no saved-tensor hooks. `autocast` is entered for each
    segment, never around the step, because its cache of casts evicts nothing until the outermost autocast ends. `ready`
    returns when the segment's parameters may be read: an update of the last step may not have arrived yet.
    """
    for index, (name, module) in enumerate(segments):
        forward = _inside(module.forward, name, autocast, residence, ready)
        again = partial(running_statistics.untouched, module) if running_statistics.buffers(module) else nullcontext
        module.forward = _watched(name, module, _wrapped(name, index, forward, position, hook, again))


@contextmanager
def writing_nothing(segment: str, module: nn.Module, inputs: Sequence[object]) -> Iterator[None]:
    """Raises UserError if the forward that runs inside changes a buffer of `module`, or an input, in place.

    Recompute runs a forward twice, the second time from the inputs of the first; evaluation runs it between steps; and
    checkpoints hold no buffers. So state that a forward writes would depend on the plan and on restarts. Only the
    running statistics of batch norms may be written, because running_statistics.py takes care of them.
    """
    known = running_statistics.buffers(module)
    buffers = {name: (buffer, buffer._version) for name, buffer in module.named_buffers() if name not in known}
    given = [(value, value._version) for value in inputs if isinstance(value, Tensor)]
    yield
    now = dict(module.named_buffers())
    for name, (buffer, version) in buffers.items():
        if now.get(name) is not buffer or buffer._version != version:
            raise UserError(
                f"spec.model: the forward of segment {segment} (a group of layers) writes its buffer {name}, but "
                "recomputation would write the buffer twice, and checkpoints do not store buffers. Let forward only "
                "read buffers (the only "
                "exception: the running statistics of torch's BatchNorm1d to BatchNorm3d)"
            )
    if any(value._version != version for value, version in given):
        raise UserError(
            f"spec.model: the forward of segment {segment} (a group of layers) changes its input in place, but "
            "recomputation needs that input again; create a new tensor (x * 2 instead of x.mul_(2))"
        )


def _watched(name: str, module: nn.Module, forward: Block) -> Block:
    """Returns `forward` with its first call that trains checked by `writing_nothing`."""
    is_new = True

    def run(*inputs: object) -> Tensor:
        nonlocal is_new
        if not (is_new and torch.is_grad_enabled()):
            return forward(*inputs)
        is_new = False
        with writing_nothing(name, module, inputs):
            return forward(*inputs)

    return run


def _inside(
    forward: Block, name: str, autocast: torch.dtype | None, residence: Residence | None, ready: Ready | None
) -> Block:
    """Returns `forward` with its parameters up to date and on the device, and under its own autocast, each time it
    runs."""
    if autocast is None and residence is None and ready is None:
        return forward

    def block(*inputs: object) -> Tensor:
        if ready is not None:
            ready(name)
        pinned = residence.pinned(name) if residence is not None else nullcontext()
        casting = torch.autocast(device_of(inputs).type, dtype=autocast) if autocast is not None else nullcontext()
        with pinned, casting:
            return forward(*inputs)

    return block


def _wrapped(
    name: str, index: int, forward: Block, position: Position, hook: SegmentHook | None, again: Around
) -> Block:
    """Returns `forward` with its random fork and under `hook`. `again` is entered around every run after the first."""

    def run(*inputs: object) -> Tensor:
        # The position is read now, not when a recompute calls the block again: by then it may have changed.
        seed = fork_seed(position.seed, position.step, position.micro_batch, index)
        is_first = True

        def block(*block_inputs: object) -> Tensor:
            nonlocal is_first
            around, is_first = nullcontext() if is_first else again(), False
            generator(device_of(block_inputs)).manual_seed(seed)
            with around:
                return forward(*block_inputs)

        return block(*inputs) if hook is None else hook.run(name, block, *inputs)

    return run
