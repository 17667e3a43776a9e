"""Where the bytes of a real two-rank pod are: a table that compares plan, exporter, cgroup, kubelet and du.

docs/placement.md documents the table, and explains the figures that differ by more than 5 %.
"""

from __future__ import annotations

import json
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from harness.installed import Installed, example, named
from spillway.api.job_file import JobFile
from spillway.metrics import TIER_PEAK_BYTES
from spillway.plan import MemoryPlan, Tier
from spillway.planning.pod_resources import pod_resources
from spillway.units import MIB

AGREEMENT = 0.05
NUM_RANKS = 2
STEPS = 4000
"""long enough for the kubelet, which looks every 10 s, to see the pod's disk while it trains"""
LEAST_DISK_BYTES = 8 * MIB
"""the least bytes on the pod's disk once the corpus and the slabs exist"""


@pytest.mark.ci
def test_plan_exporter_cgroup_kubelet_and_du_agree(spillway: Installed, namespace: str) -> None:
    job = named(
        example(
            "two-pod", namespace, checkpoint__claim=None, training__steps=STEPS, data__evaluation=None,
            parallelism={"nodes": 1, "devicesPerNode": NUM_RANKS, "device": "Cpu"},
            memory__budget={"device": "34Mi", "host": "256Mi", "nvme": "512Mi"},
        ),
        "accounts",
    )  # fmt: skip
    spillway.create(job)
    spillway.until(lambda job: job["status"].get("progress", {}).get("step", 0) > 20, namespace, "accounts", 120)
    pod = spillway.children("pod", namespace, "accounts")[0]
    contract = spillway.children("configmap", namespace, "accounts")[0]["data"]
    plan = MemoryPlan.model_validate_json(contract["plan.json"])
    resources = pod_resources(JobFile.model_validate_json(contract["job.json"]).spec, plan, NUM_RANKS)

    kubelet = kubelets_view(spillway, namespace, datetime.now(UTC))
    group = memory_group(pod["metadata"]["uid"])
    used, peak = (int((group / f"memory.{name}_in_bytes").read_text("ascii")) for name in ("usage", "max_usage"))
    statistics = dict(line.split() for line in (group / "memory.stat").read_text("ascii").splitlines())
    slab = du(volume(pod["metadata"]["uid"], "spill"))
    selector = f'namespace="{namespace}",training_job="accounts"'
    peaks = {
        (sample.labels["rank"], sample.labels["tier"]): sample.value
        for sample in spillway.bed.query(
            f"max by (rank, tier) (max_over_time({TIER_PEAK_BYTES.name}{{{selector}}}[10m]))"
        )
    }

    rows = [("", "planned", "measured", "ratio")]
    ratios = {}

    def row(name: str, planned: float, measured: float) -> None:
        ratios[name] = measured / planned
        rows.append((name, f"{planned / MIB:.1f}", f"{measured / MIB:.1f}", f"{measured / planned:.3f}"))

    for tier in Tier:
        for rank in range(NUM_RANKS):
            row(f"{tier}, rank {rank}: plan, exporter", plan.bytes[tier].total, peaks[str(rank), tier.value])
    row("slabs on disk: plan, du", NUM_RANKS * plan.slab_bytes(Tier.NVME), slab)
    row("memory of the pod: limit, cgroup peak", resources.memory_bytes, peak)
    row("anonymous memory: cgroup, kubelet", int(statistics["total_rss"]), kubelet["rss"])
    row("working set: cgroup, kubelet", used - int(statistics["total_inactive_file"]), kubelet["working_set"])
    row("disk of the pod: request, kubelet", resources.ephemeral_storage_bytes, kubelet["disk"])
    width = max(len(name) for name, *_ in rows)
    print("\nMiB" + "\n".join(f"{name:{width}} {a:>9} {b:>9} {c:>7}" for name, a, b, c in rows))

    for name, ratio in ratios.items():
        if name.startswith(("slabs", "anonymous", "working set")):
            assert abs(ratio - 1) <= AGREEMENT, (name, ratio)
        else:
            assert ratio <= 1 + AGREEMENT, (name, ratio)
    # Planned bytes that a run need not use: room for copies in flight, which stays empty with fast disks.
    in_flight = {
        Tier.DEVICE: plan.activations.window_bytes,
        Tier.HOST: plan.bytes[Tier.HOST].buffers,
        Tier.NVME: 0,
    }
    for (rank, tier), measured in peaks.items():
        planned = plan.bytes[Tier(tier)].total
        assert measured >= (planned - in_flight[Tier(tier)]) * (1 - AGREEMENT), (rank, tier, measured, planned)


def kubelets_view(spillway: Installed, namespace: str, since: datetime) -> dict[str, int]:
    """Figures of /stats/summary for the only pod of the namespace, once the kubelet has seen its disk, and its memory
    after `since`: figures can be ten seconds old, from a trainer that was still importing its libraries."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        summary = json.loads(spillway.bed.kubectl("get", "--raw", "/api/v1/nodes/node-0/proxy/stats/summary"))
        for found in summary["pods"]:
            disk = int(found.get("ephemeral-storage", {}).get("usedBytes", 0))
            if found["podRef"]["namespace"] == namespace and disk > 2 * LEAST_DISK_BYTES:
                memory: dict[str, Any] = found["memory"]
                if datetime.fromisoformat(memory["time"]) < since:
                    break
                return {
                    "working_set": int(memory["workingSetBytes"]), "rss": int(memory["rssBytes"]),
                    "disk": disk,
                }  # fmt: skip
        time.sleep(1)
    raise AssertionError("the kubelet did not report the pod's disk within 60 s")


def memory_group(uid: str) -> Path:
    """The pod's memory cgroup (version 1)."""
    return next(Path("/sys/fs/cgroup/memory/kubepods").rglob(f"pod{uid}"))


def volume(uid: str, name: str) -> Path:
    from testbed.layout import state

    return next(state().root.rglob(f"pods/{uid}/volumes/kubernetes.io~empty-dir/{name}"))


def du(folder: Path) -> int:
    listed = subprocess.run(["du", "-s", "-B1", str(folder)], capture_output=True, text=True, check=True).stdout
    return int(listed.split()[0])
