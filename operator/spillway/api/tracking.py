"""spec.tracking of a TrainingJob: the experiment trackers that show a run elsewhere."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from spillway.api.field_types import Fields, Name, matching, reject

TRACKING_URI = matching(r"^https?://[^/\s@]+(/\S*)?$", "https://mlflow.example.com")
ONE_TRACKER = "set at least one tracker: tensorBoard, mlflow or wandb"
WandbName = Annotated[str, Field(min_length=1, max_length=128, pattern=matching(r"^[^/\\#?%:]+$", "my-project"))]


class TensorBoard(Fields):
    """Files for TensorBoard."""


class MLflow(Fields):
    """A run on an MLflow server."""

    uri: Annotated[str, Field(max_length=2048, pattern=TRACKING_URI)] = Field(
        description=(
            "Address of the MLflow server, without credentials. Set the credentials as environment variables "
            "(docs/tracking.md)."
        )
    )
    experiment: Name = Field(
        default="Default", description="Name of the MLflow experiment, which is created if it is missing."
    )


class WeightsAndBiases(Fields):
    """A run of Weights & Biases. The key is the environment variable WANDB_API_KEY, from a Secret in pod.env."""

    project: WandbName = Field(description="Name of the W&B project, which is created if it is missing.")
    entity: WandbName | None = Field(
        default=None, description="Team or user that the run belongs to. Default: the owner of the API key."
    )
    mode: Literal["online", "offline"] = Field(
        default="online",
        description=(
            "online: events are sent while the job trains. offline: events are written to files in the directory "
            "wandb/, next to tensorboard/; upload them with `wandb sync`."
        ),
    )


class Tracking(Fields):
    """Trackers receive what run.jsonl records. A tracker that cannot be reached never stops a run."""

    tensor_board: TensorBoard | None = Field(
        default=None,
        description=(
            "Writes event files for TensorBoard. The value is an empty object: tensorBoard: {}. A local run with "
            "--output DIR writes them to DIR/tensorboard, a job in a cluster to a directory next to its "
            "checkpoints. Default: not written."
        ),
    )
    mlflow: MLflow | None = Field(
        default=None, description="Shows the job as a run on an MLflow server. Default: none."
    )
    wandb: WeightsAndBiases | None = Field(
        default=None, description="Shows the job as a run in Weights & Biases (W&B). Default: none."
    )

    @model_validator(mode="after")
    def _at_least_one(self) -> Self:
        reject([] if self.tensor_board or self.mlflow or self.wandb else [("", ONE_TRACKER)])
        return self
