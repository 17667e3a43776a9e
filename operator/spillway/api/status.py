"""TrainingJobStatus: what the operator observed and decided. `state` and the display strings are for people; decisions
read conditions and figures."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, Strict

from spillway.api.field_types import LIST_BY_NAME, Count, Name, Quantity, Text, Written

LIST_BY_TYPE: dict[str, JsonValue] = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}

Time = Annotated[str, Field(max_length=32, json_schema_extra={"format": "date-time"})]
Short = Annotated[str, Field(max_length=64)]
MAX_ATTEMPTS = 10**9 - 1
"""An attempt's number is part of names and labels."""
MOST_ESCALATIONS = 16
MOST_FAULTY_NODES = 8
AttemptNumber = Annotated[int, Strict(), Field(ge=0, le=MAX_ATTEMPTS)]
NodeName = Annotated[str, Field(min_length=1, max_length=253)]


class Condition(Written):
    """As metav1.Condition."""

    type: Annotated[str, Field(min_length=1, max_length=63)] = Field(description="Accepted, Planned, Running, ...")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether the condition holds.")
    reason: Annotated[str, Field(max_length=63)] = Field(
        default="", description="Reason in CamelCase (docs/conditions.md)."
    )
    message: Annotated[str, Field(max_length=2048)] = Field(default="", description="Explanation for people.")
    observed_generation: Count = Field(default=0, description="Generation of the spec it describes.")
    last_transition_time: Time | None = Field(default=None, description="When status last changed.")


class TierQuantities(Written):
    """Bytes per tier."""

    device: Quantity | None = Field(default=None, description="Of each device, bytes.")
    host: Quantity | None = Field(default=None, description="Of host memory, bytes per rank.")
    nvme: Quantity | None = Field(default=None, description="Of NVMe, bytes per rank.")


class ProfileEvidence(Written):
    """What was observed before of the same model under the same plan."""

    profile: Annotated[str, Field(max_length=253)] = Field(default="", description="Name of the MemoryProfile.")
    peak: TierQuantities | None = Field(default=None, description="Largest recorded peak per tier and rank.")
    message: Text = Field(default="", description="Summary for people.")
    pod_memory: Quantity | None = Field(
        default=None, description="Peak of earlier pods in bytes, if podMemory is based on it."
    )
    runs: Count = Field(default=0, description="Number of runs podMemory is based on; 0: none, it was computed.")


class PlanStatus(Written):
    """The plan of the present attempt, where it should run, and why."""

    config_map: Annotated[str, Field(max_length=253)] = Field(
        default="", description="ConfigMap with job.json and plan.json."
    )
    node: Short = Field(default="", description="Node class the plan is made for.")
    device: Literal["", "Cpu", "Cuda"] = Field(default="", description="Kind of device the plan is made for.")
    summary: Text = Field(default="", description="Summary of the plan for people.")
    bytes: TierQuantities | None = Field(default=None, description="Planned peak per tier.")
    pod_memory: Quantity | None = Field(default=None, description="Memory request and limit of each pod, bytes.")
    activations: Quantity | None = Field(
        default=None,
        description="Planned bytes of activations in each rank's spill file; absent if they cannot move.",
    )
    step_seconds: Short = Field(default="", description="Predicted seconds per step.")
    calibrated: bool = Field(
        default=False,
        description="Whether stepSeconds is based on rates measured on such nodes instead of the catalog.",
    )
    nodes: tuple[NodeName, ...] = Field(
        default=(), max_length=16, description="Preferred nodes, most preferred first; at most 16."
    )
    reason: Text = Field(default="", description="Why these nodes, with the deciding figure.")
    headroom: TierQuantities | None = Field(
        default=None,
        description="Free bytes of the preferred node in each tier, without what other jobs have reserved there.",
    )
    metrics_age: Short = Field(default="", description="Age of the metrics used, for display: 4s.")
    metrics_source: Short = Field(default="", description="Source of the metrics: Prometheus, Scrape, or empty.")
    gang: Literal["", "Queue", "Yield"] = Field(
        default="",
        description=(
            "How all pods start or none. Queue: the queue admits them together. Yield: an attempt that gets nodes"
            " for only some pods releases them. Empty: one pod, or scheduling.gang is Disabled."
        ),
    )
    observed: ProfileEvidence | None = Field(default=None, description="What earlier attempts of this model showed.")
    image: Text = Field(default="", description="Trainer image of the attempt.")


class Progress(Written):
    """How far it is; written at most every 15 s."""

    step: Count = Field(default=0, description="Optimizer steps completed; of a sweep, by all members together.")
    steps: Count = Field(
        default=0, description="Optimizer steps the job asks for; of a sweep, those of members still training."
    )
    display: Short = Field(default="", description="Share of steps done, for display: 42%.")
    loss: Short = Field(default="", description="Training loss of the last step.")
    tokens_per_second: Short = Field(default="", description="Tokens per second, all ranks.")
    eta: Short = Field(default="", description="Time left, for display: 3h12m.")
    last_step_time: Time | None = Field(default=None, description="When the last step ended.")
    advance_time: Time | None = Field(
        default=None, description="When the operator received this step; lifecycle.stallSeconds counts from here."
    )


class MemoryStatus(Written):
    """Measured peaks, of the rank with the highest."""

    device: Short = Field(default="", description="Peak and budget of the device, for display: 71Gi/80Gi.")
    spilled: Short = Field(default="", description="Bytes outside the device, for display.")
    peak: TierQuantities | None = Field(default=None, description="Measured peak per tier.")
    activations: Quantity | None = Field(
        default=None,
        description=(
            "Bytes of each rank's spill file that activations may use after the last live correction; with mode "
            "Advise, what Auto would allow. Absent if they cannot move."
        ),
    )
    correction: Text = Field(default="", description="What the last live correction of the attempt did, and why.")


class CheckpointStatus(Written):
    step: Count = Field(default=0, description="Step of the last committed checkpoint.")
    epoch: Count = Field(default=0, description="Attempt that wrote it.")
    path: Text = Field(default="", description="Its directory on the claim.")
    time: Time | None = Field(default=None, description="When it was committed.")


class FaultyNode(Written):
    node: Annotated[str, Field(max_length=253)] = Field(description="Name of the node.")
    reason: Short = Field(default="", description="Why the attempt on it ended.")
    time: Time = Field(description="When it ended.")


class Attempts(Written):
    total: AttemptNumber = Field(default=0, description="Number of attempts, which is the number of the current one.")
    ended: AttemptNumber = Field(default=0, description="Number of the last attempt that has ended and was recorded.")
    restarts: Count = Field(default=0, description="Restarts that count against lifecycle.maxRestarts.")
    disruptions: Count = Field(
        default=0, description="Attempts ended by disruptions: lost nodes, deleted pods or Jobs, preemptions."
    )
    memory_errors: Count = Field(default=0, description="Attempts that ended because memory ran out.")
    last_reason: Short = Field(default="", description="Why the last attempt ended.")
    last_node: Annotated[str, Field(max_length=253)] = Field(
        default="", description="Node of the pod that ended the last attempt."
    )
    faulty_nodes: Annotated[tuple[FaultyNode, ...], Field(max_length=MOST_FAULTY_NODES)] | None = Field(
        default=None,
        description="Nodes that this job avoids for a day: a device or drive failed, or two attempts in a row crashed.",
    )
    last_rank: Count | None = Field(default=None, description="Rank that failed first in the last attempt.")
    start_time: Time | None = Field(default=None, description="When the current attempt began.")
    end_time: Time | None = Field(default=None, description="When the last attempt ended.")
    pending_time: Time | None = Field(
        default=None, description="When the job began to wait for all pods of an attempt to run."
    )
    active_time: Time | None = Field(default=None, description="When all pods of the current attempt first ran.")
    active_seconds: Count = Field(default=0, description="Seconds that the pods of ended attempts ran.")
    last_active_seconds: Count = Field(default=0, description="Seconds that the pods of the last ended attempt ran.")
    short_in_a_row: Count = Field(
        default=0,
        description="Consecutive attempts that ended within 10 minutes; each doubles the pause before the next.",
    )


class Escalation(Written):
    """Memory ran out, and what that changes."""

    attempt: Count = Field(description="Attempt that ended.")
    reason: Short = Field(default="", description="Why it ended.")
    change: Text = Field(default="", description="What the next attempt does differently.")


class MemberStatus(Written):
    name: Name = Field(description="Name of the member.")
    step: Count = Field(default=0, description="Its optimizer steps.")
    steps: Count = Field(
        default=0, description="Optimizer steps that this member is to train; a round of halving may stop it earlier."
    )
    loss: Short = Field(default="", description="Its last loss.")
    objective: Short = Field(default="", description="Its newest value of objective.metric.")
    state: Short = Field(default="", description="For display: Running, Parked, Stopped, Complete or Failed.")
    message: Text = Field(default="", description="Why it was stopped, or failed.")


class TrainingJobStatus(Written):
    """What was observed and decided."""

    observed_generation: Count = Field(default=0, description="Generation of the spec the status describes.")
    state: Short = Field(default="", description="For display: Queued, Running, Suspended, Complete, Failed, ...")
    conditions: tuple[Condition, ...] = Field(
        default=(), max_length=32, description="Conditions of the job.", json_schema_extra=LIST_BY_TYPE
    )
    plan: PlanStatus | None = Field(default=None, description="The plan of the present attempt.")
    progress: Progress | None = Field(default=None, description="Progress of the training.")
    memory: MemoryStatus | None = Field(default=None, description="Measured memory.")
    checkpoint: CheckpointStatus | None = Field(default=None, description="The last committed checkpoint.")
    attempts: Attempts | None = Field(default=None, description="Attempts and restarts.")
    inherited: Annotated[tuple[Short, ...], Field(max_length=16)] = Field(
        default=(), description="Fields of spec that the current attempt has from the OperatorConfig."
    )
    escalations: tuple[Escalation, ...] = Field(
        default=(),
        max_length=MOST_ESCALATIONS,
        description=(
            "Attempts that ran out of memory, and what the next attempt changed; with mode Advise, what Auto "
            "would change."
        ),
    )
    members: tuple[MemberStatus, ...] = Field(
        default=(), max_length=64, description="Members of a sweep.", json_schema_extra=LIST_BY_NAME
    )
    best_member: Annotated[str, Field(max_length=63)] = Field(default="", description="The best member so far.")
    start_time: Time | None = Field(default=None, description="When the first attempt started.")
    completion_time: Time | None = Field(default=None, description="When the job completed or failed.")
