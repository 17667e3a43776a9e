"""reconcile: what was seen of one TrainingJob -> what to do now. Total and pure: the whole life of a job.

    an attempt lives             -> watch it: queued, starting, running, stopping
    it ended                     -> why, what that is charged to, and whether another one follows
    none lives                   -> suspended; or the next attempt: accepted, planned, created
    the job is complete, failed  -> nothing, for ever; deleted when its time to live is over

What the operator ends by itself (a deadline, a stall) is written into the status first and done then: the decision
outlives a crash, and the newest report is asked before it is made.

An attempt is one immutable ConfigMap (its contract), a Service for more than one node, and one Indexed Job, created in
this order before the status says so. Its number is its epoch. Whatever a crash leaves behind is carried on by the same
rules: a contract that has no Job yet gets the Job that it describes, and is never planned again; a Job that the status
does not know is adopted with what its contract says; a Job that is gone ends its attempt.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from spillway.api.field_types import MAX_COUNT
from spillway.api.status import MAX_ATTEMPTS, MOST_ESCALATIONS, Attempts, Escalation, TrainingJobStatus
from spillway.api.training_job import DEFAULT_RESTARTS, MANAGER, TrainingJob
from spillway.errors import RANK_CRASHED, ExitCode, UserError
from spillway.feedback.ladder import MemoryFailure, tries_are_used_up
from spillway.feedback.retries import GANG_YIELDED, JOB_DELETED, MEMORY_ERRORS, NODE_LOST, Retry, retry_of
from spillway.placement import place as placement
from spillway.plan import Tier
from spillway.units import format_seconds

from . import conditions as c
from . import gangs, manifests
from .acceptance import Refusal, accept, changed_fields, changed_for_ever, claim_names, claim_problem, given
from .attempt_end import Cause, cause_of_end, saved_step
from .case import Case, is_over, known_seconds, seconds_of, whole
from .conditions import Finding, false, true, unknown
from .deadlines import (
    active,
    active_seconds,
    due_seconds,
    end_seconds,
    expired,
    others_are_silent_too,
    overrun,
    pending,
    silent_seconds,
    stall_seconds,
    stalled,
)
from .manifests import AttemptFiles
from .observed import AttemptObject, Contract, Deletion, Desired, EventNote, Manifest, Observed, PodObject
from .planning import Past, advice, as_decided, belongs_to, is_ours, next_attempts, plan_attempt
from .progress_status import (
    as_fields,
    at_rest,
    at_the_end,
    at_the_start,
    correction_notes,
    member_notes,
    reported,
    with_report,
    with_saved_step,
)

PATIENCE_SECONDS = 10.0
"""until an attempt that does not run is looked at pod by pod"""
SLOWEST_LOOK_SECONDS = 300.0
SLOWEST_POD_LOOK_SECONDS = 30.0
"""while pods do not run: no watch reports them, and why they do not may change"""
TERMINATION_SLACK_SECONDS = 30.0
"""a pod that long after its grace period will not end by itself: its node is lost"""
SHORT_ATTEMPT_SECONDS = 600.0
"""an attempt that ends sooner makes the next pause longer"""
LONGEST_PAUSE_SECONDS = 300.0
COMPLETED = ExitCode.COMPLETED.reason
SUSPENDED_REASON = "Suspended"
"""attempts.lastReason after spec.suspend"""
NOTHING = Desired()


def reconcile(observed: Observed, now: str, place: placement.Place | None = None) -> Desired:
    """What to do now; `now` is RFC 3339. Never raises for anything that the API server can hold."""
    case = _case(observed, now, place or placement.place)
    if observed.job.deleting or case.spec.get("managedBy", MANAGER) != MANAGER:
        return NOTHING
    surplus = _surplus(case)
    if surplus:
        return Desired(deletes=surplus, look_again_seconds=PATIENCE_SECONDS)
    if is_over(case.status):
        return _after_the_end(case)
    newest = case.owned[0] if case.owned else None
    if newest is not None and newest.attempt > case.attempts.ended:
        return _watch(case, newest)
    if case.attempts.total > case.attempts.ended:
        return _vanished(case)
    return _between_attempts(case)


def _surplus(case: Case) -> tuple[Deletion, ...]:
    """Jobs that must not run: all but the newest, and every one whose attempt is accounted for. And ended ones that
    hold a volume: with a storage class, a pod's spill claim is deleted with the pod, so only the newest is kept."""
    newest = max((attempt.attempt for attempt in case.owned), default=0)
    ended = newest if is_over(case.status) else case.attempts.ended
    holds_a_volume = bool(given(case.spec, "spill.storageClassName"))
    return tuple(
        _deletion(attempt)
        for attempt in case.owned
        if not attempt.deleting
        and (
            holds_a_volume and attempt.attempt < newest and attempt.attempt <= ended
            if attempt.outcome
            else attempt.attempt < newest or attempt.attempt <= ended
        )
    )


def _deletion(attempt: AttemptObject) -> Deletion:
    return Deletion("Job", attempt.name, attempt.uid)


# --- an attempt lives -------------------------------------------------------------------------------------------------


def _watch(case: Case, attempt: AttemptObject) -> Desired:  # noqa: PLR0911 - one line per thing that can be so
    is_news = case.observed.job.generation != case.before.observed_generation
    if (attempt.attempt > case.attempts.total or is_news) and case.observed.contracts is None:
        return Desired(needs=frozenset({"contracts"}))
    if attempt.attempt > case.attempts.total:
        case = _adopted(case, attempt)
    case = _with_report(case)
    if not case.wants_suspension:
        case = case.found(_NOT_SUSPENDED)
    if attempt.outcome == "Complete":
        return _completed(case, attempt)
    if attempt.outcome == "Failed":
        return _failed(case, attempt)
    if attempt.deleting:
        return _stopping(case, attempt)
    if case.wants_suspension:
        return _write(case.found(_STOPPING), deletes=(_deletion(attempt),), look_again=PATIENCE_SECONDS)
    if case.ending is not None:
        return _write(case, deletes=(_deletion(attempt),), look_again=PATIENCE_SECONDS)
    return _lives(_with_changes(case, attempt) if is_news else case, attempt)


def _lives(case: Case, attempt: AttemptObject) -> Desired:
    """Nobody wants it to end."""
    if attempt.suspended:
        return _queued(pending(case), attempt)
    if case.reason(c.QUOTA_RESERVED) == "Waiting":
        return _write(case.found(true(c.QUOTA_RESERVED, "Admitted"), *_STARTING), look_again=PATIENCE_SECONDS)
    if attempt.ready + attempt.succeeded >= case.num_nodes:
        return _running(active(case))
    over = overrun(case)
    return _end(case, over) if over is not None else _not_ready(case, attempt)


def _running(case: Case) -> Desired:
    case = case.found(*_ALL_RUN)
    over = overrun(case)
    if over is not None:
        return _end(case, over)
    silent = silent_seconds(case)
    if silent is not None and silent >= stall_seconds(case):
        if case.trainer_was_heard and not others_are_silent_too(case, silent):
            cause = stalled(case, silent)
            return _end(case.found(false(c.PROGRESSING, "NoProgress", cause.message)), cause)
        if case.trainer_was_heard:
            return _write(case.found(_NOBODY_HEARD), look_again=SLOWEST_POD_LOOK_SECONDS)
        case = case.found(_NEVER_HEARD)
    due = case.report_due_seconds if case.last_step_time is not None else -1.0
    return _write(case, look_again=due + 1.0 if due >= 0 else None)


def _end(case: Case, cause: Cause) -> Desired:
    """Say that the operator ends the attempt, and why. The next round does it."""
    running = true if case.attempts.active_time is not None else false
    return _write(case.found(running(c.RUNNING, cause.reason, cause.message)))


_STARTING = (unknown(c.SCHEDULED, "Waiting"), false(c.RUNNING, "Starting"), unknown(c.PROGRESSING, "Waiting"))
_ALL_RUN = (true(c.SCHEDULED, "Scheduled"), true(c.RUNNING, "Running"))
_NOT_SUSPENDED = false(c.SUSPENDED, "NotSuspended")
_STOPPING = false(c.SUSPENDED, c.STOPPING, "the attempt writes a checkpoint and ends")
_NOBODY_HEARD = unknown(
    c.PROGRESSING,
    c.NO_REPORT,
    "no step was reported for lifecycle.stallSeconds, and no other job was heard meanwhile: the fault may be the "
    "operator's (its Service, its certificate, the network), so that no attempt is ended",
)
_NEVER_HEARD = unknown(
    c.PROGRESSING,
    c.NO_REPORT,
    "all pods run, and no report of this job ever came: the trainer hangs, or cannot reach the operator; see its log. "
    "lifecycle.stallSeconds ends no attempt of a job that was never heard",
)
_NO_NUMBER = false(
    c.PLANNED,
    c.NO_NUMBER,
    f"status.attempts leaves no number for another attempt (at most {MAX_ATTEMPTS}): somebody else wrote it; put it "
    "right with `kubectl edit --subresource=status`",
)


def _adopted(case: Case, attempt: AttemptObject) -> Case:
    """An attempt that a crash kept from the status: its contract says what the status would."""
    files = _read(case, attempt.attempt)
    if files is not None:
        return _begun(case, files)
    accepted = _not_read(case, attempt.attempt) or true(c.ACCEPTED, "Valid")
    known = {
        "total": attempt.attempt, "ended": attempt.attempt - 1, "start_time": attempt.creation_time,
        "active_time": None,
    }  # fmt: skip
    return case.changed(attempts=case.attempts.model_copy(update=known)).found(accepted, *_STARTING)


def _with_report(case: Case) -> Case:
    """With the newest progress report, when there is one that is not in the status yet."""
    report, time = case.observed.progress, case.observed.progress_time or case.now
    if report is not None:
        after = with_report(
            reported(case.status), report, case.attempts.total, case.steps, time, case.members,
            is_corrected=case.is_corrected,
            planned_activations=case.status.plan.activations if case.status.plan is not None else None,
        )  # fmt: skip
        case = case.changed(**as_fields(after))
    if case.last_step_time is not None:
        case = case.found(true(c.PROGRESSING, "Stepping") if case.report_due_seconds >= 0 else _no_report(case))
    return case.found(_durability(case))


def _no_report(case: Case) -> Finding:
    """Without a word that changes with time: it is written once."""
    what = f"no step was reported since {case.last_step_time}, for more than {format_seconds(case.patience_seconds)}"
    return unknown(c.PROGRESSING, c.NO_REPORT, f"{what}: the trainer hangs, or cannot reach the operator; see its log")


def _durability(case: Case) -> Finding:
    if not given(case.spec, "checkpoint.claim"):
        return false(c.CHECKPOINTS_DURABLE, "NoClaim", "checkpoint.claim is not given: checkpoints end with the pod")
    if case.status.checkpoint is None:
        return unknown(c.CHECKPOINTS_DURABLE, "NoCheckpoint")
    return true(c.CHECKPOINTS_DURABLE, "Committed")


def _queued(case: Case, attempt: AttemptObject) -> Desired:
    """The queue's to resume. One that it took back has run: its epoch is used up, and a new attempt queues."""
    has_run = case.reason(c.QUOTA_RESERVED) in ("Admitted", c.EVICTED_BY_QUEUE)
    if has_run or attempt.active or attempt.ready:
        evicted = false(c.QUOTA_RESERVED, c.EVICTED_BY_QUEUE, "the queue took the quota back; a new attempt will queue")
        return _write(case.found(evicted), deletes=(_deletion(attempt),), look_again=PATIENCE_SECONDS)
    waited = case.seconds_since(c.QUOTA_RESERVED, "False")
    in_a_queue = bool(given(case.spec, "scheduling.queueName"))
    if in_a_queue and not _is_young(waited) and case.observed.queue_says is None:
        return Desired(needs=frozenset({"queue_says"}))
    waits = _waits_for_quota(case)
    over = expired(case, waits[0].message)
    if over is not None:
        return _end(case.found(*waits), over)
    return _write(case.found(*waits), look_again=_patience(waited) if in_a_queue else None)


def _waits_for_quota(case: Case) -> tuple[Finding, ...]:
    queue = given(case.spec, "scheduling.queueName")
    why = f"waits for quota in the queue {queue}" if queue else "somebody suspended the attempt's Job"
    said = case.observed.queue_says
    if queue and said is None:  # not asked this time: what it said last stands
        known = c.find(case.before.conditions, c.QUOTA_RESERVED)
        why = known.message if known is not None and known.message.startswith(why) else why
    elif queue and said:
        why = f"{why}: {said}"
    return false(c.QUOTA_RESERVED, "Waiting", why), false(c.RUNNING, "Queued")


def _not_ready(case: Case, attempt: AttemptObject) -> Desired:  # noqa: PLR0911 - one line per thing that can be so
    """Not every pod runs, yet or any more: after a while the pods say why."""
    waited = case.seconds_now - _began_seconds(case, attempt)
    if _is_young(waited):
        return _write(case, look_again=min(PATIENCE_SECONDS, PATIENCE_SECONDS - waited))
    pods = case.observed.pods
    if pods is None:
        return Desired(needs=frozenset({"pods"}))
    if any(_is_lost(pod, case.seconds_now) for pod in pods):
        # It will not end by itself: the Job waits for a pod whose node does not answer, and its peers for a rank.
        return Desired(deletes=(_deletion(attempt),), look_again_seconds=PATIENCE_SECONDS)
    if any(pod.deleting or _is_finished(pod) for pod in pods):
        return _write(case, look_again=PATIENCE_SECONDS)  # the Job is about to end
    found = _pod_findings(pods, case.num_nodes, attempt, case.observed.pods_refusal)
    case = case.found(*found)
    if case.attempts.active_time is None:
        case = pending(case)
        obstacle = next((finding.message for finding in found if finding.message), "not every pod runs")
        if gangs.holds_in_part(case, pods) and case.observed.waiting_gangs is None:
            return Desired(needs=frozenset({"waiting_gangs"}))
        over = expired(case, obstacle) or gangs.yields(case, pods)
        if over is not None:
            return _end(case, over)
    waited = min(waited, case.seconds_since(c.RUNNING, "False"), SLOWEST_POD_LOOK_SECONDS)
    return _write(case, look_again=_patience(waited))


def _began_seconds(case: Case, attempt: AttemptObject) -> float:
    """When its pods could begin: when the Job was created, or the queue admitted it."""
    admitted = c.find(case.status.conditions, c.QUOTA_RESERVED)
    created = seconds_of(attempt.creation_time)
    if admitted is None or admitted.status != "True" or admitted.last_transition_time is None:
        return created
    return max(created, seconds_of(admitted.last_transition_time))


def _pod_findings(
    pods: tuple[PodObject, ...], num_nodes: int, attempt: AttemptObject, refusal: str
) -> tuple[Finding, ...]:
    if refusal and len(pods) < num_nodes:
        why = f"Job {attempt.name} may not create {'its' if not pods else 'more'} pods: {refusal}"
        return false(c.SCHEDULED, c.PODS_REFUSED, why), false(c.RUNNING, "Starting")
    if not pods:
        why = f"the attempt's Job has no pods yet; kubectl describe job {attempt.name} -n {attempt.namespace} says why"
        return false(c.SCHEDULED, "NoPods", why), false(c.RUNNING, "Starting")
    all_have_nodes = len(pods) >= num_nodes and all(pod.node for pod in pods)
    scheduled = true(c.SCHEDULED, "Scheduled") if all_have_nodes else unknown(c.SCHEDULED, "Waiting")
    # One that has a node was schedulable, whatever the scheduler said of it before.
    unschedulable = next((pod for pod in pods if pod.unschedulable and not pod.node), None)
    if unschedulable is not None:
        scheduled = false(c.SCHEDULED, "Unschedulable", f"{unschedulable.name}: {unschedulable.unschedulable}")
    waiting = next((pod for pod in pods if pod.waiting), None)
    if waiting is not None:
        corrected = "spec.image" if "image" in waiting.waiting.partition(":")[0].lower() else "spec"
        mend = f"a corrected {corrected} is used by the next attempt: kubectl delete job {attempt.name} -n " + (
            attempt.namespace
        )
        said = c.clean(waiting.waiting, c.LONGEST_MESSAGE - len(waiting.name) - len(mend) - 4)
        return scheduled, false(c.RUNNING, "ContainerWaiting", f"{waiting.name}: {said}; {mend}")
    if unschedulable is not None:
        return scheduled, false(c.RUNNING, "Starting")
    behind = next((f"{pod.name} does not run" for pod in pods if not pod.ready), "not every pod runs")
    return scheduled, false(c.RUNNING, "PodsNotReady", behind)


def _stopping(case: Case, attempt: AttemptObject) -> Desired:
    """Its Job is being deleted, by us or by somebody else: over when it is gone, or when its pods cannot live."""
    if case.wants_suspension:
        case = case.found(_STOPPING)
    waited = case.seconds_now - seconds_of(attempt.deletion_time or case.now)
    if _is_young(waited):
        return _write(case, look_again=min(PATIENCE_SECONDS, PATIENCE_SECONDS - waited))
    if case.observed.pods is None:
        return Desired(needs=frozenset({"pods"}))
    if not _wait_for_ever(case.observed.pods, case.seconds_now):
        return _write(case, look_again=_patience(waited))
    if case.observed.contracts is None:
        return Desired(needs=frozenset({"contracts"}))
    return _ended(case, Cause(NODE_LOST, "a pod did not end within its grace period: its node is lost"))


def _is_finished(pod: PodObject) -> bool:
    return pod.ending is not None or pod.phase in ("Failed", "Succeeded")


def _is_lost(pod: PodObject, now: float) -> bool:
    """Long past its grace period: the kubelet that should end it does not answer."""
    if _is_finished(pod) or not (pod.deleting and pod.deletion_time):
        return False
    return now > seconds_of(pod.deletion_time) + TERMINATION_SLACK_SECONDS


def _wait_for_ever(pods: tuple[PodObject, ...], now: float) -> bool:
    """Whether the Job waits for pods on lost nodes and for nothing else."""
    lost = [pod for pod in pods if _is_lost(pod, now)]
    return bool(lost) and all(_is_finished(pod) or _is_lost(pod, now) for pod in pods)


# --- it is over -------------------------------------------------------------------------------------------------------


def _after_the_end(case: Case) -> Desired:
    """Complete or Failed: nothing but its deletion, when the spec gives it a time to live.

    The time runs from the latest end that anything tells of, so that a completionTime that somebody wrote cannot
    shorten it; where nothing tells, it runs from now.
    """
    if given(case.spec, "lifecycle.ttlSecondsAfterFinished") is None:
        return _write(case)
    ended = end_seconds(case)
    if ended is None:
        case, ended = case.changed(completion_time=case.now), case.seconds_now
    left = ended + case.lifecycle_seconds("ttlSecondsAfterFinished", MAX_COUNT) - case.seconds_now
    if left > 0:
        return _write(case, look_again=left)
    job = case.observed.job
    return Desired(deletes=(Deletion("TrainingJob", job.name, job.uid, job.resource_version),))


# --- it ended ---------------------------------------------------------------------------------------------------------


def _completed(case: Case, attempt: AttemptObject) -> Desired:
    case = _accounted(case, Cause(COMPLETED, ""), case.attempts.short_in_a_row, attempt.outcome_time)
    total, known = case.attempts.total, case.status.progress
    # Of a sweep as many as were reported: rounds may have stopped members.
    steps = known.steps if case.status.members and known is not None else case.steps
    case = case.changed(progress=at_the_end(known, steps), completion_time=case.now)
    trained = f"{steps} steps in {total} attempt{'s' if total > 1 else ''}"
    if case.status.best_member:
        trained += f"; the best of {len(case.members)} members is {case.status.best_member}"
    return _write(case.found(true(c.COMPLETE, "Completed", trained), *_none_lives("Ended")))


def _failed(case: Case, attempt: AttemptObject) -> Desired:
    needs = _missing(case, "pods", "contracts")
    if needs:
        return Desired(needs=needs)
    pods, short_in_a_row = case.observed.pods or (), case.attempts.short_in_a_row
    cause = cause_of_end(pods, case.num_nodes, short_in_a_row)
    return _ended(_with_what_pods_say(case), cause, attempt.outcome_time)


def _vanished(case: Case) -> Desired:
    """The status knows an attempt whose Job is gone; it is over when its pods are, too."""
    needs = _missing(case, "pods", "contracts")
    if needs:
        return Desired(needs=needs)
    case, pods = _with_what_pods_say(_with_report(case)), case.observed.pods or ()
    if not all(_is_finished(pod) or _is_lost(pod, case.seconds_now) for pod in pods):
        case = case.found(_STOPPING) if case.wants_suspension else case
        left = next((pod for pod in pods if pod.orphaned and not pod.deleting and not _is_finished(pod)), None)
        case = case.found(_job_gone(case, left)) if left is not None and case.ending is None else case
        return _write(case, look_again=PATIENCE_SECONDS)
    if case.reason(c.QUOTA_RESERVED) == c.EVICTED_BY_QUEUE:
        return _ended(case, Cause(ExitCode.PREEMPTED.reason, "the queue took the quota back"))
    return _ended(case, Cause(JOB_DELETED, "the attempt's Job was deleted"))


def _job_gone(case: Case, left: PodObject) -> Finding:
    """Deleted with --cascade=orphan: nobody else will end this pod."""
    job, namespace = case.observed.job.name, case.observed.job.namespace
    gone = manifests.attempt_name(job, case.attempts.total)
    mend = f"delete it (kubectl delete pod {left.name} -n {namespace})"
    return false(c.RUNNING, c.JOB_GONE, f"Job {gone} is gone and pod {left.name} still runs: {mend}")


def _with_what_pods_say(case: Case) -> Case:
    """With the checkpoint that they say they committed last: a report of it may not have come. And with the time at
    which the last of them began, where no look came while all of them ran."""
    pods = case.observed.pods or ()
    begun = [pod.ending.started_at for pod in pods if pod.ending is not None]
    if case.attempts.active_time is None and len(begun) >= case.num_nodes and all(map(known_seconds, begun)):
        known = {"active_time": max(begun, key=seconds_of), "pending_time": None}
        case = case.changed(attempts=case.attempts.model_copy(update=known))
    saved = saved_step(pods)
    if saved is None or case.members:  # a sweep's members have checkpoints of their own, which their reports tell
        return case
    after = with_saved_step(reported(case.status), saved, case.attempts.total, case.steps)
    return case.changed(**as_fields(after))


def _ended(case: Case, cause: Cause, end: str = "") -> Desired:
    """Account for the end of the present attempt, at the time `end` or now, and go on with what follows from it."""
    cause = case.ending or cause
    known, retry = case.attempts, retry_of(cause.reason)
    if case.wants_suspension and retry is not Retry.NEVER:
        return _between_attempts(_accounted(case, Cause(SUSPENDED_REASON, ""), 0, end))
    lasted = case.seconds_now - seconds_of(known.start_time or case.now)
    is_short = lasted < SHORT_ATTEMPT_SECONDS
    case = _accounted(case, cause, known.short_in_a_row + 1 if is_short else 0, end)
    if retry is Retry.REPLANNED:
        return _replanned(case, cause)
    if retry is Retry.NEVER:
        return _give_up(case, cause)
    if retry is Retry.COUNTED:
        limit = whole(given(case.spec, "lifecycle.maxRestarts"), DEFAULT_RESTARTS)
        if known.restarts >= limit:
            return _give_up(case, Cause(cause.reason, f"lifecycle.maxRestarts = {limit} is used up; {cause.message}"))
        case = case.changed(attempts=case.attempts.model_copy(update={"restarts": known.restarts + 1}))
    message = f"attempt {known.total} ended: {cause.message}"
    return _between_attempts(replace(case, because=message).found(*_none_lives(c.RESTARTING, message)))


def _replanned(case: Case, cause: Cause) -> Desired:
    """Memory ran out: another attempt under another plan, where the planner may choose one and tries are left."""
    mode, tries = given(case.spec, "memory.mode") or "Auto", case.attempts.memory_errors - 1
    if mode == "Advise":
        case = _advised(case)
    if mode != "Auto":
        return _give_up(case, cause)
    if tries_are_used_up([one.reason for one in case.status.escalations], case.attempts.memory_errors):
        used_up = f"{tries} other plans were tried (status.escalations)"
        return _give_up(case, Cause(cause.reason, c.clean(f"{used_up}; {cause.message}"), cause.node, cause.rank))
    if _failure(case, case.attempts.total, cause.reason) is None:
        return _give_up(case, cause)  # nobody knows any more what was not enough
    message = f"attempt {case.attempts.total} ended: {cause.message}"
    return _between_attempts(replace(case, because=message).found(*_none_lives(c.RESTARTING, message)))


def _advised(case: Case) -> Case:
    """With what mode Auto would do, for people: mode Advise changes nothing."""
    outcome, failures = accept(case.observed.job), _failures(case)
    if isinstance(outcome, Refusal) or not failures or failures[-1].attempt != case.attempts.total:
        return case
    said = advice(outcome, case.observed.cluster, failures, case.place)
    *earlier, last = case.status.escalations
    return case.changed(escalations=(*earlier, last.model_copy(update={"change": said})))


def _failures(case: Case) -> tuple[MemoryFailure, ...]:
    """Attempts that ran out of memory, as far as their contracts can be read."""
    found = (_failure(case, one.attempt, one.reason) for one in case.status.escalations)
    return tuple(failure for failure in found if failure is not None)


def _failure(case: Case, attempt: int, reason: str) -> MemoryFailure | None:
    files = _read(case, attempt)
    if files is None or any(tier not in held for tier in Tier for held in (files.plan.bytes, files.plan.budget)):
        return None
    return MemoryFailure(attempt, reason, files.plan, files.resources.memory_bytes, files.spared_bytes)


def _accounted(case: Case, cause: Cause, short_in_a_row: int, end: str) -> Case:
    """What status.attempts says of an attempt that ended. Counts only grow, whatever follows."""
    known, is_free, seconds = case.attempts, retry_of(cause.reason) is Retry.FREE, int(active_seconds(case, end))
    changes = {
        "ended": known.total,
        "disruptions": known.disruptions + is_free,
        "memory_errors": known.memory_errors + (cause.reason in MEMORY_ERRORS),
        "last_reason": cause.reason,
        "last_node": cause.node[:253],
        "last_rank": cause.rank if cause.rank is not None and cause.rank <= MAX_COUNT else None,
        "end_time": case.now,
        "short_in_a_row": short_in_a_row,
        "active_time": None,
        "active_seconds": seconds,
        "last_active_seconds": seconds - known.active_seconds,
    }
    if cause.reason in MEMORY_ERRORS:
        ran_out = Escalation(attempt=known.total, reason=cause.reason)
        case = case.changed(escalations=(*case.status.escalations, ran_out)[-MOST_ESCALATIONS:])
    return case.changed(attempts=known.model_copy(update=changes), members=at_rest(case.status.members))


def _give_up(case: Case, cause: Cause) -> Desired:
    failed = true(c.FAILED, cause.reason if cause.reason in c.CAUSES else RANK_CRASHED, cause.message)
    return _write(case.changed(completion_time=case.now).found(failed, *_none_lives("Ended")))


def _none_lives(reason: str, message: str = "") -> tuple[Finding, ...]:
    return (
        false(c.SCHEDULED, "NoAttempt"),
        false(c.RUNNING, reason, message),
        false(c.PROGRESSING, "NotRunning"),
    )


# --- none lives -------------------------------------------------------------------------------------------------------


def _between_attempts(case: Case) -> Desired:
    if case.wants_suspension:
        return _suspended(case)
    case = case.found(_NOT_SUSPENDED)
    over = overrun(case)
    if over is not None:
        return _give_up(case, over)
    known = case.attempts
    if known.end_time is not None:
        pause = pause_seconds(known.short_in_a_row)
        rest = pause - (case.seconds_now - seconds_of(known.end_time))
        if 0 < rest <= 2 * pause:  # more: the clock was set back, and nothing says how long ago the attempt ended
            return _write(case, look_again=min(rest, pause))
    return _hold(case) if known.last_reason == GANG_YIELDED else _start(pending(case))


def _hold(case: Case) -> Desired:
    """It yielded: the older jobs that wait for nodes go first, for a while."""
    if case.observed.waiting_gangs is None:
        return Desired(needs=frozenset({"waiting_gangs"}))
    held = case.seconds_now - seconds_of(case.attempts.end_time or case.now)
    if gangs.goes_first(case) is None or not 0 <= held < gangs.LONGEST_HOLD_SECONDS:
        return _start(pending(case))
    return _write(case, look_again=PATIENCE_SECONDS)


def pause_seconds(short_in_a_row: int) -> float:
    """Between attempts: none after one short attempt, then 1, 2, 4 ... 300 s, whatever the attempts ended of."""
    return min(LONGEST_PAUSE_SECONDS, 2.0 ** min(short_in_a_row - 2, 16)) if short_in_a_row > 1 else 0.0


def _suspended(case: Case) -> Desired:
    """Nothing runs. What was decided is void: spec.memory may change now, and the next attempt is planned anew."""
    if case.observed.contracts is None:
        return Desired(needs=frozenset({"contracts"}))
    total = max(case.attempts.total, _newest_contract(case))
    known = {"total": total, "ended": total, "pending_time": None}
    case = case.changed(attempts=case.attempts.model_copy(update=known))
    if given(case.spec, "scheduling.queueName") and case.reason(c.QUOTA_RESERVED):
        case = case.found(false(c.QUOTA_RESERVED, "Waiting", "spec.suspend is true"))
    outcome = accept(case.observed.job)
    accepted = outcome.finding() if isinstance(outcome, Refusal) else true(c.ACCEPTED, "Valid")
    suspended = true(c.SUSPENDED, c.SUSPENDED_BY_USER, "set spec.suspend to false to go on from the last checkpoint")
    return _write(case.found(accepted, suspended, *_none_lives("Suspended")))


def _start(case: Case) -> Desired:
    """The next attempt: its contract, then the children that the contract describes."""
    outcome = accept(case.observed.job)
    if isinstance(outcome, Refusal):
        return _refuse(case, outcome)
    needs = _missing(case, "contracts", *(["claims"] if claim_names(outcome.spec) else []))
    if needs:
        return Desired(needs=needs)
    case = case.found(true(c.ACCEPTED, "Valid"), _durability(case))
    obstacle = _obstacle(case, outcome)
    if obstacle is not None:
        return _wait(case, obstacle)
    committed = _newest_contract(case)
    # Without a count nobody knows whether the newest contract has run: its number counts as used.
    files = _read(case, committed) if committed > case.attempts.total and not case.count_is_lost else None
    uid, facts, cluster = case.observed.job.uid, case.observed.facts, case.observed.cluster
    if files is not None and is_ours(files, outcome, uid, facts):
        return _create(case, files)
    number = 1 + max(case.attempts.total, committed, *(attempt.attempt for attempt in case.owned), 0)
    if number > MAX_ATTEMPTS:
        return _wait(case, _NO_NUMBER)
    decided = plan_attempt(outcome, uid, cluster, facts, _past(case, number), case.place)
    return _not_planned(case, decided) if isinstance(decided, Finding) else _create(case, decided)


def _past(case: Case, number: int) -> Past:
    """For attempt `number`."""
    begun, known = _newest_begun(case), case.attempts
    memory = case.status.memory
    peak = memory.peak if memory is not None else None
    progress = case.status.progress
    has_reported = progress is not None and progress.last_step_time is not None  # else the peak is an earlier one's
    return Past(
        attempts=next_attempts(known, number, case.now),
        threads=begun.job.compute_threads if begun is not None else None,  # so that a resumed run rounds as it did
        because=c.clean(case.because or _why_restarting(case)),
        escalations=case.status.escalations,
        failures=_failures(case),
        last=begun.plan if begun is not None else None,
        peaks={tier: size for tier in Tier if has_reported and (size := getattr(peak, tier.value, None))},
        trained_seconds=0.0 if known.last_reason in MEMORY_ERRORS else float(known.last_active_seconds),
    )


def _not_planned(case: Case, found: Finding) -> Desired:
    """Waits; but where memory ran out and no other plan fits, that was the last rung."""
    known = case.attempts
    if found.reason != "DoesNotFit" or known.last_reason not in MEMORY_ERRORS:
        return _wait(case, found)
    why = case.because or _why_restarting(case)
    message = c.clean(f"{why}; no other plan fits: {found.message}")
    return _give_up(case.found(found), Cause(known.last_reason, message))


def _why_restarting(case: Case) -> str:
    """What an earlier look, before the pause, said of the attempt that ended."""
    running = c.find(case.before.conditions, c.RUNNING)
    return running.message if running is not None and running.reason == c.RESTARTING else ""


def _obstacle(case: Case, job: TrainingJob) -> Finding | None:
    """What others have to mend before the attempt can be created."""
    if case.observed.conflict:
        return _conflicts(case.observed.conflict)
    if case.observed.refusal:
        return false(c.SCHEDULED, "Refused", case.observed.refusal)
    begun = _newest_begun(case)
    altered = begun and changed_for_ever(begun.job.spec, job.spec, begun.job.epoch)
    return altered.finding() if altered else claim_problem(job.spec, case.observed.claims or ())


def _conflicts(child: str) -> Finding:
    sentence = f"{child} belongs to somebody else: remove it, or give the TrainingJob another name"
    return false(c.ACCEPTED, c.NAME_CONFLICT, sentence)


def _refuse(case: Case, refusal: Refusal) -> Desired:
    """Until the spec changes, which is an event; or until the pending deadline."""
    case = case.found(refusal.finding())
    over = expired(case, refusal.finding().message)
    return _write(case) if over is None else _give_up(case, over)


def _wait(case: Case, obstacle: Finding) -> Desired:
    """Nothing is created until the obstacle is gone; looked at again, ever more seldom.

    Also when no plan fits: nodes are added and freed, so that is no verdict on the job.
    """
    over = expired(case, obstacle.message)
    if over is not None:
        return _give_up(case.found(obstacle), over)
    waited = case.seconds_since(obstacle.type, "False")
    return _write(case.found(obstacle), look_again=_patience(waited))


def _create(case: Case, files: AttemptFiles) -> Desired:
    try:
        creates = manifests.children(files, case.observed.job, case.observed.facts)
    except UserError as error:
        return _wait(case, false(c.PLANNED, c.CONTRACT_TOO_LARGE, str(error)))
    uid = case.observed.job.uid
    if any(attempt.name == files.name and attempt.owner_uid != uid for attempt in case.observed.attempts):
        return _wait(case, _conflicts(f"Job {files.name}"))
    return _write(_begun(case, files), creates=creates, look_again=PATIENCE_SECONDS)


def _begun(case: Case, files: AttemptFiles) -> Case:
    """What the status says once the attempt exists. Its contract counts the end before it as it was seen when the
    contract was made; where a refused child kept the status from being written then, and a later look wrote that end
    as it saw it, the status stands: an end is counted once."""
    known, attempts = case.attempts, files.decision.attempts
    if known.ended >= attempts.ended:
        since = known.pending_time or attempts.pending_time
        changes = {"total": attempts.total, "start_time": attempts.start_time, "pending_time": since}
        attempts = known.model_copy(update=changes)
    begun = case.changed(
        attempts=attempts,
        plan=files.plan_status,
        escalations=_latest(case.status.escalations, files.decision.escalations),
        progress=at_the_start(case.status.progress, case.steps),
        start_time=case.status.start_time or attempts.start_time,
    ).found(*as_decided(files), _durability(case))
    begun = replace(begun, because=files.decision.because)
    return begun.found(*_waits_for_quota(case)) if files.job.spec.scheduling.queue_name else begun


def _latest(known: tuple[Escalation, ...], decided: tuple[Escalation, ...]) -> tuple[Escalation, ...]:
    """One for each attempt, with the sentence of whichever has it."""
    found = {one.attempt: one for one in known}
    found |= {one.attempt: one for one in decided if one.change or one.attempt not in found}
    return tuple(found[attempt] for attempt in sorted(found))[-MOST_ESCALATIONS:]


# --- what was seen ----------------------------------------------------------------------------------------------------


def _case(observed: Observed, now: str, place: placement.Place) -> Case:
    spec = json.loads(observed.job.spec)
    status = _status(observed.job.status)
    return Case(observed, now, spec if isinstance(spec, dict) else {}, status, status, place)


def _status(found: bytes) -> TrainingJobStatus:
    """The status as far as this version understands it: what another version wrote must not stop a job."""
    try:
        return TrainingJobStatus.model_validate_json(found)
    except ValidationError:
        document = json.loads(found)
    kept: dict[str, object] = {}
    for name, value in document.items() if isinstance(document, dict) else ():
        with suppress(ValidationError):
            kept |= TrainingJobStatus.model_validate({name: value}).model_dump(exclude_unset=True, mode="json")
    return TrainingJobStatus.model_validate(kept)


def _missing(case: Case, *names: str) -> frozenset[str]:
    """Those of "contracts", "pods", "claims" that were not observed."""
    return frozenset(name for name in names if getattr(case.observed, name) is None)


def _newest_contract(case: Case) -> int:
    """The last of those that follow the known attempts without a gap: the operator leaves none, and a number that
    somebody made up must not become an epoch. 0 when there is none."""
    numbers = {contract.attempt for contract in _contracts(case)}
    newest = case.attempts.total
    while newest + 1 in numbers:
        newest += 1
    return newest if newest in numbers else 0


def _contracts(case: Case) -> list[Contract]:
    uid = case.observed.job.uid
    return [contract for contract in case.observed.contracts or () if contract.owner_uid == uid]


def _read(case: Case, attempt: int) -> AttemptFiles | None:
    """The files of that attempt; None when there are none that can be read."""
    for contract in _contracts(case):
        if contract.attempt == attempt:
            files = manifests.read_contract(contract)
            return files if files is not None and belongs_to(files, case.observed.job, attempt) else None
    return None


def _not_read(case: Case, attempt: int) -> Finding | None:
    """What to say of a contract that is there and that this operator cannot read."""
    for contract in _contracts(case):
        if contract.attempt == attempt and manifests.read_contract(contract) is None:
            return true(c.ACCEPTED, c.CONTRACT_NOT_READ, manifests.why_not_read(contract))
    return None


def _newest_begun(case: Case) -> AttemptFiles | None:
    """The files of the newest attempt that was begun and can be read."""
    begun = [contract.attempt for contract in _contracts(case) if contract.attempt <= case.attempts.total]
    for number in sorted(begun, reverse=True):
        files = _read(case, number)
        if files is not None:
            return files
    return None


def _with_changes(case: Case, attempt: AttemptObject) -> Case:
    """With what the spec says otherwise than the attempt that lives, which goes on as it was made."""
    files, outcome = _read(case, attempt.attempt), accept(case.observed.job)
    unread = _not_read(case, attempt.attempt) if files is None else None
    if unread is not None:
        return case.found(unread)
    if files is None or isinstance(outcome, Refusal):
        return case
    fields = [f"spec.{name}" for name in changed_fields(files.job.spec, outcome.spec)]
    if not fields:
        return case.found(true(c.ACCEPTED, "Valid"))
    goes_on = (
        f"attempt {attempt.attempt} goes on with what ConfigMap {files.name} says; the next one uses the new value"
    )
    return case.found(true(c.ACCEPTED, c.USED_LATER, f"{', '.join(fields)} changed: {goes_on}"))


def _is_young(waited: float) -> bool:
    """Whether it happened a moment ago. Far in the future is no such thing: the clock was set back."""
    return -PATIENCE_SECONDS <= waited < PATIENCE_SECONDS


def _patience(waited: float) -> float:
    """As long again as it took so far, within bounds."""
    return min(SLOWEST_LOOK_SECONDS, max(PATIENCE_SECONDS, waited))


# --- the answer -------------------------------------------------------------------------------------------------------

_AT_FIRST = (
    false(c.RUNNING, "NotStarted"),
    _NOT_SUSPENDED,
    false(c.COMPLETE, "NotComplete"),
    false(c.FAILED, "NotFailed"),
)


def _write(
    case: Case,
    *,
    creates: tuple[Manifest, ...] = (),
    deletes: tuple[Deletion, ...] = (),
    look_again: float | None = None,
) -> Desired:
    """The whole status, and only when it says something new."""
    job, before = case.observed.job, case.before
    findings = case.findings if before.conditions else (*_AT_FIRST, *case.findings)
    conditions = c.merge(before.conditions, findings, job.generation, case.now)
    after = case.status.model_copy(
        update={"conditions": conditions, "state": c.state(conditions), "observed_generation": job.generation}
    )
    due = due_seconds(replace(case, status=after))
    look_again = min((seconds for seconds in (look_again, due) if seconds is not None), default=None)
    if after == before:
        return Desired(creates=creates, deletes=deletes, look_again_seconds=look_again)
    return Desired(
        creates=creates,
        deletes=deletes,
        status=_document(after),
        events=(
            *_restart_note(case),
            *member_notes(before.members, after.members),
            *correction_notes(before.memory, after.memory, is_corrected=case.is_corrected),
            *c.notes(before.conditions, conditions),
        ),
        ran_out=_ran_out(before, after),
        look_again_seconds=look_again,
    )


def _restart_note(case: Case) -> tuple[EventNote, ...]:
    """Said once: by the status that first accounts for the end."""
    if not case.because or case.attempts.ended <= (case.before.attempts or Attempts()).ended:
        return ()
    return (EventNote("Warning", case.attempts.last_reason, "Restart", c.clean(case.because)),)


def _ran_out(before: TrainingJobStatus, after: TrainingJobStatus) -> tuple[Escalation, ...]:
    known = {one.attempt for one in before.escalations}
    return tuple(one for one in after.escalations if one.attempt not in known)


def _document(status: TrainingJobStatus) -> dict[str, Any]:
    """Without what is not set: a field that is left out is removed."""
    found = status.model_dump(mode="json", exclude_none=True)
    return {name: value for name, value in found.items() if value not in ([], "")}
