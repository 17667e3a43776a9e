"""Nodes that exist in the API only: KWOK reports them Ready and lets their pods run and end."""

from __future__ import annotations

from . import api
from .binaries import STAGES
from .layout import FAKE_POD_RANGE, State
from .node import LEASE_SECONDS
from .processes import start, wait_until

START_SECONDS = 60
TAINT = {"key": "kwok.x-k8s.io/node", "value": "fake", "effect": "NoSchedule"}
"""keeps pods that want to run really away"""
OWNED = ("kwok.x-k8s.io/node", "fake")
CAPACITY = {"cpu": "96", "memory": "1Ti", "ephemeral-storage": "1Ti", "pods": "110", "nvidia.com/gpu": "8"}


def ensure(state: State, count: int) -> None:
    """At least `count` of them, named fake-000 and so on, all Ready."""
    kwok = start(
        state,
        "kwok",
        [
            state.bin / "kwok",
            f"--kubeconfig={state.kubeconfig}",
            f"--config={state.bin / STAGES}",
            f"--manage-nodes-with-annotation-selector={'='.join(OWNED)}",
            f"--node-lease-duration-seconds={LEASE_SECONDS}",
            f"--cidr={FAKE_POD_RANGE}",
            "--node-ip=10.245.255.1",
            "--server-address=127.0.0.1:10247",
        ],
    )
    names = [f"fake-{i:03}" for i in range(count)]
    api.apply(state, [_node(name) for name in names if not api.read(state, f"/api/v1/nodes/{name}")])
    for name in names:
        wait_until(f"node {name}", lambda name=name: api.node_ready(state, name), START_SECONDS, kwok)  # type: ignore[misc]


def _node(name: str) -> dict[str, object]:
    labels = {
        "type": "kwok",
        "kubernetes.io/hostname": name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": dict([OWNED, ("node.alpha.kubernetes.io/ttl", "0")]),
            "labels": {**labels, "nvidia.com/gpu.product": "H100"},
        },
        "spec": {"taints": [TAINT]},
        "status": {"capacity": CAPACITY, "allocatable": CAPACITY},
    }
