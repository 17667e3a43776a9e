"""Builds a decision: the status with its findings, objects, events, and when to look again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spillway.api.status import Attempts, Escalation, TrainingJobStatus
from spillway.errors import RANK_CRASHED

from . import conditions as c
from .attempt_end import Cause
from .case import Case
from .conditions import Finding, false, true
from .deadlines import due_seconds
from .observed import Deletion, Desired, EventNote, Manifest
from .progress_status import correction_notes, member_notes
from .service_levels import counts

PATIENCE_SECONDS = 10.0
"""Time for all pods of an attempt to run, before they are examined."""
SLOWEST_LOOK_SECONDS = 300.0
NOT_SUSPENDED = false(c.SUSPENDED, "NotSuspended")


def give_up(case: Case, cause: Cause) -> Desired:
    failed = true(c.FAILED, cause.reason if cause.reason in c.CAUSES else RANK_CRASHED, cause.message)
    return write(case.changed(completion_time=case.now).found(failed, *none_lives("Ended")))


def none_lives(reason: str, message: str = "") -> tuple[Finding, ...]:
    return (
        false(c.SCHEDULED, "NoAttempt"),
        false(c.RUNNING, reason, message),
        false(c.PROGRESSING, "NotRunning"),
    )


def patience(waited: float) -> float:
    """Delay until the next look: as long as the wait so far, within bounds."""
    return min(SLOWEST_LOOK_SECONDS, max(PATIENCE_SECONDS, waited))


_AT_FIRST = (
    false(c.RUNNING, "NotStarted"),
    NOT_SUSPENDED,
    false(c.COMPLETE, "NotComplete"),
    false(c.FAILED, "NotFailed"),
)


def write(
    case: Case,
    *,
    creates: tuple[Manifest, ...] = (),
    deletes: tuple[Deletion, ...] = (),
    look_again: float | None = None,
) -> Desired:
    """The decision, with the whole status if it changed."""
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
            *_fault_notes(before.attempts, after.attempts),
            *member_notes(before.members, after.members),
            *correction_notes(before.memory, after.memory, is_corrected=case.is_corrected),
            *c.notes(before.conditions, conditions),
        ),
        ran_out=_ran_out(before, after),
        counts=counts(case, after),
        look_again_seconds=look_again,
    )


def _restart_note(case: Case) -> tuple[EventNote, ...]:
    """The event about a restart, emitted once: with the status that first accounts for the attempt's end."""
    if not case.because or case.attempts.ended <= (case.before.attempts or Attempts()).ended:
        return ()
    return (EventNote("Warning", case.attempts.last_reason, "Restart", c.clean(case.because)),)


def _fault_notes(before: Attempts | None, after: Attempts | None) -> tuple[EventNote, ...]:
    """The event about a node that the job avoids from now on."""
    known = (before.faulty_nodes if before is not None else None) or ()
    return tuple(
        EventNote(
            "Warning", "NodeAvoided", "Restart", f"{one.reason} on {one.node}: this job avoids that node for a day"
        )
        for one in (after.faulty_nodes if after is not None else None) or ()
        if one not in known
    )


def _ran_out(before: TrainingJobStatus, after: TrainingJobStatus) -> tuple[Escalation, ...]:
    known = {one.attempt for one in before.escalations}
    return tuple(one for one in after.escalations if one.attempt not in known)


def _document(status: TrainingJobStatus) -> dict[str, Any]:
    """The status as JSON without unset fields: server-side apply removes fields that are left out."""
    found = status.model_dump(mode="json", exclude_none=True)
    return {name: value for name, value in found.items() if value not in ([], "")}
