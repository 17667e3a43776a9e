"""t5 of `transformers`: encoder and decoder in one chain.

    embedding -> encoder0 .. -> decoder0 .. -> head

The encoder's final norm is part of its last layer, and the decoder's embedding is part of its first layer.

Shapes: B = micro-batch, P = tokens that the encoder reads, S = T - P = tokens that are decoded, D = hidden size, H =
heads. The first layer of a stack computes the position bias. The bias depends on a parameter, so it is carried beside
the hidden states. The encoder's output is carried through the decoder, because every layer attends to it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

from spillway.errors import UserError

from ..corpus.objective import TrainingObjective, prefix_length
from .huggingface import HuggingFaceChain, numbered
from .loss import token_loss


class EncoderEmbedding(nn.Module):
    def __init__(self, embedding: nn.Module, dropout: nn.Module) -> None:
        super().__init__()
        self.embedding, self.dropout = embedding, dropout

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """(B, P, D)"""
        prefix_BP = tokens_BT[:, : prefix_length(tokens_BT.shape[1])]
        return self.dropout(self.embedding(prefix_BP))  # type: ignore[no-any-return]


class EncoderLayer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_BPD: Tensor, *carried: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
        """`carried`: the position bias (1, H, P, P), except for the first layer; then the mask."""
        *bias, mask = carried
        x_BPD, bias_HPP, _ = self.layer(x_BPD, mask, *bias)
        return x_BPD, bias_HPP


class LastEncoderLayer(EncoderLayer):
    def __init__(self, layer: nn.Module, norm: nn.Module, dropout: nn.Module) -> None:
        super().__init__(layer)
        self.norm, self.dropout = norm, dropout

    def forward(self, x_BPD: Tensor, *carried: Tensor | None) -> Tensor:
        """The encoder's output (B, P, D)."""
        x_BPD, _ = super().forward(x_BPD, *carried)
        return self.dropout(self.norm(x_BPD))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self,
        encoded_BPD: Tensor,
        y_BSD: Tensor,
        bias_HSS: Tensor | None,
        mask: Tensor | None,
        encoder_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The position bias between decoder and encoder is zero; each layer makes its own."""
        y_BSD, bias_HSS, _ = self.layer(y_BSD, mask, bias_HSS, encoded_BPD, encoder_mask)
        return encoded_BPD, y_BSD, bias_HSS


class FirstDecoderLayer(DecoderLayer):
    def __init__(self, embedding: nn.Module, dropout: nn.Module, layer: nn.Module) -> None:
        super().__init__(layer)
        self.embedding, self.dropout = embedding, dropout

    def forward(  # type: ignore[override]
        self, encoded_BPD: Tensor, read_BS: Tensor, mask: Tensor | None, encoder_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`read_BS`: the tokens that the decoder reads, one position behind those that it has to predict."""
        y_BSD = self.dropout(self.embedding(read_BS))
        return super().forward(encoded_BPD, y_BSD, None, mask, encoder_mask)


class T5Head(nn.Module):
    def __init__(self, norm: nn.Module, dropout: nn.Module, projection: nn.Module, scale: float | None) -> None:
        super().__init__()
        self.norm, self.dropout, self.projection, self.scale = norm, dropout, projection, scale

    def forward(
        self, encoded_BPD: Tensor, y_BSD: Tensor, bias_HSS: Tensor, labels_BS: Tensor, num_tokens: int
    ) -> Tensor:
        y_BSD = self.dropout(self.norm(y_BSD))
        if self.scale is not None:
            y_BSD = y_BSD * self.scale
        return token_loss(self.projection(y_BSD), labels_BS, num_tokens)


class T5(HuggingFaceChain):
    """The first prefix_length(T) tokens of a window are encoded, the others decoded."""

    objective = TrainingObjective.PREFIX

    def make_segments(self) -> list[tuple[str, nn.Module]]:
        encoder, decoder, config = self.model.encoder, self.model.decoder, self.config
        scale = config.d_model**-0.5 if config.scale_decoder_outputs else None
        *encoders, last = encoder.block
        first, *decoders = decoder.block
        encoders = [EncoderLayer(layer) for layer in encoders]
        encoders.append(LastEncoderLayer(last, encoder.final_layer_norm, encoder.dropout))
        decoders = [DecoderLayer(layer) for layer in decoders]
        decoders.insert(0, FirstDecoderLayer(decoder.embed_tokens, decoder.dropout, first))
        return [
            ("embedding", EncoderEmbedding(encoder.embed_tokens, encoder.dropout)),
            *numbered("encoder", encoders),
            *numbered("decoder", decoders),
            ("head", T5Head(decoder.final_layer_norm, decoder.dropout, self.model.lm_head, scale)),
        ]

    def arguments(self, segment: str, tokens_BT: Tensor, labels_BT: Tensor, num_tokens: int) -> tuple[object, ...]:
        if segment == "embedding":
            return ()
        decoded_BS = labels_BT[:, prefix_length(tokens_BT.shape[1]) :]
        if segment == "head":
            return decoded_BS, num_tokens
        encoder_mask, decoder_mask, cross_mask = self.tables(tokens_BT)
        if segment.startswith("encoder"):
            return (encoder_mask,)
        read_BS = (self.model._shift_right(decoded_BS),) if segment == "decoder0" else ()
        return (*read_BS, decoder_mask, cross_mask)

    def make_tables(self, tokens_BT: Tensor) -> tuple[Any, ...]:
        P = prefix_length(tokens_BT.shape[1])
        prefix, rest = self.like_hidden(tokens_BT[:, :P]), self.like_hidden(tokens_BT[:, P:])
        encoder, decoder = self.model.encoder.config, self.model.decoder.config
        return (
            create_bidirectional_mask(config=encoder, inputs_embeds=prefix, attention_mask=None),
            create_causal_mask(config=decoder, inputs_embeds=rest, attention_mask=None, past_key_values=None),
            create_bidirectional_mask(
                config=decoder, inputs_embeds=rest, attention_mask=None, encoder_hidden_states=prefix
            ),
        )

    def deviation(self, name: str) -> float:
        """A matrix's deviation follows from its number of inputs; that of the query matrix also from the size of a
        head, by which t5 does not scale queries."""
        config = self.config
        widths = {
            "q": config.d_model * config.d_kv,
            "o": config.num_heads * config.d_kv,
            "wo": config.d_ff,
            "shared": 1,
            "embed_tokens": 1,
            "lm_head": 1,
        }
        return float(config.initializer_factor * widths.get(name.split(".")[-2], config.d_model) ** -0.5)


def share_embedding(model: PreTrainedModel) -> None:
    """Makes `shared` a second name of the encoder's embedding: one module, which counts as used by the encoder.

    Raises UserError if what the decoder reads first, or in place of a masked label, is no token of the model.
    """
    config: Any = model.config
    for name in ("decoder_start_token_id", "pad_token_id"):
        token = getattr(config, name, None)
        if not (isinstance(token, int) and 0 <= token < config.vocab_size):
            raise UserError(
                f"t5: {name} is {token}, which is not a token of the model (0 to {config.vocab_size - 1}); correct "
                f"{name} in the model's configuration (config.json)"
            )
    model.shared = model.get_encoder().embed_tokens
