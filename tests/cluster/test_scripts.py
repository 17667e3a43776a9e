"""spec.command: examples/script.yaml runs an unmodified Hugging Face Trainer, whose pod is deleted during the run."""

from __future__ import annotations

import json

import pytest

from harness.installed import Document, Installed, example, named
from testbed.layout import REPOSITORY

pytestmark = pytest.mark.ci
SECONDS = 900.0
STEPS = 1000
"""Enough to interrupt a fast machine after its first report; the callback reports at most every five seconds."""


def test_a_trainer_of_hugging_face_shows_its_steps_and_goes_on(spillway: Installed, namespace: str) -> None:
    folder = spillway.bed.claim("kept", namespace)
    code = REPOSITORY / "examples" / "huggingface_trainer.py"
    spillway.bed.kubectl("create", "configmap", "script", "-n", namespace, f"--from-file=train.py={code}")
    job = named(example("script", namespace, checkpoint__claim="kept"), "script")
    job["spec"]["command"][-1] = f"--steps={STEPS}"
    spillway.create(job)

    def reported(found: Document) -> bool:
        step = found["status"].get("progress", {}).get("step", 0)
        return 0 < step < STEPS and bool(list(folder.rglob("checkpoint-*")))

    running = spillway.until(reported, namespace, "script", SECONDS)
    progress = running["status"]["progress"]
    assert progress["steps"] == STEPS and progress["display"] == f"{100 * progress['step'] // STEPS}%"
    assert float(progress["loss"]) > 0
    row = spillway.bed.kubectl("get", "tjob", "script", "-n", namespace, "--no-headers").split()
    assert row[1] == "Running" and int(row[2]) >= progress["step"] and row[3].endswith("%"), row

    [pod] = spillway.children("pod", namespace, "script")
    spillway.bed.kubectl("delete", "pod", pod["metadata"]["name"], "-n", namespace, "--wait=false")
    done = spillway.wait(namespace, "script", "Complete", SECONDS)
    print(f"\n{spillway.condition(namespace, 'script', 'Complete')['message']}")
    assert [done["status"]["progress"][name] for name in ("step", "steps", "display")] == [STEPS, STEPS, "100%"]
    assert done["status"]["attempts"]["total"] == 2
    assert not done["status"]["attempts"].get("restarts")
    [state] = [file for file in folder.rglob("trainer_state.json") if file.parent.name == f"checkpoint-{STEPS}"]
    steps = [entry["step"] for entry in json.loads(state.read_text())["log_history"] if "loss" in entry]
    assert steps == list(range(1, STEPS + 1)), "a step was trained twice, or left out"

    assert done["status"]["plan"]["summary"].endswith(
        "a script, whose memory is not planned: 2.00 GiB of memory per pod"
    )
