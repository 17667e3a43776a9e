"""`spillway calibrate NODE` against an API server of the standard library; the node itself is not measured here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.fake_api_server import FakeApiServer, rejection
from spillway_cli.__main__ import run_app
from spillway_cli.calibrate import node as calibrate_node
from spillway_cli.machine.node_profile import read_profile

NODE, JOB = "node-a", "spillway-probe-x7k"
JOBS = "/apis/batch/v1/namespaces/team-a/jobs"
PROFILES = "/apis/spillway.dev/v1alpha1/nodeprofiles"
COMMAND = ["calibrate", NODE, "--image", "trainer:1"]
SPEC = {"deviceKind": "Cpu", "numCores": 8, "nvmeReadBytesPerSecond": "2000000000.0",
        "link": {"h2dBytesPerSecond": "9000000000.0"},
        "source": "Probe"}  # fmt: skip
FIGURE = {"median": 2e9, "low": 1.9e9, "high": 2.1e9, "samples": 9}
PRINTED = {"profile": "/tmp/profile.yaml", "nodeProfile": {"metadata": {"name": "pod"}, "spec": SPEC},
           "figures": {"disk read": FIGURE}, "notes": ["noise: none"]}  # fmt: skip
LOG = f"starting\nUserWarning: something\n{json.dumps(PRINTED, indent=2)}\n"


def ended(type_: str, reason: str = "", message: str = "") -> dict[str, Any]:
    return {"status": {"conditions": [{"type": type_, "status": "True", "reason": reason, "message": message}]}}


FAILED = ended("Failed", "BackoffLimitExceeded")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApiServer]:
    """On which the probe runs well, and no profile is there yet."""
    fake = FakeApiServer()
    fake.write_kubeconfig(tmp_path / "kubeconfig")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setattr(calibrate_node, "POLL_SECONDS", 0.01)
    pod = {"metadata": {"name": "pod", "namespace": "team-a", "labels": {"job-name": JOB}}}
    fake.pods.append({**pod, "status": {"phase": "Succeeded"}})
    fake.pages["/api/v1/namespaces/team-a/pods/pod/log"] = LOG
    fake.objects |= {
        f"/api/v1/nodes/{NODE}": {"metadata": {"name": NODE}, "status": {"allocatable": {"cpu": "7900m"}}},
        f"{PROFILES}/{NODE}": rejection(404, "NotFound", "not found", name=NODE),
        f"POST {JOBS}": {"metadata": {"name": JOB}, "code": 201},
        f"{JOBS}/{JOB}": ended("Complete"),
        f"DELETE {JOBS}/{JOB}": {"kind": "Status", "code": 200},
        f"POST {PROFILES}": {"metadata": {"name": NODE}, "code": 201},
        f"PUT {PROFILES}/{NODE}": {"metadata": {"name": NODE}},
    }
    yield fake
    fake.close()


def sent(server: FakeApiServer, method: str, path: str) -> list[dict[str, Any]]:
    return [content for verb, found, _, content in server.requests if (verb, found) == (method, path)]


def written(server: FakeApiServer) -> list[str]:
    return [path for verb, path, _, _ in server.requests if verb in ("POST", "PUT") and path.startswith(PROFILES)]


def test_what_the_pod_printed_becomes_the_nodes_profile(
    server: FakeApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(COMMAND) == 0
    (profile,) = sent(server, "POST", PROFILES)
    assert (profile["metadata"]["name"], profile["spec"]) == (NODE, SPEC)
    assert "disk read" in (said := capsys.readouterr().out) and "noise: none" in said
    assert len(sent(server, "DELETE", f"{JOBS}/{JOB}")) == 1


def test_the_pod_runs_on_that_node_without_rights_and_with_all_cores(server: FakeApiServer) -> None:
    assert run_app([*COMMAND, "--quick"]) == 0
    (job,) = sent(server, "POST", JOBS)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert terms == [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [NODE]}]}]
    assert pod["automountServiceAccountToken"] is False
    assert "cpu" not in container["resources"]["limits"]
    assert container["command"][-1] == "--quick"
    assert job["spec"]["activeDeadlineSeconds"] and job["spec"]["ttlSecondsAfterFinished"]


def test_what_somebody_wrote_and_no_probe_measures_is_kept(server: FakeApiServer) -> None:
    old = {
        "deviceKind": "Cpu",
        "nvmeCapacity": "100Gi",
        "nvmeReadBytesPerSecond": "1e9",
        "link": {"d2hBytesPerSecond": "5e9"},
    }
    metadata = {"name": NODE, "resourceVersion": "42", "annotations": {"by": "me"}}
    server.objects[f"{PROFILES}/{NODE}"] = {"metadata": metadata, "spec": old}
    assert run_app(COMMAND) == 0
    (profile,) = sent(server, "PUT", f"{PROFILES}/{NODE}")
    assert profile["metadata"] == metadata
    link = {"h2dBytesPerSecond": "9000000000.0", "d2hBytesPerSecond": "5e9"}
    assert profile["spec"] == {**SPEC, "nvmeCapacity": "100Gi", "link": link}


def test_a_profile_of_gpus_is_not_overwritten(
    server: FakeApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.objects[f"{PROFILES}/{NODE}"] = {"metadata": {"name": NODE}, "spec": {"deviceKind": "Cuda"}}
    assert run_app(COMMAND) == 64
    assert "describes GPUs" in capsys.readouterr().err
    assert sent(server, "POST", JOBS) == []
    assert run_app([*COMMAND, "--output", str(tmp_path / "node-a.yaml")]) == 0


def test_with_a_file_nothing_is_written_into_the_cluster(server: FakeApiServer, tmp_path: Path) -> None:
    assert run_app([*COMMAND, "--output", str(tmp_path / "node-a.yaml"), "-o", "json"]) == 0
    found = read_profile(tmp_path / "node-a.yaml")
    assert (found.metadata.name, found.spec.nvme_read_bytes_per_second) == (NODE, 2e9)
    assert written(server) == []


@pytest.mark.parametrize(
    ("log", "job", "said"),
    [
        ('{"error": {"exitCode": 3, "message": "/spill: 1GiB free"}}', FAILED, "1GiB free"),
        ("Traceback\nNo module named spillway_cli", FAILED, "No module named"),
        ("", ended("Failed", "DeadlineExceeded", "Job was active longer"), "no output"),
        ('{"nodeProfile": {"spec": {"deviceKind": "Tpu"}}}', ended("Complete"), "are not valid"),
        ('{"nodeProfile": {"spec": {"deviceKind": "Cpu"}}}', ended("Complete"), "no rate"),
        (json.dumps({"nodeProfile": {"spec": {**SPEC, "numCores": 2}}}), ended("Complete"), "2 of the node's 7 cores"),
        ("hello", ended("Complete"), "hello"),
    ],
)  # fmt: skip
def test_a_probe_that_did_not_measure_says_why_and_leaves_nothing(
    server: FakeApiServer, capsys: pytest.CaptureFixture[str], log: str, job: dict[str, Any], said: str
) -> None:
    server.pages["/api/v1/namespaces/team-a/pods/pod/log"] = log
    server.objects[f"{JOBS}/{JOB}"] = job
    assert run_app(COMMAND) == 64
    assert said in capsys.readouterr().err
    assert written(server) == []
    assert len(sent(server, "DELETE", f"{JOBS}/{JOB}")) == 1


def test_a_pod_that_never_ran_says_what_the_scheduler_said(
    server: FakeApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.pages.clear()
    unscheduled = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available: 1 node had a taint"}
    server.pods[0]["status"] = {"phase": "Pending", "conditions": [unscheduled]}
    server.objects[f"{JOBS}/{JOB}"] = ended("Failed", "DeadlineExceeded")
    assert run_app(COMMAND) == 64
    assert "1 node had a taint" in capsys.readouterr().err


def test_a_node_that_is_not_there_is_one_sentence(server: FakeApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["calibrate", "nowhere", "--image", "x"]) == 64
    (line,) = capsys.readouterr().err.splitlines()
    assert "node nowhere: not found in the cluster" in line
    assert sent(server, "POST", JOBS) == []


def test_ctrl_c_deletes_the_job(server: FakeApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrate_node, "result", interrupted)
    assert run_app(COMMAND) == 75
    assert len(sent(server, "DELETE", f"{JOBS}/{JOB}")) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([NODE], "--image"),
        ([NODE, "--image", "x", "--directory", "."], "--directory: only applies to this machine"),
        ([NODE, "--image", "x", "--from", "run"], "--from: only applies to this machine"),
        (["--image", "x"], "name the node"),
        (["-n", "team-a"], "--namespace: only applies to a cluster node"),
    ],
)
def test_options_of_a_node_and_of_this_machine_are_not_mixed(
    server: FakeApiServer, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert run_app(["calibrate", *arguments]) == 64
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert server.requests == []
