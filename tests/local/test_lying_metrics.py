"""Prometheus killed, hanging, garbage, empty, stale and lying: jobs start as with a good one.

The pairs are those of benchmarks/lying_metrics.py. By default there are a few; SPILLWAY_DEPTH=all runs the 30 pairs for
which the bounds are meant, and asserts the bounds.
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
    """They cause no request, required affinity, escalation or eviction."""
    assert benchmark.complaints(run) == []


def test_a_lie_is_believed_for_the_preference_and_nothing_else(run: benchmark.Run) -> None:
    """This shows that the lies have an effect, so that the other tests are not trivially true."""
    assert {start.preferred for start in run.starts[Health.WELL]} == {("node-b", "node-a")}
    assert {start.preferred for start in run.starts[Health.LYING]} == {("node-a",)}, "node-b's memory seems to stall"


@pytest.mark.skipif(not FULL, reason="3 rounds say nothing of a median: SPILLWAY_DEPTH=all runs 30")
def test_jobs_start_as_soon_as_beside_a_prometheus_that_is_well(run: benchmark.Run) -> None:
    assert paired.misses(benchmark.figures(run), benchmark.AT_MOST, {}) == []
