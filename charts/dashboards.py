"""The Grafana dashboards as code: every metric and label comes from spillway.metrics, nothing is spelled twice.

`chart_files.py` writes them into the chart; `expressions` gives every query as Prometheus would get it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from spillway import metrics
from spillway.metrics import JOB_LABEL, MEMBER_LABEL, RANK_LABEL, Metric, Phase
from spillway.plan import Tier

Json = dict[str, Any]

NAMESPACE_LABEL = "namespace"
"""set by the scrape configuration, as pod and node are"""
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
            "Steps completed of those that the job asks for.",
            "percentunit",
            (Query(f"{once(metrics.STEP)} / {once(metrics.STEPS_PLANNED)}"),),
            "stat",
            4,
        ),
        Panel(
            "Time left",
            "At the speed of the last minutes; empty while no step is completed.",
            "s",
            (Query(f"{STEPS_LEFT} / {MOVING_SPEED}"),),
            "stat",
            4,
        ),
        Panel("Loss", "Of the last step, mean per token.", "short", (Query(once(metrics.LOSS)),), "stat", 4),
        Panel(
            "Ranks that answer",
            "Ranks that answered their launcher at the last scrape.",
            "short",
            (Query(f"sum({of_job(metrics.RANK_UP)})"),),
            "stat",
            4,
        ),
        Panel(
            "Since the last step",
            "Seconds since a step was completed; rises while the job starts, waits or hangs.",
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
            "Training loss of each step, and of the held-out text where the job evaluates; mean per token, natural "
            "logarithm.",
            "short",
            (Query(once(metrics.LOSS), "training"), Query(once(metrics.EVALUATION_LOSS), "evaluation")),
            width=6,
        ),
        Panel(
            "Gradient norm",
            "Over all parameters, before clipping.",
            "short",
            (Query(once(metrics.GRADIENT_NORM), "norm"),),
            width=6,
        ),
        Panel(
            "Loss scale",
            "What the loss of the last step was multiplied by, in float16; it halves when gradients overflow.",
            "short",
            (Query(once(metrics.LOSS_SCALE), "scale"),),
            width=6,
        ),
        Panel(
            "Learning rate",
            "As the schedule set it for the last step.",
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
            "Target tokens of all ranks together.",
            "short",
            (Query(f"max({rate(metrics.TOKENS)})", "tokens/s"),),
        ),
        Panel(
            "Seconds per step",
            "Measured, beside what the plan predicted.",
            "s",
            (
                Query(f"1 / {MOVING_SPEED}", "measured"),
                Query(once(metrics.PREDICTED_STEP_SECONDS), "predicted"),
            ),
        ),
        Panel(
            "Where the time goes",
            "Share of each phase; `wait` is time that copies and I/O kept the ranks waiting.",
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
            "Work that a crash now would cost.",
            "s",
            (Query(age(metrics.CHECKPOINT_TIMESTAMP), "age"),),
        ),
        Panel(
            "Steps since the last checkpoint",
            "Steps that a crash now would repeat.",
            "short",
            (Query(f"{once(metrics.STEP)} - {once(metrics.CHECKPOINT_STEP)}", "steps"),),
        ),
        Panel(
            "Setbacks",
            "Times the job went back to a checkpoint in the range shown, and steps that were left out because their "
            "gradients were not finite; of these, in float16, those whose loss scale was too large.",
            "short",
            (
                Query(f"resets({once(metrics.STEP)}[{RANGE}:{RESOLUTION}])", "back to a checkpoint"),
                Query(f"max(increase({of_job(metrics.NON_FINITE)}[{RANGE}]))", "steps left out"),
                Query(f"max(increase({of_job(metrics.LOSS_SCALE_OVERFLOWS)}[{RANGE}]))", "for the loss scale"),
            ),
        ),
    ),
)

JOB = Dashboard(
    "job",
    "Spillway / Job",
    "One TrainingJob: is it moving, how far, how well, and what would a crash cost.",
    (NOW, LEARNING, SPEED_ROW, SAFETY),
)

# --- the memory tiers -------------------------------------------------------------------------------------------------


def _tier_panel(tier: Tier) -> Panel:
    return Panel(
        f"{tier.value.capitalize() if tier is not Tier.NVME else 'NVMe'}: bytes per rank",
        "Held at the end of the last step, highest of that step, what the plan predicted, and the budget.",
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
            "Budget less the highest bytes of the last step, of the fullest rank.",
            "bytes",
            (Query(left(Tier.NVME)),),
            "stat",
            width=3,
        ),
        Panel(
            "Spill files",
            "Of the rank that has most; less than before where a live correction made room on its volume.",
            "bytes",
            (Query(f"max({of_job(metrics.SPILL_FILE_BYTES)})"),),
            "stat",
            width=3,
        ),
        Panel(
            "Allocator retries",
            "In the range shown, of all ranks: a GPU's allocator found no room, gave back what it kept, tried again.",
            "short",
            (Query(f"sum(increase({of_job(metrics.ALLOCATOR_RETRIES)}[{RANGE}]))"),),
            "stat",
            width=2,
        ),
        Panel(
            "Peak of the budget",
            "Highest bytes of the last step as a share of the budget, of the fullest rank. Above 1 would be a defect.",
            "percentunit",
            (
                Query(
                    f"max by (tier) ({of_job(metrics.TIER_PEAK_BYTES)} / ({of_job(metrics.TIER_BUDGET_BYTES)} > 0))",
                    "{{tier}}",
                ),
            ),
        ),
        Panel(
            "Peak of the prediction",
            "Highest bytes of the last step as a share of what the plan predicted, of the fullest rank.",
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
            "Between device and host (h2d, d2h) and between host and NVMe, all ranks together.",
            "Bps",
            (Query(f"sum by (link) ({rate(metrics.MOVED_BYTES)})", "{{link}}"),),
        ),
        Panel(
            "Share of time spent waiting",
            "Time that copies and I/O kept the ranks waiting: what the techniques cost.",
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
            "What reads and writes the NVMe tier.",
            "short",
            (Query(f"max by (backend) ({of_job(metrics.IO_BACKEND)})", "{{backend}}"),),
            "stat",
            width=4,
            text="name",
        ),
        Panel(
            "Faults of spill devices",
            "That the ranks survived in the range shown: writes refused, devices given up or too slow, bytes that went "
            "elsewhere.",
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
    "Where a TrainingJob's bytes live, rank by rank, beside plan and budget; and what moving them costs.",
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
            "By the newest value of spec.objective.metric.",
            "short",
            (Query(f"max by ({MEMBER_LABEL}) ({of_job(metrics.MEMBER_BEST)} == 1)", f"{{{{{MEMBER_LABEL}}}}}"),),
            "stat",
            text="name",
        ),
        Panel(
            "Members by state",
            "Parked members wait for a turn, or at a round for the others; stopped ones were the worse half of one.",
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
            "Steps of each member, of those that it trains when no round stops it.",
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
    "The members of one TrainingJob: how far each is, which is the best, which were stopped.",
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
