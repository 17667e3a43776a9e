"""RunSummary: the main figures of a run and its plan. Pure: log and plan in, figures out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from spillway.plan import MemoryPlan, Prediction, Tier

from .log import Event, RunLog, StepEvent


def format_loss(loss: float | None) -> str:
    """Four digits; "-" for None (not measured)."""
    if loss is None:
        return "-"
    return f"{loss:.4g}" if math.isfinite(loss) else "not finite"


@dataclass(frozen=True, slots=True)
class TierUse:
    tier: Tier
    budget_bytes: int
    planned_bytes: int
    peak_bytes: int
    """Maximum over the steps made under the plan."""
    uncounted: str = ""
    """What `peak_bytes` lacks."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    world_size: int
    ranks: str
    """MemoryPlan.ranks; bytes are those of one rank."""
    num_steps: int
    """Steps on the loss curve."""
    first_loss: float | None
    final_loss: float | None
    """None before the first step, NaN if not finite."""
    evaluation_loss: float | None
    """Loss of the last evaluation."""
    lowest_evaluation: tuple[int, float] | None
    """Step and loss; None without evaluations, and for sweeps."""
    tokens_per_second: float
    """Median of the steps made under the plan."""
    step_seconds: float
    """Median of the steps made under the plan, without evaluations and checkpoints."""
    prediction: Prediction
    training_seconds: float
    """From the first start to the last event, including earlier invocations and the time between them."""
    attempt_seconds: float
    """The part of `training_seconds` during attempts: from each start to its last step, checkpoint or end."""
    num_attempts: int
    num_skipped: int
    """Steps on the curve whose update was skipped because loss or gradients were not finite."""
    num_overflowed: int
    """The skipped steps whose loss scale was too large for float16."""
    num_restarts: int
    """Attempts that follow a failed or killed one."""
    num_allocator_retries: int
    """How often, in steps under the plan, the Cuda allocator ran out of memory and released its cache."""
    tiers: tuple[TierUse, ...]

    @property
    def num_resumes(self) -> int:
        return max(0, self.num_attempts - 1 - self.num_restarts)

    def as_json(self) -> dict[str, object]:
        return {
            "ranks": self.world_size,
            "steps": self.num_steps,
            "firstLoss": finite(self.first_loss),
            "finalLoss": finite(self.final_loss),
            "evaluationLoss": finite(self.evaluation_loss),
            "lowestEvaluationLoss": None if self.lowest_evaluation is None else finite(self.lowest_evaluation[1]),
            "lowestEvaluationStep": None if self.lowest_evaluation is None else self.lowest_evaluation[0],
            "tokensPerSecond": self.tokens_per_second if self.num_steps else None,
            "stepSeconds": self.step_seconds if self.num_steps else None,
            "predictedStepSeconds": self.prediction.step_seconds,
            "predictionCalibrated": self.prediction.calibrated,
            "trainingSeconds": self.training_seconds,
            "attemptSeconds": self.attempt_seconds,
            "skippedSteps": self.num_skipped,
            "overflowedSteps": self.num_overflowed,
            "restarts": self.num_restarts,
            "resumes": self.num_resumes,
            "allocatorRetries": self.num_allocator_retries,
            "tiers": {
                use.tier.value: {
                    "budgetBytes": use.budget_bytes,
                    "plannedBytes": use.planned_bytes,
                    "peakBytes": use.peak_bytes if self.num_steps else None,
                }
                for use in self.tiers
            },
        }


def summarize(log: RunLog, plan: MemoryPlan, measured: Sequence[StepEvent]) -> RunSummary:
    """The main figures of a run. `measured`: the steps that were made under `plan` (report.command.measured_under)."""
    steps = log.curve
    events: list[Event] = [*log.starts, *steps, *log.checkpoints, *log.ends]
    times = [event.time for event in events]
    evaluations = sorted(log.evaluations)
    return RunSummary(
        world_size=plan.world_size,
        ranks=plan.ranks,
        num_steps=len(steps),
        first_loss=steps[0].metrics.loss if steps else None,
        final_loss=steps[-1].metrics.loss if steps else None,
        evaluation_loss=log.evaluations[evaluations[-1]].loss if evaluations else None,
        lowest_evaluation=min(((step, one.loss) for step, one in log.evaluations.items()), key=order, default=None),
        tokens_per_second=median([step.metrics.tokens_per_second for step in measured]),
        step_seconds=median([step.metrics.step_seconds for step in measured]),
        prediction=plan.prediction,
        training_seconds=max(times) - min(times) if times else 0.0,
        attempt_seconds=sum(last - first for first, last in attempt_spans(log, times)),
        num_attempts=len(log.starts),
        num_skipped=sum(step.metrics.skipped for step in steps),
        num_overflowed=sum(step.metrics.overflowed for step in steps),
        num_restarts=log.num_restarts,
        num_allocator_retries=sum(step.metrics.allocator_retries for step in measured),
        tiers=tuple(tier_use(tier, measured, plan) for tier in Tier if tier in plan.bytes or tier in plan.budget),
    )


def order(evaluation: tuple[int, float]) -> tuple[float, int]:
    """A sort key: the lowest loss first, of equal losses the earliest, NaN last."""
    step, loss = evaluation
    return (math.inf if math.isnan(loss) else loss), step


def attempt_spans(log: RunLog, times: Sequence[float]) -> Iterator[tuple[float, float]]:
    """Yields (start, last event) of every attempt that began to train, as Unix times. What comes after its end is of
    an attempt that was stopped before that."""
    for start, following in pairwise([*(one.time for one in log.starts), math.inf]):
        end = min((one.time for one in log.ends if start <= one.time < following), default=following)
        yield start, max((time for time in times if start <= time < following and time <= end), default=start)


def tier_use(tier: Tier, steps: Sequence[StepEvent], plan: MemoryPlan) -> TierUse:
    planned = plan.bytes[tier].total if tier in plan.bytes else 0
    peak = max((step.metrics.tier_peak_bytes.get(tier.value, 0) for step in steps), default=0)
    hookless = tier is Tier.DEVICE and plan.mode == "Disabled" and plan.device == "Cpu"
    return TierUse(tier, plan.budget.get(tier, 0), planned, peak, "saved activations" if hookless else "")


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def finite(value: float | None) -> float | None:
    """None for NaN and infinity, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None
