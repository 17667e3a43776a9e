"""known_plan: what make_plan says, found once for jobs that differ in nothing that a plan depends on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cases.job_documents import job
from spillway.api.pod import Member
from spillway.plan import Infeasible, MemoryPlan
from spillway.planning import known_plans
from spillway.planning.hardware import local_node
from spillway.planning.known_plans import known_plan
from spillway.planning.planner import Overrides, make_plan
from spillway.units import GIB, MIB

NODE = local_node(4, 8 * GIB, 8 * GIB, 64 * GIB)


@pytest.fixture(autouse=True)
def searches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the jobs that a plan was searched for; none is known at first."""
    found: list[str] = []

    def counted(asked: Any, *arguments: Any, **options: Any) -> MemoryPlan | Infeasible:
        found.append(asked.metadata.name)
        return make_plan(asked, *arguments, **options)

    monkeypatch.setattr(known_plans, "make_plan", counted)
    known_plans.forget_plans()
    yield found
    known_plans.forget_plans()


@pytest.mark.parametrize(
    "changes",
    [
        {"metadata.name": "another"},
        {"spec.training.seed": 7},
        {"spec.training.schedule.warmupSteps": 3},
        {"spec.training.optimizer.learningRate": 0.5},
    ],
)
def test_jobs_that_differ_in_nothing_that_is_planned_share_one_search(
    changes: dict[str, Any], searches: list[str]
) -> None:
    assert known_plan(job(), NODE) == make_plan(job(), NODE)
    assert known_plan(job(changes), NODE) == make_plan(job(changes), NODE), "in its own name"
    assert len(searches) == 1


@pytest.mark.parametrize(
    "changes",
    [{"spec.training.steps": 7}, {"spec.training.optimizer.name": "Lion"}, {"spec.memory.budget.host": "1Gi"}],
)
def test_whatever_else_differs_is_planned_for(changes: dict[str, Any], searches: list[str]) -> None:
    for one in (job(), job(changes)):
        assert known_plan(one, NODE) == make_plan(one, NODE)
    assert len(searches) == 2


def test_nodes_budgets_and_explanations_are_asked_for_apart(searches: list[str]) -> None:
    smaller = local_node(4, 4 * GIB, 4 * GIB, 64 * GIB)
    asked: list[tuple[Any, Overrides, bool]] = [
        (NODE, Overrides(), True), (NODE, Overrides(), False), (smaller, Overrides(), True),
        (NODE, Overrides(host_bytes=GIB), True),
    ]  # fmt: skip
    for node, overrides, explained in asked * 2:
        wanted = make_plan(job(), node, overrides, explained=explained)
        assert known_plan(job(), node, overrides, explained=explained) == wanted
    assert len(searches) == len(asked)


def test_what_does_not_fit_is_known_too_and_said_in_the_name_of_who_asks(searches: list[str]) -> None:
    tight = Overrides(device_bytes=MIB, host_bytes=MIB, nvme_bytes=MIB)
    for name in ("one", "two"):
        found = known_plan(job({"metadata.name": name}), NODE, tight)
        assert isinstance(found, Infeasible)
        assert found.job == name
    assert searches == ["one"]


def test_the_plan_of_a_sweep_names_its_own_members(searches: list[str]) -> None:
    members = tuple(Member(name=f"m{seed}", training={"seed": seed}) for seed in range(3))
    for name in ("one", "two"):
        alone = job({"metadata.name": name})
        sweep = alone.model_copy(update={"spec": alone.spec.model_copy(update={"members": members})})
        assert known_plan(sweep, NODE) == make_plan(sweep, NODE)
    assert searches == ["one", "two"]
