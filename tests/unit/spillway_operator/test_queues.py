"""Queues, as far as one look shows them; a real Kueue is asked in tests/cluster/test_queues.py."""

from __future__ import annotations

from typing import Any

import pytest

from harness.cluster_model import World, rounds
from harness.observations import attempt, condition, decide, observed
from spillway_operator.decide.observed import Observed
from spillway_operator.kube.api_client import ApiError, NotFound, RequestRejected
from spillway_operator.observe import project_workload

QUEUED = {"spec.scheduling": {"queueName": "team", "workloadPriorityClassName": "urgent"}}
SAID = "couldn't assign flavors to pod set main: insufficient unused quota for memory in flavor any, 1Gi more needed"
WAITS = "waiting for quota in the queue team"


def waiting(message: str = WAITS, since: str = "2026-11-21T10:00:10Z", **more: Any) -> Observed:
    """For twenty seconds now."""
    told = [
        {
            "type": "QuotaReserved",
            "status": "False",
            "reason": "Waiting",
            "message": message,
            "lastTransitionTime": since,
        }
    ]
    known = {"conditions": told, "attempts": {"total": 1, "ended": 0, "startTime": since, "pendingTime": since}}
    return observed(QUEUED, known, attempts=(attempt(1, suspended=True),), **more)


def test_a_queued_job_says_what_the_queue_says() -> None:
    assert decide(waiting(queue_says=None)).needs == {"queue_says"}
    desired = decide(waiting(queue_says=SAID))
    assert condition(desired, "QuotaReserved")["message"] == f"{WAITS}: {SAID}"
    assert desired.look_again_seconds is not None, "no watch reports a Workload"
    assert condition(decide(waiting(queue_says="")), "QuotaReserved")["message"] == WAITS


def test_queue_is_not_asked_for_ten_seconds_and_its_last_answer_stands() -> None:
    young = decide(waiting(f"{WAITS}: {SAID}", "2026-11-21T10:00:25Z", queue_says=None))
    assert not young.needs
    assert condition(young, "QuotaReserved")["message"] == f"{WAITS}: {SAID}"


def test_a_workload_says_why_it_waits_or_that_it_is_deactivated() -> None:
    waits = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": SAID}
    named: dict[str, Any] = {"metadata": {"name": "job-demo-1-abc"}}
    assert project_workload({**named, "status": {"conditions": [waits]}}) == SAID
    assert project_workload({**named, "status": {"conditions": [{**waits, "status": "True"}]}}) == ""
    assert "job-demo-1-abc is deactivated" in project_workload({**named, "spec": {"active": False}})
    assert project_workload(named) == ""


@pytest.mark.parametrize("answer", [NotFound, RequestRejected])
def test_where_kueue_is_not_there_or_not_ours_to_see_the_job_just_waits(answer: type[ApiError]) -> None:
    world = World(queue="team")
    listed = world.operator.client.list

    async def list_(resource: Any, *more: Any) -> Any:
        if resource.plural == "workloads":
            raise answer("list", 404, "NotFound", "the server could not find the requested resource")
        return await listed(resource, *more)

    world.operator.client.list = list_  # type: ignore[method-assign]
    rounds(world, 20)
    assert world.status["state"] == "Queued"
    assert world.condition("QuotaReserved")["message"] == "waiting for quota in the queue team"


def test_the_job_carries_the_queue_and_the_priority_class_of_the_queue() -> None:
    desired = decide(observed(QUEUED))
    labels = desired.creates[-1]["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "team" and labels["kueue.x-k8s.io/priority-class"] == "urgent"
    assert "priorityClassName" not in desired.creates[-1]["spec"]["template"]["spec"]
