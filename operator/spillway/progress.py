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

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from spillway.field_types import MAX_COUNT

MAX_BYTES = 2**60
Bytes = Annotated[int, Field(ge=0, le=MAX_BYTES)]
Steps = Annotated[int, Field(ge=0, le=MAX_COUNT)]
"""as the status counts them: what a report says must fit there"""
Seconds = Annotated[float, Field(ge=0.0, le=1e10, allow_inf_nan=False)]

PROGRESS_VERSION: Literal[1] = 1
"""this one and the one before are accepted: trainers outlive an upgrade of the operator"""
URL_VARIABLE = "KUBEFLOW_TRAINER_SERVER_URL"
TOKEN_VARIABLE = "KUBEFLOW_TRAINER_SERVER_TOKEN"  # noqa: S105 - the name of a variable
"""holds the path of a file with the token, which is renewed while the pod lives"""
CA_VARIABLE = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
TOKEN_AUDIENCE = "progress.spillway.dev"  # noqa: S105
LONGEST_REPORT = 64 * 1024
"""bytes of one POST"""


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
    """Bytes of the fullest rank, per tier."""

    device: Bytes = 0
    host: Bytes = 0
    nvme: Bytes = 0


class CommittedCheckpoint(Message):
    step: Steps
    epoch: Annotated[int, Field(ge=1, le=2**31)]
    path: Annotated[str, Field(max_length=1024)] = ""
    time: Annotated[float, Field(ge=0.0, le=1e11, allow_inf_nan=False)] = 0.0
    """Unix seconds"""


class TrainingProgress(Message):
    """Our own key: what Kubeflow's protocol has no words for."""

    version: Literal[0, 1] = PROGRESS_VERSION
    epoch: Annotated[int, Field(ge=1, le=2**31)]
    step: Steps
    steps: Steps
    loss: Annotated[float, Field(ge=-1e30, le=1e30, allow_inf_nan=False)] | None = None
    tokens_per_second: Seconds = 0.0
    step_seconds: Seconds = 0.0
    last_step_time: Annotated[float, Field(ge=0.0, le=1e11, allow_inf_nan=False)] = 0.0
    """Unix seconds"""
    peak: TierFigures = TierFigures()
    """highest bytes held since the attempt began"""
    budget: TierFigures = TierFigures()
    checkpoint: CommittedCheckpoint | None = None


class ProgressReport(Message):
    trainer_status: TrainerStatus = TrainerStatus()
    spillway: TrainingProgress | None = None


class ProgressAnswer(Message):
    """The operator's answer; corrections of the plan will travel here."""

    version: Annotated[int, Field(ge=0)] = PROGRESS_VERSION
    """of any operator: a trainer that runs outlives upgrades, and the epoch means the same in all of them"""
    epoch: int
    """the attempt that the operator regards as the present one"""
