"""The Prometheus series and PromQL queries about nodes.

The operator sends these queries (spillway_operator.measured.metrics_source) and the chart records their results
(charts/recording_rules.py), so promtool's tests of the rules are also tests of the operator's queries.

Each query is answered by Spillway's own node exporter, by that of the Prometheus project or of NVIDIA, or by both. A
series belongs to the node in its label `node`, which the scrape configuration sets from the target. Names in a payload
(`Hostname` and `hostname` of dcgm-exporter, `exported_node`) are not used.
"""

from __future__ import annotations

from spillway.metrics import NODE_DEVICE_FREE, NODE_DISK_FREE, NODE_MEMORY_AVAILABLE, NODE_MEMORY_STALLED
from spillway.units import MIB

HOST_SERIES = "node_memory_MemAvailable_bytes"
DISK_SERIES = "node_filesystem_avail_bytes"
DEVICE_SERIES = "DCGM_FI_DEV_FB_FREE"
"""In MiB."""
STALLED_SERIES = "node_pressure_memory_stalled_seconds_total"
"""PSI "full": seconds in which every task that could run waited for memory"""
MOUNT_POINTS = ("/var/lib/kubelet", "/")
"""Where emptyDirs are: the first of these that is a file system of its own."""
OLDEST_SAMPLE_SECONDS = 120
"""Samples older than this are left out: Prometheus answers with samples of the last five minutes, even for a node that
is no longer scraped."""
WITH_NODE = 'node!=""'


def of_nodes(series: str, *matchers: str) -> str:
    """Selects the series that are attributed to a node."""
    return series + "{" + ",".join((WITH_NODE, *matchers)) + "}"


def recent(selector: str) -> str:
    """Keeps the samples that are not too old."""
    return f"({selector} and {_is_recent(selector)})"


def recent_rate(selector: str) -> str:
    """Growth of counters per second; none for a counter that is no longer scraped, although its window still has
    samples."""
    return f"(rate({selector}[{OLDEST_SAMPLE_SECONDS}s]) and {_is_recent(selector)})"


def _is_recent(selector: str) -> str:
    return f"time() - timestamp({selector}) < {OLDEST_SAMPLE_SECONDS}"


def worst(operation: str, labels: str, *sources: str) -> str:
    """Takes `min` or `max` over all sources, so that an additional series can only make a node less attractive. Each
    source has a label of its own until then, because `or` drops series whose labels an earlier source also has."""
    grouped = (f"{operation} by ({labels}) ({samples})" for samples in sources)
    marked = (f'label_replace({samples}, "source", "{number}", "", "")' for number, samples in enumerate(grouped))
    return f"{operation} by ({labels}) ({' or '.join(marked)})"


# The queries; `matchers` select further, for example the series of one cluster.


def host_free_bytes(*matchers: str) -> str:
    return worst("min", "node", *(recent(of_nodes(s, *matchers)) for s in (NODE_MEMORY_AVAILABLE.name, HOST_SERIES)))


def device_free_bytes(*matchers: str) -> str:
    """Free bytes of each device, or of each of its MIG instances."""
    theirs = f"{recent(of_nodes(DEVICE_SERIES, *matchers))} * {MIB}"
    labels = ", ".join(("node", *NODE_DEVICE_FREE.labels))
    return worst("min", labels, recent(of_nodes(NODE_DEVICE_FREE.name, *matchers)), theirs)


def disk_free_bytes(*matchers: str) -> str:
    """Free bytes of the file systems where emptyDirs can be, and of the drives of each storage class."""
    theirs = of_nodes(DISK_SERIES, f'mountpoint=~"{"|".join(MOUNT_POINTS)}"', *matchers)
    ours = of_nodes(NODE_DISK_FREE.name, *matchers)
    return worst("min", "node, mountpoint, storage_class", recent(ours), recent(theirs))


def memory_stalled(*matchers: str) -> str:
    """Share of the time in which memory stalls."""
    both = (NODE_MEMORY_STALLED.name, STALLED_SERIES)
    return worst("max", "node", *(recent_rate(of_nodes(series, *matchers)) for series in both))
