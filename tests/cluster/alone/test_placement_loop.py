"""Measured memory decides where the next job goes: the whole loop, seen through `kubectl describe`.

NodeProfiles make two KWOK nodes equal. At the addresses of their node exporters' pods, where KWOK runs nothing, real
exporters serve the figures that a test gives them in a /proc, a drive and a fake NVML.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from fakes.node_readings import FakeGpu, FakeNvml, write_proc
from harness.installed import (
    LONG,
    SYSTEM_NAMESPACE,
    WANTED,
    Document,
    Installed,
    OperatorImage,
    changed,
    example,
    install,
    named,
    on_fake_nodes,
)
from harness.patience import wait_until
from spillway.metrics import (
    NODE_DEVICE_FREE,
    NODE_DISK_FREE,
    NODE_MEMORY_AVAILABLE,
    NODE_MEMORY_TOTAL,
    OPERATOR_LEADER,
    OPERATOR_METRICS_AGE,
)
from spillway.units import GIB, MIB, format_bytes
from spillway_operator.node_exporter.__main__ import NodeExporter
from spillway_operator.node_exporter.host import Drive
from testbed.layout import BRIDGE, NODE
from testbed.processes import run

NODES = ("fake-000", "fake-001")
LABEL = "placement-loop"
EXPORTERS = "app.kubernetes.io/name=spillway-node-exporter"
FREE_BYTES = 6 * 2**30
FRESH_SECONDS = 120.0
WITHOUT_PROMETHEUS = ("prometheus.url=",)
MOST_RESIDENT_BYTES = 40 * MIB


@dataclass(frozen=True, slots=True)
class Free:
    host: int = FREE_BYTES
    disk: int = 200 * GIB
    device: int = 80 * GIB


class Exporter:
    """A real node exporter for a fake node, and the sources that it reads."""

    def __init__(self, node: str, address: str, folder: Path) -> None:
        self._proc, self._drive, self._address = folder / "proc", folder / "drive", f"{address}/32"
        self._gpus = [FakeGpu(f"GPU-{node}-{number}", 0) for number in range(8)]
        self._drive.mkdir(parents=True)
        run(["mount", "-t", "tmpfs", "spill", self._drive])
        run(["ip", "address", "add", self._address, "dev", BRIDGE])
        registry = CollectorRegistry()
        drives = (Drive("/var/lib/kubelet", self._drive),)
        registry.register(NodeExporter(node, drives, self._proc, folder, lambda: FakeNvml(*self._gpus)))
        self.set(Free())
        self._server, _ = start_http_server(9402, address, registry)

    def set(self, free: Free) -> None:
        write_proc(self._proc, free.host)
        run(["mount", "-o", f"remount,size={free.disk}", self._drive])
        for gpu in self._gpus:
            gpu.free = free.device

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        run(["ip", "address", "delete", self._address, "dev", BRIDGE])
        run(["umount", self._drive])


@pytest.fixture(scope="module")
def nodes(
    spillway: Installed, operator_image: OperatorImage, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Exporter]]:
    """Two nodes that differ only in the figures of their exporters."""
    wait_for_empty(spillway)
    install(spillway.bed, operator_image, ())
    pods = spillway.bed.get("pods", "-n", SYSTEM_NAMESPACE, "-l", EXPORTERS)["items"]
    addresses = {pod["spec"]["nodeName"]: pod["status"]["podIP"] for pod in pods}
    found = {name: Exporter(name, addresses[name], tmp_path_factory.mktemp(name)) for name in NODES}
    for name in NODES:
        spillway.bed.kubectl("label", "node", name, f"{LABEL}=yes", "--overwrite")
        profile = {"deviceKind": "Cpu", "numCores": 8, "hostMemory": "16Gi", "nvmeCapacity": "200Gi", "source": "User"}
        spillway.bed.apply(
            {
                "apiVersion": "spillway.dev/v1alpha1", "kind": "NodeProfile", "metadata": {"name": name},
                "spec": profile,
            }
        )  # fmt: skip
    time.sleep(1)
    yield found
    for name, exporter in found.items():
        exporter.close()
        spillway.bed.kubectl("label", "node", name, f"{LABEL}-")
        spillway.bed.kubectl("delete", "nodeprofiles.spillway.dev", name)
    install(spillway.bed, operator_image)


def wait_for_empty(spillway: Installed) -> None:
    """Waits until the nodes have no pods of earlier tests, because the operator counts their reservations."""
    deadline = time.monotonic() + 120
    while any(spillway.bed.get("pods", "-A", "--field-selector", f"spec.nodeName={name}")["items"] for name in NODES):
        assert time.monotonic() < deadline, "pods of earlier tests stay on the fake nodes"
        time.sleep(0.5)


@pytest.fixture(scope="module")
def measured_bytes(spillway: Installed, module_namespace: str) -> int:
    """Working set of a real trainer on the real node, measured by the kubelet."""
    job = named(example("one-pod", module_namespace, checkpoint__claim=None, training__steps=LONG), "measured")
    spillway.create(job)
    spillway.until(lambda job: job["status"].get("progress", {}).get("step", 0) > 5, module_namespace, "measured")
    deadline = time.monotonic() + FRESH_SECONDS
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
def placed(spillway: Installed, namespace: str, name: str, **changes: object) -> Iterator[Document]:
    """Creates a job on the two nodes and yields it once it runs; deletes it at the end, so that it reserves nothing."""
    job = example("one-pod", namespace, checkpoint__claim=None, scheduling={"nodeSelector": {LABEL: "yes"}})
    spillway.create(on_fake_nodes(named(changed(job, namespace, **changes), name)))
    try:
        yield spillway.until(lambda job: job["status"].get("state") == "Running", namespace, name)
    finally:
        spillway.bed.kubectl("delete", "trainingjobs.spillway.dev", name, "-n", namespace)


def set_free(spillway: Installed, nodes: dict[str, Exporter], free: dict[str, Free]) -> None:
    """Publishes figures, and waits until Prometheus has them and the leader has read them after that."""
    for name, figures in free.items():
        nodes[name].set(figures)
    deadline = time.monotonic() + FRESH_SECONDS
    wanted = {
        (name, metric): value
        for name, figures in free.items()
        for metric, value in (
            (NODE_MEMORY_AVAILABLE, figures.host), (NODE_DISK_FREE, figures.disk), (NODE_DEVICE_FREE, figures.device),
        )
    }  # fmt: skip
    while time.monotonic() < deadline:
        seen = {
            (sample.labels.get("node"), metric): sample.value
            for metric in (NODE_MEMORY_AVAILABLE, NODE_DISK_FREE, NODE_DEVICE_FREE)
            for sample in spillway.bed.query(metric.name)
        }
        if wanted.items() <= seen.items():
            until_read_after(spillway, time.time())
            return
        time.sleep(0.5)
    raise AssertionError(f"Prometheus shows {seen}")


def until_read_after(spillway: Installed, moment: float) -> None:
    """Waits until the leader has made a reading that began after `moment`, in Unix seconds."""
    age = OPERATOR_METRICS_AGE.name
    query = f"timestamp({age}) - {age} > {moment} and on (pod) {OPERATOR_LEADER.name} == 1"
    wait_until(lambda: bool(spillway.bed.query(query)), why=lambda: "no reading", seconds=FRESH_SECONDS, pause=0.5)


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
    spillway: Installed, nodes: dict[str, Exporter], measured_bytes: int, namespace: str
) -> None:
    first, second = NODES
    print(f"\nmeasured working set of a real trainer: {measured_bytes / 2**20:.0f} MiB")
    set_free(spillway, nodes, {first: Free(), second: Free()})
    with placed(spillway, namespace, "control") as job:
        assert set(job["status"]["plan"]["nodes"]) == set(NODES), "equal nodes: no preference is invented"
        describe(spillway, namespace, "control")

    for name, full, free in (("moved", first, second), ("moved-back", second, first)):
        set_free(spillway, nodes, {full: Free(host=FREE_BYTES - measured_bytes), free: Free()})
        with placed(spillway, namespace, name) as job:
            assert job["status"]["plan"]["nodes"][0] == free
            assert node_of(spillway, namespace, name) == free
            shown = describe(spillway, namespace, name)
            assert f"{full} {format_bytes(FREE_BYTES - measured_bytes)}" in shown, shown[:3000]
            available = spillway.condition(namespace, name, "MetricsAvailable")
            assert available["status"] == "True", available


SPILLING = {
    "budget": {"device": "34Mi", "host": "128Mi", "nvme": "256Mi"},
    "advanced": {"optimizer": {"placement": "Host"}, "activations": {"policy": "Nvme"}},
}
ON_A_GPU = {
    "parallelism": {"device": "Cuda", "devicesPerNode": 1}, "training__globalBatchSize": 64, "memory": {"mode": "Auto"},
}  # fmt: skip
FIGURES = {
    "host": (Free(), Free(host=FREE_BYTES // 2), FREE_BYTES // 2, {}),
    "disk": (Free(disk=400 * MIB), Free(disk=40 * MIB), 40 * MIB, {"memory": SPILLING}),
    "device": (Free(host=900 * GIB), Free(host=900 * GIB, device=2 * GIB), 2 * GIB, ON_A_GPU),
}
"""figure -> free bytes of the better and of the worse node, the figure in the reason for the worse one, and changes of
the job that make it relevant"""


@pytest.mark.parametrize("source", ["Scrape", "Prometheus"])
def test_each_figure_of_a_node_moves_the_next_job(
    spillway: Installed,
    operator_image: OperatorImage,
    nodes: dict[str, Exporter],
    namespace: str,
    source: str,
) -> None:
    install(spillway.bed, operator_image, () if source == "Prometheus" else WITHOUT_PROMETHEUS)
    spillway.leader()
    first, second = NODES
    for what, (better, worse, said, changes) in FIGURES.items():
        for name, full, free in ((f"{what}-moved", first, second), (f"{what}-moved-back", second, first)):
            set_free(spillway, nodes, {full: worse, free: better})
            with placed(spillway, namespace, name, **changes) as job:
                shown = describe(spillway, namespace, name)
                assert (job["status"]["plan"]["nodes"][0], node_of(spillway, namespace, name)) == (free, free), shown
                assert f"{full} {format_bytes(said)}" in shown, shown[:3000]
                assert job["status"]["plan"]["metricsSource"] == source
                assert spillway.condition(namespace, name, "MetricsAvailable")["status"] == "True"


def test_the_exporter_of_a_real_node_says_what_it_has_and_is_small(spillway: Installed) -> None:
    pods = spillway.bed.get("pods", "-n", SYSTEM_NAMESPACE, "-l", EXPORTERS)["items"]
    (pod,) = (pod["metadata"]["name"] for pod in pods if pod["spec"]["nodeName"] == NODE)
    page = f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods/{pod}:9402/proxy/metrics"
    samples: list[Sample] = []

    def agrees() -> bool:
        """Whether its memory is that of this machine; a busy machine's may have changed by more in between."""
        families = text_string_to_metric_families(spillway.bed.kubectl("get", "--raw", page))
        samples[:] = [sample for family in families for sample in family.samples]
        found = {sample.name: sample.value for sample in samples}
        known = Path("/proc/meminfo").read_text(encoding="ascii").split()
        total, available = (int(known[known.index(name) + 1]) * 1024 for name in ("MemTotal:", "MemAvailable:"))
        assert found[NODE_MEMORY_TOTAL.name] == total
        return bool(found[NODE_MEMORY_AVAILABLE.name] == pytest.approx(available, rel=0.02))

    wait_until(agrees, why=lambda: str(samples), pause=0.5)
    assert {sample.labels["node"] for sample in samples} == {NODE}
    (disk,) = (sample for sample in samples if sample.name == NODE_DISK_FREE.name)
    assert disk.labels["mountpoint"] == "/var/lib/kubelet" and disk.value > 0
    status = Path(f"/proc/{spillway.bed.container_process(SYSTEM_NAMESPACE, pod)}/status").read_text(encoding="ascii")
    resident = int(status.split("VmRSS:")[1].split()[0]) * 1024
    print(f"\nresident memory of the node exporter: {resident / MIB:.1f} MiB")
    assert resident <= MOST_RESIDENT_BYTES


def test_without_prometheus_jobs_start_all_the_same(
    spillway: Installed, nodes: dict[str, Exporter], namespace: str
) -> None:
    spillway.bed.kill("prometheus")
    try:
        with placed(spillway, namespace, "blind") as job:
            assert job["status"]["state"] == "Running"
            print("\n", job["status"]["plan"]["reason"])
    finally:
        spillway.bed.restart(WANTED)
