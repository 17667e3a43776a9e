"""The fields of every TrainingJob, whether it trains a model that the spec describes (training_job.py) or runs a script
(script.py)."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from spillway.api.field_types import Fields, Flag, Name, StringMap, reject
from spillway.api.limits import MANAGER, MAX_ENV_BYTES, MAX_NAME_LENGTH
from spillway.api.memory import Memory, Parallelism, Spill
from spillway.api.model import Location
from spillway.api.pod import Checkpoint, Lifecycle, Pod, Scheduling


class JobSpec(Fields):
    parallelism: Parallelism = Field(
        default=Parallelism(), description="Number and kind of devices, and how the model is sharded among them."
    )
    memory: Memory = Field(
        default=Memory(),
        description="Memory budgets, and where parameters, activations and optimizer states may be kept.",
    )
    spill: Spill = Field(default=Spill(), description="Volumes for bytes that are spilled to NVMe.")
    checkpoint: Checkpoint = Field(
        default=Checkpoint(), description="When and where checkpoints are written, and from which one training starts."
    )
    pod: Pod = Field(default=Pod(), description="Image, environment and further settings of the pods.")
    scheduling: Scheduling = Field(
        default=Scheduling(), description="Which nodes the pods run on, and when they start."
    )
    lifecycle: Lifecycle = Field(
        default=Lifecycle(),
        description=(
            "Deadlines and restarts. An attempt is one start of the job's pods; after a failure the operator "
            "starts another one."
        ),
    )
    managed_by: Annotated[Name, Field(max_length=63)] = Field(
        default=MANAGER,
        description=(
            "Name of the controller that runs the job. Spillway's operator ignores a job with any other name than "
            "the default."
        ),
    )
    suspend: Flag = Field(
        default=False,
        description=(
            "True: the running attempt writes a checkpoint and ends, and no other attempt starts. False: training "
            "continues from the last checkpoint."
        ),
    )

    @property
    def places(self) -> dict[str, Location]:
        """Every directory that Spillway reads for the job, by field below spec."""
        return {}

    @model_validator(mode="after")
    def _environment_is_bounded(self) -> Self:
        size = sum(len(variable.value or "") for variable in self.pod.env)
        if size > MAX_ENV_BYTES:
            reject(
                [
                    (
                        "pod.env",
                        f"all values together have {size} characters, at most {MAX_ENV_BYTES} are allowed; "
                        f"move long values to a Secret",
                    )
                ]
            )
        return self


class Metadata(Fields):
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)] = Field(description="Name of the job.")
    namespace: Annotated[str, Field(min_length=1, max_length=63)] = Field(
        default="default", description="Namespace of the job."
    )
    labels: StringMap = Field(default={}, description="Labels.")
    annotations: dict[str, str] = Field(default={}, description="Annotations.")

    @model_validator(mode="after")
    def _dns_labels(self) -> Self:
        problems = []
        for field, value in (("name", self.name), ("namespace", self.namespace)):
            if not _is_dns_label(value):
                wanted = "lower-case letters, digits and '-' are allowed, with a letter or digit first and last"
                problems.append((field, f"{wanted}; for example {_as_dns_label(value)}"))
        reject(problems)
        return self


def _is_dns_label(text: str) -> bool:
    return text.isascii() and text.replace("-", "").isalnum() and text == text.lower().strip("-")


def _as_dns_label(text: str) -> str:
    kept = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in text.lower())
    return kept.strip("-")[:MAX_NAME_LENGTH].strip("-") or "my-job"
