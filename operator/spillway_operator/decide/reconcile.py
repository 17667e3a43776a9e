"""reconcile: what was observed of one TrainingJob -> what to do now. Total and pure: the whole life of a job.

    an attempt exists            -> watch it: queued, starting, running, stopping
    it ended                     -> find the cause, count it, decide whether another attempt follows
    no attempt exists            -> suspended; or the next attempt: accepted, planned, created
    the job is complete, failed  -> nothing; deleted when its time to live is over

When the operator itself ends an attempt (a deadline, a stall), it first writes that to the status: the decision
survives a crash, and takes the newest report into account.

An attempt is one immutable ConfigMap (its contract), a Service for more than one node, and one Indexed Job, created in
this order before the status is written. After a crash the same rules apply: a contract without a Job gets the Job that
it describes and is not planned again; a Job that the status does not know is adopted with its contract's values; a
deleted Job ends its attempt.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace

from pydantic import ValidationError

from spillway.api.field_types import MAX_COUNT
from spillway.api.limits import MANAGER
from spillway.api.pod import DEFAULT_RESTARTS
from spillway.api.script import is_script
from spillway.api.status import MOST_ESCALATIONS, MOST_FAULTY_NODES, Escalation, FaultyNode, TrainingJobStatus
from spillway.api.training_job import TrainingJob
from spillway.errors import ExitCode
from spillway.feedback.ladder import tries_are_used_up
from spillway.feedback.retries import (
    GANG_YIELDED,
    JOB_DELETED,
    MEMORY_ERRORS,
    NODE_LOST,
    OOM_KILLED,
    Retry,
    is_fault_of_node,
    retry_of,
)
from spillway.placement import place as placement
from spillway.units import counted, format_seconds

from . import conditions as c
from . import gangs
from .acceptance import Rejection, accept, changed_fields, given
from .answer import NOT_SUSPENDED, PATIENCE_SECONDS, give_up, none_lives, patience, write
from .attempt_end import Cause, cause_of_end, completed_rank, saved_step, where_is
from .case import Case, is_over, known_seconds, num_steps, seconds_of, whole
from .conditions import Finding, false, true, unknown
from .contracts import memory_failure, memory_failures, missing, newest_contract, not_read, read_files
from .deadlines import (
    active,
    active_seconds,
    end_seconds,
    expired,
    others_are_silent_too,
    overrun,
    pending,
    silent_seconds,
    stall_seconds,
    stalled,
)
from .observed import AttemptObject, Deletion, Desired, Observed, PodObject
from .planning import advice
from .pods import is_finished, is_lost, pod_findings, waits_for_lost_nodes
from .progress_status import as_fields, at_rest, at_the_end, reported, with_report, with_saved_step
from .starting import begun, durability, fits_elsewhere, start, waits_for_quota

SLOWEST_POD_LOOK_SECONDS = 30.0
"""Longest interval between looks at pods that are not running: no watch reports them, and the cause may change."""
REPLAN_SECONDS = 30.0
"""Time without a node after which another plan is tried; at least as long as the longest interval between looks."""
MOST_REPLAN_WAITS = 16
"""Longest interval between two tries, in REPLAN_SECONDS."""
SHORT_ATTEMPT_SECONDS = 600.0
"""An attempt that ends sooner makes the next pause longer."""
LONGEST_PAUSE_SECONDS = 300.0
COMPLETED = ExitCode.COMPLETED.reason
SUSPENDED_REASON = "Suspended"
"""attempts.lastReason after spec.suspend."""
NOTHING = Desired()


def reconcile(observed: Observed, now: str, place: placement.Place | None = None) -> Desired:
    """What to do now; `now` is RFC 3339. Never raises, whatever the objects in the API server contain."""
    case = case_of(observed, now, place or placement.place)
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
    """Jobs to delete: running ones that are not the newest, or whose attempt is accounted for as ended; and old ended
    ones that hold a volume (with a storage class, a pod's spill claim is only deleted with the pod)."""
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


# --- an attempt exists ------------------------------------------------------------------------------------------------


def _watch(case: Case, attempt: AttemptObject) -> Desired:  # noqa: PLR0911 - one line per case
    is_news = case.observed.job.generation != case.before.observed_generation
    if (attempt.attempt > case.attempts.total or is_news) and case.observed.contracts is None:
        return Desired(needs=frozenset({"contracts"}))
    if attempt.attempt > case.attempts.total:
        case = _adopted(case, attempt)
    case = _with_report(case)
    if not (case.wants_suspension or (attempt.deleting and not attempt.outcome and _was_stopped(case))):
        case = case.found(NOT_SUSPENDED)
    if attempt.outcome == "Complete":
        return _completed(case, attempt)
    if attempt.outcome == "Failed":
        return _failed(case, attempt)
    if attempt.deleting:
        return _stopping(case, attempt)
    if case.wants_suspension:
        return write(case.found(_STOPPING), deletes=(_deletion(attempt),), look_again=PATIENCE_SECONDS)
    if case.ending is not None:
        return write(case, deletes=(_deletion(attempt),), look_again=PATIENCE_SECONDS)
    return _lives(_with_changes(case, attempt) if is_news else case, attempt)


def _lives(case: Case, attempt: AttemptObject) -> Desired:
    """Handles an attempt that should go on: queued, starting or running."""
    if attempt.suspended:
        return _queued(pending(case), attempt)
    if case.reason(c.QUOTA_RESERVED) == "Waiting":
        return write(case.found(true(c.QUOTA_RESERVED, "Admitted"), *_STARTING), look_again=PATIENCE_SECONDS)
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
            return _end(case.found(false(c.PROGRESSING, cause.reason, cause.message)), cause)
        if case.trainer_was_heard:
            return write(case.found(_NOBODY_HEARD), look_again=SLOWEST_POD_LOOK_SECONDS)
        case = case.found(_NEVER_HEARD)
    due = case.report_due_seconds if case.last_step_time is not None else -1.0
    return write(case, look_again=due + 1.0 if due >= 0 else None)


def _end(case: Case, cause: Cause) -> Desired:
    """Writes to the status that the operator ends the attempt, and why. The next round deletes its Job."""
    running = true if case.attempts.active_time is not None else false
    return write(case.found(running(c.RUNNING, cause.reason, cause.message)))


_STARTING = (unknown(c.SCHEDULED, "Waiting"), false(c.RUNNING, "Starting"), unknown(c.PROGRESSING, "Waiting"))
_ALL_RUN = (true(c.SCHEDULED, "Scheduled"), true(c.RUNNING, "Running"))
_STOPPING = false(
    c.SUSPENDED, c.STOPPING, "the attempt is ending; a trainer that has begun to train first writes a checkpoint"
)
_NOBODY_HEARD = unknown(
    c.PROGRESSING,
    c.NO_REPORT,
    "no job reports steps, so the operator itself may be at fault (its Service, its certificate, the network); "
    "no attempt is ended",
)
_NEVER_HEARD = unknown(
    c.PROGRESSING,
    c.NO_REPORT,
    "all pods run, but this job has never reported: the trainer hangs, cannot reach the operator, or is a script that "
    "reports nothing; see spillway logs. The attempt is not ended, because lifecycle.stallSeconds applies only to jobs "
    "that have reported",
)


def _adopted(case: Case, attempt: AttemptObject) -> Case:
    """Adds an attempt that is missing in the status because of a crash, with its contract's values."""
    files = read_files(case, attempt.attempt)
    if files is not None:
        return begun(case, files)
    accepted = not_read(case, attempt.attempt) or true(c.ACCEPTED, "Valid")
    known = {
        "total": attempt.attempt, "ended": attempt.attempt - 1, "start_time": attempt.creation_time,
        "active_time": None,
    }  # fmt: skip
    return case.changed(attempts=case.attempts.model_copy(update=known)).found(accepted, *_STARTING)


def _with_report(case: Case) -> Case:
    """The case with the newest progress report, if it is not in the status yet."""
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
    return case.found(durability(case))


def _no_report(case: Case) -> Finding:
    """The finding for an overdue report. Its text does not change with time, so that it is written once."""
    what = f"no step was reported since {case.last_step_time}, for more than {format_seconds(case.patience_seconds)}"
    why = f"the trainer hangs, or cannot reach the operator; see spillway logs {case.observed.job.name}"
    return unknown(c.PROGRESSING, c.NO_REPORT, f"{what}: {why}")


def _queued(case: Case, attempt: AttemptObject) -> Desired:
    """Handles a suspended attempt, which the queue resumes. An evicted one has run: a new attempt replaces it."""
    has_run = case.attempts.active_time or case.reason(c.QUOTA_RESERVED) in ("Admitted", c.EVICTED_BY_QUEUE)
    if has_run or attempt.active or attempt.ready:
        evicted = false(c.QUOTA_RESERVED, c.EVICTED_BY_QUEUE, f"{_evicted(case)}; another attempt follows")
        return write(case.found(evicted), deletes=(_deletion(attempt),), look_again=PATIENCE_SECONDS)
    waited = case.seconds_since(c.QUOTA_RESERVED, "False")
    in_a_queue = bool(given(case.spec, "scheduling.queueName"))
    if in_a_queue and not _is_young(waited) and case.observed.queue_says is None:
        return Desired(needs=frozenset({"queue_says"}))
    waits = waits_for_quota(case)
    over = expired(case, waits[0].message)
    if over is not None:
        return _end(case.found(*waits), over)
    return write(case.found(*waits), look_again=patience(waited) if in_a_queue else None)


def _evicted(case: Case) -> str:
    if given(case.spec, "scheduling.queueName"):
        return "Kueue evicted the attempt"
    return f"another client suspended Job {case.attempt_name}"


def _not_ready(case: Case, attempt: AttemptObject) -> Desired:  # noqa: PLR0911 - one line per case
    """Handles an attempt whose pods do not all run: after PATIENCE_SECONDS, examines them."""
    waited = case.seconds_now - _began_seconds(case, attempt)
    if _is_young(waited):
        return write(case, look_again=min(PATIENCE_SECONDS, PATIENCE_SECONDS - waited))
    pods = case.observed.pods
    if pods is None:
        return Desired(needs=frozenset({"pods"}))
    if any(is_lost(pod, case.seconds_now) for pod in pods):
        # The attempt would never end: the Job waits for a pod on a lost node, and the other pods for its rank.
        return Desired(deletes=(_deletion(attempt),), look_again_seconds=PATIENCE_SECONDS)
    if any(pod.deleting or is_finished(pod) for pod in pods):
        return write(case, look_again=PATIENCE_SECONDS)  # the Job is about to end
    found = pod_findings(pods, case.num_nodes, attempt, case.observed.pods_rejection)
    case = case.found(*found)
    if case.attempts.active_time is None:
        case = pending(case)
        obstacle = next((finding.message for finding in found if finding.message), "not every pod is running")
        if gangs.holds_in_part(case, pods) and case.observed.waiting_gangs is None:
            return Desired(needs=frozenset({"waiting_gangs"}))
        over = expired(case, obstacle) or gangs.yields(case, pods)
        if over is None and _may_replan(case, pods):
            if not case.observed.capacity_is_fresh:
                return Desired(needs=frozenset({"pods", "capacity"}))
            over = fits_elsewhere(case)
        if over is not None:
            return _end(case, over)
    waited = min(waited, case.seconds_since(c.RUNNING, "False"), SLOWEST_POD_LOOK_SECONDS)
    return write(case, look_again=patience(waited))


def _may_replan(case: Case, pods: tuple[PodObject, ...]) -> bool:
    """Whether to look for a plan that fits what is free now: no pod has a node, nor is there a queue to go back to, and
    the scheduler has looked for REPLAN_SECONDS, or twice, four times ... as long."""
    if given(case.spec, "scheduling.queueName") or any(pod.node for pod in pods):
        return False
    if not all(pod.unschedulable for pod in pods):
        return False
    tries = int(case.seconds_since(c.SCHEDULED, "False") // REPLAN_SECONDS)
    return tries > 0 and (tries & (tries - 1) == 0 or tries % MOST_REPLAN_WAITS == 0)


def _began_seconds(case: Case, attempt: AttemptObject) -> float:
    """When its pods could start: when the Job was created, or the queue admitted it."""
    admitted = c.find(case.status.conditions, c.QUOTA_RESERVED)
    created = seconds_of(attempt.creation_time)
    if admitted is None or admitted.status != "True" or admitted.last_transition_time is None:
        return created
    return max(created, seconds_of(admitted.last_transition_time))


def _stopping(case: Case, attempt: AttemptObject) -> Desired:
    """Handles a Job that is being deleted: it ends when it is gone, or when its remaining pods are on lost nodes."""
    if case.wants_suspension:
        case = case.found(_STOPPING)
    waited = case.seconds_now - seconds_of(attempt.deletion_time or case.now)
    if _is_young(waited):
        return write(case, look_again=min(PATIENCE_SECONDS, PATIENCE_SECONDS - waited))
    if case.observed.pods is None:
        return Desired(needs=frozenset({"pods"}))
    if not waits_for_lost_nodes(case.observed.pods, case.seconds_now):
        return write(case, look_again=patience(waited))
    if case.observed.contracts is None:
        return Desired(needs=frozenset({"contracts"}))
    pod = next(pod for pod in case.observed.pods if is_lost(pod, case.seconds_now))
    late = f"{where_is(pod)}: did not end within its grace period, so its node counts as lost"
    return _ended(case, Cause(NODE_LOST, late, pod.node))


# --- the job has ended ------------------------------------------------------------------------------------------------


def _after_the_end(case: Case) -> Desired:
    """Deletes a Complete or Failed job after its time to live, if the spec has one.

    The time starts at the latest end in the status, so that a completionTime that somebody wrote cannot shorten it;
    without any, it starts now.
    """
    if given(case.spec, "lifecycle.ttlSecondsAfterFinished") is None:
        return write(case)
    ended = end_seconds(case)
    if ended is None:
        case, ended = case.changed(completion_time=case.now), case.seconds_now
    left = ended + case.lifecycle_seconds("ttlSecondsAfterFinished", MAX_COUNT) - case.seconds_now
    if left > 0:
        return write(case, look_again=left)
    job = case.observed.job
    return Desired(deletes=(Deletion("TrainingJob", job.name, job.uid, job.resource_version),))


# --- the attempt ended ------------------------------------------------------------------------------------------------


def _completed(case: Case, attempt: AttemptObject) -> Desired:
    trainer_decides = given(case.spec, "training.earlyStopping") is not None or not num_steps(case.spec)
    needs = missing(case, "pods") if trainer_decides else frozenset()
    if needs:
        return Desired(needs=needs)
    case = _accounted(case, Cause(COMPLETED, ""), case.attempts.short_in_a_row, attempt.outcome_time)
    total, known, asked = case.attempts.total, case.status.progress, case.steps
    # For a sweep, as many steps as were reported: successive halving may have stopped members.
    steps = known.steps if case.status.members and known is not None else asked
    said = completed_rank(case.observed.pods or ()) if trainer_decides else None
    if said is not None and said.step:
        steps = min(said.step, steps or said.step)
    case = case.changed(progress=at_the_end(known, steps), completion_time=case.now)
    what = counted(steps, "step") if steps else "the script ended" if is_script(case.spec) else "completed"
    trained = f"{what} in {counted(total, 'attempt')}"
    if said is not None and steps < asked:
        trained += f"; {said.message}"
    if case.status.best_member:
        trained += f"; the best of {len(case.members)} members is {case.status.best_member}"
    return write(case.found(true(c.COMPLETE, "Completed", trained), *none_lives("Ended")))


def _failed(case: Case, attempt: AttemptObject) -> Desired:
    needs = missing(case, "pods", "contracts")
    if needs:
        return Desired(needs=needs)
    pods, short_in_a_row = case.observed.pods or (), case.attempts.short_in_a_row
    cause = cause_of_end(pods, case.num_nodes, attempt.name, short_in_a_row)
    return _ended(_with_what_pods_say(case), cause, attempt.outcome_time)


def _vanished(case: Case) -> Desired:
    """Handles an attempt in the status whose Job was deleted; it ends when its pods have ended, too."""
    needs = missing(case, "pods", "contracts")
    if needs:
        return Desired(needs=needs)
    case, pods = _with_what_pods_say(_with_report(case)), case.observed.pods or ()
    if not all(is_finished(pod) or is_lost(pod, case.seconds_now) for pod in pods):
        case = case.found(_STOPPING) if case.wants_suspension else case
        is_left = any(pod.orphaned and not pod.deleting and not is_finished(pod) for pod in pods)
        case = case.found(_job_gone(case)) if is_left and case.ending is None else case
        return write(case, look_again=PATIENCE_SECONDS)
    if case.reason(c.QUOTA_RESERVED) == c.EVICTED_BY_QUEUE:
        return _ended(case, Cause(ExitCode.PREEMPTED.reason, _evicted(case)))
    return _ended(case, Cause(JOB_DELETED, f"Job {case.attempt_name} was deleted"))


def _job_gone(case: Case) -> Finding:
    """The finding after a deletion with --cascade=orphan: nothing else will end these pods."""
    gone = case.attempt_name
    delete = f"kubectl delete pod -n {case.observed.job.namespace} -l batch.kubernetes.io/job-name={gone}"
    return false(c.RUNNING, c.JOB_GONE, f"Job {gone} was deleted, but its pods still run: {delete}")


def _with_what_pods_say(case: Case) -> Case:
    """The case with the last checkpoint that the pods committed, in case its report was lost, and with the start of the
    last pod, in case no look saw all pods running."""
    pods = case.observed.pods or ()
    begun = [pod.ending.started_at for pod in pods if pod.ending is not None]
    if case.attempts.active_time is None and len(begun) >= case.num_nodes and all(map(known_seconds, begun)):
        known = {"active_time": max(begun, key=seconds_of), "pending_time": None}
        case = case.changed(attempts=case.attempts.model_copy(update=known))
    saved = saved_step(pods)
    if saved is None or case.members:  # a sweep's members report their own checkpoints
        return case
    after = with_saved_step(reported(case.status), saved, case.attempts.total, case.steps)
    return case.changed(**as_fields(after))


def _ended(case: Case, cause: Cause, end: str = "") -> Desired:
    """Accounts for the end of the current attempt, at the time `end` or now, and decides what follows."""
    cause = case.ending or cause
    known, retry = case.attempts, retry_of(cause.reason)
    if (case.wants_suspension or _was_stopped(case)) and retry is not Retry.NEVER:
        return _between_attempts(_accounted(case, Cause(SUSPENDED_REASON, ""), 0, end))
    lasted = case.seconds_now - seconds_of(known.start_time or case.now)
    is_short = lasted < SHORT_ATTEMPT_SECONDS
    case = _accounted(case, cause, known.short_in_a_row + 1 if is_short else 0, end)
    if retry is Retry.REPLANNED:
        return _replanned(case, cause)
    if retry is Retry.NEVER:
        return give_up(case, cause)
    if retry is Retry.COUNTED:
        limit = whole(given(case.spec, "lifecycle.maxRestarts"), DEFAULT_RESTARTS)
        if known.restarts >= limit:
            return _give_up(case, cause, f"; no restart is left (lifecycle.maxRestarts = {limit})")
        case = case.changed(attempts=case.attempts.model_copy(update={"restarts": known.restarts + 1}))
    message = f"attempt {known.total} ended: {cause.message}"
    return _between_attempts(replace(case, because=message).found(*none_lives(c.RESTARTING, message)))


def _replanned(case: Case, cause: Cause) -> Desired:
    """Starts another attempt under another plan after an out-of-memory end, if the mode allows it and tries remain."""
    mode, tries = given(case.spec, "memory.mode") or "Auto", case.attempts.memory_errors - 1
    if mode == "Advise":
        case = _advised(case)
    more = "; raise spec.pod.resources.memory" if cause.reason == OOM_KILLED else ""
    if is_script(case.spec):
        return _give_up(case, cause, more)
    if mode != "Auto":
        return _give_up(case, cause, f"{more}; no other plan is tried, because memory.mode is {mode}")
    if tries_are_used_up([one.reason for one in case.status.escalations], case.attempts.memory_errors):
        tried = f"{counted(tries, 'other plan')} ran out of memory, too (see status.escalations)"
        return _give_up(case, cause, f"; {tried}{more}")
    if memory_failure(case, case.attempts.total, cause.reason) is None:
        unread = f"ConfigMap {case.attempt_name}, which has this attempt's plan, is missing or of another version"
        return _give_up(case, cause, f"{more}; no other plan is tried, because {unread}")
    message = f"attempt {case.attempts.total} ended: {cause.message}"
    return _between_attempts(replace(case, because=message).found(*none_lives(c.RESTARTING, message)))


def _give_up(case: Case, cause: Cause, why: str) -> Desired:
    """Fails the job; `why` no attempt follows is kept even after the longest message."""
    said = c.clean(cause.message, c.LONGEST_MESSAGE - len(why))
    return give_up(case, replace(cause, message=said + why))


def _advised(case: Case) -> Case:
    """The case with what mode Auto would do, for people: mode Advise changes nothing."""
    outcome, failed = accept(case.observed.job), memory_failures(case)
    if not isinstance(outcome, TrainingJob) or not failed or failed[-1].attempt != case.attempts.total:
        return case
    said = advice(outcome, case.observed.cluster, failed, case.place)
    *earlier, last = case.status.escalations
    return case.changed(escalations=(*earlier, last.model_copy(update={"change": said})))


def _accounted(case: Case, cause: Cause, short_in_a_row: int, end: str) -> Case:
    """The case with the ended attempt counted in status.attempts."""
    known, is_free, seconds = case.attempts, retry_of(cause.reason) is Retry.FREE, int(active_seconds(case, end))
    changes = {
        "ended": known.total,
        "disruptions": known.disruptions + is_free,
        "memory_errors": known.memory_errors + (cause.reason in MEMORY_ERRORS),
        "last_reason": cause.reason,
        "last_node": cause.node[:253],
        "faulty_nodes": _faulty_nodes(case, cause),
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


def _faulty_nodes(case: Case, cause: Cause) -> tuple[FaultyNode, ...] | None:
    """Nodes that the job avoids, including the attempt's node if the end of the attempt counts as its fault."""
    known = case.attempts
    kept = tuple(one for one in known.faulty_nodes or () if one.node != cause.node)
    if not is_fault_of_node(cause.reason, cause.node, known.last_reason, known.last_node):
        return known.faulty_nodes
    return (*kept, FaultyNode(node=cause.node, reason=cause.reason, time=case.now))[-MOST_FAULTY_NODES:]


# --- no attempt exists ------------------------------------------------------------------------------------------------


def _between_attempts(case: Case) -> Desired:
    if case.wants_suspension:
        return _suspended(case)
    case = case.found(NOT_SUSPENDED)
    over = overrun(case)
    if over is not None:
        return give_up(case, over)
    known = case.attempts
    if known.end_time is not None:
        pause = pause_seconds(known.short_in_a_row)
        rest = pause - (case.seconds_now - seconds_of(known.end_time))
        if 0 < rest <= 2 * pause:  # more: the clock was set back, and it is not known when the attempt ended
            return write(case, look_again=min(rest, pause))
    return _hold(case) if known.last_reason == GANG_YIELDED else start(pending(case))


def _hold(case: Case) -> Desired:
    """Lets older jobs that wait for nodes go first, for up to LONGEST_HOLD_SECONDS, after this one yielded."""
    if case.observed.waiting_gangs is None:
        return Desired(needs=frozenset({"waiting_gangs"}))
    held = case.seconds_now - seconds_of(case.attempts.end_time or case.now)
    if gangs.goes_first(case) is None or not 0 <= held < gangs.LONGEST_HOLD_SECONDS:
        return start(pending(case))
    return write(case, look_again=PATIENCE_SECONDS)


def pause_seconds(short_in_a_row: int) -> float:
    """Pause between attempts: none after one short attempt, then 1, 2, 4 ... 300 s, whatever the cause."""
    return min(LONGEST_PAUSE_SECONDS, 2.0 ** min(short_in_a_row - 2, 16)) if short_in_a_row > 1 else 0.0


def _suspended(case: Case) -> Desired:
    """Reports the suspension. Contracts that have not run are void: spec.memory may change, and the next attempt is
    planned again."""
    if case.observed.contracts is None:
        return Desired(needs=frozenset({"contracts"}))
    total = max(case.attempts.total, newest_contract(case))
    known = {"total": total, "ended": total, "pending_time": None}
    case = case.changed(attempts=case.attempts.model_copy(update=known))
    if given(case.spec, "scheduling.queueName") and case.reason(c.QUOTA_RESERVED):
        case = case.found(false(c.QUOTA_RESERVED, "Waiting", "spec.suspend is true"))
    outcome = accept(case.observed.job)
    accepted = outcome.finding() if isinstance(outcome, Rejection) else true(c.ACCEPTED, "Valid")
    suspended = true(c.SUSPENDED, c.SUSPENDED_BY_USER, f"set spec.suspend to false to {_resumption(case)}")
    return write(case.found(accepted, suspended, *none_lives("Suspended")))


def _resumption(case: Case) -> str:
    """What the job does after a suspension. What a script does is not known."""
    if not case.attempts.total:
        return "start"
    if is_script(case.spec):
        return "continue"
    if not given(case.spec, "checkpoint.claim"):
        return "continue; checkpoint.claim is not set, so the next attempt starts from the beginning"
    return "resume from the last checkpoint" if case.status.checkpoint is not None else "continue"


def _was_stopped(case: Case) -> bool:
    """Whether the attempt is ending because of spec.suspend, although that may be false again."""
    return case.reason(c.SUSPENDED) == c.STOPPING


def case_of(observed: Observed, now: str, place: placement.Place) -> Case:
    spec = json.loads(observed.job.spec)
    status = _status(observed.job.status)
    return Case(observed, now, spec if isinstance(spec, dict) else {}, status, status, place)


def _status(found: bytes) -> TrainingJobStatus:
    """The fields of the status that this version understands: a status of another version must not block a job."""
    try:
        return TrainingJobStatus.model_validate_json(found)
    except ValidationError:
        document = json.loads(found)
    kept: dict[str, object] = {}
    for name, value in document.items() if isinstance(document, dict) else ():
        with suppress(ValidationError):
            kept |= TrainingJobStatus.model_validate({name: value}).model_dump(exclude_unset=True, mode="json")
    return TrainingJobStatus.model_validate(kept)


def _with_changes(case: Case, attempt: AttemptObject) -> Case:
    """The case with a finding about spec changes that the current attempt does not use."""
    files, outcome = read_files(case, attempt.attempt), accept(case.observed.job)
    unread = not_read(case, attempt.attempt) if files is None else None
    if unread is not None:
        return case.found(unread)
    if files is None or isinstance(outcome, Rejection):
        return case
    fields = [f"spec.{name}" for name in changed_fields(files.job.spec, outcome.spec)]
    if not fields:
        return case.found(true(c.ACCEPTED, "Valid"))
    goes_on = (
        f"attempt {attempt.attempt} continues with the values in ConfigMap {files.name}; the next one uses the new ones"
    )
    return case.found(true(c.ACCEPTED, c.USED_LATER, f"{', '.join(fields)} changed: {goes_on}"))


def _is_young(waited: float) -> bool:
    """Whether it happened less than PATIENCE_SECONDS ago. Far in the future means that the clock was set back."""
    return -PATIENCE_SECONDS <= waited < PATIENCE_SECONDS
