"""The judge of races on the fake CUDA device finds each order that CudaLanes could lose, without luck of timing."""

from __future__ import annotations

from pathlib import Path

import pytest

from cases import device_attempts
from harness import fake_cuda
from spillway.errors import ExitCode

pytestmark = pytest.mark.ci


@pytest.mark.parametrize("defect", device_attempts.DEFECTS)
def test_a_planted_defect_is_a_race(defect: str, tmp_path: Path) -> None:
    _, _, races, _ = fake_cuda.run(device_attempts.attempt_with, tmp_path / "run", defect)
    assert races


@pytest.mark.full
@pytest.mark.parametrize("defect", device_attempts.HOST_DEFECTS)
def test_a_host_that_goes_on_too_early_is_found_where_streams_are_late(defect: str, tmp_path: Path) -> None:
    late = {"mode": "delayed", "seed": 1, "delay_us": 20000}
    code, _, races, _ = fake_cuda.run(device_attempts.attempt_with, tmp_path / "run", defect, **late)
    assert races or code


def test_a_kernel_with_a_wrong_bit_is_found_before_the_first_step(tmp_path: Path) -> None:
    code, *_ = fake_cuda.run(device_attempts.attempt_with, tmp_path / "run", "miscompile")
    assert code == ExitCode.DEVICE_FAULT


def test_host_memory_that_is_not_registered_is_counted(tmp_path: Path) -> None:
    _, counts, *_ = fake_cuda.run(device_attempts.attempt_with, tmp_path / "run", "register nothing")
    _, right, *_ = fake_cuda.run(device_attempts.attempt, tmp_path / "right", "spread", "llama", True)
    assert counts["pageable copies above 4 KiB"] > right["pageable copies above 4 KiB"]


@pytest.mark.parametrize("program", device_attempts.PROGRAMS)
def test_a_program_with_a_defect_has_wrong_bits_or_a_race(program: str) -> None:
    is_right, races = fake_cuda.run(device_attempts.run_program, program, False, mode="delayed", delay_us=20000)
    assert races or not is_right
    assert fake_cuda.run(device_attempts.run_program, program, True, mode="delayed", delay_us=20000) == (True, [])
