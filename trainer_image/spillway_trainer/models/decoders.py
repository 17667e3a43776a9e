"""Decoder-only families of `transformers`: gpt2, and the llama-like ones (llama, mistral, qwen2, qwen3).

Shapes: B = micro-batch, T = sequence length, D = hidden size, E = size of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from .chain import token_loss
from .huggingface import HuggingFaceChain, numbered


class TokenEmbedding(nn.Module):
    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.embedding(tokens_BT)  # type: ignore[no-any-return]


class DecoderHead(nn.Module):
    """Final norm, output projection and loss: the logits live and die inside one segment."""

    def __init__(self, norm: nn.Module, projection: nn.Module) -> None:
        super().__init__()
        self.norm, self.projection = norm, projection

    def forward(self, x_BTD: Tensor, labels_BT: Tensor, num_tokens: int) -> Tensor:
        return token_loss(self.projection(self.norm(x_BTD)).float(), labels_BT, num_tokens)


class LlamaLayer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self, x_BTD: Tensor, mask: Tensor | None, positions: Tensor, cos_BTE: Tensor, sin_BTE: Tensor
    ) -> Tensor:
        return self.layer(  # type: ignore[no-any-return]
            x_BTD, attention_mask=mask, position_ids=positions, position_embeddings=(cos_BTE, sin_BTE), use_cache=False
        )


class LlamaLike(HuggingFaceChain):
    """Rotary positions; one causal mask for all layers, or one per kind of layer (sliding windows)."""

    def make_segments(self) -> list[tuple[str, nn.Module]]:
        decoder = self.model.model
        blocks = numbered("block", [LlamaLayer(layer) for layer in decoder.layers])
        head = DecoderHead(decoder.norm, self.model.lm_head)
        return [("embedding", TokenEmbedding(decoder.embed_tokens)), *blocks, ("head", head)]

    def arguments(self, segment: str, tokens_BT: Tensor, labels_BT: Tensor, num_tokens: int) -> tuple[object, ...]:
        if segment == "embedding":
            return ()
        if segment == "head":
            return labels_BT, num_tokens
        masks, positions, cos_BTE, sin_BTE = self.tables(tokens_BT)
        return masks[self._kind_of(int(segment.removeprefix("block")))], positions, cos_BTE, sin_BTE

    def make_tables(self, tokens_BT: Tensor) -> tuple[Any, ...]:
        hidden, positions = self.like_hidden(tokens_BT), positions_of(tokens_BT)
        functions = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
        kinds = {self._kind_of(index) for index in range(self.config.num_hidden_layers)}
        masks = {kind: causal_mask(self.config, hidden, positions, functions[kind]) for kind in kinds}
        return masks, positions, *self.model.model.rotary_emb(hidden, position_ids=positions)

    def _kind_of(self, index: int) -> str:
        if kinds := getattr(self.config, "layer_types", None):
            return str(kinds[index])
        return "sliding_attention" if getattr(self.config, "sliding_window", None) else "full_attention"


class Gpt2Embedding(nn.Module):
    def __init__(self, tokens: nn.Module, positions: nn.Module, dropout: nn.Module) -> None:
        super().__init__()
        self.tokens, self.positions, self.dropout = tokens, positions, dropout

    def forward(self, tokens_BT: Tensor, positions: Tensor) -> Tensor:
        return self.dropout(self.tokens(tokens_BT) + self.positions(positions))  # type: ignore[no-any-return]


class Gpt2Layer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_BTD: Tensor, mask: Tensor | None, positions: Tensor) -> Tensor:
        return self.layer(x_BTD, None, mask, use_cache=False, position_ids=positions)  # type: ignore[no-any-return]


class Gpt2(HuggingFaceChain):
    """Learned positions, layer norms, one causal mask."""

    def make_segments(self) -> list[tuple[str, nn.Module]]:
        decoder = self.model.transformer
        blocks = numbered("block", [Gpt2Layer(layer) for layer in decoder.h])
        embedding = Gpt2Embedding(decoder.wte, decoder.wpe, decoder.drop)
        return [("embedding", embedding), *blocks, ("head", DecoderHead(decoder.ln_f, self.model.lm_head))]

    def arguments(self, segment: str, tokens_BT: Tensor, labels_BT: Tensor, num_tokens: int) -> tuple[object, ...]:
        if segment == "head":
            return labels_BT, num_tokens
        mask, positions = self.tables(tokens_BT)
        return (positions,) if segment == "embedding" else (mask, positions)

    def make_tables(self, tokens_BT: Tensor) -> tuple[Any, ...]:
        positions = positions_of(tokens_BT)
        return causal_mask(self.config, self.like_hidden(tokens_BT), positions), positions

    def deviation(self, name: str) -> float:
        """Projections onto the residual stream start smaller, by the number of them (Radford et al. 2019)."""
        deviation = super().deviation(name)
        return deviation / math.sqrt(2 * self.config.n_layer) if name.endswith("c_proj.weight") else deviation


def positions_of(tokens_BT: Tensor) -> Tensor:
    """0 .. T-1, as (1, T)."""
    return torch.arange(tokens_BT.shape[1], device=tokens_BT.device).unsqueeze(0)


def causal_mask(
    config: PreTrainedConfig, hidden: Tensor, positions: Tensor | None, make: Callable[..., Any] = create_causal_mask
) -> Tensor | None:
    """The mask of whole windows, nothing cached; None where the attention needs none written out."""
    mask: Tensor | None = make(
        config=config, inputs_embeds=hidden, attention_mask=None, past_key_values=None, position_ids=positions
    )
    return mask
