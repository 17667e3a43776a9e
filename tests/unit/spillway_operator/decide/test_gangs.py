"""Gangs: of two jobs that each hold half of what they need, the younger gives its half back; nothing deadlocks.

The rules alone on single observations, and two jobs on the model of a cluster (cluster_model.py) with its real shell:
whatever the scheduler gives to whom first, and whenever the operator dies.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

from harness.cluster_model import Object, World, _is_deleting
from harness.observations import NOW, condition, decide, follow_up, job_object, observed
from spillway_operator.decide.observed import Observed, PodObject, WaitingGang
from spillway_operator.kube.store import project_job
from spillway_operator.observe import waiting_gang

TWO = {"spec.parallelism": {"nodes": 2, "device": "Cpu"}}
SINCE = "2026-11-21T09:59:50Z"
"""forty seconds ago"""
OLDER = WaitingGang("team", "older", "uid-0", "2026-11-21T09:00:00Z", SINCE)


def pod(index: int, node: str) -> PodObject:
    said = "" if node else "0/1 nodes are available: 1 Insufficient cpu"
    phase = "Running" if node else "Pending"
    return PodObject(f"demo-1-{index}", f"pod-{index}", index, node, phase, unschedulable=said)


HALF = (pod(0, "node-0"), pod(1, ""))


def half_scheduled(
    since: str = SINCE, pods: tuple[PodObject, ...] = HALF, changes: Any = None, **more: Any
) -> Observed:
    """An attempt of two pods of which one has a node, as its status has said since then."""
    from harness.observations import attempt

    waits = [
        {"type": kind, "status": "False", "reason": reason, "message": "", "lastTransitionTime": since}
        for kind, reason in (("Scheduled", "Unschedulable"), ("Running", "Starting"))
    ]
    known = {"conditions": waits, "attempts": {"total": 1, "ended": 0, "startTime": since, "pendingTime": since}}
    born = attempt(1, creation_time="2026-11-21T09:50:00Z", active=2)
    return observed(changes or TWO, known, attempts=(born,), pods=pods, **more)


def running(seen: Observed) -> dict[str, Any]:
    return condition(decide(seen), "Running")


def test_half_an_attempt_yields_to_an_older_job_that_waits_for_nodes() -> None:
    seen = half_scheduled(waiting_gangs=(OLDER,))
    desired = decide(seen)
    said = condition(desired, "Running")
    assert (said["status"], said["reason"]) == ("False", "GangYielded")
    assert "1 of 2 pods have nodes" in said["message"] and "team/older" in said["message"]
    assert not desired.deletes, "said first, done then"
    after = follow_up(seen, desired)
    assert [gone.name for gone in decide(replace(after, waiting_gangs=())).deletes] == ["demo-1"], (
        "and decided for good"
    )


def test_who_goes_first_is_asked_only_by_half_an_attempt() -> None:
    assert decide(half_scheduled(waiting_gangs=None)).needs == {"waiting_gangs"}
    for pods in ((pod(0, ""), pod(1, "")), (pod(0, "node-0"), replace(pod(1, "node-1"), ready=False))):
        assert "waiting_gangs" not in decide(half_scheduled(pods=pods, waiting_gangs=None)).needs
    disabled = {**TWO, "spec.scheduling": {"gang": "Disabled"}}
    assert not decide(half_scheduled(changes=disabled, waiting_gangs=None)).needs


@pytest.mark.parametrize(
    "other",
    [
        replace(OLDER, creation_time="2026-11-21T10:00:01Z"),
        replace(OLDER, creation_time="2026-11-21T10:00:00Z", uid="f"),
        replace(OLDER, since="2026-11-21T10:00:05Z"),
    ],
    ids=["younger", "as old with a later uid", "waits since a moment ago"],
)
def test_it_keeps_its_nodes_while_no_older_job_has_waited_for_some(other: WaitingGang) -> None:
    assert running(half_scheduled(waiting_gangs=(other,)))["reason"] == "Starting"


def test_a_moment_is_no_reason_to_yield() -> None:
    desired = decide(half_scheduled("2026-11-21T10:00:10Z", waiting_gangs=(OLDER,)))
    assert desired.status is None or condition(desired, "Running")["reason"] == "Starting"


LONG_AGO = "2026-11-21T09:00:00Z"


@pytest.mark.parametrize(
    ("since", "scheduled_at", "wait", "reason"),
    [
        ("2026-11-21T09:56:25Z", "", None, "GangYielded"),
        ("2026-11-21T09:57:00Z", "", None, "Starting"),
        (LONG_AGO, "2026-11-21T09:57:00Z", None, "Starting"),
        (LONG_AGO, "2026-11-21T09:56:25Z", None, "GangYielded"),
        (LONG_AGO, "2026-11-21T09:50:00Z", 1200, "Starting"),
        (LONG_AGO, "2026-11-21T09:10:00Z", 1200, "GangYielded"),
    ],
    ids=["240 s", "less", "a node came meanwhile", "and no other", "as long as the spec says", "longer"],
)
def test_incomplete_gang_releases_its_nodes_when_no_other_pod_gets_one(
    since: str, scheduled_at: str, wait: int | None, reason: str
) -> None:
    changes = {**TWO, "spec.scheduling": {"gangWaitSeconds": wait}}
    pods = (replace(HALF[0], scheduled_at=scheduled_at), HALF[1])
    assert running(half_scheduled(since, pods, changes, waiting_gangs=()))["reason"] == reason


def test_a_pod_that_pulls_its_image_for_long_is_not_missing() -> None:
    """Neither as part of a gang, nor as a trainer that makes no step."""
    pulls = replace(pod(1, "node-1"), phase="Pending")
    for more in ({}, {"waiting": "ImagePullBackOff: too many requests"}):
        seen = half_scheduled(LONG_AGO, (HALF[0], replace(pulls, **more)), hearing_seconds=1e6)
        assert decide(seen).look_again_seconds and not decide(seen).deletes
        assert running(seen)["reason"] in ("PodsNotReady", "ContainerWaiting")


def yielded(end: str, **more: Any) -> Observed:
    attempts = {"total": 1, "ended": 1, "disruptions": 1, "lastReason": "GangYielded", "endTime": end, "shortInARow": 1}
    return observed(TWO, {"conditions": [], "attempts": attempts}, **more)


def test_who_yielded_lets_the_older_one_go_first_but_not_for_ever() -> None:
    recent = yielded("2026-11-21T10:00:00Z", waiting_gangs=(OLDER,))
    assert not decide(recent).creates and decide(recent).look_again_seconds
    assert decide(replace(recent, waiting_gangs=())).creates
    assert decide(replace(recent, waiting_gangs=None)).needs == {"waiting_gangs"}
    assert decide(yielded("2026-11-21T09:55:00Z", waiting_gangs=(OLDER,))).creates


def test_a_gang_that_waits_is_told_by_its_status() -> None:
    def of(changes: dict[str, Any], reason: str = "Unschedulable") -> WaitingGang | None:
        waits = {"type": "Scheduled", "status": "False", "reason": reason, "lastTransitionTime": NOW}
        return waiting_gang(job_object(changes, {"conditions": [waits]}))

    found = of(TWO)
    assert found is not None and (found.name, found.since) == ("demo", NOW)
    assert of({"spec.parallelism": {"nodes": 1}}) is None
    assert of({**TWO, "spec.scheduling": {"gang": "Disabled"}}) is None
    assert of(TWO, "NoAttempt") is None


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        (TWO, "Yield"),
        ({**TWO, "spec.scheduling": {"queueName": "team"}}, "Queue"),
        ({**TWO, "spec.scheduling": {"queueName": "team", "gang": "Required"}}, "Queue"),
        ({**TWO, "spec.scheduling": {"gang": "Disabled"}}, ""),
        ({"spec.scheduling": {"gang": "Required"}}, ""),
    ],
)
def test_the_status_says_what_starts_all_pods_or_none(changes: dict[str, Any], kind: str) -> None:
    status = decide(observed(changes)).status
    assert status is not None and status["plan"].get("gang") == kind


# --- two jobs on a cluster with too few nodes -------------------------------------------------------------------------


class Gang(World):
    """Pods get nodes from a scheduler that the test plays; until then the scheduler says that there are none."""

    def _create_pod(self, job: Object, index: int) -> None:
        super()._create_pod(job, index)
        made = self.pods(job)[-1]
        made = next(pod for pod in self.pods(job) if pod["index"] == index)
        made["spec"] = {}
        made["status"]["conditions"] = [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available"}
        ]
        self.server.put("pods", made)

    def start_pods(self) -> None:
        """Only those that have a node."""
        for pod in self.pods():
            if pod["status"]["phase"] == "Pending" and pod["spec"].get("nodeName") and not _is_deleting(pod):
                pod["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
                self.server.put("pods", pod)

    @property
    def held(self) -> int:
        live = [pod for pod in self.pods() if pod["status"]["phase"] in ("Pending", "Running")]
        return sum(bool(pod["spec"].get("nodeName")) for pod in live)

    def waiting_pods(self) -> list[Object]:
        return [
            pod
            for pod in self.pods()
            if pod["status"]["phase"] == "Pending" and not pod["spec"].get("nodeName") and not _is_deleting(pod)
        ]


def tell(worlds: list[Gang]) -> None:
    """Each operator's watches also know the jobs of the others, under names of their own."""
    for i, world in enumerate(worlds):
        for j, other in enumerate(worlds):
            if i != j:
                seen = project_job(other.job)
                world.operator.store.put_job(replace(seen, name=f"other-{j}", uid=f"{seen.uid}-{j}"))


def gangs_of(count: int) -> list[Gang]:
    made = [Gang(num_nodes=2) for _ in range(count)]
    for i, world in enumerate(made):  # the first is the oldest
        world.job["metadata"]["creationTimestamp"] = f"2026-01-01T00:00:{i:02}Z"
        world.server.put("trainingjobs", world.job)
    return made


@pytest.mark.parametrize("order", list(itertools.product((0, 1), repeat=3)), ids=str)
@pytest.mark.parametrize("capacity", [2, 3])
@pytest.mark.parametrize("killed_every", [0, 1, 3])
def test_two_gangs_on_too_few_nodes_both_complete(order: tuple[int, ...], capacity: int, killed_every: int) -> None:
    """Whom the scheduler serves first is the test's choice; after that it serves whoever waits, the younger first."""
    worlds, first = gangs_of(2), list(order)
    for turn in range(200):
        for i, world in enumerate(worlds):
            if killed_every and turn % killed_every == i:
                world.restart_operator()
            world.operator.deliver_all()
            tell(worlds)
            world.look()
            world.control()
            world.terminate_pods()
            world.control()
        while sum(world.held for world in worlds) < capacity:
            wanting = [world for world in (*(worlds[i] for i in first[:1]), *reversed(worlds)) if world.waiting_pods()]
            if not wanting:
                break
            first[:1] = []
            waiting = wanting[0].waiting_pods()[0]
            waiting["spec"]["nodeName"] = "a-node"
            wanting[0].server.put("pods", waiting)
        for world in worlds:
            world.start_pods()
            if world.status.get("state") == "Running":
                for pod in world.pods():
                    world.end_pod(pod, 0)
            world.control()
            world.advance(10)
        if all(world.is_over() for world in worlds):
            break
    for world in worlds:
        assert world.status["state"] == "Complete", json.dumps(world.status, indent=1)
        assert world.status["attempts"].get("restarts", 0) == 0
    assert turn < 60, "600 seconds"
