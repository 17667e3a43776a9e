"""Cluster: nodes, their profiles, pods and live bytes, and models' observed memory, as input for placement.

Objects are listed when a plan needs them and cached for a while; live figures are read in the background.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pydantic import ValidationError

from spillway.api.profiles import MemoryProfile, NodeProfileSpec
from spillway.feedback.pod_evidence import PodEvidence
from spillway.feedback.profiles import observed_corrections, observed_peaks, observed_pods
from spillway.placement.place import ClusterView, NodeView, Reservation, Taint, profiled
from spillway.planning.corrections import Corrections

from ..decide.observed import JobObject
from ..kube.api_client import (
    MEMORY_PROFILES,
    NODE_PROFILES,
    NODES,
    PODS,
    STORAGE_CAPACITIES,
    ApiClient,
    ApiError,
    ApiResource,
    NotFound,
    RequestRejected,
)
from .faulty_nodes import FaultyNodes
from .metrics_source import MetricsSnapshot, MetricsSource
from .operator_config import OperatorConfig
from .pod_requests import (
    ON_NODES,
    RequestsByNode,
    extended_resources,
    project_capacity,
    project_requests,
    read_cores,
    read_count,
    sums,
    volumes_of,
)
from .reservations import Reservations

logger = logging.getLogger(__name__)

FRESH_SECONDS = 30.0
"""Age at which cached objects are listed again."""
OLDEST_NODES_SECONDS = 300.0
"""Oldest list of nodes that is used if a new one fails."""
OLDEST_PEAKS_SECONDS = 300.0
"""How long profiles of a namespace in which nothing is planned are kept."""

P = TypeVar("P")
Peaks = Mapping[str, Mapping[str, int]]
"""Fingerprint of a model's memory -> tier -> bytes."""


@dataclass(frozen=True, slots=True)
class Known:
    """The content of a namespace's MemoryProfiles."""

    listed: float = float("-inf")
    """When they were listed, in monotonic seconds."""
    is_current: bool = True
    """Whether no profile was written since."""
    peaks: Peaks = field(default_factory=dict)
    corrections: Mapping[str, Corrections] = field(default_factory=dict)
    """Fingerprint of a model -> corrections of its predictions."""
    pods: Mapping[str, PodEvidence] = field(default_factory=dict)
    """Fingerprint of a model's memory -> peaks of its pods."""


class Cluster:
    def __init__(
        self,
        client: ApiClient,
        metrics: MetricsSource,
        reservations: Reservations,
        node_reader: bool,
        config: OperatorConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._metrics = metrics
        self._reservations = reservations
        self._node_reader = node_reader
        self.config = config
        self._clock = clock
        self._listing = asyncio.Lock()
        self._nodes: tuple[NodeView, ...] | None = None
        self._nodes_time = float("-inf")
        self._requests: RequestsByNode | None = None
        """Requests of pods; None: not known."""
        self._faulty = FaultyNodes()
        self._known: dict[str, Known] = {}
        """Namespace -> content of its profiles."""
        self._joined: tuple[object, object, tuple[NodeView, ...]] | None = None
        """Cache: nodes, snapshot, and the nodes with live bytes."""

    async def refresh(self, namespace: str) -> None:
        """Lists what is older than FRESH_SECONDS or was written since. Raises ApiError if nodes should be listed but no
        recent list exists."""
        async with self._listing:
            await self._refresh_nodes()
            await self._refresh_profiles(namespace)

    def profile_written(self, namespace: str) -> None:
        """Makes the next plan in the namespace list its profiles again."""
        if known := self._known.get(namespace):
            self._known[namespace] = replace(known, is_current=False)

    @property
    def avoided_nodes(self) -> frozenset[str]:
        """Nodes that no job should use."""
        return self._faulty.avoided(time.time())

    async def _refresh_nodes(self) -> None:
        age = self._clock() - self._nodes_time
        if not self._node_reader or age < FRESH_SECONDS:
            return
        try:
            self._nodes = await self._list_nodes()
            self._nodes_time = self._clock()
        except RequestRejected as error:
            logger.warning("cannot list nodes, so plans use the hardware catalog: %s", error)
            self._nodes, self._nodes_time = None, self._clock()
        except ApiError as error:
            if age > OLDEST_NODES_SECONDS:
                raise
            logger.warning("using nodes listed %.0f s ago: %s", age, error)

    async def _refresh_profiles(self, namespace: str) -> None:
        """Lists the profiles. If that fails, the old ones, or none, are used: plans are then less corrected."""
        known = self._known.get(namespace, Known())
        now = self._clock()
        if known.is_current and now - known.listed < FRESH_SECONDS:
            return
        try:
            listed = await self._client.list(MEMORY_PROFILES, namespace, _memory_profile)
            known = _known([profile for profile in listed.items if profile is not None])
        except ApiError as error:
            logger.warning("cannot list MemoryProfiles: %s", error)
        kept = {other: found for other, found in self._known.items() if now - found.listed < OLDEST_PEAKS_SECONDS}
        self._known = kept | {namespace: replace(known, listed=self._clock(), is_current=True)}

    def view(self, job: JobObject) -> ClusterView:
        """The cluster as of now, for this job. Records the nodes that failed the job."""
        self._faulty.seen(job)
        key, now = job.key, self._clock()
        snapshot = self._metrics.snapshot(now)
        known = self._known.get(key[0], Known())
        return ClusterView(
            nodes=None if self._nodes is None else self._without_own(self._with_live_bytes(self._nodes, snapshot), job),
            metrics_age_seconds=snapshot.age_seconds,
            metrics_problem=snapshot.problem,
            metrics_source=snapshot.source,
            reservations=tuple(map(self._as_listed, self._reservations.of_others(key, now))),
            observed_peaks=known.peaks,
            model_corrections=known.corrections,
            observed_pods=known.pods,
            avoided=self.avoided_nodes,
            declared=self.config.declared,
        )

    def _as_listed(self, reservation: Reservation) -> Reservation:
        """The reservation, without its devices if these are among the requests of the listed pods."""
        listed = self._requests is not None and reservation.owner in self._requests.ours
        return replace(reservation, devices=0) if listed else reservation

    def _without_own(self, nodes: tuple[NodeView, ...], job: JobObject) -> tuple[NodeView, ...]:
        """The nodes without the requests of the job's own pods."""
        if self._requests is None or job.uid not in self._requests.ours:
            return nodes
        ours, own = self._requests.ours_by_node(job.uid), self._requests.ours[job.uid]
        return tuple(replace(node, ours=ours[node.name]) if node.name in own else node for node in nodes)

    def _with_live_bytes(self, nodes: tuple[NodeView, ...], snapshot: MetricsSnapshot) -> tuple[NodeView, ...]:
        known = self._joined
        if known is None or known[0] is not nodes or known[1] is not snapshot.nodes:
            joined = tuple(replace(node, live=snapshot.nodes.get(node.name)) for node in nodes)
            known = self._joined = (nodes, snapshot.nodes, joined)
        return known[2]

    async def _list_nodes(self) -> tuple[NodeView, ...]:
        nodes = await self._client.list(NODES, "", project_node)
        pods = await self._listed(PODS, project_requests, ON_NODES)
        capacities = await self._listed(STORAGE_CAPACITIES, project_capacity)
        self._requests = None if pods is None else sums(pods)
        found = [
            replace(
                node if self._requests is None else self._requests.on(node),
                volumes=volumes_of(node.labels, capacities or ()),
            )
            for node in nodes.items
        ]
        try:
            listed = await self._client.list(NODE_PROFILES, "", _node_profile)
        except (NotFound, RequestRejected) as error:  # the kind is not installed, or not permitted
            logger.warning("cannot list NodeProfiles, so plans use the rates of the hardware catalog: %s", error)
            return tuple(found)
        profiles = dict(listed.items)
        return tuple(_with_profile(node, profiles.get(node.name)) for node in found)

    async def _listed(
        self, resource: ApiResource, project: Callable[[Mapping[str, Any]], P], field_selector: str = ""
    ) -> tuple[P, ...] | None:
        """All objects of the cluster; None if they may not be listed."""
        try:
            return (await self._client.list(resource, "", project, field_selector=field_selector)).items
        except (NotFound, RequestRejected) as error:
            logger.warning("cannot list %s, nodes count as empty: %s", resource.plural, error)
            return None


def project_node(found: Mapping[str, Any]) -> NodeView:
    """A Node as the API server sent it."""
    metadata, spec, status = found["metadata"], found.get("spec") or {}, found.get("status") or {}
    allocatable = status.get("allocatable") or {}
    ready = [condition for condition in status.get("conditions") or () if condition.get("type") == "Ready"]
    taints = tuple(
        Taint(str(taint.get("key", "")), str(taint.get("value", "")), str(taint.get("effect", "")))
        for taint in spec.get("taints") or ()
    )
    return NodeView(
        name=metadata["name"],
        labels=dict(metadata.get("labels") or {}),
        taints=taints,
        allocatable_cores=read_cores(allocatable.get("cpu")) or 0.0,
        allocatable_memory_bytes=read_count(allocatable.get("memory")) or 0,
        allocatable_ephemeral_bytes=read_count(allocatable.get("ephemeral-storage")) or 0,
        allocatable_devices=extended_resources(allocatable),
        ready=bool(ready) and ready[0].get("status") == "True",
        unschedulable=bool(spec.get("unschedulable")),
    )


def _node_profile(found: Mapping[str, Any]) -> tuple[str, NodeProfileSpec | None]:
    """The node's name and profile; None if the profile is of another version."""
    name = found["metadata"]["name"]
    try:
        return name, NodeProfileSpec.model_validate(found.get("spec") or {})
    except ValidationError as error:
        logger.warning("NodeProfile %s is not used: %s", name, error.errors()[0]["msg"])
        return name, None


def _with_profile(node: NodeView, profile: NodeProfileSpec | None) -> NodeView:
    return node if profile is None else profiled(node, profile)


def _memory_profile(found: Mapping[str, Any]) -> MemoryProfile | None:
    try:
        return MemoryProfile.read(found)
    except ValidationError:  # written by another version
        return None


def _known(profiles: Sequence[MemoryProfile]) -> Known:
    models: dict[str, list[MemoryProfile]] = {}
    for profile in profiles:
        if profile.model_fingerprint:  # empty: written by an earlier version
            models.setdefault(profile.model_fingerprint, []).append(profile)
    corrections = {model: observed_corrections(found) for model, found in models.items()}
    pods = {fingerprint: seen for found in models.values() for fingerprint, seen in observed_pods(found).items()}
    peaks = {one.fingerprint: observed_peaks(one) for one in profiles}
    return Known(peaks=peaks, corrections=corrections, pods=pods)
