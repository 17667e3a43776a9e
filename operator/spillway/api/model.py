"""spec.model and spec.data of a TrainingJob."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from spillway.api.field_types import (
    ClaimName,
    Count,
    Epsilon,
    Fields,
    Flag,
    Name,
    Number,
    Positive,
    SubPath,
    Text,
    exactly_one,
    refuse,
)
from spillway.api.limits import MIN_TEXT_VOCABULARY
from spillway.errors import UserError

FETCHED = r"^(s3|hf|https?)://[^/\s]\S*$"
FETCHED_ON_CLAIM = "needs a claim: an image cannot be written"
CHAT_EVALUATES_CHAT = "belongs to data.chat; use evaluation.text or fraction"
TEXT_EVALUATES_NO_CHAT = "chats are evaluated on chats; use evaluation.chat or fraction"
FETCHED_BELOW = "a download fills a directory of its own on the claim: name it"


class ModelConfig(Fields):
    """A transformer by its sizes, initialised at random."""

    architecture: Literal["llama", "gpt2", "bert", "t5"] = Field(
        description=(
            "Family. llama and gpt2 predict each token from earlier ones, bert masked tokens from all others, t5 "
            "the second half of a sequence from the first."
        )
    )
    hidden_size: Annotated[Positive, Field(le=1 << 17)] = Field(description="Width of the residual stream.")
    num_layers: Annotated[Positive, Field(le=1024)] = Field(
        description="Number of blocks; for t5, of the encoder and of the decoder."
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
        description="Tokens in the vocabulary; for text the tokenizer is trained to this size.",
        json_schema_extra={"minimum": MIN_TEXT_VOCABULARY},  # all data of a job is text
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


class Fetch(Fields):
    """What fills a directory before it is read for the first time."""

    uri: Annotated[str, Field(max_length=2048, pattern=FETCHED)] = Field(
        description="s3://bucket/directory, hf://organisation/model, hf://datasets/organisation/name, or the https:// "
        "address of one file. For model.source only .json, .safetensors, .jinja, .model and .txt files are downloaded.",
    )
    secret_name: ClaimName | None = Field(
        default=None,
        description="Secret whose keys become environment variables of the download, for example AWS_ACCESS_KEY_ID, "
        "AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL, or HF_TOKEN. Default: none.",
    )


class Location(Fields):
    """A directory: on a claim, or a path as the trainer sees it."""

    claim: ClaimName | None = Field(default=None, description="Name of a PersistentVolumeClaim. Default: none.")
    sub_path: SubPath = Field(default="", description="Directory on the claim.")
    path: Annotated[Text, Field(min_length=1)] | None = Field(
        default=None, description="Directory or file as the trainer sees it: in its image, on disk in a local run."
    )
    fetch: Fetch | None = Field(
        default=None,
        exclude_if=lambda given: given is None,  # job.json as every version before knows it
        description="Download that fills the directory once; what is there already is used as it is. Default: none.",
    )

    @model_validator(mode="after")
    def _claim_or_path(self) -> Self:
        problems = exactly_one(self, ("claim", "path"))
        if self.path is not None and self.sub_path:
            problems.append(("subPath", "belongs to a claim; write the whole directory into path"))
        if self.fetch is not None and self.claim is not None and not self.sub_path:
            problems.append(("subPath", FETCHED_BELOW))
        refuse(problems)
        return self


class Lora(Fields):
    """Low-rank adapters, trained in float32, on a frozen model in the compute type."""

    rank: Annotated[Positive, Field(le=4096)] = Field(default=16, description="Rank of every adapter.")
    alpha: Number = Field(default=32.0, description="Scale of the adapters, divided by rank.")
    target_modules: tuple[Name, ...] = Field(
        default=(),
        max_length=64,
        description="Names of the modules that get an adapter. Default: the attention projections.",
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


def no_entry_point(name: str | None) -> list[tuple[str, str]]:
    """The problem with `name`; empty without one."""
    if name is None or re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", name):
        return []
    return [("entrypoint", f"{name!r} names no function; write package.module:function")]


class Model(Fields):
    """What is trained: exactly one of config, source, entrypoint."""

    config: ModelConfig | None = Field(default=None, description="A transformer by its sizes, initialised at random.")
    source: Location | None = Field(
        default=None,
        description="A Hugging Face directory with config.json, safetensors and tokenizer.json; docs/models.md lists "
        "the families. Training starts from its weights.",
    )
    entrypoint: Name | None = Field(
        default=None,
        description="package.module:function of the trainer image that returns a Chain or a transformers model.",
    )
    lora: Lora | None = Field(default=None, description="Low-rank adapters. Default: full training.")
    precision: Precision = Field(default=Precision(), description="Types of numbers.")

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        refuse([*exactly_one(self, ("config", "source", "entrypoint")), *no_entry_point(self.entrypoint)])
        return self

    @property
    def is_own_llama(self) -> bool:
        """The one model that needs nothing of `transformers`: llama by its sizes, all of it trained."""
        return self.config is not None and self.config.architecture == "llama" and self.lora is None

    @property
    def transformer(self) -> ModelConfig:
        """The sizes of a model that is given by them."""
        if self.config is None:
            raise UserError(
                "spec.model: this needs the model's sizes (hiddenSize, numLayers ...), which source and entrypoint do "
                "not give; use model.config"
            )
        return self.config


class Evaluation(Fields):
    """Loss on data that is never trained on: a part of the data that is held out, or text or chats of their own."""

    text: Location | None = Field(
        default=None,
        exclude_if=lambda given: given is None,  # and so on: job.json as every version before knows it
        description="Text files to evaluate on, with the tokenizer of data.text. Default: none.",
    )
    chat: Location | None = Field(
        default=None,
        exclude_if=lambda given: given is None,
        description="Chats to evaluate on, in the forms of data.chat; only with it. Default: none.",
    )
    fraction: Annotated[Number, Field(gt=0.0, le=0.5)] | None = Field(
        # An API server would add a static one.
        default_factory=lambda given: None if given.get("text") or given.get("chat") else 0.01,
        description=(
            "Share of the sequences held out for evaluation, rounded up: consecutive stretches at random "
            "positions. Not together with text or chat. Default: 0.01 without them."
        ),
    )
    sequences: Count = Field(
        default=64,
        exclude_if=lambda given: given == 64,
        description=(
            "Sequences read by each evaluation, always the same, drawn from the held-out ones or from text. 0 = all."
        ),
    )
    seed: Count = Field(
        default=0,
        exclude_if=lambda given: given == 0,
        description=(
            "Seed of the held-out stretches and of the sequences read. Independent of training.seed, so runs with"
            " different seeds are evaluated on the same text."
        ),
    )
    every_steps: Positive = Field(default=100, description="Steps between two evaluations.")

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        refuse(exactly_one(self, ("text", "chat", "fraction")))
        return self


class Data(Fields):
    """What it is trained on: exactly one of text, chat, tokens, entrypoint, builtin."""

    text: Location | None = Field(
        default=None,
        description="Text files; a tokenizer of the model's vocabulary is trained on them, or model.source has one.",
    )
    chat: Location | None = Field(
        default=None,
        exclude_if=lambda given: given is None,
        description="A file of .jsonl, .parquet or .arrow, or a directory of them: each line or row has messages, or "
        "prompt and completion (docs/data.md). Needs model.source, whose chat template is used. The loss counts "
        "responses only.",
    )
    tokens: Location | None = Field(
        default=None,
        description="Tokens in the format of Megatron-LM: an .idx file with its .bin, or a directory of them. Needs "
        "model.source, which has their tokenizer.",
    )
    entrypoint: Name | None = Field(
        default=None,
        description="package.module:function of the trainer image that returns documents (docs/data.md): text, "
        "messages or tokens. It is called once, when the corpus is built.",
    )
    builtin: Literal["PythonStdlib"] | None = Field(
        default=None, description="Text that every trainer image contains: the sources of Python's standard library."
    )
    evaluation: Evaluation | None = Field(default=None, description="Loss on unseen text. Default: none.")

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        problems = exactly_one(self, ("text", "chat", "tokens", "entrypoint", "builtin"))
        problems += no_entry_point(self.entrypoint)
        if self.evaluation is not None and self.chat is None and self.evaluation.chat is not None:
            problems.append(("evaluation.chat", CHAT_EVALUATES_CHAT))
        if self.evaluation is not None and self.chat is not None and self.evaluation.text is not None:
            problems.append(("evaluation.text", TEXT_EVALUATES_NO_CHAT))
        refuse(problems)
        return self
