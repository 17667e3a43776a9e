"""spec.lifecycle on the real cluster: jobs that end by themselves, and what is left of them."""

from __future__ import annotations

import pytest

from harness.installed import LONG, Document, Installed, changed, example, named
from spillway.errors import ExitCode
from spillway.feedback.retries import DEADLINE_EXCEEDED, NO_PROGRESS, PENDING_DEADLINE_EXCEEDED

SECONDS = 180.0
"""limit for each wait"""
ACTIVE_SECONDS = 10
"""limit of an attempt's seconds, including those before its first step"""


def training(spillway: Installed, namespace: str, job: Document) -> Document:
    """Creates a job and waits until its status has a step; returns the job."""
    spillway.create(job)
    name = job["metadata"]["name"]
    return spillway.until(lambda found: found["status"].get("progress", {}).get("step", 0) > 0, namespace, name)


def test_an_active_deadline_ends_the_job_at_a_checkpoint(spillway: Installed, namespace: str) -> None:
    spillway.bed.claim("one-pod", namespace)
    kept = {"checkpoint__claim": "one-pod", "checkpoint__everySteps": LONG}
    job = example("one-pod", namespace, training__steps=LONG, **kept)
    limited = changed(job, namespace, lifecycle={"activeDeadlineSeconds": LONG})
    training(spillway, namespace, named(limited, "too-long"))  # however long a busy machine takes for the first step
    spillway.change(namespace, "too-long", {"lifecycle": {"activeDeadlineSeconds": ACTIVE_SECONDS}})
    ended = spillway.wait(namespace, "too-long", "Failed", SECONDS)
    failed = spillway.condition(namespace, "too-long", "Failed")
    assert failed["reason"] == DEADLINE_EXCEEDED, failed
    assert f"lifecycle.activeDeadlineSeconds = {ACTIVE_SECONDS} is exceeded" in failed["message"]
    attempts, checkpoint = ended["status"]["attempts"], ended["status"]["checkpoint"]
    assert attempts["total"] == 1 and attempts["restarts"] == 0 and attempts["activeSeconds"] >= ACTIVE_SECONDS
    # By everySteps, the next checkpoint is far away; this one was written because the attempt was asked to end.
    assert checkpoint["step"] >= ended["status"]["progress"]["step"] - 1 > 0
    spillway.until_gone("job", namespace, "too-long")


def test_a_pending_deadline_names_what_was_in_the_way(spillway: Installed, namespace: str) -> None:
    deadline = {"pendingDeadlineSeconds": 12}
    nowhere = example("one-pod", namespace, checkpoint__claim="nowhere", lifecycle=deadline)
    image = {"pod__image": "registry.invalid/none:1"}
    unknown = example("one-pod", namespace, checkpoint__claim=None, **image)
    spillway.create(named(nowhere, "no-claim"))
    spillway.create(named(unknown, "no-image"))
    spillway.until_reason(namespace, "no-image", "ContainerWaiting")  # however long the kubelet takes to try
    spillway.change(namespace, "no-image", {"lifecycle": deadline})
    for name, said in (("no-claim", "PersistentVolumeClaim nowhere"), ("no-image", "registry.invalid/none:1")):
        spillway.wait(namespace, name, "Failed", SECONDS)
        failed = spillway.condition(namespace, name, "Failed")
        assert failed["reason"] == PENDING_DEADLINE_EXCEEDED, failed
        assert said in failed["message"]
        spillway.until_gone("job", namespace, name)


def test_a_stopped_trainer_is_a_stall_and_counts_as_a_restart(spillway: Installed, namespace: str) -> None:
    job = example("one-pod", namespace, checkpoint__claim=None, training__steps=LONG)
    job = named(changed(job, namespace, lifecycle={"maxRestarts": 1}), "stopped")
    training(spillway, namespace, job)
    spillway.signal(namespace, "stopped", "SIGSTOP")
    spillway.change(namespace, "stopped", {"lifecycle": {"stallSeconds": 15}})  # a busy trainer may be silent, too
    spillway.until(
        lambda found: any(c["type"] == "Running" and c["reason"] == NO_PROGRESS for c in found["status"]["conditions"]),
        namespace, "stopped", SECONDS,
    )  # fmt: skip
    said = spillway.condition(namespace, "stopped", "Running")["message"]
    assert "no step after step" in said and "lifecycle.stallSeconds = 15" in said
    spillway.signal(namespace, "stopped", "SIGKILL")  # it cannot write a checkpoint: a grace period would be idle
    found = spillway.until(lambda job: job["status"]["attempts"]["total"] == 2, namespace, "stopped", SECONDS)
    attempts = found["status"]["attempts"]
    assert (attempts["lastReason"], attempts["restarts"], attempts["disruptions"]) == (NO_PROGRESS, 1, 0)


@pytest.mark.ci
def test_a_finished_job_is_deleted_with_its_children_in_its_time(spillway: Installed, namespace: str) -> None:
    job = example("one-pod", namespace, checkpoint__claim=None, lifecycle={"ttlSecondsAfterFinished": 20})
    spillway.create(named(changed(job, namespace, data={"text": {"path": "/nowhere"}}), "brief"))
    ended = spillway.wait(namespace, "brief", "Failed", SECONDS)
    assert spillway.condition(namespace, "brief", "Failed")["reason"] == ExitCode.USER_ERROR.reason
    assert ended["status"]["completionTime"]
    spillway.bed.kubectl(
        "wait", "--for=delete", "trainingjobs.spillway.dev/brief", "-n", namespace, f"--timeout={int(SECONDS)}s"
    )
    for kind in ("job", "configmap", "pod"):
        spillway.until_gone(kind, namespace, "brief")


@pytest.mark.ci
def test_a_deadline_takes_effect_on_an_attempt_that_runs(spillway: Installed, namespace: str) -> None:
    job = named(example("one-pod", namespace, checkpoint__claim=None, training__steps=LONG), "cut")
    training(spillway, namespace, job)
    pods = {pod["metadata"]["uid"] for pod in spillway.children("pod", namespace, "cut")}
    spillway.change(namespace, "cut", {"lifecycle": {"activeDeadlineSeconds": 100000, "maxRestarts": 9}})
    generation = spillway.job(namespace, "cut")["metadata"]["generation"]
    spillway.until(lambda found: found["status"]["observedGeneration"] == generation, namespace, "cut", SECONDS)
    assert {pod["metadata"]["uid"] for pod in spillway.children("pod", namespace, "cut")} == pods, "no restart"
    spillway.change(namespace, "cut", {"lifecycle": {"activeDeadlineSeconds": 1}})
    spillway.wait(namespace, "cut", "Failed", SECONDS)
    assert spillway.condition(namespace, "cut", "Failed")["reason"] == DEADLINE_EXCEEDED
