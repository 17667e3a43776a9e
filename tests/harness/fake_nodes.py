"""Fake nodes that a test creates for itself and KWOK simulates, in pools that jobs select."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from testbed.fake_nodes import OWNED, TAINT

from .installed import Document, Installed, on_fake_nodes

POOL = "capacity-test"
GPU = "nvidia.com/gpu"
PRODUCTS = {"h100": ("NVIDIA-H100-80GB-HBM3", "81559"), "a100": ("NVIDIA-A100-SXM4-40GB", "40441")}


def node(name: str, pool: str, product: str = "", **capacity: str) -> Document:
    """A fake node; with a product, it has 8 GPUs of that product."""
    labels = {"type": "kwok", POOL: pool, "kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
    has = {"cpu": "96", "memory": "1Ti", "ephemeral-storage": "4Ti", "pods": "110"} | capacity
    if product:
        labels |= dict(zip(("nvidia.com/gpu.product", "nvidia.com/gpu.memory"), PRODUCTS[product], strict=True))
        has[GPU] = "8"
    return {
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name, "annotations": dict([OWNED]), "labels": labels},
        "spec": {"taints": [TAINT]}, "status": {"capacity": has, "allocatable": has},
    }  # fmt: skip


def reserved(name: str, pool: str, **capacity: str) -> Document:
    """A fake node whose taint only jobs from `on_reserved` tolerate: tests that run at the same time cannot use it."""
    found = node(name, pool, **capacity)
    found["spec"]["taints"] = [*found["spec"]["taints"], {"key": POOL, "value": pool, "effect": "NoSchedule"}]
    return found


def on_reserved(job: Document, pool: str) -> Document:
    job = on_fake_nodes(job)
    scheduling = job["spec"]["scheduling"]
    scheduling["nodeSelector"] = {**scheduling["nodeSelector"], POOL: pool}
    scheduling["tolerations"] = [*scheduling["tolerations"], {"key": POOL, "operator": "Equal", "value": pool}]
    return job


def nodes_of(spillway: Installed, found: list[Document], what: Any) -> Iterator[Any]:
    """Yields `what` while the nodes `found` exist: creates them before, and deletes them afterwards."""
    spillway.bed.apply(*found)
    names = [each["metadata"]["name"] for each in found]
    try:
        for name in names:
            spillway.bed.kubectl("wait", "--for=condition=Ready", f"node/{name}", "--timeout=60s")
        yield what
    finally:
        spillway.bed.kubectl("delete", "node", *names, "--wait=false")
