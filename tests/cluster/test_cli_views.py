"""`spillway top` and `spillway doctor` with the real API server, as an administrator and as a user who may only
view."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from harness.installed import LONG, SYSTEM_NAMESPACE, Document, Installed, example, named
from spillway_cli.calibrate import node as calibrate_node
from spillway_cli.cluster.api import connect
from testbed.client import Bed
from testbed.layout import NODE, REPOSITORY

NAME, STUCK = "watched", "nowhere"
PLAYED = "fake-003"
DOCTOR_SECONDS, PROBE_SECONDS = 10.0, 240.0
COMMAND_SECONDS = 120.0
"""limit for a command with Python's start, on a busy machine"""


def command(kubeconfig: Path, *arguments: str, seconds: float = COMMAND_SECONDS) -> tuple[int, Document]:
    """Runs `spillway ... -o json`; returns its exit code and document."""
    environment = {"KUBECONFIG": str(kubeconfig), "PATH": "/usr/bin:/bin", "HOME": str(kubeconfig.parent)}
    spillway = str(REPOSITORY / ".venv" / "bin" / "spillway")
    ended = subprocess.run(
        [spillway, *arguments, "-o", "json"], env=environment, capture_output=True, text=True, check=False,
        timeout=seconds,
    )  # fmt: skip
    assert ended.stdout, ended.stderr
    found: Document = json.loads(ended.stdout)
    return ended.returncode, found


@pytest.fixture(scope="module")
def watched(spillway: Installed, module_namespace: str) -> Iterator[str]:
    """A namespace with a job that trains, and a job that fits on no node."""
    job = example("one-pod", module_namespace, checkpoint__claim=None, training__steps=LONG)
    spillway.create(named(job, NAME))
    nowhere = example("one-pod", module_namespace, checkpoint__claim=None, scheduling__nodeSelector={"pool": "none"})
    spillway.create(named(nowhere, STUCK))
    spillway.until(lambda found: found["status"].get("progress", {}).get("step", 0) > 1, module_namespace, NAME)
    yield module_namespace
    spillway.bed.kubectl("delete", "trainingjobs.spillway.dev", "--all", "-n", module_namespace, "--wait=false")


@pytest.fixture(scope="module")
def viewer(watched: str, spillway: Installed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kubeconfig of a ServiceAccount with the role `view` in the namespace."""
    bed: Bed = spillway.bed
    bed.kubectl("create", "serviceaccount", "viewer", "-n", watched)
    account = f"--serviceaccount={watched}:viewer"
    bed.kubectl("create", "rolebinding", "viewer", "--clusterrole=view", account, "-n", watched)
    token = bed.kubectl("create", "token", "viewer", "-n", watched).strip()
    config = yaml.safe_load(bed.kubeconfig.read_text(encoding="utf-8"))
    for user in config["users"]:
        user["user"] = {"token": token}
    file = tmp_path_factory.mktemp("viewer") / "kubeconfig"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return file


def conditions(job: Document) -> list[Document]:
    found: list[Document] = job["status"].get("conditions", [])
    return found


def of_cluster(document: Document, check: str) -> list[Document]:
    return [one for one in document["findings"] if one["area"] == "cluster" and one["check"] == check]


def test_top_of_the_fleet_names_the_node_where_the_pod_is(spillway: Installed, watched: str) -> None:
    code, document = command(spillway.bed.kubeconfig, "top", "-n", watched, "--once")
    jobs = {job["name"]: job for job in document["jobs"]}
    assert code == 0 and jobs.keys() == {NAME, STUCK} and document["unknown"] == []
    assert (jobs[NAME]["state"], jobs[NAME]["nodes"], jobs[NAME]["nodesArePlanned"]) == ("Running", ["node-0"], False)
    assert jobs[NAME]["tiers"]["device"]["plannedBytes"] > 0
    code, document = command(spillway.bed.kubeconfig, "top", "-A", "--once")
    assert code == 0 and {NAME, STUCK} <= {job["name"] for job in document["jobs"] if job["namespace"] == watched}


def test_top_of_a_job_has_the_trainers_own_phases_and_bytes(spillway: Installed, watched: str) -> None:
    code, document = command(spillway.bed.kubeconfig, "top", NAME, "-n", watched, "--once")
    assert code == 0 and document["unknown"] == []
    assert document["tiers"]["device"]["nowBytes"] > 0
    assert document["rates"]["phaseSeconds"]["forward"] > 0


def test_who_may_only_view_sees_the_job_and_is_told_what_is_not_known(viewer: Path, watched: str) -> None:
    code, document = command(viewer, "top", NAME, "-n", watched, "--once")
    assert code == 0 and document["step"] > 0 and document["nodes"] == ["node-0"]
    assert document["rates"] is None and "pods/proxy" in document["unknown"][0]


def test_doctor_finds_the_installation_sound_and_the_stuck_job(spillway: Installed, watched: str) -> None:
    spillway.until(lambda found: "Planned" in {one["type"] for one in conditions(found)}, watched, STUCK)
    code, document = command(spillway.bed.kubeconfig, "doctor", "-n", watched)
    assert document["seconds"] < DOCTOR_SECONDS
    for check in ("api server", "crds", "operator", "rights", "pods"):
        assert [one["severity"] for one in of_cluster(document, check)] == ["ok"], of_cluster(document, check)
    assert SYSTEM_NAMESPACE in of_cluster(document, "operator")[0]["message"]
    errors = [one for one in document["findings"] if one["severity"] == "error"]
    assert code == 1 and [one["check"] for one in errors] == ["jobs"], errors
    assert f"{watched}/{STUCK}: Planned=False (NoNode)" in errors[0]["message"] and errors[0]["fix"]


def test_doctor_of_who_may_only_view_says_what_they_may_not(viewer: Path, watched: str) -> None:
    _, document = command(viewer, "doctor", "-n", watched)
    assert [one["severity"] for one in of_cluster(document, "crds")] == ["ok"], "the OpenAPI is for everybody"
    assert [one["severity"] for one in of_cluster(document, "operator")] == ["note"]
    said = " ".join(one["message"] for one in of_cluster(document, "rights"))
    assert "you may not create trainingjobs" in said and "you may use spillway status, logs" in said
    assert "you may not create pods" in of_cluster(document, "pods")[0]["message"]


def test_doctor_finds_a_quota_that_lets_no_pod_in(spillway: Installed, namespace: str) -> None:
    spillway.bed.kubectl("create", "quota", "none", "--hard=pods=0", "-n", namespace)
    code, document = command(spillway.bed.kubeconfig, "doctor", "-n", namespace)
    (found,) = of_cluster(document, "pods")
    assert code == 1 and found["severity"] == "error" and "quota: none" in found["message"]


def test_doctor_leaves_nothing_behind(spillway: Installed, namespace: str) -> None:
    since = spillway.bed.audit_position()
    command(spillway.bed.kubeconfig, "doctor", "-n", namespace)
    assert spillway.bed.get("pods", "-n", namespace)["items"] == []
    created = {request.resource for request in spillway.bed.requests(since) if request.namespace == namespace and
               request.verb == "create"}  # fmt: skip
    assert created <= {"pods", "serviceaccounts", "configmaps", "events"}, created


def test_node_is_measured_by_a_job_and_rewriting_its_profile_keeps_edits(
    spillway: Installed, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test writes the profile of a KWOK node, because a profile of the real node would change the plans of other
    tests."""
    bed, file = spillway.bed, tmp_path / "profile.yaml"
    arguments = ("--image", "local/hostroot:1", "--quick", "--output", str(file), "--namespace", namespace)
    code, found = command(bed.kubeconfig, "calibrate", NODE, *arguments, seconds=PROBE_SECONDS)
    assert code == 0, found
    assert found["nodeProfile"]["metadata"]["name"] == NODE
    assert float(found["nodeProfile"]["spec"]["nvmeReadBytesPerSecond"]) > 0
    bed.kubectl("wait", "--for=delete", "jobs", "--all", "--namespace", namespace, "--timeout=120s")

    monkeypatch.setenv("KUBECONFIG", str(bed.kubeconfig))
    made = {**found["nodeProfile"], "metadata": {"name": PLAYED}}
    cluster = connect()
    calibrate_node.write(cluster, made, calibrate_node.existing_profile(cluster, PLAYED))
    try:
        bed.kubectl("patch", "nodeprofile", PLAYED, "--type=merge", "--patch", '{"spec": {"nvmeCapacity": "7Gi"}}')
        calibrate_node.write(cluster, made, calibrate_node.existing_profile(cluster, PLAYED))
        assert bed.get("nodeprofile", PLAYED)["spec"] == made["spec"] | {"nvmeCapacity": "7Gi"}
    finally:
        bed.kubectl("delete", "nodeprofile", PLAYED)
