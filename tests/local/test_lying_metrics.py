"""Prometheus killed, hanging, garbage, empty, stale and lying: jobs start as beside a good one.

The pairs are those of benchmarks/lying_metrics.py: a few by default; SPILLWAY_DEPTH=all runs the 30 that the bounds
are for, and holds them.
"""

from __future__ import annotations

import pytest

import lying_metrics as benchmark
import paired
from fakes.lying_prometheus import Health
from harness.depth import FULL

pytestmark = pytest.mark.ci

NUM_ROUNDS = benchmark.NUM_ROUNDS if FULL else 3


@pytest.fixture(scope="module")
def run() -> benchmark.Run:
    found = benchmark.run_rounds(NUM_ROUNDS)
    print(f"\n{NUM_ROUNDS} of {benchmark.NUM_ROUNDS} paired rounds\n{benchmark.table(found)}")
    return found


def test_wrong_metrics_change_nothing_but_preferences(run: benchmark.Run) -> None:
    """No request, required affinity, escalation or eviction results from them."""
    assert benchmark.complaints(run) == []


def test_a_lie_is_believed_for_the_preference_and_nothing_else(run: benchmark.Run) -> None:
    """So the other tests had something to be wrong about."""
    assert {start.preferred for start in run.starts[Health.WELL]} == {("node-b", "node-a")}
    assert {start.preferred for start in run.starts[Health.LYING]} == {("node-a",)}, "node-b's memory seems to stall"


@pytest.mark.skipif(not FULL, reason="3 rounds say nothing of a median: SPILLWAY_DEPTH=all runs 30")
def test_jobs_start_as_soon_as_beside_a_prometheus_that_is_well(run: benchmark.Run) -> None:
    assert paired.misses(benchmark.figures(run), benchmark.AT_MOST, {}) == []
