"""Case: one TrainingJob while a decision about it is made, with helpers to read its spec and status."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from spillway.api.field_types import MAX_COUNT
from spillway.api.status import Attempts, Condition, TrainingJobStatus
from spillway.api.sweep.search_space import members_in
from spillway.placement.place import Place

from . import conditions as c
from .acceptance import given
from .attempt_end import Cause
from .conditions import Finding
from .manifests import attempt_name
from .observed import AttemptObject, Observed

NO_REPORT_SECONDS = 300.0
"""A report is overdue after this time; steps are reported at most every 15 s."""
PATIENT_STEPS = 3.0
"""A report is never overdue before this many predicted steps: one step may take half an hour."""


@dataclass(frozen=True, slots=True)
class Case:
    """One look: what was observed, and the status decided so far."""

    observed: Observed
    now: str
    spec: dict[str, Any]
    """Not validated: read it with `given`."""
    before: TrainingJobStatus
    status: TrainingJobStatus
    place: Place
    findings: tuple[Finding, ...] = ()
    """These replace conditions of the status; later ones win."""
    because: str = ""
    """Why the last attempt ended, if another one follows."""

    @property
    def attempts(self) -> Attempts:
        return self.status.attempts or Attempts()

    @property
    def attempt_name(self) -> str:
        """The newest attempt's Job and ConfigMap."""
        return attempt_name(self.observed.job.name, self.attempts.total)

    @property
    def wants_suspension(self) -> bool:
        return self.spec.get("suspend") is True

    @property
    def num_nodes(self) -> int:
        return whole(given(self.spec, "parallelism.nodes"), 1)

    @property
    def steps(self) -> int:
        """Number of steps from the spec, or from the trainer of a job that trains by epochs; 0: not known yet."""
        return num_steps(self.spec) or (self.status.progress.steps if self.status.progress is not None else 0)

    @property
    def is_corrected(self) -> bool:
        return is_corrected(self.spec)

    @property
    def members(self) -> tuple[str, ...]:
        """Names of a sweep's members."""
        return tuple(str(member.get("name")) for member in members_in(self.spec))

    @property
    def owned(self) -> tuple[AttemptObject, ...]:
        """The TrainingJob's own Jobs, newest first."""
        own = (attempt for attempt in self.observed.attempts if attempt.owner_uid == self.observed.job.uid)
        return tuple(sorted(own, key=lambda attempt: -attempt.attempt))

    @property
    def seconds_now(self) -> float:
        return seconds_of(self.now)

    @property
    def last_step_time(self) -> str | None:
        """Time of this attempt's last reported step; None before its first report."""
        return self.status.progress.last_step_time if self.status.progress is not None else None

    @property
    def predicted_seconds(self) -> float:
        """Predicted seconds per step; 0 when nothing is predicted."""
        try:
            predicted = float(self.status.plan.step_seconds) if self.status.plan is not None else 0.0
        except ValueError:
            return 0.0
        return predicted if predicted < MAX_COUNT else 0.0

    @property
    def patience_seconds(self) -> float:
        """How long to wait for the next report of a step."""
        return max(NO_REPORT_SECONDS, PATIENT_STEPS * self.predicted_seconds)

    @property
    def report_due_seconds(self) -> float:
        """Seconds until a report of a step is overdue; negative after that."""
        return self.patience_seconds - (self.seconds_now - seconds_of(self.last_step_time or self.now))

    @property
    def trainer_was_heard(self) -> bool:
        """Whether this or an earlier attempt has reported: its pods can reach the operator."""
        return self.last_step_time is not None or self.status.memory is not None

    @property
    def ending(self) -> Cause | None:
        """Why the operator ends the current attempt, as written to the status beforehand."""
        running = self._known(c.RUNNING)
        return Cause(running.reason, running.message) if running and running.reason in c.ENDINGS else None

    def lifecycle_seconds(self, field: str, default: int = 0) -> int:
        """The current spec's value, which may differ from the attempt's."""
        return min(whole(given(self.spec, f"lifecycle.{field}"), default), MAX_COUNT)

    @property
    def count_is_lost(self) -> bool:
        """Whether status.attempts exists but is invalid: somebody else wrote it, and an older CRD accepted it."""
        return self.before.attempts is None and b'"attempts"' in self.observed.job.status

    def reason(self, type_: str) -> str:
        """The condition's reason as decided so far; empty if it does not exist."""
        known = self._known(type_)
        return known.reason if known else ""

    def _known(self, type_: str) -> Finding | Condition | None:
        found = next((finding for finding in reversed(self.findings) if finding.type == type_), None)
        return found or c.find(self.status.conditions, type_)

    def seconds_since(self, type_: str, status: str) -> float:
        """How long a condition has had this status; 0 when it has another one."""
        known = c.find(self.before.conditions, type_)
        if known is None or known.status != status or known.last_transition_time is None:
            return 0.0
        return max(0.0, self.seconds_now - seconds_of(known.last_transition_time))

    def changed(self, **changes: object) -> Case:
        return replace(self, status=self.status.model_copy(update=changes))

    def found(self, *findings: Finding) -> Case:
        return replace(self, findings=(*self.findings, *findings))


def num_steps(spec: dict[str, Any]) -> int:
    """Steps of the job; for a sweep those of all members, unless successive halving stops some. 0: it trains by
    epochs."""
    own = whole(given(spec, "training.steps"), 0)
    of_members = [whole(given(member, "training.steps"), own) for member in members_in(spec)]
    return min(sum(of_members) if of_members else own, MAX_COUNT)


def is_over(status: TrainingJobStatus) -> bool:
    """Whether the job is Complete or Failed, which is permanent."""
    return c.holds(status.conditions, c.COMPLETE) or c.holds(status.conditions, c.FAILED)


def known_seconds(time: str | None) -> float | None:
    """Unix seconds of an RFC 3339 time; None if it is invalid."""
    return seconds_of(time or "") or None


def seconds_of(time: str) -> float:
    """Unix seconds of an RFC 3339 time; 0 if it is invalid."""
    try:
        return datetime.fromisoformat(time).timestamp()
    except (TypeError, ValueError, OverflowError):
        return 0.0


def is_corrected(spec: dict[str, Any]) -> bool:
    """Whether live corrections are applied; with mode Advise they are only reported."""
    return given(spec, "memory.mode") in (None, "Auto")


def num_ranks(spec: dict[str, Any]) -> int:
    return whole(given(spec, "parallelism.nodes"), 1) * whole(given(spec, "parallelism.devicesPerNode"), 1)


def whole(value: object, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else default
