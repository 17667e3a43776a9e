"""TrainingJob, `spillway.dev/v1alpha1`: every field with its meaning, unit and default. CRDs are made from these types.

Paths in messages are those of the YAML. Floats are strings and byte counts are quantities there, numbers here
(field_types.py). `load_job` (load.py) is the way from a file to a TrainingJob.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from spillway.api.field_types import LIST_BY_NAME, MAX_MEMBERS, Fields, Flag, Name, StringMap, refuse
from spillway.api.limits import (
    CHAT_NEEDS_SOURCE,
    MANAGER,
    MAX_ENV_BYTES,
    MAX_NAME_LENGTH,
    NEEDS_EVALUATION,
    TOKENS_NEED_SOURCE,
)
from spillway.api.memory import Memory, Parallelism, Spill
from spillway.api.model import Data, Location, Model
from spillway.api.pod import FIXED_WITHOUT_PLAN, Checkpoint, Lifecycle, Member, Objective, Pod, Scheduling
from spillway.api.tracking import Tracking
from spillway.api.training import Training


class TrainingJobSpec(Fields):
    """What the user wants. model, data, training and parallelism never change; memory, scheduling and spill change only
    while suspended; suspend and lifecycle at any time."""

    model: Model = Field(description="What is trained.")
    data: Data = Field(description="What it is trained on.")
    training: Training = Field(description="How it is trained.")
    parallelism: Parallelism = Field(default=Parallelism(), description="How many devices.")
    memory: Memory = Field(default=Memory(), description="Where bytes may live.")
    spill: Spill = Field(default=Spill(), description="The volume for NVMe spill.")
    members: tuple[Member, ...] = Field(
        default=(), max_length=MAX_MEMBERS,
        description="Several models in one job, sharing its devices. Default: one model.",
        json_schema_extra=LIST_BY_NAME,
    )  # fmt: skip
    objective: Objective | None = Field(default=None, description="What makes one member better than another.")
    checkpoint: Checkpoint = Field(default=Checkpoint(), description="When and where checkpoints are written.")
    tracking: Tracking | None = Field(
        default=None,
        exclude_if=lambda given: given is None,  # job.json as every version before knows it
        description="Experiment trackers that show the run elsewhere. Default: none.",
    )
    pod: Pod = Field(default=Pod(), description="Image, environment and further settings of the pods.")
    command: tuple[Annotated[str, Field(max_length=4096)], ...] = Field(
        default=(), max_length=64, description="Not supported yet: any script under torchrun, with mounts and restarts."
    )
    scheduling: Scheduling = Field(default=Scheduling(), description="Which nodes, when.")
    lifecycle: Lifecycle = Field(default=Lifecycle(), description="Deadlines and retries.")
    managed_by: Annotated[Name, Field(max_length=63)] = Field(
        default=MANAGER, description="Controller that runs the job; others ignore it."
    )
    suspend: Flag = Field(
        default=False, description="True: end the running attempt with a checkpoint, and start no other."
    )

    @property
    def texts(self) -> dict[str, Location]:
        """Where the text or the chats are that are trained and evaluated on, by field below spec."""
        places = {"data.text": self.data.text, "data.chat": self.data.chat, "data.tokens": self.data.tokens}
        if evaluation := self.data.evaluation:
            places |= {"data.evaluation.text": evaluation.text, "data.evaluation.chat": evaluation.chat}
        return {field: place for field, place in places.items() if place is not None}

    @property
    def places(self) -> dict[str, Location]:
        """Every directory that the job reads, by field below spec: the data's, the model's, another run's."""
        others = {"model.source": self.model.source, "checkpoint.from": self.checkpoint.from_}
        return self.texts | {field: place for field, place in others.items() if place is not None}

    @property
    def compared_by(self) -> Objective:
        """The objective; without one evaluation loss where there is any, else the loss."""
        if self.objective is not None:
            return self.objective
        return Objective(metric="Loss" if self.data.evaluation is None else "EvaluationLoss")

    @property
    def uses_evaluation(self) -> list[str]:
        """Fields below spec that ask what evaluations say, of one model alone."""
        given = {
            "training.earlyStopping": self.training.early_stopping,
            "checkpoint.keepBest": self.checkpoint.keep_best,
        }
        return [field for field, value in given.items() if value]

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        problems = []
        training, world_size = self.training, self.parallelism.world_size
        if training.global_batch_size % (training.micro_batch_size * world_size):
            product = f"microBatchSize x nodes x devicesPerNode ({training.micro_batch_size} x {world_size})"
            problems.append(("training.globalBatchSize", f"must be a multiple of {product}"))
        config = self.model.config
        learned = config is not None and config.architecture in ("gpt2", "bert")
        if config is not None and learned and training.sequence_length > config.max_positions:
            problems.append(("training.sequenceLength", f"at most model.config.maxPositions ({config.max_positions})"))
        size = sum(len(variable.value or "") for variable in self.pod.env)
        if size > MAX_ENV_BYTES:
            problems.append(
                ("pod.env", f"the values have {size} characters; at most {MAX_ENV_BYTES}: refer to a Secret")
            )
        if self.data.chat is not None and self.model.source is None:
            problems.append(("data.chat", CHAT_NEEDS_SOURCE))
        if self.data.tokens is not None and self.model.source is None:
            problems.append(("data.tokens", TOKENS_NEED_SOURCE))
        is_float16, strategy = self.model.precision.compute == "float16", self.parallelism.strategy
        if is_float16 and strategy not in ("Auto", "Ddp"):
            needed = f"needs loss scaling, which {strategy} does not have; use Ddp, or bfloat16"
            problems.append(("parallelism.strategy", f"model.precision.compute: float16 {needed}"))
        if training.optimizer.moments == "int8" and strategy not in ("Auto", "Ddp"):
            blocks = f"int8 has a scale for every 256 values of a parameter, which {strategy} divides elsewhere"
            problems.append(("parallelism.strategy", f"training.optimizer.moments: {blocks}; use Ddp, or bfloat16"))
        if self.memory.mode == "Disabled" and self.pod.resources.memory is not None:
            problems.append(("pod.resources.memory", FIXED_WITHOUT_PLAN))
        if self.data.evaluation is None:
            problems += [(field, NEEDS_EVALUATION) for field in self.uses_evaluation]
        if training.loss_scale is not None and not is_float16:
            needless = "model.precision.compute: float16 alone scales the loss; leave it out"
            problems.append(("training.lossScale", needless))
        refuse(problems)
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
        refuse(problems)
        return self


class TrainingJob(Fields):
    """A training run, and where its memory lives."""

    api_version: Literal["spillway.dev/v1alpha1"] = Field(description="Version of this schema.")
    kind: Literal["TrainingJob"] = Field(description="Kind of the object.")
    metadata: Metadata = Field(description="Name and namespace.")
    spec: TrainingJobSpec = Field(description="What the user wants.")


def _is_dns_label(text: str) -> bool:
    return text.isascii() and text.replace("-", "").isalnum() and text == text.lower().strip("-")


def _as_dns_label(text: str) -> str:
    kept = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in text.lower())
    return kept.strip("-")[:MAX_NAME_LENGTH].strip("-") or "my-job"
