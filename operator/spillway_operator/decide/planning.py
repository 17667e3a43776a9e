"""Planning: an accepted job and the cluster -> the files of its next attempt, or a finding that says why not."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from spillway.api.script import ScriptJob
from spillway.api.status import Attempts, Escalation, PlanStatus, TierQuantities
from spillway.api.training_job import TrainingJob
from spillway.errors import UserError
from spillway.feedback.ladder import (
    MemoryFailure,
    change,
    corrections_after,
    next_failure_may_be_last,
    relaxed,
    repeats,
    worth_relaxing,
)
from spillway.placement.cluster_view import ClusterView
from spillway.placement.place import Place, Placement, Unplaceable
from spillway.plan import MemoryPlan, Tier
from spillway.units import LARGEST_QUANTITY, format_bytes, format_seconds

from . import conditions as c
from . import gangs
from .acceptance import ANY_TIME
from .conditions import Finding, false, true, unknown
from .manifests import AttemptFiles, Decision, MetricsSeen, Preferred, attempt_files
from .observed import JobObject, OperatorFacts

LONGEST_TEXT = 1024
"""Longest text in the status, in characters."""
MOST_NODES = 16
"""Largest number of preferred nodes in the status."""

_MORE_MEMORY = {
    Tier.DEVICE: ("device memory", "raise spec.memory.budget.device, or use a node with more device memory"),
    Tier.HOST: ("host memory", "raise spec.memory.budget.host, or use a node with more host memory"),
    Tier.NVME: ("NVMe space", "use a larger spill volume"),
    None: ("pod memory", "raise spec.pod.resources.memory, or use a node with more memory"),
}
"""Tier that ran out -> its name, and what to do if no plan needs less of it; None = memory of the pod."""


@dataclass(frozen=True, slots=True)
class AttemptHistory:
    """What the next attempt needs to know about earlier ones."""

    attempts: Attempts
    """status.attempts once the next attempt exists."""
    threads: int | None = None
    """Threads of the previous attempt, because the rounding of a matrix product depends on them; None for the first."""
    because: str = ""
    escalations: tuple[Escalation, ...] = ()
    failures: tuple[MemoryFailure, ...] = ()
    """Attempts that ran out of memory and whose contracts can be read."""
    last: MemoryPlan | None = None
    """Plan of the previous attempt."""
    peaks: dict[Tier, int] = field(default_factory=dict)
    """Peak bytes of the previous attempt."""
    trained_seconds: float = 0.0
    """Seconds in which all pods of the previous attempt ran; 0 if it ran out of memory."""


def plan_attempt(
    job: TrainingJob | ScriptJob,
    uid: str,
    cluster: ClusterView,
    facts: OperatorFacts,
    past: AttemptHistory,
    place: Place,
) -> AttemptFiles | Finding:
    """Plans the last attempt in `past.attempts`."""
    cluster = replace(cluster, trainer_image=facts.trainer_image)
    if past.last is not None:
        cluster = replace(cluster, device=past.last.device, strategy=past.last.kept_strategy)
    try:
        placed = _placed(job, cluster, past, place)
        if cluster.as_free and isinstance(placed, Unplaceable):
            placed = _placed(job, replace(cluster, as_free=False), past, place)
    except UserError as error:
        return false(c.ACCEPTED, c.INVALID_SPEC, str(error))
    except TimeoutError as error:
        return false(c.PLANNED, "NoNode", str(error))
    except Exception as error:
        bug = f"planning failed, which is a bug in Spillway: {type(error).__name__}: {error}"
        why = f"{bug}; the operator tries again; please report it with this job's spec"
        return false(c.PLANNED, "NoNode", why)
    if isinstance(placed, Unplaceable):
        return false(c.PLANNED, placed.reason if placed.reason in c.REASONS[c.PLANNED] else "NoNode", placed.message)
    again = next((one for one in past.failures if repeats([one], placed.plan, placed.pod.memory_bytes)), None)
    if again is not None:
        what, remedy = _MORE_MEMORY[again.tier]
        needs = f"it needs at least as much {what} as attempt {again.attempt}"
        why = f"the next plan would run out again: {needs}; {remedy}"
        return false(c.PLANNED, "DoesNotFit", why)
    decision = Decision(
        attempts=past.attempts,
        preferences=tuple(Preferred(node=best.node, weight=best.weight) for best in placed.preferences),
        required_labels=dict(placed.required_labels),
        avoided_nodes=placed.avoided,
        metrics=metrics_seen(cluster),
        because=past.because,
        escalations=with_changes(past.escalations, past.failures, placed.plan),
    )
    threads = past.threads or placed.plan.optimizer.num_threads
    beside = {"gang": gangs.kind_of(job.spec), "image": job.spec.pod.image or facts.trainer_image}
    planned = plan_status(placed, cluster).model_copy(update=beside)
    return attempt_files(job, uid, placed.plan, planned, decision, threads, facts)


def _placed(
    job: TrainingJob | ScriptJob, cluster: ClusterView, past: AttemptHistory, place: Place
) -> Placement | Unplaceable:
    """Places the attempt with corrections from its memory failures. After a long attempt with much headroom, uses its
    peaks instead if that gives a clearly faster plan."""
    careful = corrections_after(past.failures)
    placed = place(job, replace(cluster, corrections=careful))
    if not past.failures or past.last is None or isinstance(placed, Unplaceable):
        return placed
    reasons = [failure.reason for failure in past.failures]
    if next_failure_may_be_last(reasons, past.attempts.memory_errors):  # do not risk running out again
        return placed
    seen = relaxed(past.failures, past.last, past.peaks, past.trained_seconds)
    if seen == careful:
        return placed
    cheaper = place(job, replace(cluster, corrections=seen))
    if isinstance(cheaper, Unplaceable) or repeats(past.failures, cheaper.plan, cheaper.pod.memory_bytes):
        return placed
    return cheaper if worth_relaxing(placed.plan, cheaper.plan) else placed


def with_changes(
    escalations: tuple[Escalation, ...], failures: tuple[MemoryFailure, ...], after: MemoryPlan
) -> tuple[Escalation, ...]:
    """The escalations, completed by the changes of the next attempt's plan where they lack them."""
    plans = {failure.attempt: failure.plan for failure in failures}
    return tuple(
        one if one.change or one.attempt not in plans
        else one.model_copy(update={"change": c.clean(change(plans[one.attempt], after), LONGEST_TEXT)})
        for one in escalations
    )  # fmt: skip


def advice(job: TrainingJob, cluster: ClusterView, failures: tuple[MemoryFailure, ...], place: Place) -> str:
    """What mode Auto would do after `failures`, for a job in mode Advise."""
    memory = job.spec.memory.model_copy(update={"mode": "Auto"})
    as_auto = job.model_copy(update={"spec": job.spec.model_copy(update={"memory": memory})})
    try:
        last = failures[-1].plan
        corrections = corrections_after(failures)
        seen = replace(cluster, corrections=corrections, device=last.device, strategy=last.kept_strategy)
        placed = place(as_auto, seen)
    except Exception as error:  # as in plan_attempt
        return f"mode Auto would find no plan: {type(error).__name__}: {error}"
    if isinstance(placed, Unplaceable):
        return c.clean(f"mode Auto would find no plan: {placed.message}", LONGEST_TEXT)
    return c.clean(f"mode Auto would replan: {change(failures[-1].plan, placed.plan)}", LONGEST_TEXT)


def plan_status(placed: Placement, cluster: ClusterView) -> PlanStatus:
    """The status.plan of a placement."""
    plan, room = placed.plan, placed.headroom
    held = {tier: plan.bytes[tier].total for tier in plan.bytes if plan.num_segments}  # a script has no segments
    return PlanStatus(
        node=c.clean(placed.node.name, 64),
        device=plan.device,
        summary=c.clean("; ".join(plan.reasons) or summary(plan), LONGEST_TEXT),
        bytes=_quantities(*(held.get(tier) for tier in Tier)),
        pod_memory=min(placed.pod.memory_bytes, LARGEST_QUANTITY),
        activations=plan.bytes[Tier.NVME].activations if plan.movable_activations else None,
        step_seconds=f"{plan.prediction.step_seconds:.3g}",
        calibrated=plan.prediction.calibrated,
        nodes=tuple(best.node for best in placed.preferences[:MOST_NODES]),
        reason=c.clean(placed.reason, LONGEST_TEXT),
        headroom=_quantities(*(room.get(tier) for tier in Tier)),
        metrics_age="" if cluster.metrics_age_seconds is None else format_seconds(cluster.metrics_age_seconds),
        metrics_source=c.clean(cluster.metrics_source, 64),
        observed=placed.observed,
    )


def _quantities(device: int | None, host: int | None, nvme: int | None) -> TierQuantities | None:
    """Quantities between zero and the API server's largest: reservations can exceed what is free, and without mode Auto
    plans have no upper bound."""
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
    """Whether live metrics were used for the placement."""
    if cluster.nodes is None:
        return MetricsSeen(status="False", reason="NoNodeView", message="the operator has no permission to list nodes")
    problem = c.clean(cluster.metrics_problem)
    if not cluster.metrics_source and cluster.metrics_age_seconds is None:
        return MetricsSeen(status="False", reason="NotConfigured", message=problem)
    if cluster.metrics_problem or cluster.metrics_age_seconds is None:
        return MetricsSeen(status="False", reason="Stale", message=problem or "no metrics yet")
    age = format_seconds(cluster.metrics_age_seconds)
    return MetricsSeen(status="True", reason="Fresh", message=f"{cluster.metrics_source}, {age} old")


def as_decided(files: AttemptFiles) -> tuple[Finding, ...]:
    """The conditions of a new attempt."""
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
    """Whether a contract's content matches the job and attempt in its name."""
    found = (files.job.uid, files.job.namespace, files.job.name, files.job.epoch, files.decision.attempts.total)
    return found == (job.uid, job.namespace, job.name, attempt, attempt)


def is_ours(files: AttemptFiles, job: TrainingJob | ScriptJob, uid: str, facts: OperatorFacts) -> bool:
    """Whether the operator would write the same job.json for the accepted job, but for the plan and for fields that do
    not concern attempts. Otherwise a Job of this contract could still be created, late, beside that of a new one.

    Whoever may create ConfigMaps can copy an ownerReference: a contract with another image or ServiceAccount, or of an
    outdated spec, must not be used.
    """
    threads = files.job.compute_threads
    made = attempt_files(job, uid, files.plan, files.plan_status, files.decision, threads, facts).job
    may_differ = {name: getattr(made.spec, name) for name in ANY_TIME}
    return made == files.job.model_copy(update={"spec": files.job.spec.model_copy(update=may_differ)})
