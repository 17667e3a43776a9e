"""Dynamic loss scaling for float16: multiplies the loss before backward, because gradients below 2^-25 underflow.

The rule is that of torch.amp.GradScaler, and DeepSpeed's (Micikevicius et al. 2018, arXiv 1710.03740): the scale
doubles after so many steps in a row whose gradients were finite, and halves after one whose gradients were not, which
is left out. It is always a power of two. Gradients arrive multiplied by it and are summed so, and the update's factor
takes it out again: that changes exponents only.
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
    """The scale of the next step's loss; 1 for ever without a rule. The same on all ranks, since all see one norm."""

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
        """What backward starts from."""
        return loss if self.rule is None else loss * self.value

    def grow(self) -> None:
        """A step's gradients were finite."""
        if self.rule is None:
            return
        self.num_finite += 1
        if self.num_finite == self.rule.growth_interval:
            self.value, self.num_finite = 2.0 * self.value, 0

    def back_off(self) -> None:
        """A step's gradients were not finite."""
        if self.rule is not None:
            self.value, self.num_finite = max(self.rule.minimum, self.value / 2.0), 0

    def scalars(self) -> dict[str, float]:
        return {} if self.rule is None else {SCALE: self.value, NUM_FINITE: float(self.num_finite)}

    def load(self, scalars: Mapping[str, float]) -> None:
        """A checkpoint that was imported has none: the scale begins anew."""
        if self.rule is not None and SCALE in scalars:
            self.value, self.num_finite = scalars[SCALE], int(scalars[NUM_FINITE])


@contextmanager
def float16_operations(scale: LossScaler) -> Iterator[None]:
    """Raises UserError for an operation that torch has not in float16 on this device."""
    try:
        yield
    except RuntimeError as error:
        if scale.rule is None or "not implemented for 'Half'" not in str(error):
            raise
        raise UserError(
            f"spec.model: torch cannot run an operation of the model in float16 on this device ({error}); set "
            "spec.model.precision.compute: bfloat16, or let the model compute this operation in float32"
        ) from error
