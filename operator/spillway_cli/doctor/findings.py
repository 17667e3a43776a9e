"""Diagnosis: a finding of `spillway doctor`, with its fix. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

STALE_DAYS = 90
"""Profiles older than this should be measured again: kernels, disks and other load change."""


class Severity(StrEnum):
    OK = "ok"
    NOTE = "note"
    """For information; nothing is wrong."""
    WARNING = "warning"
    """Works, but not as well as it could; or an optional part is missing."""
    ERROR = "error"
    """Jobs fail or will fail."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    area: str
    """The examined area: machine or cluster."""
    check: str
    severity: Severity
    message: str
    """What was found, in one sentence."""
    fix: str = ""
    """What to do; every warning and error has one."""

    def as_json(self) -> dict[str, object]:
        return {
            "area": self.area,
            "check": self.check,
            "severity": self.severity.value,
            "message": self.message,
            "fix": self.fix or None,
        }


@dataclass(frozen=True, slots=True)
class Missing:
    """A fact that could not be gathered."""

    why: str
    is_forbidden: bool = False
    """Whether the user may not see it."""
    is_absent: bool = False
    """Whether it does not exist."""


def num_errors(findings: Iterable[Diagnosis]) -> int:
    return sum(finding.severity is Severity.ERROR for finding in findings)


def days_since(time: str, now: datetime) -> float | None:
    """Days since an RFC 3339 time; None if it is invalid."""
    try:
        then = datetime.fromisoformat(time)
    except ValueError:
        return None
    return (now - then.replace(tzinfo=then.tzinfo or UTC)).total_seconds() / 86400
