"""Attempts of a job with command: its pods, its progress by Hugging Face's callback, its end."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from cases.job_documents import REMOVED
from harness.observations import NOW, attempt, condition, job_object, observed
from spillway.api.progress import NamedValue, ProgressReport, TrainerStatus
from spillway.placement.cluster_view import ClusterView
from spillway_operator.decide.observed import Claim, ContainerEnding, Contract, Desired, Observed, PodObject
from spillway_operator.decide.reconcile import reconcile

SCRIPT: dict[str, Any] = {
    "spec.model": REMOVED, "spec.data": REMOVED, "spec.training": REMOVED,
    "spec.command": ["python", "/code/train.py", "--out", "$(SPILLWAY_CHECKPOINT_DIRECTORY)"],
    "spec.checkpoint": {"claim": "kept"},
    "spec.memory": {"budget": {"nvme": "1Gi"}},
    "spec.pod": {
        "resources": {"memory": "2Gi"},
        "mounts": [
            {"path": "/code", "configMap": "code"},
            {"path": "/data", "claim": "data", "subPath": "en", "writable": True},
            {"path": "/keys", "secret": "hub"},
        ],
    },
}  # fmt: skip
CLAIMS = tuple(Claim(name, exists=True, access_modes=("ReadWriteOnce",)) for name in ("data", "kept"))
UNSEEN = ClusterView()


def started(changes: dict[str, Any] | None = None) -> Desired:
    return reconcile(observed({**SCRIPT, **(changes or {})}, claims=CLAIMS), NOW)


def child(desired: Desired, kind: str) -> dict[str, Any]:
    return dict(next(made for made in desired.creates if made["kind"] == kind))


def contract_of(desired: Desired) -> Contract:
    data = child(desired, "ConfigMap")["data"]
    owner = child(desired, "ConfigMap")["metadata"]["ownerReferences"][0]["uid"]
    files = (data[name] for name in ("job.json", "plan.json", "decision.json", "attempt.json"))
    return Contract(1, "demo-1", owner, *files)


def seen(status: dict[str, Any], **more: Any) -> Observed:
    return replace(observed(SCRIPT, claims=CLAIMS, **more), job=job_object(SCRIPT, status))


def test_the_pod_runs_the_launcher_with_the_users_volumes() -> None:
    desired = started()
    pod = child(desired, "Job")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["command"] == ["python", "-m", "spillway_trainer.launch", "/etc/spillway"]
    assert container["resources"]["limits"] == {"memory": "2Gi", "ephemeral-storage": "3Gi"}
    assert "ports" not in container
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert {"/spill", "/checkpoints", "/code", "/data", "/keys", "/work", "/tmp"} <= set(mounts)
    assert mounts["/code"]["readOnly"] and mounts["/keys"]["readOnly"]
    assert mounts["/data"] == {"name": "mount-1", "mountPath": "/data", "subPath": "en"}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["mount-0"]["configMap"] == {"name": "code"}
    assert volumes["mount-1"]["persistentVolumeClaim"] == {"claimName": "data"}
    assert volumes["mount-2"]["secret"] == {"secretName": "hub"}
    job = json.loads(child(desired, "ConfigMap")["data"]["job.json"])
    assert job["spec"]["command"][-1] == "$(SPILLWAY_CHECKPOINT_DIRECTORY)"
    assert job["checkpoint_directory"].startswith("/checkpoints/demo-")
    assert condition(desired, "Planned")["status"] == "True"


def test_the_same_attempt_is_decided_again_after_a_crash() -> None:
    first = started()
    again = reconcile(observed(SCRIPT, claims=CLAIMS, contracts=(contract_of(first),)), NOW)
    assert again.creates == first.creates


def test_a_claim_that_is_missing_is_named() -> None:
    waits = reconcile(observed(SCRIPT, claims=(Claim("data", exists=False), CLAIMS[1])), NOW)
    assert condition(waits, "Planned")["reason"] == "ClaimNotFound"
    assert (
        "spec.pod.mounts[1].claim = data: PersistentVolumeClaim data not found"
        in condition(waits, "Planned")["message"]
    )
    read_only = reconcile(observed(SCRIPT, claims=(Claim("data", True, ("ReadOnlyMany",)), CLAIMS[1])), NOW)
    assert condition(read_only, "Planned")["reason"] == "ClaimNotWritable"


def test_what_runs_cannot_become_another_script() -> None:
    before = started()
    other = observed(
        {**SCRIPT, "spec.command": ["bash"]}, before.status, claims=CLAIMS, contracts=(contract_of(before),)
    )
    assert "spec.command" in condition(reconcile(other, NOW), "Accepted")["message"]


def report(percent: int, **metrics: object) -> ProgressReport:
    named = tuple(NamedValue(name=name, value=str(value)) for name, value in metrics.items())
    return ProgressReport(trainer_status=TrainerStatus(progress_percentage=percent, metrics=named))


def after(status: dict[str, Any], told: ProgressReport) -> dict[str, Any]:
    found = seen(status, attempts=(attempt(active=1, ready=1),), progress=told, progress_time=NOW)
    desired = reconcile(found, NOW)
    assert desired.status is not None
    return desired.status


def test_progress_by_hugging_faces_callback() -> None:
    status = started().status
    assert status is not None
    status = after(status, report(0, total_steps=40))
    assert (status["progress"]["step"], status["progress"]["steps"]) == (0, 40)
    status = after(status, report(27, current_step=11, total_steps=40, loss=3.2500001, grad_norm=0.5))
    assert [status["progress"][name] for name in ("step", "steps", "display", "loss")] == [11, 40, "27%", "3.25"]
    status = after(status, report(100, train_loss=3.0))  # what the callback says last: no steps
    assert [status["progress"][name] for name in ("step", "steps", "display")] == [40, 40, "100%"]
    done = reconcile(seen(status, attempts=(attempt(outcome="Complete", succeeded=1),)), NOW)
    assert condition(done, "Complete")["message"] == "40 steps in 1 attempt"


def test_a_script_that_reports_nothing_completes() -> None:
    done = reconcile(seen(started().status or {}, attempts=(attempt(outcome="Complete", succeeded=1),)), NOW)
    assert condition(done, "Complete")["message"] == "the script ended in 1 attempt"


@pytest.mark.parametrize(
    ("code", "reason", "ends", "words"),
    [
        (137, "OOMKilled", "OOMKilled", "memory limit (exit code 137); raise spec.pod.resources.memory"),
        (64, "Error", "UserError", "exit"),
        (1, "Error", None, "ValueError: no such column"),
    ],
)
def test_how_a_script_fails(code: int, reason: str, ends: str | None, words: str) -> None:
    began = started()
    said = {"v": 1, "reason": "UserError" if code == 64 else "RankCrashed", "exitCode": code, "rank": 0,
            "message": f"rank 0 exited with code {code}; last log line: ValueError: no such column"}  # fmt: skip
    ending = ContainerEnding(code, reason, json.dumps(said), NOW, NOW)
    pod = PodObject("demo-1-0", "u", 0, "node", "Failed", ending=ending)
    found = seen(
        began.status or {},
        attempts=(attempt(outcome="Failed", failed=1),),
        pods=(pod,),
        contracts=(contract_of(began),),
    )
    desired = reconcile(found, NOW)
    if ends is None:
        assert condition(desired, "Running")["reason"] in ("Restarting", "Starting")
        assert words in condition(desired, "Running")["message"]
    else:
        assert condition(desired, "Failed")["reason"] == ends
        assert words in condition(desired, "Failed")["message"]
