"""Where a script's pods may run: what they ask is in the spec, and nothing is planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cases.job_documents import REMOVED, document
from spillway.api.manifest import validate
from spillway.api.script import ScriptJob
from spillway.placement.cluster_view import ClusterView, LiveBytes, NodeView, Requests
from spillway.placement.place import Placement, Unplaceable, place
from spillway.units import GIB, MIB

GPU = "nvidia.com/gpu"


def script(changes: dict[str, Any] | None = None) -> ScriptJob:
    spec = {"spec.model": REMOVED, "spec.data": REMOVED, "spec.training": REMOVED, "spec.command": ["true"]}
    return validate(ScriptJob, document({**spec, "spec.pod.resources.memory": "4Gi", **(changes or {})}), "script")


def node(name: str, devices: int = 0, **changes: Any) -> NodeView:
    view = NodeView(name, {}, (), 8.0, 16 * GIB, 100 * GIB, {GPU: devices} if devices else {}, others=Requests())
    return replace(view, **changes)


def placed(job: ScriptJob, *nodes: NodeView, **cluster: Any) -> Placement:
    found = place(job, ClusterView(nodes, **cluster))
    assert isinstance(found, Placement), found
    return found


def test_a_pod_asks_what_the_spec_says() -> None:
    pod = placed(script({"spec.memory.budget.nvme": "3Gi", "spec.pod.resources.cpu": 2}), node("a")).pod
    assert (pod.memory_bytes, pod.cpu_cores, pod.devices) == (4 * GIB, 2.0, 0)
    assert (pod.spill_volume_bytes, pod.ephemeral_storage_bytes) == (3 * GIB, 5 * GIB)


def test_scratch_and_a_volume_of_its_own() -> None:
    changes = {
        "spec.memory.budget.nvme": "3Gi", "spec.spill": {"storageClassName": "fast", "numVolumes": 2},
        "spec.pod.resources.scratch": "64Mi",
    }  # fmt: skip
    pod = placed(script(changes), node("a")).pod
    assert (pod.spill_volume_bytes, pod.ephemeral_storage_bytes) == (1536 * MIB, 64 * MIB)


def test_gpus_where_there_are_any() -> None:
    found = placed(script({"spec.parallelism.devicesPerNode": 4}), node("a"), node("b", devices=8))
    assert (found.pod.devices, found.pod.resource_name, found.plan.device) == (4, GPU, "Cuda")
    assert [one.node for one in found.preferences] == ["b"]
    cpu = placed(script({"spec.parallelism.device": "Cpu"}), node("a"), node("b", devices=8))
    assert (cpu.pod.devices, len(cpu.preferences)) == (0, 2)


def test_nodes_where_attempts_failed_are_avoided_and_named() -> None:
    faulty = [f"bad-{number}" for number in range(10)]
    found = placed(script(), node("good"), *map(node, faulty), avoided=frozenset(faulty))
    assert [one.node for one in found.preferences] == ["good"]
    assert found.avoided == tuple(faulty[:8]), "an affinity names a bounded number of nodes"
    assert found.reason.endswith(f"; not on {', '.join(faulty[:8])}, where attempts failed")


def test_the_node_with_most_room_is_preferred() -> None:
    live = {"a": LiveBytes(host=5 * GIB), "b": LiveBytes(host=12 * GIB)}
    nodes = [node(name, live=found) for name, found in live.items()]
    found = placed(script(), *nodes, metrics_age_seconds=1.0, metrics_source="Prometheus")
    assert found.preferences[0].node == "b"
    assert "b" in found.reason


def test_no_node_can_carry_it_says_what_is_missing() -> None:
    found = place(script({"spec.pod.resources.memory": "64Gi"}), ClusterView((node("a"),)))
    assert isinstance(found, Unplaceable)
    assert found.reason == "NoNode"
    assert "a has 16.0 GiB of memory for pods, spec.pod.resources.memory requests 64.0 GiB" in found.message
    cores = place(script({"spec.pod.resources.cpu": 64}), ClusterView((node("a"),)))
    assert isinstance(cores, Unplaceable)
    assert "64 cores" in cores.message


def test_a_declared_class_gets_its_labels() -> None:
    new = node("a new gpu", devices=8, is_declared=True, labels={"pool": "gpu"})
    found = placed(script({"spec.parallelism.device": "Cuda"}), node("a"), declared=(new,))
    assert (found.required_labels, found.preferences) == ({"pool": "gpu"}, ())


def test_without_a_view_of_the_nodes() -> None:
    found = place(script(), ClusterView())
    assert isinstance(found, Placement)
    assert "has no permission to list nodes" in found.reason
