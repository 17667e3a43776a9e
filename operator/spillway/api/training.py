"""spec.training of a TrainingJob: optimizer, schedule, loss scale, steps."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from spillway.api.field_types import Count, Epsilon, Fields, Fraction, Name, Number, Positive, exactly_one, refuse
from spillway.update_rules import RULE_FIELDS, MomentType, UpdateRule


class ParameterGroup(Fields):
    """Parameters with a learning rate or a weight decay of their own."""

    match: Name = Field(
        description=(
            "Glob over parameter names as in the checkpoints: * any characters, ? one, [ab] one of these. The "
            "first matching group applies."
        )
    )
    learning_rate_factor: Annotated[Number, Field(gt=0.0, le=1000.0)] = Field(
        default=1.0, description="Learning rate of the group, as a multiple of the schedule's."
    )
    weight_decay: Annotated[Number, Field(le=10.0)] | None = Field(
        default=None,
        description="Weight decay of the group, also of its vectors (biases, norm weights). Default: the optimizer's, "
        "and 0 for vectors.",
    )


class Optimizer(Fields):
    """How gradients change parameters. Vectors (norms, biases) do not decay."""

    name: Literal["AdamW", "Adam", "SgdMomentum", "Lion"] = Field(
        default="AdamW",
        description=(
            "Algorithm. AdamW and Lion decouple weightDecay from the gradient; Adam and SgdMomentum add it to the"
            " gradient."
        ),
    )
    learning_rate: Annotated[Number, Field(gt=0.0, le=10.0)] = Field(default=3e-4, description="Peak learning rate.")
    # Their defaults depend on the name: none here, where an API server would write them down for another.
    betas: Annotated[tuple[Annotated[Number, Field(lt=1.0)], ...], Field(min_length=2, max_length=2)] | None = Field(
        default=None,
        description=(
            "Decay rates. AdamW, Adam: of the two moments; default 0.9 and 0.95. Lion: of the update and of the "
            "momentum; default 0.9 and 0.99."
        ),
    )
    eps: Epsilon | None = Field(
        default=None, description="AdamW, Adam: added to the root of the second moment; default 1e-8."
    )
    momentum: Annotated[Number, Field(lt=1.0)] | None = Field(
        default=None, description="SgdMomentum: momentum coefficient; default 0.9."
    )
    weight_decay: Annotated[Number, Field(le=10.0)] | None = Field(
        default=None,
        description=(
            "Weight decay of matrices; vectors do not decay. Default: 0.1 for AdamW and Lion, 0 for Adam and "
            "SgdMomentum."
        ),
    )
    moments: Literal["float32", "bfloat16", "int8"] = Field(
        default="float32",
        description="Type in which the optimizer's moments (AdamW, Adam: two; SgdMomentum, Lion: one) are stored "
        "between updates. Updates are computed in float32, and masters are always float32. bfloat16 needs half the "
        "bytes, int8 a quarter (codes, and a float32 scale for every 256 values). Each type gives different results. "
        "int8 needs CPU devices and strategy Ddp.",
    )
    groups: tuple[ParameterGroup, ...] = Field(
        default=(),
        max_length=64,
        description="Parameters with their own learning rate or weight decay. Each group must match at least one.",
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
        refuse([(name, f"{self.name} has none; leave it out") for name in others])
        return self

    @model_validator(mode="after")
    def _moments_that_shrink(self) -> Self:
        most = self.moment_type.most_kept
        betas = (self.betas or (0.0,))[-len(self.rule.moments) :]  # Lion's first is of no mean that is kept
        kept = {"betas": max(betas), "momentum": self.momentum or 0.0}
        why = (
            f"a mean that keeps more than {most} of itself a step cannot shrink in {self.moments}, where what it would "
            "lose is rounded away; lower it, or use moments: float32"
        )
        refuse([(name, why) for name, value in kept.items() if value > most])
        return self


MOST_STEPS = 10**12
ONE_WARM_UP = "warmupSteps says it already; give one of the two"


class Schedule(Fields):
    """Learning rate over the steps: a linear warm-up, then a fall to finalFraction of the peak."""

    name: Literal["Cosine", "Linear", "Constant"] = Field(default="Cosine", description="Shape after the warm-up.")
    warmup_steps: Count = Field(default=0, description="Steps of linear warm-up.")
    warmup_ratio: Fraction | None = Field(
        default=None,
        exclude_if=lambda given: given is None,
        description="The same as a share of all steps, rounded up. Default: warmupSteps decides.",
    )
    final_fraction: Fraction = Field(
        default=0.1, description="Learning rate of the last step as a fraction of the peak; Constant ignores it."
    )

    @model_validator(mode="after")
    def _one_warm_up(self) -> Self:
        refuse([("warmupRatio", ONE_WARM_UP)] if self.warmup_ratio is not None and self.warmup_steps else [])
        return self


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError("a power of two is needed, for example 65536: it must change exponents only")
    return value


Scale = Annotated[Positive, Field(le=1 << 24), AfterValidator(_power_of_two)]


class LossScale(Fields):
    """What the loss is multiplied by before backward, so that small gradients survive float16. It halves after a step
    whose gradients are not finite, which is left out."""

    initial: Scale = Field(default=65536, description="Initial loss scale; a power of two.")
    growth_interval: Positive = Field(
        default=2000, description="Consecutive steps with finite gradients after which the scale doubles."
    )
    minimum: Scale = Field(
        default=1,
        description="Smallest scale, a power of two. Gradients that are not finite at this scale fail the job.",
    )

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        refuse([("minimum", f"at most initial ({self.initial})")] if self.minimum > self.initial else [])
        return self


class EarlyStopping(Fields):
    """An end before the last step."""

    patience: Positive = Field(
        description="Evaluations in a row without improvement after which training ends; the job is then Complete."
    )
    min_delta: Number = Field(
        default=0.0, description="An improvement is lower than the lowest evaluation loss so far by more than this."
    )


class Training(Fields):
    """How it is trained. The result depends on these fields and on nothing in memory or parallelism."""

    steps: Positive | None = Field(default=None, description="Optimizer steps to train; or epochs.")
    epochs: Annotated[Positive, Field(le=1_000_000)] | None = Field(
        default=None,
        exclude_if=lambda given: given is None,  # job.json as every version before knows it
        description="Instead of steps: how often each sequence is trained on. The last step may begin another epoch.",
    )
    sequence_length: Annotated[Positive, Field(ge=2, le=1 << 24)] = Field(description="Tokens per sequence.")
    global_batch_size: Annotated[Positive, Field(le=1 << 24)] = Field(
        description="Sequences per optimizer step, over all devices and micro-batches."
    )
    micro_batch_size: Annotated[Positive, Field(le=1 << 20)] = Field(
        default=1, description="Sequences per device in one forward and backward. Results differ only by rounding."
    )
    seed: Count = Field(default=0, description="Seed of initialisation, data order and dropout.")
    gradient_clipping: Number = Field(default=1.0, description="Largest norm of the gradients; 0 = no clipping.")
    non_finite: Literal["SkipStep", "Fail"] = Field(
        default="SkipStep",
        description=(
            "What happens when gradients are not finite: skip the step, or fail the job. With float16 and a "
            "finite loss the step is skipped and the loss scale lowered, until the scale is at its minimum."
        ),
    )
    loss_scale: LossScale | None = Field(
        default=None, description="Loss scaling; only with model.precision.compute: float16. Default: starts at 65536."
    )
    optimizer: Optimizer = Field(default=Optimizer(), description="Optimizer.")
    schedule: Schedule = Field(default=Schedule(), description="Learning rate over the steps.")
    early_stopping: EarlyStopping | None = Field(
        default=None,
        exclude_if=lambda given: given is None,  # job.json as every version before knows it
        description="End training when the evaluation loss no longer falls. Needs data.evaluation. Default: never.",
    )

    @model_validator(mode="after")
    def _batch_divides(self) -> Self:
        problems = exactly_one(self, ("steps", "epochs"))
        if self.global_batch_size % self.micro_batch_size:
            problems.append(("globalBatchSize", f"must be a multiple of microBatchSize ({self.micro_batch_size})"))
        if self.steps is not None and self.schedule.warmup_steps > self.steps:
            problems.append(("schedule.warmupSteps", f"at most steps ({self.steps})"))
        refuse(problems)
        return self

    @property
    def num_steps(self) -> int:
        """Steps to train. More than any job makes where the data decides, and the trainer has not counted yet."""
        return MOST_STEPS if self.steps is None else self.steps

    def in_steps(self, num_sequences: int) -> Training:
        """The same with steps instead of epochs, of data with so many sequences to train on."""
        if self.epochs is None:
            return self
        steps = -(-self.epochs * num_sequences // self.global_batch_size)
        return self.model_copy(update={"steps": steps, "epochs": None})

    @property
    def patience(self) -> int | None:
        """Evaluations without improvement that end the run; None: all steps are trained."""
        return None if self.early_stopping is None else self.early_stopping.patience
