"""StepMetrics, measured or predicted, and every metric name.

The exporter, the dashboards, run.jsonl and the report all take their names from here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum


class Phase(StrEnum):
    """Parts of a step, whose seconds add up to those of the step. `wait` is time spent waiting for copies and I/O;
    `exchange` is time spent after backward waiting for the other ranks and their gradients."""

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
    """Peak bytes per tier during the step; on a Cuda device those that torch's allocator reserved."""
    allocator_retries: int = 0
    """How often torch's allocator found no free memory, freed its cache and tried again; the device waits meanwhile."""
    moved_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes per link in this step: h2d, d2h, nvme_read, nvme_write; network: sent to other ranks; cpu: bytes
    touched by CPU updates."""
    lane_seconds: dict[str, float] = field(default_factory=dict)
    """Busy seconds of each link of `moved_bytes`; the links overlap one another and the phases."""
    cpu_seconds: float = 0.0
    """CPU seconds of the rank's process in this step, all threads together."""
    skipped: bool = False
    """Whether the update was left out because gradients were not finite (nonFinite: SkipStep, or `overflowed`)."""
    loss_scale: float | None = None
    """Factor by which the loss of this step was multiplied; None without loss scaling."""

    @property
    def overflowed(self) -> bool:
        """Whether the update was left out because the loss scale was too large for float16: the loss itself was
        finite."""
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
    """Gauge, counter or histogram."""
    help: str
    labels: tuple[str, ...] = ()


JOB_LABEL = "training_job"
RANK_LABEL = "rank"

STEP = Metric(PREFIX + "step", "gauge", "Optimizer steps completed.")
STEPS_PLANNED = Metric(PREFIX + "steps_planned", "gauge", "Optimizer steps that the job asks for.")
LAST_STEP_TIMESTAMP = Metric(
    PREFIX + "last_step_timestamp_seconds", "gauge", "Unix time when the last step was completed."
)
LOSS = Metric(PREFIX + "loss", "gauge", "Training loss of the last step, mean per token.")
EVALUATION_LOSS = Metric(PREFIX + "evaluation_loss", "gauge", "Loss of the last evaluation, mean per token.")
GRADIENT_NORM = Metric(PREFIX + "gradient_norm", "gauge", "Gradient norm of the last step, before clipping.")
LEARNING_RATE = Metric(PREFIX + "learning_rate", "gauge", "Learning rate of the last step.")
TOKENS = Metric(
    PREFIX + "tokens_total", "counter", "Target tokens (tokens with a label) trained on since the process started."
)
NON_FINITE = Metric(PREFIX + "nonfinite_total", "counter", "Steps whose gradients were not finite.")
LOSS_SCALE = Metric(
    PREFIX + "loss_scale", "gauge", "Factor that the loss of the last step was multiplied by: 1, except in float16."
)
LOSS_SCALE_OVERFLOWS = Metric(
    PREFIX + "loss_scale_overflows_total",
    "counter",
    "Steps with a finite loss and gradients that were not finite: the loss scale was too large for float16.",
)
PHASE_SECONDS = Metric(
    PREFIX + "phase_seconds_total",
    "counter",
    "Seconds of training since the process started, by phase of the step.",
    ("phase",),
)
TIER_BYTES = Metric(
    PREFIX + "tier_bytes",
    "gauge",
    "Bytes that the rank held at the end of the last step, per memory tier.",
    (RANK_LABEL, "tier"),
)
TIER_PEAK_BYTES = Metric(
    PREFIX + "tier_peak_bytes",
    "gauge",
    "Peak bytes that the rank held in the last step, per memory tier.",
    (RANK_LABEL, "tier"),
)
ALLOCATOR_RETRIES = Metric(
    PREFIX + "allocator_retries_total",
    "counter",
    "Times that the allocator of a Cuda device found no free memory, released its cache and tried again.",
    (RANK_LABEL,),
)
TIER_BUDGET_BYTES = Metric(
    PREFIX + "tier_budget_bytes",
    "gauge",
    "Bytes that the rank may use (its budget), per memory tier.",
    (RANK_LABEL, "tier"),
)
PREDICTED_TIER_BYTES = Metric(
    PREFIX + "predicted_tier_bytes",
    "gauge",
    "Peak bytes of the rank that the plan predicts, per memory tier.",
    (RANK_LABEL, "tier"),
)
PREDICTED_STEP_SECONDS = Metric(PREFIX + "predicted_step_seconds", "gauge", "Seconds per step that the plan predicts.")
MOVED_BYTES = Metric(
    PREFIX + "moved_bytes_total",
    "counter",
    "Bytes that the rank has copied since its process started, by link.",
    (RANK_LABEL, "link"),
)
IO_BACKEND = Metric(
    PREFIX + "io_backend_info", "gauge", "The I/O engine that reads and writes spill files.", ("backend",)
)
SPILL_FILE_BYTES = Metric(
    PREFIX + "spill_file_bytes",
    "gauge",
    "Bytes of the spill files; a live correction of the plan lowers them.",
    (RANK_LABEL,),
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
CHECKPOINT_VOLUME_FREE = Metric(
    PREFIX + "checkpoint_volume_free_ratio",
    "gauge",
    "Free share of the file system that holds the checkpoints, after the last committed checkpoint.",
)
CHECKPOINTS_MISSED = Metric(
    PREFIX + "checkpoints_missed_total", "counter", "Checkpoints that the disk rejected; training goes on."
)
RANK_UP = Metric(PREFIX + "rank_up", "gauge", "1 when the rank answered its launcher in this scrape.", (RANK_LABEL,))
"""The only series that the launcher exports; all others are exported by ranks."""

ALL: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))

# --- of a sweep's members: only sweeps export them, so they are not in ALL --------------------------------------------

MEMBER_LABEL = "member"
MEMBER_PREFIX = PREFIX + "member_"
MEMBER_STEP = Metric(MEMBER_PREFIX + "step", "gauge", "Optimizer steps that a member completed.", (MEMBER_LABEL,))
MEMBER_STEPS_PLANNED = Metric(
    MEMBER_PREFIX + "steps_planned",
    "gauge",
    "Steps that a member is to train; a round of successive halving may stop it earlier.",
    (MEMBER_LABEL,),
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
    "Requests to the API server by verb, resource (with subresource) and HTTP status; status 0 = no answer.",
    ("verb", "resource", "code"),
)
OPERATOR_RECONCILES = Metric(
    OPERATOR_PREFIX + "reconciles_total", "counter", "Reconciliations of TrainingJobs, by result.", ("result",)
)
OPERATOR_RECONCILE_SECONDS = Metric(
    OPERATOR_PREFIX + "reconcile_seconds",
    "histogram",
    "Seconds per reconciliation of one TrainingJob, including requests.",
)
OPERATOR_DECISION_SECONDS = Metric(
    OPERATOR_PREFIX + "decision_seconds",
    "histogram",
    "Seconds per decision about one TrainingJob, without planning. The event loop is blocked meanwhile.",
)
OPERATOR_PLANS = Metric(
    OPERATOR_PREFIX + "plans_total",
    "counter",
    "Plans by result: answered, rejected (the job), deadline (it took too long), failed.",
    ("result",),
)
OPERATOR_LEADER = Metric(
    OPERATOR_PREFIX + "leader", "gauge", "1 for the operator that is the leader, 0 for one on standby."
)
OPERATOR_QUEUE_DEPTH = Metric(OPERATOR_PREFIX + "queue_depth", "gauge", "TrainingJobs that wait to be reconciled.")
OPERATOR_LOOP_LAG = Metric(
    OPERATOR_PREFIX + "loop_lag_seconds",
    "gauge",
    "Longest time that the event loop was blocked in the last minute, seconds.",
)
OPERATOR_PLANNING_QUEUE = Metric(
    OPERATOR_PREFIX + "planning_queue_depth", "gauge", "Plans that were requested and are not computed yet."
)
OPERATOR_PLANNING_AGE = Metric(
    OPERATOR_PREFIX + "planning_oldest_seconds", "gauge", "Seconds since the oldest such plan was requested; 0 = none."
)
OPERATOR_WATCH_LAG = Metric(
    OPERATOR_PREFIX + "watch_lag_seconds",
    "gauge",
    "Seconds by which a watch lags: it has not delivered a change that the operator knows from its own writes or from "
    "lists; 0 = none.",
    ("resource",),
)
OPERATOR_LIST_AGE = Metric(
    OPERATOR_PREFIX + "list_age_seconds", "gauge", "Seconds since the last complete list of all watched objects."
)
OPERATOR_WATCH_CORRECTIONS = Metric(
    OPERATOR_PREFIX + "watch_corrections_total",
    "counter",
    "Objects for which a complete list disagreed with the watch: missed (a change) or ghost (a deletion).",
    ("kind",),
)
OPERATOR_METRICS_AGE = Metric(
    OPERATOR_PREFIX + "metrics_age_seconds", "gauge", "Age of the memory metrics that placement uses; absent = none."
)
OPERATOR_NODE_AVOIDED = Metric(
    OPERATOR_PREFIX + "node_avoided",
    "gauge",
    "1 for a node that no job uses, because attempts of several jobs failed there.",
    ("node",),
)
OPERATOR_CERTIFICATE_EXPIRY = Metric(
    OPERATOR_PREFIX + "certificate_expiry_timestamp_seconds",
    "gauge",
    "Unix time when the progress endpoint's certificate expires.",
)
OPERATOR_PROGRESS_REPORTS = Metric(
    OPERATOR_PREFIX + "progress_reports_total", "counter", "Progress posts by HTTP status.", ("code",)
)
OPERATOR_EVENTS = Metric(
    OPERATOR_PREFIX + "events_total", "counter", "Events by result: posted, repeated (left out), failed.", ("result",)
)

# Service levels. If more than MOST_NAMESPACES namespaces have jobs, the series of the others have the namespace
# "other". Counters and histograms count what happened since this operator started; the gauges are computed from the
# statuses, so they are exact after a restart.

MOST_NAMESPACES = 50
OTHER = "other"
NAMESPACE_LABEL = "namespace"
SINCE = " Since this operator started: use rate() or increase()."
OPERATOR_QUEUE_WAIT = Metric(
    OPERATOR_PREFIX + "queue_wait_seconds",
    "histogram",
    "Seconds that a job waited for quota, nodes and images until all pods of an attempt ran." + SINCE,
    (NAMESPACE_LABEL,),
)
OPERATOR_FIRST_STEP = Metric(
    OPERATOR_PREFIX + "first_step_seconds",
    "histogram",
    "Seconds from when all pods of an attempt ran to its first trained step." + SINCE,
    (NAMESPACE_LABEL,),
)
OPERATOR_ATTEMPTS_ENDED = Metric(
    OPERATOR_PREFIX + "attempts_ended_total",
    "counter",
    "Attempts that ended, by reason (docs/conditions.md, Failed; Completed; Suspended)." + SINCE,
    (NAMESPACE_LABEL, "reason"),
)
OPERATOR_LADDER_STEPS = Metric(
    OPERATOR_PREFIX + "ladder_steps_total",
    "counter",
    "Attempts that began with another plan because memory ran out, by the reason of the failed attempt." + SINCE,
    (NAMESPACE_LABEL, "reason"),
)
OPERATOR_LOST_STEPS = Metric(
    OPERATOR_PREFIX + "lost_steps_total",
    "counter",
    "Reported steps that the next attempt trains again, by the reason why the last attempt ended." + SINCE,
    (NAMESPACE_LABEL, "reason"),
)
OPERATOR_DEVICE_SECONDS = Metric(
    OPERATOR_PREFIX + "device_seconds_total",
    "counter",
    "Device-seconds. held: used by running attempts up to their newest step. committed: used by steps that are in a "
    "checkpoint. committed / held is the goodput. Sweeps are not counted." + SINCE,
    (NAMESPACE_LABEL, "use"),
)
OPERATOR_JOBS = Metric(OPERATOR_PREFIX + "jobs", "gauge", "TrainingJobs by status.state.", (NAMESPACE_LABEL, "state"))
OPERATOR_WASTED_BYTES = Metric(
    OPERATOR_PREFIX + "wasted_bytes",
    "gauge",
    "Planned minus measured peak bytes of running jobs, summed over all ranks, by tier.",
    (NAMESPACE_LABEL, "tier"),
)
OPERATOR_JOB_PROBLEM = Metric(
    OPERATOR_PREFIX + "job_problem_seconds",
    "gauge",
    "Seconds that a job has waited, or (for one day) seconds since it failed, by the condition that says why. At most "
    "200 jobs: failed jobs first, then those that have waited longest.",
    (NAMESPACE_LABEL, JOB_LABEL, "condition", "reason"),
)
OPERATOR_JOB_ENDED_ATTEMPTS = Metric(
    OPERATOR_PREFIX + "job_ended_attempts",
    "gauge",
    "Ended attempts of an unfinished job, by kind: restart, disruption, memory (status.attempts). At most 200 jobs: "
    "those with the most ended attempts.",
    (NAMESPACE_LABEL, JOB_LABEL, "kind"),
)

OPERATOR: tuple[Metric, ...] = tuple(
    value for name, value in list(globals().items()) if name.startswith("OPERATOR_") and isinstance(value, Metric)
)

# --- of a node, exported by spillway_operator.node_exporter: each also has the label `node` ---------------------------

NODE_PREFIX = PREFIX + "node_"
NODE_LABEL = "node"
DISK_LABELS = ("mountpoint", "storage_class", "drive")
DEVICE_LABELS = ("gpu", "UUID", "GPU_I_ID")
"""Named as in dcgm-exporter, so that both describe the same device by the same labels. GPU_I_ID: its MIG instance;
empty = the whole GPU."""
NODE_MEMORY_AVAILABLE = Metric(
    NODE_PREFIX + "memory_available_bytes", "gauge", "Host memory that programs can still allocate without swapping."
)
NODE_MEMORY_TOTAL = Metric(NODE_PREFIX + "memory_total_bytes", "gauge", "Host memory.")
NODE_MEMORY_STALLED = Metric(
    NODE_PREFIX + "memory_stalled_seconds_total",
    "counter",
    "Seconds in which every task that could run waited for memory (PSI full).",
)
NODE_MEMORY_WAITING = Metric(
    NODE_PREFIX + "memory_waiting_seconds_total",
    "counter",
    "Seconds in which at least one task waited for memory (PSI some).",
)
NODE_IO_STALLED = Metric(
    NODE_PREFIX + "io_stalled_seconds_total",
    "counter",
    "Seconds in which every task that could run waited for input or output (PSI full).",
)
NODE_NUMA_FREE = Metric(NODE_PREFIX + "numa_free_bytes", "gauge", "Unused memory of a NUMA node.", ("numa_node",))
NODE_DISK_FREE = Metric(
    NODE_PREFIX + "disk_free_bytes", "gauge", "Bytes that pods can still write to a spill drive.", DISK_LABELS
)
NODE_DISK_TOTAL = Metric(NODE_PREFIX + "disk_total_bytes", "gauge", "Size of a spill drive.", DISK_LABELS)
NODE_DISK_WRITTEN = Metric(
    NODE_PREFIX + "disk_written_bytes_total",
    "counter",
    "Bytes written to a spill drive since the node booted.",
    DISK_LABELS,
)
NODE_DISK_WEAR = Metric(
    NODE_PREFIX + "disk_wear_ratio",
    "gauge",
    "Used share of a drive's rated life, in steps of 0.1; only for drives that report it in sysfs (eMMC, UFS).",
    DISK_LABELS,
)
NODE_DEVICE_FREE = Metric(
    NODE_PREFIX + "device_free_bytes", "gauge", "Free memory of a GPU or MIG instance.", DEVICE_LABELS
)
NODE_DEVICE_TOTAL = Metric(
    NODE_PREFIX + "device_total_bytes", "gauge", "Memory of a GPU or MIG instance.", DEVICE_LABELS
)
NODE_DEVICE_PROCESSES = Metric(
    NODE_PREFIX + "device_processes",
    "gauge",
    "Processes that compute on a GPU or MIG instance, as far as its driver shows them to a container.",
    DEVICE_LABELS,
)
NODE_DEVICE_INFO = Metric(
    NODE_PREFIX + "device_info",
    "gauge",
    "1; name of a GPU, its NUMA node, PCIe generation and lanes, and active NVLinks.",
    (*DEVICE_LABELS, "name", "numa_node", "pcie_generation", "pcie_lanes", "nvlinks"),
)

NODE: tuple[Metric, ...] = tuple(
    value for name, value in list(globals().items()) if name.startswith("NODE_") and isinstance(value, Metric)
)
