"""Compares a run's bytes and seconds with its plan. Pure: log and plan in, rows out.

Only steps made under the plan count. Bytes held are peaks; seconds and bytes moved are medians.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from spillway.metrics import Phase, StepMetrics
from spillway.plan import MemoryPlan, Tier
from spillway.units import format_bytes, format_rough_seconds, format_seconds

from .log import StepEvent
from .summary import median, tier_use

PREDICTED_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.WAIT, Phase.EXCHANGE, Phase.OPTIMIZER)
GOOD = 1.25
"""A calibrated plan should be off by at most this factor."""
LEAST_SHARE = 0.05
"""A phase below this share of the step, planned and measured, is not reported as a deviation."""

Kind = Literal["tier", "step", "cores", "phase", "link"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure, planned and measured."""

    kind: Kind
    name: str
    planned: float | None
    """None: not predicted."""
    seen: float
    calibrated: bool = True
    """False: the seconds were predicted from catalog rates."""

    @property
    def ratio(self) -> float | None:
        """Measured over planned; None if either is zero or missing."""
        return self.seen / self.planned if self.planned and self.seen else None

    @property
    def distance(self) -> float:
        """The factor by which the plan is off, in either direction; 1 = exact."""
        ratio = self.ratio
        return 1.0 if ratio is None else max(ratio, 1.0 / ratio)

    @property
    def prediction(self) -> str:
        """For example `306 ms`, or rounded: `310 ms (uncalibrated)`."""
        if self.calibrated or self.planned is None:
            return self.format(self.planned)
        return f"{format_rough_seconds(self.planned)} (uncalibrated)"

    def format(self, figure: float | None) -> str:
        if figure is None:
            return "-"
        return format_bytes(figure) if self.kind in ("tier", "link") else format_seconds(figure)


def compared(measured: Sequence[StepEvent], plan: MemoryPlan) -> list[Comparison]:
    """All rows; empty before the first step under the plan."""
    if not measured:
        return []
    steps = [step.metrics for step in measured]
    return [*tier_rows(measured, plan), *second_rows(steps, plan), *link_rows(steps, plan)]


def tier_rows(measured: Sequence[StepEvent], plan: MemoryPlan) -> list[Comparison]:
    uses = [tier_use(tier, measured, plan) for tier in Tier if tier in plan.bytes]
    return [Comparison("tier", use.tier, use.planned_bytes, use.peak_bytes) for use in uses]


def second_rows(steps: Sequence[StepMetrics], plan: MemoryPlan) -> list[Comparison]:
    """The step, its phases (without predictions if the plan is of an earlier version), then its CPU seconds."""
    predicted, calibrated = plan.prediction.phase_seconds, plan.prediction.calibrated
    whole = median([step.step_seconds for step in steps])
    rows = [Comparison("step", "step", plan.prediction.step_seconds, whole, calibrated)]
    for phase in (Phase.DATA, *PREDICTED_PHASES):
        seen = median([step.phase_seconds.get(phase, 0.0) for step in steps])
        planned = predicted.get(phase) if phase in PREDICTED_PHASES else None
        if seen or planned:
            rows.append(Comparison("phase", phase.value, planned, seen, calibrated))
    if used := median([step.cpu_seconds for step in steps]):  # earlier versions did not record it
        rows.append(Comparison("cores", "cores", None, used))
    return rows


def link_rows(steps: Sequence[StepMetrics], plan: MemoryPlan) -> list[Comparison]:
    """Rows of links whose bytes are measured; bytes of DRAM are not. The link `cpu` stands for the bytes that the CPU's
    work on gradients and states touches; plans predict them as part of DRAM."""
    planned, rows = plan.prediction.link_bytes, []
    for link in sorted({link for step in steps for link in step.moved_bytes}):
        seen = median([float(step.moved_bytes.get(link, 0)) for step in steps])
        if planned.get(link) or seen:
            rows.append(Comparison("link", link, planned.get(link), seen))
    return rows


def largest_deviation(rows: Sequence[Comparison]) -> Comparison | None:
    """The relevant row that is furthest from the plan; None when all are within GOOD."""
    step = max((max(row.planned or 0.0, row.seen) for row in rows if row.kind == "step"), default=0.0)
    matter = [
        row
        for row in rows
        if row.kind in ("tier", "step")
        or (row.kind == "phase" and max(row.planned or 0.0, row.seen) >= LEAST_SHARE * step)
    ]
    furthest = max(matter, key=lambda row: row.distance, default=None)
    return furthest if furthest is not None and furthest.distance > GOOD else None


def sentence(rows: Sequence[Comparison], run: str) -> str:
    """Summarizes the rows and names a remedy for the run directory `run`."""
    if not rows:
        return "No step is trained yet."
    row = largest_deviation(rows)
    if row is None:
        return f"Every tier and phase is within {GOOD - 1.0:.0%} of the plan."
    planned, seen = row.prediction, row.format(row.seen)
    times = f"{row.ratio:.2g} times" if row.ratio else ""
    if row.kind == "tier":
        return (
            f"Largest deviation: the {row.name} tier held {seen}, {times} the planned {planned}; planned bytes are "
            "computed, not measured, so calibration does not correct them."
        )
    what = "a step" if row.kind == "step" else f"phase {row.name}"
    remedy = f"`spillway calibrate --from {run}` corrects the rates that plans for this machine use."
    return f"Largest deviation: {what} took {seen}, {times} the predicted {planned}; {remedy}"


def as_json(rows: Sequence[Comparison], run: str) -> dict[str, object]:
    """The part of -o json (docs/cli.md)."""
    groups: dict[str, dict[str, object]] = {"tiers": {}, "step": {}, "phases": {}, "cores": {}, "links": {}}
    unit = {"tier": "Bytes", "link": "Bytes", "step": "Seconds", "cores": "CpuSeconds", "phase": "Seconds"}
    for row in rows:
        name = unit[row.kind]
        entry: dict[str, object] = {f"predicted{name}": row.planned, f"measured{name}": row.seen, "ratio": row.ratio}
        if row.kind == "step":
            entry["calibrated"] = row.calibrated
        if row.kind in ("step", "cores"):
            groups[row.kind] = entry
        else:
            groups[f"{row.kind}s"][row.name] = entry
    return {**groups, "sentence": sentence(rows, run)}
