"""Requests of the pods on each node, and volumes that storage drivers can still make for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeVar

from spillway.placement.cluster_view import NO_REQUESTS, NodeView, Requests
from spillway.units import parse_cores, parse_quantity

from ..decide.manifests import JOB_UID_LABEL
from ..kube.store import controller

ON_NODES = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
"""Field selector of pods that have a node and have not ended, and so hold what they request."""
OF_EVERY_NODE = ("DaemonSet", "Node")
"""Kinds of owners whose pods stay as long as the node: daemons and static pods."""

N = TypeVar("N", int, float)
Found = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PodRequests:
    """One pod that has a node."""

    node: str
    requests: Requests
    job_uid: str
    """Uid of its TrainingJob; empty: it belongs to none."""
    stays: bool
    """Whether it stays as long as the node."""


@dataclass(frozen=True, slots=True)
class RequestsByNode:
    """Sums of the requests of all pods, by node."""

    daemons: Mapping[str, Requests] = field(default_factory=dict)
    others: Mapping[str, Requests] = field(default_factory=dict)
    """Requests of pods that are neither daemons nor ours."""
    ours: Mapping[str, Mapping[str, Requests]] = field(default_factory=dict)
    """Uid of the TrainingJob -> node -> sum."""
    all_ours: Mapping[str, Requests] = field(default_factory=dict)
    """Node -> sum of the requests of all TrainingJobs' pods."""

    def on(self, view: NodeView) -> NodeView:
        """The node with the requests of all its pods."""
        others, ours = (found.get(view.name, NO_REQUESTS) for found in (self.others, self.all_ours))
        return replace(view.without(self.daemons.get(view.name, NO_REQUESTS)), others=others, ours=ours)

    def ours_by_node(self, without_uid: str) -> Mapping[str, Requests]:
        """Node -> sum of the requests of all TrainingJobs' pods, except those of one job."""
        own = self.ours.get(without_uid, {})
        besides = [nodes for uid, nodes in self.ours.items() if uid != without_uid] if own else []
        return {
            **self.all_ours,
            **{node: sum((each.get(node, NO_REQUESTS) for each in besides), NO_REQUESTS) for node in own},
        }


def sums(pods: Iterable[PodRequests]) -> RequestsByNode:
    daemons: dict[str, Requests] = {}
    others: dict[str, Requests] = {}
    ours: dict[str, dict[str, Requests]] = {}
    all_ours: dict[str, Requests] = {}
    for pod in pods:
        to = ours.setdefault(pod.job_uid, {}) if pod.job_uid else daemons if pod.stays else others
        to[pod.node] = to.get(pod.node, NO_REQUESTS) + pod.requests
        if pod.job_uid:
            all_ours[pod.node] = all_ours.get(pod.node, NO_REQUESTS) + pod.requests
    return RequestsByNode(daemons, others, ours, all_ours)


def project_requests(found: Found) -> PodRequests:
    """A Pod as the API server sent it. Anybody may set our label: it only says to which job the requests belong."""
    metadata, spec = found["metadata"], found.get("spec") or {}
    return PodRequests(
        node=str(spec.get("nodeName") or ""),
        requests=requests_of(spec),
        job_uid=str((metadata.get("labels") or {}).get(JOB_UID_LABEL, "")),
        stays=controller(metadata).get("kind") in OF_EVERY_NODE,
    )


def requests_of(spec: Found) -> Requests:
    """Returns what the scheduler counts: the largest of all containers together and of each init container with the
    sidecars before it, plus the pod's overhead. Requests of the pod itself replace those of its containers."""
    running = beside = NO_REQUESTS
    starting = list[Requests]()
    for container in spec.get("initContainers") or ():
        own = _requests((container.get("resources") or {}).get("requests"))
        starting.append(beside + own)
        if container.get("restartPolicy") == "Always":
            beside += own
    for container in spec.get("containers") or ():
        running += _requests((container.get("resources") or {}).get("requests"))
    found = _largest([running + beside, *starting])
    named = (spec.get("resources") or {}).get("requests")
    if named:
        whole = _requests(named)
        found = replace(
            found,
            cores=whole.cores if "cpu" in named else found.cores,
            memory_bytes=whole.memory_bytes if "memory" in named else found.memory_bytes,
        )
    return found + _requests(spec.get("overhead"))


def _largest(found: list[Requests]) -> Requests:
    return Requests(
        max(one.cores for one in found),
        max(one.memory_bytes for one in found),
        max(one.ephemeral_bytes for one in found),
        {
            name: max(one.devices.get(name, 0) for one in found)
            for name in {key for one in found for key in one.devices}
        },
    )


def _requests(found: Found | None) -> Requests:
    found = found or {}
    return Requests(
        cores=read_cores(found.get("cpu")) or 0.0,
        memory_bytes=read_count(found.get("memory")) or 0,
        ephemeral_bytes=read_count(found.get("ephemeral-storage")) or 0,
        devices=extended_resources(found),
    )


def extended_resources(found: Found) -> dict[str, int]:
    """Counts of nvidia.com/gpu and the like; not cpu, hugepages-2Mi, attachable-volumes-csi-..."""
    return {
        name: read_count(count) or 0
        for name, count in found.items()
        if "/" in name and not name.startswith("kubernetes.io/")
    }


def _reader(parse: Callable[[str], N]) -> Callable[[object], N | None]:
    @lru_cache(4096)
    def read(text: str) -> N | None:
        try:
            return parse(text)
        except ValueError:
            return None

    return lambda found: read(str(found))


read_cores, read_count = _reader(parse_cores), _reader(parse_quantity)
"""Return None if the value is missing or not a quantity: one odd object must not block the others. Results are cached,
because a cluster has few different quantities."""


# --- volumes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StorageCapacity:
    """A CSIStorageCapacity: the largest volume of a class in a part of the cluster."""

    storage_class: str
    largest_bytes: int | None
    topology: Found | None
    """Label selector of its nodes; None: it has none."""


def project_capacity(found: Found) -> StorageCapacity:
    largest = found.get("maximumVolumeSize") or found.get("capacity")
    return StorageCapacity(str(found.get("storageClassName", "")), read_count(largest), found.get("nodeTopology"))


def volumes_of(labels: Mapping[str, str], capacities: Iterable[StorageCapacity]) -> dict[str, int]:
    """StorageClass -> bytes of the largest volume for a node with these labels; 0 if the driver has none for it, and no
    entry for a class about which no driver says anything."""
    found: dict[str, int] = {}
    for one in capacities:
        fits = one.topology is not None and _selects(one.topology, labels)
        largest = (one.largest_bytes or 0) if fits else 0
        found[one.storage_class] = max(largest, found.get(one.storage_class, 0))
    return found


def _selects(selector: Found, labels: Mapping[str, str]) -> bool:
    wanted = selector.get("matchLabels") or {}
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    return all(_meets(one, labels) for one in selector.get("matchExpressions") or ())


def _meets(expression: Found, labels: Mapping[str, str]) -> bool:
    value, values = labels.get(str(expression.get("key", ""))), expression.get("values") or ()
    return {
        "In": value in values,
        "NotIn": value not in values,
        "Exists": value is not None,
        "DoesNotExist": value is None,
    }.get(str(expression.get("operator", "")), False)
