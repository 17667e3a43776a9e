"""The plain reference transformer: llama-style, eager torch, no technique.

Shapes: B = micro-batch, T = sequence length, D = hidden size, H = heads, K = key/value heads, E = D / H,
V = vocabulary. Parameters have the shapes and counts of Hugging Face's `LlamaForCausalLM`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .chain import Chain
from .loss import token_loss


@dataclass(frozen=True, slots=True)
class TransformerConfig:
    hidden_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool = False
    dropout: float = 0.0
    """Probability, on the outputs of attention and feed-forward."""
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    initializer_range: float = 0.02
    """Standard deviation of the normal initialisation of every matrix."""


class Linear(nn.Module):
    """Like nn.Linear without bias, but unfilled: `initial_values` has every value."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Embedding(nn.Module):
    """Like nn.Embedding, but unfilled."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return F.embedding(tokens_BT, self.weight)


class RMSNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.rms_norm(x_BTD, (x_BTD.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        head_size = config.hidden_size // config.num_heads
        self.num_heads, self.num_key_value_heads = config.num_heads, config.num_key_value_heads
        self.q_proj = Linear(config.hidden_size, config.num_heads * head_size)
        self.k_proj = Linear(config.hidden_size, config.num_key_value_heads * head_size)
        self.v_proj = Linear(config.hidden_size, config.num_key_value_heads * head_size)
        self.o_proj = Linear(config.num_heads * head_size, config.hidden_size)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        B, T, _ = x_BTD.shape
        q_BHTE = self.q_proj(x_BTD).view(B, T, self.num_heads, -1).transpose(1, 2)
        k_BKTE = self.k_proj(x_BTD).view(B, T, self.num_key_value_heads, -1).transpose(1, 2)
        v_BKTE = self.v_proj(x_BTD).view(B, T, self.num_key_value_heads, -1).transpose(1, 2)
        y_BHTE = F.scaled_dot_product_attention(
            rotate(q_BHTE, cos_TE, sin_TE),
            rotate(k_BKTE, cos_TE, sin_TE),
            v_BKTE,
            is_causal=True,
            enable_gqa=self.num_heads != self.num_key_value_heads,
        )
        return self.o_proj(y_BHTE.transpose(1, 2).reshape(B, T, -1))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = FeedForward(config)
        self.dropout = config.dropout

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x_BTD), cos_TE, sin_TE)
        x_BTD = x_BTD + F.dropout(attended, self.dropout, self.training)
        return x_BTD + F.dropout(self.mlp(self.post_attention_layernorm(x_BTD)), self.dropout, self.training)


class Head(nn.Module):
    """Final norm, output projection and loss: the logits exist only inside this segment."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)

    def forward(self, x_BTD: Tensor, labels_BT: Tensor, num_tokens: int) -> Tensor:
        return token_loss(self.lm_head(self.norm(x_BTD)), labels_BT, num_tokens)


class Transformer(Chain):
    """tokens -> embedding -> blocks -> head -> loss."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.initializer_range = config.initializer_range
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.head = Head(config)
        self._rope: dict[tuple[int, torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def description(self) -> dict[str, Any]:
        return asdict(self.config)

    @property
    def segments(self) -> list[tuple[str, nn.Module]]:
        """Embedding, block0 ... , head."""
        blocks = [(f"block{index}", block) for index, block in enumerate(self.layers)]
        return [("embedding", self.embed_tokens), *blocks, ("head", self.head)]

    @property
    def tied(self) -> dict[str, str]:
        return {"head.lm_head.weight": "embed_tokens.weight"} if self.config.tie_word_embeddings else {}

    def arguments(self, segment: str, tokens_BT: Tensor, labels_BT: Tensor, num_tokens: int) -> tuple[object, ...]:
        """Blocks get the rotary tables; the head gets the labels and the number that the loss is divided by."""
        if segment == "embedding":
            return ()
        return (labels_BT, num_tokens) if segment == "head" else self._rope_tables(tokens_BT.shape[1], tokens_BT.device)

    def _rope_tables(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        dtype = self.embed_tokens.weight.dtype
        if (length, dtype, device) not in self._rope:
            head_size = self.config.hidden_size // self.config.num_heads
            exponents = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
            angles = torch.outer(torch.arange(length, dtype=torch.float64), self.config.rope_theta**-exponents)
            angles_TE = torch.cat((angles, angles), dim=-1)
            cos_TE, sin_TE = angles_TE.cos().to(dtype), angles_TE.sin().to(dtype)
            self._rope[length, dtype, device] = cos_TE.to(device), sin_TE.to(device)
        return self._rope[length, dtype, device]


def rotate(x_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Rotary position embedding in the half-split layout of Hugging Face's llama."""
    first, second = x_BHTE.chunk(2, dim=-1)
    return x_BHTE * cos_TE + torch.cat((-second, first), dim=-1) * sin_TE
