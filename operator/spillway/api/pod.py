"""What a TrainingJob asks of its pods and of its life: members, checkpoints, environment, scheduling, restarts."""

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
        default={}, description='Fields below spec and their values, for example training.seed: "1".'
    )


class Objective(Fields):
    """What makes one member better than another."""

    metric: Literal["EvaluationLoss", "Loss"] = Field(default="EvaluationLoss", description="Figure compared.")
    direction: Literal["Minimize", "Maximize"] = Field(default="Minimize", description="Which end is better.")
    halving: Count = Field(
        default=0,
        description="Steps before the first round; the next ones come at twice that, four times, ... Each round stops "
        "the worse half of the members. 0 = never.",
    )


class Checkpoint(Fields):
    """When and where checkpoints are written."""

    every_steps: Positive = Field(default=200, description="Steps between two checkpoints.")
    keep: Annotated[Positive, Field(ge=2, le=1000)] = Field(
        default=2, description="Verified checkpoints that are kept; one alone would be none while the next is written."
    )
    claim: ClaimName | None = Field(
        default=None, description="PersistentVolumeClaim for checkpoints. Default: none, they end with the pod."
    )
    sub_path: SubPath = Field(
        default="", description="Directory on the claim. Default: <name>-<first 8 characters of the uid>."
    )
    resume: Literal["OwnOnly", "Never"] = Field(
        default="OwnOnly",
        description="OwnOnly: an attempt goes on from this job's checkpoints. Never: from step 0; not supported yet.",
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
    annotations: StringMap = Field(default={}, description="Annotations added to the pods.")
    service_account_name: Annotated[Text, Field(max_length=253)] = Field(
        default="", description="ServiceAccount of the pods. Default: the namespace's."
    )


class Toleration(Fields):
    """As in a pod."""

    key: Annotated[Text, Field(max_length=317)] = Field(default="", description="Taint that is tolerated.")
    operator: Literal["Exists", "Equal"] = Field(default="Equal", description="How value is compared.")
    value: Annotated[Text, Field(max_length=63)] = Field(default="", description="Value of the taint.")
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = Field(
        default="", description="Effect that is tolerated. Default: all."
    )
    toleration_seconds: Count | None = Field(
        default=None, description="Seconds until eviction by NoExecute. Default: for ever."
    )


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
        description="Kueue WorkloadPriorityClass: the job's place in the queue, apart from its pods' priority. "
        "Default: that of priorityClassName.",
    )
    gang: Literal["Auto", "Required", "Disabled"] = Field(
        default="Auto",
        description="Start all pods or none. Auto: by the queue; without one, an attempt that gets nodes for some of "
        "its pods gives them back. Required: more than one node need a queue. Disabled: it keeps them and waits.",
    )
    node_selector: LabelMap = Field(default={}, description="Labels that a node must have.")
    tolerations: tuple[Toleration, ...] = Field(default=(), max_length=64, description="Taints that are tolerated.")


DEFAULT_STALL_SECONDS = 1800
DEFAULT_RESTARTS = 5


class Lifecycle(Fields):
    """Deadlines and retries. A change takes effect at once, also on an attempt that runs."""

    active_deadline_seconds: Count = Field(
        default=0, description="Seconds that all attempts together may run, waiting not counted; 0 = no limit."
    )
    pending_deadline_seconds: Count = Field(
        default=0,
        description="Seconds that the job may wait at a time, not suspended, until all pods of an attempt run; "
        "0 = no limit.",
    )
    stall_seconds: Count = Field(
        default=DEFAULT_STALL_SECONDS,
        description="Seconds without a step that end a running attempt, which counts as a restart; at least 15, and "
        "three predicted steps. 0 = never.",
    )
    ttl_seconds_after_finished: Count | None = Field(
        default=None, description="Seconds after the end until the TrainingJob is deleted. Default: never."
    )
    max_restarts: Annotated[Count, Field(le=1000)] = Field(
        default=DEFAULT_RESTARTS, description="Restarts after a crash; memory errors and disruptions are counted apart."
    )
