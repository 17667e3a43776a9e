"""ClusterView: nodes and live memory at one moment, as placement sees them. Values without behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spillway.feedback.pod_evidence import PodEvidence
from spillway.plan import DeviceKind, Tier
from spillway.planning.corrections import NO_CORRECTIONS, Corrections
from spillway.planning.hardware import NodeSpec


@dataclass(frozen=True, slots=True)
class LiveBytes:
    """Free bytes of a node now, and how its memory fares, from metrics; None = no series."""

    device: int | None = None
    """Of its tightest device."""
    host: int | None = None
    nvme: int | None = None
    sources: tuple[str, ...] = ()
    """The metrics that it comes from."""
    memory_stalled: float | None = None
    """Share of the time in which every task that could run waited for memory (PSI "full")."""

    def of(self, tier: Tier) -> int | None:
        return {Tier.DEVICE: self.device, Tier.HOST: self.host, Tier.NVME: self.nvme}[tier]


@dataclass(frozen=True, slots=True)
class Taint:
    key: str
    value: str
    effect: str


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node as far as placement cares."""

    name: str
    labels: Mapping[str, str]
    taints: tuple[Taint, ...]
    allocatable_cores: float
    allocatable_memory_bytes: int
    allocatable_ephemeral_bytes: int
    allocatable_devices: Mapping[str, int]
    """Extended resource -> count."""
    ready: bool = True
    unschedulable: bool = False
    profile: NodeSpec | None = None
    """Measured capacities and rates (NodeProfile); None: the catalog's class."""
    live: LiveBytes | None = None


@dataclass(frozen=True, slots=True)
class Reservation:
    """Bytes that a placed attempt will take and that observation may not show yet."""

    node: str
    device: int
    host: int
    nvme: int

    def of(self, tier: Tier) -> int:
        return {Tier.DEVICE: self.device, Tier.HOST: self.host, Tier.NVME: self.nvme}[tier]


@dataclass(frozen=True, slots=True)
class HeldDevices:
    """What another job of ours has until it ends; its pods may still wait for it."""

    node_class: str
    """NodeSpec.name that its plan was made for"""
    nodes: tuple[str, ...]
    """Nodes that its plan prefers; empty: any of the class."""
    resource_name: str
    devices: int
    seconds_left: float | None
    """None = not known"""


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Nodes and metrics at one moment. `nodes` None: the operator may not see nodes (reason NoNodeView)."""

    nodes: tuple[NodeView, ...] | None = None
    metrics_age_seconds: float | None = None
    """Age of the snapshot behind `live`; None: there never was one."""
    metrics_problem: str = ""
    """Why there is none, or why it is stale."""
    metrics_source: str = ""
    """Prometheus, Scrape, or empty when nothing is configured"""
    reservations: tuple[Reservation, ...] = ()
    held: tuple[HeldDevices, ...] = ()
    """Devices held by other jobs, for a job on GPUs."""
    observed_peaks: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Fingerprint of model and plan -> tier -> bytes (MemoryProfile); for the sentence in status.plan."""
    model_corrections: Mapping[str, Corrections] = field(default_factory=dict)
    """Fingerprint of a model -> corrections of its predictions from MemoryProfiles."""
    observed_pods: Mapping[str, PodEvidence] = field(default_factory=dict)
    """Fingerprint of model and plan -> what pods took (MemoryProfile)."""
    trainer_image: str = ""
    """Image of jobs that name none."""
    corrections: Corrections = NO_CORRECTIONS
    """What earlier attempts of this job showed."""
    device: DeviceKind | None = None
    """Kind of device of these attempts, because another kind rounds differently; None: there were none."""
