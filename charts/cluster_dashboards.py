"""The dashboards of the cluster: all jobs and nodes, and the operator itself."""

from __future__ import annotations

import alerts
import recording_rules as rules
from grafana import RANGE, RATE_WINDOW, Dashboard, Panel, Query, Row
from spillway import metrics
from spillway.metrics import NAMESPACE_LABEL, NODE_LABEL, Metric
from spillway.placement import node_signals as signals
from spillway.placement.headroom import STALE_SECONDS
from spillway.plan import Tier

# --- all jobs and nodes -----------------------------------------------------------------------------------------------


def of_fleet(metric: Metric, **labels: str) -> str:
    """The series of the namespaces chosen; the operator on standby may export them, too."""
    return alerts.selected(metric, namespace=f"~${NAMESPACE_LABEL}s", **labels)


def in_range(by: str, metric: Metric, **labels: str) -> str:
    """What was counted in the time range shown, without zeros; `increase` extrapolates, so it is rounded."""
    return f"round(sum by ({by}) (increase({of_fleet(metric, **labels)}[{RANGE}]))) > 0"


def quantiles(metric: Metric, chosen: str, window: str = RATE_WINDOW) -> tuple[Query, ...]:
    """The median and the 95th of 100, of a histogram."""
    buckets = f"sum by (le) (rate({metric.name}_bucket{chosen}[{window}]))"
    return tuple(Query(f"histogram_quantile({q}, {buckets})", name) for q, name in ((0.5, "median"), (0.95, "p95")))


HELD, COMMITTED = (of_fleet(metrics.OPERATOR_DEVICE_SECONDS, use=use) for use in ("held", "committed"))
OF_NAMESPACES = f'{{{NAMESPACE_LABEL}=~"${NAMESPACE_LABEL}s"}}'
BY_NODE = f"{{{{{NODE_LABEL}}}}}"
MOST_NODES = 20
"""lines of one panel"""

JOBS = Row(
    "Jobs",
    (
        Panel(
            "Jobs by state",
            "TrainingJobs of the chosen namespaces by status.state.",
            "short",
            (Query(f"sum by (state) (max by (namespace, state) ({of_fleet(metrics.OPERATOR_JOBS)}))", "{{state}}"),),
            "stat",
            12,
        ),
        Panel(
            "Devices in use",
            "Devices (GPUs, or CPU devices) that running attempts hold, mean over the time range shown. Sweeps are not "
            "counted.",
            "short",
            (Query(f"sum(rate({HELD}[{RANGE}]))"),),
            "stat",
            4,
        ),
        Panel(
            "Goodput",
            "Share of the device-seconds that went into steps that are saved in a checkpoint, in the time range shown.",
            "percentunit",
            (Query(f"clamp_max(sum(increase({COMMITTED}[{RANGE}])) / (sum(increase({HELD}[{RANGE}])) > 0), 1)"),),
            "stat",
            4,
            bad_below=alerts.GOODPUT,
        ),
        Panel(
            "Unrequested GPUs",
            "GPUs of all nodes that no pod requests (from kube-state-metrics).",
            "short",
            (Query(f"sum({rules.UNREQUESTED_DEVICES})"),),
            "stat",
            4,
        ),
    ),
)

PROBLEMS = Row(
    "Jobs that wait or failed",
    (
        Panel(
            "Why, and for how long",
            "Jobs that have waited longest, and jobs that failed within a day, with the condition that says why. "
            "docs/conditions.md explains the reasons; a click opens the job's dashboard.",
            "s",
            (
                Query(
                    f"sort_desc(max by ({alerts.OF_A_JOB}, condition, reason) "
                    f"({of_fleet(metrics.OPERATOR_JOB_PROBLEM)}))"
                ),
            ),
            "table",
            24,
        ),
    ),
)

SERVICE = Row(
    "Service levels",
    (
        Panel(
            "Wait for pods",
            "How long jobs waited for quota, nodes and images until all pods of an attempt ran, in the last hour.",
            "s",
            quantiles(metrics.OPERATOR_QUEUE_WAIT, OF_NAMESPACES, "1h"),
        ),
        Panel(
            "Time to the first step",
            "How long attempts took from when all their pods ran to their first trained step, in the last hour.",
            "s",
            quantiles(metrics.OPERATOR_FIRST_STEP, OF_NAMESPACES, "1h"),
        ),
        Panel(
            "Goodput by namespace",
            "Share of the device-seconds of the last half hour that went into steps that are saved in a checkpoint.",
            "percentunit",
            (
                Query(
                    f"clamp_max(sum by (namespace) (rate({COMMITTED}[30m])) / "
                    f"(sum by (namespace) (rate({HELD}[30m])) > 0), 1)",
                    "{{namespace}}",
                ),
            ),
            bad_below=alerts.GOODPUT,
        ),
    ),
)

LOSSES = Row(
    "In the time range shown",
    (
        Panel(
            "Attempts ended",
            "Attempts that ended, by reason (docs/conditions.md).",
            "short",
            (Query(in_range("reason", metrics.OPERATOR_ATTEMPTS_ENDED), "{{reason}}"),),
            "stat",
            6,
        ),
        Panel(
            "Steps trained again",
            "Reported steps that no checkpoint had when an attempt ended, by the reason of its end.",
            "short",
            (Query(in_range("reason", metrics.OPERATOR_LOST_STEPS), "{{reason}}"),),
            "stat",
            6,
        ),
        Panel(
            "Plans changed because memory ran out",
            "Attempts that began with another plan, by the reason why the attempt before ended.",
            "short",
            (Query(in_range("reason", metrics.OPERATOR_LADDER_STEPS), "{{reason}}"),),
            "stat",
            6,
        ),
        Panel(
            "Planned memory that was not used",
            "Planned minus measured peak bytes of running jobs, all ranks together.",
            "bytes",
            (
                Query(
                    f"sum by (tier) (max by (namespace, tier) ({of_fleet(metrics.OPERATOR_WASTED_BYTES)}))", "{{tier}}"
                ),
            ),
            "stat",
            6,
        ),
    ),
)


def _headroom(tier: Tier, title: str, what: str) -> Panel:
    least = f'bottomk({MOST_NODES}, {rules.HEADROOM}{{tier="{tier}"}})'
    return Panel(title, f"{what} Shows the {MOST_NODES} nodes with the least.", "bytes", (Query(least, BY_NODE),))


ROOM = Row(
    "Free memory by node",
    (
        _headroom(Tier.DEVICE, "Device", "Free memory of the node's tightest GPU."),
        _headroom(Tier.HOST, "Host", "Free host memory, or what pods have not requested if that is less."),
        _headroom(Tier.NVME, "Spill drive", "Free bytes of the drive that jobs spill to, or what is not requested."),
    ),
)

HEALTH = Row(
    "Health of nodes",
    (
        Panel(
            "Waiting for host memory",
            "Share of the time in which every task of the node waited for memory (PSI full): the worst nodes.",
            "percentunit",
            (Query(f"topk({MOST_NODES}, {alerts.MEMORY_STALLED})", BY_NODE),),
            bad_above=alerts.STALLED_SHARE,
        ),
        Panel(
            "Free share of the spill drive",
            "Free bytes of the drive that jobs spill to, as a share of its size: the fullest drives.",
            "percentunit",
            (Query(f"bottomk({MOST_NODES}, {alerts.spill_drive_free()})", BY_NODE),),
            bad_below=alerts.SPILL_DRIVE_FREE,
        ),
        Panel(
            "Nodes avoided",
            "Nodes on which the operator places no job for now, because attempts of several jobs failed there.",
            "short",
            (Query(f"{alerts.worst(NODE_LABEL, metrics.OPERATOR_NODE_AVOIDED)} > 0 or on() vector(0)", BY_NODE),),
            width=4,
            bad_above=1,
        ),
        Panel(
            "Drive wear",
            "Used share of a drive's rated life, for drives that report it.",
            "percentunit",
            (Query(f"max by (node, mountpoint) ({signals.of_nodes(metrics.NODE_DISK_WEAR.name)})", BY_NODE),),
            width=4,
            bad_above=alerts.DRIVE_WEAR,
        ),
    ),
)

FLEET = Dashboard(
    "fleet",
    "Spillway / Fleet",
    "All TrainingJobs and nodes: what runs, what waits and why, what was lost, and where memory is free.",
    (JOBS, PROBLEMS, SERVICE, LOSSES, ROOM, HEALTH),
    (NAMESPACE_LABEL,),
    metrics.OPERATOR_JOBS,
    several=True,
)

# --- the operator -----------------------------------------------------------------------------------------------------


def rates(label: str, metric: Metric) -> Query:
    """Per second, of all operators together."""
    return Query(f"sum by ({label}) (rate({metric.name}[{RATE_WINDOW}]))", f"{{{{{label}}}}}")


def most(metric: Metric) -> Query:
    return Query(f"max({metric.name})")


LEADING = Row(
    "Now",
    (
        Panel(
            "Leaders",
            "Operators that lead: 1. With none, no job starts or restarts.",
            "short",
            (Query(f"sum({metrics.OPERATOR_LEADER.name}) or vector(0)"),),
            "stat",
            4,
            bad_below=1,
        ),
        Panel(
            "Jobs to reconcile",
            "TrainingJobs that wait to be reconciled.",
            "short",
            (most(metrics.OPERATOR_QUEUE_DEPTH),),
            "stat",
            4,
        ),
        Panel(
            "Event loop blocked",
            "Longest time that the event loop was blocked in the last minute.",
            "s",
            (most(metrics.OPERATOR_LOOP_LAG),),
            "stat",
            4,
            bad_above=alerts.LOOP_LAG_SECONDS,
        ),
        Panel(
            "Oldest plan",
            "Time since the oldest plan that is not computed yet was requested.",
            "s",
            (most(metrics.OPERATOR_PLANNING_AGE),),
            "stat",
            4,
            bad_above=alerts.PLANNING_SECONDS,
        ),
        Panel(
            "Age of the nodes' metrics",
            "Age of the memory metrics that placement uses. Empty if placement uses none.",
            "s",
            (most(metrics.OPERATOR_METRICS_AGE),),
            "stat",
            4,
            bad_above=STALE_SECONDS,
        ),
        Panel(
            "Certificate valid for",
            "Time until the certificate of the progress endpoint expires. After that, trainers cannot report.",
            "s",
            (Query(f"min({metrics.OPERATOR_CERTIFICATE_EXPIRY.name}) - time()"),),
            "stat",
            4,
            bad_below=alerts.CERTIFICATE_SECONDS,
        ),
    ),
)

WORK = Row(
    "Work",
    (
        Panel(
            "Reconciliations per second",
            "Reconciliations of TrainingJobs by result. The operator retries failed ones.",
            "short",
            (rates("result", metrics.OPERATOR_RECONCILES),),
        ),
        Panel(
            "Time of a reconciliation",
            "Seconds per reconciliation of one TrainingJob, including its requests to the API server.",
            "s",
            quantiles(metrics.OPERATOR_RECONCILE_SECONDS, ""),
        ),
        Panel(
            "Time of a decision",
            "Seconds per decision about one TrainingJob, without planning. The event loop is blocked meanwhile.",
            "s",
            quantiles(metrics.OPERATOR_DECISION_SECONDS, ""),
        ),
    ),
)

PLANNING = Row(
    "Planning",
    (
        Panel(
            "Plans per second",
            "Plans by result: answered, rejected (the job is wrong), deadline (it took too long), failed.",
            "short",
            (rates("result", metrics.OPERATOR_PLANS),),
            width=12,
        ),
        Panel(
            "Plans that wait",
            "Plans that were requested and are not computed yet.",
            "short",
            (Query(f"max({metrics.OPERATOR_PLANNING_QUEUE.name})", "plans"),),
            width=12,
        ),
    ),
)

API = Row(
    "API server",
    (
        Panel(
            "Requests per second by status",
            "Requests to the API server by HTTP status; 0 means that no answer came.",
            "short",
            (rates("code", metrics.OPERATOR_API_REQUESTS),),
        ),
        Panel(
            "Most frequent requests",
            "Requests per second by verb and resource: the ten most frequent.",
            "short",
            (
                Query(
                    f"topk(10, {alerts.rate('verb, resource', metrics.OPERATOR_API_REQUESTS, RATE_WINDOW)})",
                    "{{verb}} {{resource}}",
                ),
            ),
        ),
        Panel(
            "Failed requests",
            "Share of the requests of the last ten minutes that got no answer, 429 or 5xx.",
            "percentunit",
            (Query(f"{alerts.api_errors()} or vector(0)", "failed"),),
            bad_above=alerts.API_ERRORS,
        ),
    ),
)

WATCHES = Row(
    "What the operator sees",
    (
        Panel(
            "Watch delay",
            "Seconds by which a watch lags behind changes that the operator knows from its own writes or from lists.",
            "s",
            (Query(alerts.worst("resource", metrics.OPERATOR_WATCH_LAG), "{{resource}}"),),
            bad_above=alerts.WATCH_LAG_SECONDS,
        ),
        Panel(
            "Age of the last complete list",
            "Seconds since the last complete list of all watched objects.",
            "s",
            (Query(f"max({metrics.OPERATOR_LIST_AGE.name})", "age"),),
        ),
        Panel(
            "Corrections of watches",
            "Objects for which a complete list disagreed with the watch, in the time range shown: missed (a change) or "
            "ghost (a deletion).",
            "short",
            (Query(f"sum by (kind) (increase({metrics.OPERATOR_WATCH_CORRECTIONS.name}[{RANGE}]))", "{{kind}}"),),
            "stat",
        ),
    ),
)

REPORTS = Row(
    "Reports and events",
    (
        Panel(
            "Reports of trainers per second",
            "Progress posts by HTTP status.",
            "short",
            (rates("code", metrics.OPERATOR_PROGRESS_REPORTS),),
        ),
        Panel(
            "Rejected reports",
            "Share of the reports of the last ten minutes that the operator rejected.",
            "percentunit",
            (Query(f"{alerts.reports_rejected()} or vector(0)", "rejected"),),
            bad_above=alerts.REPORTS_REJECTED,
        ),
        Panel(
            "Events per second",
            "Kubernetes events by result: posted, repeated (left out), failed.",
            "short",
            (rates("result", metrics.OPERATOR_EVENTS),),
        ),
    ),
)

OPERATOR = Dashboard(
    "operator",
    "Spillway / Operator",
    "The operator itself: whether one leads, whether it keeps up, and whether the API server and trainers are heard.",
    (LEADING, WORK, PLANNING, API, WATCHES, REPORTS),
)
