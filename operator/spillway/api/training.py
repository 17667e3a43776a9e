"""spec.training of a TrainingJob: optimizer, schedule, loss scale, steps."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from spillway.api.field_types import Count, Epsilon, Fields, Fraction, Name, Number, Positive, exactly_one, reject
from spillway.update_rules import RULE_FIELDS, MomentType, UpdateRule


class ParameterGroup(Fields):
    """Parameters with a learning rate or a weight decay of their own."""

    match: Name = Field(
        description=(
            "Pattern for the names of parameters as they are in checkpoints: * matches any characters, ? one "
            "character, [ab] an a or a b. A parameter belongs to the first group that matches its name."
        )
    )
    learning_rate_factor: Annotated[Number, Field(gt=0.0, le=1000.0)] = Field(
        default=1.0, description="Factor by which the schedule's learning rate is multiplied for this group."
    )
    weight_decay: Annotated[Number, Field(le=10.0)] | None = Field(
        default=None,
        description=(
            "Weight decay of the group, including its vectors (biases, norm weights). Default: "
            "training.optimizer.weightDecay for matrices, 0 for vectors."
        ),
    )


class Optimizer(Fields):
    """How gradients change parameters. Vectors (norms, biases) do not decay."""

    name: Literal["AdamW", "Adam", "SgdMomentum", "Lion"] = Field(
        default="AdamW",
        description=(
            "Optimizer algorithm. AdamW and Lion decouple weight decay from the gradient; Adam and SgdMomentum "
            "add it to the gradient."
        ),
    )
    learning_rate: Annotated[Number, Field(gt=0.0, le=10.0)] = Field(
        default=3e-4, description="Peak learning rate, which is reached after the warm-up."
    )
    # Defaults of the following fields depend on the name. None are set here, because an API server would store them,
    # and keep them for another name.
    betas: Annotated[tuple[Annotated[Number, Field(lt=1.0)], ...], Field(min_length=2, max_length=2)] | None = Field(
        default=None,
        description=(
            "Decay rates of the optimizer's moving averages. AdamW and Adam: those of the two moments. Lion: "
            "those of the update and of the momentum. Default: 0.9 and 0.95 for AdamW and Adam, 0.9 and 0.99 for "
            "Lion."
        ),
    )
    eps: Epsilon | None = Field(
        default=None,
        description="AdamW and Adam only: number added to the square root of the second moment. Default: 1e-8.",
    )
    momentum: Annotated[Number, Field(lt=1.0)] | None = Field(
        default=None, description="SgdMomentum only: momentum coefficient. Default: 0.9."
    )
    weight_decay: Annotated[Number, Field(le=10.0)] | None = Field(
        default=None,
        description=(
            "Weight decay of matrices. Vectors (biases, norm weights) do not decay, unless an entry of groups "
            "says otherwise. Default: 0.1 for AdamW and Lion, 0 for Adam and SgdMomentum."
        ),
    )
    moments: Literal["float32", "bfloat16", "int8"] = Field(
        default="float32",
        description="Type in which the optimizer's moments (AdamW, Adam: two; SgdMomentum, Lion: one) are stored "
        "between updates. Updates are computed in float32, and masters are always float32. bfloat16 needs half the "
        "bytes, int8 a quarter (codes, and a float32 scale for every 256 values). Each type gives different results. "
        "int8 needs strategy Ddp.",
    )
    groups: tuple[ParameterGroup, ...] = Field(
        default=(),
        max_length=64,
        description=(
            "Groups of parameters with a learning rate or weight decay of their own. Each group must match at "
            "least one trained parameter."
        ),
    )

    @property
    def rule(self) -> UpdateRule:
        return UpdateRule(self.name)

    @property
    def moment_type(self) -> MomentType:
        return MomentType(self.moments)

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_its_name(cls, given: Any) -> Any:
        name = given.get("name", cls.model_fields["name"].default) if isinstance(given, dict) else None
        if name not in tuple(UpdateRule):
            return given
        return {**UpdateRule(name).defaults, **{field: value for field, value in given.items() if value is not None}}

    @model_validator(mode="after")
    def _only_its_own(self) -> Self:
        others = [name for name in RULE_FIELDS if name not in self.rule.defaults and getattr(self, name) is not None]
        reject([(name, f"{self.name} does not use it; leave it out") for name in others])
        return self

    @model_validator(mode="after")
    def _moments_that_shrink(self) -> Self:
        most = self.moment_type.most_kept
        betas = (self.betas or (0.0,))[-len(self.rule.moments) :]  # Lion's first belongs to no average that is stored
        kept = {"betas": max(betas), "momentum": self.momentum or 0.0}
        why = (
            f"too large for moments: {self.moments}. With a decay rate above {most}, rounding cancels every decrease "
            f"of the moving average; lower the rate, or use moments: float32"
        )
        reject([(name, why) for name, value in kept.items() if value > most])
        return self


MOST_STEPS = 10**12
ONE_WARM_UP = "schedule.warmupSteps is set, too; give one of the two"


class Schedule(Fields):
    """Learning rate over the steps: a linear warm-up, then a decrease to finalFraction of the peak."""

    name: Literal["Cosine", "Linear", "Constant"] = Field(
        default="Cosine", description="Shape of the learning rate after the warm-up."
    )
    warmup_steps: Count = Field(
        default=0, description="Number of steps over which the learning rate rises linearly to its peak."
    )
    warmup_ratio: Fraction | None = Field(
        default=None,
        exclude_if=lambda given: given is None,
        description=(
            "Length of the linear warm-up as a share of all steps; the number of steps is rounded up. Set either "
            "warmupRatio or warmupSteps. Default: none; warmupSteps is used."
        ),
    )
    final_fraction: Fraction = Field(
        default=0.1,
        description="Learning rate of the last step as a fraction of the peak. Constant ignores this field.",
    )

    @model_validator(mode="after")
    def _one_warm_up(self) -> Self:
        reject([("warmupRatio", ONE_WARM_UP)] if self.warmup_ratio is not None and self.warmup_steps else [])
        return self


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError("must be a power of two, for example 65536, so that scaling changes only exponents")
    return value


Scale = Annotated[Positive, Field(le=1 << 24), AfterValidator(_power_of_two)]


class LossScale(Fields):
    """Factor by which the loss is multiplied before backward, so that small gradients do not vanish in float16. The
    factor is halved after a step with gradients that are not finite; that step changes no parameters.
    """

    initial: Scale = Field(default=65536, description="Loss scale of the first step; a power of two.")
    growth_interval: Positive = Field(
        default=2000,
        description="Number of consecutive steps with finite gradients after which the loss scale doubles.",
    )
    minimum: Scale = Field(
        default=1,
        description="Smallest loss scale; a power of two. If gradients are not finite at this scale, the job fails.",
    )

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        reject(
            [("minimum", f"must be at most lossScale.initial ({self.initial})")] if self.minimum > self.initial else []
        )
        return self


class EarlyStopping(Fields):
    """Early stopping."""

    patience: Positive = Field(
        description=(
            "Number of evaluations in a row without improvement after which training ends; the job is then Complete."
        )
    )
    min_delta: Number = Field(
        default=0.0,
        description="An evaluation counts as an improvement if its loss is lower than the lowest so far "
        "by more than this.",
    )


class Training(Fields):
    """How the model is trained. The result depends on these fields, and on no field of memory or parallelism."""

    steps: Positive | None = Field(
        default=None, description="Number of optimizer steps to train. Set either steps or epochs."
    )
    epochs: Annotated[Positive, Field(le=1_000_000)] | None = Field(
        default=None,
        exclude_if=lambda given: given is None,  # if unset, job.json is as in every earlier version
        description=(
            "Number of times that each sequence is trained on. Set either epochs or steps. To fill its batch, the "
            "last step may train on some sequences once more."
        ),
    )
    sequence_length: Annotated[Positive, Field(ge=2, le=1 << 24)] = Field(description="Number of tokens per sequence.")
    global_batch_size: Annotated[Positive, Field(le=1 << 24)] = Field(
        description="Number of sequences per optimizer step, summed over all devices and micro-batches."
    )
    micro_batch_size: Annotated[Positive, Field(le=1 << 20)] = Field(
        default=1,
        description=(
            "Number of sequences per device in one forward and backward pass. Another value changes the results "
            "by rounding only."
        ),
    )
    seed: Count = Field(default=0, description="Seed of initialisation, data order and dropout.")
    gradient_clipping: Number = Field(
        default=1.0,
        description=(
            "Largest norm of all gradients together. If their norm is larger, they are scaled down to it. 0 = no "
            "clipping."
        ),
    )
    non_finite: Literal["SkipStep", "Fail"] = Field(
        default="SkipStep",
        description=(
            "What happens when the loss or the gradients are not finite. SkipStep: the step's update is skipped. "
            "Fail: the job fails. With float16, gradients that are not finite although the loss is finite always "
            "skip the step and halve the loss scale; if the loss scale is already at its minimum, the job fails."
        ),
    )
    loss_scale: LossScale | None = Field(
        default=None,
        description=(
            "Loss scaling. Allowed only with model.precision.compute: float16. Default: the loss scale starts at 65536."
        ),
    )
    optimizer: Optimizer = Field(default=Optimizer(), description="Optimizer and its settings.")
    schedule: Schedule = Field(default=Schedule(), description="How the learning rate changes over the steps.")
    early_stopping: EarlyStopping | None = Field(
        default=None,
        exclude_if=lambda given: given is None,  # if unset, job.json is as in every earlier version
        description=(
            "Ends training when the evaluation loss no longer falls. Needs data.evaluation. Default: training "
            "never ends early."
        ),
    )

    @model_validator(mode="after")
    def _batch_divides(self) -> Self:
        problems = exactly_one(self, ("steps", "epochs"))
        if self.global_batch_size % self.micro_batch_size:
            problems.append(("globalBatchSize", f"must be a multiple of microBatchSize ({self.micro_batch_size})"))
        if self.steps is not None and self.schedule.warmup_steps > self.steps:
            problems.append(("schedule.warmupSteps", f"at most steps ({self.steps})"))
        reject(problems)
        return self

    @property
    def num_steps(self) -> int:
        """Steps to train. If `epochs` is set, more steps than any job makes, until the trainer has counted the
        sequences."""
        return MOST_STEPS if self.steps is None else self.steps

    def in_steps(self, num_sequences: int) -> Training:
        """The same fields with steps instead of epochs, for data with `num_sequences` sequences to train on."""
        if self.epochs is None:
            return self
        steps = -(-self.epochs * num_sequences // self.global_batch_size)
        return self.model_copy(update={"steps": steps, "epochs": None})

    @property
    def patience(self) -> int | None:
        """Evaluations without improvement that end the run; None: all steps are trained."""
        return None if self.early_stopping is None else self.early_stopping.patience
