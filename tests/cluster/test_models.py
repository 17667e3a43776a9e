"""Models that need more than a plain llama, in real pods: gpt2 of `transformers` with adapters, planned by arithmetic
because the operator has no torch, and a model of four times the device's size, whose parameters pass through a slot."""

from __future__ import annotations

import pytest

from harness.installed import Document, Installed, example

SECONDS = 150.0


def on_cpu(name: str, namespace: str, **changes: object) -> Document:
    """A shortened example on the CPU, because `device: Auto` would choose the bed's GPUs, which cannot compute."""
    short = {"training__schedule": None, "data__evaluation": None, "parallelism__device": "Cpu"}
    return example(name, namespace, **short, **changes)


def test_adapters_are_trained_within_what_the_operator_planned(spillway: Installed, namespace: str) -> None:
    job = on_cpu("lora", namespace, training__steps=6)
    spillway.create(job)
    done = spillway.wait(namespace, job["metadata"]["name"], "Complete", SECONDS)
    assert done["status"]["attempts"]["total"] == 1
    planned, peak = done["status"]["plan"]["bytes"], done["status"]["memory"]["peak"]
    assert 0 < int(peak["device"]) <= int(planned["device"])


@pytest.mark.ci
def test_a_model_of_four_devices_is_streamed(spillway: Installed, namespace: str) -> None:
    job = on_cpu("larger-than-device", namespace, training__steps=4)
    spillway.create(job)
    done = spillway.wait(namespace, job["metadata"]["name"], "Complete", SECONDS)
    assert "streamed" in done["status"]["plan"]["summary"]
    assert done["status"]["attempts"]["total"] == 1
