"""ProgressReport: what rank 0 tells the operator while it trains, in the Kubeflow progress protocol with one more key.

    POST KUBEFLOW_TRAINER_SERVER_URL
    {"trainerStatus": {"progressPercentage": 42, "estimatedRemainingSeconds": 311, "lastUpdatedTime": "...",
                       "metrics": [{"name": "loss", "value": "5.549"}]},
     "spillway": {"version": 1, "epoch": 3, "step": 420, "steps": 1000, ...}}
    -> 200 {"version": 1, "epoch": 3}

A script that knows nothing of Spillway (Hugging Face's callback) sends only `trainerStatus`. Every value is bounded
here, so that no payload can make the operator write an oversized one.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from spillway.api.field_types import MAX_COUNT, MAX_MEMBERS, MemberName

MAX_BYTES = 2**60
Bytes = Annotated[int, Field(ge=0, le=MAX_BYTES)]
Steps = Annotated[int, Field(ge=0, le=MAX_COUNT)]
"""A number of steps, bounded like the counts of the status, into which reported values are written."""
Seconds = Annotated[float, Field(ge=0.0, le=1e10, allow_inf_nan=False)]
Loss = Annotated[float, Field(ge=-1e30, le=1e30, allow_inf_nan=False)]

PROGRESS_VERSION: Literal[1] = 1
"""Reports of this version and of the one before are accepted, because trainers keep running when the operator is
upgraded."""
URL_VARIABLE = "KUBEFLOW_TRAINER_SERVER_URL"
TOKEN_VARIABLE = "KUBEFLOW_TRAINER_SERVER_TOKEN"  # noqa: S105 - the name of a variable
"""The variable holds the path of a file with the token, which is renewed while the pod lives."""
CA_VARIABLE = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
TOKEN_AUDIENCE = "progress.spillway.dev"  # noqa: S105
LONGEST_REPORT = 64 * 1024
"""Largest size of one POST, bytes."""
LONGEST_REASON = 256
"""Largest number of characters in the reason that a report gives for one member."""


class Message(BaseModel):
    """A message in JSON with camelCase keys. Unknown keys are ignored, so that a newer sender can add some."""

    model_config = ConfigDict(frozen=True, alias_generator=to_camel, populate_by_name=True, extra="ignore")


class NamedValue(Message):
    name: Annotated[str, Field(max_length=64)]
    value: Annotated[str, Field(max_length=64)]


class TrainerStatus(Message):
    """The status as Kubeflow's clients send it."""

    progress_percentage: Annotated[int, Field(ge=0, le=100)] | None = None
    estimated_remaining_seconds: Annotated[int, Field(ge=0, le=10**10)] | None = None
    last_updated_time: Annotated[str, Field(max_length=40)] = ""
    metrics: Annotated[tuple[NamedValue, ...], Field(max_length=256)] = ()


class TierFigures(Message):
    """Bytes per tier, of the rank with the most."""

    device: Bytes = 0
    host: Bytes = 0
    nvme: Bytes = 0


class PodMemory(Message):
    """Memory use of the reporting pod, from its cgroup."""

    peak: Bytes = 0
    """Peak bytes since the pod began, including page cache; 0 if the kernel does not report it."""
    is_whole: bool = False
    """Whether the run is over and did all its work in this pod. The pod of an earlier attempt may have built the
    corpus."""


class SpillVolume(Message):
    """The spill volume with the least free bytes, of all ranks of an attempt."""

    size: Bytes
    """Size of the file system."""
    free_at_start: Bytes
    """Free bytes after the ranks had created their spill files."""
    free: Bytes
    """Free bytes now."""
    num_ranks: Annotated[int, Field(ge=1, le=2**18)]
    """Number of ranks with spill files on this volume."""
    activations: Bytes
    """Bytes of one rank's spill file that activations may use: as planned, or as the last correction set it."""
    host_room: Bytes
    """Bytes of one rank's host memory into which a correction may still move activations."""


class CommittedCheckpoint(Message):
    step: Steps
    epoch: Annotated[int, Field(ge=1, le=2**31)]
    path: Annotated[str, Field(max_length=1024)] = ""
    time: Annotated[float, Field(ge=0.0, le=1e11, allow_inf_nan=False)] = 0.0
    """Unix seconds"""


class MemberState(StrEnum):
    """State of a member of a sweep."""

    RUNNING = "Running"
    """The member has its turn and trains."""
    PARKED = "Parked"
    """The member waits for a turn, or at a halving round for other members."""
    STOPPED = "Stopped"
    """Stopped by a halving round."""
    COMPLETE = "Complete"
    FAILED = "Failed"

    @property
    def is_over(self) -> bool:
        return self in (MemberState.STOPPED, MemberState.COMPLETE, MemberState.FAILED)


class MemberProgress(Message):
    """Progress of one member of a sweep."""

    name: MemberName
    step: Steps = 0
    num_steps: Steps = 0
    """Steps that it trains unless a round stops it."""
    loss: Loss | None = None
    """Loss of its last step."""
    objective: Loss | None = None
    """Newest value of the objective's metric; None: none yet, or non-finite."""
    state: MemberState = MemberState.PARKED
    reason: Annotated[str, Field(max_length=LONGEST_REASON)] = ""
    """Why it was stopped, or failed."""


class TrainingProgress(Message):
    """Our own key, for what Kubeflow's protocol cannot express."""

    version: Literal[0, 1] = PROGRESS_VERSION
    epoch: Annotated[int, Field(ge=1, le=2**31)]
    step: Steps
    steps: Steps
    loss: Loss | None = None
    tokens_per_second: Seconds = 0.0
    step_seconds: Seconds = 0.0
    last_step_time: Annotated[float, Field(ge=0.0, le=1e11, allow_inf_nan=False)] = 0.0
    """Unix seconds"""
    peak: TierFigures = TierFigures()
    """Peak bytes since the attempt began."""
    budget: TierFigures = TierFigures()
    pod: PodMemory = PodMemory()
    spill_volume: SpillVolume | None = None
    """None if no activations are on NVMe, or if none of them could move elsewhere."""
    checkpoint: CommittedCheckpoint | None = None
    members: Annotated[tuple[MemberProgress, ...], Field(max_length=MAX_MEMBERS)] = ()
    """Members of a sweep, in the order of the spec; `step` and `steps` are then totals of all members (steps_of)."""
    best_member: MemberName | Literal[""] = ""
    """Name of the best member so far."""

    @model_validator(mode="after")
    def _members_have_names_of_their_own(self) -> Self:
        names = {one.name for one in self.members}
        if len(names) < len(self.members):
            raise ValueError("two entries of members have the same name; give each member its own name")
        if self.best_member and self.best_member not in names:
            raise ValueError(
                "bestMember is not the name of a member; give a name from members, or leave bestMember empty"
            )
        return self


def steps_of(members: Iterable[MemberProgress]) -> tuple[int, int]:
    """The steps that all members together have made, and those that they will have made at the end; a member that was
    stopped or failed makes no more. Both are limited to what a report may contain."""
    known = tuple(members)
    ended_early = (MemberState.STOPPED, MemberState.FAILED)
    made = sum(one.step for one in known)
    left = sum(max(0, one.num_steps - one.step) for one in known if one.state not in ended_early)
    return min(made, MAX_COUNT), min(made + left, MAX_COUNT)


class ProgressReport(Message):
    trainer_status: TrainerStatus = TrainerStatus()
    spillway: TrainingProgress | None = None


class ProgressAnswer(Message):
    """The operator's answer. It carries corrections of the plan, which change where bytes are kept, never what is
    computed."""

    version: Annotated[int, Field(ge=0)] = PROGRESS_VERSION
    """Any version is accepted, because running trainers outlive upgrades of the operator, and the epoch means the same
    in all versions."""
    epoch: int
    """The operator's current attempt."""
    activations: Bytes | None = None
    """Bytes of each rank's spill file that activations may use from now on; None: unchanged."""
