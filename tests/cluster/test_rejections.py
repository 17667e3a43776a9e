"""Rejections of an attempt's objects on the real API server: quota, LimitRange, admission policies.

Each rejection becomes a condition with a reason and the API server's own sentence, and none is final: once the cause is
gone, the job continues by itself. Pods are on fake nodes, so that nothing is trained, but the rejections are real.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from harness.installed import Document, Installed, example, on_fake_nodes
from spillway_cli.doctor.gather import sample_pod
from testbed.client import Bed
from testbed.errors import Failed

NAME = "one-pod"
SECONDS = 180.0
"""limit from a cause, or its end, to the status that shows it"""


@dataclass(frozen=True)
class Rejecting:
    """Something in a namespace that rejects objects, and what the status must say about it."""

    obstacle: Document
    reason: str
    """of Scheduled=False"""
    said: tuple[str, ...]


def quota(**hard: str) -> Document:
    named = {name.replace("__", "/").replace("_", "."): value for name, value in hard.items()}
    return {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"}, "spec": {"hard": named}}


def limit_range(**limits: Document) -> Document:
    container = {"type": "Container", **limits}
    return {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "narrow"}, "spec": {"limits": [container]}}


def policy(group: str, resource: str) -> Document:
    """A policy that forbids the creation of this resource."""
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": f"no-{resource}"},
        "spec": {
            "matchConstraints": {
                "resourceRules": [
                    {"apiGroups": [group], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": [resource]}
                ]
            },
            "validations": [{"expression": "false", "message": f"the platform team allows no {resource} here"}],
        },
    }


CASES = {
    "a quota that has no room for the Job": Rejecting(
        quota(count__jobs_batch="0"), "Rejected", (f"Job {NAME}-1: ", "exceeded quota: small", "count/jobs.batch=0")
    ),
    "a quota that has no room for the ConfigMap": Rejecting(
        quota(count__configmaps="0"), "Rejected", (f"ConfigMap {NAME}-1: ", "exceeded quota: small", "count/configmaps")
    ),
    "a quota that has no room for the pod": Rejecting(
        quota(limits_memory="16Mi"), "PodsRejected", (f"Job {NAME}-1", "exceeded quota: small", "limits.memory=16Mi")
    ),
    "a quota that asks for a limit which trainers have not": Rejecting(
        quota(limits_cpu="8"), "PodsRejected", ("failed quota: small: must specify limits.cpu for: trainer",)
    ),
    "a LimitRange below the request": Rejecting(
        limit_range(max={"memory": "16Mi"}), "PodsRejected", ("maximum memory usage per Container is 16Mi",)
    ),
    "a policy against ConfigMaps": Rejecting(
        policy("", "configmaps"), "Rejected", (f"ConfigMap {NAME}-1: ", "the platform team allows no configmaps here")
    ),
    "a policy against Jobs": Rejecting(
        policy("batch", "jobs"), "Rejected", (f"Job {NAME}-1: ", "the platform team allows no jobs here")
    ),
    "a policy against pods": Rejecting(
        policy("", "pods"), "PodsRejected", (f"Job {NAME}-1", "the platform team allows no pods here")
    ),
}


@dataclass(frozen=True)
class Seen:
    """The job while it was rejected, and after the cause was gone."""

    rejected: Document
    events: list[Document]
    later: Document


@pytest.fixture(scope="module")
def seen(spillway: Installed) -> Iterator[dict[str, Seen]]:
    """Runs all cases at once, each in its own namespace, because rejected objects are tried again after ever longer
    pauses."""
    run = uuid.uuid4().hex[:6]
    places = {case: f"rejected-{run}-{number}" for number, case in enumerate(CASES)}
    bed = spillway.bed
    try:
        for case, place in places.items():
            put(bed, place, CASES[case].obstacle)
        for case, place in places.items():
            wait_until_it_rejects(bed, place, CASES[case].obstacle)
        for place in places.values():
            spillway.create(on_fake_nodes(example(NAME, place)))
        rejected = {
            case: when(spillway, place, lambda job, case=case: reason(job) == CASES[case].reason)
            for case, place in places.items()
        }
        events = {case: bed.get("events.events.k8s.io", "-n", place)["items"] for case, place in places.items()}
        for case, place in places.items():
            take(bed, place, CASES[case].obstacle)
        later = {case: when(spillway, place, goes_on) for case, place in places.items()}
        yield {case: Seen(rejected[case], events[case], later[case]) for case in CASES}
    finally:
        for case, place in places.items():
            take(bed, place, CASES[case].obstacle)
            bed.kubectl("delete", "namespace", place, "--wait=false", "--ignore-not-found")


def when(spillway: Installed, place: str, what: Callable[[Document], bool]) -> Document:
    """Waits until `what` holds; returns the job. After the time limit it returns the job as it is, so that a test can
    say what is wrong."""
    deadline = time.monotonic() + SECONDS
    while not what(job := spillway.job(place, NAME)) and time.monotonic() < deadline:
        time.sleep(0.3)
    return job


def scheduled(job: Document) -> Document:
    conditions = job["status"].get("conditions", [])
    return next((condition for condition in conditions if condition["type"] == "Scheduled"), {})


def reason(job: Document) -> str:
    return str(scheduled(job).get("reason"))


def goes_on(job: Document) -> bool:
    """Whether the job's pods run or have completed, which fake pods do soon."""
    conditions = job["status"].get("conditions", [])
    return any(one["type"] in ("Running", "Complete") and one["status"] == "True" for one in conditions)


def put(bed: Bed, namespace: str, obstacle: Document) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    bed.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": labels}})
    bed.kubectl("wait", "--for=create", "serviceaccount/default", "--namespace", namespace, "--timeout=30s")
    bed.kubectl("wait", "--for=create", "configmap/kube-root-ca.crt", "--namespace", namespace, "--timeout=30s")
    if obstacle["kind"] != "ValidatingAdmissionPolicy":
        bed.apply({**obstacle, "metadata": {**obstacle["metadata"], "namespace": namespace}})
        return
    name = f"{namespace}-{obstacle['metadata']['name']}"
    here = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    bed.apply(
        {**obstacle, "metadata": {"name": name}},
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": {"name": name},
            "spec": {"policyName": name, "validationActions": ["Deny"], "matchResources": here},
        },
    )


def take(bed: Bed, namespace: str, obstacle: Document) -> None:
    kind, name = obstacle["kind"], obstacle["metadata"]["name"]
    if kind != "ValidatingAdmissionPolicy":
        bed.kubectl("delete", kind, name, "--namespace", namespace, "--ignore-not-found")
        return
    for each in (f"{kind}Binding", kind):
        bed.kubectl("delete", each, f"{namespace}-{name}", "--ignore-not-found")


TRIALS: dict[str, Document] = {
    "configmaps": {"apiVersion": "v1", "kind": "ConfigMap"},
    "jobs": {"apiVersion": "batch/v1", "kind": "Job", "spec": {"template": {"spec": sample_pod()["spec"]}}},
    "pods": sample_pod(),
}
"""resource -> an object that nothing but the policy rejects"""


def wait_until_it_rejects(bed: Bed, namespace: str, obstacle: Document) -> None:
    """Waits until the obstacle takes effect: for some seconds, a quota is still counted, and a policy is still
    compiled."""
    if obstacle["kind"] == "LimitRange":
        return
    if obstacle["kind"] == "ResourceQuota":
        bed.kubectl(
            "wait", "--for=jsonpath={.status.hard}", "resourcequota/small", "-n", namespace, "--timeout=30s"
        )  # fmt: skip
        return
    resource = obstacle["metadata"]["name"].removeprefix("no-")
    trial = json.dumps({**TRIALS[resource], "metadata": {"name": "trial", "namespace": namespace}})
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            bed.kubectl("create", "--dry-run=server", "-f", "-", stdin=trial)
        except Failed as error:
            if "the platform team" in str(error):
                return
        time.sleep(0.3)
    raise AssertionError(f"the policy against {resource} rejected nothing for 30 s")


@pytest.mark.parametrize("case", CASES)
def test_rejection_is_a_condition_with_the_server_message_until_resolved(seen: dict[str, Seen], case: str) -> None:
    rejecting, job = CASES[case], seen[case].rejected
    found = scheduled(job)
    assert (found.get("status"), found.get("reason")) == ("False", rejecting.reason), job["status"]
    for words in rejecting.said:
        assert words in found["message"], found
    assert job["status"]["state"] in ("Pending", "Starting")
    assert job["status"].get("attempts", {}).get("restarts", 0) == 0, "no failure of the job"
    assert rejecting.reason in {event["reason"] for event in seen[case].events}, "said as an event, too"
    later = seen[case].later
    assert goes_on(later), later["status"]
    assert later["status"]["attempts"]["total"] == 1


def test_default_limits_of_a_namespace_are_no_obstacle(spillway: Installed, namespace: str) -> None:
    """A LimitRange's default satisfies a quota that requires limits.cpu."""
    spillway.bed.apply(
        {**quota(limits_cpu="8"), "metadata": {"name": "small", "namespace": namespace}},
        {**limit_range(default={"cpu": "2"}), "metadata": {"name": "narrow", "namespace": namespace}},
    )
    spillway.create(on_fake_nodes(example(NAME, namespace)))
    spillway.until(goes_on, namespace, NAME, SECONDS)
    (pod,) = spillway.children("pod", namespace, NAME)
    assert pod["spec"]["containers"][0]["resources"]["limits"]["cpu"] == "2"


def test_namespace_with_restricted_pod_security_rejects_nothing(spillway: Installed, namespace: str) -> None:
    """Uses the newest version of `restricted`, and every volume and field that a job can request."""
    labels = (f"pod-security.kubernetes.io/{mode}-version=latest" for mode in ("enforce", "warn", "audit"))
    spillway.bed.kubectl("label", "namespace", namespace, *labels)
    spillway.bed.claim("kept", namespace)
    job = on_fake_nodes(example("two-pod", namespace, checkpoint__claim="kept"))
    spillway.create(job)
    spillway.until(goes_on, namespace, "two-pod", SECONDS)
    failed = spillway.bed.get("events.events.k8s.io", "-n", namespace, "--field-selector", "reason=FailedCreate")
    assert failed["items"] == []
