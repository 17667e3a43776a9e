"""Measured memory decides where the next job goes: the whole loop, seen through `kubectl describe`.

Two KWOK nodes that NodeProfiles make equal; a test exporter serves their series to the real Prometheus. What one of
them has less is what a real trainer on the real node was measured to hold.
"""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from harness.installed import LONG, WANTED, Document, Installed, example, named, on_fake_nodes
from spillway.units import format_bytes
from testbed.layout import ADDRESS

NODES = ("fake-000", "fake-001")
LABEL = "placement-loop"
FREE_BYTES = 6 * 2**30
DISK_BYTES = 200 * 2**30
FRESH_SECONDS = 30.0


class NodeSeries:
    """/metrics of one fake node, as node-exporter would write it."""

    def __init__(self) -> None:
        self.free_bytes = FREE_BYTES
        series = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = (
                    f"node_memory_MemAvailable_bytes {series.free_bytes}\n"
                    f'node_filesystem_avail_bytes{{mountpoint="/"}} {DISK_BYTES}\n'
                ).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Nobody reads it."""

        self._server = http.server.ThreadingHTTPServer((ADDRESS, 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"{ADDRESS}:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def nodes(spillway: Installed) -> Iterator[dict[str, NodeSeries]]:
    """Two nodes that only their live memory can tell apart."""
    found = {}
    for name in NODES:
        series = found[name] = NodeSeries()
        spillway.bed.kubectl("label", "node", name, f"{LABEL}=yes", "--overwrite")
        spillway.bed.inject(name, series.address, {"node": name})
        profile = {"deviceKind": "Cpu", "numCores": 8, "hostMemory": "16Gi", "nvmeCapacity": "200Gi", "source": "User"}
        spillway.bed.apply(
            {
                "apiVersion": "spillway.dev/v1alpha1", "kind": "NodeProfile", "metadata": {"name": name},
                "spec": profile,
            }
        )  # fmt: skip
    wait_for_empty(spillway)
    time.sleep(1)
    yield found
    for name, series in found.items():
        series.close()
        spillway.bed.kubectl("label", "node", name, f"{LABEL}-")
        spillway.bed.kubectl("delete", "nodeprofiles.spillway.dev", name)


def wait_for_empty(spillway: Installed) -> None:
    """What jobs of earlier tests left on the nodes is reserved until it is gone."""
    deadline = time.monotonic() + 120
    while any(spillway.bed.get("pods", "-A", "--field-selector", f"spec.nodeName={name}")["items"] for name in NODES):
        assert time.monotonic() < deadline, "pods of earlier tests stay on the fake nodes"
        time.sleep(0.5)


@pytest.fixture(scope="module")
def measured_bytes(spillway: Installed, module_namespace: str) -> int:
    """Working set of a real trainer on the real node, as the kubelet measures it."""
    job = named(example("one-pod", module_namespace, checkpoint__claim=None, training__steps=LONG), "measured")
    spillway.create(job)
    spillway.until(lambda job: job["status"].get("progress", {}).get("step", 0) > 5, module_namespace, "measured")
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        summary = json.loads(spillway.bed.kubectl("get", "--raw", "/api/v1/nodes/node-0/proxy/stats/summary"))
        for pod in summary["pods"]:
            reference = pod["podRef"]
            if reference["namespace"] == module_namespace and "memory" in pod:
                held = int(pod["memory"].get("workingSetBytes", 0))
                if held > 200 * 2**20:
                    spillway.bed.kubectl("delete", "trainingjobs.spillway.dev", "measured", "-n", module_namespace)
                    return held
        time.sleep(1)
    raise AssertionError("the kubelet reported no working set")


@contextmanager
def placed(spillway: Installed, namespace: str, name: str) -> Iterator[Document]:
    """A job on the two nodes, once it runs; deleted afterwards, so that it reserves nothing."""
    job = example("one-pod", namespace, checkpoint__claim=None, scheduling={"nodeSelector": {LABEL: "yes"}})
    spillway.create(on_fake_nodes(named(job, name)))
    try:
        yield spillway.until(lambda job: job["status"].get("state") == "Running", namespace, name, 40)
    finally:
        spillway.bed.kubectl("delete", "trainingjobs.spillway.dev", name, "-n", namespace)


def set_free(spillway: Installed, nodes: dict[str, NodeSeries], free: dict[str, int]) -> None:
    """Publish, and wait until Prometheus has it and the operator's next reading, 2 s apart, must have it, too."""
    for name, free_bytes in free.items():
        nodes[name].free_bytes = free_bytes
    deadline = time.monotonic() + FRESH_SECONDS
    while time.monotonic() < deadline:
        seen = {s.labels.get("node"): s.value for s in spillway.bed.query("node_memory_MemAvailable_bytes")}
        if all(seen.get(name) == free_bytes for name, free_bytes in free.items()):
            time.sleep(5)
            return
        time.sleep(0.5)
    raise AssertionError(f"Prometheus shows {seen}")


def node_of(spillway: Installed, namespace: str, name: str) -> str:
    node: str = spillway.children("pod", namespace, name)[0]["spec"]["nodeName"]
    return node


def describe(spillway: Installed, namespace: str, name: str) -> str:
    text = spillway.bed.kubectl("describe", "trainingjobs.spillway.dev", name, "-n", namespace)
    shown = text[text.index("Status:") :]
    plan = shown[shown.index("  Plan:") :][:1400]
    print(f"\n--- kubectl describe trainingjob {name}\n{plan}")
    return shown


def test_measured_memory_moves_the_next_job_and_the_reason_says_how_much(
    spillway: Installed, nodes: dict[str, NodeSeries], measured_bytes: int, namespace: str
) -> None:
    first, second = NODES
    print(f"\nmeasured working set of a real trainer: {measured_bytes / 2**20:.0f} MiB")
    set_free(spillway, nodes, {first: FREE_BYTES, second: FREE_BYTES})
    with placed(spillway, namespace, "control") as job:
        assert set(job["status"]["plan"]["nodes"]) == set(NODES), "equal nodes: no preference is invented"
        describe(spillway, namespace, "control")

    for name, full, free in (("moved", first, second), ("moved-back", second, first)):
        set_free(spillway, nodes, {full: FREE_BYTES - measured_bytes, free: FREE_BYTES})
        with placed(spillway, namespace, name) as job:
            assert job["status"]["plan"]["nodes"][0] == free
            assert node_of(spillway, namespace, name) == free
            shown = describe(spillway, namespace, name)
            assert f"{full} {format_bytes(FREE_BYTES - measured_bytes)}" in shown, shown[:3000]
            available = spillway.condition(namespace, name, "MetricsAvailable")
            assert available["status"] == "True", available


def test_without_prometheus_jobs_start_all_the_same(
    spillway: Installed, nodes: dict[str, NodeSeries], namespace: str
) -> None:
    spillway.bed.kill("prometheus")
    try:
        with placed(spillway, namespace, "blind") as job:
            assert job["status"]["state"] == "Running"
            print("\n", job["status"]["plan"]["reason"])
    finally:
        spillway.bed.restart(WANTED)
