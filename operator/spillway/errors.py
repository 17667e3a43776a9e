"""Every error that reaches a user, with its exit code.

    SpillwayError
    ├── UserError                64   a bad manifest, corpus, directory or entry point; messages say what to do
    │   └── InvalidJob           64   the manifest, field by field
    ├── DoesNotFit               4    no plan fits the budgets (`spillway plan`, `spillway run`; before anything starts)
    ├── DeviceOutOfMemory        70
    ├── NonFinite                71
    ├── SpillVolumeFull          72
    ├── SpillIOError             73
    ├── CheckpointCorrupt        74
    ├── Preempted                75   after a committed checkpoint
    ├── HostOutOfMemory          76
    ├── Fenced                   77   a newer epoch owns the run
    └── DeviceFault              78   the device fails, or does not compute what it should

There is one class for each way of reacting to an error. Messages say: where, what was found, what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the trainer and the CLI; the contract with the operator (docs/exit-codes.md)."""

    COMPLETED = 0
    FITS_WITH_SPILLING = 3  # `spillway plan` only
    DOES_NOT_FIT = 4
    USER_ERROR = 64
    DEVICE_OUT_OF_MEMORY = 70
    NON_FINITE = 71
    SPILL_VOLUME_FULL = 72
    SPILL_IO_ERROR = 73
    CHECKPOINT_CORRUPT = 74
    PREEMPTED = 75
    HOST_OUT_OF_MEMORY = 76
    FENCED = 77
    DEVICE_FAULT = 78

    @property
    def reason(self) -> str:
        """CamelCase reason, as in conditions and termination messages: DEVICE_OUT_OF_MEMORY -> DeviceOutOfMemory."""
        if self is ExitCode.SPILL_IO_ERROR:
            return "SpillIOError"
        return "".join(word.capitalize() for word in self.name.split("_"))


RANK_CRASHED = "RankCrashed"
"""The reason of every exit code that is not in ExitCode."""


def reason_of(exit_code: int) -> str:
    """The reason for a trainer's exit code; RankCrashed for unknown codes, for signals, and for codes that only the
    command uses."""
    of_the_command = (ExitCode.FITS_WITH_SPILLING, ExitCode.DOES_NOT_FIT)  # a user's script may end with 3 or 4, too
    try:
        return RANK_CRASHED if exit_code in of_the_command else ExitCode(exit_code).reason
    except ValueError:
        return RANK_CRASHED


class SpillwayError(Exception):
    """Base of all errors with a documented exit code. `details` go into the JSON termination message."""

    exit_code = ExitCode.USER_ERROR

    def __init__(self, message: str, **details: object) -> None:
        super().__init__(message)
        self.details = details


class UserError(SpillwayError):
    """The user provided something wrong; the message names it and says what to do."""


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """One wrong field of a manifest."""

    path: str
    """Dotted path as in the YAML: spec.training.steps."""
    given: str
    """The value found, as the user wrote it; empty if the field is missing."""
    problem: str
    """What is allowed, and the nearest name for an unknown field."""

    def __str__(self) -> str:
        given = f" = {self.given}" if self.given else ""
        return f"{self.path}{given}: {self.problem}"


class InvalidJob(UserError):
    """A manifest that cannot be accepted; the message lists all wrong fields, not only the first."""

    def __init__(self, source: str, problems: Sequence[FieldProblem]) -> None:
        lines = "\n".join(f"  {problem}" for problem in problems)
        super().__init__(f"{source}: {len(problems)} wrong field{'s' if len(problems) > 1 else ''}\n{lines}")
        self.problems = tuple(problems)


class DoesNotFit(SpillwayError):
    """No plan fits; the message holds missing bytes per tier and the nearest configuration that fits."""

    exit_code = ExitCode.DOES_NOT_FIT


class DeviceOutOfMemory(SpillwayError):
    exit_code = ExitCode.DEVICE_OUT_OF_MEMORY


class NonFinite(SpillwayError):
    exit_code = ExitCode.NON_FINITE


class SpillVolumeFull(SpillwayError):
    exit_code = ExitCode.SPILL_VOLUME_FULL


class SpillIOError(SpillwayError):
    exit_code = ExitCode.SPILL_IO_ERROR


class CheckpointCorrupt(SpillwayError):
    exit_code = ExitCode.CHECKPOINT_CORRUPT


class Preempted(SpillwayError):
    exit_code = ExitCode.PREEMPTED


class HostOutOfMemory(SpillwayError):
    exit_code = ExitCode.HOST_OUT_OF_MEMORY


class Fenced(SpillwayError):
    exit_code = ExitCode.FENCED


class DeviceFault(SpillwayError):
    exit_code = ExitCode.DEVICE_FAULT
