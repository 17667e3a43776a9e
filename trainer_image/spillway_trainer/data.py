"""What the step loop reads: sequence i of a run, in an order that one integer positions.

Shapes: B = sequences asked for, T = sequence length. Everything is a function of (corpus, sequence length, evaluation
fraction, seed, sample index), so resuming is O(1) and no state but the number of samples consumed is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from spillway.errors import UserError

from .models.transformer import IGNORED_LABEL
from .seeds import splitmix64
from .tokens import Corpus

_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Batch:
    tokens_BT: Tensor
    """int64"""
    labels_BT: Tensor
    """int64, the token after each one; IGNORED_LABEL where there is none"""
    num_unmasked: int
    """labels that count in the loss"""


class TokenBatches:
    """Consecutive windows of T + 1 tokens, T apart: every token but the first is a label exactly once.

    The last window may be short and is padded. The windows at the end of the corpus are held out for evaluation.
    """

    def __init__(self, corpus: Corpus, sequence_length: int, evaluation_fraction: float, seed: int) -> None:
        """Raises UserError when the corpus is too small for one training sequence (and one held out, if any)."""
        num_tokens = corpus.index.num_tokens
        num_sequences = math.ceil((num_tokens - 1) / sequence_length)
        num_held_out = math.ceil(num_sequences * evaluation_fraction)
        if num_tokens <= sequence_length or num_sequences <= num_held_out:
            needed = sequence_length * (2 if evaluation_fraction else 1) + 1
            raise UserError(
                f"{corpus.directory}: the corpus has {num_tokens} tokens, and training.sequenceLength "
                f"{sequence_length} with data.evaluation.fraction {evaluation_fraction} needs at least {needed}; "
                "give more text or a shorter sequence"
            )
        self.num_sequences = num_sequences - num_held_out
        """training sequences, that is samples per epoch"""
        self.num_evaluation_sequences = num_held_out
        self._corpus = corpus
        self._sequence_length = sequence_length
        self._evaluation_fraction = evaluation_fraction
        self._seed = seed

    @property
    def fingerprint(self) -> str:
        """xxh3-128 of all that decides which tokens a sample holds; kept in checkpoints."""
        decides = (self._corpus.fingerprint, self._sequence_length, self._evaluation_fraction, self._seed)
        return xxhash.xxh3_128_hexdigest(repr(decides).encode())

    def batch(self, samples: range) -> Batch:
        """The training samples with these numbers; they count from 0 over all epochs of the run."""
        return self._windows([self._window_of(sample) for sample in samples])

    def num_unmasked(self, samples: range) -> int:
        """Labels that count in these training samples, those of other ranks included: no token is read for it."""
        T, num_labels = self._sequence_length, self._corpus.index.num_tokens - 1
        return sum(min(T, num_labels - self._window_of(sample) * T) for sample in samples)

    def evaluation_batches(self, micro_batch_size: int, max_batches: int | None = None) -> Iterator[Batch]:
        """The held-out sequences in corpus order, always the same; the last batch may be smaller."""
        first, last = self.num_sequences, self.num_sequences + self.num_evaluation_sequences
        for start in range(first, last, micro_batch_size)[:max_batches]:
            yield self._windows(range(start, min(start + micro_batch_size, last)))

    def _window_of(self, sample: int) -> int:
        epoch, index = divmod(sample, self.num_sequences)
        return permuted(index, self.num_sequences, self._seed, epoch)

    def _windows(self, windows: Sequence[int]) -> Batch:
        T = self._sequence_length
        tokens_BT = torch.full((len(windows), T), self._corpus.index.end_of_text, dtype=torch.int64)
        labels_BT = torch.full((len(windows), T), IGNORED_LABEL, dtype=torch.int64)
        num_unmasked = 0
        for row, window in enumerate(windows):
            tokens = torch.from_numpy(self._corpus.tokens(window * T, (window + 1) * T + 1))
            num_labels = len(tokens) - 1
            tokens_BT[row, :num_labels] = tokens[:-1]
            labels_BT[row, :num_labels] = tokens[1:]
            num_unmasked += num_labels
        return Batch(tokens_BT, labels_BT, num_unmasked)


def permuted(index: int, size: int, seed: int, epoch: int) -> int:
    """Where `index` goes in the permutation of 0 .. size-1 that belongs to (seed, epoch).

    A Feistel network over the smallest even number of bits that holds `size`, walked along its cycle until the value is
    below `size` again (Black and Rogaway, Ciphers with Arbitrary Finite Domains): no table, about two walks on average.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    key = splitmix64(splitmix64(seed) ^ epoch)
    value = index
    while True:
        left, right = value >> half_bits, value & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (splitmix64(key ^ (number << 56) ^ right) & mask)
        value = left << half_bits | right
        if value < size:
            return value
