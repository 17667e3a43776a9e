"""OperatorConfig: what an administrator sets for all jobs, in the one cluster-scoped object `default`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from spillway.api.field_types import (
    LIST_BY_NAME,
    ExtendedCounts,
    ExtendedResource,
    Fields,
    Flag,
    LabelMap,
    Name,
    Positive,
    SomeBytes,
    SomeCores,
    StringMap,
    Text,
)
from spillway.api.pod import NamedReference, SecurityContext, Toleration, Variable

CONFIG_NAME = "default"
"""The only OperatorConfig that is used."""


class SchedulingDefaults(Fields):
    queue_name: Annotated[Text, Field(max_length=63)] = Field(
        default="", description="Kueue LocalQueue of jobs that do not set scheduling.queueName."
    )
    priority_class_name: Annotated[Text, Field(max_length=253)] = Field(
        default="", description="PriorityClass of jobs that do not set scheduling.priorityClassName."
    )
    gang_wait_seconds: Positive | None = Field(
        default=None, description="Value of scheduling.gangWaitSeconds for jobs that do not set it."
    )
    node_selector: LabelMap = Field(
        default={},
        description=(
            "Labels that a node must have to run pods of a job. If the job's scheduling.nodeSelector has the same "
            "label, the job's value is used."
        ),
    )
    tolerations: tuple[Toleration, ...] = Field(
        default=(),
        max_length=32,
        description=(
            "Taints that the pods of all jobs tolerate, in addition to those that the job's own "
            "scheduling.tolerations names."
        ),
    )


class SpillDefaults(Fields):
    storage_class_name: Annotated[Text, Field(max_length=253)] = Field(
        default="", description="StorageClass of the spill volumes of jobs that do not set spill.storageClassName."
    )


class PodDefaults(Fields):
    image: Text = Field(default="", description="Trainer image of jobs that do not set pod.image.")
    image_pull_secrets: tuple[NamedReference, ...] = Field(
        default=(), max_length=8, json_schema_extra=LIST_BY_NAME,
        description="Secrets to pull trainer images with. Each job needs Secrets of these names in its own namespace.",
    )  # fmt: skip
    env: tuple[Variable, ...] = Field(
        default=(), max_length=64, json_schema_extra=LIST_BY_NAME,
        description=(
"Environment variables of the trainers of all jobs. If a job sets a variable of the same name, the "
"job's value is used."
),
    )  # fmt: skip
    runtime_class_name: Annotated[Text, Field(max_length=253)] = Field(
        default="", description="RuntimeClass of jobs that do not set pod.runtimeClassName."
    )
    security_context: SecurityContext = Field(
        default=SecurityContext(),
        description="User and group ids of pods, for jobs that do not set them. On OpenShift set "
        "assignedByCluster: true.",
    )


class PresetResources(Fields):
    extended: ExtendedCounts = Field(
        default={}, description="Extended resources that each pod requests, for example rdma/hca: 1."
    )


class NetworkPreset(Fields):
    """Settings by which pods reach each other's devices. A job chooses a preset by pod.networkPreset."""

    name: Name = Field(description="Name of the preset, for example infiniband.")
    env: tuple[Variable, ...] = Field(
        default=(), max_length=32, json_schema_extra=LIST_BY_NAME,
        description=(
"Environment variables of the trainer, for example NCCL_IB_HCA. If a job sets a variable of the same "
"name, the job's value is used."
),
    )  # fmt: skip
    resources: PresetResources = Field(
        default=PresetResources(), description="Resources that each pod requests in addition."
    )
    annotations: StringMap = Field(
        default={}, description="Annotations added to the pods, for example k8s.v1.cni.cncf.io/networks."
    )
    host_network: Flag = Field(default=False, description="Whether pods use the node's network.")


class JobDefaults(Fields):
    """Defaults for fields that a TrainingJob leaves empty. Lists are added to those of the job."""

    pod: PodDefaults = Field(default=PodDefaults(), description="Image, environment and further settings of the pods.")
    scheduling: SchedulingDefaults = Field(
        default=SchedulingDefaults(), description="Which nodes pods run on, and when they start."
    )
    spill: SpillDefaults = Field(default=SpillDefaults(), description="Volumes for bytes that are spilled to NVMe.")


class NodeClass(Fields):
    """A class of nodes that an autoscaler would create. A job that fits no existing node is planned for such a class,
    and its pods require the labels of the class.
    """

    name: Name = Field(description="Name of the class, shown in status.plan.reason.")
    node: Annotated[Text, Field(min_length=1, max_length=63)] = Field(
        description=(
            "Hardware of these nodes: a node class of Spillway's hardware catalog, named as in `spillway plan "
            "--node`, for example 8xh100. Devices and rates are taken from there."
        )
    )
    labels: LabelMap = Field(
        default={},
        description=(
            "Labels that nodes of this class have once they exist. Pods that are planned for the class require them."
        ),
    )
    cpu: SomeCores | None = Field(
        default=None, description="Cores per node for pods. Default: the value in Spillway's hardware catalog."
    )
    memory: SomeBytes | None = Field(
        default=None, description="Memory per node for pods, bytes. Default: the value in Spillway's hardware catalog."
    )
    ephemeral_storage: SomeBytes | None = Field(
        default=None,
        description="Disk space per node for pods, bytes. Default: the drives in Spillway's hardware catalog.",
    )
    resource_name: ExtendedResource = Field(
        default="nvidia.com/gpu", description="Extended resource by which pods request the devices of these nodes."
    )


class OperatorConfigSpec(Fields):
    """Defaults for jobs, network presets, and classes of nodes."""

    job_defaults: JobDefaults = Field(default=JobDefaults(), description="Values for fields that a job leaves empty.")
    network_presets: tuple[NetworkPreset, ...] = Field(
        default=(),
        max_length=16,
        description="Network settings that a job can choose by pod.networkPreset.",
        json_schema_extra=LIST_BY_NAME,
    )
    node_classes: tuple[NodeClass, ...] = Field(
        default=(),
        max_length=16,
        description="Classes of nodes that do not exist yet, but that an autoscaler creates when pods need them.",
        json_schema_extra=LIST_BY_NAME,
    )


Spec = dict[str, Any]
"""The spec of a TrainingJob, not validated."""


def with_defaults(spec: Spec, config: OperatorConfigSpec) -> tuple[Spec, tuple[str, ...]]:
    """Returns the spec with the values that it inherits, and the fields that it inherits: ("pod.image",
    "scheduling.tolerations"). pod.networkPreset is removed, unless there is no such preset."""
    found, named = _given(config.job_defaults), _at(spec, ("pod", "networkPreset"))
    for preset in (one for one in config.network_presets if one.name == named):
        own = {name: value for name, value in _given(preset).items() if name != "name"}
        found["pod"] = _merged(own, found.get("pod", {}))
        spec = spec | {"pod": {name: value for name, value in spec["pod"].items() if name != "networkPreset"}}
    merged: Spec = _merged(spec, found)
    paths = [
        (group, *inner)
        for group, value in found.items()
        for inner in ([(name,) for name in value] if isinstance(value, dict) else [()])
    ]
    return merged, tuple(".".join(path) for path in paths if _at(merged, path) != _at(spec, path))


def _given(fields: Fields) -> Spec:
    found: Spec = json.loads(fields.model_dump_json(by_alias=True, exclude_defaults=True))
    return found


def _merged(own: Any, default: Any) -> Any:
    if isinstance(default, dict):
        own = own if isinstance(own, dict) else {}
        return own | {name: _merged(own.get(name), value) for name, value in default.items()}
    if isinstance(default, list):
        own = own if isinstance(own, list) else []
        names = {one["name"] for one in own if isinstance(one, dict) and "name" in one}
        return own + [one for one in default if one not in own and one.get("name") not in names]
    return default if own in (None, "", False) else own


def _at(spec: Any, path: Sequence[str]) -> Any:
    for name in path:
        spec = spec.get(name) if isinstance(spec, dict) else None
    return spec
