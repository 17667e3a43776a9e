"""The dashboards of a job, and the list of all.

Metrics and labels come from spillway.metrics and recording_rules.py, limits from alerts.py; nothing is spelled twice.
`chart_files.py` writes the dashboards into the chart.
"""

from __future__ import annotations

import alerts
from cluster_dashboards import FLEET, OPERATOR
from grafana import JOB_LABELS, JOB_PAGE, RANGE, RATE_WINDOW, RESOLUTION, Dashboard, Event, Panel, Query, Row
from spillway import metrics
from spillway.metrics import MEMBER_LABEL, RANK_LABEL, Metric, Phase
from spillway.plan import Tier

# --- queries ----------------------------------------------------------------------------------------------------------


THIS_JOB = {label: f"${label}" for label in JOB_LABELS}


def of_job(metric: Metric, **labels: str) -> str:
    """The job's series of `metric`."""
    return alerts.selected(metric, **(THIS_JOB | labels))


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

RECENT = "2m"
"""of events: at least two scrapes"""


def ended_now(kinds: str) -> str:
    """A sample by kind while the end of an attempt is new."""
    return f"{alerts.growth('kind', metrics.OPERATOR_JOB_ENDED_ATTEMPTS, RECENT, kind=f'~{kinds}', **THIS_JOB)} > 0"


ATTEMPTS = (
    Event("Attempt ended early", ended_now("restart|disruption"), "red"),
    Event("Out of memory: next attempt with another plan", ended_now("memory"), "orange"),
)
EVENTS = (
    Event("Checkpoint", f"{once(metrics.CHECKPOINT_TIMESTAMP)} * 1000", "green", at_value=True),
    *ATTEMPTS,
    Event(
        "Live correction: smaller spill files",
        f"max(resets({of_job(metrics.SPILL_FILE_BYTES)}[{RECENT}])) > 0",
        "purple",
    ),
)


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
            bad_above=alerts.SILENT_SECONDS,
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
            width=6,
            bad_above=alerts.CHECKPOINT_SECONDS,
        ),
        Panel(
            "Steps since the last checkpoint",
            "Number of steps that would be trained again after a crash now.",
            "short",
            (Query(f"{once(metrics.STEP)} - {once(metrics.CHECKPOINT_STEP)}", "steps"),),
            width=6,
        ),
        Panel(
            "Free space for checkpoints",
            "Free share of the volume with the checkpoints, after the last one was written.",
            "percentunit",
            (Query(once(metrics.CHECKPOINT_VOLUME_FREE), "free"),),
            width=6,
            bad_below=alerts.CHECKPOINT_VOLUME_FREE,
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
            width=6,
        ),
    ),
)

JOB = Dashboard(
    JOB_PAGE,
    "Spillway / Job",
    "One TrainingJob: whether it makes progress, how far it is, how well it learns, and what a crash would cost.",
    (NOW, LEARNING, SPEED_ROW, SAFETY),
    JOB_LABELS,
    events=EVENTS,
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
            width=4,
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
            width=7,
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
            width=7,
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
            width=6,
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
            width=6,
        ),
    ),
)

MEMORY_TIERS = Dashboard(
    "memory-tiers",
    "Spillway / Memory tiers",
    "Bytes of a TrainingJob in each memory tier and rank, compared with plan and budget; and what moving them costs.",
    (TIERS, HEADROOM, TRAFFIC),
    JOB_LABELS,
    events=EVENTS,
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
    JOB_LABELS,
    metrics.MEMBER_STEP,
    events=ATTEMPTS,  # each turn ends with a checkpoint, and no spill file shrinks
)

ALL = (FLEET, JOB, MEMORY_TIERS, SWEEP, OPERATOR)
