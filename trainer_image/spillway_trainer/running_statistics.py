"""Running statistics of batch norms: written in training, read only in evaluation.

They are part of the run's state. Every micro-batch updates them once, and each segment updates its own in the order of
micro-batches, whatever the plan. A forward that runs again in backward (recompute) updates copies. Checkpoints hold
them beside the optimizer's states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

PREFIX = "buffer."
"""Prefix of their names among the states of a run."""
KINDS = ("running_mean", "running_var", "num_batches_tracked")


def norms(module: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    """Yields (prefix of the names of its buffers, norm) for each norm whose forward is torch's own, which reads no
    statistics in training."""
    for name, each in module.named_modules():
        if isinstance(each, _BatchNorm) and type(each).forward is _BatchNorm.forward and each.track_running_stats:
            yield f"{name}." if name else "", each


def buffers(module: nn.Module) -> dict[str, Tensor]:
    """Returns the statistics by their names within `module`."""
    return {f"{prefix}{kind}": getattr(norm, kind) for prefix, norm in norms(module) for kind in KINDS}


def allocate(module: nn.Module) -> None:
    """Allocates statistics that were created without memory (device meta), and gives them their initial values."""
    for _, norm in norms(module):
        if any(getattr(norm, kind).is_meta for kind in KINDS):
            for kind in KINDS:
                norm._buffers[kind] = torch.empty_like(getattr(norm, kind), device="cpu")
            norm.reset_running_stats()


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Inside, a forward of `module` updates copies of its statistics."""
    held = [(norm, kind, norm._buffers[kind]) for _, norm in norms(module) for kind in KINDS]
    try:
        for norm, kind, buffer in held:
            assert buffer is not None
            norm._buffers[kind] = buffer.clone()
        yield
    finally:
        for norm, kind, buffer in held:
            norm._buffers[kind] = buffer


def states(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the statistics as checkpoints hold them: averages in float32, whatever the compute type."""
    for name, buffer in buffers(module).items():
        yield PREFIX + name, buffer.float() if buffer.is_floating_point() else buffer


def shapes(module: nn.Module) -> Mapping[str, torch.Size]:
    return {PREFIX + name: buffer.shape for name, buffer in buffers(module).items()}


def load(module: nn.Module, name: str, value: Tensor) -> None:
    """Loads one of `states`."""
    module.get_buffer(name.removeprefix(PREFIX)).copy_(value)
