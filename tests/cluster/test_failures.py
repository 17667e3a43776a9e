"""Every way an attempt can end: condition, reason and sentence, and whether another attempt follows.

Endings that can really be caused (kill -9, the kernel's out-of-memory killer, a wrong path, deletion) are those of real
pods on the real kubelet. The other exit codes come from KWOK's fake pods, with the message that the trainer would
leave.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from harness.chart_queries import alert_query, panel_query
from harness.fake_nodes import nodes_of, on_reserved, reserved
from harness.installed import FILL, LONG, TRAINERS, Document, Installed, changed, example, named
from spillway.errors import RANK_CRASHED, ExitCode, reason_of
from spillway.feedback.ladder import MOST_MEMORY_TRIES
from spillway.feedback.retries import OOM_KILLED, POD_DELETED, Retry, retry_of
from spillway.metrics import OPERATOR_ATTEMPTS_ENDED
from spillway_trainer.checkpoints.manifest import CheckpointName
from spillway_trainer.checkpoints.sealed_json import unseal
from testbed.errors import Failed

FAIL = "pod-container-running-failed.stage.kwok.x-k8s.io"


@pytest.fixture(autouse=True, scope="module")
def _nodes(spillway: Installed) -> Iterator[None]:
    """Separate nodes for these tests, because other tests' jobs would avoid nodes on which so many attempts failed."""
    yield from nodes_of(spillway, [reserved(f"failing-{number:03d}", "failing") for number in range(8)], None)


def fake_failure(namespace: str, name: str, code: int, message: str, reason: str = "Error") -> Document:
    """A job whose fake pod runs for up to a second, and ends with this code, message and reason."""
    annotations = {
        f"{FAIL}/exit-code": str(code), f"{FAIL}/reason": reason, f"{FAIL}/message": f"'{message}'",
        f"{FAIL}/delay": "500ms", f"{FAIL}/jitter-delay": "500ms",
    }  # fmt: skip
    job = example("one-pod", namespace, checkpoint__claim=None, lifecycle={"maxRestarts": 1})
    job["spec"]["pod"] = job["spec"].get("pod", {}) | {"labels": {FAIL: "true"}, "annotations": annotations}
    return on_reserved(named(job, name), "failing")


def left_by_the_trainer(code: int) -> str:
    said = {"v": 1, "reason": reason_of(code), "exitCode": code, "rank": 0, "step": 7, "message": f"sentence of {code}"}
    return json.dumps(said)


ENDINGS = [
    ExitCode.USER_ERROR, ExitCode.DEVICE_OUT_OF_MEMORY, ExitCode.NON_FINITE, ExitCode.SPILL_VOLUME_FULL,
    ExitCode.SPILL_IO_ERROR, ExitCode.CHECKPOINT_CORRUPT, ExitCode.PREEMPTED, ExitCode.HOST_OUT_OF_MEMORY, 1, 139,
]  # fmt: skip


def test_each_exit_code_has_its_reason_and_its_retry(spillway: Installed, namespace: str) -> None:
    """There is one fake job per code, with maxRestarts 1, so that counted failures end the job after the second
    attempt."""
    for number, code in enumerate(ENDINGS):
        job = fake_failure(namespace, f"ends-{int(code)}", int(code), left_by_the_trainer(int(code)))
        job["spec"]["training"]["sequenceLength"] = 64 + number  # else jobs would learn from each other's memory errors
        spillway.create(job)
    for code in ENDINGS:
        name, reason = f"ends-{int(code)}", reason_of(int(code))
        retry = retry_of(reason)
        if retry is Retry.FREE:
            job = spillway.until(lambda job: job["status"].get("attempts", {}).get("total", 0) >= 3, namespace, name)
            assert job["status"]["attempts"]["restarts"] == 0, "a disruption is not counted"
            continue
        job = spillway.wait(namespace, name, "Failed")
        failed = spillway.condition(namespace, name, "Failed")
        assert failed["reason"] == reason
        assert f"sentence of {int(code)}" in failed["message"] or reason == RANK_CRASHED, failed
        attempts = job["status"]["attempts"]
        if retry is Retry.REPLANNED:
            assert attempts.get("restarts", 0) == 0, "the ladder has tries of its own"
            assert 1 < attempts["total"] <= 1 + MOST_MEMORY_TRIES
            assert [one["attempt"] for one in job["status"]["escalations"]] == [*range(1, attempts["total"] + 1)]
            continue
        assert (attempts["total"], attempts.get("restarts", 0)) == ((2, 1) if retry is Retry.COUNTED else (1, 0))


def test_prometheus_counts_each_end_by_its_reason_and_the_alert_names_the_jobs(
    spillway: Installed, namespace: str
) -> None:
    codes = (1, int(ExitCode.USER_ERROR))
    for code in codes:
        spillway.create(fake_failure(namespace, f"counts-{code}", code, left_by_the_trainer(code)))
    for code in codes:
        spillway.wait(namespace, f"counts-{code}", "Failed")
    ends = f'{OPERATOR_ATTEMPTS_ENDED.name}{{namespace="{namespace}",reason='
    spillway.until_measured({ends + f'"{RANK_CRASHED}"}}': 2.0, ends + f'"{ExitCode.USER_ERROR.reason}"}}': 1.0})
    failed = spillway.bed.query(alert_query("SpillwayJobFailed"))
    named = {one.labels["training_job"]: one.labels["reason"] for one in failed if one.labels["namespace"] == namespace}
    assert named == {f"counts-{code}": reason_of(code) for code in codes}
    rows = spillway.bed.query(panel_query("fleet", "Why, and for how long", namespace))
    assert {(row.labels["training_job"], row.labels["condition"]) for row in rows} == {
        (f"counts-{code}", "Failed") for code in codes
    }


def test_a_hostile_termination_message_is_bounded_and_changes_no_reason(spillway: Installed, namespace: str) -> None:
    lie = json.dumps({"v": 1, "reason": "Completed", "exitCode": 0, "message": "\u001b[31m" + "x" * 900})
    spillway.create(fake_failure(namespace, "lies", 70, lie))
    spillway.wait(namespace, "lies", "Failed")
    failed = spillway.condition(namespace, "lies", "Failed")
    assert failed["reason"] != "Completed"
    assert len(failed["message"]) <= 2048
    assert "\u001b" not in failed["message"]


def running(spillway: Installed, namespace: str, job: Document) -> str:
    """Creates a job and waits until it trains; returns the name of its first attempt's pod."""
    spillway.create(job)
    name = job["metadata"]["name"]
    spillway.until(lambda found: found["status"].get("progress", {}).get("step", 0) > 0, namespace, name)
    pod: str = spillway.children("pod", namespace, name)[0]["metadata"]["name"]
    return pod


def restarted(spillway: Installed, namespace: str, name: str) -> Document:
    return spillway.until(lambda job: job["status"].get("attempts", {}).get("total") == 2, namespace, name)


def test_a_wrong_path_fails_at_once_with_the_trainers_sentence(spillway: Installed, namespace: str) -> None:
    job = changed(example("one-pod", namespace, checkpoint__claim=None), namespace, data={"text": {"path": "/nowhere"}})
    spillway.create(job)
    name = job["metadata"]["name"]
    spillway.wait(namespace, name, "Failed")
    failed = spillway.condition(namespace, name, "Failed")
    assert failed["reason"] == ExitCode.USER_ERROR.reason
    assert "/nowhere" in failed["message"]


def test_out_of_memory_in_a_rank_alone_is_named_and_gets_a_larger_pod(spillway: Installed, namespace: str) -> None:
    """Process 1, the launcher, survives and ends the pod with the rank's exit code."""
    job = named(example("one-pod", namespace, checkpoint__claim=None, training__steps=LONG), "filled")
    pod = running(spillway, namespace, job)
    # The kernel may kill the other processes before the rank; then the memory is filled again.
    while spillway.job(namespace, "filled")["status"]["attempts"]["total"] == 1:
        with suppress(Failed):  # the other processes end with their container
            spillway.bed.kubectl("exec", pod, "-n", namespace, "--", "python", "-c", FILL)
    job = restarted(spillway, namespace, "filled")
    (one,) = job["status"]["escalations"]
    assert (one["attempt"], one["reason"]) == (1, OOM_KILLED)
    assert "more than its plan needs" in one["change"]
    spillway.until_measured(
        {panel_query("job", "Out of memory: next attempt with another plan", namespace, "filled"): 1.0}
    )
    assert job["status"]["attempts"].get("restarts", 0) == 0


def test_out_of_memory_of_process_1_is_named(spillway: Installed, namespace: str) -> None:
    """KWOK's pod shows what the kubelet reports if the whole container was killed and could leave no message."""
    spillway.create(fake_failure(namespace, "killed", 137, "", OOM_KILLED))
    spillway.wait(namespace, "killed", "Failed")
    assert spillway.condition(namespace, "killed", "Failed")["reason"] == OOM_KILLED


def test_a_killed_rank_restarts_all_from_the_checkpoint(spillway: Installed, namespace: str) -> None:
    folder = spillway.bed.claim("two-pod", namespace)
    job = example("two-pod", namespace, training__steps=LONG)
    name = job["metadata"]["name"]
    spillway.create(job)
    spillway.until(lambda found: found["status"].get("checkpoint", {}).get("step", 0) >= 10, namespace, name)
    pods = spillway.children("pod", namespace, name)
    second = next(pod["metadata"]["name"] for pod in pods if "-1-1-" in pod["metadata"]["name"])
    kill = TRAINERS.format(signal="SIGKILL")
    spillway.bed.kubectl("exec", second, "-n", namespace, "--", "python", "-c", kill)
    job = restarted(spillway, namespace, name)
    assert job["status"]["attempts"]["lastReason"] == RANK_CRASHED
    assert job["status"]["attempts"]["restarts"] == 1
    saved = job["status"]["checkpoint"]["step"]
    spillway.until(lambda _: any(folder.rglob("epoch-2.json")), namespace, name)
    (epoch,) = folder.rglob("epoch-2.json")
    resumes_from = CheckpointName.parse(unseal(epoch.read_bytes())["resumes_from"])
    assert resumes_from is not None and resumes_from.epoch == 1 and resumes_from.step >= saved
    spillway.until_measured({panel_query("job", "Attempt ended early", namespace, name): 1.0})


def test_a_deleted_pod_is_a_disruption_and_costs_no_restart(spillway: Installed, namespace: str) -> None:
    job = named(example("one-pod", namespace, checkpoint__claim=None, training__steps=LONG), "deleted")
    pod = running(spillway, namespace, job)
    spillway.bed.kubectl("delete", "pod", pod, "-n", namespace, "--wait=false")
    found = restarted(spillway, namespace, "deleted")
    assert found["status"]["attempts"]["restarts"] == 0
    assert found["status"]["attempts"]["lastReason"] in (POD_DELETED, ExitCode.PREEMPTED.reason)


def test_suspend_ends_the_attempt_at_a_checkpoint_and_resume_goes_on(spillway: Installed, namespace: str) -> None:
    spillway.bed.claim("one-pod", namespace)
    job = named(example("one-pod", namespace, training__steps=LONG, checkpoint__claim="one-pod"), "pauses")
    running(spillway, namespace, job)
    spillway.change(namespace, "pauses", {"suspend": True})
    suspended = spillway.wait(namespace, "pauses", "Suspended")
    spillway.until_gone("job", namespace, "pauses")
    time.sleep(1)
    assert spillway.children("job", namespace, "pauses") == []
    spillway.change(namespace, "pauses", {"suspend": False})
    before = suspended["status"]["progress"]["step"]
    resumed = spillway.until(
        lambda found: found["status"]["attempts"]["total"] == 2
        and found["status"].get("progress", {}).get("step", 0) > before,
        namespace, "pauses",
    )  # fmt: skip
    assert resumed["status"]["attempts"]["restarts"] == 0
