"""The recording rules as code: headroom by node and tier, and pressure, from whatever exporters there are.

    node_tier:spillway_free_bytes:min           free now (device: of the tightest one)
    node_tier:spillway_unrequested_bytes:sum    what the node can allocate less what its pods request; host and nvme
    node_tier:spillway_headroom_bytes:min       the least of both
    node:spillway_unrequested_devices:sum       GPUs that no pod requests
    node:spillway_memory_stalled:rate2m         share of the time in which every task waited for memory (PSI "full")
    node:spillway_memory_waiting:rate2m         ... in which at least one did (PSI "some")
    node:spillway_io_stalled:rate2m             ... in which every task waited for input or output
    namespace_pod:spillway_memory_stalled:rate2m    as of nodes, of trainer pods (the kubelet's cAdvisor)
    namespace_pod:spillway_io_stalled:rate2m
    series:spillway_without_node:count          series that are left out because their target names no node

What is free and what stalls is asked as the operator asks it (placement.node_signals). A series of a node exporter or
of dcgm-exporter belongs to the node that its target names; its own `Hostname` became `hostname` in 2026, and neither
is used. kube-state-metrics and cAdvisor speak of other objects than their target: these are named by `node`,
`namespace` and `pod` where labels of the payload are honoured, else by `exported_node` and so on, and then `node` is
where the exporter itself runs. A trainer's payload is never among them.

`chart_files.py` writes them into the chart, as a rule file that a Prometheus without an operator can load, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spillway.metrics import JOB_LABEL, NODE_IO_STALLED, NODE_MEMORY_STALLED, NODE_MEMORY_WAITING, RANK_UP
from spillway.placement import node_signals as signals
from spillway.plan import Tier

Json = dict[str, Any]

GROUP = "spillway-nodes"
FREE = "node_tier:spillway_free_bytes:min"
UNREQUESTED = "node_tier:spillway_unrequested_bytes:sum"
HEADROOM = "node_tier:spillway_headroom_bytes:min"
UNREQUESTED_DEVICES = "node:spillway_unrequested_devices:sum"
NODE_PRESSURE = {
    "node:spillway_memory_stalled:rate2m": (NODE_MEMORY_STALLED.name, signals.STALLED_SERIES),
    "node:spillway_memory_waiting:rate2m": (NODE_MEMORY_WAITING.name, "node_pressure_memory_waiting_seconds_total"),
    "node:spillway_io_stalled:rate2m": (NODE_IO_STALLED.name, "node_pressure_io_stalled_seconds_total"),
}
"""Of Spillway's node exporter, and of the Prometheus project's."""
POD_PRESSURE = {
    "namespace_pod:spillway_memory_stalled:rate2m": "container_pressure_memory_stalled_seconds_total",
    "namespace_pod:spillway_io_stalled:rate2m": "container_pressure_io_stalled_seconds_total",
}
OF_A_POD = ("namespace", "pod")
OF_A_CONTAINER = ("node", *OF_A_POD, "container")


@dataclass(frozen=True, slots=True)
class Rule:
    record: str
    expression: str
    tier: Tier | None = None
    """a label of what is recorded"""


# --- what is free -----------------------------------------------------------------------------------------------------


def disk_free() -> str:
    """Of the first mount point that a node has as a file system of its own, as the operator takes it."""
    of_mounts = (signals.disk_free_bytes(f'mountpoint="{mount}"') for mount in signals.MOUNT_POINTS)
    return " or ".join(f"min by (node) ({samples})" for samples in of_mounts)


FREE_RULES = (
    Rule(FREE, f"min by (node) ({signals.device_free_bytes()})", Tier.DEVICE),
    Rule(FREE, signals.host_free_bytes(), Tier.HOST),
    Rule(FREE, disk_free(), Tier.NVME),
)

# --- what is requested ------------------------------------------------------------------------------------------------


def not_of_trainers(series: str, *matchers: str) -> str:
    """A trainer could claim to speak of anything; the label is its target's."""
    return series + "{" + ",".join((f'{JOB_LABEL}=""', *matchers)) + "}"


def by_object(samples: str, labels: tuple[str, ...]) -> str:
    """By the labels of the object that the series speak of, whether or not the payload's are honoured."""
    for label in labels:
        samples = f'label_replace({samples}, "{label}", "$1", "exported_{label}", "(.+)")'
    return f"max by ({', '.join(labels)}) ({samples})"  # where several replicas export, one counts


def unrequested(resource: str) -> str:
    """By node: what its pods can have of a resource, less the requests of those that were given to it and live."""
    wanted = f'resource="{resource}"'
    allocatable = by_object(not_of_trainers("kube_node_status_allocatable", wanted), ("node",))
    requests = by_object(not_of_trainers("kube_pod_container_resource_requests", wanted), OF_A_CONTAINER)
    living = by_object(not_of_trainers("kube_pod_status_phase", 'phase=~"Pending|Running"') + " == 1", OF_A_POD)
    # One that waits for a node has no node, and so would take the exporter's.
    scheduled = by_object(not_of_trainers("kube_pod_status_scheduled", 'condition="true"') + " == 1", OF_A_POD)
    requested = f"sum by (node) ({requests} * on (namespace, pod) group_left () ({living} and {scheduled}))"
    return f"{allocatable} - ({requested} or {allocatable} * 0)"


REQUEST_RULES = (
    Rule(UNREQUESTED, unrequested("memory"), Tier.HOST),
    Rule(UNREQUESTED, unrequested("ephemeral_storage"), Tier.NVME),
    Rule(UNREQUESTED_DEVICES, unrequested("nvidia_com_gpu")),
)
HEADROOM_RULE = Rule(HEADROOM, f'min by (node, tier) ({{__name__=~"{FREE}|{UNREQUESTED}"}})')

# --- pressure ---------------------------------------------------------------------------------------------------------


def node_pressure(*sources: str) -> str:
    return signals.worst("max", "node", *(signals.recent_rate(signals.of_nodes(series)) for series in sources))


def pod_pressure(series: str) -> str:
    """Of pods whose ranks are scraped."""
    return f"{by_object(signals.recent_rate(not_of_trainers(series)), OF_A_POD)} and on (namespace, pod) {RANK_UP.name}"


PRESSURE_RULES = (
    *(Rule(record, node_pressure(*sources)) for record, sources in NODE_PRESSURE.items()),
    *(Rule(record, pod_pressure(series)) for record, series in POD_PRESSURE.items()),
)

# --- what is left out -------------------------------------------------------------------------------------------------


def without_node() -> str:
    pressure = (series for _, series in NODE_PRESSURE.values())
    named = "|".join((signals.DEVICE_SERIES, signals.HOST_SERIES, signals.DISK_SERIES, *pressure))
    nowhere = f'{{__name__=~"{named}",node=""}}'
    return f'count by (series) (label_replace({nowhere}, "series", "$1", "__name__", "(.+)"))'


WITHOUT_NODE_RULE = Rule("series:spillway_without_node:count", without_node())

ALL = (*FREE_RULES, *REQUEST_RULES, HEADROOM_RULE, *PRESSURE_RULES, WITHOUT_NODE_RULE)
"""in the order in which they are evaluated: headroom after what it is made of"""


def as_json() -> Json:
    """A rule file, and the spec of a PrometheusRule."""
    rules = [
        {"record": rule.record, "expr": rule.expression} | ({"labels": {"tier": rule.tier.value}} if rule.tier else {})
        for rule in ALL
    ]
    return {"groups": [{"name": GROUP, "rules": rules}]}
