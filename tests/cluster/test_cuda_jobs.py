"""A job for GPUs against the test device plugin: what the real scheduler and kubelet make of its pods."""

from __future__ import annotations

from harness.installed import Document, Installed, example

GPU = "nvidia.com/gpu"


def test_a_cuda_job_requests_devices_and_the_kubelet_admits_it(spillway: Installed, namespace: str) -> None:
    job = example(
        "gpu",
        namespace,
        checkpoint__claim=None,
        data={"builtin": "PythonStdlib"},
        scheduling={},
        parallelism__devicesPerNode=1,
    )
    spillway.create(job)
    name = job["metadata"]["name"]
    spillway.until(lambda found: bool(found["status"].get("attempts", {}).get("total")), namespace, name)
    spillway.until(lambda _: bool(spillway.children("pod", namespace, name)), namespace, name, 20)
    pod = spillway.children("pod", namespace, name)[0]
    resources = pod["spec"]["containers"][0]["resources"]
    assert resources["requests"][GPU] == resources["limits"][GPU] == "1"
    admitted = spillway.until(
        lambda _: "startTime" in spillway.children("pod", namespace, name)[0]["status"]
        and spillway.children("pod", namespace, name)[0]["spec"].get("nodeName") == "node-0",
        namespace, name, 30,
    )  # fmt: skip
    assert admitted
    # This image trains on CPUs only: it says so instead of training on something else.
    spillway.wait(namespace, name, "Failed", 60)
    failed = spillway.condition(namespace, name, "Failed")
    assert failed["reason"] == "UserError", failed
    assert "Cuda" in failed["message"] or "CUDA" in failed["message"], failed


def test_job_pends_with_the_schedulers_reason_when_too_few_gpus_are_free(spillway: Installed, namespace: str) -> None:
    """Another pod holds three of the node's four devices."""
    spillway.bed.apply(holder(namespace, devices=3))
    spillway.bed.kubectl("wait", "--for=condition=Ready", "pod/holder", "-n", namespace, "--timeout=30s")
    job = example(
        "gpu", namespace, checkpoint__claim=None, data={"builtin": "PythonStdlib"}, scheduling={},
        training__globalBatchSize=12, training__microBatchSize=1,
        parallelism={"nodes": 1, "devicesPerNode": 3, "device": "Cuda"},
    )  # fmt: skip
    spillway.create(job)
    spillway.until(
        lambda _: spillway.condition(namespace, "gpu", "Scheduled").get("reason") == "Unschedulable",
        namespace, "gpu", 45,
    )  # fmt: skip
    scheduled = spillway.condition(namespace, "gpu", "Scheduled")
    assert f"Insufficient {GPU}" in scheduled["message"], scheduled
    spillway.bed.kubectl("delete", "pod", "holder", "-n", namespace, "--grace-period=1")
    spillway.until(
        lambda _: spillway.condition(namespace, "gpu", "Scheduled").get("reason") != "Unschedulable",
        namespace, "gpu", 60,
    )  # fmt: skip


def holder(namespace: str, devices: int) -> Document:
    hardened = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    count = {GPU: str(devices)}
    container = {
        "name": "holder", "image": "local/hostroot:1", "command": ["python", "-c", "import time; time.sleep(300)"],
        "workingDir": "/tmp", "securityContext": hardened, "resources": {"requests": count, "limits": count},
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }  # fmt: skip
    user = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "holder", "namespace": namespace},
        "spec": {
            "securityContext": user, "containers": [container], "terminationGracePeriodSeconds": 1,
            "volumes": [{"name": "tmp", "emptyDir": {}}],
        },
    }  # fmt: skip
