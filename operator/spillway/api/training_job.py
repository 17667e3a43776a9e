"""TrainingJob and the profiles, `spillway.dev/v1alpha1`: every field with its meaning, unit and default. The CRDs are
made from here.

Paths in messages are those of the YAML. Floats are strings and byte counts are quantities there, numbers here
(field_types.py). `load_job` is the way from a file to a TrainingJob.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from spillway.api.field_types import (
    MAX_MEMBERS,
    ClaimName,
    Count,
    Epsilon,
    ExtendedResource,
    Fields,
    Flag,
    Fraction,
    LabelMap,
    MemberName,
    Name,
    Number,
    Positive,
    Quantity,
    SomeBytes,
    SomeCores,
    StringMap,
    SubPath,
    Text,
    Written,
    exactly_one,
    refuse,
)
from spillway.api.manifest import dotted, parse, read_text, shown
from spillway.api.members import problems_of
from spillway.api.progress import CA_VARIABLE, TOKEN_VARIABLE, URL_VARIABLE
from spillway.errors import FieldProblem, InvalidJob, UserError
from spillway.units import format_quantity
from spillway.update_rules import RULE_FIELDS, MomentType, UpdateRule

GROUP = "spillway.dev"
VERSION = "v1alpha1"
MANAGER = "spillway.dev/operator"
"""spec.managedBy of the jobs that are ours"""
MIN_TEXT_VOCABULARY = 257
"""tokens of a byte-level tokenizer: every byte, and the end of text"""
MAX_NAME_LENGTH = 52
"""pod host names, <name>-<attempt>-<index>, must fit 63 characters"""
MAX_RANKS = 1024
MAX_SPILL_VOLUMES = 8
MAX_SPEC_BYTES = 64 << 10
"""as JSON: every look at a job reads it, and every attempt carries it in a ConfigMap"""
MAX_ENV_BYTES = 32 << 10
"""of all values together"""
RESERVED_PREFIXES = (
    "spillway.dev/", "kueue.x-k8s.io/", "batch.kubernetes.io/", "apps.kubernetes.io/",
    "container.apparmor.security.beta.kubernetes.io/", "seccomp.security.alpha.kubernetes.io/",
    "container.seccomp.security.alpha.kubernetes.io/",
)  # fmt: skip
"""Labels and annotations below these mean something to this operator, to the queue or to the Job controller, or loosen
what a container may do."""
RESERVED_KEYS = ("app.kubernetes.io/managed-by", "job-name", "controller-uid")
RESERVED_VARIABLES = (
    URL_VARIABLE, TOKEN_VARIABLE, CA_VARIABLE, "TMPDIR", "HOME", "JOB_COMPLETION_INDEX", "RANK", "LOCAL_RANK",
    "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
"""environment variables that the attempt sets itself; a job that sets them is refused"""


# --- spec.model -------------------------------------------------------------------------------------------------------


class ModelConfig(Fields):
    """A transformer by its sizes, initialised at random."""

    architecture: Literal["llama", "gpt2", "bert", "t5"] = Field(
        description="Family. llama, gpt2: each token from those before it. bert: hidden tokens from all others. "
        "t5: the second half of the sequence from the first."
    )
    hidden_size: Annotated[Positive, Field(le=1 << 17)] = Field(description="Width of the residual stream.")
    num_layers: Annotated[Positive, Field(le=1024)] = Field(
        description="Number of blocks; t5 has so many in the encoder, and as many in the decoder."
    )
    num_heads: Annotated[Positive, Field(le=1024)] = Field(description="Attention heads; divides hiddenSize.")
    num_key_value_heads: Annotated[Positive, Field(le=1024)] = Field(
        default_factory=lambda given: given.get("num_heads", 1),
        description="Key and value heads; divides numHeads. Default: numHeads.",
    )
    intermediate_size: Annotated[Positive, Field(le=1 << 20)] = Field(
        default_factory=lambda given: 4 * given.get("hidden_size", 1),
        description="Width of the feed-forward layer. Default: 4 x hiddenSize.",
    )
    vocab_size: Annotated[Positive, Field(ge=2, le=1 << 22)] = Field(
        description="Tokens in the vocabulary; for text the tokenizer is trained to this size."
    )
    max_positions: Annotated[Positive, Field(le=1 << 24)] = Field(
        default=1024, description="Learned positions; gpt2 and bert only, at least training.sequenceLength."
    )
    tie_word_embeddings: Flag = Field(
        default_factory=lambda given: given.get("architecture") != "llama",
        description="One matrix for embedding and output projection. Default: false for llama, true for the others.",
    )
    dropout: Annotated[Number, Field(lt=1.0)] = Field(
        default=0.0, description="Probability of dropping a value of each attention and feed-forward output."
    )
    rope_theta: Annotated[Number, Field(gt=0.0)] = Field(
        default=10000.0, description="Base of the rotary position embedding; llama only."
    )
    norm_eps: Epsilon = Field(default=1e-5, description="Added under the root in every norm.")

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        problems = []
        if self.hidden_size % self.num_heads:
            problems.append(("numHeads", f"must divide hiddenSize ({self.hidden_size})"))
        elif self.architecture == "llama" and self.hidden_size // self.num_heads % 2:
            head_size = self.hidden_size // self.num_heads
            problems.append(
                ("numHeads", f"hiddenSize / numHeads is {head_size}; rotary embeddings need an even number")
            )
        if self.num_heads % self.num_key_value_heads:
            problems.append(("numKeyValueHeads", f"must divide numHeads ({self.num_heads})"))
        if self.architecture != "llama" and self.num_key_value_heads != self.num_heads:
            one = f"{self.architecture} has one per head: leave it out, or write {self.num_heads}"
            problems.append(("numKeyValueHeads", one))
        if self.architecture == "t5" and not self.tie_word_embeddings:
            problems.append(("tieWordEmbeddings", "t5 has one matrix for all its embeddings; leave it out"))
        refuse(problems)
        return self


class Location(Fields):
    """A directory: on a claim, or a path as the trainer sees it."""

    claim: ClaimName | None = Field(default=None, description="Name of a PersistentVolumeClaim. Default: none.")
    sub_path: SubPath = Field(default="", description="Directory on the claim.")
    path: Annotated[Text, Field(min_length=1)] | None = Field(
        default=None, description="Directory or file as the trainer sees it: in its image, on disk in a local run."
    )

    @model_validator(mode="after")
    def _claim_or_path(self) -> Self:
        problems = exactly_one(self, ("claim", "path"))
        if self.path is not None and self.sub_path:
            problems.append(("subPath", "belongs to a claim; write the whole directory into path"))
        refuse(problems)
        return self


class Lora(Fields):
    """Low-rank adapters, trained in float32, on a frozen model in the compute type."""

    rank: Annotated[Positive, Field(le=4096)] = Field(default=16, description="Rank of every adapter.")
    alpha: Number = Field(default=32.0, description="Scale of the adapters, divided by rank.")
    target_modules: tuple[Name, ...] = Field(
        default=(), max_length=64, description="Names of the modules that get an adapter. Default: the attention's."
    )


class Precision(Fields):
    """Types of numbers."""

    compute: Literal["bfloat16", "float16", "float32"] = Field(
        default="bfloat16",
        description="Parameters on the device, activations and gradients. float16 scales the loss: training.lossScale.",
    )
    master: Literal["float32"] = Field(default="float32", description="Master parameters and optimizer states.")
    gradient_reduce: Literal["bfloat16", "float32"] = Field(
        default="float32", description="Gradients on the wire between ranks; bfloat16 rounds each rank's sum once."
    )
    gradient_accumulate: Literal["float32"] = Field(
        default="float32", description="Sum of the gradients over micro-batches."
    )


class Model(Fields):
    """What is trained: exactly one of config, source, entrypoint."""

    config: ModelConfig | None = Field(default=None, description="A transformer by its sizes, initialised at random.")
    source: Location | None = Field(
        default=None,
        description="A Hugging Face directory with config.json, safetensors and tokenizer.json: llama, mistral, qwen2, "
        "qwen3, gpt2, bert or t5. Training starts from its weights. Local runs only.",
    )
    entrypoint: Name | None = Field(
        default=None,
        description="Local runs only: package.module:function that returns a Chain or a transformers model.",
    )
    lora: Lora | None = Field(default=None, description="Low-rank adapters. Default: full training.")
    precision: Precision = Field(default=Precision(), description="Types of numbers.")

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        refuse(exactly_one(self, ("config", "source", "entrypoint")))
        return self

    @property
    def is_own_llama(self) -> bool:
        """The one model that needs nothing of `transformers`: llama by its sizes, all of it trained."""
        return self.config is not None and self.config.architecture == "llama" and self.lora is None

    @property
    def transformer(self) -> ModelConfig:
        """The sizes of a model that is given by them."""
        if self.config is None:
            raise UserError("spec.model: a source or an entrypoint does not say its sizes; give them in model.config")
        return self.config


# --- spec.data --------------------------------------------------------------------------------------------------------


class HuggingFaceData(Fields):
    """A data set of the `datasets` library."""

    name: Name = Field(description="Name or path of the data set.")
    subset: Text = Field(default="", description="Configuration of the data set.")
    split: Name = Field(default="train", description="Split to train on.")
    text_field: Name = Field(default="text", description="Column that holds the text.")


class Evaluation(Fields):
    """Loss on text that is never trained on: a part of the text that is held out, or a text of its own."""

    text: Location | None = Field(
        default=None,
        exclude_if=lambda given: given is None,  # and so on: job.json as every version before knows it
        description="Text files to evaluate on, with the tokenizer of data.text. Default: none.",
    )
    fraction: Annotated[Number, Field(gt=0.0, le=0.5)] | None = Field(
        default_factory=lambda given: None if given.get("text") else 0.01,  # an API server would add a static one
        description="Share of the text's sequences that is held out, rounded up: stretches of neighbours at random "
        "places. Excludes text. Default: 0.01 without text.",
    )
    sequences: Count = Field(
        default=64,
        exclude_if=lambda given: given == 64,
        description="Sequences that each evaluation reads: the same every time, drawn from all that are held out, or "
        "from text; all where there are fewer. 0 = all.",
    )
    seed: Count = Field(
        default=0,
        exclude_if=lambda given: given == 0,
        description="Seed of both draws; not training.seed, so that all seeds are compared on the same text.",
    )
    every_steps: Positive = Field(default=100, description="Steps between two evaluations.")

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        refuse(exactly_one(self, ("text", "fraction")))
        return self


class Data(Fields):
    """What it is trained on: exactly one of text, tokens, huggingFace, entrypoint, builtin."""

    text: Location | None = Field(
        default=None,
        description="Text files; a tokenizer of the model's vocabulary is trained on them, or model.source has one.",
    )
    tokens: Location | None = Field(default=None, description="Not supported yet: packed token shards.")
    hugging_face: HuggingFaceData | None = Field(default=None, description="Not supported yet: a `datasets` data set.")
    entrypoint: Name | None = Field(default=None, description="Not supported yet: package.module:function.")
    builtin: Literal["PythonStdlib"] | None = Field(
        default=None, description="Real text that every trainer has: the sources of Python's standard library."
    )
    evaluation: Evaluation | None = Field(default=None, description="Loss on unseen text. Default: none.")

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        refuse(exactly_one(self, ("text", "tokens", "hugging_face", "entrypoint", "builtin")))
        return self


# --- spec.training ----------------------------------------------------------------------------------------------------


class ParameterGroup(Fields):
    """Parameters with a learning rate or a weight decay of their own."""

    match: Name = Field(
        description="Names of parameters, as in the checkpoints: * stands for any characters, ? for one, [ab] for one "
        "of these. Of several groups that match the first counts."
    )
    learning_rate_factor: Annotated[Number, Field(gt=0.0, le=1000.0)] = Field(
        default=1.0, description="Their learning rate as a multiple of everyone's, at every step."
    )
    weight_decay: Annotated[Number, Field(le=10.0)] | None = Field(
        default=None, description="Their weight decay, vectors too. Default: everyone's; vectors do not decay."
    )


class Optimizer(Fields):
    """How gradients change parameters. Vectors (norms, biases) do not decay."""

    name: Literal["AdamW", "Adam", "SgdMomentum", "Lion"] = Field(
        default="AdamW",
        description="Algorithm. AdamW and Lion shrink parameters by weightDecay, apart from the gradient; Adam and "
        "SgdMomentum add it to the gradient.",
    )
    learning_rate: Annotated[Number, Field(gt=0.0, le=10.0)] = Field(default=3e-4, description="Peak learning rate.")
    # Their defaults depend on the name: none here, where an API server would write them down for another.
    betas: Annotated[tuple[Annotated[Number, Field(lt=1.0)], ...], Field(min_length=2, max_length=2)] | None = Field(
        default=None,
        description="AdamW, Adam: decay rates of the two moments; default 0.9 and 0.95. Lion: of the mean that the "
        "update takes the sign of, and of the one that is kept; default 0.9 and 0.99.",
    )
    eps: Epsilon | None = Field(
        default=None, description="AdamW, Adam: added to the root of the second moment; default 1e-8."
    )
    momentum: Annotated[Number, Field(lt=1.0)] | None = Field(
        default=None, description="SgdMomentum: what a step keeps of the one before; default 0.9."
    )
    weight_decay: Annotated[Number, Field(le=10.0)] | None = Field(
        default=None, description="Of matrices. Default: 0.1 for AdamW and Lion, 0 for Adam and SgdMomentum."
    )
    moments: Literal["float32", "bfloat16", "int8"] = Field(
        default="float32",
        description="What a run keeps the moments in (AdamW, Adam: two; SgdMomentum, Lion: one) between updates, which "
        "compute in float32; masters are float32 always. bfloat16 takes half of the bytes, int8 a quarter (codes, and "
        "a float32 scale for every 256 values); each is another result. int8 needs CPUs and strategy Ddp.",
    )
    groups: tuple[ParameterGroup, ...] = Field(
        default=(), max_length=64, description="Parameters that are treated otherwise. Each group must have some."
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


class Schedule(Fields):
    """Learning rate over the steps: a linear warm-up, then a fall to finalFraction of the peak."""

    name: Literal["Cosine", "Linear", "Constant"] = Field(default="Cosine", description="Shape after the warm-up.")
    warmup_steps: Count = Field(default=0, description="Steps of linear warm-up.")
    final_fraction: Fraction = Field(
        default=0.1, description="Learning rate of the last step as a fraction of the peak; Constant ignores it."
    )


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError("a power of two is needed, for example 65536: it must change exponents only")
    return value


Scale = Annotated[Positive, Field(le=1 << 24), AfterValidator(_power_of_two)]


class LossScale(Fields):
    """What the loss is multiplied by before backward, so that small gradients survive float16. It halves after a step
    whose gradients are not finite, which is left out."""

    initial: Scale = Field(default=65536, description="The first step's; a power of two.")
    growth_interval: Positive = Field(
        default=2000, description="Steps in a row with finite gradients, after which it doubles."
    )
    minimum: Scale = Field(
        default=1, description="The least; gradients that are not finite even with it end the job. A power of two."
    )

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        refuse([("minimum", f"at most initial ({self.initial})")] if self.minimum > self.initial else [])
        return self


class Training(Fields):
    """How it is trained. The result depends on these fields and on nothing in memory or parallelism."""

    steps: Positive = Field(description="Optimizer steps to train.")
    sequence_length: Annotated[Positive, Field(ge=2, le=1 << 24)] = Field(description="Tokens per sequence.")
    global_batch_size: Annotated[Positive, Field(le=1 << 24)] = Field(
        description="Sequences per optimizer step, over all devices and micro-batches."
    )
    micro_batch_size: Annotated[Positive, Field(le=1 << 20)] = Field(
        default=1, description="Sequences per device in one forward and backward; changes rounding only."
    )
    seed: Count = Field(default=0, description="Seed of initialisation, data order and dropout.")
    gradient_clipping: Number = Field(default=1.0, description="Largest norm of the gradients; 0 = no clipping.")
    non_finite: Literal["SkipStep", "Fail"] = Field(
        default="SkipStep",
        description="A step whose gradients are not finite: left out, or the end of the job. One with a finite loss in "
        "float16 is left out in any case, with a smaller loss scale from then on.",
    )
    loss_scale: LossScale | None = Field(
        default=None, description="Of model.precision.compute: float16, and of no other type. Default: from 65536 on."
    )
    optimizer: Optimizer = Field(default=Optimizer(), description="Optimizer.")
    schedule: Schedule = Field(default=Schedule(), description="Learning rate over the steps.")

    @model_validator(mode="after")
    def _batch_divides(self) -> Self:
        problems = []
        if self.global_batch_size % self.micro_batch_size:
            problems.append(("globalBatchSize", f"must be a multiple of microBatchSize ({self.micro_batch_size})"))
        if self.schedule.warmup_steps > self.steps:
            problems.append(("schedule.warmupSteps", f"at most steps ({self.steps})"))
        refuse(problems)
        return self


# --- spec.parallelism, spec.memory ------------------------------------------------------------------------------------

Strategy = Literal["Auto", "Ddp", "Fsdp", "Zero1", "Zero2", "Zero3"]


class Parallelism(Fields):
    """How many devices, and what each of them holds."""

    nodes: Annotated[Positive, Field(le=MAX_RANKS)] = Field(default=1, description="Nodes; one pod each.")
    devices_per_node: Annotated[Positive, Field(le=64)] = Field(default=1, description="Devices, and ranks, per node.")
    device: Literal["Auto", "Cuda", "Cpu"] = Field(
        default="Auto", description="Kind of device. Auto: a GPU where one is that can run the job, else a CPU."
    )
    strategy: Strategy = Field(
        default="Auto",
        description="What ranks divide among them: nothing (Ddp); optimizer states and sums of gradients (Zero1, "
        "Zero2), parameters too (Zero3), by DeepSpeed; the same as Zero3 by torch's FSDP2 (Fsdp). Auto is Ddp in a "
        "run.",
    )

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if self.world_size > MAX_RANKS:
            found = f"nodes x devicesPerNode is {self.nodes} x {self.devices_per_node} = {self.world_size}"
            refuse([("", f"at most {MAX_RANKS} ranks; {found}")])
        return self

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices_per_node


class Budget(Fields):
    """Bytes that the job may use. Default of each: what the node has."""

    device: SomeBytes | None = Field(default=None, description="Memory of each device, bytes.")
    host: Quantity | None = Field(default=None, description="Host memory of each node, bytes; its ranks share it.")
    nvme: Quantity | None = Field(default=None, description="NVMe space of each node, bytes; its ranks share it.")


class OptimizerMemory(Fields):
    """optimizer_offload."""

    placement: Literal["Auto", "Device", "Host", "Interleaved", "Nvme"] = Field(
        default="Auto",
        description="Where optimizer states live and are updated. Device: all there. Host: in host memory, by the CPU. "
        "Interleaved: in host memory, by CPU and device in turn. Nvme: on NVMe, read for every update by the CPU and "
        "written back. Auto: any split of these, whatever is fastest; NVMe for what host memory does not hold.",
    )
    overlap: Literal["Auto", "None", "Forward", "Backward"] = Field(
        default="Auto",
        description="What the update may run beside. None: nothing. Forward: the next step's forward, each segment of "
        "which waits for its own parameters; on a CPU that pays where cores are left free. Backward: besides, the CPU "
        "updates some parameters in backward, out of place in host memory; it counts if the norm turns out to need no "
        "clipping. Auto: whatever is faster; Backward only without gradientClipping.",
    )


class ActivationMemory(Fields):
    """activation_spill."""

    policy: Literal["Auto", "Keep", "Recompute", "Host", "Nvme"] = Field(
        default="Auto",
        description="What becomes of the activations that backward needs, in every block: kept on the device, "
        "recomputed, or moved to host memory or NVMe and back. Auto: block by block, whatever is fastest.",
    )
    host_reserve: Quantity | None = Field(
        default=None,
        # job.json as every version before knows it, where there is none
        exclude_if=lambda given: given is None,
        description="Host memory of each node, bytes, that stays empty where activations go to NVMe; its ranks share "
        "it. When others fill the spill volume, as many of them move there while the job runs. Default: none, and "
        "nothing moves.",
    )

    @model_validator(mode="after")
    def _reserve_is_of_use(self) -> Self:
        if self.host_reserve and self.policy not in ("Auto", "Nvme"):
            never = f"policy {self.policy} moves nothing to NVMe, from where it could come: leave it out, or use Nvme"
            refuse([("hostReserve", never)])
        return self


class ParameterMemory(Fields):
    """model_spill."""

    placement: Literal["Auto", "Resident", "Stream"] = Field(
        default="Auto", description="Resident: parameters stay on the device. Stream: they pass through it."
    )


class Endurance(Fields):
    """Protection of flash from being worn out."""

    drive_writes_per_day: Annotated[Number, Field(gt=0.0)] = Field(
        default=1.0,
        description="Plans that write more than this many drive capacities a day are not chosen by Auto; one that "
        "writes as many is only where it is more than 5 % faster than one that writes nothing, in proportion below.",
    )


class Memory(Fields):
    """Where bytes may live."""

    mode: Literal["Auto", "Advise", "Disabled"] = Field(
        default="Auto",
        description="Auto: plan and run the plan. Advise: plan and report, run what the fields below say. "
        "Disabled: everything on the device, nothing planned; budget.host is required.",
    )
    budget: Budget = Field(default=Budget(), description="Bytes that the job may use.")
    optimizer: OptimizerMemory = Field(default=OptimizerMemory(), description="Optimizer states.")
    activations: ActivationMemory = Field(default=ActivationMemory(), description="Saved activations.")
    parameters: ParameterMemory = Field(default=ParameterMemory(), description="Parameters.")
    endurance: Endurance = Field(default=Endurance(), description="Protection of flash.")

    @model_validator(mode="after")
    def _disabled_is_bounded(self) -> Self:
        problems = []
        if self.mode == "Disabled":
            if self.budget.host is None:
                problems.append(("budget.host", "required with mode Disabled, because nothing is planned"))
            if self.optimizer.placement not in ("Auto", "Device"):
                problems.append(("optimizer.placement", "mode Disabled keeps everything on the device: Auto or Device"))
            if self.optimizer.overlap in ("Forward", "Backward"):
                problems.append(("optimizer.overlap", "mode Disabled has no update to overlap: Auto or None"))
            if self.activations.policy not in ("Auto", "Keep"):
                problems.append(("activations.policy", "mode Disabled keeps everything on the device: Auto or Keep"))
            if self.activations.host_reserve:
                kept = "mode Disabled keeps everything on the device, so that nothing can move there: leave it out"
                problems.append(("activations.hostReserve", kept))
        elif self.budget.host is not None and (self.activations.host_reserve or 0) > self.budget.host:
            most = f"at most budget.host ({format_quantity(self.budget.host)}), which it is part of"
            problems.append(("activations.hostReserve", most))
        refuse(problems)
        return self


class Spill(Fields):
    """The volumes for NVMe spill."""

    storage_class_name: Annotated[Text, Field(max_length=253)] = Field(
        default="", description="Class of an ephemeral volume. Default: an emptyDir."
    )
    num_volumes: Annotated[Positive, Field(le=MAX_SPILL_VOLUMES)] = Field(
        default=1, description="Volumes of that class, striped; each should be a drive of its own."
    )
    encryption: Literal["None", "Ephemeral"] = Field(
        default="None",
        description="Ephemeral: encrypted (AES-256-XTS) with a random key that only the process holds, and that ends "
        "with it.",
    )

    @property
    def num_cipher_threads(self) -> int:
        """Of a rank, at a time, in one direction."""
        return self.num_volumes if self.encryption == "Ephemeral" else 0

    @model_validator(mode="after")
    def _several_need_a_class(self) -> Self:
        if self.num_volumes > 1 and not self.storage_class_name:
            refuse([("numVolumes", "without storageClassName there is one, an emptyDir: set that, or leave this out")])
        return self


# --- members, checkpoint, pod -----------------------------------------------------------------------------------------


class Member(Fields):
    """One model of a sweep: the job's spec with some fields changed."""

    name: MemberName = Field(description="Name, unique in the job.")
    overrides: StringMap = Field(
        default={}, description='Fields below spec and their values, for example training.seed: "1".'
    )


class Objective(Fields):
    """What makes one member better than another."""

    metric: Literal["EvaluationLoss", "Loss"] = Field(default="EvaluationLoss", description="Figure compared.")
    direction: Literal["Minimize", "Maximize"] = Field(default="Minimize", description="Which end is better.")
    halving: Count = Field(
        default=0,
        description="Steps before the first round; the next ones come at twice that, four times, ... Each round stops "
        "the worse half of the members. 0 = never.",
    )


class Checkpoint(Fields):
    """When and where checkpoints are written."""

    every_steps: Positive = Field(default=200, description="Steps between two checkpoints.")
    keep: Annotated[Positive, Field(ge=2, le=1000)] = Field(
        default=2, description="Verified checkpoints that are kept; one alone would be none while the next is written."
    )
    claim: ClaimName | None = Field(
        default=None, description="PersistentVolumeClaim for checkpoints. Default: none, they end with the pod."
    )
    sub_path: SubPath = Field(
        default="", description="Directory on the claim. Default: <name>-<first 8 characters of the uid>."
    )
    resume: Literal["OwnOnly", "Never"] = Field(
        default="OwnOnly",
        description="OwnOnly: an attempt goes on from this job's checkpoints. Never: from step 0; not supported yet.",
    )
    from_: Name | None = Field(
        default=None, alias="from", description="Not supported yet: another job whose last checkpoint is the start."
    )


class NamedReference(Fields):
    name: Name = Field(description="Name of an object in the job's namespace.")


class SecretKey(Fields):
    name: Name = Field(description="Name of the Secret.")
    key: Name = Field(description="Key in the Secret.")


class VariableSource(Fields):
    secret_key_ref: SecretKey = Field(description="A key of a Secret.")


class Variable(Fields):
    """An environment variable of the trainer: exactly one of value, valueFrom."""

    name: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] = Field(
        description="Name of the variable."
    )
    value: Annotated[str, Field(max_length=8192)] | None = Field(default=None, description="Its value.")
    value_from: VariableSource | None = Field(default=None, description="Where its value comes from.")

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        refuse(exactly_one(self, ("value", "value_from")))
        return self


class Resources(Fields):
    cpu: SomeCores | None = Field(
        default=None, description="CPU request per pod, in cores. Default: a quarter of the threads that the plan uses."
    )


class PodOverrides(Fields):
    """The parts of the pod that a job may change."""

    labels: LabelMap = Field(default={}, description="Labels added to the pods.")
    annotations: StringMap = Field(default={}, description="Annotations added to the pods.")
    service_account_name: Annotated[Text, Field(max_length=253)] = Field(
        default="", description="ServiceAccount of the pods. Default: the namespace's."
    )


class Toleration(Fields):
    """As in a pod."""

    key: Annotated[Text, Field(max_length=317)] = Field(default="", description="Taint that is tolerated.")
    operator: Literal["Exists", "Equal"] = Field(default="Equal", description="How value is compared.")
    value: Annotated[Text, Field(max_length=63)] = Field(default="", description="Value of the taint.")
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = Field(
        default="", description="Effect that is tolerated. Default: all."
    )
    toleration_seconds: Count | None = Field(
        default=None, description="Seconds until eviction by NoExecute. Default: for ever."
    )


class Scheduling(Fields):
    """Which nodes, when."""

    queue_name: Annotated[Text, Field(max_length=63)] = Field(
        default="", description="Kueue LocalQueue. Default: none."
    )
    priority_class_name: Annotated[Text, Field(max_length=253)] = Field(
        default="", description="PriorityClass of the pods."
    )
    workload_priority_class_name: Annotated[Text, Field(max_length=63)] = Field(
        default="",
        description="Kueue WorkloadPriorityClass: the job's place in the queue, apart from its pods' priority. "
        "Default: that of priorityClassName.",
    )
    gang: Literal["Auto", "Required", "Disabled"] = Field(
        default="Auto",
        description="Start all pods or none. Auto: by the queue; without one, an attempt that gets nodes for some of "
        "its pods gives them back. Required: more than one node need a queue. Disabled: it keeps them and waits.",
    )
    node_selector: LabelMap = Field(default={}, description="Labels that a node must have.")
    tolerations: tuple[Toleration, ...] = Field(default=(), max_length=64, description="Taints that are tolerated.")


DEFAULT_STALL_SECONDS = 1800
DEFAULT_RESTARTS = 5


class Lifecycle(Fields):
    """Deadlines and retries. A change takes effect at once, also on an attempt that runs."""

    active_deadline_seconds: Count = Field(
        default=0, description="Seconds that all attempts together may run, waiting not counted; 0 = no limit."
    )
    pending_deadline_seconds: Count = Field(
        default=0,
        description="Seconds that the job may wait at a time, not suspended, until all pods of an attempt run; "
        "0 = no limit.",
    )
    stall_seconds: Count = Field(
        default=DEFAULT_STALL_SECONDS,
        description="Seconds without a step that end a running attempt, which counts as a restart; at least 15, and "
        "three predicted steps. 0 = never.",
    )
    ttl_seconds_after_finished: Count | None = Field(
        default=None, description="Seconds after the end until the TrainingJob is deleted. Default: never."
    )
    max_restarts: Annotated[Count, Field(le=1000)] = Field(
        default=DEFAULT_RESTARTS, description="Restarts after a crash; memory errors and disruptions are counted apart."
    )


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
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )  # fmt: skip
    objective: Objective | None = Field(default=None, description="What makes one member better than another.")
    checkpoint: Checkpoint = Field(default=Checkpoint(), description="When and where checkpoints are written.")
    image: Text = Field(default="", description="Trainer image. Default: the chart's.")
    image_pull_secrets: tuple[NamedReference, ...] = Field(
        default=(), max_length=16, description="Secrets to pull the image with.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )  # fmt: skip
    env: tuple[Variable, ...] = Field(
        default=(), max_length=256,
        description=f"Environment variables of the trainer; their values have {MAX_ENV_BYTES} bytes at most, together.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )  # fmt: skip
    resources: Resources = Field(default=Resources(), description="Requests that the plan does not decide.")
    resource_name: ExtendedResource = Field(
        default="nvidia.com/gpu", description="Extended resource that a device is requested by."
    )
    runtime_class_name: Annotated[Text, Field(max_length=253)] = Field(
        default="", description="RuntimeClass of the pods."
    )
    pod_overrides: PodOverrides = Field(default=PodOverrides(), description="Parts of the pod that a job may change.")
    command: tuple[Annotated[str, Field(max_length=4096)], ...] = Field(
        default=(), max_length=64, description="Not supported yet: any script under torchrun, with mounts and restarts."
    )
    scheduling: Scheduling = Field(default=Scheduling(), description="Which nodes, when.")
    lifecycle: Lifecycle = Field(default=Lifecycle(), description="Deadlines and retries.")
    managed_by: Annotated[Name, Field(max_length=63)] = Field(
        default=MANAGER, description="Controller that runs the job; others leave it alone."
    )
    suspend: Flag = Field(default=False, description="End the running attempt at a checkpoint, start none.")

    @property
    def texts(self) -> dict[str, Location]:
        """Where the text is that is trained and evaluated on, by field below spec."""
        evaluation = self.data.evaluation
        places = {"data.text": self.data.text, "data.evaluation.text": evaluation.text if evaluation else None}
        return {field: place for field, place in places.items() if place is not None}

    @property
    def compared_by(self) -> Objective:
        """The objective; without one evaluation loss where there is any, else the loss."""
        if self.objective is not None:
            return self.objective
        return Objective(metric="Loss" if self.data.evaluation is None else "EvaluationLoss")

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
        size = sum(len(variable.value or "") for variable in self.env)
        if size > MAX_ENV_BYTES:
            problems.append(("env", f"the values have {size} characters; at most {MAX_ENV_BYTES}: refer to a Secret"))
        is_float16, strategy = self.model.precision.compute == "float16", self.parallelism.strategy
        if is_float16 and strategy not in ("Auto", "Ddp"):
            needed = f"needs loss scaling, which {strategy} does not have; use Ddp, or bfloat16"
            problems.append(("parallelism.strategy", f"model.precision.compute: float16 {needed}"))
        if training.optimizer.moments == "int8" and strategy not in ("Auto", "Ddp"):
            blocks = f"int8 has a scale for every 256 values of a parameter, which {strategy} divides elsewhere"
            problems.append(("parallelism.strategy", f"training.optimizer.moments: {blocks}; use Ddp, or bfloat16"))
        if training.loss_scale is not None and not is_float16:
            needless = "model.precision.compute: float16 alone scales the loss; leave it out"
            problems.append(("training.lossScale", needless))
        refuse(problems)
        return self


# --- the object -------------------------------------------------------------------------------------------------------


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


# --- profiles: what was measured --------------------------------------------------------------------------------------


Rate = Annotated[Number, Field(ge=1e3, le=1e24)]
"""per second; no hardware is outside of the bounds, and predictions stay finite within"""
Overhead = Annotated[Number, Field(le=10.0)]
"""seconds"""


def _moment(text: str) -> str:
    try:
        datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"a time is needed, for example 2026-11-21T19:09:46Z ({error})") from None
    return text


Moment = Annotated[str, Field(max_length=32, json_schema_extra={"format": "date-time"}), AfterValidator(_moment)]


class LinkRates(Fields):
    """Between device and host, one direction at a time."""

    h2d_bytes_per_second: Rate | None = Field(
        default=None, alias="h2dBytesPerSecond", description="Host to device, bytes per second."
    )
    d2h_bytes_per_second: Rate | None = Field(
        default=None, alias="d2hBytesPerSecond", description="Device to host, bytes per second."
    )
    duplex_efficiency: Annotated[Number, Field(gt=0.0, le=1.0)] | None = Field(
        default=None, description="What remains of each direction when both are busy, as a fraction."
    )
    devices_per_root_port: Annotated[Positive, Field(le=64)] | None = Field(
        default=None, description="Devices that share the rates."
    )


class NodeProfileSpec(Fields):
    """Capacities and achieved rates of the node of the same name. Figures of devices are per device, all others per
    node. What is left out is taken from the node itself (capacities) or from the catalog (rates)."""

    device_kind: Literal["Cpu", "Cuda"] = Field(description="Kind of device that the figures are about.")
    num_devices: Annotated[Positive, Field(le=64)] | None = Field(
        default=None, description="Devices. Default: what the node can allocate."
    )
    device_memory: SomeBytes | None = Field(
        default=None, description="Usable memory of a device, bytes; on a CPU it is part of hostMemory."
    )
    bfloat16_flops_per_second: Rate | None = Field(default=None, description="Achieved rate of bfloat16 training.")
    float32_flops_per_second: Rate | None = Field(default=None, description="Achieved rate of float32 training.")
    device_bytes_per_second: Rate | None = Field(default=None, description="Device memory, bytes per second.")
    link: LinkRates = Field(default=LinkRates(), description="Between device and host.")
    interconnect_bytes_per_second: Rate | None = Field(
        default=None, description="Between devices of the node, one direction, bytes per second."
    )
    network_bytes_per_second: Rate | None = Field(
        default=None, description="Between nodes, per device, one direction, bytes per second."
    )
    num_cores: Annotated[Positive, Field(le=4096)] | None = Field(
        default=None, description="Cores. Default: what the node can allocate."
    )
    host_memory: SomeBytes | None = Field(
        default=None, description="Host memory for pods, bytes. Default: what the node can allocate."
    )
    dram_bytes_per_second: Rate | None = Field(
        default=None, description="Host memory, cores and copies together, bytes per second."
    )
    cpu_bytes_per_second: Rate | None = Field(
        default=None, description="Host memory, what the cores alone can stream, bytes per second."
    )
    nvme_capacity: Quantity | None = Field(
        default=None, description="Space for spill, bytes. Default: what the node can allocate."
    )
    nvme_read_bytes_per_second: Rate | None = Field(default=None, description="Sequential reads, bytes per second.")
    nvme_write_bytes_per_second: Rate | None = Field(
        default=None, description="Sustained sequential writes, bytes per second."
    )
    bfloat16_values_per_second: Rate | None = Field(
        default=None,
        description="Values of bfloat16 training that operations other than matrix products read and write on the "
        "device, per second. Default: part of the FLOP rates.",
    )
    float32_values_per_second: Rate | None = Field(default=None, description="The same of float32 training.")
    operation_overhead_seconds: Overhead | None = Field(
        default=None, description="Fixed cost of handing one piece of work to a kernel or a lane. Default: none."
    )
    source: Literal["Probe", "Training", "User"] = Field(
        default="User", description="Who measured: the probe, a training run on the node, or whoever wrote the object."
    )
    measured_time: Moment | None = Field(default=None, description="When it was measured. Default: not known.")


class ObservedBytes(Written):
    """One tier of one rank."""

    planned: Quantity = Field(description="Peak that the plan predicted, bytes.")
    max: Quantity = Field(description="Largest peak of all attempts, bytes.")
    last: Quantity = Field(description="Peak of the last attempt, bytes.")
    recent: tuple[Quantity, ...] = Field(
        default=(), max_length=16, description="Peaks of the last attempts, newest last; at most 16."
    )
    p50: Quantity | None = Field(default=None, description="Median of `recent`; an attempt counts half four later.")
    p95: Quantity | None = Field(default=None, description="The same, 95 % of the weight: what plans are corrected by.")


class LowerBound(Written):
    """Memory that ran out: there was at least so much."""

    planned: Quantity = Field(description="What was predicted without corrections, bytes.")
    held: Quantity = Field(description="The limit that was reached, bytes.")


class LowerBounds(Written):
    """The largest in proportion of each kind; of attempts under this plan."""

    device: LowerBound | None = Field(default=None, description="DeviceOutOfMemory: the device budget of a rank.")
    host: LowerBound | None = Field(default=None, description="HostOutOfMemory: the host slab of a rank.")
    nvme: LowerBound | None = Field(default=None, description="SpillVolumeFull: the spill file of a rank.")
    pod: LowerBound | None = Field(default=None, description="OOMKilled: the memory limit of a pod.")


class ObservedPod(Written):
    """What pods under this plan took at most, by their cgroups; of runs that did all that a run does."""

    workload: Annotated[str, Field(max_length=16, pattern=r"^([0-9a-f]{16})?$")] = Field(
        default="", description="Hash of what a pod's memory depends on beside model and plan: data, image, overrides."
    )
    counted: Quantity = Field(description="What arithmetic gives such a pod, bytes.")
    attempts: tuple[Annotated[str, Field(max_length=63)], ...] = Field(
        default=(), max_length=16, description="Attempts of `recent`, as <job>-<attempt>."
    )
    recent: tuple[Quantity, ...] = Field(
        default=(), max_length=16, description="Peaks of the last attempts, newest last; at most 16."
    )
    p95: Quantity = Field(description="95 % of the weight of `recent`; an attempt counts half four later.")
    count: Count = Field(default=0, description="Runs that were seen.")


class ObservedTiers(Written):
    """The fullest rank's, per tier; tiers that the plan does not use are left out."""

    device: ObservedBytes | None = Field(default=None, description="On each device.")
    host: ObservedBytes | None = Field(default=None, description="In host memory.")
    nvme: ObservedBytes | None = Field(default=None, description="On NVMe.")


class MemoryProfileSpec(Written):
    """What was observed of a model's memory under one plan. Written by the operator; outlives the jobs."""

    fingerprint: Annotated[str, Field(min_length=16, max_length=16, pattern=r"^[0-9a-f]{16}$")] = Field(
        description="Hash of model, sequence, plan and number of ranks: what the bytes depend on."
    )
    model: Annotated[Text, Field(max_length=256)] = Field(default="", description="The model, for people.")
    model_fingerprint: Annotated[str, Field(max_length=16, pattern=r"^([0-9a-f]{16})?$")] = Field(
        default="", description="The same hash without the plan: profiles of one model correct each other's plans."
    )
    plan: Annotated[Text, Field(max_length=512)] = Field(default="", description="The plan, for people.")
    world_size: Annotated[Positive, Field(le=1 << 18)] = Field(default=1, description="Ranks.")
    peaks: ObservedTiers = Field(default=ObservedTiers(), description="Bytes of a rank, per tier.")
    lower_bounds: LowerBounds = Field(default=LowerBounds(), description="What was not enough.")
    pod: ObservedPod | None = Field(default=None, description="What pods took: what their requests are lowered by.")
    count: Count = Field(default=0, description="Attempts that were observed.")
    attempt: Annotated[str, Field(max_length=63)] = Field(
        default="", description="The last of them, as <job>-<attempt>."
    )
    last_attempts: tuple[Annotated[str, Field(max_length=63)], ...] = Field(
        default=(), max_length=64, description="The last of each job, newest last; at most 64 jobs."
    )
    observed_time: Moment | None = Field(default=None, description="When it was last observed.")
    clamped: Flag = Field(
        default=False, description="A reported figure was implausible (not 0.25 to 4 times the planned) and was cut."
    )


def _is_dns_label(text: str) -> bool:
    return text.isascii() and text.replace("-", "").isalnum() and text == text.lower().strip("-")


def _as_dns_label(text: str) -> str:
    kept = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in text.lower())
    return kept.strip("-")[:MAX_NAME_LENGTH].strip("-") or "my-job"


# Set by an API server; `kubectl get -o yaml > job.yaml` must load again.
_SERVER_FIELDS: tuple[tuple[str, ...], ...] = (
    ("status",),
    *(
        ("metadata", field)
        for field in (
            "uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "ownerReferences",
            "finalizers", "selfLink", "deletionTimestamp", "deletionGracePeriodSeconds",
        )
    ),
)  # fmt: skip


def load_job(path: Path) -> TrainingJob:
    """The job in a YAML file. Raises InvalidJob with every wrong field, UserError when the file cannot be read."""
    return parse_job(read_text(path), str(path))


def parse_job(text: str, source: str) -> TrainingJob:
    """The job in a YAML text; `source` names it in errors."""
    job = parse(TrainingJob, text, source, ignored=_SERVER_FIELDS)
    problems = refusals(job)
    if problems:
        raise InvalidJob(source, problems)
    return job


# --- what does not work yet -------------------------------------------------------------------------------------------


_TEXT_INSTEAD = "does not work in a run yet; use data.text or data.builtin"
NOT_YET = {
    **dict.fromkeys(("data.tokens", "data.huggingFace", "data.entrypoint"), _TEXT_INSTEAD),
    "checkpoint.from": "does not work in a run yet; leave it out",
    "checkpoint.resume": "does not work in a run yet; use OwnOnly, and a fresh --output for a fresh start",
    "command": "does not work yet; describe the run in model, data and training",
}
"""Fields that no run honours, each with what works instead. The CRD refuses them, too."""
_INSPECTED = "must be built to be planned, which the operator cannot do; use model.config, or `spillway run`"
NOT_IN_CLUSTER = {"model.source": _INSPECTED, "model.entrypoint": _INSPECTED}
"""The same of fields that local runs honour alone."""


def refusals(job: TrainingJob) -> list[FieldProblem]:
    """Fields that no run can honour yet, here or in a cluster, each with what works instead."""
    spec = job.spec
    sizes = spec.model.config
    masked = sizes is not None and sizes.architecture == "bert"
    smallest = MIN_TEXT_VOCABULARY + masked
    found = [
        (_drops_in_llama_with_lora(spec.model), "spec.model.config.dropout",
         "llama with lora is that of transformers, which has none; leave it out"),
        (sizes is not None and sizes.vocab_size < smallest, "spec.model.config.vocabSize",
         f"at least {smallest} for text: a token for every byte, and the end of text{', and the mask' * masked}"),
    ]  # fmt: skip
    return [*_refused(found, job), *_refused_fields(NOT_YET, job), *problems_of(job)]


def refusals_in_cluster(job: TrainingJob) -> list[FieldProblem]:
    """Fields that `plan` understands and an attempt in a cluster cannot honour yet, each with what works instead."""
    strategy, model, optimizer = job.spec.parallelism.strategy, job.spec.model, job.spec.memory.optimizer
    divides = strategy.startswith("Zero")
    on_devices = job.spec.parallelism.device == "Cuda" and job.spec.parallelism.world_size > 1
    found = [
        (divides and optimizer.overlap == "Forward", "spec.memory.optimizer.overlap",
         f"does not work with parallelism.strategy: {strategy}; use None or Auto, or strategy Fsdp"),
        (divides and model.lora, "spec.model.lora",
         f"does not work with parallelism.strategy: {strategy}, which divides what is trained whole; use Ddp or Fsdp"),
        (on_devices and strategy not in ("Auto", "Ddp"), "spec.parallelism.strategy",
         "divides a model on CPUs alone so far; use Ddp on Cuda devices (`spillway plan` knows all of them)"),
    ]  # fmt: skip
    return [*_refused_fields(NOT_IN_CLUSTER, job), *_refused(found, job)]


def _drops_in_llama_with_lora(model: Model) -> bool:
    return bool(model.lora and model.config and model.config.architecture == "llama" and model.config.dropout)


def _refused_fields(never: Mapping[str, str], job: TrainingJob) -> list[FieldProblem]:
    """Of these, all that have another value than the default."""
    given, defaults = job.spec.model_dump(mode="json"), {"checkpoint": Checkpoint().model_dump(mode="json")}
    wrong = {path: _below(given, path) not in (None, [], _below(defaults, path)) for path in never}
    return _refused([(wrong[path], f"spec.{path}", problem) for path, problem in never.items()], job)


def _refused(found: Sequence[tuple[object, str, str]], job: TrainingJob) -> list[FieldProblem]:
    return [FieldProblem(path, _given(job, path), problem) for wrong, path, problem in found if wrong]


def _given(job: TrainingJob, path: str) -> str:
    value: Any = job.model_dump(mode="json")
    for part in path.split("."):
        value = value[part]
    return value if isinstance(value, str) else shown(value)


_CLUSTER_ONLY = (
    "parallelism.nodes", "parallelism.devicesPerNode", "parallelism.strategy", "model.precision.gradientReduce",
    "memory.activations.hostReserve", "spill.storageClassName", "spill.numVolumes",
    "checkpoint.subPath", "image", "imagePullSecrets", "env", "resources", "resourceName",
    "runtimeClassName", "podOverrides", "scheduling", "lifecycle.activeDeadlineSeconds",
    "lifecycle.pendingDeadlineSeconds", "lifecycle.stallSeconds", "lifecycle.ttlSecondsAfterFinished", "managedBy",
    "suspend",
)  # fmt: skip


def not_used_locally(spec: TrainingJobSpec) -> list[str]:
    """Fields without a meaning in a local run that the user gave another value than the default, as spec.a.b."""
    given = spec.model_dump(mode="json", exclude_unset=True)
    default = TrainingJobSpec.model_construct(model=spec.model, data=spec.data, training=spec.training)
    defaults = default.model_dump(mode="json")
    defaults["model"] = {"precision": Precision().model_dump(mode="json")}
    return [
        dotted(("spec", *leaf))
        for field in _CLUSTER_ONLY
        for leaf, value in _leaves(_below(given, field), tuple(field.split(".")))
        if value not in (None, {}, [], _below(defaults, ".".join(leaf)))
    ]


def _below(document: Any, path: str) -> Any:
    for part in path.split("."):
        document = document.get(part) if isinstance(document, dict) else None
    return document


def _leaves(value: Any, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict) and path[-1] not in ("nodeSelector", "labels", "annotations"):
        return [leaf for key, inner in value.items() for leaf in _leaves(inner, (*path, key))]
    return [(path, value)]
