"""The test bed is a real cluster, does not touch what is not its own, and ends only what it started."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from testbed import bed as whole_bed
from testbed import fake_gpus, machine, processes
from testbed.client import Bed
from testbed.errors import Failed, Rejected
from testbed.layout import NODE, REPOSITORY, State

IMAGE = "local/hostroot:1"
"""this machine's programs and this checkout's Python"""
FAKE = {"nodeSelector": {"type": "kwok"}, "tolerations": [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}]}
Eventually = Callable[..., None]


def pod_spec(*command: str, **container: object) -> dict[str, Any]:
    """The spec of a restricted pod, like those that the operator makes."""
    hardened = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    main = {
        "name": "main",
        "image": IMAGE,
        "command": list(command),
        "workingDir": "/tmp",
        "securityContext": hardened,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, {"name": "work", "mountPath": "/work"}],
        **container,
    }
    user = {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000}
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 1,
        "securityContext": {**user, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [main],
        "volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "work", "emptyDir": {}}],
    }


def pod(namespace: str, name: str, spec: dict[str, Any], **labels: str) -> dict[str, object]:
    metadata = {"namespace": namespace, "name": name, "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def phase(testbed: Bed, namespace: str, name: str, wanted: str, timeout: int = 180) -> dict[str, Any]:
    """Waits until the pod is in phase `wanted`; returns the pod."""
    condition = f"--for=jsonpath={{.status.phase}}={wanted}"
    testbed.kubectl("wait", condition, f"pod/{name}", "--namespace", namespace, f"--timeout={timeout}s")
    found: dict[str, Any] = testbed.get("pod", name, "--namespace", namespace)
    return found


def test_a_restricted_pod_trains_with_this_checkouts_code(testbed: Bed, namespace: str) -> None:
    imported = "import torch; import spillway_operator; from spillway_trainer.kernels import native"
    code = f"{imported}; print(native.load_library())"
    testbed.apply(pod(namespace, "trainer", pod_spec("python", "-c", code)))
    phase(testbed, namespace, "trainer", "Succeeded")
    assert "libspillway_native.so" in testbed.kubectl("logs", "trainer", "--namespace", namespace)


def test_two_pods_of_an_indexed_job_find_each_other_by_name(testbed: Bed, namespace: str) -> None:
    """Like ranks: the first pod listens, and the second tries to resolve its name until it can connect."""
    code = (
        "import os, socket, time\n"
        "if os.environ['JOB_COMPLETION_INDEX'] == '0':\n"
        "    server = socket.create_server(('', 29500)); server.accept()[0].sendall(b'hello')\n"
        "else:\n"
        "    for _ in range(900):\n"
        "        try:\n"
        "            print(socket.create_connection(('pair-0.pair', 29500)).recv(5).decode()); break\n"
        "        except OSError: time.sleep(0.1)\n"
        "    else: raise SystemExit(1)\n"
    )
    spec = pod_spec("python", "-c", code) | {"subdomain": "pair"}
    testbed.apply(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"namespace": namespace, "name": "pair"},
            "spec": {"clusterIP": "None", "selector": {"app": "pair"}, "publishNotReadyAddresses": True},
        },
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"namespace": namespace, "name": "pair"},
            "spec": {
                "completionMode": "Indexed",
                "completions": 2,
                "parallelism": 2,
                "backoffLimit": 0,
                "template": {"metadata": {"labels": {"app": "pair"}}, "spec": spec},
            },
        },
    )
    testbed.kubectl("wait", "--for=condition=Complete", "job/pair", "--namespace", namespace, "--timeout=180s")
    said = testbed.kubectl("logs", "--selector", "app=pair", "--namespace", namespace)
    assert said.strip() == "hello"


def test_a_pod_reaches_a_pod_beside_it_through_a_service(testbed: Bed, namespace: str) -> None:
    """This is how a trainer reaches the operator."""
    port = {"ports": [{"name": "http", "containerPort": 8000}]}
    probe = {"readinessProbe": {"tcpSocket": {"port": 8000}, "periodSeconds": 1}}
    testbed.apply(
        pod(namespace, "server", pod_spec("python", "-m", "http.server", "8000", **port, **probe), app="server"),
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"namespace": namespace, "name": "web"},
            "spec": {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": "http"}]},
        },
    )
    testbed.kubectl("wait", "--for=condition=Ready", "pod/server", "--namespace", namespace, "--timeout=180s")
    code = (
        "import time, urllib.request\n"
        "for _ in range(600):\n"
        "    try: urllib.request.urlopen('http://web', timeout=1); break\n"
        "    except OSError: time.sleep(0.1)\n"
        "else: raise SystemExit(1)\n"
    )
    testbed.apply(pod(namespace, "client", pod_spec("python", "-c", code)))
    phase(testbed, namespace, "client", "Succeeded")


def test_a_container_over_its_memory_limit_is_killed_and_says_why(testbed: Bed, namespace: str) -> None:
    code = "open('/dev/termination-log', 'w').write('step 3'); held = b'x' * 200_000_000"
    limit = {"resources": {"limits": {"memory": "64Mi"}}}
    testbed.apply(pod(namespace, "greedy", pod_spec("python", "-c", code, **limit)))
    status = phase(testbed, namespace, "greedy", "Failed")["status"]
    ended = status["containerStatuses"][0]["state"]["terminated"]
    assert (ended["reason"], ended["exitCode"], ended["message"]) == ("OOMKilled", 137, "step 3")


def test_fake_gpus_are_given_to_pods_and_run_out(testbed: Bed, namespace: str, eventually: Eventually) -> None:
    def asking(count: int) -> dict[str, Any]:
        limits = {"resources": {"limits": {fake_gpus.RESOURCE: str(count)}}}
        return pod_spec("sh", "-c", "echo $NVIDIA_VISIBLE_DEVICES", **limits)

    testbed.apply(pod(namespace, "two", asking(2)), pod(namespace, "many", asking(50)))
    phase(testbed, namespace, "two", "Succeeded")
    assert testbed.kubectl("logs", "two", "--namespace", namespace).count("fake-gpu-") == 2

    def reason() -> str:
        conditions = testbed.get("pod", "many", "--namespace", namespace)["status"].get("conditions", [])
        return next((it["message"] for it in conditions if it["type"] == "PodScheduled"), "")

    eventually("the scheduler's answer", lambda: f"Insufficient {fake_gpus.RESOURCE}" in reason(), 60)


@pytest.fixture
def _healthy_again(testbed: Bed) -> Iterator[None]:
    yield
    testbed.state.unhealthy_gpus.unlink(missing_ok=True)


@pytest.mark.usefixtures("_healthy_again")
def test_an_unhealthy_fake_gpu_is_not_allocatable(testbed: Bed, eventually: Eventually) -> None:
    whole = fake_gpus.allocatable(testbed.state)
    testbed.state.unhealthy_gpus.write_text("fake-gpu-0\n", encoding="ascii")
    eventually("one GPU less", lambda: fake_gpus.allocatable(testbed.state) == whole - 1, 60)


def test_fake_nodes_are_ready_and_run_pods(testbed: Bed, namespace: str) -> None:
    nodes = testbed.get("nodes", "--selector", "type=kwok")["items"]
    assert len(nodes) >= 4
    testbed.apply(pod(namespace, "pretended", pod_spec("sleep", "1d") | FAKE))
    assert phase(testbed, namespace, "pretended", "Running")["spec"]["nodeName"].startswith("fake-")


def test_series_of_a_pod_are_attributed_by_its_target(testbed: Bed, namespace: str, eventually: Eventually) -> None:
    """A pod that claims to be another job on another node can only change its own exported_ labels."""
    code = (
        "import time; from prometheus_client import Gauge, start_http_server\n"
        "Gauge('claimed_bytes', 'x', ['node', 'training_job']).labels('fake-000', 'other').set(7)\n"
        "start_http_server(9400); time.sleep(600)"
    )
    port = {"ports": [{"name": "metrics", "containerPort": 9400}]}
    spec = pod_spec("python", "-c", code, **port)
    testbed.apply(pod(namespace, "exporter", spec, **{"spillway.dev/job": "mine"}))
    expression = f'claimed_bytes{{namespace="{namespace}"}}'
    eventually("the pod's series", lambda: bool(testbed.query(expression)), 180)
    (sample,) = testbed.query(expression)
    shown = {name: sample.labels[name] for name in ("job", "pod", "node", "training_job", "exported_training_job")}
    assert shown == {
        "job": "spillway-trainer",
        "pod": "exporter",
        "node": NODE,
        "training_job": "mine",
        "exported_training_job": "other",
    }
    assert sample.value == 7


def test_the_nodes_memory_is_measured_under_its_name(testbed: Bed, eventually: Eventually) -> None:
    expression = f'node_memory_MemAvailable_bytes{{node="{NODE}"}}'
    eventually("the node's series", lambda: bool(testbed.query(expression)), 60)


def test_requests_are_counted_from_the_audit_log(testbed: Bed, namespace: str) -> None:
    since = testbed.audit_position()
    testbed.kubectl("create", "configmap", "counted", "--namespace", namespace)
    mine = [it for it in testbed.requests(since, user="admin") if it.mutating and it.namespace == namespace]
    assert [(it.verb, it.resource, it.name, it.code) for it in mine] == [("create", "configmaps", "counted", 201)]


def test_helm_installs_into_it(testbed: Bed, namespace: str, tmp_path: Path) -> None:
    (tmp_path / "templates").mkdir()
    (tmp_path / "Chart.yaml").write_text("{apiVersion: v2, name: small, version: 0.1.0}")
    content = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "from-chart"}}
    (tmp_path / "templates" / "map.yaml").write_text(json.dumps(content))
    testbed.helm("install", "small", tmp_path, "--namespace", namespace, "--wait")
    assert testbed.get("configmap", "from-chart", "--namespace", namespace)["kind"] == "ConfigMap"


def test_pods_outlive_a_killed_kubelet_and_up_restarts_it(testbed: Bed, namespace: str) -> None:
    testbed.apply(pod(namespace, "steady", pod_spec("sleep", "600")))
    before = phase(testbed, namespace, "steady", "Running")["status"]["containerStatuses"][0]["containerID"]
    testbed.kill("kubelet")
    testbed.restart(whole_bed.Wanted())
    after = phase(testbed, namespace, "steady", "Running")["status"]["containerStatuses"][0]
    assert (after["containerID"], after["restartCount"]) == (before, 0)


def test_a_second_test_bed_is_rejected(testbed: Bed, tmp_path: Path) -> None:
    with pytest.raises(Rejected, match="make cluster-down"):
        machine.check(State(tmp_path / "second"))


@pytest.mark.parametrize("alive", [True, False])
def test_a_bed_of_another_checkout_is_replaced_when_all_of_it_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alive: bool
) -> None:
    """What a killed session leaves must not block the next one. The machine's settings are not touched: they are the
    real bed's."""
    restored: list[State] = []
    monkeypatch.setattr(machine, "check", lambda state: None)
    monkeypatch.setattr(machine, "restore", restored.append)
    monkeypatch.setattr(whole_bed, "_start", lambda state, wanted: None)
    state = State(tmp_path / "bed")
    for folder in (state.logs, state.processes):
        folder.mkdir(parents=True)
    state.machine.write_text("{}")
    state.checkout.symlink_to(tmp_path / "elsewhere")
    process = processes.start(state, "kubelet", ["sleep", "60"])
    try:
        if alive:
            with pytest.raises(Failed, match="make cluster-down"):
                whole_bed.up(state, whole_bed.Wanted())
        else:
            processes.kill(process.pid, process.start_ticks)
            whole_bed.up(state, whole_bed.Wanted())
            assert state.checkout.resolve() == REPOSITORY
        assert restored == ([] if alive else [state])
        assert process.alive is alive
    finally:
        processes.end(state, process)


def test_a_process_that_took_over_a_recorded_id_is_left_alone(tmp_path: Path) -> None:
    state = State(tmp_path)
    for folder in (state.logs, state.processes):
        folder.mkdir()
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        ours = processes.start(state, "ours", ["sleep", "60"])
        processes.end(state, replace(ours, pid=stranger.pid, start_ticks=ours.start_ticks + 1))
        assert stranger.poll() is None
        assert ours.alive
        processes.end(state, ours)
        assert not ours.alive
    finally:
        stranger.kill()
        stranger.wait()


def test_wait_fails_early_when_the_process_it_depends_on_is_dead(tmp_path: Path) -> None:
    state = State(tmp_path)
    for folder in (state.logs, state.processes):
        folder.mkdir()
    broken = processes.start(state, "broken", ["sh", "-c", "echo no such flag; exit 1"])
    started = time.monotonic()
    with pytest.raises(processes.Failed, match="no such flag"):
        processes.wait_until("readiness", lambda: False, 60, broken)
    assert time.monotonic() - started < 30
