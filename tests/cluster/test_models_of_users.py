"""Models whose sizes are not in the manifest, on the real kubelet: a pod finds the sizes, and the models train."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from harness.installed import Document, Installed, example, named
from harness.tiny_model import save_model
from testbed.client import POD_USER

pytestmark = pytest.mark.ci
SECONDS = 240.0


def save_for_pods(directory: Path) -> None:
    save_model(directory)
    for file in (directory, *directory.iterdir()):
        shutil.chown(file, POD_USER, POD_USER)


def of_a_directory(namespace: str, name: str, **model: object) -> Document:
    source = {"source": {"claim": "models", "subPath": "gpt2"}, **model}
    training = {"steps": 6, "sequenceLength": 128, "globalBatchSize": 2, "microBatchSize": 1}
    memory = {"budget": {"device": "64Mi", "host": "128Mi", "nvme": "1Gi"}}
    job = example("one-pod", namespace, model=source, training=training, memory=memory, checkpoint={"everySteps": 3})
    return named(job, name)


def test_a_directory_is_inspected_and_trained_whole_and_with_adapters(spillway: Installed, namespace: str) -> None:
    save_for_pods(spillway.bed.claim("models", namespace, ("ReadOnlyMany",)) / "gpt2")
    spillway.create(of_a_directory(namespace, "whole"))
    spillway.create(of_a_directory(namespace, "adapters", lora={"rank": 4}))
    for name in ("whole", "adapters"):
        status = spillway.wait(namespace, name, "Complete", SECONDS)["status"]
        print(f"\n{name}: {status['plan']['summary']}")
        assert (status["attempts"]["total"], status["progress"]["step"]) == (1, 6)
        (shape,) = [
            one for one in spillway.bed.get("configmaps", "-n", namespace)["items"]
            if one["metadata"]["name"] == f"{name}-model"
        ]  # fmt: skip
        assert shape["immutable"] is True and shape["metadata"]["ownerReferences"][0]["name"] == name


def test_a_directory_without_a_model_is_an_error_until_it_is_mended(spillway: Installed, namespace: str) -> None:
    folder = spillway.bed.claim("models", namespace, ("ReadOnlyMany",))
    spillway.create(of_a_directory(namespace, "late"))
    spillway.until_reason(namespace, "late", "InspectionFailed", SECONDS)
    said = spillway.condition(namespace, "late", "Planned")["message"]
    print(f"\n{said}")
    assert "gpt2" in said and f"kubectl delete job late-inspect -n {namespace}" in said
    assert spillway.bed.get("jobs", "-n", namespace)["items"][0]["metadata"]["name"] == "late-inspect"
    save_for_pods(folder / "gpt2")
    spillway.bed.kubectl("delete", "job", "late-inspect", "-n", namespace)
    spillway.wait(namespace, "late", "Complete", SECONDS)
