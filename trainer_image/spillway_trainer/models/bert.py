"""bert of `transformers`: an encoder that predicts masked tokens.

Shapes: B = micro-batch, T = sequence length, D = hidden size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.masking_utils import create_bidirectional_mask

from ..corpus.objective import TrainingObjective
from .chain import token_loss
from .huggingface import HuggingFaceChain, numbered


class Layer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_BTD: Tensor, mask: Tensor | None) -> Tensor:
        return self.layer(x_BTD, mask)  # type: ignore[no-any-return]


class MaskedHead(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, x_BTD: Tensor, labels_BT: Tensor, num_tokens: int) -> Tensor:
        return token_loss(self.head(x_BTD).float(), labels_BT, num_tokens)


class Bert(HuggingFaceChain):
    objective = TrainingObjective.MASKED

    def make_segments(self) -> list[tuple[str, nn.Module]]:
        encoder = self.model.bert
        blocks = numbered("block", [Layer(layer) for layer in encoder.encoder.layer])
        return [("embedding", encoder.embeddings), *blocks, ("head", MaskedHead(self.model.cls))]

    def arguments(self, segment: str, tokens_BT: Tensor, labels_BT: Tensor, num_tokens: int) -> tuple[object, ...]:
        if segment == "embedding":
            return ()
        return (labels_BT, num_tokens) if segment == "head" else self.tables(tokens_BT)

    def make_tables(self, tokens_BT: Tensor) -> tuple[Any, ...]:
        hidden = self.like_hidden(tokens_BT)
        return (create_bidirectional_mask(config=self.config, inputs_embeds=hidden, attention_mask=None),)


def drop_second_bias(model: Any) -> None:
    """The head's bias has two names and is used by one of them: only that one stays a parameter."""
    model.cls.predictions.register_parameter("bias", None)
