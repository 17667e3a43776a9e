"""Models and chats that pods of a cluster job fetch from a real S3 server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cases.chats import MARKED, VOCABULARY, conversations, model_directory, write_lines
from harness.installed import Document, Installed, example, named
from harness.s3_server import KEYS, S3Server
from testbed.layout import ADDRESS

pytestmark = pytest.mark.ci
SECONDS = 600.0
LARGE = "unused.safetensors.json"
"""A file that needs several requests, and that no loader reads."""
STEPS = {"whole": 1500, "adapters": 20, "denied": 6}
"""Job -> its steps. The first job is killed after its first report, which must not be its last."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[S3Server]:
    model = model_directory(tmp_path / "model", "chatml", MARKED["chatml"])
    torch.manual_seed(1)
    sizes = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48
    )
    LlamaForCausalLM(sizes).save_pretrained(model)
    chats = write_lines(tmp_path / "chats.jsonl", [{"messages": chat} for chat in conversations(200)])
    with S3Server(ADDRESS) as server:
        files = {f"model/{file.name}": file.read_bytes() for file in model.iterdir()}
        server.put("shelf", {**files, f"model/{LARGE}": b"0" * (40 << 20), "chats/chats.jsonl": chats.read_bytes()})
        yield server


def secret(spillway: Installed, namespace: str, values: dict[str, str]) -> None:
    literals = [f"--from-literal={name}={value}" for name, value in values.items()]
    spillway.bed.kubectl("create", "secret", "generic", "keys", "-n", namespace, *literals)


def fetching(namespace: str, name: str, **model: object) -> Document:
    def at(what: str) -> Document:
        return {"claim": "shelf", "subPath": what, "fetch": {"uri": f"s3://shelf/{what}", "secretName": "keys"}}

    training = {"steps": STEPS[name], "sequenceLength": 128, "globalBatchSize": 2, "microBatchSize": 1}
    memory = {"budget": {"device": "64Mi", "host": "128Mi", "nvme": "1Gi"}}
    job = example(
        "one-pod", namespace, model={"source": at("model"), **model}, data={"chat": at("chats")}, training=training,
        memory=memory, checkpoint={"everySteps": 50, "claim": "kept", "subPath": name},
    )  # fmt: skip
    return named(job, name)


def pods_of(spillway: Installed, namespace: str, name: str) -> list[str]:
    found = spillway.bed.get("pods", "-n", namespace)["items"]
    return [pod["metadata"]["name"] for pod in found if pod["metadata"]["name"].startswith(name)]


def test_fetched_models_learn_fetched_chats_through_kills_and_the_merged_one_generates(
    spillway: Installed, namespace: str, store: S3Server, tmp_path: Path
) -> None:
    shelf, kept = (spillway.bed.claim(name, namespace, ("ReadWriteMany",)) for name in ("shelf", "kept"))
    secret(spillway, namespace, {**KEYS, "AWS_ENDPOINT_URL": store.url})
    store.held = LARGE
    spillway.create(fetching(namespace, "whole"))
    assert store.waits.wait(SECONDS), "the second part of the large file is asked for"
    said = spillway.condition(namespace, "whole", "Planned")
    assert said["reason"] == "Inspecting" and "fetches s3://shelf/chats, s3://shelf/model" in said["message"]
    (pod,) = pods_of(spillway, namespace, "whole-inspect")
    spillway.bed.kubectl("delete", "pod", pod, "-n", namespace, "--grace-period=1")
    store.released.set()

    spillway.until(lambda job: job["status"].get("progress", {}).get("step", 0) > 0, namespace, "whole", SECONDS)
    for pod in pods_of(spillway, namespace, "whole-1"):
        spillway.bed.kubectl("delete", "pod", pod, "-n", namespace, "--grace-period=0", "--force")
    spillway.create(fetching(namespace, "adapters", lora={"rank": 4}))
    status = {name: spillway.wait(namespace, name, "Complete", SECONDS)["status"] for name in ("whole", "adapters")}
    assert {name: one["progress"]["step"] for name, one in status.items()} == {name: STEPS[name] for name in status}
    assert status["whole"]["attempts"]["total"] == 2, "it was killed once while it trained"

    spans = [span for key, span in store.ranges if key.endswith(LARGE)]
    begins = [int(span.removeprefix("bytes=").partition("-")[0]) for span in spans]
    assert begins[0] == 0 and begins.count(0) == 1, f"what was there is not read again: {spans}"
    assert len([key for key, _ in store.ranges if key.endswith("chats.jsonl")]) == 1, "the second job fetches nothing"

    spillway_ = [sys.executable, "-m", "spillway_cli", "ckpt", "export", str(kept / "adapters")]
    merged = [*spillway_, "--to", str(tmp_path / "merged"), "--merge", "--base", str(shelf / "model")]
    done = subprocess.run(merged, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "yes"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").generate(**asked, max_new_tokens=8)
    assert answer.shape[1] > asked["input_ids"].shape[1]


def test_denied_access_is_a_condition_until_the_secret_is_right(
    spillway: Installed, namespace: str, store: S3Server
) -> None:
    for name in ("shelf", "kept"):
        spillway.bed.claim(name, namespace, ("ReadWriteMany",))
    secret(spillway, namespace, {"AWS_ENDPOINT_URL": store.url, "AWS_EC2_METADATA_DISABLED": "true"})
    spillway.create(fetching(namespace, "denied"))
    spillway.until_reason(namespace, "denied", "InspectionFailed", SECONDS)
    said = spillway.condition(namespace, "denied", "Planned")["message"]
    assert "s3://shelf/chats: access denied" in said and "fetch.secretName" in said
    spillway.bed.kubectl("patch", "secret", "keys", "-n", namespace, "-p", json.dumps({"stringData": KEYS}))
    spillway.bed.kubectl("delete", "job", "denied-inspect", "-n", namespace)
    spillway.wait(namespace, "denied", "Complete", SECONDS)
