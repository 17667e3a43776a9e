"""Reads a TrainingJob's status for people: table columns, relevant conditions, how it ended. Pure.

Works on plain JSON, because an operator of another version may have more or fewer fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from spillway.api.crd import TRAINING_JOB
from spillway.errors import ExitCode
from spillway.units import format_seconds

from ..console import printable

CRASHED = 1
"""Exit code for a job whose reason has no code of its own."""
CODES = {code.reason: code for code in ExitCode}
QUIET_WHEN_FALSE = ("Suspended", "Complete", "Failed", "Stalled", "Reconciling", "Ready")
"""Conditions for which False is normal, or only repeats what other conditions say."""
BAD_WHEN_TRUE = ("Suspended", "Failed")
BAD_WHEN_UNKNOWN = {"Progressing": ("NoReport",)}
"""Type -> reasons that matter; other Unknown conditions are normal at every start."""


def value_at(job: Mapping[str, Any], path: str) -> Any:
    """The value at a printer column's path (".status.progress.step"), or None."""
    found: Any = job
    for part in path.strip(".").split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def conditions(job: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The job's conditions by type."""
    return {one.get("type", ""): one for one in value_at(job, "status.conditions") or []}


def holds(job: Mapping[str, Any], type_: str) -> bool:
    return conditions(job).get(type_, {}).get("status") == "True"


def has_ended(job: Mapping[str, Any]) -> bool:
    return holds(job, "Complete") or holds(job, "Failed")


def exit_code(job: Mapping[str, Any]) -> int:
    """0 unless the job failed; else the documented code of the reason, or 1 if it has none."""
    if not holds(job, "Failed"):
        return int(ExitCode.COMPLETED)
    return int(CODES.get(conditions(job)["Failed"].get("reason", ""), CRASHED))


def that_matter(job: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Conditions that a person should read: problems, or only the outcome of a job that has ended."""
    found = conditions(job)
    if has_ended(job):
        return [found[type_] for type_ in ("Failed", "Complete") if holds(job, type_)]
    return [one for type_, one in found.items() if matters(type_, str(one.get("status")), str(one.get("reason")))]


def matters(type_: str, status: str, reason: str) -> bool:
    if type_ in BAD_WHEN_TRUE:
        return status == "True"
    if type_ in BAD_WHEN_UNKNOWN and reason in BAD_WHEN_UNKNOWN[type_]:
        return status == "Unknown"
    return status == "False" and type_ not in QUIET_WHEN_FALSE


def row(job: Mapping[str, Any], now: datetime) -> list[str]:
    """The cells of the printer columns, as kubectl shows them."""
    return [cell(value_at(job, path), kind, now) for _, path, kind, _, _ in TRAINING_JOB.columns]


def cell(value: Any, kind: str, now: datetime) -> str:
    if value is None:
        return ""
    return age(str(value), now) if kind == "date" else printable(str(value))


def age(time: str, now: datetime) -> str:
    """Time since an RFC 3339 time, for people; "?" if it is invalid."""
    try:
        then = datetime.fromisoformat(time)
    except ValueError:
        return "?"
    seconds = (now - then.replace(tzinfo=then.tzinfo or UTC)).total_seconds()
    return format_seconds(round(seconds)) if seconds >= 1 else "0 s"


def newest_first(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return sorted(events, key=event_time, reverse=True)


def event_time(event: Mapping[str, Any]) -> str:
    """When the event last happened, in either version of the events API."""
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    created = (event.get("metadata") or {}).get("creationTimestamp")
    return str(next((time for time in (*times, created) if time), ""))
