"""Learning-rate schedules: pure functions of the step, in fp64, so that a resumed run continues the same curve."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

ScheduleName = Literal["Constant", "Linear", "Cosine"]


@dataclass(frozen=True, slots=True)
class LearningRate:
    """Linear warm-up to `peak`, then constant, or a decay that would reach `final_fraction` at step `num_steps`.

    Steps count from 0. The first warm-up step already has a rate above 0 (peak / warmup_steps), and so does the last
    step of the run.
    """

    name: ScheduleName
    peak: float
    num_steps: int
    """Optimizer steps of the whole run."""
    warmup_steps: int = 0
    """Steps until the peak is reached; at most num_steps."""
    final_fraction: float = 0.0
    """Share of the peak to which Linear and Cosine decay."""

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_steps <= self.num_steps:
            raise ValueError(
                f"warmup of {self.warmup_steps} steps does not fit a run of {self.num_steps} steps; set "
                f"spec.training.schedule.warmupSteps from 0 to {self.num_steps}"
            )

    def __call__(self, step: int) -> float:
        """Learning rate of the update that ends step `step`."""
        if step < self.warmup_steps:
            return self.peak * ((step + 1) / self.warmup_steps)
        return self.peak * self._decay(step)

    def _decay(self, step: int) -> float:
        """Share of the peak after the warm-up: 1 at its end."""
        if self.name == "Constant":
            return 1.0
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps))
        kept = 1.0 - progress if self.name == "Linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.final_fraction + (1.0 - self.final_fraction) * kept
