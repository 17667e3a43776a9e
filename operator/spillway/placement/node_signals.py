"""The Prometheus series and PromQL queries about nodes.

The operator asks it (spillway_operator.measured.metrics_source) and the chart records it (charts/recording_rules.py),
so that promtool's tests of the rules are tests of the operator's questions, too.

Whose a series is says its label `node`, which the scrape configuration sets from the target. What a payload claims
(`Hostname` and `hostname` of dcgm-exporter, `exported_node`) names nobody.
"""

from __future__ import annotations

HOST_SERIES = "node_memory_MemAvailable_bytes"
DISK_SERIES = "node_filesystem_avail_bytes"
DEVICE_SERIES = "DCGM_FI_DEV_FB_FREE"
"""MiB"""
STALLED_SERIES = "node_pressure_memory_stalled_seconds_total"
"""PSI "full": seconds in which every task that could run waited for memory"""
MOUNT_POINTS = ("/var/lib/kubelet", "/")
"""Where emptyDirs are: the first of these that is a file system of its own."""
OLDEST_SAMPLE_SECONDS = 120
"""Prometheus answers with samples that are up to five minutes old; those of a node that is not scraped are left out"""
WITH_NODE = 'node!=""'


def of_nodes(series: str, *matchers: str) -> str:
    """The series that are attributed to a node."""
    return series + "{" + ",".join((WITH_NODE, *matchers)) + "}"


def recent(selector: str) -> str:
    """Samples that are not too old."""
    return f"({selector} and {_is_recent(selector)})"


def recent_rate(selector: str) -> str:
    """Growth per second of counters; of one that is no longer scraped none, though its window still has samples."""
    return f"(rate({selector}[{OLDEST_SAMPLE_SECONDS}s]) and {_is_recent(selector)})"


def _is_recent(selector: str) -> str:
    return f"time() - timestamp({selector}) < {OLDEST_SAMPLE_SECONDS}"


# Of several series of one thing the worst counts: a series too many can make a node less attractive, never more.
HOST_FREE_BYTES = f"min by (node) ({recent(of_nodes(HOST_SERIES))})"
DEVICE_FREE_MEBIBYTES = f"min by (node, gpu, UUID, GPU_I_ID) ({recent(of_nodes(DEVICE_SERIES))})"
"""Of each device, or instance of one (MIG)."""
DISKS = of_nodes(DISK_SERIES, f'mountpoint=~"{"|".join(MOUNT_POINTS)}"')
DISK_FREE_BYTES = f"min by (node, mountpoint) ({recent(DISKS)})"
MEMORY_STALLED = f"max by (node) ({recent_rate(of_nodes(STALLED_SERIES))})"
"""Share of the time."""
