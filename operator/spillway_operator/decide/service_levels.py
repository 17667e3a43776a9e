"""Service levels: what a change of one status adds to the counters, and what the statuses of all jobs say at a scrape.

A count is made once, with the write of the status that shows it. An operator that starts counts from 0, so that rates
stay right; what `fleet_of` reads from the statuses is exact after every restart.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from heapq import nsmallest
from typing import Any

from spillway import metrics
from spillway.api.status import Attempts, CheckpointStatus, Progress, TrainingJobStatus
from spillway.errors import RANK_CRASHED, ExitCode
from spillway.metrics import Metric
from spillway.plan import Tier
from spillway.units import parse_quantity

from . import conditions as c
from .acceptance import given
from .case import Case, known_seconds, num_ranks, whole
from .observed import Count, JobObject

MOST_JOBS = 200
"""Most jobs with series of their own at a scrape."""
FAILED_SECONDS = 86400.0
"""How long a failed job counts as a problem."""
Conditions = dict[str, dict[str, Any]]
KINDS = {"restarts": "restart", "disruptions": "disruption", "memoryErrors": "memory"}
"""Field of status.attempts -> label of ended attempts."""
_REASONS = {*c.CAUSES, ExitCode.COMPLETED.reason, "Suspended"}
_STAGES = (c.ACCEPTED, c.PLANNED, c.QUOTA_RESERVED, c.SCHEDULED, c.RUNNING, c.PROGRESSING)
"""Conditions in the order in which a job passes them."""

# --- a change of one status -------------------------------------------------------------------------------------------


def counts(case: Case, after: TrainingJobStatus) -> tuple[Count, ...]:
    """What the change from the case's earlier status to `after` adds to the counters; nothing if it is the first, or
    restores one that somebody wiped."""
    was, now = case.before.attempts, after.attempts
    if was is None or now is None:
        return ()
    return tuple(one for one in _counts(case, after, was, now) if one.value > 0 or one.metric.kind == "histogram")


def _counts(case: Case, after: TrainingJobStatus, was: Attempts, now: Attempts) -> Iterator[Count]:
    before, reason = case.before, now.last_reason if now.last_reason in _REASONS else RANK_CRASHED
    if now.ended > was.ended and now.end_time != was.end_time:
        yield Count(metrics.OPERATOR_ATTEMPTS_ENDED, 1, reason)
    if now.total > was.total:
        changed = {one.attempt for one in before.escalations if one.change}
        for one in after.escalations:
            if one.change and one.attempt not in changed:
                yield Count(metrics.OPERATOR_LADDER_STEPS, 1, one.reason)
    pending, active = known_seconds(was.pending_time), known_seconds(now.active_time)
    if pending is not None and active is not None:
        yield Count(metrics.OPERATOR_QUEUE_WAIT, max(0.0, active - pending))
    earlier, progress = before.progress or Progress(), after.progress or Progress()
    if progress.last_step_time and not earlier.last_step_time:
        yield Count(metrics.OPERATOR_LOST_STEPS, earlier.step - progress.step, reason)
    began = active or known_seconds(now.start_time)
    if progress.tokens_per_second and not earlier.tokens_per_second and began is not None:
        yield Count(metrics.OPERATOR_FIRST_STEP, max(0.0, (known_seconds(progress.advance_time) or began) - began))
    if not case.members:
        devices = num_ranks(case.spec)
        held = _held_seconds(now, progress) - _held_seconds(was, earlier)
        yield Count(metrics.OPERATOR_DEVICE_SECONDS, devices * held, "held")
        yield Count(metrics.OPERATOR_DEVICE_SECONDS, devices * _committed_seconds(case, after, was, now), "committed")


def _held_seconds(attempts: Attempts, progress: Progress) -> float:
    """Seconds that the attempts held devices, as far as the status knows: the current one's until its newest step."""
    since, until = known_seconds(attempts.active_time), known_seconds(progress.advance_time)
    return attempts.active_seconds + (max(0.0, until - since) if since is not None and until is not None else 0.0)


def _committed_seconds(case: Case, after: TrainingJobStatus, was: Attempts, now: Attempts) -> float:
    """Seconds of the steps that a new checkpoint commits for the first time: at the reported seconds per step, but no
    more than passed since the attempt's last checkpoint, or since its pods run."""
    old, new = case.before.checkpoint or CheckpointStatus(), after.checkpoint
    if new is None or new.step <= old.step:
        return 0.0
    since = old.time if old.epoch == new.epoch else now.active_time or was.active_time
    until = known_seconds(new.time) or case.seconds_now
    passed = max(0.0, until - (known_seconds(since) or until))
    report = case.observed.progress.spillway if case.observed.progress is not None else None
    seconds = report.step_seconds if report is not None else 0.0
    return min(passed, (new.step - old.step) * seconds) if seconds else passed


# --- all statuses, at a scrape ----------------------------------------------------------------------------------------


def fleet_of(jobs: Iterable[JobObject], now: float) -> dict[Metric, dict[tuple[str, ...], float]]:
    """Metric -> values of its labels -> value, as the statuses say at Unix time `now`; metrics with a label for the
    job's name contain at most MOST_JOBS jobs."""
    states, wasted, problems, ended = Counter[tuple[str, ...]](), Counter[tuple[str, ...]](), [], []
    for job in jobs:
        status = json.loads(job.status)
        states[job.namespace, str(status.get("state") or "Unknown")] += 1
        found: Conditions = {one["type"]: one for one in status.get("conditions") or ()}
        if (problem := _problem(found, status, now)) is not None:
            is_failed, seconds, labels = problem
            problems.append((not is_failed, -seconds, (*job.key, *labels)))
        if _is(found, c.COMPLETE) or _is(found, c.FAILED):
            continue
        numbers = {kind: whole(given(status, f"attempts.{name}"), 0) for name, kind in KINDS.items()}
        ended.append((-sum(numbers.values()), job.key, numbers))
        if _is(found, c.RUNNING):
            for tier in Tier:
                planned, peak = (_bytes(given(status, f"{at}.{tier.value}")) for at in ("plan.bytes", "memory.peak"))
                if peak:  # it has reported
                    ranks = num_ranks(json.loads(job.spec))
                    wasted[job.namespace, tier.value] += ranks * max(0, planned - peak)
    worst = nsmallest(MOST_JOBS, ended, key=lambda one: one[:2])
    return {
        metrics.OPERATOR_JOBS: dict(states),
        metrics.OPERATOR_WASTED_BYTES: dict(wasted),
        metrics.OPERATOR_JOB_PROBLEM: {key: -negated for _, negated, key in nsmallest(MOST_JOBS, problems)},
        metrics.OPERATOR_JOB_ENDED_ATTEMPTS: {(*key, kind): n for _, key, of in worst for kind, n in of.items()},
    }


def _bytes(quantity: object) -> int:
    """Bytes of a quantity in a status; 0 if it is invalid, because anybody may have written the status."""
    try:
        return parse_quantity(str(quantity))
    except ValueError:
        return 0


def _is(found: Conditions, type_: str) -> bool:
    return found.get(type_, {}).get("status") == "True"


def _problem(found: Conditions, status: dict[str, Any], now: float) -> tuple[bool, float, tuple[str, str]] | None:
    """Whether the job failed, the seconds since it failed or since it has been waiting, and the type and reason of the
    condition that says why; None: nothing is wrong, or nobody wants it to run."""
    failed = _is(found, c.FAILED)
    wanted = not (_is(found, c.COMPLETE) or _is(found, c.SUSPENDED))
    types = (c.FAILED,) if failed else _STAGES if wanted else ()
    for type_ in types:
        one = found.get(type_, {})
        reason, since = str(one.get("reason") or ""), known_seconds(one.get("lastTransitionTime")) or now
        if not one or reason == "NoAttempt" or (not failed and one.get("status") == "True"):
            continue
        pending, active = (known_seconds(given(status, f"attempts.{name}Time")) for name in ("pending", "active"))
        if type_ == c.PROGRESSING:  # Unknown since the attempt's creation; until `active` it waited for its pods
            since = max(since, active or since)
        elif not failed:
            since = pending or since
        return (failed, now - since, (type_, reason)) if not failed or now - since < FAILED_SECONDS else None
    return None
