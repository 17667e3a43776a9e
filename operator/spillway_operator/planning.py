"""Planning: an accepted job and the cluster -> the files of its next attempt, or the finding that says why not."""

from __future__ import annotations

from spillway.api import TrainingJob
from spillway.cluster_view import ClusterView
from spillway.errors import UserError
from spillway.placement import Place, Placement, Unplaceable
from spillway.plan import MemoryPlan, Tier
from spillway.status import Attempts, PlanStatus, TierQuantities
from spillway.units import LARGEST_QUANTITY, format_bytes, format_seconds

from . import conditions as c
from . import gangs
from .conditions import Finding, false, true, unknown
from .manifests import AttemptFiles, Decision, MetricsSeen, Preferred, attempt_files
from .observed import JobObject, OperatorFacts

LONGEST_TEXT = 1024
"""characters of a text in the status"""
MOST_NODES = 16
"""preferred nodes that the status names"""


def plan_attempt(
    job: TrainingJob, uid: str, cluster: ClusterView, facts: OperatorFacts, attempts: Attempts, threads: int | None,
    because: str, place: Place,
) -> AttemptFiles | Finding:  # fmt: skip
    """The attempt that `attempts` ends with. `threads` are those of the attempt before, because the rounding of a
    matrix product depends on them; None for the first."""
    try:
        placed = place(job, cluster)
    except UserError as error:
        return false(c.ACCEPTED, c.INVALID_SPEC, str(error))
    except Exception as error:
        why = f"planning failed, which is a defect of Spillway: {type(error).__name__}: {error}"
        return false(c.PLANNED, "NoNode", why)
    if isinstance(placed, Unplaceable):
        return false(c.PLANNED, placed.reason if placed.reason in c.REASONS[c.PLANNED] else "NoNode", placed.message)
    decision = Decision(
        attempts=attempts,
        preferences=tuple(Preferred(node=best.node, weight=best.weight) for best in placed.preferences),
        required_labels=dict(placed.required_labels),
        metrics=metrics_seen(cluster),
        because=because,
    )
    threads = threads or placed.plan.optimizer.num_threads
    planned = plan_status(placed, cluster).model_copy(update={"gang": gangs.kind_of(job.spec)})
    return attempt_files(job, uid, placed.plan, planned, decision, threads, facts)


def plan_status(placed: Placement, cluster: ClusterView) -> PlanStatus:
    """What status.plan says of a placement."""
    plan, room = placed.plan, placed.headroom
    return PlanStatus(
        node=c.clean(placed.node.name, 64),
        summary=c.clean("; ".join(plan.reasons) or summary(plan), LONGEST_TEXT),
        bytes=_quantities(*(plan.bytes[tier].total if tier in plan.bytes else None for tier in Tier)),
        pod_memory=min(placed.pod.memory_bytes, LARGEST_QUANTITY),
        step_seconds=f"{plan.prediction.step_seconds:.3g}",
        nodes=tuple(best.node for best in placed.preferences[:MOST_NODES]),
        reason=c.clean(placed.reason, LONGEST_TEXT),
        headroom=_quantities(room.device, room.host, room.nvme),
        metrics_age="" if cluster.metrics_age_seconds is None else format_seconds(cluster.metrics_age_seconds),
        metrics_source=c.clean(cluster.metrics_source, 64),
        observed=placed.observed,
    )


def _quantities(device: int | None, host: int | None, nvme: int | None) -> TierQuantities | None:
    """Never below zero: reservations can exceed what is free. Never more than the API server can hold: what a mode
    other than Auto asks for has no bound."""
    known = {"device": device, "host": host, "nvme": nvme}
    found = {tier: min(max(0, free), LARGEST_QUANTITY) for tier, free in known.items() if free is not None}
    return TierQuantities(**found) if found else None


def summary(plan: MemoryPlan) -> str:
    held = ", ".join(
        f"{format_bytes(plan.bytes[tier].total)} in {tier} memory" if tier is not Tier.NVME
        else f"{format_bytes(plan.bytes[tier].total)} on NVMe"
        for tier in Tier
        if tier in plan.bytes and plan.bytes[tier].total
    )  # fmt: skip
    return f"{held} per rank"


def metrics_seen(cluster: ClusterView) -> MetricsSeen:
    """Whether live metrics had a say in the placement."""
    if cluster.nodes is None:
        return MetricsSeen(status="False", reason="NoNodeView", message="the operator may not list nodes")
    problem = c.clean(cluster.metrics_problem)
    if not cluster.metrics_source and cluster.metrics_age_seconds is None:
        return MetricsSeen(status="False", reason="NotConfigured", message=problem)
    if cluster.metrics_problem or cluster.metrics_age_seconds is None:
        return MetricsSeen(status="False", reason="Stale", message=problem or "there were none yet")
    age = format_seconds(cluster.metrics_age_seconds)
    return MetricsSeen(status="True", reason="Fresh", message=f"{cluster.metrics_source}, {age} old")


def as_decided(files: AttemptFiles) -> tuple[Finding, ...]:
    """What the conditions say of an attempt's decision."""
    decision, planned = files.decision, files.plan_status
    found = [
        true(c.ACCEPTED, "Valid"),
        true(c.PLANNED, "Planned", planned.reason or planned.summary),
        unknown(c.SCHEDULED, "Waiting"),
        false(c.RUNNING, "Starting", decision.because),
        unknown(c.PROGRESSING, "Waiting"),
    ]
    metrics = decision.metrics
    if metrics is not None and metrics.reason in c.REASONS[c.METRICS_AVAILABLE]:
        found.append(Finding(c.METRICS_AVAILABLE, metrics.status, metrics.reason, metrics.message))
    return tuple(found)


def next_attempts(known: Attempts, number: int, now: str) -> Attempts:
    """status.attempts once attempt `number` exists."""
    return known.model_copy(update={"total": number, "ended": number - 1, "start_time": now})


def belongs_to(files: AttemptFiles, job: JobObject, attempt: int) -> bool:
    """Whether a contract is what its name says."""
    found = (files.job.uid, files.job.namespace, files.job.name, files.job.epoch, files.decision.attempts.total)
    return found == (job.uid, job.namespace, job.name, attempt, attempt)


def is_ours(files: AttemptFiles, job: TrainingJob, uid: str, facts: OperatorFacts) -> bool:
    """Whether the operator would have written this job.json for the accepted job; only the plan is taken as found.

    Whoever may create ConfigMaps can copy an ownerReference: a contract with another image or ServiceAccount, or of a
    spec that changed since, is never carried out.
    """
    threads = files.job.compute_threads
    return attempt_files(job, uid, files.plan, files.plan_status, files.decision, threads, facts).job == files.job
