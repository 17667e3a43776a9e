"""Dynamic loss scaling for float16: multiplies the loss before backward, because gradients below 2^-25 underflow.

The rule is that of torch.amp.GradScaler and of DeepSpeed (Micikevicius et al. 2018, arXiv 1710.03740): the scale
doubles after a number of consecutive steps with finite gradients, and halves after a step with non-finite ones, whose
update is left out. The scale is always a power of two. Gradients arrive multiplied by it and are summed so, and the
update's factor divides it out again: both change exponents only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from spillway.errors import UserError

SCALE, NUM_FINITE = "loss_scale", "loss_scale_finite_steps"
"""Names in a checkpoint, next to the optimizer's scalars."""


@dataclass(frozen=True, slots=True)
class ScaleRule:
    """When the scale changes; `initial` and `minimum` are powers of two."""

    initial: float
    growth_interval: int
    """Consecutive steps with finite gradients after which it doubles."""
    minimum: float
    """The scale never falls below it: non-finite gradients there have another cause."""


@dataclass(slots=True)
class LossScaler:
    """The scale of the next step's loss; always 1 without a rule. The same on all ranks, because all see the same
    norm."""

    rule: ScaleRule | None = None
    value: float = field(init=False, default=1.0)
    num_finite: int = field(init=False, default=0)
    """Consecutive steps with finite gradients since the scale last changed."""

    def __post_init__(self) -> None:
        if self.rule is not None:
            self.value = self.rule.initial

    @property
    def is_least(self) -> bool:
        return self.rule is not None and self.value <= self.rule.minimum

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss that backward starts from."""
        return loss if self.rule is None else loss * self.value

    def grow(self) -> None:
        """Called after a step whose gradients were finite."""
        if self.rule is None:
            return
        self.num_finite += 1
        if self.num_finite == self.rule.growth_interval:
            self.value, self.num_finite = 2.0 * self.value, 0

    def back_off(self) -> None:
        """Called after a step whose gradients were not finite."""
        if self.rule is not None:
            self.value, self.num_finite = max(self.rule.minimum, self.value / 2.0), 0

    def scalars(self) -> dict[str, float]:
        return {} if self.rule is None else {SCALE: self.value, NUM_FINITE: float(self.num_finite)}

    def load(self, scalars: Mapping[str, float]) -> None:
        """Restores the scale from a checkpoint. An imported checkpoint has none: then the scale keeps its initial
        value."""
        if self.rule is not None and SCALE in scalars:
            self.value, self.num_finite = scalars[SCALE], int(scalars[NUM_FINITE])


@contextmanager
def float16_operations(scale: LossScaler) -> Iterator[None]:
    """Raises UserError for an operation that torch does not implement in float16 on this device."""
    try:
        yield
    except RuntimeError as error:
        if scale.rule is None or "not implemented for 'Half'" not in str(error):
            raise
        raise UserError(
            f"spec.model: torch cannot run an operation of the model in float16 on this device ({error}); in "
            "a new job, set spec.model.precision.compute: bfloat16, or let the model compute this operation in float32"
        ) from error
