"""An attempt that finds no room is planned again for what is free; a node that fails a job is not given to it again."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from harness import cluster_model
from harness.cluster_model import fail, running, seconds_of, timestamp
from harness.observations import attempt, condition, follow_up, observed
from spillway.api.training_job import TrainingJob
from spillway.feedback.retries import is_fault_of_node
from spillway.placement.cluster_view import ClusterView, NodeView
from spillway.placement.place import Placement, Unplaceable
from spillway.planning.hardware import resolve_node
from spillway_operator.decide.observed import Desired, JobObject, Observed, PodObject
from spillway_operator.decide.reconcile import reconcile
from spillway_operator.measured.faulty_nodes import AVOIDED_SECONDS, MOST_JOBS, FaultyNodes

NOW = "2026-11-21T10:10:00Z"
NO_ROOM = "0/2 nodes are available: 2 Insufficient memory"
NO_NODE = PodObject("demo-1-0", "pod-0", 0, "", "Pending", unschedulable=NO_ROOM)
WAITING = (NO_NODE,)


class Places:
    """Places as the model does, but in a smaller pod if asked for what is free; `views` are what it was asked with."""

    def __init__(self, free: str = "smaller") -> None:
        self.free, self.views = free, list[ClusterView]()

    def __call__(self, job: TrainingJob, cluster: ClusterView) -> Placement | Unplaceable:
        self.views.append(cluster)
        placed = cluster_model.place(job, cluster)
        if not cluster.as_free or self.free == "same":
            return placed
        if self.free == "nothing":
            return Unplaceable("NoNode", "none of 2 nodes can carry a pod")
        smaller = replace(placed.pod, memory_bytes=placed.pod.memory_bytes // 2)
        return replace(placed, pod=smaller, at_once=self.free != "too few")


def unschedulable(seconds: float, pods: tuple[PodObject, ...] = WAITING, changes: Any = None, **more: Any) -> Observed:
    """An attempt whose pods have had no node for so long."""
    since = timestamp(seconds_of(NOW) - seconds)
    waits = [
        {"type": kind, "status": "False", "reason": reason, "message": "", "lastTransitionTime": since}
        for kind, reason in (("Scheduled", "Unschedulable"), ("Running", "Starting"))
    ]
    planned = {"node": "local", "device": "Cpu", "podMemory": "100Gi"}
    known = {
        "conditions": waits, "plan": planned,
        "attempts": {"total": 1, "ended": 0, "startTime": since, "pendingTime": since},
    }  # fmt: skip
    born = attempt(1, creation_time="2026-11-21T09:00:00Z", active=1)
    fields = {"capacity_is_fresh": True} | more
    return observed(changes, known, attempts=(born,), pods=pods, **fields)


def is_replanned(desired: Desired) -> bool:
    return desired.status is not None and condition(desired, "Running")["reason"] == "Replanned"


# --- planned again ----------------------------------------------------------------------------------------------------


def test_attempt_without_room_gives_way_to_one_that_fits_what_is_free() -> None:
    seen, places = unschedulable(31), Places()
    desired = reconcile(seen, NOW, places)
    said = condition(desired, "Running")
    assert (said["status"], said["reason"]) == ("False", "Replanned")
    assert said["message"].startswith(
        "the scheduler finds no node, so the job is planned again for the free nodes: class local, with pods of "
    )
    assert said["message"].endswith(" instead of 100 GiB")
    assert [view.as_free for view in places.views] == [True]
    assert not desired.deletes, "it is written before it is done"
    after = reconcile(follow_up(seen, desired), NOW, Places("nothing"))
    assert [gone.name for gone in after.deletes] == ["demo-1"], "and decided for good"


def test_an_attempt_that_was_replanned_counts_as_no_restart() -> None:
    seen = unschedulable(31)
    withdrawn = replace(follow_up(seen, reconcile(seen, NOW, Places())), attempts=(), pods=())
    desired = reconcile(withdrawn, NOW, Places())
    assert desired.status is not None and [made["kind"] for made in desired.creates] == ["ConfigMap", "Job"]
    attempts = desired.status["attempts"]
    assert (attempts["total"], attempts["lastReason"]) == (2, "Replanned")
    assert attempts.get("restarts", 0) == 0


@pytest.mark.parametrize("memory", [None, "1Mi"])
def test_the_size_of_pods_is_named_only_if_they_become_smaller(memory: str | None) -> None:
    seen = unschedulable(31)
    status = json.loads(seen.job.status)
    status["plan"] = {"node": "another", "device": "Cpu"} | ({"podMemory": memory} if memory else {})
    seen = replace(seen, job=replace(seen.job, status=json.dumps(status).encode()))
    message = condition(reconcile(seen, NOW, Places()), "Running")["message"]
    assert message.endswith("planned again for the free nodes: class local")


@pytest.mark.parametrize("free", ["same", "nothing", "too few"])
def test_attempt_goes_on_waiting_if_no_other_plan_has_room(free: str) -> None:
    seen = unschedulable(31, changes={"spec.memory.budget.host": "1Gi"})
    planned = json.loads(seen.job.status)
    planned["plan"]["podMemory"] = "1Mi"
    seen = replace(seen, job=replace(seen.job, status=json.dumps(planned).encode()))
    assert not is_replanned(reconcile(seen, NOW, Places(free)))


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(29, False), (31, True), (89, True), (91, False), (121, True), (301, False), (481, True), (1441, True)],
)
def test_other_plans_are_looked_for_at_growing_intervals(seconds: float, expected: bool) -> None:
    assert is_replanned(reconcile(unschedulable(seconds), NOW, Places())) is expected


def test_nodes_are_listed_before_another_plan_is_looked_for() -> None:
    places = Places()
    assert reconcile(unschedulable(31, capacity_is_fresh=False), NOW, places).needs == {"pods", "capacity"}
    assert places.views == []


@pytest.mark.parametrize(
    ("pods", "changes"),
    [
        ((replace(NO_NODE, node="node-0"),), {}),
        ((NO_NODE, replace(NO_NODE, index=1, unschedulable="")), {}),
        (WAITING, {"spec.scheduling": {"queueName": "team-a"}}),
    ],
)
def test_pods_with_a_node_or_a_queue_keep_their_plan(pods: tuple[PodObject, ...], changes: Any) -> None:
    assert not is_replanned(reconcile(unschedulable(31, pods, changes), NOW, Places()))


@pytest.mark.parametrize("free", ["smaller", "nothing"])
def test_next_attempt_is_planned_for_what_is_free_or_else_as_before(free: str) -> None:
    ended: dict[str, Any] = {"total": 1, "ended": 1, "lastReason": "Replanned", "endTime": "2026-11-21T10:00:00Z"}
    places = Places(free)
    desired = reconcile(observed(status={"attempts": ended}), NOW, places)
    assert desired.creates
    assert [view.as_free for view in places.views] == ([True] if free == "smaller" else [True, False])


# --- nodes that do not exist yet --------------------------------------------------------------------------------------


def test_queued_job_for_a_declared_class_is_created_in_its_queue() -> None:
    """Kueue makes a Workload of it, which an autoscaler sees, although no node has a GPU yet."""
    changes = {"spec.parallelism.device": "Cuda", "spec.scheduling.queueName": "team-a"}
    node = resolve_node("8xh100")
    new = NodeView(
        "a new pool", {"pool": "h100"}, (), float(node.num_cores), node.host_bytes, node.nvme_bytes,
        {"nvidia.com/gpu": node.num_devices}, profile=node, is_declared=True,
    )  # fmt: skip
    seen = observed(changes)
    job = reconcile(replace(seen, cluster=ClusterView((), declared=(new,))), NOW).creates[-1]
    assert (job["kind"], job["spec"]["suspend"]) == ("Job", True)
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert "'values': ['h100']" in str(job["spec"]["template"]["spec"]["affinity"])
    assert not reconcile(replace(seen, cluster=ClusterView(())), NOW).creates


# --- nodes with faults ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "node", "before", "node_before", "expected"),
    [
        ("DeviceFault", "a", "", "", True),
        ("SpillIOError", "a", "", "", True),
        ("DeviceFault", "", "", "", False),
        ("RankCrashed", "a", "", "", False),
        ("RankCrashed", "a", "RankCrashed", "a", True),
        ("NoProgress", "a", "RankCrashed", "a", True),
        ("RankCrashed", "a", "RankCrashed", "b", False),
        ("RankCrashed", "a", "PodDeleted", "a", False),
        ("NodeLost", "a", "NodeLost", "a", False),
    ],
)
def test_what_speaks_against_a_node(reason: str, node: str, before: str, node_before: str, expected: bool) -> None:
    assert is_fault_of_node(reason, node, before, node_before) is expected


def test_job_avoids_the_node_of_a_device_fault_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    views = list[ClusterView]()

    def place(job: TrainingJob, cluster: ClusterView) -> Placement:
        views.append(cluster)
        placed: Placement = known(job, cluster)
        return replace(placed, avoided=tuple(sorted(cluster.avoided)))

    known = cluster_model.place
    monkeypatch.setattr(cluster_model, "place", place)
    world = running()
    node = world.pods()[0]["spec"]["nodeName"]
    fail(world, 78, "ECC error")
    faulty = world.status["attempts"]["faultyNodes"]
    assert [(one["node"], one["reason"]) for one in faulty] == [(node, "DeviceFault")]
    assert views[-1].avoided == {node}
    job = world.attempts()[-1]
    terms = job["spec"]["template"]["spec"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert terms["nodeSelectorTerms"] == [
        {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": [node]}]}
    ]
    notes = [note.note for note in world.operator.notes if note.reason == "NodeAvoided"]
    assert notes == [f"DeviceFault on {node}: this job avoids that node for a day"]
    world.advance(86401)
    fail(world, 1)
    assert views[-1].avoided == frozenset()


def test_all_avoid_a_node_that_several_jobs_list_until_an_hour_has_passed() -> None:
    nodes, began = FaultyNodes(), datetime.fromisoformat(NOW).timestamp()
    for number in range(MOST_JOBS):
        assert nodes.avoided(began) == frozenset()
        status = {"attempts": {"faultyNodes": [{"node": "bad", "reason": "DeviceFault", "time": NOW}]}}
        for _ in range(2):
            nodes.seen(JobObject(f"uid-{number}", "job", "team", 1, 1, NOW, b"{}", json.dumps(status).encode()))
    assert nodes.avoided(began + AVOIDED_SECONDS - 1) == {"bad"}
    assert nodes.avoided(began + AVOIDED_SECONDS) == frozenset()
    for garbled in ({"attempts": {"faultyNodes": [1, {}, {"node": "a", "time": "?"}]}}, {"attempts": []}):
        nodes.seen(JobObject("u", "job", "team", 1, 1, NOW, b"{}", json.dumps(garbled).encode()))
