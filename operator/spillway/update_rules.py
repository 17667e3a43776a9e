"""The supported optimizers: their states per parameter, their fields in the spec, the bytes that an update moves.

    AdamW         Loshchilov & Hutter 2019: weight decay shrinks the parameter, separately from the gradient
    Adam          torch.optim.Adam: weight decay is added to the gradient (L2)
    SgdMomentum   torch.optim.SGD with momentum, without dampening: weight decay is added to the gradient (L2)
    Lion          Chen et al. 2023 (arXiv 2302.06675): steps by the sign of a mean, weight decay as in AdamW

The arithmetic, operation by operation, is spillway_trainer/kernels/reference.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

STATE_BYTES = 4
"""Bytes of a parameter's master or gradient; both are float32."""
REST_BITS = 17
"""Bits of a float32 master that its rounded bfloat16 lacks: the lower half, and whether rounding carried."""
MASTER = "master"
"""Kind of the state that holds a parameter's float32 values."""
BLOCK_VALUES = 256
"""Values that share a scale in int8 moments; blocks begin at a parameter's first value, the last one may be shorter."""
SCALE_BYTES = 4
"""Bytes of a block's scale."""
RULE_FIELDS = ("betas", "eps", "momentum")
"""Fields of spec.training.optimizer that not every rule has."""


class MomentType(StrEnum):
    """Type in which moments are stored between updates: spec.training.optimizer.moments. It changes results, so the
    user declares it; no plan chooses it."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    """One byte per value and one scale per block; values are quantized by a fixed map of 256 numbers."""

    @property
    def bytes_per_value(self) -> float:
        """Bytes per value in a moment of many values. The last block of a parameter may be short but has a whole scale;
        `bytes_of` counts it exactly."""
        return {
            MomentType.FLOAT32: 4.0,
            MomentType.BFLOAT16: 2.0,
            MomentType.INT8: 1.0 + SCALE_BYTES / BLOCK_VALUES,
        }[self]

    @property
    def scale_bytes(self) -> int:
        """The most bytes by which a parameter's moment may exceed `bytes_per_value` for each of its values."""
        return SCALE_BYTES if self is MomentType.INT8 else 0

    @property
    def most_kept(self) -> float:
        """The largest factor with which a moment of this type still shrinks when it is multiplied by it in every step.
        With a factor nearer to 1, a step is less than half a unit of the type (int8: of the finest step of a first
        moment), and rounding undoes it."""
        return {MomentType.FLOAT32: 1.0, MomentType.BFLOAT16: 1.0 - 2**-8, MomentType.INT8: 1.0 - 2**-7}[self]

    def bytes_of(self, num_values: int) -> int:
        """Bytes of one moment of `num_values` values: of a parameter, or of a part of it that begins at a block."""
        if self is MomentType.INT8:
            return num_values + SCALE_BYTES * -(-num_values // BLOCK_VALUES)
        return int(self.bytes_per_value) * num_values


class UpdateRule(StrEnum):
    """How a gradient changes a parameter; the names of spec.training.optimizer."""

    ADAMW = "AdamW"
    ADAM = "Adam"
    SGD_MOMENTUM = "SgdMomentum"
    LION = "Lion"

    @property
    def moments(self) -> tuple[str, ...]:
        """Kinds of states other than the master, in the order in which all functions take them."""
        return _FACTS[self].moments

    @property
    def state_kinds(self) -> tuple[str, ...]:
        """Kinds of states; a checkpoint has one tensor per kind and parameter, named <kind>.<parameter>."""
        return (MASTER, *self.moments)

    @property
    def defaults(self) -> Mapping[str, float | tuple[float, float]]:
        """Defaults of spec.training.optimizer: weightDecay, and the fields of this rule."""
        return _FACTS[self].defaults

    @property
    def corrects_bias(self) -> bool:
        """Whether means are corrected for having begun at 0, so that results depend on the number of updates."""
        return self in (UpdateRule.ADAMW, UpdateRule.ADAM)

    def update_bytes(self, moments: MomentType) -> float:
        """Bytes that the update of one parameter moves: it reads gradient and states (with a float32 master), and
        writes the states."""
        return STATE_BYTES + 2 * self.states_bytes(True, moments)

    @cache
    def states_bytes(self, has_master: bool, moments: MomentType) -> float:
        """Bytes of the states of one parameter. Without a master of its own, the float32 parameter serves as the
        master."""
        return STATE_BYTES * has_master + moments.bytes_per_value * len(self.moments)


@dataclass(frozen=True, slots=True)
class _Facts:
    moments: tuple[str, ...]
    defaults: Mapping[str, float | tuple[float, float]]


_TWO_MOMENTS = ("exp_avg", "exp_avg_sq")
UNSIGNED_MOMENTS = ("exp_avg_sq",)
"""Moments that are never negative."""
_FACTS = {
    UpdateRule.ADAMW: _Facts(_TWO_MOMENTS, {"weightDecay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}),
    UpdateRule.ADAM: _Facts(_TWO_MOMENTS, {"weightDecay": 0.0, "betas": (0.9, 0.95), "eps": 1e-8}),
    UpdateRule.SGD_MOMENTUM: _Facts(("momentum_buffer",), {"weightDecay": 0.0, "momentum": 0.9}),
    UpdateRule.LION: _Facts(("exp_avg",), {"weightDecay": 0.1, "betas": (0.9, 0.99)}),
}
