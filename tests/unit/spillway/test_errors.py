"""Exit codes and their reasons are a contract."""

from __future__ import annotations

import pytest

from spillway import errors
from spillway.errors import ExitCode, FieldProblem, InvalidJob, SpillwayError, reason_of


def test_exit_codes_are_those_of_the_contract() -> None:
    assert {code.reason: int(code) for code in ExitCode} == {
        "Completed": 0,
        "FitsWithSpilling": 3,
        "DoesNotFit": 4,
        "UserError": 64,
        "DeviceOutOfMemory": 70,
        "NonFinite": 71,
        "SpillVolumeFull": 72,
        "SpillIOError": 73,
        "CheckpointCorrupt": 74,
        "Preempted": 75,
        "HostOutOfMemory": 76,
        "Fenced": 77,
        "DeviceFault": 78,
    }


@pytest.mark.parametrize("exit_code", [1, 2, 137, -9, 255])
def test_any_other_code_is_a_crashed_rank(exit_code: int) -> None:
    assert reason_of(exit_code) == "RankCrashed"


def test_each_error_class_is_called_like_its_reason() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, SpillwayError)]
    own = [cls for cls in classes if cls not in (SpillwayError, InvalidJob)]
    assert {cls.__name__ for cls in own} == {cls.exit_code.reason for cls in own}


def test_invalid_job_lists_every_field() -> None:
    error = InvalidJob("job.yaml", [FieldProblem("a", "1", "no"), FieldProblem("b", "", "missing")])
    assert str(error) == "job.yaml: 2 wrong fields\n  a = 1: no\n  b: missing"


def test_details_travel_with_the_error() -> None:
    assert SpillwayError("x", wanted_bytes=5).details == {"wanted_bytes": 5}
