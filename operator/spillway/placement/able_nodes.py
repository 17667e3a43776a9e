"""Which nodes could ever carry a pod of a job, and what the others lack. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from spillway.api.job_spec import JobSpec
from spillway.api.pod import Toleration
from spillway.placement.cluster_view import NodeView, Taint
from spillway.plan import DeviceKind
from spillway.planning.hardware import NodeSpec, gpu_node, local_node
from spillway.planning.pod_resources import PodResources
from spillway.units import GIB, MIB, format_bytes

GPU_PRODUCT = "nvidia.com/gpu.product"
"""Label with the name of a node's GPUs, set by NVIDIA's feature discovery, which also gives the memory of one unit of a
resource in MiB (nvidia.com/gpu.memory)."""
MIG_USABLE = 0.95
"""Share of its nominal size that a MIG instance has, if no label says the size: 4864 MiB of 5 GB."""
MAX_AVOIDED = 8
"""Most nodes with faults that a pod's affinity excludes."""
TRANSIENT_TAINTS = "node.kubernetes.io/"
"""Prefix of the taints that the node controller sets and removes."""


class Needs(NamedTuple):
    """What one pod needs from a node, whatever its plan is."""

    device: DeviceKind
    memory_bytes: int
    storage_bytes: int
    """Ephemeral storage."""
    runtime_bytes: int = 0
    """The part of `memory_bytes` that its processes take without a model."""


def could_carry(spec: JobSpec, needs: Needs, nodes: Sequence[NodeView]) -> tuple[list[NodeView], list[tuple[int, str]]]:
    """Returns the nodes that could ever carry a pod, and what each of the others lacks: (conditions that it meets,
    sentence)."""
    able, misses = [], []
    for view in nodes:
        miss = _miss(spec, needs, view)
        if miss is None:
            able.append(view)
        else:
            misses.append(miss)
    return able, misses


def _miss(  # noqa: PLR0911 - one line per condition
    spec: JobSpec, needs: Needs, view: NodeView
) -> tuple[int, str] | None:
    """Returns how many conditions `view` meets and a sentence about the first that it does not; None if it could carry
    a pod."""
    device, ranks = needs.device, spec.parallelism.devices_per_node
    if view.is_declared and view.profile is not None and view.profile.device_kind != device:
        return 0, f"{view.name} has {view.profile.device_kind} devices, the job needs {device} devices"
    for key, value in spec.scheduling.node_selector.items():
        if view.labels.get(key) != value:
            has = f"{key}={view.labels[key]!r}" if key in view.labels else f"no label {key}"
            return 0, f"{view.name} has {has}, but spec.scheduling.nodeSelector requires {value!r}"
    for taint in view.taints:
        if _repels(taint, pod_tolerations(spec, device)):
            shown = f"{taint.key}={taint.value}:{taint.effect}" if taint.value else f"{taint.key}:{taint.effect}"
            return 1, f"{view.name} has the taint {shown}, which spec.scheduling.tolerations does not tolerate"
    devices = view.allocatable_devices.get(spec.pod.resource_name, 0)
    if device == "Cuda" and devices < ranks:
        return 2, f"{view.name} has {devices} {spec.pod.resource_name}, a pod needs {ranks}"
    if device == "Cuda" and ranks > 1 and (part := gpu_part(view.labels, spec.pod.resource_name)).name:
        return (
            2,
            f"{view.name} offers only parts of GPUs ({part.name}), but a pod with {ranks} devices needs whole GPUs",
        )
    for name, count in spec.pod.resources.extended.items():
        if view.allocatable_devices.get(name, 0) < count:
            return 2, f"{view.name} has {view.allocatable_devices.get(name, 0)} {name}, a pod needs {count}"
    memory, fixed = needs.memory_bytes, spec.pod.resources.memory
    if fixed is not None and view.allocatable_memory_bytes < fixed:
        has = format_bytes(view.allocatable_memory_bytes)
        return 3, f"{view.name} has {has} of memory for pods, spec.pod.resources.memory requests {format_bytes(fixed)}"
    if view.allocatable_memory_bytes < memory:
        has = format_bytes(view.allocatable_memory_bytes)
        return (
            3,
            f"{view.name} has {has} of memory for pods, a pod needs {format_bytes(memory)} in addition to its model",
        )
    if view.allocatable_ephemeral_bytes < needs.storage_bytes:
        has, asked = format_bytes(view.allocatable_ephemeral_bytes), format_bytes(needs.storage_bytes)
        return 4, f"{view.name} has {has} of ephemeral storage, a pod needs {asked} in addition to its spill volume"
    return None


def pod_tolerations(spec: JobSpec, device: DeviceKind) -> tuple[Toleration, ...]:
    """Returns the job's tolerations, and those for nodes that are reserved for the pod's extended resources. The API
    server adds the latter if its admission plugin ExtendedResourceToleration is on."""
    names = [*([spec.pod.resource_name] if device == "Cuda" else ()), *spec.pod.resources.extended]
    own = [Toleration(key=name, operator="Exists", effect="NoSchedule") for name in names]
    return (*spec.scheduling.tolerations, *(one for one in own if one not in spec.scheduling.tolerations))


def _repels(taint: Taint, tolerations: Iterable[Toleration]) -> bool:
    """Whether the taint keeps pods away permanently."""
    if taint.effect == "PreferNoSchedule" or taint.key.startswith(TRANSIENT_TAINTS):
        return False
    return not any(tolerates(toleration, taint) for toleration in tolerations)


def tolerates(toleration: Toleration, taint: Taint) -> bool:
    """Whether the taint is tolerated, for however long, by the rules of the scheduler and the node lifecycle
    controller."""
    if toleration.effect not in ("", taint.effect):
        return False
    if toleration.operator == "Exists":
        return toleration.key in ("", taint.key)
    return (toleration.key, toleration.value) == (taint.key, taint.value)


def no_node(nodes: Sequence[NodeView], misses: Sequence[tuple[int, str]]) -> str:
    if not nodes:
        return "the cluster has no nodes"
    _, nearest = max(misses, key=lambda miss: miss[0])
    return f"none of {len(nodes)} nodes can run a pod of this job; the closest one: {nearest}"


def sound_nodes(able: Sequence[NodeView], avoided: frozenset[str]) -> tuple[list[NodeView], tuple[str, ...]]:
    """Returns the nodes without faults, or all of them if each has faults; and the names of at most MAX_AVOIDED that
    were left out."""
    sound = [view for view in able if view.name not in avoided]
    if not sound:
        return list(able), ()
    return sound, tuple(sorted(view.name for view in able if view.name in avoided)[:MAX_AVOIDED])


def without(avoided: Sequence[str]) -> str:
    """Returns what a placement's reason says of the nodes that were left out."""
    return f"; not on {', '.join(avoided)}, where attempts failed" if avoided else ""


def ready_now(views: Sequence[NodeView]) -> list[NodeView]:
    return [view for view in views if view.ready and not view.unschedulable]


def pods_on(view: NodeView, pod: PodResources) -> int:
    """Returns how many of these pods fit on the node, by their requests for memory, disk, cores and devices."""
    counts = [
        view.allocatable_memory_bytes // pod.memory_bytes,
        view.allocatable_ephemeral_bytes // pod.ephemeral_storage_bytes,
        int(view.allocatable_cores / pod.cpu_cores),
    ]
    if pod.devices:
        counts.append(view.allocatable_devices.get(pod.resource_name, 0) // pod.devices)
    counts += [view.allocatable_devices.get(name, 0) // count for name, count in pod.extended]
    return min(counts)


class GpuPart(NamedTuple):
    """What one unit of a resource is: a whole device, a MIG instance, or a share of a device that several pods use."""

    name: str
    """Such as mig-1g.5gb or 1-of-4; empty: the whole device."""
    memory_bytes: int | None
    """None: the labels do not say."""
    of_compute: float = 1.0
    of_bandwidth: float = 1.0


_MIG = re.compile(r"(?:^nvidia\.com/mig|-MIG)-(\d+)g\.(\d+)gb")
_PART_OF = re.compile(r"(?:-MIG-\d+g\.\d+gb\S*?)?(?:-SHARED)?$")
"""Suffix that NVIDIA's feature discovery adds to the product name of a divided device."""
MIG_COMPUTE_SLICES, MIG_MEMORY_SLICES = 7, 8


def gpu_part(labels: Mapping[str, str], resource_name: str) -> GpuPart:
    """Returns what one unit of the resource is, by its name and the labels of NVIDIA's feature discovery. Pods that
    share a device by time slicing or MPS get equal shares of its memory, whatever the other pods do."""
    is_mig = resource_name.startswith("nvidia.com/mig-")
    mig = _MIG.search(resource_name if is_mig else labels.get(GPU_PRODUCT, ""))
    of = resource_name if is_mig else "nvidia.com/gpu"
    size, replicas = labels.get(f"{of}.memory", ""), labels.get(f"{of}.replicas", "")
    memory = int(size) * MIB if size.isdecimal() else None
    compute = bandwidth = 1.0
    name = ""
    if mig is not None:
        slices, gigabytes = int(mig[1]), int(mig[2])
        name, compute = f"mig-{slices}g.{gigabytes}gb", min(1.0, slices / MIG_COMPUTE_SLICES)
        bandwidth = min(1.0, slices / MIG_MEMORY_SLICES)
        memory = memory or int(MIG_USABLE * gigabytes * GIB)
    if replicas.isdecimal() and (count := int(replicas)) > 1:
        name = f"{name}-1-of-{count}".lstrip("-")
        memory, compute, bandwidth = memory // count if memory else None, compute / count, bandwidth / count
    return GpuPart(name, memory, compute, bandwidth)


def base_node(view: NodeView, device: DeviceKind, resource_name: str) -> NodeSpec:
    """Returns the rates and devices of a node: the measured ones if it has a NodeProfile for this kind of device, else
    those of the catalog, with as many devices as the node has of the extended resource `resource_name`."""
    if view.profile is not None and view.profile.device_kind == device:
        return view.profile
    cores = max(1, int(view.allocatable_cores))
    if device == "Cuda":
        part, product = gpu_part(view.labels, resource_name), view.labels.get(GPU_PRODUCT, "")
        whole = gpu_node(_PART_OF.sub("", product), part.memory_bytes, view.allocatable_devices.get(resource_name, 1))
        return replace(
            whole,
            device_bytes=int(whole.device_bytes * (part.of_bandwidth if part.memory_bytes is None else 1.0)),
            name=whole.name + (f"-{part.name}" if part.name else ""),
            num_cores=cores,
            bfloat16_flops_per_second=whole.bfloat16_flops_per_second * part.of_compute,
            float32_flops_per_second=whole.float32_flops_per_second * part.of_compute,
            device_bytes_per_second=whole.device_bytes_per_second * part.of_bandwidth,
        )
    return replace(local_node(cores, 0, 0, 0), name=f"cpu-{cores}-cores")
