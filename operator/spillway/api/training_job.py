"""TrainingJob, `spillway.dev/v1alpha1`: every field with its meaning, unit and default. CRDs are made from these types.

Messages name fields by their paths in YAML. In YAML, floats are strings and byte counts are quantities; here, both are
numbers (field_types.py). `load_job` (load.py) reads a TrainingJob from a file.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from spillway.api.field_types import LIST_BY_NAME, MAX_MEMBERS, Fields, reject
from spillway.api.job_spec import JobSpec, Metadata
from spillway.api.limits import CHAT_NEEDS_SOURCE, NEEDS_EVALUATION, TOKENS_NEED_SOURCE
from spillway.api.model import Data, Location, Model
from spillway.api.pod import FIXED_WITHOUT_PLAN, Member, Objective
from spillway.api.sweep.search_space import MEMBERS_ARE_MADE, SearchSpace
from spillway.api.tracking import Tracking
from spillway.api.training import Training


class TrainingJobSpec(JobSpec):
    """The job that the user wants. The fields model, data, training, parallelism, command and managedBy cannot be
    changed. memory, scheduling, spill, checkpoint, search, members and objective can be changed only while the job is
    suspended (suspend: true), all other fields at any time. A running attempt keeps the values of pod and tracking that
    it began with.
    """

    model: Model = Field(description="Model that is trained. Set exactly one of config, source and entrypoint.")
    data: Data = Field(
        description="Data that the model is trained on. Set exactly one of text, chat, tokens, entrypoint and builtin."
    )
    training: Training = Field(description=("How the model is trained: number of steps, batch sizes, optimizer."))
    search: SearchSpace | None = Field(
        default=None,
        exclude_if=lambda given: given is None,  # if unset, job.json is as in every earlier version
        description="Makes the members from a space of hyperparameters, instead of the list in members. Default: none.",
    )
    members: tuple[Member, ...] = Field(
        default_factory=lambda given: given["search"].members if given.get("search") else (),
        max_length=MAX_MEMBERS,
        description=(
"Several models that the job trains (a sweep), sharing its devices. Each member is the job with some "
"fields changed. Default: the members that search makes; without search, the job trains one model."
),
        json_schema_extra=LIST_BY_NAME,
    )  # fmt: skip
    objective: Objective | None = Field(
        default=None,
        description=(
            "What makes one member better than another. Default: a lower evaluation loss or, without "
            "data.evaluation, a lower training loss."
        ),
    )
    tracking: Tracking | None = Field(
        default=None,
        exclude_if=lambda given: given is None,  # if unset, job.json is as in every earlier version
        description="Experiment trackers that receive the figures of the run while it trains. Default: none.",
    )

    @property
    def texts(self) -> dict[str, Location]:
        """Directories of the text, chats or tokens that the job trains and evaluates on, by field below spec."""
        places = {"data.text": self.data.text, "data.chat": self.data.chat, "data.tokens": self.data.tokens}
        if evaluation := self.data.evaluation:
            places |= {"data.evaluation.text": evaluation.text, "data.evaluation.chat": evaluation.chat}
        return {field: place for field, place in places.items() if place is not None}

    @property
    def places(self) -> dict[str, Location]:
        """Every directory that the job reads, by field below spec: those of the data, of the model and of another run's
        checkpoint."""
        others = {"model.source": self.model.source, "checkpoint.from": self.checkpoint.from_}
        return self.texts | {field: place for field, place in others.items() if place is not None}

    @property
    def num_ranks(self) -> int:
        """Number of ranks that share a batch. In a sweep it is 1, because each member trains on one device."""
        return 1 if self.members else self.parallelism.world_size

    @property
    def compared_by(self) -> Objective:
        """The objective. If there is none: the evaluation loss if the job has an evaluation, else the loss."""
        if self.objective is not None:
            return self.objective
        return Objective(metric="Loss" if self.data.evaluation is None else "EvaluationLoss")

    @property
    def uses_evaluation(self) -> list[str]:
        """Fields below spec that use the evaluation loss of a single model."""
        given = {
            "training.earlyStopping": self.training.early_stopping,
            "checkpoint.keepBest": self.checkpoint.keep_best,
        }
        return [field for field, value in given.items() if value]

    @model_validator(mode="before")
    @classmethod
    def _no_command(cls, given: Any) -> Any:
        """Removes an empty command, which job.json of an earlier version has. A spec with a command is a ScriptSpec."""
        if isinstance(given, dict) and not given.get("command", ...):
            return {name: value for name, value in given.items() if name != "command"}
        return given

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        problems = []
        training, world_size = self.training, self.num_ranks
        if training.global_batch_size % (training.micro_batch_size * world_size):
            product = f"microBatchSize x ranks ({training.micro_batch_size} x {world_size})"
            problems.append(("training.globalBatchSize", f"must be a multiple of {product}"))
        if self.search is not None and self.members != self.search.members:  # job.json has both
            problems.append(("members", MEMBERS_ARE_MADE))
        config = self.model.config
        learned = config is not None and config.architecture in ("gpt2", "bert")
        if config is not None and learned and training.sequence_length > config.max_positions:
            problems.append(("training.sequenceLength", f"at most model.config.maxPositions ({config.max_positions})"))
        if self.data.chat is not None and self.model.source is None:
            problems.append(("data.chat", CHAT_NEEDS_SOURCE))
        if self.data.tokens is not None and self.model.source is None:
            problems.append(("data.tokens", TOKENS_NEED_SOURCE))
        if self.data.packing and self.model.source is None:
            problems.append(("data.packing", CHAT_NEEDS_SOURCE))
        is_float16, strategy = self.model.precision.compute == "float16", self.parallelism.strategy
        if is_float16 and strategy not in ("Auto", "Ddp"):
            needed = f"needs loss scaling, which does not work with {strategy}; use Ddp, or bfloat16"
            problems.append(("parallelism.strategy", f"model.precision.compute: float16 {needed}"))
        if training.optimizer.moments == "int8" and strategy not in ("Auto", "Ddp"):
            blocks = f"int8 shares one scale among 256 values of a parameter, and {strategy} would shard these"
            problems.append(
                ("parallelism.strategy", f"training.optimizer.moments: {blocks}; use Ddp, or moments: bfloat16")
            )
        if self.memory.mode == "Disabled" and self.pod.resources.memory is not None:
            problems.append(("pod.resources.memory", FIXED_WITHOUT_PLAN))
        if self.data.evaluation is None:
            problems += [(field, NEEDS_EVALUATION) for field in self.uses_evaluation]
        if training.loss_scale is not None and not is_float16:
            needless = "only applies with model.precision.compute: float16; leave it out"
            problems.append(("training.lossScale", needless))
        reject(problems)
        return self


class TrainingJob(Fields):
    """A training run under memory budgets."""

    api_version: Literal["spillway.dev/v1alpha1"] = Field(description="Version of this schema.")
    kind: Literal["TrainingJob"] = Field(description="Kind of the object.")
    metadata: Metadata = Field(description="Name and namespace.")
    spec: TrainingJobSpec = Field(description="What the user wants.")
