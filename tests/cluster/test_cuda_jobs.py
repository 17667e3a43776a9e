"""Jobs for GPUs with the test device plugin: the real scheduler and kubelet handle their pods, and some train on a fake
CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness import fake_cuda, sweep_runs
from harness.installed import Document, Installed, example, named
from spillway_trainer.checkpoints.manifest import CheckpointName
from spillway_trainer.checkpoints.sealed_json import unseal
from testbed.host_mount import PACKAGES

GPU = "nvidia.com/gpu"
STEPS, EVERY = 30, 5
SECONDS = 150.0
LLAMA = {
    "architecture": "llama", "hiddenSize": 64, "numLayers": 2, "numHeads": 4, "numKeyValueHeads": 2,
    "intermediateSize": 96, "vocabSize": 512,
}  # fmt: skip
SPILLED = {
    "budget": {"device": "256Mi", "host": "128Mi", "nvme": "512Mi"},
    "advanced": {"optimizer": {"placement": "Nvme"}, "activations": {"policy": "Recompute"}},
}  # fmt: skip
"""Recomputes activations, because kept ones would not fit: on the fake, attention is composed and saves more than
planned."""
RESIDENT = {"mode": "Disabled", "budget": {"host": "256Mi"}}


def small(
    namespace: str, device: str, memory: Document, environment: dict[str, str], **parallelism: object
) -> Document:
    """A small job that has the same bits on every device and with every memory setting."""
    job = example(
        "one-pod", namespace, model={"config": LLAMA}, training__sequenceLength=64, training__steps=STEPS,
        checkpoint={"claim": "gpu", "everySteps": EVERY, "keep": 2}, memory=memory,
        parallelism={"device": device, **parallelism},
        pod={"env": [{"name": name, "value": value} for name, value in environment.items()]},
    )  # fmt: skip
    return named(job, f"on-{device.lower()}")


@pytest.mark.ci
def test_an_auto_job_takes_a_gpu_resumes_and_has_the_bits_of_a_cpus(spillway: Installed, namespace: str) -> None:
    """Uses the fake CUDA device (fakes/cuda), whose library is on the claim."""
    folder = spillway.bed.claim("gpu", namespace)
    given = fake_cuda.copied(folder / "fake", Path("/checkpoints/fake"), PACKAGES)
    spillway.create(small(namespace, "Auto", SPILLED, given))
    spillway.until(lambda _: bool([*folder.glob("on-auto-*/step-*")]), namespace, "on-auto", SECONDS)
    resources = spillway.children("pod", namespace, "on-auto")[0]["spec"]["containers"][0]["resources"]
    assert resources["requests"][GPU] == resources["limits"][GPU] == "1"
    spillway.signal(namespace, "on-auto", "SIGKILL")
    spillway.create(small(namespace, "Cpu", RESIDENT, {"PYTHONPATH": given["PYTHONPATH"]}))
    on_gpu, on_cpu = (spillway.wait(namespace, name, "Complete", SECONDS)["status"] for name in ("on-auto", "on-cpu"))
    assert (on_gpu["plan"]["device"], on_cpu["plan"]["device"]) == ("Cuda", "Cpu")
    assert (on_gpu["attempts"]["total"], on_gpu["attempts"]["restarts"]) == (2, 1)
    (epoch,) = folder.rglob("epoch-2.json")
    resumed = CheckpointName.parse(unseal(epoch.read_bytes())["resumes_from"])
    assert resumed is not None and resumed.step >= EVERY
    assert on_gpu["progress"]["loss"] == on_cpu["progress"]["loss"]
    assert_same_weights(folder, "on-auto", "on-cpu")


def assert_same_weights(folder: Path, *names: str) -> None:
    found, then = (sweep_runs.final_tensors(next(folder.glob(f"{name}-*")), STEPS) for name in names)
    assert found.keys() == then.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor.view(torch.uint8), then[name].view(torch.uint8)), name


@pytest.mark.ci
def test_two_pods_with_a_gpu_each_shard_resume_and_have_the_bits_of_cpus(spillway: Installed, namespace: str) -> None:
    """Parameters and gradients pass between the pods by a fake NCCL."""
    folder = spillway.bed.claim("gpu", namespace)
    given = fake_cuda.copied(folder / "fake", Path("/checkpoints/fake"), PACKAGES) | {"NCCL_SOCKET_IFNAME": "eth0"}
    sharded = {"nodes": 2, "strategy": "Fsdp"}
    spillway.create(small(namespace, "Cuda", {"budget": {"host": "128Mi"}}, given, **sharded))
    spillway.until(lambda _: bool([*folder.glob("on-cuda-*/step-*")]), namespace, "on-cuda", SECONDS)
    spillway.signal(namespace, "on-cuda", "SIGKILL")
    on_gpus = spillway.wait(namespace, "on-cuda", "Complete", SECONDS)["status"]
    assert (on_gpus["plan"]["device"], on_gpus["attempts"]["restarts"]) == ("Cuda", 1)
    assert "strategy Fsdp" in on_gpus["plan"]["summary"]
    spillway.create(small(namespace, "Cpu", RESIDENT, {"PYTHONPATH": given["PYTHONPATH"]}, **sharded))
    spillway.wait(namespace, "on-cpu", "Complete", SECONDS)
    assert_same_weights(folder, "on-cuda", "on-cpu")


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
    spillway.until(lambda _: bool(spillway.children("pod", namespace, name)), namespace, name, SECONDS)
    pod = spillway.children("pod", namespace, name)[0]
    resources = pod["spec"]["containers"][0]["resources"]
    assert resources["requests"][GPU] == resources["limits"][GPU] == "1"
    admitted = spillway.until(
        lambda _: "startTime" in spillway.children("pod", namespace, name)[0]["status"]
        and spillway.children("pod", namespace, name)[0]["spec"].get("nodeName") == "node-0",
        namespace, name, SECONDS,
    )  # fmt: skip
    assert admitted
    # This image can only train on CPUs, and says so instead of training on another device.
    spillway.wait(namespace, name, "Failed", SECONDS)
    failed = spillway.condition(namespace, name, "Failed")
    assert failed["reason"] == "UserError", failed
    assert "Cuda" in failed["message"] or "CUDA" in failed["message"], failed


def test_job_pends_with_the_schedulers_reason_when_too_few_gpus_are_free(spillway: Installed, namespace: str) -> None:
    """Another pod holds three of the node's four devices."""
    spillway.bed.apply(holder(namespace, devices=3))
    spillway.bed.kubectl("wait", "--for=condition=Ready", "pod/holder", "-n", namespace, "--timeout=120s")
    job = example(
        "gpu", namespace, checkpoint__claim=None, data={"builtin": "PythonStdlib"}, scheduling={},
        training__globalBatchSize=12, training__microBatchSize=1,
        parallelism={"nodes": 1, "devicesPerNode": 3, "device": "Cuda"},
    )  # fmt: skip
    spillway.create(job)
    spillway.until(
        lambda _: spillway.condition(namespace, "gpu", "Scheduled").get("reason") == "Unschedulable",
        namespace, "gpu", SECONDS,
    )  # fmt: skip
    scheduled = spillway.condition(namespace, "gpu", "Scheduled")
    assert f"Insufficient {GPU}" in scheduled["message"], scheduled
    spillway.bed.kubectl("delete", "pod", "holder", "-n", namespace, "--grace-period=1")
    spillway.until(
        lambda _: spillway.condition(namespace, "gpu", "Scheduled").get("reason") != "Unschedulable",
        namespace, "gpu", SECONDS,
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
