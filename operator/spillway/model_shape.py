"""ModelShape: what a model costs before it exists: parameters, bytes saved for backward, FLOPs, by segment.

Symbols: d = hidden size, k = key and value width (d * key/value heads / heads), h = heads, f = intermediate size,
V = vocabulary, b = bytes of the compute type. All figures are per token; multiply by micro-batch x sequence length.
tests/parity/test_model_shape.py holds them against what autograd really saves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spillway.api import ModelConfig

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
FLOAT32_BYTES = 4
INDEX_BYTES = 8
"""tokens and labels are int64"""

MAX_TENSORS_OF_A_BLOCK = 12
"""gpt2: six weights, six biases; llama: nine weights"""

Device = Literal["Cpu", "Cuda"]


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive layers that move together; the shapes of one of them."""

    name: str
    num_parameters: int
    largest_parameter: int
    """values in the largest parameter: bounds the transient gradient"""
    matrix_parameters: int
    """parameters in matrix products: 2 FLOPs per token each in forward"""
    saved_bytes: tuple[int, ...]
    """per token, one entry per storage that autograd saves for backward (weights excluded, views counted once)"""
    output_bytes: int
    """per token: the residual stream that the next segment gets"""
    forward_workspace_bytes: int
    """per token: temporaries of forward that are alive beside the saved storages"""
    backward_workspace_bytes: int
    """per token: temporaries of backward that are alive beside the saved storages"""
    lean_forward_bytes: int
    """per token: everything alive at once in a forward that saves nothing (a block to be recomputed)"""

    @property
    def saved_bytes_per_token(self) -> int:
        return sum(self.saved_bytes)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer: embedding, `num_layers` equal blocks, head."""

    architecture: Literal["llama", "gpt2"]
    embedding: Segment
    block: Segment
    head: Segment
    num_layers: int
    hidden_size: int
    vocab_size: int
    tied_parameters: int
    """parameters of aliases: no memory of their own, but an accumulator of their own"""
    compute_bytes: int
    """b"""
    head_size: int

    @property
    def num_parameters(self) -> int:
        """Trained parameters, tied ones counted once: exactly those of the published architectures."""
        segments = self.embedding.num_parameters + self.num_layers * self.block.num_parameters
        return segments + self.head.num_parameters - self.tied_parameters

    @property
    def num_segments(self) -> int:
        return self.num_layers + 2

    @property
    def num_tensors(self) -> int:
        """Parameters as tensors: at most, for both families."""
        return MAX_TENSORS_OF_A_BLOCK * self.num_layers + 4

    @property
    def largest_parameter(self) -> int:
        return max(segment.largest_parameter for segment in (self.embedding, self.block, self.head))

    def saved_bytes_per_token(self) -> int:
        """Of the whole model when everything is kept."""
        blocks = self.num_layers * self.block.saved_bytes_per_token
        return self.embedding.saved_bytes_per_token + blocks + self.head.saved_bytes_per_token

    def rope_bytes(self, sequence_length: int) -> int:
        """cos and sin tables, shared by all blocks and kept for the whole run; gpt2 has none."""
        return 2 * sequence_length * self.head_size * self.compute_bytes if self.architecture == "llama" else 0

    def attention_flops_per_token(self, sequence_length: int) -> float:
        """Forward, one block: scores and their product with values, causal, so half of the positions on average."""
        return 2.0 * sequence_length * self.hidden_size

    def block_flops_per_token(self, sequence_length: int) -> float:
        """Forward, one block."""
        return 2.0 * self.block.matrix_parameters + self.attention_flops_per_token(sequence_length)

    def forward_flops_per_token(self, sequence_length: int) -> float:
        """Forward, whole model. Backward costs twice as much."""
        return self.num_layers * self.block_flops_per_token(sequence_length) + 2.0 * self.head.matrix_parameters


def model_shape(config: ModelConfig, compute: str, device: Device = "Cpu") -> ModelShape:
    """The shape of `config` with parameters of type `compute` ("bfloat16", "float32") on a kind of device.

    The device matters for what is saved: on a CPU a norm saves float32 copies of its input and output, and dropout a
    mask in the compute type; fused CUDA kernels save the input itself and one byte per masked value.
    """
    sizes = _Sizes(config, DTYPE_BYTES[compute], device)
    build = _llama if config.architecture == "llama" else _gpt2
    embedding, block, head = build(sizes)
    tied = config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0
    return ModelShape(
        architecture=config.architecture,
        embedding=embedding,
        block=block,
        head=head,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        tied_parameters=tied,
        compute_bytes=sizes.b,
        head_size=config.hidden_size // config.num_heads,
    )


class _Sizes:
    """The symbols of the module's docstring."""

    def __init__(self, config: ModelConfig, compute_bytes: int, device: Device) -> None:
        self.b, self.cpu = compute_bytes, device == "Cpu"
        self.d, self.h, self.f, self.V = (
            config.hidden_size, config.num_heads, config.intermediate_size, config.vocab_size,
        )  # fmt: skip
        self.k = config.hidden_size // config.num_heads * config.num_key_value_heads
        self.positions = config.max_positions
        self.dropout = config.dropout > 0.0

    def norm(self) -> tuple[int, ...]:
        """Storages of one norm: its input, the root per token, (on a CPU) the normalised values, its output."""
        wide = (FLOAT32_BYTES * self.d,) * 2 if self.cpu else (self.b * self.d,)
        return (*wide, FLOAT32_BYTES, self.b * self.d)

    def attention(self) -> tuple[int, ...]:
        """q, k, v, output, log-sum-exp of the fused attention kernel."""
        q, k = self.b * self.d, self.b * self.k
        return (q, k, k, q, FLOAT32_BYTES * self.h)

    def dropouts(self) -> tuple[int, ...]:
        mask = self.d * (self.b if self.cpu else 1)
        return (mask, mask) if self.dropout else ()

    def cross_entropy(self) -> tuple[int, ...]:
        """Log-probabilities in float32, and the labels."""
        return (FLOAT32_BYTES * self.V, INDEX_BYTES)

    @property
    def norm_workspace(self) -> int:
        """Float32 temporaries around a norm, and the segment's output."""
        return (8 if self.b == 2 else 12) * self.d


def _embedding(s: _Sizes, num_parameters: int) -> Segment:
    return Segment("embedding", num_parameters, s.V * s.d, 0, (INDEX_BYTES,), s.b * s.d, 0, 0, s.b * s.d)


def _head(s: _Sizes, num_norm_parameters: int) -> Segment:
    """Final norm, output projection, loss. Forward holds the logits in float32 beside the saved log-probabilities,
    backward the gradients of both: 8 V bytes a token, the largest temporaries of most models."""
    return Segment(
        name="head",
        num_parameters=num_norm_parameters + s.V * s.d,
        largest_parameter=s.V * s.d,
        matrix_parameters=s.V * s.d,
        saved_bytes=(*s.norm(), *s.cross_entropy()),
        output_bytes=0,
        forward_workspace_bytes=max(FLOAT32_BYTES * s.V, s.norm_workspace),
        backward_workspace_bytes=max(2 * FLOAT32_BYTES * s.V, 12 * s.d),
        lean_forward_bytes=2 * FLOAT32_BYTES * s.V,
    )


def _llama(s: _Sizes) -> tuple[Segment, Segment, Segment]:
    matrices = 2 * s.d * s.d + 2 * s.d * s.k + 3 * s.d * s.f
    wide = s.b * s.f  # gate, up, silu(gate) and their product each
    block = Segment(
        name="block",
        num_parameters=matrices + 2 * s.d,
        largest_parameter=max(s.d * s.f, s.d * s.d),
        matrix_parameters=matrices,
        saved_bytes=(*s.norm(), *s.attention(), *s.dropouts(), *s.norm(), wide, wide, wide, wide),
        output_bytes=s.b * s.d,
        forward_workspace_bytes=s.norm_workspace,
        backward_workspace_bytes=2 * wide + s.b * s.d,
        lean_forward_bytes=max(3 * wide, 3 * s.b * s.d) + s.norm_workspace,
    )
    return _embedding(s, s.V * s.d), block, _head(s, s.d)


def _gpt2(s: _Sizes) -> tuple[Segment, Segment, Segment]:
    """Learned positions, layer norms with bias (one fused kernel everywhere), fused qkv with bias, GELU. Planned only:
    with f = 4 d a block saves 16 b d and a little, which is what autograd was measured to save for it on a CPU."""
    matrices = 4 * s.d * s.d + 2 * s.d * s.f
    biases = 4 * s.d + s.f + s.d
    norms = 4 * s.d
    wide = s.b * s.f  # before and after GELU
    norm = (s.b * s.d, FLOAT32_BYTES, FLOAT32_BYTES, s.b * s.d)  # input, mean, root, output
    block = Segment(
        name="block",
        num_parameters=matrices + biases + norms,
        largest_parameter=max(s.d * s.f, 3 * s.d * s.d),
        matrix_parameters=matrices,
        saved_bytes=(*norm, 3 * s.b * s.d, s.b * s.d, FLOAT32_BYTES * s.h, *s.dropouts(), *norm, wide, wide),
        output_bytes=s.b * s.d,
        forward_workspace_bytes=s.norm_workspace,
        backward_workspace_bytes=2 * wide + s.b * s.d,
        lean_forward_bytes=max(2 * wide, 3 * s.b * s.d) + s.norm_workspace,
    )
    return _embedding(s, (s.V + s.positions) * s.d), block, _head(s, 2 * s.d)
