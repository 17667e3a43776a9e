"""ProgressReport: what rank 0 tells the operator while it trains; the Kubeflow progress protocol and one key of ours.

    POST KUBEFLOW_TRAINER_SERVER_URL
    {"trainerStatus": {"progressPercentage": 42, "estimatedRemainingSeconds": 311, "lastUpdatedTime": "...",
                       "metrics": [{"name": "loss", "value": "5.549"}]},
     "spillway": {"version": 1, "epoch": 3, "step": 420, "steps": 1000, ...}}
    -> 200 {"version": 1, "epoch": 3}

A script that knows nothing of Spillway (Hugging Face's callback) sends `trainerStatus` alone. Every value is bounded
here: the operator writes none that a payload could blow up.
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
"""Steps as the status counts them: reported values must fit."""
Seconds = Annotated[float, Field(ge=0.0, le=1e10, allow_inf_nan=False)]
Loss = Annotated[float, Field(ge=-1e30, le=1e30, allow_inf_nan=False)]

PROGRESS_VERSION: Literal[1] = 1
"""This version and the one before are accepted: trainers outlive an upgrade of the operator."""
URL_VARIABLE = "KUBEFLOW_TRAINER_SERVER_URL"
TOKEN_VARIABLE = "KUBEFLOW_TRAINER_SERVER_TOKEN"  # noqa: S105 - the name of a variable
"""Path of a file with the token, which is renewed while the pod lives."""
CA_VARIABLE = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
TOKEN_AUDIENCE = "progress.spillway.dev"  # noqa: S105
LONGEST_REPORT = 64 * 1024
"""Bytes of one POST."""
LONGEST_REASON = 256
"""Characters of the reason that a report gives for one member."""


class Message(BaseModel):
    """camelCase in JSON; unknown keys are ignored, so that a newer side may say more."""

    model_config = ConfigDict(frozen=True, alias_generator=to_camel, populate_by_name=True, extra="ignore")


class NamedValue(Message):
    name: Annotated[str, Field(max_length=64)]
    value: Annotated[str, Field(max_length=64)]


class TrainerStatus(Message):
    """As Kubeflow's clients send it."""

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
    """Of the pod that reports, by its cgroup."""

    peak: Bytes = 0
    """Peak bytes since it began, including page cache; 0: the kernel does not report it."""
    is_whole: bool = False
    """Whether the run is over and did all its work in this pod; an earlier attempt's pod may have built the corpus."""


class SpillVolume(Message):
    """The spill volume with the least free bytes, of all ranks of an attempt."""

    size: Bytes
    """Size of the file system."""
    free_at_start: Bytes
    """Free bytes once the ranks had made their spill files."""
    free: Bytes
    """Free bytes now."""
    num_ranks: Annotated[int, Field(ge=1, le=2**18)]
    """Ranks with spill files there."""
    activations: Bytes
    """Bytes of one rank's spill file that activations may use: the plan's, or what a correction left."""
    host_room: Bytes
    """Bytes of one rank's host memory into which a correction may still move activations."""


class CommittedCheckpoint(Message):
    step: Steps
    epoch: Annotated[int, Field(ge=1, le=2**31)]
    path: Annotated[str, Field(max_length=1024)] = ""
    time: Annotated[float, Field(ge=0.0, le=1e11, allow_inf_nan=False)] = 0.0
    """Unix seconds"""


class MemberState(StrEnum):
    """Of a member of a sweep."""

    RUNNING = "Running"
    """It has its turn."""
    PARKED = "Parked"
    """It waits: for a turn, or at a round for other members."""
    STOPPED = "Stopped"
    """Stopped by a halving round."""
    COMPLETE = "Complete"
    FAILED = "Failed"

    @property
    def is_over(self) -> bool:
        return self in (MemberState.STOPPED, MemberState.COMPLETE, MemberState.FAILED)


class MemberProgress(Message):
    """How far one member of a sweep is."""

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
    """Our own key: what Kubeflow's protocol has no words for."""

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
    """None: no activations are on NVMe, or nothing of them could go elsewhere"""
    checkpoint: CommittedCheckpoint | None = None
    members: Annotated[tuple[MemberProgress, ...], Field(max_length=MAX_MEMBERS)] = ()
    """Members of a sweep, in the order of the spec; `step` and `steps` are then those of all of them (steps_of)."""
    best_member: MemberName | Literal[""] = ""
    """The best of them so far."""

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
    """Steps that all members together made, and will have made at their end: of one that was stopped or failed, no more
    than it has made. As many as a report may say at most."""
    known = tuple(members)
    ended_early = (MemberState.STOPPED, MemberState.FAILED)
    made = sum(one.step for one in known)
    left = sum(max(0, one.num_steps - one.step) for one in known if one.state not in ended_early)
    return min(made, MAX_COUNT), min(made + left, MAX_COUNT)


class ProgressReport(Message):
    trainer_status: TrainerStatus = TrainerStatus()
    spillway: TrainingProgress | None = None


class ProgressAnswer(Message):
    """The operator's answer. Corrections of the plan travel here: where bytes live, never how much is computed."""

    version: Annotated[int, Field(ge=0)] = PROGRESS_VERSION
    """Version of any operator: running trainers outlive upgrades, and the epoch means the same in all of them."""
    epoch: int
    """The operator's current attempt."""
    activations: Bytes | None = None
    """Bytes of each rank's spill file that activations may use from now on; None: unchanged."""
