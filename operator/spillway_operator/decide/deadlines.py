"""Deadlines: how long a job was active, pending and silent, and whether that exceeds a limit.

Every second of a job that is not suspended is active (from when all pods of an attempt first run to the attempt's end),
pending (waiting for that: for nodes, claims, quota, images), or a pause between attempts. Kueue and batch/v1 count
waiting pods as running; here they have a separate deadline, so that no second counts twice.
"""

from __future__ import annotations

from spillway.api.field_types import MAX_COUNT
from spillway.api.pod import DEFAULT_STALL_SECONDS
from spillway.feedback.retries import DEADLINE_EXCEEDED, NO_PROGRESS, PENDING_DEADLINE_EXCEEDED

from . import conditions as c
from .attempt_end import Cause
from .case import PATIENT_STEPS, Case, is_over, known_seconds

LEAST_STALL_SECONDS = 15.0
"""Shortest stall: a healthy trainer posts every five seconds and may miss a post."""


def active(case: Case) -> Case:
    """Marks the attempt as active from now on, because all pods run."""
    known = case.attempts
    if known.active_time is not None and known.pending_time is None:
        return case
    since = case.now
    if case.before.attempts is not None and case.before.attempts.total == known.total:
        # The attempt already ran under an earlier version of the operator, which did not record active_time.
        running = c.find(case.before.conditions, c.RUNNING)
        since = running.last_transition_time or since if running is not None and running.status == "True" else since
    changes = {"active_time": known.active_time or since, "pending_time": None}
    return case.changed(attempts=known.model_copy(update=changes))


def pending(case: Case) -> Case:
    """Marks the job as pending from now on, unless it is already pending or active."""
    if case.attempts.pending_time is not None or case.attempts.active_time is not None:
        return case
    return case.changed(attempts=case.attempts.model_copy(update={"pending_time": case.now}))


def active_seconds(case: Case, until: str = "") -> float:
    """Active seconds of all attempts; the current one counts until the RFC 3339 time `until`, or until now."""
    since = known_seconds(case.attempts.active_time)
    present = 0.0 if since is None else min(known_seconds(until) or case.seconds_now, case.seconds_now) - since
    return min(float(MAX_COUNT), case.attempts.active_seconds + max(0.0, present))


def overrun(case: Case) -> Cause | None:
    """The cause if the active deadline is exceeded."""
    limit, active = case.lifecycle_seconds("activeDeadlineSeconds"), active_seconds(case)
    if not limit or active < limit:
        return None
    ran = f"the attempts of the job ran for {active:.0f} s"
    return Cause(DEADLINE_EXCEEDED, f"lifecycle.activeDeadlineSeconds = {limit} is exceeded: {ran}")


def expired(case: Case, obstacle: str) -> Cause | None:
    """The cause if the pending deadline is exceeded; `obstacle` says what the job waits for."""
    limit, waited = case.lifecycle_seconds("pendingDeadlineSeconds"), waited_seconds(case)
    if not limit or waited < limit:
        return None
    over = f"lifecycle.pendingDeadlineSeconds = {limit} is exceeded"
    return Cause(PENDING_DEADLINE_EXCEEDED, f"{over}: the job waited {waited:.0f} s for an attempt to run; {obstacle}")


def waited_seconds(case: Case) -> float:
    since = known_seconds(case.attempts.pending_time)
    return 0.0 if since is None else max(0.0, case.seconds_now - since)


def silent_seconds(case: Case) -> float | None:
    """Seconds since the running attempt last reported a new step, or else since all its pods run; None if it cannot
    report.

    Uses the operator's clock, because the node's may be wrong. A trainer that posts without making steps is silent.
    Only time in which this process could receive reports counts: after an outage each job has its full time again.
    """
    hearing, progress = case.observed.hearing_seconds, case.status.progress
    advanced = None if progress is None else progress.advance_time
    if hearing is None or (case.last_step_time is not None and advanced is None):
        return None  # also if an older CRD drops advanceTime, and before the first report after an upgrade
    running = c.find(case.before.conditions, c.RUNNING)
    since = running.last_transition_time if running is not None and running.status == "True" else case.now
    times = (since, case.attempts.active_time, advanced)
    last = max((known for known in map(known_seconds, times) if known is not None), default=case.seconds_now)
    return max(0.0, min(hearing, case.seconds_now - last))


def others_are_silent_too(case: Case, silent: float) -> bool:
    """Whether other attempts run but none of them reported for `silent` seconds: then no attempt is ended."""
    others = case.observed.others_silent_seconds
    return others is not None and others >= silent


def stall_seconds(case: Case) -> float:
    """The silence that ends an attempt: the spec's, but at least PATIENT_STEPS predicted steps. Infinite = never."""
    limit = case.lifecycle_seconds("stallSeconds", DEFAULT_STALL_SECONDS)
    return max(limit, LEAST_STALL_SECONDS, PATIENT_STEPS * case.predicted_seconds) if limit else float("inf")


def stalled(case: Case, silent: float) -> Cause:
    limit = case.lifecycle_seconds("stallSeconds", DEFAULT_STALL_SECONDS)
    step = case.status.progress.step if case.status.progress is not None else 0
    what = f"no step after step {step} for {silent:.0f} s (lifecycle.stallSeconds = {limit})"
    return Cause(NO_PROGRESS, f"{what}: the trainer hangs, or cannot reach the operator")


def due_seconds(case: Case) -> float | None:
    """Seconds until the next deadline of the job; None if there is none, or it has passed."""
    attempts, dues = case.attempts, []
    if case.wants_suspension or is_over(case.status):
        return None
    if attempts.active_time is not None:
        if limit := case.lifecycle_seconds("activeDeadlineSeconds"):
            dues.append(limit - active_seconds(case))
        if (silent := silent_seconds(case)) is not None:
            dues.append(stall_seconds(case) - silent)
    elif limit := case.lifecycle_seconds("pendingDeadlineSeconds"):
        dues.append(limit - waited_seconds(case))
    return min((due for due in dues if 0 < due < float("inf")), default=None)


def end_seconds(case: Case) -> float | None:
    """When the job ended, in Unix seconds; None if neither completionTime nor a condition says."""
    ends = [found.last_transition_time for found in case.status.conditions
            if found.type in (c.COMPLETE, c.FAILED) and found.status == "True"]  # fmt: skip
    known = [time for time in map(known_seconds, (*ends, case.status.completion_time)) if time is not None]
    created = known_seconds(case.observed.job.creation_time)
    return max(*known, created or 0.0) if known else None
