"""What `spillway doctor` has to say: a finding per thing that was looked at, with its fix where it needs one. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

STALE_DAYS = 90
"""a profile older than that is worth measuring anew: kernels, disks and neighbours change"""


class Severity(StrEnum):
    OK = "ok"
    NOTE = "note"
    """good to know; nothing is wrong"""
    WARNING = "warning"
    """it works, worse than it could; or a part that not everybody needs is missing"""
    ERROR = "error"
    """jobs will fail, or do already"""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    area: str
    """machine or cluster"""
    check: str
    severity: Severity
    message: str
    """what was found, a sentence"""
    fix: str = ""
    """what to do; every finding that is worse than a note has one"""

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
    """What could not be gathered."""

    why: str
    is_forbidden: bool = False
    """the user may not see it"""
    is_absent: bool = False
    """it is not there"""


def num_errors(findings: Iterable[Diagnosis]) -> int:
    return sum(finding.severity is Severity.ERROR for finding in findings)


def days_since(time: str, now: datetime) -> float | None:
    """Since an RFC 3339 time; None for what is none."""
    try:
        then = datetime.fromisoformat(time)
    except ValueError:
        return None
    return (now - then.replace(tzinfo=then.tzinfo or UTC)).total_seconds() / 86400


def plural(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
