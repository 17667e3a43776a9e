"""ModelShape: what a model costs before it exists: parameters, bytes saved for backward, FLOPs, by segment.

Symbols: d = hidden size, k = key and value width (d * key/value heads / heads), h = heads, f = intermediate size,
V = vocabulary, b = bytes of the compute type, r = rank of an adapter. Figures "per token" are multiplied by micro-batch
x sequence length. tests/parity/models/test_model_shape.py compares them with what autograd really saves.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import ceil
from typing import Any, Self

from pydantic import TypeAdapter

from spillway.api.field_types import MAX_MEMBERS
from spillway.api.limits import MOST_INSPECTED
from spillway.api.model import Lora, ModelConfig
from spillway.api.sweep.members import adapters_of, inspected_as
from spillway.api.training_job import TrainingJobSpec
from spillway.errors import UserError
from spillway.plan import DeviceKind

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
FLOAT32_BYTES = 4
MOST_PACKED_BYTES = 4 << 20
MOST_SEGMENTS, MOST_UNPACKED_BYTES = 4096, 32 << 20
"""Limits of a packed shape, which somebody else may have made."""
INDEX_BYTES = 8
"""Tokens and labels are int64."""
RELATIVE_POSITIONS = 32
"""Buckets of t5's relative position bias."""
TOKEN_TYPES = 2
"""Token types of bert."""
LOSS_CHUNK_BYTES = 8 << 20
"""Bytes of float32 logits that the head processes at a time. Smaller chunks take more operations; larger ones do not
fit in a cache."""


def loss_chunk_rows(vocab_size: int) -> int:
    """Tokens in a chunk of the loss. A multiple of 4, so that on a GPU a row has the same alignment in any chunk."""
    return max(4, LOSS_CHUNK_BYTES // (FLOAT32_BYTES * vocab_size) // 4 * 4)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch."""

    size: int = 1
    sequence_length: int = 0


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """One parameter as Fsdp divides it: by rows, its first dimension."""

    num_rows: int
    """0: a scalar, or empty."""
    row_values: int
    value_bytes: int
    is_trained: bool
    is_alias: bool = False
    """Whether it is a tied alias: trained like its owner, without its own states."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive layers that move together. Two segments are equal when their figures are, whatever their names."""

    name: str = field(compare=False)
    num_parameters: int
    """Values of its own parameters; a tied alias belongs to its owner's segment."""
    num_frozen: int
    """The part of these that is frozen: no gradient, no optimizer state."""
    num_aliased: int
    """Values of tied aliases, which read their owner's memory."""
    num_accumulated: int
    """Values with an accumulator: trained parameters, and trained aliases, which have their own."""
    parameter_bytes: int
    """Bytes of its own parameters, in their types."""
    num_tensors: int
    """Number of parameters as tensors, including aliases."""
    largest_parameter: int
    """Values in the largest trained parameter, including aliases: bounds the transient gradient."""
    matrix_parameters: int
    """Values in matrix products, including aliases: 2 FLOPs per token each in forward, 2 in the gradient of the
    input."""
    trained_matrix_parameters: int
    """The part of these that is trained: 2 more FLOPs per token in backward."""
    attention_width: int
    """w of the attention's 2 w x sequence length FLOPs per token in forward: d if causal, because half of the positions
    are masked on average."""
    saved_bytes: tuple[int, ...]
    """Per token, one entry per storage that autograd saves for backward (weights excluded, views counted once)."""
    made_bytes: tuple[int, ...]
    """Per token, one entry per tensor that this segment makes and passes on."""
    passed_bytes: tuple[int, ...]
    """Per token, one entry per tensor that it receives and passes on unchanged."""
    forward_workspace_bytes: int
    """Per token: temporaries of forward that exist at the same time as the saved storages."""
    backward_workspace_bytes: int
    """Per token: temporaries of backward that exist at the same time as the saved storages."""
    lean_forward_bytes: int
    """Per token: everything that exists at once in a forward that saves nothing (a recomputed segment)."""
    parameters: tuple[ParameterShape, ...]
    """All parameters, including aliases."""
    rebuilt_bytes: tuple[int, ...] = ()
    """Per token, one entry per storage of `saved_bytes` that backward can rebuild from the others. Empty: none, or
    unknown."""
    rebuilding_bytes: int = 0
    """Per token: bytes that backward reads and writes to rebuild them, each storage once for every operation that saved
    it."""

    @property
    def num_trained(self) -> int:
        return self.num_parameters - self.num_frozen

    @property
    def output_bytes(self) -> int:
        """Per token: all that the next segment gets."""
        return sum(self.made_bytes) + sum(self.passed_bytes)

    @property
    def saved_bytes_per_token(self) -> int:
        return sum(self.saved_bytes)

    def forward_flops_per_token(self, sequence_length: int) -> float:
        return 2.0 * self.matrix_parameters + 2.0 * self.attention_width * sequence_length

    def backward_flops_per_token(self, sequence_length: int) -> float:
        """Gradients of inputs cost what forward costs, those of trained matrices as much again, and attention costs
        twice."""
        matrices = 2.0 * (self.matrix_parameters + self.trained_matrix_parameters)
        return matrices + 4.0 * self.attention_width * sequence_length


@dataclass(frozen=True)
class ModelShape:
    """A chain of segments: embedding, blocks (equal or not), head."""

    architecture: str
    """llama, gpt2, bert, t5, or the name of an inspected model."""
    embedding: Segment
    blocks: tuple[Segment, ...]
    head: Segment
    hidden_size: int
    vocab_size: int
    compute_bytes: int
    """b: bytes of the compute type."""
    trained_bytes: int
    """Bytes of one trained parameter on the device: b, or 4 for adapters trained in float32."""
    table_bytes_per_position: int = 0
    """Bytes per position of the position tables, which all blocks share and which are kept for the whole run."""
    tied: tuple[tuple[int, int], ...] = ()
    """(segment of the alias, segment of its owner), as positions in `segments`"""
    others: tuple[tuple[str, ModelShape], ...] = ()
    """For an inspected sweep, the same model as its members have it, by `inspected_as`."""

    def of_member(self, member: TrainingJobSpec, job: TrainingJobSpec) -> ModelShape | None:
        """The shape of a member's model, if it was inspected together with the job's model, whose shape this is: at the
        member's micro-batch if possible, else at another one. None if it was not inspected."""
        if member.model.config is not None:
            return self if member.model == job.model else None
        known = {inspected_as(job): self, **dict(self.others)}
        alike = (shape for key, shape in known.items() if key.startswith(adapters_of(member.model)))
        return known.get(inspected_as(member)) or next(alike, None)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """In forward order."""
        return (self.embedding, *self.blocks, self.head)

    @cached_property
    def _hash(self) -> int:
        return hash((self.architecture, self.segments, self.trained_bytes))

    def __hash__(self) -> int:
        """Computed only once, because a model has up to thousands of segments and the planner uses shapes as keys."""
        return self._hash

    @property
    def num_layers(self) -> int:
        return len(self.blocks)

    @cached_property
    def widest_output_bytes(self) -> int:
        """Per token: the most that a segment hands on."""
        return max(segment.output_bytes for segment in self.segments)

    @cached_property
    def largest_segment_bytes(self) -> int:
        """Bytes of parameters in the largest segment."""
        return max(segment.parameter_bytes for segment in self.segments)

    @property
    def num_segments(self) -> int:
        return len(self.blocks) + 2

    @cached_property
    def num_parameters(self) -> int:
        """Number of parameters; tied ones count once. Exactly those of the published architectures, and their
        adapters."""
        return sum(segment.num_parameters for segment in self.segments)

    @cached_property
    def num_trained(self) -> int:
        return sum(segment.num_trained for segment in self.segments)

    @cached_property
    def num_accumulated(self) -> int:
        return sum(segment.num_accumulated for segment in self.segments)

    @cached_property
    def parameter_bytes(self) -> int:
        return sum(segment.parameter_bytes for segment in self.segments)

    @cached_property
    def num_tensors(self) -> int:
        return sum(segment.num_tensors for segment in self.segments)

    @cached_property
    def largest_parameter(self) -> int:
        return max(segment.largest_parameter for segment in self.segments)

    def saved_bytes_per_token(self) -> int:
        """Bytes that the whole model saves per token if everything is kept."""
        return sum(segment.saved_bytes_per_token for segment in self.segments)

    def table_bytes(self, sequence_length: int) -> int:
        return self.table_bytes_per_position * sequence_length

    def forward_flops_per_token(self, sequence_length: int) -> float:
        """FLOPs of the whole model's forward."""
        return sum(segment.forward_flops_per_token(sequence_length) for segment in self.segments)

    def backward_flops_per_token(self, sequence_length: int) -> float:
        """FLOPs of the whole model's backward: twice the forward if everything is trained."""
        return sum(segment.backward_flops_per_token(sequence_length) for segment in self.segments)

    def to_json(self) -> str:
        return _DOCUMENT.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The shape that `to_json` wrote. Raises pydantic.ValidationError, a ValueError, for anything else."""
        return _DOCUMENT.validate_json(text)  # type: ignore[return-value]

    def packed(self) -> str:
        """Compact text for a termination message, which holds 4096 bytes: equal segments are written once."""
        document = json.loads(self.to_json())
        unlike: list[Any] = []
        for one in (document, *(shape for _, shape in document["others"])):
            segments = [one.pop("embedding"), *one.pop("blocks"), one.pop("head")]
            one["names"] = [segment.pop("name") for segment in segments]
            unlike += [segment for index, segment in enumerate(segments) if segment not in [*unlike, *segments[:index]]]
            one["segments"] = [unlike.index(segment) for segment in segments]
        document["unlike"] = unlike
        return base64.b85encode(zlib.compress(json.dumps(document, separators=(",", ":")).encode(), 9)).decode()

    @classmethod
    def unpacked(cls, text: str) -> Self:
        """The shape that `packed` wrote. Raises ValueError for anything else; MOST_PACKED_BYTES, MOST_SEGMENTS and
        MOST_UNPACKED_BYTES limit it."""
        try:
            found = zlib.decompressobj().decompress(base64.b85decode(text.strip()), MOST_PACKED_BYTES)
            document = json.loads(found)
            unlike = document.pop("unlike")
            sizes, total = [len(json.dumps(one)) for one in unlike], 0
            for one in (document, *(shape for _, shape in document.get("others", ())[:MOST_INSPECTED])):
                kinds, names = one.pop("segments")[:MOST_SEGMENTS], one.pop("names")
                total += sum(sizes[kind] for kind in kinds)
                if total > MOST_UNPACKED_BYTES:
                    raise ValueError(f"the packed sizes of a model are more than {MOST_UNPACKED_BYTES} bytes")
                segments = [{**unlike[kind], "name": name} for kind, name in zip(kinds, names, strict=True)]
                one |= {"embedding": segments[0], "blocks": segments[1:-1], "head": segments[-1]}
            return cls.from_json(json.dumps(document))
        except (zlib.error, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            raise ValueError(f"not the packed sizes of a model: {type(error).__name__}: {error}") from error


_DOCUMENT = TypeAdapter(ModelShape)


def shape_of(spec: TrainingJobSpec, device: DeviceKind = "Cpu") -> ModelShape:
    """The shape of spec.model, from its sizes. Raises UserError for models that must be inspected to know their
    shape."""
    model = spec.model
    batch = MicroBatch(spec.training.micro_batch_size, spec.training.sequence_length)
    return model_shape(model.transformer, model.precision.compute, device, model.lora, batch)


@lru_cache(maxsize=2 * MAX_MEMBERS)
def model_shape(
    config: ModelConfig,
    compute: str,
    device: DeviceKind = "Cpu",
    lora: Lora | None = None,
    batch: MicroBatch | None = None,
) -> ModelShape:
    """The shape of `config` with parameters of type `compute` (one of DTYPE_BYTES) on a kind of device; with `lora`,
    its parameters are frozen and adapters are added. `batch` matters for t5, whose attention saves a matrix of all
    pairs of positions, and for adapters, of which copies in the compute type are saved, however many tokens there are.
    Raises UserError if `lora` names no module of the model.

    The device matters for what is saved: on a CPU a norm saves float32 copies of its input and output, and dropout a
    mask in the compute type; fused CUDA kernels save the input itself and one byte per masked value.
    """
    sizes = _Sizes(config, DTYPE_BYTES[compute], device, lora, batch or MicroBatch())
    embedding, blocks, head = _FAMILIES[config.architecture](sizes)
    if lora is not None and not any(one.num_accumulated for one in (embedding, *blocks, head)):
        modules = ", ".join(sorted({name.rpartition(".")[2] for name in sizes.modules}))
        raise UserError(
            f"spec.model.lora.targetModules = {', '.join(lora.target_modules)[:200]}: {config.architecture} has none "
            f"of these, so nothing would be trained; choose from {modules}"
        )
    tables = 2 * (config.hidden_size // config.num_heads) * sizes.b if config.architecture == "llama" else 0
    return ModelShape(
        architecture=config.architecture,
        embedding=embedding,
        blocks=blocks,
        head=head,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        compute_bytes=sizes.b,
        trained_bytes=sizes.b if lora is None else FLOAT32_BYTES,
        table_bytes_per_position=tables,
        tied=tuple((index, 0) for index, one in enumerate((*blocks, head), start=1) if one.num_aliased),
    )


@dataclass(frozen=True, slots=True)
class _Linear:
    """One matrix product, and how many of its outputs have a bias."""

    inputs: int
    outputs: int
    biases: int = 0
    rows_are_inputs: bool = False
    """Whether a row belongs to one input, as in gpt2; else it belongs to one output."""

    @property
    def shape(self) -> tuple[int, int]:
        return (self.inputs, self.outputs) if self.rows_are_inputs else (self.outputs, self.inputs)


class _Sizes:
    """Sizes of a model, by the symbols of the module's docstring."""

    def __init__(
        self, config: ModelConfig, compute_bytes: int, device: DeviceKind, lora: Lora | None, batch: MicroBatch
    ) -> None:
        self.b, self.cpu, self.lora = compute_bytes, device == "Cpu", lora
        self.modules: set[str] = set()
        """Names of the matrix products of all segments so far."""
        self.d, self.h, self.f, self.V = (
            config.hidden_size, config.num_heads, config.intermediate_size, config.vocab_size,
        )  # fmt: skip
        self.k = config.hidden_size // config.num_heads * config.num_key_value_heads
        self.num_layers, self.positions, self.batch = config.num_layers, config.max_positions, batch
        self.block_tokens = batch.size * batch.sequence_length // (2 if config.architecture == "t5" else 1)
        """Tokens of a micro-batch; 0: unknown."""
        self.tied = config.tie_word_embeddings
        self.dropout = config.dropout > 0.0

    @property
    def rebuilds(self) -> bool:
        """Whether segments can rebuild storages: so far only on CPUs, and not with adapters, because their casts are
        not counted."""
        return self.cpu and self.lora is None

    def lean(self, rebuilt: tuple[int, ...], rebuilding: int) -> dict[str, Any]:
        """Arguments of `segment` for what it can rebuild; empty without `rebuilds`."""
        return {"rebuilt_bytes": rebuilt, "rebuilding_bytes": rebuilding} if self.rebuilds else {}

    def rms_norm(self) -> tuple[int, ...]:
        """Storages of one RMS norm: its input, the root per token, (on a CPU) the normalised values, its output."""
        wide = (FLOAT32_BYTES * self.d,) * 2 if self.cpu else (self.b * self.d,)
        return (*wide, FLOAT32_BYTES, self.b * self.d)

    def layer_norm(self) -> tuple[int, ...]:
        """Storages of one layer norm, a fused kernel everywhere: input, mean, root, output."""
        statistics = self.b if self.cpu else FLOAT32_BYTES
        return (self.b * self.d, statistics, statistics, self.b * self.d)

    def attention(self) -> tuple[int, ...]:
        """q, k, v, output, log-sum-exp of the fused attention kernel."""
        q, k = self.b * self.d, self.b * self.k
        return (q, k, k, q, FLOAT32_BYTES * self.h)

    def dropouts(self, count: int = 2) -> tuple[int, ...]:
        """Storages of masks, each as wide as the residual stream."""
        return (self.d * (self.b if self.cpu else 1),) * count if self.dropout else ()

    @property
    def loss_chunk(self) -> int:
        """Bytes of a chunk's float32 logits per token of the micro-batch; 0 if the loss processes all logits at
        once."""
        rows = loss_chunk_rows(self.V)
        return ceil(FLOAT32_BYTES * self.V * rows / self.block_tokens) if rows < self.block_tokens else 0

    @property
    def norm_workspace(self) -> int:
        """Float32 temporaries around a norm, and the segment's output."""
        return (8 if self.b == 2 else 12) * self.d

    def segment(
        self,
        name: str,
        linears: Mapping[str, _Linear],
        vectors: Sequence[int],
        *,
        tables: Sequence[tuple[int, int]] = (),
        alias: tuple[int, int] = (0, 0),
        attention_width: int = 0,
        passed_bytes: tuple[int, ...] = (),
        **bytes_per_token: Any,
    ) -> Segment:
        """A segment of matrix products, vectors (norms), tables (embeddings) and a tied `alias` of another's table.

        With adapters all of these are frozen; the targeted matrix products get two float32 matrices each.
        """
        biases = [linear.biases for linear in linears.values() if linear.biases]
        shapes = [*(one.shape for one in linears.values()), *((size, 1) for size in (*biases, *vectors)), *tables]
        own, aliased = [rows * width for rows, width in shapes], alias[0] * alias[1]
        products = sum(linear.inputs * linear.outputs for linear in linears.values()) + aliased
        self.modules |= set(linears)
        adapter_shapes = self._adapters(linears)
        adapters = [rows * width for rows, width in adapter_shapes]
        is_trained = self.lora is None
        frozen = 0 if is_trained else sum(own)
        trained = [*own, aliased] if is_trained else adapters
        parameters = [ParameterShape(*shape, self.b, is_trained) for shape in shapes]
        parameters += [ParameterShape(*shape, FLOAT32_BYTES, is_trained=True) for shape in adapter_shapes]
        parameters += [ParameterShape(*alias, self.b, is_trained, is_alias=True)] if aliased else []
        saved = bytes_per_token.pop("saved_bytes")
        return Segment(
            name=name,
            num_parameters=sum(own) + sum(adapters),
            num_frozen=frozen,
            num_aliased=aliased,
            num_accumulated=sum(trained),
            parameter_bytes=self.b * sum(own) + FLOAT32_BYTES * sum(adapters),
            num_tensors=len(parameters),
            largest_parameter=max(trained, default=0),
            matrix_parameters=products + sum(adapters),
            trained_matrix_parameters=sum(adapters) if self.lora else products,
            attention_width=attention_width,
            saved_bytes=(*saved, *self._saved_by_adapters(adapters)),
            passed_bytes=passed_bytes,
            parameters=tuple(parameters),
            **bytes_per_token,
        )

    def is_adapted(self, name: str) -> bool:
        """Whether the matrix product called `name` gets an adapter."""
        targets = (self.lora.target_modules or ATTENTION_MODULES) if self.lora else ()
        return any(f".{name}".endswith(f".{target}") for target in targets)

    def adapter_inputs(self, linears: Mapping[str, _Linear], *names: str) -> tuple[int, ...]:
        """Storages saved for the adapters of products with the same input: a copy for each adapter in the compute type,
        or in float32 the input once."""
        sizes = [self.b * linears[name].inputs for name in names if self.is_adapted(name)]
        return tuple(sizes if self.b != FLOAT32_BYTES else sizes[:1])

    def _adapters(self, linears: Mapping[str, _Linear]) -> list[tuple[int, int]]:
        """(rows, values of a row) of the two matrices of each adapter."""
        if self.lora is None:
            return []
        hit = [one for name, one in linears.items() if self.is_adapted(name)]
        rank = self.lora.rank
        return [shape for one in hit for shape in ((rank, one.inputs), (one.outputs, rank))]

    def _saved_by_adapters(self, adapters: Sequence[int]) -> list[int]:
        """Storages between the two matrices of each adapter; and if the matrices are cast, their copies, per token of a
        micro-batch."""
        if self.lora is None:
            return []
        copies = adapters if self.b != FLOAT32_BYTES and self.block_tokens else ()
        between = (self.b * self.lora.rank,) * (len(adapters) // 2)
        return [*between, *(ceil(self.b * one / self.block_tokens) for one in copies)]


ATTENTION_MODULES = (
    "q_proj", "k_proj", "v_proj", "o_proj",  # llama
    "c_attn", "attn.c_proj",  # gpt2
    "query", "key", "value", "attention.output.dense",  # bert
    "q", "k", "v", "o",  # t5
)  # fmt: skip
"""Modules that get an adapter if the job names none, in models that are given by their sizes."""


def _embedding(
    s: _Sizes, tables: Sequence[tuple[int, int]], norms: Sequence[int] = (), saved: Sequence[int] = ()
) -> Segment:
    """The segment from tokens to the residual stream."""
    out = s.b * s.d
    return s.segment(
        "embedding", {}, norms, tables=tables, saved_bytes=(INDEX_BYTES, *saved), made_bytes=(out,),
        forward_workspace_bytes=0, backward_workspace_bytes=0, lean_forward_bytes=out,
    )  # fmt: skip


def _head(s: _Sizes, linears: Mapping[str, _Linear], vectors: Sequence[int], saved: Sequence[int]) -> Segment:
    """Final norm, output projection, loss. The loss processes logits in float32 chunks, up to three of which exist at
    once, and saves only the logits, which their gradient replaces. If one chunk holds all logits, it saves their
    log-probabilities in float32 instead; in addition forward holds the logits in float32, and backward the gradients of
    both."""
    own = {} if s.tied else {"lm_head": _Linear(s.d, s.V)}
    logits = loss = FLOAT32_BYTES * s.V
    forward, backward = max(loss, s.norm_workspace), max(2 * loss, 12 * s.d)
    if s.loss_chunk:  # the norm's temporaries are there before and after the logits
        logits, loss = s.b * s.V, (1 + (s.b < FLOAT32_BYTES)) * s.loss_chunk
        forward = max(loss, s.norm_workspace - logits)
        backward = max(3 * s.loss_chunk, s.b * s.d, 12 * s.d - logits)
    return s.segment(
        "head",
        {**linears, **own},
        vectors,
        alias=(s.V, s.d) if s.tied else (0, 0),
        saved_bytes=(*saved, logits, INDEX_BYTES),
        made_bytes=(),
        forward_workspace_bytes=forward,
        backward_workspace_bytes=backward,
        lean_forward_bytes=logits + loss,
    )


def _repeated(block: Segment, count: int, first: int = 0) -> tuple[Segment, ...]:
    return tuple(replace(block, name=f"block{first + index}") for index in range(count))


_Parts = tuple[Segment, tuple[Segment, ...], Segment]


def _llama(s: _Sizes) -> _Parts:
    wide = s.b * s.f  # gate, up, silu(gate) and their product each
    linears = {
        "q_proj": _Linear(s.d, s.d), "k_proj": _Linear(s.d, s.k), "v_proj": _Linear(s.d, s.k),
        "o_proj": _Linear(s.d, s.d), "gate_proj": _Linear(s.d, s.f), "up_proj": _Linear(s.d, s.f),
        "down_proj": _Linear(s.f, s.d),
    }  # fmt: skip
    if s.lora is None:
        saved = (*s.rms_norm(), *s.attention(), *s.dropouts(), *s.rms_norm(), wide, wide, wide, wide)
    else:  # as in transformers: norms are single operations; inputs of frozen matrices are not saved
        norm = (FLOAT32_BYTES * s.d, FLOAT32_BYTES)
        saved = (*norm, *s.attention(), *(s.b * s.d,) * (4 if s.b == 2 else 1), *norm, wide, wide, wide)
        saved += s.adapter_inputs(linears, "gate_proj", "up_proj") + s.adapter_inputs(linears, "down_proj")
    block = s.segment(
        "block",
        linears,
        (s.d, s.d),
        attention_width=s.d,
        saved_bytes=saved,
        made_bytes=(s.b * s.d,),
        forward_workspace_bytes=s.norm_workspace + (0 if s.lora is None else 2 * s.b * s.d),
        backward_workspace_bytes=2 * wide + (5 if s.lora else 2 if s.b == 2 else 1) * s.b * s.d,
        lean_forward_bytes=max(3 * wide, 3 * s.b * s.d) + s.norm_workspace,
        **s.lean(
            (FLOAT32_BYTES * s.d, s.b * s.d, FLOAT32_BYTES * s.d, s.b * s.d, wide, wide),
            # Norms: their normalised values once each, their outputs once for each of five products. Then silu, then
            # its product.
            (16 + 5 * (22 if s.b == 2 else 16)) * s.d + (2 + 5) * wide,
        ),
    )
    head = _head(s, {}, (s.d,), s.rms_norm() if s.lora is None else (FLOAT32_BYTES * s.d, FLOAT32_BYTES, 1))
    return _embedding(s, ((s.V, s.d),)), _repeated(block, s.num_layers), head


def _gpt2(s: _Sizes) -> _Parts:
    """Learned positions, layer norms with bias, fused qkv with bias; GELU's tanh formula, operation by operation."""
    linears = {
        "attn.c_attn": _Linear(s.d, 3 * s.d, 3 * s.d, True), "attn.c_proj": _Linear(s.d, s.d, s.d, True),
        "mlp.c_fc": _Linear(s.d, s.f, s.f, True), "mlp.c_proj": _Linear(s.f, s.d, s.d, True),
    }  # fmt: skip
    wide = s.b * s.f
    fused = (3 * s.b * s.d, s.b * s.d, FLOAT32_BYTES * s.h)
    copies = s.adapter_inputs(linears, "attn.c_proj") * (s.b != FLOAT32_BYTES)  # in addition to what attention saves
    takes_input = s.lora is None or s.is_adapted("mlp.c_proj")  # a frozen matrix has no gradient that needs it
    block = s.segment(
        "block",
        linears,
        (s.d,) * 4,
        attention_width=s.d,
        saved_bytes=(*s.layer_norm(), *fused, *copies, *s.dropouts(), *s.layer_norm(), *(wide,) * (4 + takes_input)),
        made_bytes=(s.b * s.d,),
        forward_workspace_bytes=3 * s.b * s.d,
        backward_workspace_bytes=2 * wide + 2 * s.b * s.d,
        lean_forward_bytes=4 * wide + 3 * s.b * s.d,
        # Norms, then tanh, 1 + tanh and the product, each from the input of GELU.
        **s.lean((s.b * s.d,) * 2 + (wide,) * 3, 4 * s.b * s.d + (11 + 13 + 16) * wide),
    )
    embedding = _embedding(s, ((s.V, s.d), (s.positions, s.d)))
    return embedding, _repeated(block, s.num_layers), _head(s, {}, (s.d, s.d), s.layer_norm())


def _bert(s: _Sizes) -> _Parts:
    """Bidirectional attention, norms after each sum, GELU; the head transforms, normalises and projects with a bias."""
    linears = {
        "attention.self.query": _Linear(s.d, s.d, s.d), "attention.self.key": _Linear(s.d, s.d, s.d),
        "attention.self.value": _Linear(s.d, s.d, s.d), "attention.output.dense": _Linear(s.d, s.d, s.d),
        "intermediate.dense": _Linear(s.d, s.f, s.f), "output.dense": _Linear(s.f, s.d, s.d),
    }  # fmt: skip
    wide = s.b * s.f
    products = (f"attention.self.{name}" for name in ("query", "key", "value"))
    copies = s.adapter_inputs(linears, *products)[1:]
    copies += s.adapter_inputs(linears, "attention.output.dense") * (s.b != FLOAT32_BYTES)
    block = s.segment(
        "block",
        linears,
        (s.d,) * 4,
        attention_width=2 * s.d,
        saved_bytes=(*s.attention(), *copies, *s.dropouts(), *s.layer_norm(), wide, wide, *s.layer_norm()),
        made_bytes=(s.b * s.d,),
        forward_workspace_bytes=2 * s.b * s.d,
        backward_workspace_bytes=2 * wide + 2 * s.b * s.d,
        lean_forward_bytes=2 * wide + 2 * s.b * s.d,
        **s.lean((s.b * s.d, wide), 2 * s.b * s.d + 2 * wide),  # the last norm's output is the next block's input
    )
    tables = ((s.V, s.d), (s.positions, s.d), (TOKEN_TYPES, s.d))
    indices = (2 * INDEX_BYTES, INDEX_BYTES // 2)
    embedding = _embedding(s, tables, (s.d, s.d), (*indices, *s.layer_norm()[:-1], *s.dropouts(1)))
    transform = (s.b * s.d, s.b * s.d, *s.layer_norm())  # before and after GELU
    head = _head(s, {"transform.dense": _Linear(s.d, s.d, s.d)}, (s.d, s.d, s.V), transform)
    return embedding, _repeated(block, s.num_layers), head


def _t5(s: _Sizes) -> _Parts:
    """numLayers blocks encode the first half of the window; as many decode the second half and attend to the first. So
    per token of the window every figure is half. Norms are single operations and attention is not fused: it saves a
    float32 matrix of all pairs. The encoder's last norm is part of its last block, the decoder's embedding (an alias)
    of its first, and the first block of each half has the table of relative positions."""
    attention = {name: _Linear(s.d, s.d) for name in ("q", "k", "v", "o")}
    feed_forward = {"wi": _Linear(s.d, s.f), "wo": _Linear(s.f, s.d)}
    within = {f"SelfAttention.{name}": linear for name, linear in attention.items()}
    across = {f"EncDecAttention.{name}": linear for name, linear in attention.items()}
    last, relative = s.num_layers - 1, ((RELATIVE_POSITIONS, s.h),)
    stream, float32, wide = s.b * s.d, FLOAT32_BYTES * s.d, s.b * s.f
    length = s.batch.sequence_length // 2
    pairs = FLOAT32_BYTES * s.h * length
    one_for_all = length / s.batch.size  # of what all sequences of a micro-batch share, per byte of a pair
    bias, buckets, causal = (ceil(size * one_for_all) for size in (s.b * s.h, INDEX_BYTES, 1))
    casts = (
        s.b != FLOAT32_BYTES
    )  # float32 copies of norms' inputs, queries, keys and values; else the tensors themselves

    def block(decodes: bool, is_first: bool, ends: bool) -> Segment:
        fused = decodes and not s.dropout  # attention to the other half, which has no bias
        norms, attentions = 2 + decodes, 1 + decodes
        streams, of_float32 = ((15, 6) if fused else (11, 9)) if decodes else (7, 5)
        saved = [*(stream,) * (streams if casts else streams + of_float32 - norms)]
        saved += [float32] * of_float32 * casts + [wide] + [FLOAT32_BYTES] * norms
        saved += [pairs] * (attentions - fused) + [FLOAT32_BYTES * s.h] * fused
        saved += [causal] * decodes + [buckets] * is_first + [stream, INDEX_BYTES] * (decodes and is_first)
        saved += [stream, stream if not casts else float32, stream * casts, FLOAT32_BYTES] * ends
        masks = s.dropouts(norms + (decodes and is_first) + ends)
        masks += (wide, wide, *(pairs, pairs) * attentions) * s.dropout
        width = 2 * s.d if decodes else s.d
        lean = [stream] * (2 * norms + ends) + ([pairs] * attentions + [wide]) * s.dropout
        # Of each norm its normalised values, and its output for each product that takes it; masked values.
        rebuilding = (norms + ends) * (12 if casts else 8) * s.d + (4 + decodes) * 16 * s.d
        rebuilding += 3 * (attentions * pairs + wide) * s.dropout
        return s.segment(
            "block",
            within | (across if decodes else {}) | feed_forward,
            (s.d,) * (norms + ends),
            tables=relative if is_first else (),
            alias=(s.V, s.d) if decodes and is_first else (0, 0),
            attention_width=2 * width,
            saved_bytes=(*saved, *masks),
            made_bytes=(stream, bias) if is_first and not ends else (stream,),
            passed_bytes=(stream,) * decodes + (bias,) * (not ends and not is_first),
            forward_workspace_bytes=12 * s.d + pairs,
            backward_workspace_bytes=6 * stream + pairs,
            lean_forward_bytes=(6 if casts else 8) * stream + pairs,
            **s.lean(tuple(lean), rebuilding),
        )

    encoder = [block(False, index == 0, index == last) for index in range(s.num_layers)]
    decoder = [block(True, index == 0, False) for index in range(s.num_layers)]
    names = [f"{half}{index}" for half in ("encoder", "decoder") for index in range(s.num_layers)]
    blocks = tuple(replace(_halved(one), name=name) for name, one in zip(names, (*encoder, *decoder), strict=True))
    norm = (stream, stream, stream, float32 * casts, FLOAT32_BYTES)
    masks = tuple(
        size // 2 for size in s.dropouts(1)
    )  # for the encoded half; the mask of the other half is in the first block that decodes
    embedding = replace(_embedding(s, ((s.V, s.d),), (), masks), made_bytes=(stream // 2,))
    return embedding, blocks, _halved(_head(s, {}, (s.d,), (*norm, *s.dropouts(1))))


def _halved(segment: Segment) -> Segment:
    """`segment` with half of its figures per token, because it works on half of the tokens; those of its parameters
    stay."""
    return replace(
        segment,
        matrix_parameters=segment.matrix_parameters // 2,
        trained_matrix_parameters=segment.trained_matrix_parameters // 2,
        attention_width=segment.attention_width // 4,  # half of the tokens, each with half as many pairs
        saved_bytes=tuple(-(-size // 2) for size in segment.saved_bytes if size),
        made_bytes=tuple(size // 2 for size in segment.made_bytes),
        passed_bytes=tuple(size // 2 for size in segment.passed_bytes),
        forward_workspace_bytes=segment.forward_workspace_bytes // 2,
        backward_workspace_bytes=segment.backward_workspace_bytes // 2,
        lean_forward_bytes=segment.lean_forward_bytes // 2,
        rebuilt_bytes=tuple(size // 2 for size in segment.rebuilt_bytes),
        rebuilding_bytes=-(-segment.rebuilding_bytes // 2),
    )


_FAMILIES: dict[str, Callable[[_Sizes], _Parts]] = {"llama": _llama, "gpt2": _gpt2, "bert": _bert, "t5": _t5}
