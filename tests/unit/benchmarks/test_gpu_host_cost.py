"""benchmarks/gpu_host_cost.py: what a step of a 7 B model submits to the lanes of a CUDA device; no seconds."""

from __future__ import annotations

import pytest

import gpu_host_cost as benchmark

pytestmark = pytest.mark.ci


@pytest.mark.parametrize(
    ("cell", "operations", "copies_up"), [("interleaved", 1200, 550), ("weights streamed", 950, 130)]
)
def test_a_step_of_7b_submits_few_operations_and_uses_its_events_again(
    cell: str, operations: int, copies_up: int
) -> None:
    play = benchmark.Contestant(benchmark.ROOT, cell)
    try:
        counts, spent = play.facts["counts"], play.measured()
    finally:
        play.close()
    assert counts["operations"] <= operations
    assert counts["h2d copies"] <= copies_up
    assert counts["events made"] <= 30
    assert counts["Triton launches"] <= 150
    assert min(spent.values()) > 0
