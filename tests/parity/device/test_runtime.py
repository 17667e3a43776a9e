"""What a run does with CUDA's runtime, counted on the fake device."""

from __future__ import annotations

from pathlib import Path

import pytest

from cases import device_attempts
from harness import fake_cuda

pytestmark = pytest.mark.ci


def test_a_rank_makes_no_context_on_another_ranks_device(tmp_path: Path) -> None:
    counts = fake_cuda.run(device_attempts.attempt_on_the_second_device, tmp_path / "run", devices=2)
    assert counts["contexts"] == 1, counts


@pytest.mark.parametrize("technique", ["disabled", "spread", "weight-stationary"])
def test_the_host_meets_the_device_twice_a_step(technique: str, tmp_path: Path) -> None:
    """For the losses, and for the norm."""
    _, *others = fake_cuda.run(device_attempts.counts_of_steps, tmp_path / "run", technique)
    assert max(step.get("synchronisations", 0) for step in others) <= 2
    assert not any("pageable copies above 4 KiB" in step for step in others)
    assert not any("cudaMalloc" in step for step in others)


def test_a_destructor_in_a_lanes_thread_marks_the_compute_stream() -> None:
    fake_cuda.run(device_attempts.mark_made_in_a_lane)


def test_products_and_sums_are_never_reduced_in_lower_precision() -> None:
    assert not any(fake_cuda.run(device_attempts.reductions_in_lower_precision))
