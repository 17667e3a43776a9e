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
        default="", description="Kueue LocalQueue of jobs that name none."
    )
    priority_class_name: Annotated[Text, Field(max_length=253)] = Field(
        default="", description="PriorityClass of jobs that name none."
    )
    gang_wait_seconds: Positive | None = Field(
        default=None, description="scheduling.gangWaitSeconds of jobs that do not set it."
    )
    node_selector: LabelMap = Field(
        default={}, description="Labels that a node must have; a job's own value of a label wins."
    )
    tolerations: tuple[Toleration, ...] = Field(
        default=(), max_length=32, description="Taints that all pods tolerate, besides those that their job names."
    )


class SpillDefaults(Fields):
    storage_class_name: Annotated[Text, Field(max_length=253)] = Field(
        default="", description="Class of the spill volumes of jobs that name none."
    )


class PodDefaults(Fields):
    image: Text = Field(default="", description="Trainer image of jobs that name none.")
    image_pull_secrets: tuple[NamedReference, ...] = Field(
        default=(), max_length=8, json_schema_extra=LIST_BY_NAME,
        description="Secrets to pull images with, in the job's namespace.",
    )  # fmt: skip
    env: tuple[Variable, ...] = Field(
        default=(), max_length=64, json_schema_extra=LIST_BY_NAME,
        description="Environment variables of all trainers; a job's own variable of a name wins.",
    )  # fmt: skip
    runtime_class_name: Annotated[Text, Field(max_length=253)] = Field(
        default="", description="RuntimeClass of jobs that name none."
    )
    security_context: SecurityContext = Field(
        default=SecurityContext(), description="User and groups; for OpenShift assignedByCluster: true."
    )


class PresetResources(Fields):
    extended: ExtendedCounts = Field(default={}, description="Extended resources, for example rdma/hca: 1.")


class NetworkPreset(Fields):
    """How pods reach each other's devices; jobs choose one by pod.networkPreset."""

    name: Name = Field(description="Name of the preset, for example infiniband.")
    env: tuple[Variable, ...] = Field(
        default=(), max_length=32, json_schema_extra=LIST_BY_NAME,
        description="Environment variables, for example NCCL_IB_HCA; a job's own variable of a name wins.",
    )  # fmt: skip
    resources: PresetResources = Field(default=PresetResources(), description="Requests of one pod.")
    annotations: StringMap = Field(
        default={}, description="Annotations of the pods, for example k8s.v1.cni.cncf.io/networks."
    )
    host_network: Flag = Field(default=False, description="Use the node's network.")


class JobDefaults(Fields):
    """Values for fields of TrainingJobs that leave them empty; lists are added to the job's."""

    pod: PodDefaults = Field(default=PodDefaults(), description="Image, environment and further settings of the pods.")
    scheduling: SchedulingDefaults = Field(default=SchedulingDefaults(), description="Which nodes, when.")
    spill: SpillDefaults = Field(default=SpillDefaults(), description="The volume for NVMe spill.")


class NodeClass(Fields):
    """Nodes that an autoscaler would create. A job that no existing node can carry is planned for such a class, and its
    pods require the class's labels."""

    name: Name = Field(description="Name of the class, shown in status.plan.reason.")
    node: Annotated[Text, Field(min_length=1, max_length=63)] = Field(
        description="Devices and rates: a class of the catalog, as in `spillway plan --node` (8xh100)."
    )
    labels: LabelMap = Field(default={}, description="Labels that nodes of the class will have.")
    cpu: SomeCores | None = Field(default=None, description="Cores for pods. Default: the catalog's.")
    memory: SomeBytes | None = Field(default=None, description="Memory for pods. Default: the catalog's.")
    ephemeral_storage: SomeBytes | None = Field(
        default=None, description="Disk for pods. Default: the catalog's drives."
    )
    resource_name: ExtendedResource = Field(default="nvidia.com/gpu", description="Resource of its devices.")


class OperatorConfigSpec(Fields):
    """What holds for all TrainingJobs of the cluster."""

    job_defaults: JobDefaults = Field(default=JobDefaults(), description="Values that jobs inherit.")
    network_presets: tuple[NetworkPreset, ...] = Field(
        default=(), max_length=16, description="Networks that jobs can choose.", json_schema_extra=LIST_BY_NAME
    )
    node_classes: tuple[NodeClass, ...] = Field(
        default=(), max_length=16, description="Nodes that do not exist yet.", json_schema_extra=LIST_BY_NAME
    )


Spec = dict[str, Any]
"""Of a TrainingJob, not validated."""


def with_defaults(spec: Spec, config: OperatorConfigSpec) -> tuple[Spec, tuple[str, ...]]:
    """A spec with what it inherits, and the fields that it inherits: ("pod.image", "scheduling.tolerations").
    pod.networkPreset stays only if there is no such preset."""
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
