"""What a step measured (or was predicted to), and every metric name, once.

The exporter, the dashboards, run.jsonl and the report all take their names from here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Phase(StrEnum):
    """Parts of a step whose seconds add up to the step; `wait` is time spent waiting for copies and I/O."""

    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    WAIT = "wait"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One optimizer step of one rank."""

    step: int
    """steps completed, counting this one"""
    loss: float
    """mean over the step's unmasked tokens, natural logarithm"""
    learning_rate: float
    gradient_norm: float
    clip_factor: float
    tokens: int
    """unmasked target tokens of this step, over all ranks"""
    step_seconds: float
    phase_seconds: dict[str, float] = field(default_factory=dict)
    tier_bytes: dict[str, int] = field(default_factory=dict)
    """bytes held per tier at the end of the step"""
    tier_peak_bytes: dict[str, int] = field(default_factory=dict)
    """highest bytes held per tier during the step"""
    moved_bytes: dict[str, int] = field(default_factory=dict)
    """bytes per link in this step: h2d, d2h, nvme_read, nvme_write"""
    skipped: bool = False
    """True when the gradients were not finite and the update was left out (nonFinite: SkipStep)"""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds if self.step_seconds > 0 else 0.0


PREFIX = "spillway_"


@dataclass(frozen=True, slots=True)
class Metric:
    """One exported series."""

    name: str
    kind: str
    """gauge or counter"""
    help: str
    labels: tuple[str, ...] = ()


JOB_LABEL = "training_job"
RANK_LABEL = "rank"

STEP = Metric(PREFIX + "step", "gauge", "Optimizer steps completed.")
STEPS_PLANNED = Metric(PREFIX + "steps_planned", "gauge", "Optimizer steps that the job asks for.")
LAST_STEP_TIMESTAMP = Metric(PREFIX + "last_step_timestamp_seconds", "gauge", "Unix time of the last completed step.")
LOSS = Metric(PREFIX + "loss", "gauge", "Training loss of the last step, mean per token.")
EVALUATION_LOSS = Metric(PREFIX + "evaluation_loss", "gauge", "Loss of the last evaluation, mean per token.")
GRADIENT_NORM = Metric(PREFIX + "gradient_norm", "gauge", "Gradient norm of the last step, before clipping.")
LEARNING_RATE = Metric(PREFIX + "learning_rate", "gauge", "Learning rate of the last step.")
TOKENS = Metric(PREFIX + "tokens_total", "counter", "Target tokens trained on, since the process started.")
NON_FINITE = Metric(PREFIX + "nonfinite_total", "counter", "Steps whose gradients were not finite.")
PHASE_SECONDS = Metric(PREFIX + "phase_seconds_total", "counter", "Seconds by phase of the step.", ("phase",))
TIER_BYTES = Metric(PREFIX + "tier_bytes", "gauge", "Bytes held per memory tier.", (RANK_LABEL, "tier"))
TIER_PEAK_BYTES = Metric(PREFIX + "tier_peak_bytes", "gauge", "Highest bytes held per tier.", (RANK_LABEL, "tier"))
TIER_BUDGET_BYTES = Metric(PREFIX + "tier_budget_bytes", "gauge", "Bytes allowed per tier.", (RANK_LABEL, "tier"))
PREDICTED_TIER_BYTES = Metric(PREFIX + "predicted_tier_bytes", "gauge", "Planned peak per tier.", (RANK_LABEL, "tier"))
PREDICTED_STEP_SECONDS = Metric(PREFIX + "predicted_step_seconds", "gauge", "Planned seconds per step.")
MOVED_BYTES = Metric(PREFIX + "moved_bytes_total", "counter", "Bytes moved by link.", (RANK_LABEL, "link"))
IO_BACKEND = Metric(PREFIX + "io_backend_info", "gauge", "The I/O engine in use.", ("backend",))
CHECKPOINT_TIMESTAMP = Metric(
    PREFIX + "checkpoint_last_success_timestamp_seconds", "gauge", "Unix time of the last committed checkpoint."
)
CHECKPOINT_STEP = Metric(PREFIX + "checkpoint_step", "gauge", "Step of the last committed checkpoint.")

ALL: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
