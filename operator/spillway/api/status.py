"""TrainingJobStatus: what the operator observed and decided. `state` and the display strings are for people; the
operator decides by conditions and figures."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, JsonValue, Strict, WithJsonSchema

from spillway.api.field_types import LIST_BY_NAME, Count, Name, Quantity, Text, Written

LIST_BY_TYPE: dict[str, JsonValue] = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}

Time = Annotated[str, Field(max_length=32, json_schema_extra={"format": "date-time"})]
Short = Annotated[str, Field(max_length=64)]
MAX_ATTEMPTS = 10**9 - 1
"""Bounded, because the number of an attempt is part of names and labels."""
MOST_ESCALATIONS = 16
MOST_FAULTY_NODES = 8
AttemptNumber = Annotated[int, Strict(), Field(ge=0, le=MAX_ATTEMPTS)]
NodeName = Annotated[str, Field(min_length=1, max_length=253)]


def _reason_today(found: object) -> object:
    """Renames the reason Stalled of earlier versions to NoProgress, because Stalled is also a type of condition
    (kstatus)."""
    return "NoProgress" if found == "Stalled" else found


class Condition(Written):
    """A condition of the job, in the form of metav1.Condition of Kubernetes."""

    type: Annotated[str, Field(min_length=1, max_length=63)] = Field(
        description="Type of the condition: Accepted, Planned, Running, ... (docs/conditions.md)."
    )
    status: Literal["True", "False", "Unknown"] = Field(description="Whether the condition holds.")
    reason: Annotated[str, Field(max_length=63), BeforeValidator(_reason_today)] = Field(
        default="",
        description="Why the condition has its status, in one CamelCase word for programs (docs/conditions.md).",
    )
    message: Annotated[str, Field(max_length=2048)] = Field(
        default="", description="Why the condition has its status, for people."
    )
    observed_generation: Count = Field(default=0, description="Generation of the spec that the condition describes.")
    last_transition_time: Time | None = Field(default=None, description="When the condition's status last changed.")


class TierQuantities(Written):
    """Bytes per tier."""

    device: Quantity | None = Field(
        default=None, description="Bytes on one device: as planned for each, or the highest that was measured."
    )
    host: Quantity | None = Field(
        default=None,
        description="Bytes of host memory of one rank (training process): as planned for each, or the highest that was "
        "measured.",
    )
    nvme: Quantity | None = Field(
        default=None,
        description="Bytes on NVMe of one rank (training process): as planned for each, or the highest that was "
        "measured.",
    )


class _NodeQuantities(Written):
    """Free bytes of a node, per tier."""

    device: Quantity | None = Field(default=None, description="Free bytes of each device.")
    host: Quantity | None = Field(default=None, description="Free bytes of the node's host memory.")
    nvme: Quantity | None = Field(default=None, description="Free bytes of the node's disk for spilling.")


class ProfileEvidence(Written):
    """What earlier attempts of the same model under the same plan needed."""

    profile: Annotated[str, Field(max_length=253)] = Field(
        default="", description="Name of the MemoryProfile with the observations."
    )
    peak: TierQuantities | None = Field(
        default=None, description="Largest observed peak of any rank (training process), per tier."
    )
    message: Text = Field(default="", description="The observations in words, for people.")
    pod_memory: Quantity | None = Field(
        default=None,
        description="Peak memory of earlier pods, bytes. Set only if status.plan.podMemory is based on it.",
    )
    runs: Count = Field(
        default=0,
        description="Number of earlier runs that status.plan.podMemory is based on. 0: it was computed from the plan.",
    )


class PlanStatus(Written):
    """The plan of the current attempt, where the attempt should run, and why."""

    config_map: Annotated[str, Field(max_length=253)] = Field(
        default="",
        description="ConfigMap of the current attempt. It contains the trainer's input: job.json and plan.json.",
    )
    node: Short = Field(default="", description="Class of nodes (kind of hardware) that the plan is made for.")
    device: Literal["", "Cpu", "Cuda"] = Field(default="", description="Kind of device that the plan is made for.")
    summary: Text = Field(default="", description="The plan and its reasons in words, for people.")
    bytes: TierQuantities | None = Field(
        default=None, description="Peak bytes that the plan predicts, per tier (device memory, host memory, NVMe)."
    )
    pod_memory: Quantity | None = Field(default=None, description="Memory request and limit of each pod, bytes.")
    activations: Quantity | None = Field(
        default=None,
        description=(
            "Bytes of each rank's spill file (on NVMe) that the plan uses for activations. Absent if activations "
            "cannot move to host memory while the job runs (memory.advanced.activations.hostReserve)."
        ),
    )
    step_seconds: Short = Field(default="", description="Predicted seconds per optimizer step.")
    calibrated: bool = Field(
        default=False,
        description=(
            "Whether stepSeconds is based on rates that were measured on nodes of this class, instead of rates "
            "from Spillway's hardware catalog."
        ),
    )
    nodes: tuple[NodeName, ...] = Field(
        default=(), max_length=16, description="Preferred nodes, most preferred first; at most 16."
    )
    reason: Text = Field(default="", description="Why the nodes in `nodes` are preferred, with the deciding figure.")
    headroom: Annotated[TierQuantities, WithJsonSchema(_NodeQuantities.model_json_schema())] | None = Field(
        default=None,
        description=(
            "Free bytes of the most preferred node, per tier, when the attempt was planned. Memory that other "
            "jobs have reserved there does not count as free."
        ),
    )
    metrics_age: Short = Field(
        default="",
        description=(
            "How old the memory metrics were that the choice of nodes is based on, as text, for example 4s. Empty "
            "without metrics."
        ),
    )
    metrics_source: Short = Field(
        default="",
        description=(
            "Source of the memory metrics that the choice of nodes is based on. Prometheus, or Scrape: the "
            "operator reads the node exporters itself. Empty: no source is configured."
        ),
    )
    gang: Literal["", "Queue", "Yield"] = Field(
        default="",
        description=(
            "How the attempt gets nodes for all its pods or for none. Queue: the queue admits all pods together. "
            "Yield: an attempt that gets nodes for only some of its pods releases them. Empty: the job has one "
            "pod, or scheduling.gang is Disabled."
        ),
    )
    observed: ProfileEvidence | None = Field(
        default=None, description="What earlier attempts of this model and plan used. Absent if there were none."
    )
    image: Text = Field(default="", description="Trainer image of the current attempt.")


class Progress(Written):
    """How far training has come; written at most every 15 s."""

    step: Count = Field(
        default=0, description="Number of optimizer steps completed; in a sweep, by all members together."
    )
    steps: Count = Field(
        default=0,
        description=(
            "Number of optimizer steps that the job trains in total. In a sweep: the steps of all members "
            "together; of a member that was stopped or failed, only those that it completed."
        ),
    )
    display: Short = Field(default="", description="Share of the steps that is completed, as text, for example 42%.")
    loss: Short = Field(default="", description="Training loss of the last step.")
    tokens_per_second: Short = Field(
        default="", description="Tokens per second in the last step, of all ranks together."
    )
    eta: Short = Field(default="", description="Estimated time until the last step, as text, for example 3h12m.")
    last_step_time: Time | None = Field(
        default=None,
        description="When the last step ended, by the trainer's clock. Absent until the current attempt has reported.",
    )
    advance_time: Time | None = Field(
        default=None,
        description="When the operator was told of the last new step; lifecycle.stallSeconds counts from this time.",
    )


class MemoryStatus(Written):
    """Measured peaks of the rank with the highest."""

    device: Short = Field(
        default="", description="Peak memory use of a device, and its budget, as text, for example 71Gi/80Gi."
    )
    spilled: Short = Field(
        default="", description="Peak bytes of a rank in host memory and on NVMe, added up, as text, for example 41Mi."
    )
    peak: TierQuantities | None = Field(
        default=None,
        description=(
            "Measured peak bytes of the attempt so far, per tier, of the rank (training process) with the highest."
        ),
    )
    activations: Quantity | None = Field(
        default=None,
        description=(
            "Bytes of each rank's spill file (on NVMe) that activations may use now. The operator lowers this "
            "figure while the attempt runs if other programs fill the spill volume (a live correction). With mode "
            "Advise nothing is lowered, and this is what Auto would allow. Absent if activations cannot move to "
            "host memory."
        ),
    )
    correction: Text = Field(
        default="",
        description=(
            "What the last live correction of the attempt (see status.memory.activations) changed, and why. With "
            "mode Advise: what Auto would have changed. Empty if there was none."
        ),
    )


class CheckpointStatus(Written):
    step: Count = Field(
        default=0, description="Number of optimizer steps after which the last committed checkpoint was written."
    )
    epoch: Count = Field(default=0, description="Number of the attempt that wrote the last committed checkpoint.")
    path: Text = Field(
        default="",
        description=(
            "Path of the last committed checkpoint inside the pods, where checkpoint.claim is mounted at /checkpoints."
        ),
    )
    time: Time | None = Field(default=None, description="When the last committed checkpoint was committed.")


class FaultyNode(Written):
    node: Annotated[str, Field(max_length=253)] = Field(description="Name of the node.")
    reason: Short = Field(default="", description="Why the attempt that failed on this node ended.")
    time: Time = Field(description="When the attempt that failed on this node ended.")


class Attempts(Written):
    total: AttemptNumber = Field(
        default=0, description="Number of attempts so far. It is also the number of the newest attempt."
    )
    ended: AttemptNumber = Field(default=0, description="Number of the most recently ended attempt.")
    restarts: Count = Field(default=0, description="Number of restarts that count against lifecycle.maxRestarts.")
    disruptions: Count = Field(
        default=0,
        description="Number of attempts ended by disruptions, such as lost nodes, deleted pods or Jobs, "
        "and preemptions.",
    )
    memory_errors: Count = Field(default=0, description="Number of attempts that ended because memory ran out.")
    last_reason: Annotated[Short, BeforeValidator(_reason_today)] = Field(
        default="", description="Why the most recently ended attempt ended, in one CamelCase word (docs/conditions.md)."
    )
    last_node: Annotated[str, Field(max_length=253)] = Field(
        default="",
        description="Node of the pod that made the most recently ended attempt end. Empty if no single pod did.",
    )
    faulty_nodes: Annotated[tuple[FaultyNode, ...], Field(max_length=MOST_FAULTY_NODES)] | None = Field(
        default=None,
        description=(
            "Nodes that this job avoids for a day, because a device or drive failed there, or because two "
            "attempts in a row crashed there."
        ),
    )
    last_rank: Count | None = Field(
        default=None,
        description=(
            "Rank (training process) that failed first in the most recently ended attempt. Absent if it is not known."
        ),
    )
    start_time: Time | None = Field(default=None, description="When the newest attempt was started.")
    end_time: Time | None = Field(default=None, description="When the most recently ended attempt ended.")
    pending_time: Time | None = Field(
        default=None,
        description=(
            "When the job began to wait for all pods of an attempt to run. Absent while the job does not wait for this."
        ),
    )
    active_time: Time | None = Field(
        default=None,
        description="When all pods of the current attempt first ran. Absent until then, and between attempts.",
    )
    active_seconds: Count = Field(
        default=0,
        description=(
            "Seconds that all ended attempts ran, added up. An attempt runs from when all its pods run until it ends."
        ),
    )
    last_active_seconds: Count = Field(
        default=0,
        description="Seconds that the most recently ended attempt ran, from when all its pods ran until it ended.",
    )
    short_in_a_row: Count = Field(
        default=0,
        description=(
            "Number of attempts in a row that ended within 10 minutes of their start. From the second on the "
            "operator pauses before the next attempt: 1 second, then twice as long each time, at most 5 minutes."
        ),
    )


class Escalation(Written):
    """An attempt that ran out of memory, and what the next attempt does differently."""

    attempt: Count = Field(description="Number of the attempt that ran out of memory.")
    reason: Short = Field(
        default="", description="Kind of memory error that ended the attempt, for example DeviceOutOfMemory."
    )
    change: Text = Field(
        default="",
        description="What the next attempt does differently; with mode Advise, what Auto would do differently.",
    )


class MemberStatus(Written):
    name: Name = Field(description="Name of the member.")
    step: Count = Field(default=0, description="Number of optimizer steps that this member has completed.")
    steps: Count = Field(
        default=0,
        description=(
            "Number of optimizer steps that this member is to train; a round of successive halving may stop it earlier."
        ),
    )
    loss: Short = Field(default="", description="Training loss of this member's last step.")
    objective: Short = Field(default="", description="This member's newest value of spec.objective.metric.")
    state: Short = Field(
        default="",
        description=(
            "For display. Running; Parked: it waits for its turn on a device, or for other members; Stopped: by a "
            "round of successive halving; Complete; Failed."
        ),
    )
    message: Text = Field(default="", description="Why the member was stopped, or failed. Empty otherwise.")


class TrainingJobStatus(Written):
    """What the operator observed and decided. An attempt is one start of the job's pods; a rank is one training
    process."""

    observed_generation: Count = Field(default=0, description="Generation of the spec that this status describes.")
    state: Short = Field(
        default="",
        description="State of the job in one word, for example Queued, Running, Suspended, Complete, Failed.",
    )
    conditions: tuple[Condition, ...] = Field(
        default=(), max_length=32, description="Conditions of the job.", json_schema_extra=LIST_BY_TYPE
    )
    plan: PlanStatus | None = Field(
        default=None, description="The plan of the current attempt, which nodes it prefers, and why."
    )
    progress: Progress | None = Field(default=None, description="Progress of the training.")
    memory: MemoryStatus | None = Field(default=None, description="Measured memory use of the training processes.")
    checkpoint: CheckpointStatus | None = Field(default=None, description="The last checkpoint that was committed.")
    attempts: Attempts | None = Field(
        default=None,
        description=(
            "Number and history of attempts. An attempt is one start of the job's pods; after a failure the "
            "operator starts another one."
        ),
    )
    inherited: Annotated[tuple[Short, ...], Field(max_length=16)] = Field(
        default=(),
        description=(
            "Fields of spec whose values the current attempt takes from the OperatorConfig, for example pod.image."
        ),
    )
    escalations: tuple[Escalation, ...] = Field(
        default=(),
        max_length=MOST_ESCALATIONS,
        description=(
            "Attempts that ran out of memory, and what the next attempt did differently; with mode Advise, what "
            "Auto would do differently."
        ),
    )
    members: tuple[MemberStatus, ...] = Field(
        default=(),
        max_length=64,
        description="Members of a sweep, as listed in spec.members or made by spec.search.",
        json_schema_extra=LIST_BY_NAME,
    )
    best_member: Annotated[str, Field(max_length=63)] = Field(
        default="", description="Name of the member that is the best so far, by spec.objective. Empty without members."
    )
    start_time: Time | None = Field(default=None, description="When the first attempt of the job started.")
    completion_time: Time | None = Field(default=None, description="When the job completed or failed.")
