"""Pods and lifecycle of a TrainingJob: members, checkpoints, environment, scheduling, restarts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, Strict, model_validator

from spillway.api.field_types import (
    LIST_BY_NAME,
    LIST_BY_PATH,
    ClaimName,
    Count,
    ExtendedCounts,
    ExtendedResource,
    Fields,
    Flag,
    LabelMap,
    MemberName,
    Name,
    Positive,
    SomeBytes,
    SomeCores,
    StringMap,
    SubPath,
    Text,
    exactly_one,
    matching,
    reject,
)
from spillway.api.limits import MAX_ENV_BYTES, NOT_MOUNTED_THERE, OWN_DIRECTORIES, USER_ID
from spillway.api.model import Location

REQUESTED_BY_PLAN = "the plan decides how many of resourceName a pod requests; leave it out"
ASSIGNED_BY_CLUSTER = "the cluster assigns runAsUser, runAsGroup and fsGroup: leave these out"
FIXED_WITHOUT_PLAN = (
    "mode Disabled makes no plan that could be fitted into this; leave it out, and set memory.budget.host"
)
UserId = Annotated[int, Strict(), Field(ge=1, le=2**31 - 1)]


class Member(Fields):
    """A member: one model of a sweep. It is trained with the job's spec, in which some fields are changed."""

    name: MemberName = Field(description="Name of the member, unique in the job.")
    model: dict[str, Any] = Field(
        default={}, description="Fields of spec.model in which this member differs from the job."
    )
    data: dict[str, Any] = Field(
        default={}, description="Fields of spec.data in which this member differs from the job."
    )
    training: dict[str, Any] = Field(
        default={},
        description="Fields of spec.training in which this member differs from the job, for example seed: 1.",
    )

    @property
    def changes(self) -> dict[str, Any]:
        """The member's own values, by field below spec: {"training.seed": 1}."""
        return dict(leaves({"model": self.model, "data": self.data, "training": self.training}))


def leaves(fields: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (path, value) for every value in nested maps; a path is dotted: training.seed."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


class Objective(Fields):
    """What makes one member better than another."""

    metric: Literal["EvaluationLoss", "Loss"] = Field(
        default="EvaluationLoss",
        description="Metric by which members are compared. EvaluationLoss needs data.evaluation. Loss: "
        "the training loss.",
    )
    direction: Literal["Minimize", "Maximize"] = Field(
        default="Minimize", description="Minimize: a lower value is better. Maximize: a higher value is better."
    )
    halving: Positive | None = Field(
        default=None,
        description=(
            "Successive halving: number of steps that each member trains before the first round. Further rounds "
            "follow at twice as many steps, four times as many, and so on. In each round the better half of the "
            "remaining members (rounded down) continues, and the others are stopped. Default: none; every member "
            "trains all its steps."
        ),
    )


class Checkpoint(Fields):
    """When and where checkpoints are written."""

    every_steps: Positive = Field(default=200, description="Number of optimizer steps from one checkpoint to the next.")
    keep: Annotated[Positive, Field(ge=2, le=1000)] = Field(
        default=2,
        description=(
            "Number of checkpoints to keep: the newest ones that were read back and verified. Older ones are deleted."
        ),
    )
    keep_best: Flag = Field(
        default=False,
        exclude_if=lambda given: not given,  # if unset, job.json is as in every earlier version
        description=(
            "Also keep the checkpoint with the lowest evaluation loss: one is written after each evaluation whose "
            "loss is lower than all before. Needs data.evaluation. `spillway ckpt export --best` exports it."
        ),
    )
    claim: ClaimName | None = Field(
        default=None,
        description="PersistentVolumeClaim for checkpoints. Default: none; checkpoints are then lost with the pod.",
    )
    sub_path: SubPath = Field(
        default="",
        description=(
            "Directory for the job's checkpoints on the claim, relative to the root of its volume. Default: <name "
            "of the job>-<first 8 characters of its uid>."
        ),
    )
    resume: Literal["OwnOnly", "Never"] = Field(
        default="OwnOnly",
        description=(
            "OwnOnly: an attempt (one start of the job's pods) resumes from this job's checkpoints. Never is "
            "reserved and is rejected, because starting again at step 0 does not work yet."
        ),
    )
    from_: Location | None = Field(
        default=None,
        alias="from",
        description=(
            "Checkpoint of another run of the same model, or the directory of that run; its newest intact "
            "checkpoint is then used. Training starts at step 0 from the checkpoint's parameters, with new "
            "optimizer states. Default: none; the parameters come from model.source, or are random."
        ),
    )


class NamedReference(Fields):
    name: Name = Field(description="Name of a Secret in the job's namespace.")


class SecretKey(Fields):
    name: Name = Field(description="Name of a Secret in the job's namespace.")
    key: Name = Field(description="Key in the Secret that holds the value.")


class VariableSource(Fields):
    secret_key_ref: SecretKey = Field(description="Key of a Secret that holds the value.")


class Variable(Fields):
    """An environment variable of the trainer. Set exactly one of value and valueFrom."""

    name: Annotated[
        str, Field(min_length=1, max_length=253, pattern=matching(r"^[A-Za-z_][A-Za-z0-9_]*$", "MY_VARIABLE"))
    ] = Field(description="Name of the variable.")
    value: Annotated[str, Field(max_length=8192)] | None = Field(
        default=None, description="Value of the variable. Set either value or valueFrom."
    )
    value_from: VariableSource | None = Field(
        default=None, description="Source of the value. Set either valueFrom or value."
    )

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        reject(exactly_one(self, ("value", "value_from")))
        return self


MOUNT_PATH = matching(r"^(/[^/:]+)+$", "/data")
ONLY_CLAIMS_ARE_WRITTEN = "only a claim can be written to; leave it out"


class Mount(Fields):
    """A volume that is mounted in the pods. Set exactly one of claim, configMap and secret."""

    path: Annotated[str, Field(max_length=1024, pattern=MOUNT_PATH)] = Field(
        description="Path in the pods at which the volume is mounted, for example /data."
    )
    claim: ClaimName | None = Field(
        default=None, description="PersistentVolumeClaim to mount. Set exactly one of claim, configMap and secret."
    )
    config_map: ClaimName | None = Field(
        default=None,
        description="ConfigMap to mount; each of its keys becomes a file. Set exactly one of claim, "
        "configMap and secret.",
    )
    secret: ClaimName | None = Field(
        default=None,
        description="Secret to mount; each of its keys becomes a file. Set exactly one of claim, configMap and secret.",
    )
    sub_path: SubPath = Field(
        default="",
        description=(
            "Directory or file in the volume that is mounted instead of the whole volume. It must exist, because "
            "Kubernetes would create a missing one as an empty directory owned by root. Default: the whole "
            "volume."
        ),
    )
    writable: Flag = Field(
        default=False, description="Whether the pods may write to the volume. Allowed only for a claim."
    )

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        problems = exactly_one(self, ("claim", "config_map", "secret"))
        if re.search(OWN_DIRECTORIES, self.path):
            problems.append(("path", NOT_MOUNTED_THERE))
        if self.writable and self.claim is None:
            problems.append(("writable", ONLY_CLAIMS_ARE_WRITTEN))
        reject(problems)
        return self


class Resources(Fields):
    """Resources of one pod."""

    cpu: SomeCores | None = Field(
        default=None,
        description=(
            "CPU request of each pod, in cores. Default: a quarter of a core for each thread that the plan uses; "
            "with command, one core for each rank."
        ),
    )
    memory: SomeBytes | None = Field(
        default=None,
        description=(
            "Memory request and limit of each pod, bytes. The planner looks for a plan that fits in it. Default: "
            "what the plan needs; with command, the field is required."
        ),
    )
    shared_memory: SomeBytes | None = Field(
        default=None,
        description=(
            "Size of /dev/shm in each pod, bytes; it counts as part of the pod's memory. Default: 64Mi, plus 64Mi "
            "per rank if several ranks of the pod use GPUs."
        ),
    )
    scratch: SomeBytes | None = Field(
        default=None,
        exclude_if=lambda given: given is None,  # if unset, job.json is as in every earlier version
        description=(
            "Disk space of each pod, bytes, for /tmp, the log, and what a script writes to /work. Space for the "
            "emptyDir that the job spills to is added. If the job has neither command nor checkpoint.claim, space "
            "for checkpoints and tokenized data is added, too. Default: 256Mi, or 2Gi with command."
        ),
    )
    extended: ExtendedCounts = Field(
        default={}, description="Further extended resources that each pod requests, for example rdma/hca: 1."
    )


class SecurityContext(Fields):
    """User and groups of the pod. It never runs as root."""

    assigned_by_cluster: Flag = Field(
        default=False,
        description="True: the pod sets no user or group ids, and the cluster assigns them, as OpenShift does.",
    )
    run_as_user: UserId | None = Field(default=None, description=f"User id of the pod's processes. Default: {USER_ID}.")
    run_as_group: UserId | None = Field(
        default=None, description=f"Group id of the pod's processes. Default: {USER_ID}."
    )
    fs_group: UserId | None = Field(
        default=None,
        description=f"Group that owns the pod's volumes, where their driver can set it. Default: {USER_ID}.",
    )
    supplemental_groups: tuple[UserId, ...] = Field(
        default=(), max_length=16, description="Further group ids of the pod's processes, for example of an NFS export."
    )

    @model_validator(mode="after")
    def _one_decides(self) -> Self:
        named = ("run_as_user", "run_as_group", "fs_group")
        if self.assigned_by_cluster and any(getattr(self, name) is not None for name in named):
            reject([("assignedByCluster", ASSIGNED_BY_CLUSTER)])
        return self


class Pod(Fields):
    """The pods of a job, except for what the plan decides."""

    image: Text = Field(
        default="",
        description="Trainer image. Default: that of the OperatorConfig, else the one set in the Helm chart.",
    )
    image_pull_secrets: tuple[NamedReference, ...] = Field(
        default=(), max_length=16, description="Secrets to pull the trainer image with.", json_schema_extra=LIST_BY_NAME
    )
    env: tuple[Variable, ...] = Field(
        default=(), max_length=256, json_schema_extra=LIST_BY_NAME,
        description=(
f"Environment variables of the trainer. All values together may have at most {MAX_ENV_BYTES} "
"characters."
),
    )  # fmt: skip
    mounts: tuple[Mount, ...] = Field(
        default=(), max_length=16, json_schema_extra=LIST_BY_PATH,
        exclude_if=lambda given: not given,  # if unset, job.json is as in every earlier version
        description="Further volumes to mount in the pods, for example with code, data or credentials.",
    )  # fmt: skip
    resources: Resources = Field(default=Resources(), description="Resources of each pod.")
    resource_name: ExtendedResource = Field(
        default="nvidia.com/gpu", description="Extended resource by which each pod requests its devices."
    )
    labels: LabelMap = Field(default={}, description="Labels added to the pods.")
    annotations: StringMap = Field(
        default={},
        description="Annotations added to the pods. Kueue's own annotations are rejected, except those for "
        "topology-aware scheduling.",
    )
    service_account_name: Annotated[Text, Field(max_length=253)] = Field(
        default="", description="ServiceAccount of the pods. Default: the namespace's default ServiceAccount."
    )
    runtime_class_name: Annotated[Text, Field(max_length=253)] = Field(
        default="", description="RuntimeClass of the pods. Default: that of the OperatorConfig, else none."
    )
    security_context: SecurityContext = Field(default=SecurityContext(), description="User and group ids of the pods.")
    network_preset: Annotated[Text, Field(max_length=253)] = Field(
        default="",
        description=(
            "Name of a network preset of the OperatorConfig. It adds environment variables, extended resources, "
            "annotations and, if set, the node's network to the pods. Default: none."
        ),
    )
    host_network: Flag = Field(
        default=False,
        description=(
            "Whether pods use the node's network, as RDMA needs without a network plug-in. The namespace must "
            "allow it (Pod Security level privileged)."
        ),
    )

    @model_validator(mode="after")
    def _plan_decides(self) -> Self:
        reject([("resources.extended", REQUESTED_BY_PLAN)] if self.resource_name in self.resources.extended else [])
        return self


class Toleration(Fields):
    """A toleration, as in the spec of a Kubernetes pod."""

    key: Annotated[Text, Field(max_length=317)] = Field(default="", description="Key of the taint.")
    operator: Literal["Exists", "Equal"] = Field(
        default="Equal",
        description="How the taint's value is compared. Equal: it must equal value. Exists: any value matches.",
    )
    value: Annotated[Text, Field(max_length=63)] = Field(default="", description="Value of the taint.")
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = Field(
        default="", description="Effect of the taint to tolerate. Default: all."
    )
    toleration_seconds: Count | None = Field(
        default=None,
        description=(
            "Seconds that a pod stays on its node after a taint with effect NoExecute was added. Default: the pod "
            "is never evicted."
        ),
    )


DEFAULT_GANG_WAIT_SECONDS = 240


class Scheduling(Fields):
    """Which nodes the pods run on, and when they start."""

    queue_name: Annotated[Text, Field(max_length=63)] = Field(
        default="",
        description="Kueue LocalQueue in which the job waits for quota. Default: that of the "
        "OperatorConfig, else none.",
    )
    priority_class_name: Annotated[Text, Field(max_length=253)] = Field(
        default="", description="PriorityClass of the pods. Default: that of the OperatorConfig, else none."
    )
    workload_priority_class_name: Annotated[Text, Field(max_length=63)] = Field(
        default="",
        description=(
            "Kueue WorkloadPriorityClass: the job's priority in the queue, independent of its pods' priority. "
            "Default: the priority of priorityClassName."
        ),
    )
    gang: Literal["Auto", "Required", "Disabled"] = Field(
        default="Auto",
        description=(
            "Whether an attempt (one start of the job's pods) gets nodes for all its pods or for none. Auto: the "
            "queue ensures this; without queueName, an attempt that gets nodes for only some of its pods releases "
            "them. Required: like Auto, but a job of several nodes must have a queue. Disabled: an attempt keeps "
            "the nodes that it gets, and waits for the others."
        ),
    )
    gang_wait_seconds: Positive | None = Field(
        default=None,
        description=(
            "An attempt that has nodes for only some of its pods releases them if no further pod gets a node for "
            "this many seconds. A pod that is pulling its image already has a node. Not used if gang is Disabled. "
            f"Default: that of the OperatorConfig, else {DEFAULT_GANG_WAIT_SECONDS}."
        ),
    )
    node_selector: LabelMap = Field(default={}, description="Labels that a node must have to run the job's pods.")
    tolerations: tuple[Toleration, ...] = Field(
        default=(), max_length=64, description="Taints that the job's pods tolerate."
    )


DEFAULT_STALL_SECONDS = 1800
DEFAULT_RESTARTS = 5


class Lifecycle(Fields):
    """Deadlines and retries. A change takes effect at once, also for the running attempt."""

    active_deadline_seconds: Positive | None = Field(
        default=None,
        description=(
            "Seconds that all attempts of the job together may run; then the job fails. An attempt runs from when "
            "all its pods run until it ends; waiting for nodes or images does not count. Default: no limit."
        ),
    )
    pending_deadline_seconds: Positive | None = Field(
        default=None,
        description=(
            "Seconds that the job may wait until all pods of an attempt run; then the job fails. Time in which "
            "the job is suspended does not count. Default: no limit."
        ),
    )
    stall_seconds: Positive = Field(
        default=DEFAULT_STALL_SECONDS,
        description=(
            "Seconds without a new step after which the running attempt is ended and another one is started, "
            "which counts as a restart. The operator waits at least 15 seconds, and at least three times the "
            "predicted duration of a step. To disable the check, set a year: 31536000."
        ),
    )
    ttl_seconds_after_finished: Count | None = Field(
        default=None,
        description=(
            "Seconds from when the job completes or fails until the TrainingJob is deleted. Default: it is never "
            "deleted."
        ),
    )
    max_restarts: Annotated[Count, Field(le=1000)] = Field(
        default=DEFAULT_RESTARTS,
        description=(
            "Largest number of restarts after crashes and stalls. After one more crash or stall the job fails. "
            "Restarts after an attempt ran out of memory, or after a disruption such as a lost node, do not "
            "count."
        ),
    )
