"""Selective recomputation: which saved tensors cheap operators can recompute from the others.

A norm's output is recomputed from its input, an activation function's likewise, and a product from its factors: a few
passes over memory replace holding a tensor or a trip to the disk. This file says which operators qualify, what counts
as cheap, and how many bytes to rebuild; `rebuilding.py` sees the operators run, and runs them again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

Operator = Any
"""torch's OpOverload: it has no useful type."""

MAX_KERNELS = 8
"""Kernels that a rebuild may launch: as many as an activation function written in single operators (GELU with tanh)."""
MAX_TRAFFIC = 24
"""Bytes read and written per rebuilt byte: three per kernel, like a product of two tensors."""
MAX_OPERAND = 4
"""Bytes of one operand per rebuilt byte. The limit excludes a slice of a much larger tensor, all of which would be
held."""


class TensorLayout(NamedTuple):
    """How a tensor is laid out in its storage; size, stride and offset in elements."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorLayout:
        return cls(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one rebuild, including everything that must be rebuilt first."""

    num_kernels: int
    traffic_bytes: int
    """Bytes read and written."""
    largest_operand_bytes: int


def total(out_bytes: int, operand_bytes: list[int], before: list[Cost]) -> Cost:
    """The cost of one operator's result, including the costs `before` of its operands."""
    return Cost(
        1 + sum(cost.num_kernels for cost in before),
        out_bytes + sum(operand_bytes) + sum(cost.traffic_bytes for cost in before),
        max([*operand_bytes, *(cost.largest_operand_bytes for cost in before)], default=0),
    )


def is_cheap(cost: Cost, nbytes: int) -> bool:
    """Whether it is better to rebuild `nbytes` at this cost than to move them."""
    return (
        cost.num_kernels <= MAX_KERNELS
        and cost.traffic_bytes <= MAX_TRAFFIC * nbytes
        and cost.largest_operand_bytes <= MAX_OPERAND * nbytes
    )


class Forward(NamedTuple):
    """Bytes that a forward saved, without weights and small tensors."""

    held_bytes: int
    """Bytes kept or moved."""
    rebuilt_bytes: int
    rebuildable_bytes: int | None
    """Bytes that can be rebuilt, including `rebuilt_bytes`; None: not examined."""

    @property
    def saved_bytes(self) -> int:
        return self.held_bytes + self.rebuilt_bytes


class Wanted(NamedTuple):
    """Bytes that the next forward should rebuild and move; None: as many as possible."""

    rebuilt_bytes: int | None
    moved_bytes: int | None


def wanted(last: Forward | None, kept_bytes: int) -> Wanted:
    """What to rebuild and move so that at most `kept_bytes` of a forward like `last` stay: rebuilds come first, because
    they cost least. With `last` None nothing is known yet, and everything goes."""
    if last is None:
        return Wanted(None, None)
    excess_bytes = max(0, last.saved_bytes - kept_bytes)
    if last.rebuildable_bytes is None:
        return Wanted(excess_bytes, excess_bytes)
    return Wanted(min(excess_bytes, last.rebuildable_bytes), max(0, excess_bytes - last.rebuildable_bytes))


_ATEN = torch.ops.aten
_POINTWISE = (
    "abs", "neg", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tanh", "sigmoid", "erf",
    "relu", "silu", "gelu", "mish", "elu", "leaky_relu", "hardtanh", "hardswish", "hardsigmoid", "softplus", "clamp",
    "clone", "_to_copy",
)  # fmt: skip
_WITH_OVERLOADS = {
    "add": ("Tensor", "Scalar"),
    "sub": ("Tensor", "Scalar"),
    "mul": ("Tensor", "Scalar"),
    "div": ("Tensor", "Scalar"),
    "pow": ("Tensor_Scalar",),
    "masked_fill": ("Scalar",),
    "where": ("self",),
}
_FIRST_OF_SEVERAL = ("native_layer_norm", "native_group_norm", "_fused_rms_norm")


def _replayable() -> dict[Operator, int | None]:
    found: dict[Operator, int | None] = {}
    for name in (*_POINTWISE, "cat", "stack", "_softmax", "_log_softmax"):
        found[getattr(_ATEN, name).default] = None
    for name, overloads in _WITH_OVERLOADS.items():
        found |= {getattr(getattr(_ATEN, name), overload): None for overload in overloads}
    return found | {getattr(_ATEN, name).default: 0 for name in _FIRST_OF_SEVERAL}


REPLAYABLE = _replayable()
"""Operators that give the same bits for the same inputs and pass over memory only a few times, each with the index of
the result for which this holds (None: its only result)."""
