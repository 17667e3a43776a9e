"""Deadlines: how long a job ran, waited or made no progress, and which limit that exceeds.

Every second of a job that is not suspended is one of three: active (from the moment when all pods of an attempt first
ran, to the attempt's end), pending (it waits for that: for nodes, claims, quota, images), or a pause of the operator's
between attempts. Kueue counts an attempt's time from its admission and batch/v1 from the Job's start, waiting pods
included; here they have a deadline of their own, so that no second counts for both.
"""

from __future__ import annotations

from spillway.api.field_types import MAX_COUNT
from spillway.api.pod import DEFAULT_STALL_SECONDS
from spillway.feedback.retries import DEADLINE_EXCEEDED, PENDING_DEADLINE_EXCEEDED, STALLED

from . import conditions as c
from .attempt_end import Cause
from .case import PATIENT_STEPS, Case, is_over, known_seconds

LEAST_STALL_SECONDS = 15.0
"""a stall is at least that long, because a healthy trainer posts every five seconds and may miss a post"""


def active(case: Case) -> Case:
    """All pods run: the attempt is active from now on, and the job does not wait any more."""
    known = case.attempts
    if known.active_time is not None and known.pending_time is None:
        return case
    since = case.now
    if case.before.attempts is not None and case.before.attempts.total == known.total:
        # Of an attempt that an earlier version of the operator saw run.
        running = c.find(case.before.conditions, c.RUNNING)
        since = running.last_transition_time or since if running is not None and running.status == "True" else since
    changes = {"active_time": known.active_time or since, "pending_time": None}
    return case.changed(attempts=known.model_copy(update=changes))


def pending(case: Case) -> Case:
    """The job waits for an attempt whose pods all run: since now, unless it did already."""
    if case.attempts.pending_time is not None or case.attempts.active_time is not None:
        return case
    return case.changed(attempts=case.attempts.model_copy(update={"pending_time": case.now}))


def active_seconds(case: Case, until: str = "") -> float:
    """Of all attempts; of the present one until the RFC 3339 time `until`, or until now."""
    since = known_seconds(case.attempts.active_time)
    present = 0.0 if since is None else min(known_seconds(until) or case.seconds_now, case.seconds_now) - since
    return min(float(MAX_COUNT), case.attempts.active_seconds + max(0.0, present))


def overrun(case: Case) -> Cause | None:
    """The active deadline, once it is over."""
    limit, active = case.lifecycle_seconds("activeDeadlineSeconds"), active_seconds(case)
    if not limit or active < limit:
        return None
    ran = f"the attempts of the job ran for {active:.0f} s"
    return Cause(DEADLINE_EXCEEDED, f"lifecycle.activeDeadlineSeconds = {limit} is over: {ran}")


def expired(case: Case, obstacle: str) -> Cause | None:
    """The pending deadline, once it is over; `obstacle` is what is in the way."""
    limit, waited = case.lifecycle_seconds("pendingDeadlineSeconds"), waited_seconds(case)
    if not limit or waited < limit:
        return None
    over = f"lifecycle.pendingDeadlineSeconds = {limit} is over: no attempt ran for {waited:.0f} s"
    return Cause(PENDING_DEADLINE_EXCEEDED, f"{over}; {obstacle}")


def waited_seconds(case: Case) -> float:
    since = known_seconds(case.attempts.pending_time)
    return 0.0 if since is None else max(0.0, case.seconds_now - since)


def silent_seconds(case: Case) -> float | None:
    """Since a step of the running attempt was heard of, or since its pods run; None when none could be heard.

    By the operator's clock: that of the node may be wrong. And by step: a trainer that posts and does not step is
    silent. Only the time in which this process could hear counts: after an outage each job has its whole time again.
    """
    hearing, progress = case.observed.hearing_seconds, case.status.progress
    advanced = None if progress is None else progress.advance_time
    if hearing is None or (case.last_step_time is not None and advanced is None):
        return None  # also where an older CRD drops advanceTime, and until the first report after an upgrade
    running = c.find(case.before.conditions, c.RUNNING)
    since = running.last_transition_time if running is not None and running.status == "True" else case.now
    times = (since, case.attempts.active_time, advanced)
    last = max((known for known in map(known_seconds, times) if known is not None), default=case.seconds_now)
    return max(0.0, min(hearing, case.seconds_now - last))


def others_are_silent_too(case: Case, silent: float) -> bool:
    """Other attempts run, and none of them was heard in a time of silence: where nobody is heard, nobody is ended."""
    others = case.observed.others_silent_seconds
    return others is not None and others >= silent


def stall_seconds(case: Case) -> float:
    """Silence that ends an attempt: as the spec says, but never less than some predicted steps. Infinite for never."""
    limit = case.lifecycle_seconds("stallSeconds", DEFAULT_STALL_SECONDS)
    return max(limit, LEAST_STALL_SECONDS, PATIENT_STEPS * case.predicted_seconds) if limit else float("inf")


def stalled(case: Case, silent: float) -> Cause:
    limit = case.lifecycle_seconds("stallSeconds", DEFAULT_STALL_SECONDS)
    step = case.status.progress.step if case.status.progress is not None else 0
    what = f"no step after step {step} for {silent:.0f} s"
    return Cause(
        STALLED, f"{what} (lifecycle.stallSeconds = {limit}): the trainer hangs, or was cut off from the operator"
    )


def due_seconds(case: Case) -> float | None:
    """Until a deadline of the job is over; None when there is none, or when it is over already."""
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
    """Unix seconds; None when neither completionTime nor a condition says."""
    ends = [found.last_transition_time for found in case.status.conditions
            if found.type in (c.COMPLETE, c.FAILED) and found.status == "True"]  # fmt: skip
    known = [time for time in map(known_seconds, (*ends, case.status.completion_time)) if time is not None]
    created = known_seconds(case.observed.job.creation_time)
    return max(*known, created or 0.0) if known else None
