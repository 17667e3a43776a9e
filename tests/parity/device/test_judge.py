"""The judge of races on the fake CUDA device finds each order that CudaLanes could lose, without luck of timing."""

from __future__ import annotations

from pathlib import Path

import pytest

from cases import device_attempts
from harness import fake_cuda

pytestmark = pytest.mark.ci


@pytest.mark.parametrize("defect", device_attempts.DEFECTS)
def test_a_planted_defect_of_the_lanes_is_a_race(defect: str, tmp_path: Path) -> None:
    races = fake_cuda.run(device_attempts.attempt_with, tmp_path / "run", defect)
    assert races


@pytest.mark.parametrize("program", device_attempts.PROGRAMS)
def test_a_program_with_a_defect_has_wrong_bits_or_a_race(program: str) -> None:
    is_right, races = fake_cuda.run(device_attempts.run_program, program, False, mode="delayed", delay_us=20000)
    assert races or not is_right
    assert fake_cuda.run(device_attempts.run_program, program, True, mode="delayed", delay_us=20000) == (True, [])
