"""Pods and lifecycle of a TrainingJob: members, checkpoints, environment, scheduling, restarts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, Strict, model_validator

from spillway.api.field_types import (
    LIST_BY_NAME,
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
    refuse,
)
from spillway.api.limits import MAX_ENV_BYTES, USER_ID
from spillway.api.model import Location

REQUESTED_BY_PLAN = "the plan decides how many of resourceName a pod requests; leave it out"
ASSIGNED_BY_CLUSTER = "the cluster assigns runAsUser, runAsGroup and fsGroup: leave these out"
FIXED_WITHOUT_PLAN = "mode Disabled plans nothing that could fit in it: memory.budget.host decides; leave it out"
UserId = Annotated[int, Strict(), Field(ge=1, le=2**31 - 1)]


class Member(Fields):
    """One model of a sweep: the job's spec with some fields changed."""

    name: MemberName = Field(description="Name, unique in the job.")
    model: dict[str, Any] = Field(default={}, description="Fields of spec.model in which it differs.")
    data: dict[str, Any] = Field(default={}, description="Fields of spec.data in which it differs.")
    training: dict[str, Any] = Field(
        default={}, description="Fields of spec.training in which it differs, for example seed: 1."
    )

    @property
    def changes(self) -> dict[str, Any]:
        """Its own values by field below spec: {"training.seed": 1}."""
        return dict(leaves({"model": self.model, "data": self.data, "training": self.training}))


def leaves(fields: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Values of nested maps by their path: training.seed."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


class Objective(Fields):
    """What makes one member better than another."""

    metric: Literal["EvaluationLoss", "Loss"] = Field(
        default="EvaluationLoss", description="Metric by which members are compared."
    )
    direction: Literal["Minimize", "Maximize"] = Field(
        default="Minimize", description="Whether lower or higher is better."
    )
    halving: Positive | None = Field(
        default=None,
        description=(
            "Successive halving: steps before the first round; later rounds come at twice that, four times and so"
            " on. Each round stops the worse half of the members. Default: never."
        ),
    )


class Checkpoint(Fields):
    """When and where checkpoints are written."""

    every_steps: Positive = Field(default=200, description="Steps between two checkpoints.")
    keep: Annotated[Positive, Field(ge=2, le=1000)] = Field(default=2, description="Verified checkpoints to keep.")
    keep_best: Flag = Field(
        default=False,
        exclude_if=lambda given: not given,  # job.json as every version before knows it
        description="Keep the checkpoint of the lowest evaluation loss, too: one is written after each evaluation that "
        "lowers it. Needs data.evaluation. `spillway ckpt export --best` exports it.",
    )
    claim: ClaimName | None = Field(
        default=None,
        description="PersistentVolumeClaim for checkpoints. Default: none; checkpoints are lost with the pod.",
    )
    sub_path: SubPath = Field(
        default="", description="Directory on the claim. Default: <name>-<first 8 characters of the uid>."
    )
    resume: Literal["OwnOnly", "Never"] = Field(
        default="OwnOnly",
        description=(
            "OwnOnly: an attempt resumes from this job's checkpoints. Never: it starts at step 0; not supported yet."
        ),
    )
    from_: Location | None = Field(
        default=None,
        alias="from",
        description="Checkpoint of another run of the same model, or that run's directory, whose newest intact "
        "checkpoint is used: training starts from its parameters, at step 0, with new optimizer states. "
        "Default: from model.source, or random parameters.",
    )


class NamedReference(Fields):
    name: Name = Field(description="Name of an object in the job's namespace.")


class SecretKey(Fields):
    name: Name = Field(description="Name of the Secret.")
    key: Name = Field(description="Key in the Secret.")


class VariableSource(Fields):
    secret_key_ref: SecretKey = Field(description="A key of a Secret.")


class Variable(Fields):
    """An environment variable of the trainer: exactly one of value, valueFrom."""

    name: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] = Field(
        description="Name of the variable."
    )
    value: Annotated[str, Field(max_length=8192)] | None = Field(default=None, description="Its value.")
    value_from: VariableSource | None = Field(default=None, description="Where its value comes from.")

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        refuse(exactly_one(self, ("value", "value_from")))
        return self


class Resources(Fields):
    """Requests of one pod."""

    cpu: SomeCores | None = Field(
        default=None, description="CPU request, in cores. Default: a quarter of the threads that the plan uses."
    )
    memory: SomeBytes | None = Field(
        default=None, description="Memory, request and limit, bytes; the plan fits in it. Default: what the plan needs."
    )
    shared_memory: SomeBytes | None = Field(
        default=None,
        description="Size of /dev/shm, bytes; part of memory. Default: 64Mi, and as much per rank where several ranks "
        "use GPUs.",
    )
    extended: ExtendedCounts = Field(default={}, description="Further extended resources, for example rdma/hca: 1.")


class SecurityContext(Fields):
    """User and groups of the pod. It never runs as root."""

    assigned_by_cluster: Flag = Field(
        default=False,
        description="True: the pod sets no user or group ids, and the cluster assigns them, as OpenShift does.",
    )
    run_as_user: UserId | None = Field(default=None, description=f"User id. Default: {USER_ID}.")
    run_as_group: UserId | None = Field(default=None, description=f"Group id. Default: {USER_ID}.")
    fs_group: UserId | None = Field(
        default=None,
        description=f"Group that owns the pod's volumes, where their driver can set it. Default: {USER_ID}.",
    )
    supplemental_groups: tuple[UserId, ...] = Field(
        default=(), max_length=16, description="Further groups, for example of an NFS export."
    )

    @model_validator(mode="after")
    def _one_decides(self) -> Self:
        named = ("run_as_user", "run_as_group", "fs_group")
        if self.assigned_by_cluster and any(getattr(self, name) is not None for name in named):
            refuse([("assignedByCluster", ASSIGNED_BY_CLUSTER)])
        return self


class Pod(Fields):
    """The pods of a job, beside what the plan decides."""

    image: Text = Field(default="", description="Trainer image. Default: the chart's.")
    image_pull_secrets: tuple[NamedReference, ...] = Field(
        default=(), max_length=16, description="Secrets to pull the image with.", json_schema_extra=LIST_BY_NAME
    )
    env: tuple[Variable, ...] = Field(
        default=(), max_length=256, json_schema_extra=LIST_BY_NAME,
        description=f"Environment variables of the trainer; their values have {MAX_ENV_BYTES} bytes at most, together.",
    )  # fmt: skip
    resources: Resources = Field(default=Resources(), description="Requests of one pod.")
    resource_name: ExtendedResource = Field(
        default="nvidia.com/gpu", description="Extended resource by which devices are requested."
    )
    labels: LabelMap = Field(default={}, description="Labels added to the pods.")
    annotations: StringMap = Field(
        default={},
        description="Annotations added to the pods. Of Kueue's only those of its topology-aware scheduling.",
    )
    service_account_name: Annotated[Text, Field(max_length=253)] = Field(
        default="", description="ServiceAccount of the pods. Default: the namespace's."
    )
    runtime_class_name: Annotated[Text, Field(max_length=253)] = Field(
        default="", description="RuntimeClass of the pods."
    )
    security_context: SecurityContext = Field(default=SecurityContext(), description="User and groups.")
    network_preset: Annotated[Text, Field(max_length=253)] = Field(
        default="",
        description="Network preset of the OperatorConfig: environment, extended resources, annotations and network of "
        "the pods. Default: none.",
    )
    host_network: Flag = Field(
        default=False,
        description="Use the node's network: for RDMA without a network plug-in. The namespace must allow it "
        "(Pod Security privileged).",
    )

    @model_validator(mode="after")
    def _plan_decides(self) -> Self:
        refuse([("resources.extended", REQUESTED_BY_PLAN)] if self.resource_name in self.resources.extended else [])
        return self


class Toleration(Fields):
    """As in a pod."""

    key: Annotated[Text, Field(max_length=317)] = Field(default="", description="Key of the taint.")
    operator: Literal["Exists", "Equal"] = Field(default="Equal", description="How the value is compared.")
    value: Annotated[Text, Field(max_length=63)] = Field(default="", description="Value of the taint.")
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = Field(
        default="", description="Effect to tolerate. Default: all."
    )
    toleration_seconds: Count | None = Field(
        default=None, description="Seconds until eviction by NoExecute. Default: never evicted."
    )


DEFAULT_GANG_WAIT_SECONDS = 240


class Scheduling(Fields):
    """Which nodes, when."""

    queue_name: Annotated[Text, Field(max_length=63)] = Field(
        default="", description="Kueue LocalQueue. Default: none."
    )
    priority_class_name: Annotated[Text, Field(max_length=253)] = Field(
        default="", description="PriorityClass of the pods."
    )
    workload_priority_class_name: Annotated[Text, Field(max_length=63)] = Field(
        default="",
        description=(
            "Kueue WorkloadPriorityClass: priority in the queue, independent of the pods' priority. Default: "
            "priorityClassName's."
        ),
    )
    gang: Literal["Auto", "Required", "Disabled"] = Field(
        default="Auto",
        description=(
            "Start all pods or none. Auto: by the queue; without a queue, an attempt that gets nodes for only "
            "some pods releases them. Required: jobs of several nodes need a queue. Disabled: the attempt keeps "
            "its nodes and waits."
        ),
    )
    gang_wait_seconds: Positive | None = Field(
        default=None,
        description=(
            "Seconds that an attempt with nodes for only some pods waits for another node before it releases them, "
            f"unless gang is Disabled; a pod that pulls its image has its node. Default: {DEFAULT_GANG_WAIT_SECONDS}."
        ),
    )
    node_selector: LabelMap = Field(default={}, description="Labels that a node must have.")
    tolerations: tuple[Toleration, ...] = Field(default=(), max_length=64, description="Taints the pods tolerate.")


DEFAULT_STALL_SECONDS = 1800
DEFAULT_RESTARTS = 5


class Lifecycle(Fields):
    """Deadlines and retries. A change takes effect at once, also on an attempt that runs."""

    active_deadline_seconds: Positive | None = Field(
        default=None, description="Seconds that all attempts together may run, without waiting. Default: no limit."
    )
    pending_deadline_seconds: Positive | None = Field(
        default=None,
        description=(
            "Seconds that the job may wait for all pods of an attempt to run; suspended time is not counted. Default: "
            "no limit."
        ),
    )
    stall_seconds: Positive = Field(
        default=DEFAULT_STALL_SECONDS,
        description=(
            "Seconds without a new step after which an attempt is ended; counts as a restart. At least 15, and at "
            "least three predicted steps. Practically never: 31536000, a year."
        ),
    )
    ttl_seconds_after_finished: Count | None = Field(
        default=None, description="Seconds after the end until the TrainingJob is deleted. Default: never."
    )
    max_restarts: Annotated[Count, Field(le=1000)] = Field(
        default=DEFAULT_RESTARTS, description="Restarts after a crash. Memory errors and disruptions do not count."
    )
