"""What pods request of nodes, as the scheduler counts it, and what storage drivers can still make."""

from __future__ import annotations

from typing import Any

import pytest

from spillway.placement.cluster_view import NodeView, Requests
from spillway.units import GIB
from spillway_operator.measured.pod_requests import (
    project_capacity,
    project_requests,
    read_count,
    requests_of,
    sums,
    volumes_of,
)

GPU = "nvidia.com/gpu"


def container(restart: str = "", **requests: str) -> dict[str, Any]:
    named = {name.replace("_", "-") if name != "gpu" else GPU: count for name, count in requests.items()}
    return {"resources": {"requests": named}} | ({"restartPolicy": restart} if restart else {})


def pod(node: str, owner: str = "", uid: str = "", **requests: str) -> dict[str, Any]:
    owners = [{"kind": owner, "controller": True, "uid": "u", "name": "n"}] if owner else []
    labels = {"spillway.dev/job-uid": uid} if uid else {}
    return {
        "metadata": {"name": "pod", "ownerReferences": owners, "labels": labels},
        "spec": {"nodeName": node, "containers": [container(**requests)]},
    }


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, Requests()),
        ({"containers": [container(cpu="500m", memory="1Gi"), container(cpu="1", gpu="2")]},
         Requests(1.5, GIB, 0, {GPU: 2})),
        ({"containers": [container(cpu="1")], "initContainers": [container(cpu="3", memory="2Gi")]},
         Requests(3.0, 2 * GIB)),
        ({"containers": [container(cpu="1")],
          "initContainers": [container("Always", cpu="1"), container(cpu="2"), container("Always", cpu="1")]},
         Requests(3.0)),
        ({"containers": [container(cpu="1")], "overhead": {"memory": "1Gi", "cpu": "250m"}}, Requests(1.25, GIB)),
        ({"containers": [container(cpu="1", ephemeral_storage="1Gi")], "resources": {"requests": {"cpu": "4"}}},
         Requests(4.0, 0, GIB)),
        ({"containers": [container(cpu="many", memory="-1", hugepages_2Mi="1Gi")]}, Requests()),
        ({"containers": [{"resources": None}, {}]}, Requests()),
    ],
)  # fmt: skip
def test_a_pod_is_counted_as_the_scheduler_counts_it(spec: dict[str, Any], expected: Requests) -> None:
    assert requests_of(spec) == expected


def test_daemons_leave_less_to_allocate_and_other_pods_less_that_is_free() -> None:
    found = sums(
        map(
            project_requests,
            [
                pod("a", "DaemonSet", memory="1Gi"),
                pod("a", "Node", memory="2Gi"),
                pod("a", "ReplicaSet", memory="4Gi", gpu="1"),
                pod("a", memory="8Gi"),
                pod("a", "Job", "uid-1", gpu="2"),
                pod("a", "Job", "uid-2", gpu="3"),
                pod("b", "Job", "uid-2", gpu="4"),
            ],
        )
    )
    view = found.on(NodeView("a", {}, (), 8.0, 64 * GIB, 100 * GIB, {GPU: 8}))
    assert view.allocatable_memory_bytes == 61 * GIB
    assert view.others == Requests(0.0, 12 * GIB, 0, {GPU: 1})
    assert view.beside_others.allocatable_devices == {GPU: 7}
    assert found.ours_by_node("uid-1") == {"a": Requests(devices={GPU: 3}), "b": Requests(devices={GPU: 4})}
    assert found.ours_by_node("other")["a"].devices == {GPU: 5}
    empty = found.on(NodeView("c", {}, (), 8.0, 64 * GIB, 100 * GIB, {}))
    assert (empty.others, empty.allocatable_memory_bytes) == (Requests(), 64 * GIB)


def test_a_node_is_never_less_than_empty() -> None:
    view = NodeView("a", {}, (), 1.0, GIB, GIB, {GPU: 1}).without(Requests(9.0, 9 * GIB, 9 * GIB, {GPU: 9}))
    assert (view.allocatable_cores, view.allocatable_memory_bytes, view.allocatable_ephemeral_bytes) == (0.0, 0, 0)
    assert view.allocatable_devices == {GPU: 0}


@pytest.mark.parametrize(
    ("topology", "matches"),
    [
        (None, False),
        ({}, True),
        ({"matchLabels": {"zone": "a"}}, True),
        ({"matchLabels": {"zone": "b"}}, False),
        ({"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a", "b"]}]}, True),
        ({"matchExpressions": [{"key": "zone", "operator": "NotIn", "values": ["a"]}]}, False),
        ({"matchExpressions": [{"key": "rack", "operator": "Exists"}]}, False),
        ({"matchExpressions": [{"key": "rack", "operator": "DoesNotExist"}]}, True),
        ({"matchExpressions": [{"key": "zone", "operator": "Gt", "values": ["0"]}]}, False),
    ],
)
def test_a_storage_capacity_counts_for_the_nodes_of_its_topology(topology: Any, matches: bool) -> None:
    found = {"storageClassName": "fast", "capacity": "10Gi", "nodeTopology": topology}
    assert volumes_of({"zone": "a"}, [project_capacity(found)]) == {"fast": 10 * GIB if matches else 0}


def test_largest_volume_goes_before_capacity_and_the_largest_of_several_counts() -> None:
    few = project_capacity({"storageClassName": "s", "capacity": "9Gi", "maximumVolumeSize": "3Gi", "nodeTopology": {}})
    some = project_capacity({"storageClassName": "s", "capacity": "5Gi", "nodeTopology": {}})
    unknown = project_capacity({"storageClassName": "t", "nodeTopology": {}})
    assert volumes_of({}, [some, few, unknown]) == {"s": 5 * GIB, "t": 0}
    assert volumes_of({}, []) == {}


def test_a_quantity_that_is_none_is_nothing() -> None:
    assert [read_count(text) for text in ("1Ki", None, "x", 7)] == [1024, None, None, 7]
