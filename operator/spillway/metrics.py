"""StepMetrics, measured or predicted, and every metric name.

The exporter, the dashboards, run.jsonl and the report all take their names from here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum


class Phase(StrEnum):
    """Parts of a step whose seconds add up to the step; `wait` is time spent waiting for copies and I/O, `exchange` for
    the other ranks and their gradients."""

    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    EXCHANGE = "exchange"
    OPTIMIZER = "optimizer"
    WAIT = "wait"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One optimizer step of one rank."""

    step: int
    """Steps completed, including this one."""
    loss: float
    """Mean over the step's unmasked tokens, natural logarithm."""
    learning_rate: float
    gradient_norm: float
    clip_factor: float
    tokens: int
    """Unmasked target tokens of this step, over all ranks."""
    step_seconds: float
    phase_seconds: dict[str, float] = field(default_factory=dict)
    tier_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes held per tier at the end of the step."""
    tier_peak_bytes: dict[str, int] = field(default_factory=dict)
    """Peak bytes per tier during the step; on a Cuda device those of torch's allocator."""
    allocator_retries: int = 0
    """How often that allocator found no memory, freed its cache and tried again; the device waits meanwhile."""
    moved_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes per link in this step: h2d, d2h, nvme_read, nvme_write; cpu: bytes touched by CPU updates."""
    lane_seconds: dict[str, float] = field(default_factory=dict)
    """Busy seconds of each of those; they overlap one another and the phases."""
    cpu_seconds: float = 0.0
    """CPU seconds of the rank's process in this step, all threads together."""
    skipped: bool = False
    """True when the gradients were not finite and the update was left out (nonFinite: SkipStep, or `overflowed`)"""
    loss_scale: float | None = None
    """Factor by which the loss of this step was multiplied; None without loss scaling."""

    @property
    def overflowed(self) -> bool:
        """Left out because the loss scale was too large for float16: the loss itself was finite."""
        return self.skipped and self.loss_scale is not None and math.isfinite(self.loss)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds if self.step_seconds > 0 else 0.0


PREFIX = "spillway_"


@dataclass(frozen=True, slots=True)
class Metric:
    """One exported series."""

    name: str
    kind: str
    """Gauge or counter."""
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
LOSS_SCALE = Metric(
    PREFIX + "loss_scale", "gauge", "What the loss of the last step was multiplied by: 1, but in float16."
)
LOSS_SCALE_OVERFLOWS = Metric(
    PREFIX + "loss_scale_overflows_total",
    "counter",
    "Of the steps whose gradients were not finite, those with a finite loss: the scale was too large for float16.",
)
PHASE_SECONDS = Metric(PREFIX + "phase_seconds_total", "counter", "Seconds by phase of the step.", ("phase",))
TIER_BYTES = Metric(PREFIX + "tier_bytes", "gauge", "Bytes held per memory tier.", (RANK_LABEL, "tier"))
TIER_PEAK_BYTES = Metric(PREFIX + "tier_peak_bytes", "gauge", "Highest bytes held per tier.", (RANK_LABEL, "tier"))
ALLOCATOR_RETRIES = Metric(
    PREFIX + "allocator_retries_total",
    "counter",
    "Times that the allocator of a Cuda device found no room, gave back what it kept and tried again.",
    (RANK_LABEL,),
)
TIER_BUDGET_BYTES = Metric(PREFIX + "tier_budget_bytes", "gauge", "Bytes allowed per tier.", (RANK_LABEL, "tier"))
PREDICTED_TIER_BYTES = Metric(PREFIX + "predicted_tier_bytes", "gauge", "Planned peak per tier.", (RANK_LABEL, "tier"))
PREDICTED_STEP_SECONDS = Metric(PREFIX + "predicted_step_seconds", "gauge", "Planned seconds per step.")
MOVED_BYTES = Metric(PREFIX + "moved_bytes_total", "counter", "Bytes moved by link.", (RANK_LABEL, "link"))
IO_BACKEND = Metric(PREFIX + "io_backend_info", "gauge", "The I/O engine in use.", ("backend",))
SPILL_FILE_BYTES = Metric(
    PREFIX + "spill_file_bytes", "gauge", "Bytes of the spill files, which a live correction lowers.", (RANK_LABEL,)
)
SPILL_FAULTS = Metric(
    PREFIX + "spill_faults_total",
    "counter",
    "Faults of spill devices that the run survived: write_failed, device_retired, device_slow, redirected.",
    (RANK_LABEL, "kind"),
)
CHECKPOINT_TIMESTAMP = Metric(
    PREFIX + "checkpoint_last_success_timestamp_seconds", "gauge", "Unix time of the last committed checkpoint."
)
CHECKPOINT_STEP = Metric(PREFIX + "checkpoint_step", "gauge", "Step of the last committed checkpoint.")
RANK_UP = Metric(PREFIX + "rank_up", "gauge", "1 when the rank answered its launcher in this scrape.", (RANK_LABEL,))
"""The launcher's own series; every other series is a rank's."""

ALL: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))

# --- of a sweep's members: exported by a sweep only, so they are not in ALL -------------------------------------------

MEMBER_LABEL = "member"
MEMBER_PREFIX = PREFIX + "member_"
MEMBER_STEP = Metric(MEMBER_PREFIX + "step", "gauge", "Optimizer steps that a member completed.", (MEMBER_LABEL,))
MEMBER_STEPS_PLANNED = Metric(
    MEMBER_PREFIX + "steps_planned", "gauge", "Steps of a member that no round stops.", (MEMBER_LABEL,)
)
MEMBER_LOSS = Metric(
    MEMBER_PREFIX + "loss", "gauge", "Training loss of a member's last step, mean per token.", (MEMBER_LABEL,)
)
MEMBER_OBJECTIVE = Metric(
    MEMBER_PREFIX + "objective", "gauge", "A member's newest value of spec.objective.metric.", (MEMBER_LABEL,)
)
MEMBER_STATE = Metric(
    MEMBER_PREFIX + "state_info",
    "gauge",
    "State of a member: Running, Parked, Stopped, Complete or Failed.",
    (MEMBER_LABEL, "state"),
)
MEMBER_BEST = Metric(
    MEMBER_PREFIX + "best", "gauge", "1 for the best member so far, 0 for the others.", (MEMBER_LABEL,)
)

SWEEP: tuple[Metric, ...] = tuple(
    value for name, value in list(globals().items()) if name.startswith("MEMBER_") and isinstance(value, Metric)
)

# --- the operator's own, not a trainer's: they are not in ALL ---------------------------------------------------------

OPERATOR_PREFIX = PREFIX + "operator_"
OPERATOR_API_REQUESTS = Metric(
    OPERATOR_PREFIX + "api_requests_total",
    "counter",
    "Requests to the API server by verb, resource (with subresource) and HTTP status; 0 = no answer.",
    ("verb", "resource", "code"),
)
OPERATOR_RECONCILES = Metric(
    OPERATOR_PREFIX + "reconciles_total", "counter", "TrainingJobs looked at, by result.", ("result",)
)
OPERATOR_RECONCILE_SECONDS = Metric(
    OPERATOR_PREFIX + "reconcile_seconds", "histogram", "Seconds per look at one TrainingJob, requests included."
)
OPERATOR_DECISION_SECONDS = Metric(
    OPERATOR_PREFIX + "decision_seconds",
    "histogram",
    "Seconds per decision, without planning: the event loop waits for it.",
)
OPERATOR_PLANS = Metric(
    OPERATOR_PREFIX + "plans_total",
    "counter",
    "Plans by result: answered, rejected (the job), deadline (it took too long), failed.",
    ("result",),
)
OPERATOR_LEADER = Metric(
    OPERATOR_PREFIX + "leader", "gauge", "1 for the operator that leads, 0 for one that stands by."
)
OPERATOR_QUEUE_DEPTH = Metric(OPERATOR_PREFIX + "queue_depth", "gauge", "TrainingJobs that wait for a look.")
OPERATOR_LOOP_LAG = Metric(
    OPERATOR_PREFIX + "loop_lag_seconds", "gauge", "Longest wait of the event loop in the last minute."
)
OPERATOR_WATCH_AGE = Metric(
    OPERATOR_PREFIX + "watch_age_seconds", "gauge", "Seconds since a watch last said something.", ("resource",)
)
OPERATOR_LIST_AGE = Metric(
    OPERATOR_PREFIX + "list_age_seconds", "gauge", "Seconds since the last complete list of everything."
)
OPERATOR_WATCH_CORRECTIONS = Metric(
    OPERATOR_PREFIX + "watch_corrections_total",
    "counter",
    "Objects that a complete list knew better than the watch: missed (a change) or ghost (a deletion).",
    ("kind",),
)
OPERATOR_METRICS_AGE = Metric(
    OPERATOR_PREFIX + "metrics_age_seconds", "gauge", "Age of the memory metrics that placement uses; absent = none."
)
OPERATOR_JOBS = Metric(OPERATOR_PREFIX + "jobs", "gauge", "TrainingJobs by status.state.", ("state",))
OPERATOR_AVOIDED_NODES = Metric(
    OPERATOR_PREFIX + "avoided_nodes", "gauge", "Nodes that no job uses, because attempts of several jobs failed there."
)
OPERATOR_PROGRESS_REPORTS = Metric(
    OPERATOR_PREFIX + "progress_reports_total", "counter", "Progress posts by HTTP status.", ("code",)
)
OPERATOR_EVENTS = Metric(
    OPERATOR_PREFIX + "events_total", "counter", "Events by result: posted, repeated (left out), failed.", ("result",)
)

OPERATOR: tuple[Metric, ...] = tuple(
    value for name, value in list(globals().items()) if name.startswith("OPERATOR_") and isinstance(value, Metric)
)
