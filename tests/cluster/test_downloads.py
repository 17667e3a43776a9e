"""Models and text that a cluster job fetches, from a real S3 server, through the kubelet's pods."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.installed import Document, Installed, example, named
from harness.s3_server import KEYS, S3Server
from harness.tiny_model import save_model
from testbed.layout import ADDRESS

pytestmark = pytest.mark.ci
SECONDS = 240.0
LARGE = "unused.safetensors.json"
"""A file that takes several requests and that no loader reads."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[S3Server]:
    save_model(tmp_path / "gpt2")
    with S3Server(ADDRESS) as server:
        files = {f"gpt2/{file.name}": file.read_bytes() for file in (tmp_path / "gpt2").iterdir()}
        text = " ".join(str(number) for number in range(20_000)).encode()
        server.put("models", {**files, f"gpt2/{LARGE}": b"0" * (40 << 20), "text/numbers.txt": text})
        yield server


def fetching(spillway: Installed, store: S3Server, namespace: str, name: str, **model: object) -> Document:
    spillway.bed.claim("shelf", namespace, ("ReadWriteMany",))
    keys = {**KEYS, "AWS_ENDPOINT_URL": store.url}
    spillway.bed.kubectl(
        "create", "secret", "generic", "keys", "-n", namespace, *(f"--from-literal={k}={v}" for k, v in keys.items())
    )
    source = {"claim": "shelf", "subPath": "gpt2", "fetch": {"uri": "s3://models/gpt2", "secretName": "keys"}}
    text = {"claim": "shelf", "subPath": "text", "fetch": {"uri": "s3://models/text", "secretName": "keys"}}
    training = {"steps": 6, "sequenceLength": 128, "globalBatchSize": 2, "microBatchSize": 1}
    memory = {"budget": {"device": "64Mi", "host": "128Mi", "nvme": "1Gi"}}
    job = example(
        "one-pod", namespace, model={"source": source, **model}, data={"text": text}, training=training, memory=memory,
        checkpoint={"everySteps": 3},
    )  # fmt: skip
    return named(job, name)


def test_a_model_and_its_text_are_fetched_through_a_kill_and_train(
    spillway: Installed, namespace: str, store: S3Server
) -> None:
    store.held = LARGE
    spillway.create(fetching(spillway, store, namespace, "fetched"))
    assert store.waits.wait(SECONDS), "the second part of the large file is asked for"
    said = spillway.condition(namespace, "fetched", "Planned")
    assert said["reason"] == "Inspecting" and "fetches s3://models/gpt2, s3://models/text" in said["message"]
    (pod,) = spillway.bed.get("pods", "-n", namespace)["items"]
    spillway.bed.kubectl("delete", "pod", pod["metadata"]["name"], "-n", namespace, "--grace-period=1", "--wait=true")
    store.released.set()
    status = spillway.wait(namespace, "fetched", "Complete", SECONDS)["status"]
    assert (status["attempts"]["total"], status["progress"]["step"]) == (1, 6)
    spans = [span for key, span in store.ranges if key.endswith(LARGE)]
    begins = [int(span.removeprefix("bytes=").partition("-")[0]) for span in spans]
    assert begins[0] == 0 and begins.count(0) == 1, f"what was there is not read again: {spans}"
    assert len([key for key, _ in store.ranges if key.endswith("numbers.txt")]) == 1


def test_denied_access_is_a_condition_until_the_secret_is_right(
    spillway: Installed, namespace: str, store: S3Server
) -> None:
    job = fetching(spillway, store, namespace, "denied")
    spillway.bed.kubectl("delete", "secret", "keys", "-n", namespace)
    wrong = {"AWS_ENDPOINT_URL": store.url, "AWS_EC2_METADATA_DISABLED": "true"}
    spillway.bed.kubectl(
        "create", "secret", "generic", "keys", "-n", namespace, *(f"--from-literal={k}={v}" for k, v in wrong.items())
    )
    spillway.create(job)
    spillway.until(
        lambda found: any(one.get("reason") == "InspectionFailed" for one in found["status"].get("conditions", [])),
        namespace, "denied", SECONDS,
    )  # fmt: skip
    said = spillway.condition(namespace, "denied", "Planned")["message"]
    assert "spec.model.source.fetch.uri = s3://models/gpt2: access denied" in said and "fetch.secretName" in said
    patch = {"stringData": KEYS}
    spillway.bed.kubectl("patch", "secret", "keys", "-n", namespace, "-p", json.dumps(patch))
    spillway.bed.kubectl("delete", "job", "denied-inspect", "-n", namespace)
    spillway.wait(namespace, "denied", "Complete", SECONDS)
