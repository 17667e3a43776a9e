"""Every question of placement.node_signals, answered by Prometheus's own engine from the node exporter's own page."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from fakes.node_readings import FakeGpu, FakeNvml, write_proc
from harness.built_programs import built_program
from spillway.placement import node_signals
from spillway.units import GIB, MIB

pytest.importorskip("spillway_operator.node_exporter.__main__", reason="needs the extra [operator]")
from spillway_operator.node_exporter.__main__ import NodeExporter
from spillway_operator.node_exporter.host import Drive, drive_samples

PROMTOOL = built_program("promtool", otherwise="promtool")
pytestmark = pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool: `make cluster-up` builds it, and Debian's package prometheus has one"
)
EMPTY_DIRS = "/var/lib/kubelet"
Answer = tuple[dict[str, str], float]


@pytest.fixture
def page(tmp_path: Path) -> str:
    """Of a node with 7 GiB free, two GPUs, one of them in two instances, and this machine's root as its drive."""
    gpus = (FakeGpu("GPU-0", 70 * GIB), FakeGpu("GPU-1", 0, instances=((1, 5 * GIB), (2, 6 * GIB))))
    drives = (Drive(EMPTY_DIRS, Path("/")), Drive("/mnt/a", Path("/"), "fast"))
    proc = write_proc(tmp_path / "proc", 7 * GIB)
    registry = CollectorRegistry()
    registry.register(NodeExporter("node-a", drives, proc, tmp_path, lambda: FakeNvml(*gpus)))
    return generate_latest(registry).decode()


def promtool(*arguments: str | Path, stdin: str = "") -> None:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, *arguments], input=stdin, capture_output=True, text=True, check=False, timeout=120
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def answers(folder: Path, page: str, others: dict[str, str], expected: dict[str, Sequence[Answer]]) -> None:
    """Asserts what each question is answered, from a page and series of other exporters (as promtool writes them)."""
    series = dict(others)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items() if value)
            growth = 3 if family.type == "counter" else 0
            series[f"{sample.name}{{{labels}}}"] = f"{sample.value:.0f}+{growth}x20"
    asked: list[dict[str, Any]] = [
        {
            "expr": question, "eval_time": "5m",
            "exp_samples": [
                {"labels": "{" + ",".join(f'{n}="{v}"' for n, v in labels.items()) + "}", "value": value}
                for labels, value in found
            ],
        }
        for question, found in expected.items()
    ]  # fmt: skip
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    tests = {"tests": [{"interval": "30s", "input_series": inputs, "promql_expr_test": asked}]}
    (folder / "tests.yaml").write_text(json.dumps(tests), encoding="utf-8")
    promtool("test", "rules", folder / "tests.yaml")


def device(gpu: str, instance: str = "") -> dict[str, str]:
    found = {"node": "node-a", "gpu": gpu, "UUID": f"GPU-{gpu}", "GPU_I_ID": instance}
    return {name: value for name, value in found.items() if value}


def disk_free(page: str) -> float:
    """As the page says it: this machine's disk changes."""
    (family,) = (one for one in text_string_to_metric_families(page) if one.name == node_signals.NODE_DISK_FREE.name)
    return next(sample.value for sample in family.samples if not sample.labels["storage_class"])


def test_prometheus_reads_the_page_without_a_complaint(page: str) -> None:
    promtool("check", "metrics", stdin=page)


def test_the_exporter_alone_answers_every_question(page: str, tmp_path: Path) -> None:
    free = disk_free(page)
    assert any(metric is node_signals.NODE_DISK_FREE for metric, *_ in drive_samples(Drive("/", Path("/")), tmp_path))
    answers(tmp_path, page, {}, {
        node_signals.host_free_bytes(): [({"node": "node-a"}, 7 * GIB)],
        node_signals.device_free_bytes(): [
            (device("0"), 70 * GIB), (device("1", "1"), 5 * GIB), (device("1", "2"), 6 * GIB),
        ],
        f"round({node_signals.disk_free_bytes()}, {MIB})": [
            ({"node": "node-a", "mountpoint": EMPTY_DIRS}, round(free / MIB) * MIB),
            ({"node": "node-a", "mountpoint": "/mnt/a", "storage_class": "fast"}, round(free / MIB) * MIB),
        ],
        f"round({node_signals.memory_stalled()}, 0.001)": [({"node": "node-a"}, 0.1)],
    })  # fmt: skip


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_where_another_exporter_speaks_of_the_same_thing_the_worse_figure_counts(
    page: str, tmp_path: Path, factor: float
) -> None:
    """Their series have exactly our labels here: `or` alone would hide the second."""
    others = {
        'node_memory_MemAvailable_bytes{node="node-a"}': f"{int(7 * GIB * factor)}+0x20",
        'DCGM_FI_DEV_FB_FREE{node="node-a",gpu="0",UUID="GPU-0"}': f"{int(70 * 1024 * factor)}+0x20",
        'node_pressure_memory_stalled_seconds_total{node="node-a"}': f"0+{3 * factor}x20",
    }
    least = min(1.0, factor)
    answers(tmp_path, page, others, {
        node_signals.host_free_bytes(): [({"node": "node-a"}, 7 * GIB * least)],
        f"min({node_signals.device_free_bytes()} > {6 * GIB})": [({}, 70 * GIB * least)],
        f"round({node_signals.memory_stalled()}, 0.001)": [({"node": "node-a"}, 0.1 * max(1.0, factor))],
    })  # fmt: skip


def test_further_matchers_leave_out_other_clusters(page: str, tmp_path: Path) -> None:
    others = {'node_memory_MemAvailable_bytes{node="node-a",cluster="b"}': "5+0x20"}
    answers(tmp_path, page, others, {
        node_signals.host_free_bytes('cluster="b"'): [({"node": "node-a"}, 5)],
        node_signals.host_free_bytes('cluster=""'): [({"node": "node-a"}, 7 * GIB)],
        node_signals.memory_stalled('cluster="b"'): [],
    })  # fmt: skip
