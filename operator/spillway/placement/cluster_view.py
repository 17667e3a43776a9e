"""ClusterView: nodes and live memory at one moment, as placement sees them. Values without behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from spillway.feedback.pod_evidence import PodEvidence
from spillway.plan import DeviceKind, Strategy
from spillway.planning.corrections import NO_CORRECTIONS, Corrections
from spillway.planning.hardware import NodeSpec
from spillway.planning.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class LiveBytes:
    """A node's free bytes now, and how much its memory stalls, from metrics; None = no series."""

    devices: tuple[int, ...] = ()
    """Free bytes of each device."""
    host: int | None = None
    nvme: int | None = None
    memory_stalled: float | None = None
    """Share of the time in which every task that could run waited for memory (PSI "full")."""
    volumes: Mapping[str, int] = field(default_factory=dict)
    """StorageClass -> free bytes of its emptiest drive, where the node exporter knows the class's drives."""

    def of_devices(self, unrequested: int | None) -> int | None:
        """Returns the free bytes of the fullest among the `unrequested` devices that no pod requests, which are taken
        to be the emptiest ones; among all devices if their number is not known (None)."""
        if not self.devices:
            return None
        count = len(self.devices) if unrequested is None else min(max(1, unrequested), len(self.devices))
        return sorted(self.devices, reverse=True)[count - 1]


@dataclass(frozen=True, slots=True)
class Taint:
    key: str
    value: str
    effect: str


@dataclass(frozen=True, slots=True)
class Requests:
    """Sum of the requests of pods."""

    cores: float = 0.0
    memory_bytes: int = 0
    ephemeral_bytes: int = 0
    devices: Mapping[str, int] = field(default_factory=dict)
    """Extended resource -> count."""

    def __add__(self, other: Requests) -> Requests:
        names = {**self.devices, **other.devices}
        return Requests(
            self.cores + other.cores,
            self.memory_bytes + other.memory_bytes,
            self.ephemeral_bytes + other.ephemeral_bytes,
            {name: self.devices.get(name, 0) + other.devices.get(name, 0) for name in names},
        )


NO_REQUESTS = Requests()


@dataclass(frozen=True, slots=True)
class NodeView:
    """What placement needs to know about one node. Requests of its DaemonSets and static pods are already subtracted
    from what is allocatable."""

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
    others: Requests | None = None
    """Requests of pods that are not the operator's; None: the operator may not list pods."""
    ours: Requests = NO_REQUESTS
    """Requests of other TrainingJobs' pods."""
    is_declared: bool = False
    """Whether the node does not exist yet: it is one of a class that an administrator declared."""
    volumes: Mapping[str, int] = field(default_factory=dict)
    """StorageClass -> bytes of the largest volume that can be made for this node, where the driver says."""

    def without(self, requests: Requests) -> NodeView:
        """Returns the node with what pods with these requests leave of it."""
        return replace(
            self,
            allocatable_cores=max(0.0, self.allocatable_cores - requests.cores),
            allocatable_memory_bytes=max(0, self.allocatable_memory_bytes - requests.memory_bytes),
            allocatable_ephemeral_bytes=max(0, self.allocatable_ephemeral_bytes - requests.ephemeral_bytes),
            allocatable_devices={
                name: max(0, count - requests.devices.get(name, 0)) for name, count in self.allocatable_devices.items()
            },
        )

    @property
    def beside_others(self) -> NodeView:
        """The node with what pods that are not the operator's leave of it."""
        return self.without(self.others or NO_REQUESTS)

    @property
    def free(self) -> NodeView:
        """The node with what all pods leave of it."""
        return self.beside_others.without(self.ours)


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a placed attempt will take on one node, while observations may not show it yet."""

    node: str
    device: int
    host: int
    nvme: int
    devices: int = 0
    """Number of devices; 0 once the attempt's pods are among those that the operator lists."""
    owner: str = ""
    """Uid of the job."""


@dataclass(frozen=True, slots=True)
class HeldDevices:
    """Devices that another TrainingJob holds until it ends; its pods may still be waiting for them."""

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
    """Age of the snapshot that NodeView.live is from; None: there never was one."""
    metrics_problem: str = ""
    """Why there is no snapshot, or why it is old."""
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
    """Fingerprint of model and plan -> evidence from its pods (MemoryProfile)."""
    trainer_image: str = ""
    """Trainer image of jobs that do not name one."""
    corrections: Corrections = NO_CORRECTIONS
    """Corrections from earlier attempts of this job."""
    shape: ModelShape | None = None
    """Shape of the job's model, if it was inspected."""
    as_free: bool = False
    """Whether to plan for what is free now, not for the nodes' capacities."""
    declared: tuple[NodeView, ...] = ()
    """A node of each declared class."""
    avoided: frozenset[str] = frozenset()
    """Nodes with faults, not used while another one can carry the job."""
    device: DeviceKind | None = None
    """Kind of device of earlier attempts, which is kept because another kind rounds differently; None: there were
    none."""
    strategy: Strategy | None = None
    """Strategy of earlier attempts, which is kept because others add gradients in another order."""
