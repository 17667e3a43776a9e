"""Small models that save tensors for backward in all ways that are known to have broken offloading libraries.

Each is a chain of named segments like the trainer's own models: `segments`, `tied`, and
forward(tokens_BT, labels_BT, num_tokens) -> loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spillway_trainer.models.transformer import Transformer, TransformerConfig

HIDDEN, HEADS, VOCABULARY, NUM_BLOCKS = 16, 2, 61, 2


def transformer(*, dropout: float = 0.0, tied: bool = False, dtype: torch.dtype = torch.float32) -> nn.Module:
    config = TransformerConfig(HIDDEN, NUM_BLOCKS, HEADS, 1, 24, VOCABULARY, tied, dropout)
    model = Transformer(config).to(dtype)
    with torch.no_grad():
        for name, value in model.initial_values(seed=11):
            model.get_parameter(name).copy_(value * 10)  # far from linear, so that a wrong bit changes results
    model.tie()
    return model


class Chain(nn.Module):
    """A chain embedding -> blocks -> head with the given blocks."""

    tied: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, make_block: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(make_block() for _ in range(NUM_BLOCKS))
        self.head = LinearHead()

    @property
    def segments(self) -> list[tuple[str, nn.Module]]:
        blocks = [(f"block{index}", block) for index, block in enumerate(self.blocks)]
        return [("embedding", self.embedding), *blocks, ("head", self.head)]

    def forward(self, tokens_BT: Tensor, labels_BT: Tensor, num_tokens: int) -> Tensor:
        x_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(x_BTD, labels_BT, num_tokens)


class LinearHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, x_BTD: Tensor, labels_BT: Tensor, num_tokens: int) -> Tensor:
        logits = self.output(F.layer_norm(x_BTD, (HIDDEN,)))
        return F.cross_entropy(logits.flatten(0, 1), labels_BT.flatten(), reduction="sum") / num_tokens


class FeedForward(nn.Module):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(HIDDEN, 24), nn.Linear(24, HIDDEN), dropout

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + F.dropout(self.down(F.gelu(self.up(x_BTD))), self.dropout)


class Checkpointed(nn.Module):
    """Uses torch's own checkpointing inside a segment, which saves its input and recomputes by itself."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.outer, self.use_reentrant = FeedForward(), FeedForward(), use_reentrant

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.outer(checkpoint(self.inner, x_BTD, use_reentrant=self.use_reentrant))


class SplitQkv(nn.Module):
    """Attention over chunks of one projection: many views of one saved storage, at different offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv, self.output = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, _ = x_BTD.shape
        q, k, v = (part.view(B, T, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm(x_BTD)).chunk(3, dim=-1))
        scores = (q * 0.5) @ k.transpose(-1, -2)
        y = torch.softmax(scores, dim=-1) @ v
        return x_BTD + self.output(y.transpose(1, 2).reshape(B, T, -1))


class Transposed(nn.Module):
    """x @ W.t() with transposed, non-contiguous activations on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN) * 0.3)
        self.mix = nn.Parameter(torch.randn(8, 8) * 0.3)

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BDT = (x_BTD @ self.weight.t()).transpose(1, 2)
        mixed_BDT = torch.tanh(y_BDT) @ self.mix.t()
        return x_BTD + (mixed_BDT * y_BDT).transpose(1, 2)


class StrideZero(nn.Module):
    """Saves expanded tensors, whose storage is smaller than their shape suggests."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(HIDDEN))
        self.gate = nn.Linear(HIDDEN, 1)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate_BTD = torch.sigmoid(self.gate(x_BTD)).expand_as(x_BTD)
        mean_BTD = x_BTD.mean(dim=1, keepdim=True).expand_as(x_BTD)
        return x_BTD + gate_BTD * torch.sin(mean_BTD * self.scale.expand_as(x_BTD)) * mean_BTD


PARITY_MODELS: dict[str, Callable[[], nn.Module]] = {
    "transformer": transformer,
    "dropout": lambda: transformer(dropout=0.1),
    "tied": lambda: transformer(tied=True),
    "tied_dropout": lambda: transformer(tied=True, dropout=0.1),
    "bfloat16": lambda: transformer(dropout=0.1, dtype=torch.bfloat16),
    "checkpointed": lambda: Chain(lambda: Checkpointed(use_reentrant=False)),
    "checkpointed_reentrant": lambda: Chain(lambda: Checkpointed(use_reentrant=True)),
    "split_qkv": lambda: Chain(SplitQkv),
    "transposed": lambda: Chain(Transposed),
    "stride_zero": lambda: Chain(StrideZero),
}
