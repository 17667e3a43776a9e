"""Children that somebody deletes, edits or forges, and ends of a job: deletion, a namesake, loss of the namespace.

Nodes are fake (KWOK), because only the API server, its controllers and the operator are tested.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

from harness.installed import (
    KWOK_TOLERATION,
    RELEASE,
    SYSTEM_NAMESPACE,
    Document,
    Installed,
    example,
    named,
    on_fake_nodes,
)
from spillway.feedback.retries import JOB_DELETED

SECONDS = 120.0
KINDS = ("jobs", "configmaps", "services", "pods", "persistentvolumeclaims")
ALL_OURS = "app.kubernetes.io/managed-by=spillway"
STEADY = {f"pod-complete.stage.kwok.x-k8s.io/{part}": "1h" for part in ("delay", "jitter-delay")}
"""annotations with which fake pods outlast the test"""


def steady(namespace: str, name: str, pods: int = 1) -> Document:
    job = example("two-pod" if pods == 2 else "one-pod", namespace, checkpoint__claim=None)
    job["spec"]["pod"] = job["spec"].get("pod", {}) | {"annotations": STEADY}
    return on_fake_nodes(named(job, name))


def running(spillway: Installed, job: Document) -> Document:
    spillway.create(job)
    return until_running(spillway, job["metadata"]["namespace"], job["metadata"]["name"])


def until_running(spillway: Installed, namespace: str, name: str, attempt: int = 1) -> Document:
    def holds(found: Document) -> bool:
        status = found["status"]
        return status.get("state") == "Running" and status["attempts"]["total"] == attempt

    return spillway.until(holds, namespace, name, SECONDS)


def uids(spillway: Installed, kind: str, namespace: str, name: str) -> list[str]:
    return sorted(found["metadata"]["uid"] for found in spillway.children(kind, namespace, name))


def left(spillway: Installed, namespace: str) -> list[str]:
    """The objects that the operator made and the pods that its Jobs made, as far as they still exist."""
    found = [item for kind in KINDS for item in spillway.bed.get(kind, "-n", namespace, "-l", ALL_OURS)["items"]]
    return [f"{item['kind']} {item['metadata']['name']}" for item in found]


def eventually_true(what: str, holds: Callable[[], bool], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.5)


def patch(spillway: Installed, kind: str, name: str, namespace: str, change: Document, *more: str) -> None:
    spillway.bed.kubectl("patch", kind, name, "-n", namespace, "--type=merge", "-p", json.dumps(change), *more)


def delete(spillway: Installed, kind: str, name: str, namespace: str, *more: str) -> None:
    spillway.bed.kubectl("delete", kind, name, "-n", namespace, "--wait=false", *more)


# --- deleted by hand --------------------------------------------------------------------------------------------------


def test_a_running_attempt_outlives_its_config_map_and_service(spillway: Installed, namespace: str) -> None:
    running(spillway, steady(namespace, "bare", pods=2))
    pods = uids(spillway, "pods", namespace, "bare")
    delete(spillway, "configmap", "bare-1", namespace)
    delete(spillway, "service", "bare-1", namespace)
    time.sleep(3)
    found = until_running(spillway, namespace, "bare")
    assert uids(spillway, "pods", namespace, "bare") == pods
    assert found["status"]["attempts"].get("restarts", 0) == 0
    delete(spillway, "job", "bare-1", namespace)
    until_running(spillway, namespace, "bare", attempt=2)
    assert {kind: len(spillway.children(kind, namespace, "bare")) for kind in ("configmaps", "services")} == {
        "configmaps": 1, "services": 1,
    }  # fmt: skip


def test_a_deleted_job_ends_its_attempt_and_says_so(spillway: Installed, namespace: str) -> None:
    running(spillway, steady(namespace, "gone"))
    delete(spillway, "job", "gone-1", namespace)
    found = until_running(spillway, namespace, "gone", attempt=2)
    assert found["status"]["attempts"]["lastReason"] == JOB_DELETED
    assert [job["metadata"]["name"] for job in spillway.children("jobs", namespace, "gone")] == ["gone-2"]


# --- edited by hand ---------------------------------------------------------------------------------------------------


def test_a_job_without_our_labels_is_no_reason_for_a_second_attempt(spillway: Installed, namespace: str) -> None:
    running(spillway, steady(namespace, "nameless"))
    spillway.bed.kubectl(
        "label", "job", "nameless-1", "-n", namespace, "spillway.dev/job-", "spillway.dev/attempt-",
        "app.kubernetes.io/managed-by-",
    )  # fmt: skip
    time.sleep(5)
    jobs = spillway.bed.get("jobs", "-n", namespace)["items"]
    assert [job["metadata"]["name"] for job in jobs] == ["nameless-1"]
    assert spillway.job(namespace, "nameless")["status"]["attempts"]["total"] == 1


def test_a_job_that_somebody_suspends_or_empties_is_not_left_so(spillway: Installed, namespace: str) -> None:
    """After a suspension, the epoch is used up and the next attempt follows. The status says if there is no
    parallelism."""
    running(spillway, steady(namespace, "stopped"))
    running(spillway, steady(namespace, "empty"))
    patch(spillway, "job", "stopped-1", namespace, {"spec": {"suspend": True}})
    patch(spillway, "job", "empty-1", namespace, {"spec": {"parallelism": 0}})
    until_running(spillway, namespace, "stopped", attempt=2)
    eventually_true(
        "no pods is said", lambda: spillway.condition(namespace, "empty", "Scheduled").get("reason") == "NoPods"
    )
    assert "empty-1" in spillway.condition(namespace, "empty", "Scheduled")["message"]
    patch(spillway, "job", "empty-1", namespace, {"spec": {"parallelism": 1}})
    until_running(spillway, namespace, "empty")


# --- forged -----------------------------------------------------------------------------------------------------------


def test_foreign_children_are_left_alone_and_the_job_starts_once_they_go(spillway: Installed, namespace: str) -> None:
    foreign = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "taken-1", "namespace": namespace}}
    spillway.bed.apply(foreign)
    image = {"containers": [{"name": "a", "image": "a"}], "restartPolicy": "Never", "tolerations": [KWOK_TOLERATION]}
    job = {"template": {"spec": image}, "suspend": True}
    metadata = {"name": "used-1", "namespace": namespace, "labels": {"spillway.dev/job": "used"}}
    spillway.bed.apply({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job})
    for name in ("taken", "used"):
        spillway.create(steady(namespace, name))
    for kind, name in (("ConfigMap", "taken"), ("Job", "used")):
        eventually_true(
            f"{kind} {name}-1 is in the way",
            lambda name=name: spillway.condition(namespace, name, "Accepted").get("reason") == "NameConflict",
        )
        assert f"{kind} {name}-1" in spillway.condition(namespace, name, "Accepted")["message"]
    assert spillway.bed.get("configmap", "taken-1", "-n", namespace)["metadata"].get("ownerReferences") is None
    delete(spillway, "configmap", "taken-1", namespace)
    delete(spillway, "job", "used-1", namespace)
    for name in ("taken", "used"):
        until_running(spillway, namespace, name)


def test_a_contract_that_a_stranger_replaced_is_never_carried_out(spillway: Installed, namespace: str) -> None:
    running(spillway, steady(namespace, "replaced"))
    contract = spillway.bed.get("configmap", "replaced-1", "-n", namespace)
    delete(spillway, "configmap", "replaced-1", namespace)
    eventually_true("deleted", lambda: spillway.children("configmaps", namespace, "replaced") == [])
    forged = {**contract, "metadata": {key: contract["metadata"][key] for key in ("name", "namespace", "labels")}}
    forged["metadata"]["ownerReferences"] = contract["metadata"]["ownerReferences"]
    forged["metadata"]["name"] = "replaced-2"
    forged["metadata"]["labels"]["spillway.dev/attempt"] = "2"
    forged["data"] = {name: text.replace("local/hostroot:1", "evil:1") for name, text in contract["data"].items()}
    spillway.bed.apply(forged)
    delete(spillway, "job", "replaced-1", namespace)
    found = spillway.until(
        lambda job: job["status"]["attempts"]["total"] > 1 and job["status"]["state"] == "Running", namespace,
        "replaced", SECONDS,
    )  # fmt: skip
    (job,) = [job for job in spillway.children("jobs", namespace, "replaced") if "completionTime" not in job["status"]]
    assert job["spec"]["template"]["spec"]["containers"][0]["image"] == "local/hostroot:1"
    assert job["metadata"]["name"] == f"replaced-{found['status']['attempts']['total']}"


def test_a_wiped_or_forged_status_costs_no_second_attempt_beside_the_first(spillway: Installed, namespace: str) -> None:
    for name in ("wiped", "forged"):
        running(spillway, steady(namespace, name))
    pods = uids(spillway, "pods", namespace, "wiped")
    patch(spillway, "trainingjobs.spillway.dev", "wiped", namespace, {"status": None}, "--subresource=status")
    forged = {"status": {"attempts": {"total": 41, "ended": 41}, "state": "Complete"}}
    patch(spillway, "trainingjobs.spillway.dev", "forged", namespace, forged, "--subresource=status")
    until_running(spillway, namespace, "wiped")
    assert uids(spillway, "pods", namespace, "wiped") == pods, "the same pods run on"
    until_running(spillway, namespace, "forged", attempt=42)
    eventually_true(
        "one Job lives",
        lambda: [job["metadata"]["name"] for job in spillway.children("jobs", namespace, "forged")] == ["forged-42"],
    )


# --- the end of a job -------------------------------------------------------------------------------------------------


def test_deletion_leaves_nothing_but_the_checkpoint_claim(spillway: Installed, namespace: str) -> None:
    spillway.bed.claim("kept", namespace)
    cascades = ("background", "foreground")
    for cascade in cascades:
        job = steady(namespace, cascade, pods=2)
        job["spec"]["checkpoint"]["claim"] = "kept"
        running(spillway, job)
    for cascade in cascades:
        delete(spillway, "trainingjobs.spillway.dev", cascade, namespace, f"--cascade={cascade}")
    eventually_true("nothing is left", lambda: left(spillway, namespace) == [])
    assert spillway.bed.get("trainingjobs.spillway.dev", "-n", namespace)["items"] == []
    assert [claim["metadata"]["name"] for claim in spillway.bed.get("pvc", "-n", namespace)["items"]] == ["kept"]


def test_orphaned_children_block_a_namesake_until_they_are_removed(spillway: Installed, namespace: str) -> None:
    running(spillway, steady(namespace, "orphans"))
    spillway.bed.kubectl("delete", "trainingjobs.spillway.dev", "orphans", "-n", namespace, "--cascade=orphan")
    pods = uids(spillway, "pods", namespace, "orphans")
    spillway.create(steady(namespace, "orphans"))
    eventually_true(
        "the orphans are in the way",
        lambda: spillway.condition(namespace, "orphans", "Accepted").get("reason") == "NameConflict",
    )
    assert uids(spillway, "pods", namespace, "orphans") == pods, "what was to be kept is kept"
    delete(spillway, "configmap", "orphans-1", namespace)
    delete(spillway, "job", "orphans-1", namespace)
    until_running(spillway, namespace, "orphans")


def test_a_namesake_made_at_once_takes_nothing_of_the_job_before(spillway: Installed, namespace: str) -> None:
    spillway.bed.claim("kept", namespace)
    job = steady(namespace, "again", pods=2)
    job["spec"]["checkpoint"]["claim"] = "kept"
    before = running(spillway, job)
    pods = uids(spillway, "pods", namespace, "again")
    spillway.bed.kubectl("delete", "trainingjobs.spillway.dev", "again", "-n", namespace, "--cascade=background")
    after = spillway.create(job)
    assert after["metadata"]["uid"] != before["metadata"]["uid"]
    until_running(spillway, namespace, "again")
    eventually_true("the old pods are gone", lambda: not set(pods) & set(uids(spillway, "pods", namespace, "again")))
    (contract,) = spillway.children("configmaps", namespace, "again")
    assert contract["metadata"]["ownerReferences"][0]["uid"] == after["metadata"]["uid"]
    directory = json.loads(contract["data"]["job.json"])["checkpoint_directory"]
    assert directory.endswith(f"again-{after['metadata']['uid'][:8]}"), "never that of the stranger before"


@pytest.mark.ci
def test_namespace_with_jobs_can_be_deleted_while_other_jobs_go_on(spillway: Installed, namespace: str) -> None:
    doomed = f"{namespace}-doomed"
    spillway.bed.kubectl("create", "namespace", doomed)
    spillway.bed.kubectl("wait", "--for=create", "serviceaccount/default", "-n", doomed, "--timeout=30s")
    for place in (doomed, namespace):  # namesakes
        running(spillway, steady(place, "twin", pods=2))
    pods = uids(spillway, "pods", namespace, "twin")
    spillway.bed.kubectl("delete", "namespace", doomed, f"--timeout={int(SECONDS)}s")
    time.sleep(8)  # longer than a first back-off
    log = ("logs", f"deployment/{RELEASE}", "-n", SYSTEM_NAMESPACE, "--since=4s")
    assert [line for line in spillway.bed.kubectl(*log).splitlines() if f'"{doomed}/twin"' in line] == []
    assert uids(spillway, "pods", namespace, "twin") == pods
    running(spillway, steady(namespace, "next"))
