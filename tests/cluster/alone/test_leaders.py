"""Two operators, of which only one writes: hand-over, a leader that is frozen, a new version during a run."""

from __future__ import annotations

import os
import signal
import time
from datetime import datetime

from harness.installed import (
    LONG,
    OPERATOR_USER,
    RELEASE,
    SYSTEM_NAMESPACE,
    Document,
    Installed,
    example,
    named,
    running_for_an_hour,
)
from spillway_operator.kube.lease import LEASE_SECONDS
from testbed.client import Request

SECONDS = 180.0
"""limit on a busy machine for what usually takes a few seconds"""


def fake_job(namespace: str, name: str) -> Document:
    return running_for_an_hour(named(example("one-pod", namespace), name))


def writes_beside_the_leader(spillway: Installed, since: int) -> list[Request]:
    """Writes of pods that were not the last to write the Lease."""
    asked = [request for request in spillway.bed.requests(since, OPERATOR_USER) if request.mutating and request.pod]
    leader, found = None, []
    for request in sorted(asked, key=lambda request: request.at):
        if request.resource == "leases":
            leader = request.pod if request.code < 300 else leader
        elif leader not in (None, request.pod) and not request.resource.startswith("selfsubject"):
            found.append(request)
    return found


def served_by_the_new_leader(spillway: Installed, namespace: str, name: str, began: float) -> float:
    """Returns the seconds from `began` until the job has a status."""
    spillway.until(lambda job: "state" in job["status"], namespace, name, SECONDS)
    return time.monotonic() - began


def seconds_without_lease(spillway: Installed, since: int, first: str, second: str) -> float:
    """Seconds from the last write of the Lease by pod `first` to the first one by pod `second`."""
    requests = spillway.bed.requests(since, OPERATOR_USER)
    written = [one for one in requests if one.resource == "leases" and one.mutating and one.code < 300]
    left = max(one.at for one in written if one.pod == first)
    taken = min(one.at for one in written if one.pod == second)
    return (datetime.fromisoformat(taken) - datetime.fromisoformat(left)).total_seconds()


def address(spillway: Installed) -> list[str]:
    """The addresses to which progress reports are sent."""
    path = f"/apis/discovery.k8s.io/v1/namespaces/{SYSTEM_NAMESPACE}/endpointslices"
    slices = [
        found
        for found in spillway.bed.read(path)["items"]
        if found["metadata"]["labels"].get("kubernetes.io/service-name") == RELEASE
    ]
    return [one for found in slices for endpoint in found["endpoints"] or () for one in endpoint["addresses"]]


def address_of(spillway: Installed, pod: str) -> str:
    (found,) = [one for one in spillway.operator_pods() if one["metadata"]["name"] == pod]
    return str(found["status"]["podIP"])


def wait_for_address(spillway: Installed, pod: str) -> None:
    wanted, deadline = [address_of(spillway, pod)], time.monotonic() + SECONDS
    while address(spillway) != wanted:
        assert time.monotonic() < deadline, (address(spillway), wanted)
        time.sleep(0.1)


def wait_for_restart(spillway: Installed, pod: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not any(
        one["metadata"]["name"] == pod and one["status"]["containerStatuses"][0]["lastState"].get("terminated")
        for one in spillway.operator_pods()
    ):
        assert time.monotonic() < deadline, "it lives on without its lease"
        time.sleep(0.2)


def test_a_leader_that_is_deleted_hands_over_and_progress_follows(spillway: Installed, namespace: str) -> None:
    first, since, began = spillway.leader(), spillway.bed.audit_position(), time.monotonic()
    wait_for_address(spillway, first)
    began = time.monotonic()
    spillway.bed.kubectl("delete", "pod", first, "-n", SYSTEM_NAMESPACE, "--wait=false")
    second = spillway.leader(other_than=first)
    without = time.monotonic() - began
    spillway.create(fake_job(namespace, "handed-over"))
    seconds = served_by_the_new_leader(spillway, namespace, "handed-over", began)
    wait_for_address(spillway, second)
    print(f"\nleader deleted: another one leads after {without:.1f} s, serves a new job after {seconds:.1f} s")
    assert seconds_without_lease(spillway, since, first, second) < LEASE_SECONDS, "it waited for the lease to run out"
    assert writes_beside_the_leader(spillway, since) == []


def test_leader_paused_beyond_its_lease_writes_nothing_when_resumed(spillway: Installed, namespace: str) -> None:
    names = ["before", "meanwhile", "after"]
    first, since = spillway.leader(), spillway.bed.audit_position()
    process = spillway.bed.container_process(SYSTEM_NAMESPACE, first)
    spillway.create(fake_job(namespace, "before"))  # it is frozen with work to do
    os.kill(process, signal.SIGSTOP)
    began = time.monotonic()
    try:
        spillway.leader(other_than=first)
        without = time.monotonic() - began
        spillway.create(fake_job(namespace, "meanwhile"))
    finally:  # before the kubelet ends the container, whose probes fail from the 25th second on
        os.kill(process, signal.SIGCONT)
    seconds = served_by_the_new_leader(spillway, namespace, "meanwhile", began)
    spillway.create(fake_job(namespace, "after"))
    served_by_the_new_leader(spillway, namespace, "after", began)
    wait_for_restart(spillway, first)
    print(f"\nleader stopped: another one leads after {without:.1f} s, serves a new job after {seconds:.1f} s")
    assert writes_beside_the_leader(spillway, since) == []
    ended = spillway.bed.kubectl("logs", first, "-n", SYSTEM_NAMESPACE, "--previous", "--tail=5")
    assert "this pod is no longer the leader, so the process ends" in ended
    for name in names:
        assert len(spillway.children("jobs", namespace, name)) == 1
        assert spillway.job(namespace, name)["status"]["attempts"]["total"] == 1


def test_a_new_version_of_the_operator_leaves_what_runs_alone(spillway: Installed, namespace: str) -> None:
    """Every pod of the operator is replaced while a real job trains and reports."""
    job = named(example("one-pod", namespace, training__steps=LONG), "through")
    since = spillway.bed.audit_position()
    spillway.create(job)
    spillway.until(lambda found: found["status"].get("progress", {}).get("step", 0) > 0, namespace, "through", SECONDS)
    pods = {pod["metadata"]["uid"] for pod in spillway.children("pod", namespace, "through")}
    operators = {pod["metadata"]["uid"] for pod in spillway.operator_pods()}
    deployment = f"deployment/{RELEASE}"
    spillway.bed.kubectl("rollout", "restart", deployment, "-n", SYSTEM_NAMESPACE)
    spillway.bed.kubectl("rollout", "status", deployment, "-n", SYSTEM_NAMESPACE, f"--timeout={int(SECONDS)}s")
    leader = spillway.leader()
    assert not operators & {pod["metadata"]["uid"] for pod in spillway.operator_pods()}
    wait_for_address(spillway, leader)
    step = spillway.job(namespace, "through")["status"]["progress"]["step"]
    found = spillway.until(lambda found: found["status"]["progress"]["step"] > step, namespace, "through", SECONDS)
    assert {pod["metadata"]["uid"] for pod in spillway.children("pod", namespace, "through")} == pods
    attempts = found["status"]["attempts"]
    assert (attempts["total"], attempts["restarts"], attempts["disruptions"]) == (1, 0, 0)
    assert writes_beside_the_leader(spillway, since) == []
    print(f"\noperators replaced at step {step}")
