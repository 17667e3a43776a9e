"""The Grafana dashboards as code: every metric and label comes from spillway.metrics, nothing is spelled twice.

`chart_files.py` writes them into the chart; `expressions` gives every query as Prometheus would get it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from spillway import metrics
from spillway.metrics import JOB_LABEL, MEMBER_LABEL, NAMESPACE_LABEL, RANK_LABEL, Metric, Phase
from spillway.plan import Tier

Json = dict[str, Any]

SCHEMA_VERSION = 39
"""Grafana 11 writes it; newer ones read it"""
COLUMNS = 24
"""of Grafana's grid"""
SOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
VARIABLES = (NAMESPACE_LABEL, JOB_LABEL)
RATE_WINDOW = "$__rate_interval"
RANGE = "$__range"
RESOLUTION = "5s"
"""of subqueries: shorter than any job that is worth looking at; the server's own default may be longer than one"""


@dataclass(frozen=True, slots=True)
class Query:
    expression: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    description: str
    unit: str
    """Grafana's name of the unit: bytes, Bps, s, percentunit, short, ..."""
    queries: tuple[Query, ...]
    kind: Literal["timeseries", "stat"] = "timeseries"
    width: int = 8
    stacked: bool = False
    text: Literal["auto", "name"] = "auto"
    """what a stat shows: its value, or the name of its series"""


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    name: str
    """of its file, and the end of its uid"""
    title: str
    description: str
    rows: tuple[Row, ...]


# --- queries ----------------------------------------------------------------------------------------------------------


def of_job(metric: Metric, **labels: str) -> str:
    """The job's series of `metric`."""
    chosen = {label: f"${label}" for label in VARIABLES} | labels
    return metric.name + "{" + ",".join(f'{label}="{value}"' for label, value in chosen.items()) + "}"


def once(metric: Metric) -> str:
    """A figure of the whole job, which every pod reports: one series, also while an attempt follows another."""
    return f"max({of_job(metric)})"


def rate(metric: Metric, **labels: str) -> str:
    return f"rate({of_job(metric, **labels)}[{RATE_WINDOW}])"


def age(metric: Metric) -> str:
    return f"time() - {once(metric)}"


SPEED = f"max(deriv({of_job(metrics.STEP)}[{RATE_WINDOW}]))"
"""steps per second; 0 or less while nothing moves"""
MOVING_SPEED = f"({SPEED} > 0)"
STEPS_LEFT = f"({once(metrics.STEPS_PLANNED)} - {once(metrics.STEP)})"


def tier_query(metric: Metric, tier: Tier, legend: str) -> Query:
    """The ranks' bytes in one tier."""
    return Query(f"max by ({RANK_LABEL}) ({of_job(metric, tier=tier)})", f"{legend}, rank {{{{{RANK_LABEL}}}}}")


def left(tier: Tier) -> str:
    """Bytes of the budget that the fullest rank has left at its peak."""
    peak, budget = (of_job(metric, tier=tier) for metric in (metrics.TIER_PEAK_BYTES, metrics.TIER_BUDGET_BYTES))
    return f"min(max by ({RANK_LABEL}) ({budget}) - max by ({RANK_LABEL}) ({peak}))"


# --- the job ----------------------------------------------------------------------------------------------------------

NOW = Row(
    "Now",
    (
        Panel("Step", "Optimizer steps completed.", "short", (Query(once(metrics.STEP)),), "stat", 4),
        Panel(
            "Progress",
            "Completed steps as a share of all steps of the job.",
            "percentunit",
            (Query(f"{once(metrics.STEP)} / {once(metrics.STEPS_PLANNED)}"),),
            "stat",
            4,
        ),
        Panel(
            "Time left",
            "Time until the last step, at the speed of the last minutes; empty while no step is completed.",
            "s",
            (Query(f"{STEPS_LEFT} / {MOVING_SPEED}"),),
            "stat",
            4,
        ),
        Panel(
            "Loss", "Training loss of the last step, mean per token.", "short", (Query(once(metrics.LOSS)),), "stat", 4
        ),
        Panel(
            "Ranks that answer",
            "Number of ranks (training processes) that answered the launcher of their pod at the last scrape.",
            "short",
            (Query(f"sum({of_job(metrics.RANK_UP)})"),),
            "stat",
            4,
        ),
        Panel(
            "Since the last step",
            "Seconds since the last step was completed; grows while the job starts, waits or hangs.",
            "s",
            (Query(age(metrics.LAST_STEP_TIMESTAMP)),),
            "stat",
            4,
        ),
    ),
)

LEARNING = Row(
    "Learning",
    (
        Panel(
            "Loss",
            "Training loss of each step, and loss on the held-out text, if the job evaluates. Mean per token, natural "
            "logarithm.",
            "short",
            (Query(once(metrics.LOSS), "training"), Query(once(metrics.EVALUATION_LOSS), "evaluation")),
            width=6,
        ),
        Panel(
            "Gradient norm",
            "Norm of the gradients of all parameters, before clipping.",
            "short",
            (Query(once(metrics.GRADIENT_NORM), "norm"),),
            width=6,
        ),
        Panel(
            "Loss scale",
            "Factor by which the loss of the last step was multiplied (float16 only); it halves when gradients "
            "overflow.",
            "short",
            (Query(once(metrics.LOSS_SCALE), "scale"),),
            width=6,
        ),
        Panel(
            "Learning rate",
            "Learning rate of the last step, as the schedule set it.",
            "short",
            (Query(once(metrics.LEARNING_RATE), "rate"),),
            width=6,
        ),
    ),
)

SPEED_ROW = Row(
    "Speed",
    (
        Panel(
            "Tokens per second",
            "Trained tokens (labels) per second, all ranks together.",
            "short",
            (Query(f"max({rate(metrics.TOKENS)})", "tokens/s"),),
        ),
        Panel(
            "Seconds per step",
            "Measured seconds per step, and those that the plan predicted.",
            "s",
            (
                Query(f"1 / {MOVING_SPEED}", "measured"),
                Query(once(metrics.PREDICTED_STEP_SECONDS), "predicted"),
            ),
        ),
        Panel(
            "Where the time goes",
            "Share of each phase in a step's time, mean over ranks; `wait`: the ranks wait for copies and I/O.",
            "percentunit",
            (Query(f"avg by (phase) ({rate(metrics.PHASE_SECONDS)})", "{{phase}}"),),
            stacked=True,
        ),
    ),
)

SAFETY = Row(
    "Safety",
    (
        Panel(
            "Since the last checkpoint",
            "Seconds since the last checkpoint: the work that a crash now would cost.",
            "s",
            (Query(age(metrics.CHECKPOINT_TIMESTAMP), "age"),),
        ),
        Panel(
            "Steps since the last checkpoint",
            "Number of steps that would be trained again after a crash now.",
            "short",
            (Query(f"{once(metrics.STEP)} - {once(metrics.CHECKPOINT_STEP)}", "steps"),),
        ),
        Panel(
            "Setbacks",
            "In the time range shown: how often the job went back to a checkpoint; steps that were skipped because "
            "their gradients were not finite; of these, the steps whose float16 loss scale was too large; checkpoints "
            "that could not be written.",
            "short",
            (
                Query(f"resets({once(metrics.STEP)}[{RANGE}:{RESOLUTION}])", "back to a checkpoint"),
                Query(f"max(increase({of_job(metrics.NON_FINITE)}[{RANGE}]))", "steps skipped"),
                Query(
                    f"max(increase({of_job(metrics.LOSS_SCALE_OVERFLOWS)}[{RANGE}]))", "of these, for the loss scale"
                ),
                Query(f"max(increase({of_job(metrics.CHECKPOINTS_MISSED)}[{RANGE}]))", "checkpoints not written"),
            ),
        ),
    ),
)

JOB = Dashboard(
    "job",
    "Spillway / Job",
    "One TrainingJob: whether it makes progress, how far it is, how well it learns, and what a crash would cost.",
    (NOW, LEARNING, SPEED_ROW, SAFETY),
)

# --- the memory tiers -------------------------------------------------------------------------------------------------


def _tier_panel(tier: Tier) -> Panel:
    return Panel(
        f"{tier.value.capitalize() if tier is not Tier.NVME else 'NVMe'}: bytes per rank",
        "Bytes held at the end of the last step, the peak within that step, the peak that the plan predicted, and the "
        "budget, for each rank.",
        "bytes",
        (
            tier_query(metrics.TIER_BYTES, tier, "held"),
            tier_query(metrics.TIER_PEAK_BYTES, tier, "peak"),
            tier_query(metrics.PREDICTED_TIER_BYTES, tier, "predicted"),
            tier_query(metrics.TIER_BUDGET_BYTES, tier, "budget"),
        ),
    )


TIERS = Row("Tiers", tuple(_tier_panel(tier) for tier in Tier))

HEADROOM = Row(
    "Headroom",
    (
        Panel(
            "NVMe headroom",
            "Budget minus the peak of the last step, of the rank with the least headroom.",
            "bytes",
            (Query(left(Tier.NVME)),),
            "stat",
            width=3,
        ),
        Panel(
            "Spill files",
            "Bytes of the spill files of the rank with most. They become fewer during a run if the operator makes "
            "room on a volume that fills up (live correction).",
            "bytes",
            (Query(f"max({of_job(metrics.SPILL_FILE_BYTES)})"),),
            "stat",
            width=3,
        ),
        Panel(
            "Allocator retries",
            "How often, in the time range shown and on all ranks, torch's allocator found no free GPU memory, freed "
            "its cache and retried.",
            "short",
            (Query(f"sum(increase({of_job(metrics.ALLOCATOR_RETRIES)}[{RANGE}]))"),),
            "stat",
            width=2,
        ),
        Panel(
            "Peak / budget",
            "Peak of the last step as a share of the budget, of the rank with the largest share. Above 1 would be a "
            "bug in Spillway.",
            "percentunit",
            (
                Query(
                    f"max by (tier) ({of_job(metrics.TIER_PEAK_BYTES)} / ({of_job(metrics.TIER_BUDGET_BYTES)} > 0))",
                    "{{tier}}",
                ),
            ),
        ),
        Panel(
            "Peak / prediction",
            "Peak of the last step as a share of the peak that the plan predicted, of the rank with the largest share.",
            "percentunit",
            (
                Query(
                    f"max by (tier) ({of_job(metrics.TIER_PEAK_BYTES)} / ({of_job(metrics.PREDICTED_TIER_BYTES)} > 0))",
                    "{{tier}}",
                ),
            ),
        ),
    ),
)

TRAFFIC = Row(
    "Traffic",
    (
        Panel(
            "Bytes moved by link",
            "Bytes per second between device and host memory (h2d, d2h) and between host memory and NVMe, all ranks "
            "together.",
            "Bps",
            (Query(f"sum by (link) ({rate(metrics.MOVED_BYTES)})", "{{link}}"),),
        ),
        Panel(
            "Share of time spent waiting",
            "Share of a step's time in which ranks wait for copies and I/O: the cost of offloading and spilling.",
            "percentunit",
            (
                Query(
                    f"avg({rate(metrics.PHASE_SECONDS, phase=Phase.WAIT)})"
                    f" / sum(avg by (phase) ({rate(metrics.PHASE_SECONDS)}))",
                    "wait",
                ),
            ),
        ),
        Panel(
            "I/O engine",
            "What reads and writes the spill files: native threads or Python, with O_DIRECT or buffered.",
            "short",
            (Query(f"max by (backend) ({of_job(metrics.IO_BACKEND)})", "{{backend}}"),),
            "stat",
            width=4,
            text="name",
        ),
        Panel(
            "Faults of spill devices",
            "Faults in the time range shown in spite of which the ranks went on: rejected writes, drives that are no "
            "longer used or too slow, data that went to host memory or another drive.",
            "short",
            (Query(f"sum by (kind) (increase({of_job(metrics.SPILL_FAULTS)}[{RANGE}]))", "{{kind}}"),),
            "stat",
            width=4,
        ),
    ),
)

MEMORY_TIERS = Dashboard(
    "memory-tiers",
    "Spillway / Memory tiers",
    "Bytes of a TrainingJob in each memory tier and rank, compared with plan and budget; and what moving them costs.",
    (TIERS, HEADROOM, TRAFFIC),
)

# --- a sweep ----------------------------------------------------------------------------------------------------------


def of_members(metric: Metric) -> Query:
    return Query(f"max by ({MEMBER_LABEL}) ({of_job(metric)})", f"{{{{{MEMBER_LABEL}}}}}")


MEMBERS = Row(
    "Members",
    (
        Panel(
            "Best member",
            "The member with the best newest value of spec.objective.metric.",
            "short",
            (Query(f"max by ({MEMBER_LABEL}) ({of_job(metrics.MEMBER_BEST)} == 1)", f"{{{{{MEMBER_LABEL}}}}}"),),
            "stat",
            text="name",
        ),
        Panel(
            "Members by state",
            "Parked members wait until a device is free, or until the others reach the same round of successive "
            "halving. Stopped members were in the worse half of a round.",
            "short",
            (Query(f"count by (state) ({of_job(metrics.MEMBER_STATE)})", "{{state}}"),),
            "stat",
            16,
        ),
    ),
)

CURVES = Row(
    "Curves",
    (
        Panel(
            "Objective",
            "Each member's newest value of spec.objective.metric.",
            "short",
            (of_members(metrics.MEMBER_OBJECTIVE),),
        ),
        Panel("Loss", "Training loss of each member's last step.", "short", (of_members(metrics.MEMBER_LOSS),)),
        Panel(
            "Share of the steps",
            "Completed steps of each member, as a share of the steps that it trains if no round of halving stops it.",
            "percentunit",
            (
                Query(
                    f"max by ({MEMBER_LABEL}) ({of_job(metrics.MEMBER_STEP)} / "
                    f"({of_job(metrics.MEMBER_STEPS_PLANNED)} > 0))",
                    f"{{{{{MEMBER_LABEL}}}}}",
                ),
            ),
        ),
    ),
)

SWEEP = Dashboard(
    "sweep",
    "Spillway / Sweep",
    "The members (models) of one sweep: how far each is, which is the best, which were stopped.",
    (MEMBERS, CURVES),
)

ALL = (JOB, MEMORY_TIERS, SWEEP)


# --- as Grafana reads it ----------------------------------------------------------------------------------------------


def as_json(dashboard: Dashboard) -> Json:
    """The dashboard's model, for Grafana's sidecar or import."""
    return {
        "uid": f"spillway-{dashboard.name}",
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["spillway"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [
            {
                "type": "dashboards",
                "title": "Spillway",
                "tags": ["spillway"],
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "templating": {"list": [_source_variable(), *map(_variable, range(len(VARIABLES)))]},
        "panels": _panels(dashboard),
    }


def _source_variable() -> Json:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _variable(index: int) -> Json:
    """The label's values among those series that agree with the variables before it."""
    label = VARIABLES[index]
    chosen = ",".join(f'{name}="${name}"' for name in VARIABLES[:index])
    query = f"label_values({metrics.STEPS_PLANNED.name}{{{chosen}}}, {label})"
    return {
        "name": label,
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": label},
        "refresh": 2,  # when the time range changes
        "sort": 1,
    }


def _panels(dashboard: Dashboard) -> list[Json]:
    made: list[Json] = []
    top = 0
    for row in dashboard.rows:
        made.append(_placed({"type": "row", "title": row.title, "collapsed": False, "panels": []}, 0, top, COLUMNS, 1))
        top, column = top + 1, 0
        height = 4 if all(panel.kind == "stat" for panel in row.panels) else 8
        for panel in row.panels:
            made.append(_placed(_panel(panel), column, top, panel.width, height))
            column += panel.width
        top += height
    return [{"id": number, **panel} for number, panel in enumerate(made, start=1)]


def _placed(panel: Json, x: int, y: int, width: int, height: int) -> Json:
    return panel | {"gridPos": {"x": x, "y": y, "w": width, "h": height}}


def _panel(panel: Panel) -> Json:
    drawn = {"fillOpacity": 30, "stacking": {"mode": "normal"}} if panel.stacked else {}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": drawn}, "overrides": []},
        "options": {"textMode": panel.text} if panel.kind == "stat" else {"tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [_target(panel, index) for index in range(len(panel.queries))],
    }


def _target(panel: Panel, index: int) -> Json:
    query = panel.queries[index]
    return {
        "refId": chr(ord("A") + index),
        "datasource": SOURCE,
        "expr": query.expression,
        "legendFormat": query.legend or "__auto",
        "instant": panel.kind == "stat",
        "range": panel.kind != "stat",
    }


def expressions(dashboard: Json, namespace: str, training_job: str, window: str = "1m", shown: str = "1h") -> list[str]:
    """Every query of a dashboard's JSON with Grafana's variables filled in: PromQL, in the panels' order.

    `window` stands for the interval of rates, `shown` for the time range of the page; both are PromQL durations.
    """
    values = {
        RATE_WINDOW: window,
        RANGE: shown,
        f"${NAMESPACE_LABEL}": namespace,
        f"${JOB_LABEL}": training_job,
    }
    found = []
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"]
            for name, value in values.items():
                expression = expression.replace(name, value)
            found.append(expression)
    return found
