"""Plans and creates the next attempt when none exists, or reports what it waits for."""

from __future__ import annotations

from dataclasses import replace

from spillway.api.script import ScriptJob
from spillway.api.status import MAX_ATTEMPTS, MOST_ESCALATIONS, Escalation
from spillway.api.training_job import TrainingJob
from spillway.errors import UserError
from spillway.feedback.retries import MEMORY_ERRORS, REPLANNED
from spillway.placement.cluster_view import ClusterView
from spillway.placement.place import Unplaceable
from spillway.plan import Tier
from spillway.planning.model_shape import ModelShape
from spillway.units import format_bytes

from . import conditions as c
from . import inspection, manifests
from .acceptance import Rejection, accept, claim_names, claim_problem, forbidden_change, given
from .answer import PATIENCE_SECONDS, give_up, patience, write
from .attempt_end import Cause
from .case import Case, seconds_of
from .conditions import Finding, false, true, unknown
from .contracts import contracts_of, memory_failures, missing, newest_begun, newest_contract, read_files
from .deadlines import expired
from .manifests import AttemptFiles
from .observed import Deletion, Desired
from .planning import AttemptHistory, as_decided, is_ours, next_attempts, plan_attempt
from .progress_status import at_the_start

KEPT_JOBS = 3
KEPT_CONTRACTS = 20
MOST_DELETIONS = 16
"""Most deletions in one decision."""
FAULTY_SECONDS = 86400.0
"""How long a job avoids a node that failed it."""


def start(case: Case) -> Desired:  # noqa: PLR0911 - one line per case
    """Creates the next attempt: its contract, then the children that the contract describes."""
    outcome = accept(case.observed.job)
    if isinstance(outcome, Rejection):
        return _reject(case, outcome)
    needed = frozenset({"claims"} if claim_names(outcome.spec) else ())
    if missing(case, "contracts", *needed):
        return Desired(needs=missing(case, "contracts", *needed))
    case = case.found(true(c.ACCEPTED, "Valid"), durability(case))
    obstacle = _obstacle(case, outcome)
    if obstacle is not None:
        return _wait(case, obstacle)
    shape = _shape(case, outcome, needed)
    if isinstance(shape, Desired):
        return shape
    committed = newest_contract(case)
    # If status.attempts is lost, the newest contract may already have run: its number counts as used.
    files = read_files(case, committed) if committed > case.attempts.total and not case.count_is_lost else None
    uid, facts, cluster = case.observed.job.uid, case.observed.facts, _cluster(case)
    cluster = replace(cluster, as_free=case.attempts.last_reason == REPLANNED, shape=shape)
    if files is not None and is_ours(files, outcome, uid, facts):
        return _create(case, files)
    number = 1 + max(case.attempts.total, committed, *(attempt.attempt for attempt in case.owned), 0)
    if number > MAX_ATTEMPTS:
        return _wait(case, _NO_NUMBER)
    decided = plan_attempt(outcome, uid, cluster, facts, _past(case, number), case.place)
    return _not_planned(case, decided) if isinstance(decided, Finding) else _create(case, decided)


def _shape(case: Case, job: TrainingJob | ScriptJob, needed: frozenset[str]) -> ModelShape | Desired | None:
    """The shape of a model whose sizes the spec does not give, or what to do until it is known; None if the spec gives
    them."""
    if isinstance(job, ScriptJob) or not inspection.is_needed(job.spec):
        return None
    if case.observed.inspection is None:
        return Desired(needs=frozenset({"contracts", "inspection"}) | needed)
    if case.observed.inspection.foreign:
        return _wait(case, _conflicts(case.observed.inspection.foreign))
    found = inspection.inspected(case, job, case.observed.inspection)
    return found if isinstance(found, Desired) or job.spec.model.config is None else None  # its sizes are in the spec


def _cluster(case: Case) -> ClusterView:
    """The cluster as this job should see it: it avoids the nodes that failed the job in the last FAULTY_SECONDS."""
    known = case.attempts.faulty_nodes or ()
    faulty = {one.node for one in known if 0 <= case.seconds_now - seconds_of(one.time) < FAULTY_SECONDS}
    return replace(case.observed.cluster, avoided=case.observed.cluster.avoided | faulty)


def fits_elsewhere(case: Case) -> Cause | None:
    """The cause for replacing the current attempt, for whose pods there is no node, by one with another plan; None if
    no plan fits what is free now, or if the one that does has the same node class and no smaller pods."""
    outcome, planned = accept(case.observed.job), case.status.plan
    if isinstance(outcome, Rejection) or planned is None:
        return None
    facts, begun = case.observed.facts, newest_begun(case)
    cluster = replace(_cluster(case), as_free=True, trainer_image=facts.trainer_image, device=planned.device or None)
    if begun is not None:
        cluster = replace(cluster, strategy=begun.plan.kept_strategy)
    try:
        placed = case.place(outcome, cluster)
    except UserError:
        return None
    if isinstance(placed, Unplaceable) or not placed.at_once:
        return None
    known, needed = planned.pod_memory or 0, placed.pod.memory_bytes
    if placed.node.name == planned.node and needed >= known:
        return None
    less = f", with pods of {format_bytes(needed)} instead of {format_bytes(known)}" if needed < known else ""
    again = "the scheduler finds no node, so the job is planned again for the free nodes"
    return Cause(REPLANNED, f"{again}: class {placed.node.name}{less}")


def _past(case: Case, number: int) -> AttemptHistory:
    """The history for attempt `number`."""
    begun, known = newest_begun(case), case.attempts
    memory = case.status.memory
    peak = memory.peak if memory is not None else None
    progress = case.status.progress
    has_reported = progress is not None and progress.last_step_time is not None  # else the peak is an earlier attempt's
    return AttemptHistory(
        attempts=next_attempts(known, number, case.now),
        threads=begun.job.compute_threads if begun is not None else None,  # a resumed run must round as before
        because=c.clean(case.because or _why_restarting(case)),
        escalations=case.status.escalations,
        failures=memory_failures(case),
        last=begun.plan if begun is not None else None,
        peaks={tier: size for tier in Tier if has_reported and (size := getattr(peak, tier.value, None))},
        trained_seconds=0.0 if known.last_reason in MEMORY_ERRORS else float(known.last_active_seconds),
    )


def _not_planned(case: Case, found: Finding) -> Desired:
    """Waits; but gives up after an out-of-memory end if no other plan fits."""
    known = case.attempts
    if found.reason != "DoesNotFit" or known.last_reason not in MEMORY_ERRORS:
        return _wait(case, found)
    why = case.because or _why_restarting(case)
    message = c.clean(f"{why}; no further attempt follows: {found.message}")
    return give_up(case.found(found), Cause(known.last_reason, message))


def _why_restarting(case: Case) -> str:
    """The message of an earlier look, before the pause, about the attempt that ended."""
    running = c.find(case.before.conditions, c.RUNNING)
    return running.message if running is not None and running.reason == c.RESTARTING else ""


def _obstacle(case: Case, job: TrainingJob | ScriptJob) -> Finding | None:
    """What others must correct before the attempt can be created."""
    if case.observed.conflict:
        return _conflicts(case.observed.conflict)
    if case.observed.rejection:
        return false(c.SCHEDULED, "Rejected", case.observed.rejection)
    begun = newest_begun(case)
    suspended = c.find(case.before.conditions, c.SUSPENDED)
    was_suspended = suspended is not None and (
        suspended.status == "True"
        or seconds_of(suspended.last_transition_time or "") >= seconds_of(case.attempts.end_time or "")
    )
    altered = begun and forbidden_change(begun, job.spec, was_suspended=was_suspended)
    return altered.finding() if altered else claim_problem(job.spec, case.observed.claims or ())


def _conflicts(child: str) -> Finding:
    sentence = f"{child} exists but does not belong to this job: delete it, or give the TrainingJob another name"
    return false(c.ACCEPTED, c.NAME_CONFLICT, sentence)


def _reject(case: Case, rejection: Rejection) -> Desired:
    """Reports the rejection; the job waits for a change of its spec, or for the pending deadline."""
    case = case.found(rejection.finding())
    over = expired(case, rejection.finding().message)
    return write(case) if over is None else give_up(case, over)


def _wait(case: Case, obstacle: Finding) -> Desired:
    """Creates nothing until the obstacle is gone; looks again at growing intervals.

    This includes plans that do not fit, because nodes may be added or freed.
    """
    over = expired(case, obstacle.message)
    if over is not None:
        return give_up(case.found(obstacle), over)
    waited = case.seconds_since(obstacle.type, "False")
    return write(case.found(obstacle), look_again=patience(waited))


def _create(case: Case, files: AttemptFiles) -> Desired:
    try:
        creates = manifests.children(files, case.observed.job, case.observed.facts)
    except UserError as error:
        return _wait(case, false(c.PLANNED, c.CONTRACT_TOO_LARGE, str(error)))
    uid = case.observed.job.uid
    if any(attempt.name == files.name and attempt.owner_uid != uid for attempt in case.observed.attempts):
        return _wait(case, _conflicts(f"Job {files.name}"))
    return write(begun(case, files), creates=creates, deletes=_outdated(case), look_again=PATIENCE_SECONDS)


def _outdated(case: Case) -> tuple[Deletion, ...]:
    """Deletes what is left of attempts that ended long ago: Jobs, except the newest KEPT_JOBS, whose pods have logs;
    and contracts, except the newest KEPT_CONTRACTS and those of attempts that ran out of memory, from which the next
    plans learn."""
    ended = sorted((one for one in case.owned if one.outcome and not one.deleting), key=lambda one: -one.attempt)
    jobs = [Deletion("Job", one.name, one.uid) for one in ended[KEPT_JOBS:]]
    needed = {one.attempt for one in case.status.escalations}
    newest = sorted(contracts_of(case), key=lambda one: -one.attempt)
    old = [one for one in newest[KEPT_CONTRACTS:] if one.attempt not in needed and one.uid]
    services = [Deletion("Service", one.name, "") for one in old if case.num_nodes > 1]
    return (*jobs, *(Deletion("ConfigMap", one.name, one.uid) for one in old), *services)[:MOST_DELETIONS]


def begun(case: Case, files: AttemptFiles) -> Case:
    """The status once the attempt exists. Its contract also accounts for the previous attempt's end. If a rejected
    child prevented that status from being written, and a later look accounted for the end, the status takes precedence:
    an end is counted once."""
    known, attempts = case.attempts, files.decision.attempts
    if known.ended >= attempts.ended:
        since = known.pending_time or attempts.pending_time
        changes = {"total": attempts.total, "start_time": attempts.start_time, "pending_time": since}
        attempts = known.model_copy(update=changes)
    begun = case.changed(
        attempts=attempts,
        plan=files.plan_status,
        inherited=case.observed.inherited,
        escalations=_latest(case.status.escalations, files.decision.escalations),
        progress=at_the_start(case.status.progress, case.steps),
        start_time=case.status.start_time or attempts.start_time,
    ).found(*as_decided(files), durability(case))
    begun = replace(begun, because=files.decision.because)
    return begun.found(*waits_for_quota(case)) if files.job.spec.scheduling.queue_name else begun


def _latest(known: tuple[Escalation, ...], decided: tuple[Escalation, ...]) -> tuple[Escalation, ...]:
    """One escalation for each attempt, with its `change` if either list has one."""
    found = {one.attempt: one for one in known}
    found |= {one.attempt: one for one in decided if one.change or one.attempt not in found}
    return tuple(found[attempt] for attempt in sorted(found))[-MOST_ESCALATIONS:]


_NO_NUMBER = false(
    c.PLANNED,
    c.NO_NUMBER,
    f"no further attempt can start: status.attempts has the highest possible number, {MAX_ATTEMPTS}, which the "
    f"operator did not write; restore the real numbers with `kubectl edit --subresource=status`",
)


def durability(case: Case) -> Finding:
    if not given(case.spec, "checkpoint.claim"):
        return false(c.CHECKPOINTS_DURABLE, "NoClaim", "checkpoint.claim is not set: checkpoints are lost with the pod")
    if case.status.checkpoint is None:
        return unknown(c.CHECKPOINTS_DURABLE, "NoCheckpoint")
    return true(c.CHECKPOINTS_DURABLE, "Committed")


def waits_for_quota(case: Case) -> tuple[Finding, ...]:
    queue = given(case.spec, "scheduling.queueName")
    name = case.attempt_name
    resume = f"kubectl patch job {name} -n {case.observed.job.namespace} -p " + """'{"spec":{"suspend":false}}'"""
    by_hand = f"Job {name} has spec.suspend: true, which Spillway did not set; to resume it: {resume}"
    why = f"waiting for quota in the queue {queue}" if queue else by_hand
    said = case.observed.queue_says
    if queue and said is None:  # not asked this time: keep its last message
        known = c.find(case.before.conditions, c.QUOTA_RESERVED)
        why = known.message if known is not None and known.message.startswith(why) else why
    elif queue and said:
        why = f"{why}: {said}"
    return false(c.QUOTA_RESERVED, "Waiting", why), false(c.RUNNING, "Queued")
