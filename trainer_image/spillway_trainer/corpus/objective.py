"""The training objective: which tokens of a window the model sees, and which it predicts. Torch-free."""

from __future__ import annotations

from enum import StrEnum

IGNORED_LABEL = -100
"""Label of a position that does not count in the loss, as in torch's cross entropy."""


class TrainingObjective(StrEnum):
    CAUSAL = "Causal"
    """Each token from those before it."""
    MASKED = "Masked"
    """Hidden tokens from all others (Devlin et al. 2019)."""
    PREFIX = "Prefix"
    """The second part of the window, each token from the whole first part and those before it (Raffel et al. 2020)."""


def prefix_length(sequence_length: int) -> int:
    """Tokens of a window that the encoder of an encoder-decoder model reads; the rest is decoded."""
    return sequence_length // 2
