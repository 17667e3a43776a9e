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
    matching,
    reject,
)
from spillway.api.limits import MIN_TEXT_VOCABULARY
from spillway.errors import UserError

FETCHED = matching(r"^(s3|hf|https?)://[^/\s]\S*$", "s3://bucket/directory")
FETCHED_ON_CLAIM = "needs a claim, because a download cannot be written into an image"
CHAT_EVALUATES_CHAT = "belongs to data.chat; use evaluation.text or fraction"
TEXT_EVALUATES_NO_CHAT = "chats are evaluated on chats; use evaluation.chat or fraction"
CHATS_NEED_CAUSAL = "spec.data: chats need a model that predicts each token from those before it, such as llama"
PACKING_NEEDS_CHATS = "needs chats: data.chat, or an entrypoint that returns chats"
FETCHED_BELOW = "a download needs a directory of its own on the claim; name that directory"


class ModelConfig(Fields):
    """A transformer of the given sizes, initialised at random."""

    architecture: Literal["llama", "gpt2", "bert", "t5"] = Field(
        description=(
            "Model family. llama and gpt2 predict each token from the tokens before it. bert predicts masked tokens "
            "from all others. t5 predicts the second half of a sequence from the first half."
        )
    )
    hidden_size: Annotated[Positive, Field(le=1 << 17)] = Field(description="Width of the residual stream.")
    num_layers: Annotated[Positive, Field(le=1024)] = Field(
        description="Number of transformer blocks. t5 has this many blocks in the encoder and as many in the decoder."
    )
    num_heads: Annotated[Positive, Field(le=1024)] = Field(
        description="Number of attention heads; must divide hiddenSize."
    )
    num_key_value_heads: Annotated[Positive, Field(le=1024)] = Field(
        default_factory=lambda given: given.get("num_heads", 1),
        description=(
            "Number of key and value heads; must divide numHeads. Only llama can have fewer than numHeads. "
            "Default: numHeads."
        ),
    )
    intermediate_size: Annotated[Positive, Field(le=1 << 20)] = Field(
        default_factory=lambda given: 4 * given.get("hidden_size", 1),
        description="Width of the feed-forward layer. Default: 4 x hiddenSize.",
    )
    vocab_size: Annotated[Positive, Field(ge=2, le=1 << 22)] = Field(
        description=(
            "Number of tokens in the vocabulary. A tokenizer with at most this many tokens is trained on the "
            "job's text."
        ),
        json_schema_extra={"minimum": MIN_TEXT_VOCABULARY},  # all data of a job is text
    )
    max_positions: Annotated[Positive, Field(le=1 << 24)] = Field(
        default=1024,
        description=(
            "Number of learned position embeddings; at least training.sequenceLength. Only gpt2 and bert use this "
            "field."
        ),
    )
    tie_word_embeddings: Flag = Field(
        default_factory=lambda given: given.get("architecture") != "llama",
        description="Whether the embedding and the output projection share one matrix. Default: false for llama, true "
        "for the others.",
    )
    dropout: Annotated[Number, Field(lt=1.0)] = Field(
        default=0.0, description="Dropout probability of attention and feed-forward outputs."
    )
    rope_theta: Annotated[Number, Field(gt=0.0)] = Field(
        default=10000.0, description="Base of the rotary position embeddings. Only llama uses this field."
    )
    norm_eps: Epsilon = Field(
        default=1e-5, description="Epsilon that each normalisation layer adds under its square root."
    )

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
            one = (
                f"{self.architecture} has one key and value head per attention head; leave it out, or write "
                f"{self.num_heads}"
            )
            problems.append(("numKeyValueHeads", one))
        if self.architecture == "t5" and not self.tie_word_embeddings:
            problems.append(("tieWordEmbeddings", "t5 has one matrix for all its embeddings; leave it out"))
        reject(problems)
        return self


class Fetch(Fields):
    """Download that fills a directory before it is first read."""

    uri: Annotated[str, Field(max_length=2048, pattern=FETCHED)] = Field(
        description=(
            "Address to download from: s3://bucket/directory, hf://organisation/model, "
            "hf://datasets/organisation/name, or the https:// address of one file. For model.source, only .json, "
            ".safetensors, .jinja, .model and .txt files are downloaded."
        ),
    )
    secret_name: ClaimName | None = Field(
        default=None,
        description=(
            "Secret in the job's namespace whose keys become environment variables of the download, for example "
            "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL, or HF_TOKEN. Default: none."
        ),
    )


class Location(Fields):
    """A directory on a claim, or a path as the trainer sees it."""

    claim: ClaimName | None = Field(
        default=None,
        description=(
            "PersistentVolumeClaim in the job's namespace that holds the files. Set either claim or path. "
            "Default: none."
        ),
    )
    sub_path: SubPath = Field(
        default="",
        description=(
            "Directory or file on the claim, relative to the root of its volume. Default: the root; with fetch, a "
            "directory must be named."
        ),
    )
    path: Annotated[Text, Field(min_length=1)] | None = Field(
        default=None,
        description=(
            "Path of the directory or file as the trainer sees it: inside the pod or, in a local run, on the "
            "machine itself. Set either path or claim."
        ),
    )
    fetch: Fetch | None = Field(
        default=None,
        exclude_if=lambda given: given is None,  # if unset, job.json is as in every earlier version
        description=(
            "Download that fills the directory before it is first read. Later runs use the files that are already "
            "there. Default: none."
        ),
    )

    @model_validator(mode="after")
    def _claim_or_path(self) -> Self:
        problems = exactly_one(self, ("claim", "path"))
        if self.path is not None and self.sub_path:
            problems.append(
                ("subPath", "only applies to a claim; leave it out, and write the whole directory into path")
            )
        if self.fetch is not None and self.claim is not None and not self.sub_path:
            problems.append(("subPath", FETCHED_BELOW))
        reject(problems)
        return self


class Lora(Fields):
    """Low-rank adapters, trained in float32, on a frozen model in the compute type."""

    rank: Annotated[Positive, Field(le=4096)] = Field(default=16, description="Rank of every adapter.")
    alpha: Number = Field(
        default=32.0, description="Scale of the adapters: their output is multiplied by alpha / rank."
    )
    target_modules: tuple[Name, ...] = Field(
        default=(),
        max_length=64,
        description=(
            "Names of the modules that get an adapter, compared with the last parts of each module's name. "
            "Default: the attention projections."
        ),
    )


class Precision(Fields):
    """Number types (dtypes)."""

    compute: Literal["bfloat16", "float16", "float32"] = Field(
        default="bfloat16",
        description=(
            "Number type (dtype) of the parameters on the device, the activations and the gradients. float16 "
            "needs loss scaling, which training.lossScale controls."
        ),
    )
    master: Literal["float32"] = Field(
        default="float32",
        description=(
            "Type of the master parameters, which the optimizer updates. Its moments have the same type unless "
            "training.optimizer.moments says otherwise."
        ),
    )
    gradient_reduce: Literal["bfloat16", "float32"] = Field(
        default="float32",
        description="Type in which ranks send gradients to each other; bfloat16 rounds each rank's sum once.",
    )
    gradient_accumulate: Literal["float32"] = Field(
        default="float32", description="Type in which the gradients of a step's micro-batches are summed."
    )


def no_entry_point(name: str | None) -> list[tuple[str, str]]:
    """The problem with the entry point `name`; empty if there is none."""
    if name is None or re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", name):
        return []
    return [("entrypoint", f"{name!r} names no function; write package.module:function")]


class Model(Fields):
    """What is trained: exactly one of config, source, entrypoint."""

    config: ModelConfig | None = Field(
        default=None, description="A transformer of the given sizes, initialised at random."
    )
    source: Location | None = Field(
        default=None,
        description=(
            "Directory of a Hugging Face model with config.json, safetensors files and tokenizer.json. Training "
            "starts from its weights. docs/models.md lists the supported model families."
        ),
    )
    entrypoint: Name | None = Field(
        default=None,
        description=(
            "Function that returns the model, as package.module:function; the trainer must be able to import it. "
            "It returns a transformers model, or a Chain: Spillway's class for a model as a sequence of segments "
            "(docs/models.md)."
        ),
    )
    lora: Lora | None = Field(
        default=None,
        description=(
            "Trains low-rank adapters (LoRA) instead of the model's own parameters, which stay frozen. Default: "
            "all parameters are trained."
        ),
    )
    precision: Precision = Field(
        default=Precision(), description="Number types (dtypes) for computing, for master parameters and for gradients."
    )

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        reject([*exactly_one(self, ("config", "source", "entrypoint")), *no_entry_point(self.entrypoint)])
        return self

    @property
    def is_own_llama(self) -> bool:
        """Whether this is the one model that does not need `transformers`: llama, given by its sizes and trained
        without adapters."""
        return self.config is not None and self.config.architecture == "llama" and self.lora is None

    @property
    def transformer(self) -> ModelConfig:
        """The sizes of a model that is given by its sizes. Raises UserError for other models."""
        if self.config is None:
            raise UserError(
                "spec.model: the model's sizes (hiddenSize, numLayers ...) are required, but source and entrypoint "
                "do not give them; set spec.model.config"
            )
        return self.config


class Evaluation(Fields):
    """Evaluation on data that is never trained on: held-out sequences, or separate text or chats."""

    text: Location | None = Field(
        default=None,
        exclude_if=lambda given: given is None,  # here and below: if unset, job.json is as in every earlier version
        description=(
            "Separate text files to evaluate on, with the tokenizer of the training data. Cannot be combined with "
            "data.chat. Default: none."
        ),
    )
    chat: Location | None = Field(
        default=None,
        exclude_if=lambda given: given is None,
        description=(
            "Separate chats to evaluate on, in the same forms as data.chat. Allowed only with data.chat. Default: none."
        ),
    )
    fraction: Annotated[Number, Field(gt=0.0, le=0.5)] | None = Field(
        # Not a static default, because an API server would add it to every object.
        default_factory=lambda given: None if given.get("text") or given.get("chat") else 0.01,
        description=(
            "Share of the training sequences that is held out for evaluation; their number is rounded up. "
            "Consecutive stretches of sequences are held out, at random positions. Cannot be combined with "
            "evaluation.text or evaluation.chat. Default: 0.01 if neither of these is set."
        ),
    )
    sequences: Count = Field(
        default=64,
        exclude_if=lambda given: given == 64,
        description=(
            "Number of sequences that each evaluation reads; 0 = all. They are chosen once, at random, so every "
            "evaluation reads the same ones."
        ),
    )
    seed: Count = Field(
        default=0,
        exclude_if=lambda given: given == 0,
        description=(
            "Seed that chooses the held-out stretches and the sequences to read. It is independent of "
            "training.seed: runs that differ only in training.seed are evaluated on the same text."
        ),
    )
    every_steps: Positive = Field(default=100, description="Number of optimizer steps from one evaluation to the next.")

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        reject(exactly_one(self, ("text", "chat", "fraction")))
        return self


class Data(Fields):
    """What the model is trained on: exactly one of text, chat, tokens, entrypoint, builtin."""

    text: Location | None = Field(
        default=None,
        description=(
            "Text files to train on, encoded with the tokenizer of model.source. Without model.source, a "
            "tokenizer is trained on these files."
        ),
    )
    chat: Location | None = Field(
        default=None,
        exclude_if=lambda given: given is None,
        description=(
            "Conversations to train on: a .jsonl, .parquet or .arrow file, or a directory of such files. Each "
            "line or row has messages, or prompt and completion (docs/data.md). Needs model.source, because its "
            "chat template is used. Only the tokens of responses count in the loss."
        ),
    )
    tokens: Location | None = Field(
        default=None,
        description=(
            "Tokens to train on, in the format of Megatron-LM: an .idx file with its .bin file, or a directory of "
            "such pairs. Needs model.source with the tokenizer that made the tokens."
        ),
    )
    entrypoint: Name | None = Field(
        default=None,
        description=(
            "Function that returns the documents to train on, as package.module:function; the trainer must be "
            "able to import it. Documents are text, messages or tokens (docs/data.md). The function is called "
            "once, when the trainer encodes the documents as tokens."
        ),
    )
    builtin: Literal["PythonStdlib"] | None = Field(
        default=None,
        description="Text that every trainer image contains. PythonStdlib: the source files of Python's "
        "standard library.",
    )
    packing: bool = Field(
        default=False,
        exclude_if=lambda given: not given,
        description=(
            "Puts several chats into one row of training.sequenceLength tokens, instead of padding each to that "
            "length. No token attends to another chat, and positions start at 0 in each. microBatchSize and "
            "globalBatchSize count rows."
        ),
    )
    evaluation: Evaluation | None = Field(
        default=None,
        description="Evaluations during training: the loss on data that is not trained on. Default: no evaluations.",
    )

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        problems = exactly_one(self, ("text", "chat", "tokens", "entrypoint", "builtin"))
        problems += no_entry_point(self.entrypoint)
        if self.packing and self.chat is None and self.entrypoint is None:
            problems.append(("packing", PACKING_NEEDS_CHATS))
        if self.evaluation is not None and self.chat is None and self.evaluation.chat is not None:
            problems.append(("evaluation.chat", CHAT_EVALUATES_CHAT))
        if self.evaluation is not None and self.chat is not None and self.evaluation.text is not None:
            problems.append(("evaluation.text", TEXT_EVALUATES_NO_CHAT))
        reject(problems)
        return self
