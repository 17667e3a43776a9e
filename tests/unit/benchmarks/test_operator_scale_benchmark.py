"""benchmarks/operator_scale.py: how it counts. What it counts is the test bed's."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

import operator_scale as benchmark
import paired
from synthetic_trainers import Statuses, is_progress
from testbed.client import Request

pytestmark = pytest.mark.ci

RUNNING = {"type": "Running", "status": "True"}


def request(resource: str, at: float = 0.0, verb: str = "create", **parts: Any) -> Request:
    known = {"group": "", "subresource": "", "namespace": "a", "name": "job-1", "user": "", "agent": "", "pod": ""}
    given = {**known, "code": 201, "allowed": True, **parts}
    time = f"2026-11-23T12:{int(at // 60):02}:{at % 60:09.6f}Z"
    return Request(verb=verb, resource=resource, at=time, **given)


def status(step: int = 0, state: str = "Running", stepping: str = "Unknown") -> dict[str, Any]:
    conditions = [RUNNING, {"type": "Progressing", "status": stepping}]
    return {"state": state, "progress": {"step": step}, "conditions": conditions}


def test_writes_are_counted_by_kind_and_reads_are_not_counted() -> None:
    found = benchmark.written(
        [
            request("jobs"), request("services", namespace="b"), request("pods", verb="list"),
            request("trainingjobs", verb="patch", subresource="status", code=500),
            *(request(resource) for resource in benchmark.APART),
        ]
    )  # fmt: skip
    assert found.others == Counter(a=1, b=1)
    assert found.status == Counter(a=1), "one that failed was sent all the same"
    assert found.apart == Counter(benchmark.APART)


def test_a_write_that_says_anything_but_progress_is_none_for_progress() -> None:
    assert is_progress(status(1), status(2))
    assert is_progress(status(), status(1, stepping="True")), "the first report"
    assert not is_progress(status(1), status(2, state="Complete"))
    assert not is_progress(status(1), status(1)), "nothing was written"
    ended = status(2) | {"conditions": [{"type": "Running", "status": "False"}]}
    assert not is_progress(status(2), ended)


def test_the_watch_counts_each_state_of_a_status_once() -> None:
    statuses = Statuses()
    for found in ({}, status(), status(), status(1), status(2), status(2, state="Complete")):
        statuses.see({"metadata": {"namespace": "a", "name": "one"}, "status": found})
    assert (statuses.other_writes, statuses.progress_writes) == (Counter(a=2), Counter(a=2))
    assert statuses.states("a") == Counter(Complete=1)


def test_the_first_child_counts_and_a_job_without_one_waits_for_ever() -> None:
    found = benchmark.create_to_child(
        [
            request("trainingjobs", 1.0, name="x"), request("trainingjobs", 2.0, name="y"),
            request("jobs", 3.5, name="x-1"), request("jobs", 9.0, name="x-2"),
            request("jobs", 3.0, name="y-1", code=504), request("jobs", 3.0, name="y-1", namespace="elsewhere"),
        ],
        ["a"],
    )  # fmt: skip
    assert found == [2.5, math.inf]


@pytest.mark.parametrize(
    ("times", "most"), [([], 0), ([0.0, 30.0, 60.0], 1), ([0.0, 29.8, 31.0], 2), ([5.0, 6.0, 7.0, 90.0], 3)]
)
def test_writes_of_one_profile_are_counted_in_any_half_minute(times: list[float], most: int) -> None:
    writes = [request("memoryprofiles", at, "patch", name="one") for at in times]
    others = [request("memoryprofiles", at, "patch", name=f"other-{at}") for at in times]
    reads = [request("memoryprofiles", at, "get", name="one") for at in times]
    assert benchmark.busiest_profile([*others, *writes, *reads]) == most


def test_what_is_there_twice_and_what_is_not_there_are_both_counted() -> None:
    assert benchmark.balance(Counter("abc"), Counter("aabd")) == (2, 1)
    assert benchmark.balance(Counter("abc"), Counter("cba")) == (0, 0)


def test_the_99th_percentile_is_no_interpolation() -> None:
    assert benchmark.p99(range(1, 101)) == 99
    assert benchmark.p99([7.0]) == 7.0
    assert math.isnan(benchmark.p99([]))


def test_a_figure_that_is_not_there_misses_its_limit() -> None:
    kept = dict.fromkeys(benchmark.AT_MOST, 0.0)
    assert paired.misses(kept, benchmark.AT_MOST, {}) == []
    for name in benchmark.AT_MOST:
        assert len(paired.misses({**kept, name: math.nan}, benchmark.AT_MOST, {})) == 1
        assert len(paired.misses({one: 0.0 for one in kept if one != name}, benchmark.AT_MOST, {})) == 1
