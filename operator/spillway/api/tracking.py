"""spec.tracking of a TrainingJob: the experiment trackers that show a run elsewhere."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from spillway.api.field_types import Fields, Name, refuse

TRACKING_URI = r"^https?://[^/\s@]+(/\S*)?$"
ONE_TRACKER = "name a tracker: tensorBoard, mlflow or wandb"
WandbName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^/\\#?%:]+$")]


class TensorBoard(Fields):
    """Files for TensorBoard."""


class MLflow(Fields):
    """A run on an MLflow server."""

    uri: Annotated[str, Field(max_length=2048, pattern=TRACKING_URI)] = Field(
        description="Address of the server, without credentials: these are environment variables, see docs/tracking.md."
    )
    experiment: Name = Field(default="Default", description="Experiment; created if it is missing.")


class WeightsAndBiases(Fields):
    """A run of Weights & Biases. The key is the environment variable WANDB_API_KEY, from a Secret in pod.env."""

    project: WandbName = Field(description="Project; created if it is missing.")
    entity: WandbName | None = Field(default=None, description="Team or user. Default: the API key's own.")
    mode: Literal["online", "offline"] = Field(
        default="online", description="offline: files only, in wandb/ next to tensorboard/, for `wandb sync`."
    )


class Tracking(Fields):
    """Trackers get what run.jsonl records. One that cannot be reached never stops a run."""

    tensor_board: TensorBoard | None = Field(
        default=None,
        description="Event files: in OUTPUT/tensorboard of a local run, next to the checkpoints in a cluster. "
        "Default: not written.",
    )
    mlflow: MLflow | None = Field(default=None, description="A run on an MLflow server. Default: none.")
    wandb: WeightsAndBiases | None = Field(default=None, description="A run of Weights & Biases. Default: none.")

    @model_validator(mode="after")
    def _at_least_one(self) -> Self:
        refuse([] if self.tensor_board or self.mlflow or self.wandb else [("", ONE_TRACKER)])
        return self
