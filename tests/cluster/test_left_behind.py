"""The number of objects that old attempts and models leave is limited, on the real API server."""

from __future__ import annotations

import json
import time

import pytest

from harness.installed import Document, Installed, changed, example, named, running_for_an_hour

pytestmark = pytest.mark.ci
SECONDS = 180.0
ATTEMPTS = 25
NUM_PROFILES = 200


def of(job: Document) -> list[Document]:
    metadata = job["metadata"]
    return [
        {
            "apiVersion": job["apiVersion"], "kind": job["kind"], "name": metadata["name"], "uid": metadata["uid"],
            "controller": True, "blockOwnerDeletion": False,
        }
    ]  # fmt: skip


def test_of_many_attempts_the_newest_contracts_are_kept(spillway: Installed, namespace: str) -> None:
    bed = spillway.bed
    job = running_for_an_hour(named(example("two-pod", namespace, checkpoint__claim=None, suspend=True), "often"))
    spillway.create(job)
    stored = spillway.until(lambda found: found["status"].get("state") == "Suspended", namespace, "often", SECONDS)
    children: list[Document] = []
    for number in range(1, ATTEMPTS + 1):
        labels = {
            "spillway.dev/job": "often", "spillway.dev/attempt": str(number),
            "spillway.dev/job-uid": stored["metadata"]["uid"], "app.kubernetes.io/managed-by": "spillway",
        }  # fmt: skip
        metadata = {"name": f"often-{number}", "namespace": namespace, "labels": labels, "ownerReferences": of(stored)}
        children.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {}})
        children.append({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"clusterIP": "None"}})
    bed.apply(*children)
    counts = json.dumps({"status": {"attempts": {"total": ATTEMPTS, "ended": ATTEMPTS}}})
    patch = ("patch", "trainingjobs.spillway.dev/often", "-n", namespace, "--type=merge", "--subresource=status")
    bed.kubectl(*patch, "-p", counts)
    spillway.change(namespace, "often", {"suspend": False})
    spillway.wait(namespace, "often", "Running", SECONDS)
    for plural in ("configmaps", "services"):
        names = {one["metadata"]["name"] for one in bed.get(plural, "-n", namespace)["items"]}
        assert {name for name in names if name.startswith("often-")} == {f"often-{n}" for n in range(6, ATTEMPTS + 2)}


def test_of_many_profiles_those_observed_last_are_kept(spillway: Installed, namespace: str) -> None:
    bed = spillway.bed
    profiles = [
        {
            "apiVersion": "spillway.dev/v1alpha1", "kind": "MemoryProfile",
            "metadata": {"name": f"old-{number:03}", "namespace": namespace}, "spec": {"fingerprint": f"{number:016x}"},
        }
        for number in range(NUM_PROFILES)
    ]  # fmt: skip
    bed.apply(*profiles)
    spillway.create(changed(example("one-pod", namespace), namespace, training__steps=12))
    spillway.wait(namespace, "one-pod", "Complete", SECONDS)
    deadline = time.monotonic() + SECONDS
    while True:
        names = {one["metadata"]["name"] for one in bed.get("memoryprofiles.spillway.dev", "-n", namespace)["items"]}
        if any(name.startswith("llama") for name in names):
            break
        assert time.monotonic() < deadline, "no profile of the job"
        time.sleep(0.5)
    assert len(names) == NUM_PROFILES
