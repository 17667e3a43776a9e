"""Nodes as they occur: with pods of others, daemons, devices in use and faults, on nodes that KWOK simulates.

At depth all there are 100 nodes of 8 GPUs, half of them of each of two products; at lower depths there are fewer.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import Counter
from collections.abc import Iterator

import pytest

from harness.depth import at
from harness.fake_nodes import GPU, POOL, PRODUCTS, node, nodes_of
from harness.installed import KWOK_TOLERATION, Document, Installed, example, named, running_for_an_hour
from harness.patience import wait_until

pytestmark = pytest.mark.ci
NUM_NODES = at(4, 8, 100)
FRESH_SECONDS = 31.0
"""age at which the operator no longer uses a list of nodes and pods"""
SECONDS = at(60.0, 180.0, 600.0)


@pytest.fixture(scope="module")
def gpu_nodes(spillway: Installed) -> Iterator[dict[str, list[str]]]:
    """Product -> names of its nodes, which exist while the module's tests run."""
    names = {product: [f"{product}-{number:03d}" for number in range(NUM_NODES // 2)] for product in PRODUCTS}
    with_nodes = [node(name, "gpus", product) for product, found in names.items() for name in found]
    yield from nodes_of(spillway, with_nodes, names)


def foreign(namespace: str, node: str, gpus: int) -> Document:
    """Somebody else's pod, which is already assigned to its node."""
    container = {"name": "main", "image": "none", "resources": {"limits": {GPU: str(gpus)}}}
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"held-{node}", "namespace": namespace},
        "spec": {"nodeName": node, "containers": [container], "tolerations": [{"operator": "Exists"}],
                 "terminationGracePeriodSeconds": 0},
    }  # fmt: skip


def gpu_job(namespace: str, name: str, devices: int = 1) -> Document:
    job = example(
        "one-pod", namespace, checkpoint__claim=None, parallelism={"device": "Cuda", "devicesPerNode": devices},
        training__globalBatchSize=64, memory={"mode": "Auto"}, scheduling={"nodeSelector": {POOL: "gpus"}},
    )  # fmt: skip
    return running_for_an_hour(named(job, name))


def node_of(spillway: Installed, namespace: str, name: str) -> str:
    return str(spillway.children("pod", namespace, name)[-1]["spec"].get("nodeName", ""))


def is_running(job: Document) -> bool:
    return bool(job["status"].get("state") == "Running")


def until_planned_pod(spillway: Installed, namespace: str, name: str) -> Document:
    """Waits until the job has a pod and its plan is in the status, which is written after the attempt's Job; returns
    the job."""

    def is_there(job: Document) -> bool:
        return "plan" in job["status"] and bool(spillway.children("pod", namespace, name))

    return spillway.until(is_there, namespace, name, SECONDS)


def fresh() -> None:
    """Waits until the operator no longer uses its earlier lists."""
    time.sleep(FRESH_SECONDS)


@pytest.fixture
def others(spillway: Installed) -> Iterator[str]:
    """Somebody else's namespace, without Pod Security."""
    name = f"others-{uuid.uuid4().hex[:8]}"
    spillway.bed.kubectl("create", "namespace", name)
    yield name
    spillway.bed.kubectl("delete", "namespace", name, "--wait=false")


@pytest.mark.full
def test_a_job_planned_for_gpus_that_others_hold_moves_to_free_ones(
    spillway: Installed, namespace: str, others: str, gpu_nodes: dict[str, list[str]]
) -> None:
    """The operator lists nodes for the first job. Then others take the H100s, which the operator does not know yet."""
    fresh()
    spillway.create(running_for_an_hour(named(example("one-pod", namespace, checkpoint__claim=None), "lists")))
    spillway.until(lambda job: bool(job["status"].get("plan")), namespace, "lists")
    spillway.bed.apply(*(foreign(others, name, 8) for name in gpu_nodes["h100"]))
    spillway.create(gpu_job(namespace, "moves"))
    job = spillway.until(is_running, namespace, "moves", SECONDS + 90)
    assert node_of(spillway, namespace, "moves") in gpu_nodes["a100"]
    attempts = job["status"]["attempts"]
    assert (attempts["total"], attempts["restarts"], attempts["lastReason"]) == (2, 0, "Replanned")
    fresh()
    spillway.create(gpu_job(namespace, "knows"))
    job = spillway.until(is_running, namespace, "knows", SECONDS)
    assert job["status"]["attempts"]["total"] == 1
    assert "times as fast, but other pods use it" in job["status"]["plan"]["reason"]


@pytest.mark.full
def test_jobs_of_one_gpu_leave_whole_nodes(
    spillway: Installed, namespace: str, gpu_nodes: dict[str, list[str]]
) -> None:
    small, whole = 2 * NUM_NODES, NUM_NODES - 2 * NUM_NODES // 8
    fresh()
    for number in range(small):
        spillway.create(gpu_job(namespace, f"one-{number}"))
    wait_for(spillway, namespace, small)
    used = Counter(pod["spec"]["nodeName"] for pod in spillway.bed.get("pods", "-n", namespace)["items"])
    print("\n", used)
    assert len(used) <= small // 8 + 1, "as in the best packing, but one"
    for number in range(whole - 1):
        spillway.create(gpu_job(namespace, f"eight-{number}", 8))
    wait_for(spillway, namespace, small + whole - 1)


def wait_for(spillway: Installed, namespace: str, count: int) -> None:
    def states() -> Counter[str]:
        jobs = spillway.bed.get("trainingjobs.spillway.dev", "-n", namespace)["items"]
        return Counter(str(job.get("status", {}).get("state")) for job in jobs)

    wait_until(lambda: states()["Running"] == count, why=lambda: str(states()), seconds=SECONDS + 60, pause=0.5)


@pytest.mark.full
def test_a_faulty_device_costs_one_restart(
    spillway: Installed, namespace: str, gpu_nodes: dict[str, list[str]]
) -> None:
    spillway.create(gpu_job(namespace, "faulty"))
    spillway.until(is_running, namespace, "faulty", SECONDS)
    pod = spillway.children("pod", namespace, "faulty")[0]
    bad, message = pod["spec"]["nodeName"], {"v": 1, "reason": "DeviceFault", "exitCode": 78, "message": "ECC error"}
    ended = {"exitCode": 78, "reason": "Error", "message": json.dumps(message), "finishedAt": "2026-01-01T00:00:00Z"}
    status = {"phase": "Failed", "containerStatuses": [{
        "name": pod["spec"]["containers"][0]["name"], "image": "none", "imageID": "", "ready": False,
        "restartCount": 0, "state": {"terminated": ended},
    }]}  # fmt: skip
    spillway.bed.kubectl(
        "patch", "pod", pod["metadata"]["name"], "-n", namespace, "--subresource=status", "--type=merge", "-p",
        json.dumps({"status": status}),
    )  # fmt: skip
    job = spillway.until(
        lambda job: is_running(job) and job["status"]["attempts"]["total"] == 2, namespace, "faulty", SECONDS
    )
    assert node_of(spillway, namespace, "faulty") != bad
    assert job["status"]["attempts"]["restarts"] == 1
    assert [fault["node"] for fault in job["status"]["attempts"]["faultyNodes"]] == [bad]
    events = spillway.bed.kubectl("get", "events", "-n", namespace, "-o", "jsonpath={.items[*].reason}")
    assert "NodeAvoided" in events


@pytest.mark.full
def test_a_pod_fits_beside_the_daemons_of_its_node(spillway: Installed, namespace: str, others: str) -> None:
    """Regression: a pod once requested 99.6 % of its node."""
    small = node("small-000", "small", memory="24Gi", cpu="8")
    labels = {"app": "logging"}
    daemons = {
        "apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "logging", "namespace": others},
        "spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": {
            "nodeSelector": {POOL: "small"}, "tolerations": [{"operator": "Exists"}],
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "logging", "image": "none", "resources": {"requests": {"memory": "2Gi"}}}],
        }}},
    }  # fmt: skip
    for _ in nodes_of(spillway, [small], None):
        spillway.bed.apply(daemons)
        wait_until(lambda: bool(spillway.bed.get("pods", "-n", others)["items"]), why=lambda: "no daemon", pause=0.3)
        fresh()
        job = example(
            "one-pod", namespace, checkpoint__claim=None, parallelism__device="Cpu", spill={}, memory={"mode": "Auto"},
            training__globalBatchSize=4096, training__microBatchSize=4096, scheduling={"nodeSelector": {POOL: "small"}},
        )  # fmt: skip
        spillway.create(running_for_an_hour(named(job, "beside")))
        job = spillway.until(is_running, namespace, "beside", SECONDS)
        print("\n", job["status"]["plan"]["podMemory"], job["status"]["plan"]["summary"])
        assert job["status"]["attempts"]["total"] == 1


@pytest.fixture
def config(spillway: Installed) -> Iterator[None]:
    """An OperatorConfig with defaults for all jobs, and with a class of nodes that do not exist yet."""
    spec = {
        "jobDefaults": {
            "pod": {"env": [{"name": "INHERITED", "value": "yes"}]},
            "scheduling": {"tolerations": [KWOK_TOLERATION]},
        },
        "nodeClasses": [{"name": "new-pool", "node": "8xh100", "labels": {POOL: "new", "type": "kwok"}, "cpu": "96"}],
    }
    spillway.bed.apply({
        "apiVersion": "spillway.dev/v1alpha1", "kind": "OperatorConfig", "metadata": {"name": "default"}, "spec": spec,
    })  # fmt: skip
    yield
    spillway.bed.kubectl("delete", "operatorconfigs.spillway.dev", "default")


def test_a_job_shows_its_demand_before_there_is_a_node_and_runs_once_there_is(
    spillway: Installed, namespace: str, config: None
) -> None:
    job = running_for_an_hour(named(gpu_job(namespace, "first"), "first"))
    job["spec"]["scheduling"] = {"nodeSelector": {"type": "kwok", POOL: "new"}}
    spillway.create(job)
    status = until_planned_pod(spillway, namespace, "first")["status"]
    (pod,) = spillway.children("pod", namespace, "first")
    assert pod["status"]["phase"] == "Pending"
    container = pod["spec"]["containers"][0]
    assert container["resources"]["requests"][GPU] == "1"
    assert {"name": "INHERITED", "value": "yes"} in container["env"]
    required = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (term,) = required["nodeSelectorTerms"]
    assert {one["key"]: one["values"] for one in term["matchExpressions"]} == {POOL: ["new"], "type": ["kwok"]}
    assert status["plan"]["reason"] == (
        "no existing node can run the job; it is planned for a new new-pool, which does not exist yet"
    )
    assert status["inherited"] == ["pod.env", "scheduling.tolerations"]
    for _ in nodes_of(spillway, [node("new-000", "new", "h100", memory="2Ti")], None):
        spillway.until(is_running, namespace, "first", SECONDS)
        assert node_of(spillway, namespace, "first") == "new-000"


def test_a_model_that_fits_only_sharded_is_sharded_on_all_devices_of_a_node(
    spillway: Installed, namespace: str
) -> None:
    """The example, changed only in its nodes."""
    for claim in ("corpus", "checkpoints"):
        spillway.bed.claim(claim, namespace)
    scheduling = {"nodeSelector": {"type": "kwok", POOL: "large"}, "tolerations": [KWOK_TOLERATION]}
    for _ in nodes_of(spillway, [node("large-000", "large", "h100", memory="2Ti")], None):
        spillway.create(example("llama-70b", namespace, scheduling=scheduling))
        plan = until_planned_pod(spillway, namespace, "llama-70b")["status"]["plan"]
        (pod,) = spillway.children("pod", namespace, "llama-70b")
        print(f"\n{plan['summary']}")
        assert plan["device"] == "Cuda" and "strategy Fsdp: Ddp does not fit" in plan["summary"], plan
        assert pod["spec"]["containers"][0]["resources"]["requests"]["nvidia.com/gpu"] == "8"
