"""The training objective: which tokens of a window the model sees, and which it predicts. Torch-free."""

from __future__ import annotations

from enum import StrEnum

IGNORED_LABEL = -100
"""Label of a position that does not count in the loss, as in torch's cross entropy."""


class TrainingObjective(StrEnum):
    CAUSAL = "Causal"
    """Predicts each token from the tokens before it."""
    MASKED = "Masked"
    """Predicts hidden tokens from all others (Devlin et al. 2019)."""
    PREFIX = "Prefix"
    """Predicts each token of the window's second part from the first part and the tokens before it (Raffel et al.
    2020)."""


def prefix_length(sequence_length: int) -> int:
    """Returns how many tokens of a window the encoder of an encoder-decoder model reads; the rest is decoded."""
    return sequence_length // 2
