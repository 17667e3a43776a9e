"""Queues: a real Kueue decides when an attempt begins and when it must end; the operator writes no Job twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from harness.fake_nodes import POOL
from harness.installed import (
    LONG,
    OPERATOR_USER,
    Document,
    Installed,
    example,
    named,
    on_fake_nodes,
)
from spillway.units import parse_quantity

SECONDS = 300.0
"""limit for each step of a test, in which a trainer starts on a busy machine"""
QUEUE = "team"
KINDS = "kueue.x-k8s.io/v1beta2"


def kueue(kind: str, name: str, namespace: str = "", **fields: object) -> Document:
    metadata = {"name": name, **({"namespace": namespace} if namespace else {})}
    return {"apiVersion": KINDS, "kind": kind, "metadata": metadata, **fields}


def cluster_queue(name: str, memory: str, flavors: tuple[str, ...], **more: object) -> Document:
    """A ClusterQueue in which jobs compete only for memory; there is enough of everything else."""
    quotas = {"cpu": "100", "memory": memory, "ephemeral-storage": "1000Gi"}
    groups = [
        {
            "coveredResources": list(quotas),
            "flavors": [
                {"name": flavor, "resources": [{"name": key, "nominalQuota": quota} for key, quota in quotas.items()]}
                for flavor in flavors
            ],
        }
    ]
    preemption = {"withinClusterQueue": "LowerPriority"}
    return kueue(
        "ClusterQueue", name, spec={"namespaceSelector": {}, "resourceGroups": groups, "preemption": preemption, **more}
    )


@pytest.fixture
def queue(spillway: Installed, namespace: str) -> Iterator[Callable[..., None]]:
    """A function that makes the namespace's queue `team`, or changes its quota. Everything is deleted at the end."""
    made: set[str] = set()

    def make(memory: str, flavors: dict[str, dict[str, str]] | None = None, **more: object) -> None:
        labels = flavors or {"any": {}}
        names = tuple(f"{namespace}-{flavor}" for flavor in labels)
        spillway.bed.apply(
            *(
                kueue("ResourceFlavor", name, spec=_flavor(found))
                for name, found in zip(names, labels.values(), strict=True)
            ),
            cluster_queue(namespace, memory, names, **more),
            kueue("LocalQueue", QUEUE, namespace, spec={"clusterQueue": namespace}),
        )
        made.update(names)

    yield make
    spillway.bed.kubectl("delete", "trainingjobs.spillway.dev", "--all", "-n", namespace, "--timeout=90s")
    spillway.bed.kubectl("delete", "localqueue", QUEUE, "-n", namespace)
    spillway.bed.kubectl("delete", "clusterqueue", namespace, "--wait=false")
    spillway.bed.kubectl("delete", "resourceflavor", *sorted(made), "--wait=false")


def _flavor(labels: dict[str, str]) -> dict[str, object]:
    if not labels:
        return {}
    toleration = {"key": "kwok.x-k8s.io/node", "operator": "Exists"}
    return {"nodeLabels": labels, "tolerations": [toleration]}


def job(name: str, namespace: str, **fields: object) -> Document:
    found = example("one-pod", namespace, scheduling={"queueName": QUEUE}, **fields)
    return named(found, name)


def pod_memory(spillway: Installed, namespace: str, name: str) -> int:
    found = spillway.until(lambda job: job["status"].get("plan", {}).get("podMemory"), namespace, name, SECONDS)
    return parse_quantity(found["status"]["plan"]["podMemory"])


def quota_is(reason: str, said: str = "") -> Callable[[Document], bool]:
    """A test of a job for this reason, and this text in the message, of its condition QuotaReserved."""

    def holds(found: Document) -> bool:
        conditions = {each["type"]: each for each in found["status"].get("conditions", ())}
        known = conditions.get("QuotaReserved", {})
        return bool(known.get("reason") == reason and said in known.get("message", ""))

    return holds


def step(found: Document) -> int:
    return int(found["status"].get("progress", {}).get("step", 0))


def workloads(spillway: Installed, namespace: str) -> list[Document]:
    found: list[Document] = spillway.bed.get("workloads.kueue.x-k8s.io", "-n", namespace)["items"]
    return found


def writes_of_jobs(spillway: Installed, since: int, namespace: str) -> set[str]:
    """The verbs of the operator's writes to batch/v1 Jobs."""
    return {
        request.verb
        for request in spillway.bed.requests(since, OPERATOR_USER)
        if request.mutating and request.resource == "jobs" and request.namespace == namespace
    }


def test_the_second_job_waits_for_quota_and_runs_when_the_first_ends(
    spillway: Installed, namespace: str, queue: Callable[..., None]
) -> None:
    since = spillway.bed.audit_position()
    queue("4Gi")
    spillway.create(job("first", namespace, training__steps=LONG))
    one = pod_memory(spillway, namespace, "first")
    queue(str(one * 3 // 2))
    spillway.until(step, namespace, "first", SECONDS)
    spillway.create(job("second", namespace))
    # In Kueue's words, after the ten seconds that every attempt gets.
    waiting = spillway.until(quota_is("Waiting", "insufficient"), namespace, "second", SECONDS)
    message = next(c["message"] for c in waiting["status"]["conditions"] if c["type"] == "QuotaReserved")
    assert message.startswith(f"waiting for quota in the queue {QUEUE}: ") and "memory" in message, message
    assert waiting["status"]["state"] == "Queued" and not spillway.children("pod", namespace, "second")
    spillway.change(namespace, "first", {"lifecycle": {"activeDeadlineSeconds": 1}})
    spillway.wait(namespace, "first", "Failed", SECONDS)
    ended = spillway.wait(namespace, "second", "Complete", SECONDS)
    assert ended["status"]["attempts"]["total"] == 1
    assert quota_is("Admitted")(ended)
    assert writes_of_jobs(spillway, since, namespace) == {"create", "delete"}, "a Job is written once, by its creation"


@pytest.mark.ci
def test_a_preempted_job_checkpoints_queues_again_and_resumes(
    spillway: Installed, namespace: str, queue: Callable[..., None]
) -> None:
    since = spillway.bed.audit_position()
    high = f"{namespace}-high"
    spillway.bed.apply(kueue("WorkloadPriorityClass", high, value=1000, description="goes first"))
    queue("4Gi")
    spillway.bed.claim("kept", namespace)
    kept = {"checkpoint__claim": "kept", "checkpoint__everySteps": LONG}
    spillway.create(job("low", namespace, training__steps=LONG, **kept))
    queue(str(pod_memory(spillway, namespace, "low") * 3 // 2))
    spillway.until(step, namespace, "low", SECONDS)
    urgent = job("urgent", namespace)
    urgent["spec"]["scheduling"]["workloadPriorityClassName"] = high
    spillway.create(urgent)
    seen = spillway.until(lambda found: found["status"]["attempts"]["total"] == 2, namespace, "low", SECONDS)
    attempts = seen["status"]["attempts"]
    assert (attempts["ended"], attempts["restarts"], attempts["disruptions"]) == (1, 0, 1), attempts
    assert attempts["lastReason"] == "Preempted"
    saved = seen["status"]["checkpoint"]["step"]
    assert saved > 0, "by everySteps the next one is far away: it was written because the attempt had to go"
    assert quota_is("Waiting")(seen)
    spillway.until(lambda _: bool(spillway.children("pod", namespace, "urgent")), namespace, "urgent", SECONDS)
    (urgent_pod,) = spillway.children("pod", namespace, "urgent")
    assert urgent_pod["spec"].get("priorityClassName") is None, "the queue's order is not the pods' priority"
    spillway.wait(namespace, "urgent", "Complete", SECONDS)
    resumed = spillway.until(_went_on_from(saved), namespace, "low", SECONDS)
    assert resumed["status"]["attempts"]["total"] == 2 and resumed["status"]["attempts"]["restarts"] == 0
    reasons = {event.get("reason") for event in spillway.bed.get("events", "-n", namespace)["items"]}
    assert "EvictedByQueue" in reasons
    assert writes_of_jobs(spillway, since, namespace) == {"create", "delete"}
    spillway.bed.kubectl("delete", "workloadpriorityclass", high)


@pytest.mark.full
def test_a_queued_job_can_be_suspended_and_deleted_and_leaves_no_workload(
    spillway: Installed, namespace: str, queue: Callable[..., None]
) -> None:
    queue("1Mi")
    for name in ("suspended", "deleted"):
        spillway.create(job(name, namespace))
        spillway.until(quota_is("Waiting"), namespace, name, SECONDS)
    _suspend(spillway, namespace, "suspended", True)
    spillway.bed.kubectl("delete", "trainingjobs.spillway.dev/deleted", "-n", namespace, "--timeout=60s")
    spillway.wait(namespace, "suspended", "Suspended", SECONDS)
    spillway.until(lambda _: not workloads(spillway, namespace), namespace, "suspended", SECONDS)
    queue("4Gi")
    _suspend(spillway, namespace, "suspended", False)
    ended = spillway.wait(namespace, "suspended", "Complete", SECONDS)
    assert (ended["status"]["attempts"]["total"], ended["status"]["attempts"]["restarts"]) == (2, 0)


@pytest.mark.full
def test_suspended_job_returns_its_quota_and_reports_a_queue_too_small(
    spillway: Installed, namespace: str, queue: Callable[..., None]
) -> None:
    """The new attempt has a new Job, and so a new Workload, which requests what the new plan needs."""
    queue("4Gi")
    spillway.bed.claim("kept", namespace)
    kept = {"checkpoint__claim": "kept", "checkpoint__everySteps": LONG}
    spillway.create(job("grows", namespace, training__steps=LONG, **kept))
    before = pod_memory(spillway, namespace, "grows")
    spillway.until(step, namespace, "grows", SECONDS)
    _suspend(spillway, namespace, "grows", True)
    suspended = spillway.wait(namespace, "grows", "Suspended", SECONDS)
    saved = suspended["status"]["checkpoint"]["step"]
    spillway.until(lambda _: not workloads(spillway, namespace), namespace, "grows", SECONDS)
    queue(str(before * 3 // 4))
    spillway.change(namespace, "grows", {"suspend": False, "memory": {"budget": {"host": "512Mi"}}})
    # It needs more than the whole queue has; Kueue says so, and so does the job.
    waiting = spillway.until(quota_is("Waiting", "memory"), namespace, "grows", SECONDS)
    assert parse_quantity(waiting["status"]["plan"]["podMemory"]) > before * 3 // 4
    (workload,) = workloads(spillway, namespace)
    (pod_set,) = workload["spec"]["podSets"]
    asked = pod_set["template"]["spec"]["containers"][0]["resources"]["requests"]["memory"]
    (attempt,) = spillway.children("job", namespace, "grows")
    assert asked == attempt["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]["memory"]
    queue("4Gi")
    resumed = spillway.until(_went_on_from(saved), namespace, "grows", SECONDS)
    assert (resumed["status"]["attempts"]["total"], resumed["status"]["attempts"]["restarts"]) == (2, 0)


@pytest.mark.full
@pytest.mark.parametrize("how", ["deactivated", "drained"])
def test_an_evicted_job_ends_at_a_checkpoint_and_waits(
    spillway: Installed, namespace: str, queue: Callable[..., None], how: str
) -> None:
    queue("4Gi")
    spillway.bed.claim("kept", namespace)
    kept = {"checkpoint__claim": "kept", "checkpoint__everySteps": LONG}
    spillway.create(job("taken", namespace, training__steps=LONG, **kept))
    spillway.until(step, namespace, "taken", SECONDS)
    if how == "drained":
        queue("4Gi", stopPolicy="HoldAndDrain")
    else:
        (workload,) = workloads(spillway, namespace)
        name = f"workloads.kueue.x-k8s.io/{workload['metadata']['name']}"
        spillway.bed.kubectl("patch", name, "-n", namespace, "--type=merge", "-p", '{"spec": {"active": false}}')
    seen = spillway.until(lambda found: found["status"]["attempts"]["total"] == 2, namespace, "taken", SECONDS)
    attempts = seen["status"]["attempts"]
    assert (attempts["lastReason"], attempts["restarts"]) == ("Preempted", 0)
    assert seen["status"]["checkpoint"]["step"] > 0
    if how == "drained":  # the whole queue is stopped; a deactivated one gets a new Workload
        spillway.until(quota_is("Waiting", "is inactive"), namespace, "taken", SECONDS)
        queue("4Gi", stopPolicy="None")
    resumed = spillway.until(lambda found: found["status"]["state"] == "Running", namespace, "taken", SECONDS)
    assert resumed["status"]["attempts"]["total"] == 2


@pytest.mark.full
def test_the_plan_of_a_queued_job_holds_in_every_flavor_it_can_get(
    spillway: Installed, namespace: str, queue: Callable[..., None]
) -> None:
    """The queue chooses the flavor, and so the nodes, only after the plan was made. Therefore the Job names no host."""
    shared = spillway.bed.get("nodes", "-l", f"type=kwok,!{POOL}")["items"]  # without those that tests create
    nodes = [node["metadata"]["name"] for node in shared][:2]
    for flavor, node in zip(("one", "two"), nodes, strict=True):
        spillway.bed.kubectl("label", "node", node, f"spillway.test/flavor={namespace}-{flavor}")
    labels = {flavor: {"spillway.test/flavor": f"{namespace}-{flavor}"} for flavor in ("one", "two")}
    queue("4Gi", labels)
    made = on_fake_nodes(job("first", namespace))
    made["spec"]["scheduling"]["queueName"] = QUEUE
    spillway.create(made)
    queue(str(pod_memory(spillway, namespace, "first") * 3 // 2), labels)
    spillway.until(lambda _: bool(_nodes_of(spillway, namespace, "first")), namespace, "first", SECONDS)
    spillway.create(named(made, "second"))
    spillway.until(lambda _: bool(_nodes_of(spillway, namespace, "second")), namespace, "second", SECONDS)
    assert _nodes_of(spillway, namespace, "first") + _nodes_of(spillway, namespace, "second") == nodes
    for name in ("first", "second"):
        (attempt,) = spillway.children("job", namespace, name)
        required = attempt["spec"]["template"]["spec"].get("affinity", {}).get("nodeAffinity", {})
        assert "kubernetes.io/hostname" not in json.dumps(
            required.get("requiredDuringSchedulingIgnoredDuringExecution", {})
        )
    for node in nodes:
        spillway.bed.kubectl("label", "node", node, "spillway.test/flavor-")


def _nodes_of(spillway: Installed, namespace: str, name: str) -> list[str]:
    pods = spillway.children("pod", namespace, name)
    return [pod["spec"]["nodeName"] for pod in pods if pod["spec"].get("nodeName")]


def _went_on_from(saved: int) -> Callable[[Document], bool]:
    """A test of a job: all pods of the second attempt run, and it has made a step after the first one's checkpoint."""
    return lambda found: saved > 0 and found["status"]["state"] == "Running" and step(found) > saved


def _suspend(spillway: Installed, namespace: str, name: str, wanted: bool) -> None:
    spillway.change(namespace, name, {"suspend": wanted})
