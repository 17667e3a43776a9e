"""The alerts as code: what needs a person, of which job, node or part of the operator, and the command to begin with.

A series is a trainer's or the operator's (spillway.metrics), a recording rule's (recording_rules.py) or one of FOREIGN.
docs/runbooks.md has a section for each alert; docs/conditions.md has the reasons. Of operators and pods that tell the
same, the worst counts. `chart_files.py` writes them into the chart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import recording_rules as rules
from spillway import metrics
from spillway.feedback.retries import NODE_LOST
from spillway.metrics import JOB_LABEL, NAMESPACE_LABEL, RANK_LABEL, Metric
from spillway.placement import node_signals as signals
from spillway.placement.headroom import STALE_SECONDS
from spillway.plan import Tier

Json = dict[str, Any]

GROUP = "spillway-alerts"
PAGE = "docs/runbooks.md"
FOREIGN = {
    "node_filesystem_avail_bytes": "node-exporter",
    "node_filesystem_size_bytes": "node-exporter",
}
"""Series of other exporters -> which; without one, its alerts never fire."""

# Limits that the dashboards draw, too.
SILENT_SECONDS = 600
"""without a step"""
CHECKPOINT_SECONDS = 3600
"""without a checkpoint"""
CHECKPOINT_VOLUME_FREE = 0.1
"""share of the volume"""
DEVICE_SHARE = 0.9
"""of a rank's device budget, at its peak"""
GOODPUT = 0.5
SPILL_DRIVE_FREE = 0.15
"""share of a drive"""
DRIVE_WEAR = 0.9
"""share of a drive's rated life"""
STALLED_SHARE = 0.1
"""of the time"""
API_ERRORS = 0.1
"""share of the operator's requests"""
REPORTS_REJECTED = 0.1
"""share of the trainers' reports"""
LOOP_LAG_SECONDS = 5
PLANNING_SECONDS = 180
WATCH_LAG_SECONDS = 60
CERTIFICATE_SECONDS = 14 * 86_400
"""until it expires"""

OF_A_JOB = f"{NAMESPACE_LABEL}, {JOB_LABEL}"
LABELS = {"NAMESPACE": NAMESPACE_LABEL, "JOB": JOB_LABEL, "NODE": "node"}
"""Words of a summary, and of the runbook's commands, that stand for labels."""


@dataclass(frozen=True, slots=True)
class Alert:
    name: str
    severity: Literal["critical", "warning", "info"]
    lasts: str
    """How long the expression must hold."""
    expression: str
    summary: str
    """Words of LABELS stand for labels, {{ }} is Prometheus' own."""
    command: str
    """What to run first; the runbook has it, too."""


# --- queries ----------------------------------------------------------------------------------------------------------


MATCHERS = {"": "=", "!": "!=", "~": "=~", "!~": "!~"}


def selected(metric: Metric, **values: str) -> str:
    """The series whose labels have these values: "a", "!a" for another one; "~a|b", "!~a|b" for an expression."""
    if not values:
        return metric.name
    parts = {label: (value.lstrip("!~"), value) for label, value in values.items()}
    found = (f'{label}{MATCHERS[value[: -len(text)]]}"{text}"' for label, (text, value) in parts.items())
    return f"{metric.name}{{{','.join(found)}}}"


def worst(labels: str, metric: Metric, **values: str) -> str:
    return f"max by ({labels}) ({selected(metric, **values)})"


def problem(**values: str) -> str:
    return worst(f"{OF_A_JOB}, condition, reason", metrics.OPERATOR_JOB_PROBLEM, **values)


def growth(labels: str, metric: Metric, window: str, **values: str) -> str:
    """Of a gauge that only grows, whichever operator tells it."""
    before = f"min by ({labels}) (min_over_time({selected(metric, **values)}[{window}]))"
    return f"{worst(labels, metric, **values)} - {before}"


def rate(by: str, metric: Metric, window: str, **values: str) -> str:
    return f"sum by ({by}) (rate({selected(metric, **values)}[{window}]))"


def share(metric: Metric, code: str) -> str:
    """Of all in ten minutes."""
    return f"{rate('', metric, '10m', code=code)} / {rate('', metric, '10m')}"


def api_errors() -> str:
    return share(metrics.OPERATOR_API_REQUESTS, "~0|429|5..")


def reports_rejected() -> str:
    return share(metrics.OPERATOR_PROGRESS_REPORTS, "!200")


MEMORY_STALLED = "node:spillway_memory_stalled:rate2m"
TRAINER_NODES = f"max by (node) (max_over_time({metrics.RANK_UP.name}[30m]))"
SILENCE = f"(time() - {worst(OF_A_JOB, metrics.LAST_STEP_TIMESTAMP)})"
CHECKPOINT_AGE = f"(time() - {worst(OF_A_JOB, metrics.CHECKPOINT_TIMESTAMP)})"


def ended(kind: str, window: str) -> str:
    return growth(OF_A_JOB, metrics.OPERATOR_JOB_ENDED_ATTEMPTS, window, kind=kind)


def spill_drive_free() -> str:
    """Of the drives that our node exporter knows, or of the file systems of the Prometheus project's."""
    mounts = f'mountpoint=~"{"|".join(signals.MOUNT_POINTS)}"'
    ours = [signals.of_nodes(metric.name) for metric in (metrics.NODE_DISK_FREE, metrics.NODE_DISK_TOTAL)]
    theirs = [signals.of_nodes(series, mounts) for series in (signals.DISK_SERIES, "node_filesystem_size_bytes")]
    return signals.worst("min", "node", *(f"{free} / {size}" for free, size in (ours, theirs)))


def device_tight() -> str:
    """The allocator found no memory and tried again, near the budget."""
    labels, tier = f"{OF_A_JOB}, {RANK_LABEL}", Tier.DEVICE.value
    used = " / ".join(worst(labels, one, tier=tier) for one in (metrics.TIER_PEAK_BYTES, metrics.TIER_BUDGET_BYTES))
    retries = f"max by ({labels}) (increase({metrics.ALLOCATOR_RETRIES.name}[10m]))"
    return f"{used} > {DEVICE_SHARE} and on ({labels}) {retries} > 0"


def not_finite() -> str:
    """Without those that only the loss scale of float16 made."""
    all_of_them, of_the_scale = (
        f"max by ({OF_A_JOB}) (increase({metric.name}[15m]))"
        for metric in (metrics.NON_FINITE, metrics.LOSS_SCALE_OVERFLOWS)
    )
    return f"{all_of_them} - {of_the_scale} > 0"


def goodput() -> str:
    committed, held = (
        rate(NAMESPACE_LABEL, metrics.OPERATOR_DEVICE_SECONDS, "6h", use=use) for use in ("committed", "held")
    )
    return f"{committed} / {held} < {GOODPUT} and {held} > 0.5"


# --- jobs -------------------------------------------------------------------------------------------------------------

STATUS = "spillway status JOB -n NAMESPACE"
LOGS = "spillway logs JOB -n NAMESPACE"
DESCRIBE = "kubectl describe trainingjob JOB -n NAMESPACE"

JOBS = (
    Alert(
        "SpillwayTrainerStuck", "critical", "5m",
        f"{SILENCE} > {SILENT_SECONDS} and {SILENCE} > 5 * {worst(OF_A_JOB, metrics.PREDICTED_STEP_SECONDS)}",
        "NAMESPACE/JOB has trained no step for {{ $value | humanizeDuration }}",
        LOGS,
    ),
    Alert(
        "SpillwayTrainerNotHeard", "warning", "5m",
        problem(condition="Progressing") + " > 900",
        "NAMESPACE/JOB runs, but has reported no step to the operator for {{ $value | humanizeDuration }} ({{ "
        "$labels.reason }})",
        LOGS,
    ),
    Alert(
        "SpillwayRankSilent", "warning", "5m",
        f"max by ({OF_A_JOB}, {RANK_LABEL}) ({metrics.RANK_UP.name}) == 0",
        "rank {{ $labels.rank }} of NAMESPACE/JOB does not answer the launcher of its pod",
        LOGS,
    ),
    Alert(
        "SpillwayJobFailed", "warning", "1m",
        problem(condition="Failed") + " >= 0",
        "NAMESPACE/JOB failed: {{ $labels.reason }}",
        STATUS,
    ),
    Alert(
        "SpillwayJobRestarts", "warning", "1m",
        f"{ended('restart', '1h')} >= 3",
        "NAMESPACE/JOB restarted {{ $value }} times within an hour",
        STATUS,
    ),
    Alert(
        "SpillwayJobOutOfMemory", "warning", "1m",
        f"{ended('memory', '6h')} >= 2",
        "NAMESPACE/JOB ran out of memory {{ $value }} times within six hours, each time with a different plan",
        STATUS,
    ),
    Alert(
        "SpillwayJobDoesNotFit", "warning", "5m",
        problem(condition="Planned", reason="~DoesNotFit|NoNode") + " > 900",
        "no node has been able to run NAMESPACE/JOB for {{ $value | humanizeDuration }} ({{ $labels.reason }})",
        STATUS,
    ),
    Alert(
        "SpillwayJobRejected", "info", "5m",
        problem(condition="~Accepted|Planned", reason="!~DoesNotFit|NoNode|Inspecting") + " > 60",
        "NAMESPACE/JOB cannot continue until its spec or the cluster is changed: {{ $labels.condition }}, {{ "
        "$labels.reason }}",
        STATUS,
    ),
    Alert(
        "SpillwayJobPending", "warning", "5m",
        problem(condition="~QuotaReserved|Scheduled|Running") + " > 3600",
        "NAMESPACE/JOB has waited {{ $value | humanizeDuration }} for its pods to run: {{ $labels.condition }}, "
        "{{ $labels.reason }}",
        DESCRIBE,
    ),
    Alert(
        "SpillwayLossNotFinite", "warning", "1m",
        not_finite(),
        "NAMESPACE/JOB skipped steps because loss or gradients were not finite",
        LOGS,
    ),
    Alert(
        "SpillwayDeviceMemoryTight", "info", "5m",
        device_tight(),
        "rank {{ $labels.rank }} of NAMESPACE/JOB uses {{ $value | humanizePercentage }} of its device budget, and "
        "torch's allocator had to free its cache and retry",
        "spillway top JOB -n NAMESPACE --once",
    ),
    Alert(
        "SpillwayGoodputLow", "info", "1h",
        goodput(),
        "over six hours, only {{ $value | humanizePercentage }} of the time in which jobs of namespace NAMESPACE held "
        "devices was spent on steps that are saved in checkpoints",
        "spillway status -n NAMESPACE",
    ),
)  # fmt: skip

# --- checkpoints and spill drives -------------------------------------------------------------------------------------

STORAGE = (
    Alert(
        "SpillwayCheckpointNotWritten", "critical", "1m",
        f"max by ({OF_A_JOB}) (increase({metrics.CHECKPOINTS_MISSED.name}[1h])) > 0",
        "a checkpoint of NAMESPACE/JOB could not be written to its volume within the last hour; training goes on",
        LOGS,
    ),
    Alert(
        "SpillwayCheckpointMissing", "warning", "1h",
        f"{worst(OF_A_JOB, metrics.STEP)} > 0 unless on ({OF_A_JOB}) {CHECKPOINT_AGE} < {CHECKPOINT_SECONDS}",
        "NAMESPACE/JOB trains, and its last checkpoint is more than an hour old, or there is none",
        STATUS,
    ),
    Alert(
        "SpillwayCheckpointVolumeFull", "critical", "5m",
        f"min by ({OF_A_JOB}) ({metrics.CHECKPOINT_VOLUME_FREE.name}) < {CHECKPOINT_VOLUME_FREE}",
        "the volume with the checkpoints of NAMESPACE/JOB has {{ $value | humanizePercentage }} free space",
        DESCRIBE,
    ),
    Alert(
        "SpillwaySpillDriveFull", "warning", "5m",
        f"{spill_drive_free()} < {SPILL_DRIVE_FREE} and on (node) {TRAINER_NODES}",
        "the file system of node NODE to which trainers spill has {{ $value | humanizePercentage }} free space",
        "kubectl describe node NODE",
    ),
    Alert(
        "SpillwaySpillDriveWorn", "warning", "15m",
        f"max by (node, mountpoint) ({signals.of_nodes(metrics.NODE_DISK_WEAR.name)}) >= {DRIVE_WEAR}",
        "the drive at {{ $labels.mountpoint }} of node NODE has used {{ $value | humanizePercentage }} of its rated "
        "life",
        "kubectl describe node NODE",
    ),
    Alert(
        "SpillwaySpillDriveFailing", "critical", "1m",
        worst(f"{OF_A_JOB}, node, kind", metrics.SPILL_FAULTS, kind="!redirected") + " > 0",
        "a drive of node NODE to which NAMESPACE/JOB spills had {{ $value }} faults ({{ $labels.kind }}); the job "
        "goes on",
        LOGS,
    ),
)  # fmt: skip

# --- nodes ------------------------------------------------------------------------------------------------------------

NODES = (
    Alert(
        "SpillwayNodeLost", "warning", "1m",
        rate(NAMESPACE_LABEL, metrics.OPERATOR_ATTEMPTS_ENDED, "1h", reason=NODE_LOST) + " > 0",
        "an attempt in namespace NAMESPACE lost its node within the last hour",
        "kubectl get nodes",
    ),
    Alert(
        "SpillwayNodeAvoided", "warning", "1m",
        f"{worst('node', metrics.OPERATOR_NODE_AVOIDED)} > 0",
        "the operator places no job on node NODE for now, because attempts of several jobs failed there",
        "kubectl describe node NODE",
    ),
    Alert(
        "SpillwayHostMemoryStalled", "warning", "5m",
        f"{MEMORY_STALLED} > {STALLED_SHARE} and on (node) {TRAINER_NODES}",
        "trainers on node NODE wait for host memory {{ $value | humanizePercentage }} of the time",
        "kubectl describe node NODE",
    ),
)  # fmt: skip

# --- the operator -----------------------------------------------------------------------------------------------------

OPERATORS = "kubectl get pods -n spillway -l app.kubernetes.io/name=spillway"
OPERATOR_LOGS = "kubectl logs -n spillway -l app.kubernetes.io/name=spillway --tail=100"

OPERATOR = (
    Alert(
        "SpillwayOperatorDown", "critical", "5m",
        f"absent({metrics.OPERATOR_LEADER.name})",
        "Prometheus scrapes no operator: either none runs, so no job starts or restarts, or its metrics are not "
        "collected",
        OPERATORS,
    ),
    Alert(
        "SpillwayOperatorWithoutLeader", "critical", "2m",
        f"max({metrics.OPERATOR_LEADER.name}) == 0",
        "operators run, but none of them is the leader, so no job starts or restarts",
        "kubectl get lease -n spillway",
    ),
    Alert(
        "SpillwayOperatorForbidden", "critical", "5m",
        rate("verb, resource", metrics.OPERATOR_API_REQUESTS, "10m", code="~401|403", verb="!create") + " > 0",
        "the API server does not let the operator {{ $labels.verb }} {{ $labels.resource }}",
        OPERATOR_LOGS,
    ),
    Alert(
        "SpillwayOperatorApiErrors", "warning", "10m",
        f"{api_errors()} > {API_ERRORS}",
        "{{ $value | humanizePercentage }} of the operator's requests to the API server fail (no answer, 429 or 5xx)",
        OPERATOR_LOGS,
    ),
    Alert(
        "SpillwayOperatorFailing", "warning", "10m",
        rate("result", metrics.OPERATOR_RECONCILES, "10m", result="~failed|restless") + " > 0",
        "the operator fails to reconcile some jobs ({{ $labels.result }})",
        OPERATOR_LOGS,
    ),
    Alert(
        "SpillwayOperatorSlow", "warning", "5m",
        f"max({metrics.OPERATOR_LOOP_LAG.name}) > {LOOP_LAG_SECONDS}",
        "the operator's event loop was blocked for {{ $value | humanizeDuration }}",
        "kubectl top pods -n spillway",
    ),
    Alert(
        "SpillwayPlanningStuck", "warning", "2m",
        f"max({metrics.OPERATOR_PLANNING_AGE.name}) > {PLANNING_SECONDS}",
        "a job has waited {{ $value | humanizeDuration }} for its plan",
        OPERATOR_LOGS,
    ),
    Alert(
        "SpillwayWatchLags", "warning", "2m",
        f"{worst('resource', metrics.OPERATOR_WATCH_LAG)} > {WATCH_LAG_SECONDS}",
        "the operator's watch of {{ $labels.resource }} is {{ $value | humanizeDuration }} late",
        OPERATOR_LOGS,
    ),
    Alert(
        "SpillwayCertificateExpires", "warning", "1h",
        f"min({metrics.OPERATOR_CERTIFICATE_EXPIRY.name}) - time() < {CERTIFICATE_SECONDS} > 0",
        "the certificate of the progress endpoint expires in {{ $value | humanizeDuration }}; after that, trainers "
        "cannot report",
        "kubectl get secrets -n spillway",
    ),
    Alert(
        "SpillwayCertificateExpired", "critical", "1m",
        f"time() - min({metrics.OPERATOR_CERTIFICATE_EXPIRY.name}) >= 0",
        "the certificate of the progress endpoint expired {{ $value | humanizeDuration }} ago: no trainer can report",
        "kubectl get secrets -n spillway",
    ),
    Alert(
        "SpillwayReportsRejected", "warning", "10m",
        f"{reports_rejected()} > {REPORTS_REJECTED}",
        "the operator rejects {{ $value | humanizePercentage }} of the trainers' reports",
        OPERATOR_LOGS,
    ),
    Alert(
        "SpillwayPlacementMetricsStale", "warning", "5m",
        f"max({metrics.OPERATOR_METRICS_AGE.name}) > {STALE_SECONDS:g}",
        "the operator places jobs without knowing the nodes' free memory: its metrics are {{ $value | "
        "humanizeDuration }} old",
        OPERATOR_LOGS,
    ),
    Alert(
        "SpillwaySeriesWithoutNode", "info", "30m",
        f"{rules.WITHOUT_NODE_RULE.record} > 0",
        "series of {{ $labels.series }} have no label `node` ({{ $value }} of them), so placement does not use these",
        "kubectl get servicemonitors,podmonitors -A",
    ),
)  # fmt: skip

ALL = (*JOBS, *STORAGE, *NODES, *OPERATOR)


def as_json() -> Json:
    """A rule file, and the spec of a PrometheusRule."""
    return {"groups": [{"name": GROUP, "rules": [_rule(alert) for alert in ALL]}]}


def _rule(alert: Alert) -> Json:
    words = re.compile(rf"\b({'|'.join(LABELS)})\b")
    summary = words.sub(lambda word: f"{{{{ $labels.{LABELS[word[1]]} }}}}", f"{alert.summary}. Next: {alert.command}")
    return {
        "alert": alert.name,
        "expr": alert.expression,
        "for": alert.lasts,
        "labels": {"severity": alert.severity},
        "annotations": {"summary": summary, "runbook_url": f"{PAGE}#{alert.name.lower()}"},
    }
