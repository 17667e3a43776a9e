"""Pods and lifecycle of a TrainingJob: members, checkpoints, environment, scheduling, restarts."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from spillway.api.field_types import (
    ClaimName,
    Count,
    Fields,
    LabelMap,
    MemberName,
    Name,
    Positive,
    SomeCores,
    StringMap,
    SubPath,
    Text,
    exactly_one,
    refuse,
)


class Member(Fields):
    """One model of a sweep: the job's spec with some fields changed."""

    name: MemberName = Field(description="Name, unique in the job.")
    overrides: StringMap = Field(
        default={}, description='Fields below spec with their values, for example training.seed: "1".'
    )


class Objective(Fields):
    """What makes one member better than another."""

    metric: Literal["EvaluationLoss", "Loss"] = Field(
        default="EvaluationLoss", description="Metric by which members are compared."
    )
    direction: Literal["Minimize", "Maximize"] = Field(
        default="Minimize", description="Whether lower or higher is better."
    )
    halving: Count = Field(
        default=0,
        description=(
            "Successive halving: steps before the first round; later rounds come at twice that, four times and so"
            " on. Each round stops the worse half of the members. 0 = never."
        ),
    )


class Checkpoint(Fields):
    """When and where checkpoints are written."""

    every_steps: Positive = Field(default=200, description="Steps between two checkpoints.")
    keep: Annotated[Positive, Field(ge=2, le=1000)] = Field(default=2, description="Verified checkpoints to keep.")
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
    from_: Name | None = Field(
        default=None, alias="from", description="Not supported yet: another job whose last checkpoint is the start."
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
    cpu: SomeCores | None = Field(
        default=None, description="CPU request per pod, in cores. Default: a quarter of the threads that the plan uses."
    )


class PodOverrides(Fields):
    """The parts of the pod that a job may change."""

    labels: LabelMap = Field(default={}, description="Labels added to the pods.")
    annotations: StringMap = Field(
        default={},
        description="Annotations added to the pods. Of Kueue's only those of its topology-aware scheduling.",
    )
    service_account_name: Annotated[Text, Field(max_length=253)] = Field(
        default="", description="ServiceAccount of the pods. Default: the namespace's."
    )


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
    gang_wait_seconds: Count | None = Field(
        default=None,
        description=(
            "Seconds that an attempt with nodes for only some pods waits for another node before it releases them, "
            f"unless gang is Disabled; a pod that pulls its image has its node. 0 = no limit. Default: "
            f"{DEFAULT_GANG_WAIT_SECONDS}."
        ),
    )
    node_selector: LabelMap = Field(default={}, description="Labels that a node must have.")
    tolerations: tuple[Toleration, ...] = Field(default=(), max_length=64, description="Taints the pods tolerate.")


DEFAULT_STALL_SECONDS = 1800
DEFAULT_RESTARTS = 5


class Lifecycle(Fields):
    """Deadlines and retries. A change takes effect at once, also on an attempt that runs."""

    active_deadline_seconds: Count = Field(
        default=0, description="Seconds that all attempts together may run, without waiting; 0 = no limit."
    )
    pending_deadline_seconds: Count = Field(
        default=0,
        description=(
            "Seconds that the job may wait for all pods of an attempt to run; suspended time is not counted; 0 = "
            "no limit."
        ),
    )
    stall_seconds: Count = Field(
        default=DEFAULT_STALL_SECONDS,
        description=(
            "Seconds without a new step after which an attempt is ended; counts as a restart. At least 15, and at"
            " least three predicted steps. 0 = never."
        ),
    )
    ttl_seconds_after_finished: Count | None = Field(
        default=None, description="Seconds after the end until the TrainingJob is deleted. Default: never."
    )
    max_restarts: Annotated[Count, Field(le=1000)] = Field(
        default=DEFAULT_RESTARTS, description="Restarts after a crash. Memory errors and disruptions do not count."
    )
