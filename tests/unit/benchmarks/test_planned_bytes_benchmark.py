"""benchmarks/planned_bytes.py: its jobs are jobs, and its rule is the one that it states."""

from __future__ import annotations

import pytest
import yaml

import planned_bytes
from planned_bytes import JOBS, Row
from spillway.api.load import parse_job
from spillway.api.rejections import rejections
from spillway.units import MIB


def test_there_are_25_jobs() -> None:
    assert len(JOBS) == 25


@pytest.mark.parametrize("name", JOBS)
def test_every_job_can_run_on_one_machine(name: str) -> None:
    assert rejections(parse_job(yaml.safe_dump(JOBS[name].document), name)) == []


@pytest.mark.parametrize(
    ("planned", "seen", "ok"),
    [
        (100 * MIB, 100 * MIB, True),
        (100 * MIB, 100 * MIB + 1, False),
        (110 * MIB, 100 * MIB, True),
        (110 * MIB + 1, 100 * MIB, False),
        (14 * MIB, 10 * MIB, True),
        (14 * MIB + 1, 10 * MIB, False),
        (0, 1, False),
    ],
)
def test_a_plan_is_an_upper_bound_within_a_tenth_or_4_mib(planned: int, seen: int, ok: bool) -> None:
    assert Row("a", "device", planned, seen).ok is ok


def test_the_job_of_the_readme_is_the_readmes() -> None:
    assert planned_bytes.readme()["metadata"]["name"] == "my-llama"
