"""What the step loop reads: sequence i of a run, in an order that one integer positions.

Shapes: B = sequences asked for, T = sequence length. Everything is a function of (corpus, objective, sequence length,
evaluation fraction, seed, sample index), so resuming is O(1) and no state but the number of samples consumed is kept.

What of window w, tokens wT and on, is a label:

    causal   each token but the first, T of T + 1: the label of the one before it
    masked   MASKED_FRACTION of T tokens, drawn from (seed, sample): they are hidden, most of them by the mask
    prefix   the tokens behind the first prefix_length(T), T in all: the model's encoder reads the first ones
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from spillway.errors import UserError

from .models.objective import IGNORED_LABEL, Objective, prefix_length
from .seeds import fork_seed, splitmix64, splitmix64_array
from .tokens import Corpus

MASKED_FRACTION = 0.15
MASKED_BY_MASK, MASKED_BY_RANDOM = 0.8, 0.1
"""of the hidden tokens, so many become the mask, so many a random token; the rest stays (Devlin et al. 2019)"""

_ROUNDS = 6
_TRAINING, _EVALUATION = 0, 1
Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    tokens_BT: Tensor
    """int64"""
    labels_BT: Tensor
    """int64, what the model has to say at each place; IGNORED_LABEL where there is nothing to say"""
    num_unmasked: int
    """labels that count in the loss"""

    def on(self, device: torch.device) -> Batch:
        """The batch with its tensors there."""
        return Batch(self.tokens_BT.to(device), self.labels_BT.to(device), self.num_unmasked)


class TokenBatches:
    """Consecutive windows, T apart: every token is a label at most once. The last window may be short and is padded.

    The windows at the end of the corpus are held out for evaluation.
    """

    def __init__(
        self,
        corpus: Corpus,
        sequence_length: int,
        evaluation_fraction: float,
        seed: int,
        objective: Objective = Objective.CAUSAL,
    ) -> None:
        """Raises UserError when the corpus is too small for one training sequence (and one held out, if any), or its
        tokenizer has no mask and the objective needs one."""
        num_tokens = corpus.index.num_tokens
        if objective is Objective.MASKED and corpus.index.mask is None:
            raise UserError(
                f"{corpus.tokenizer_path}: has no mask token, which a model that learns from hidden tokens needs; "
                "use another output directory, or a source whose tokenizer has one"
            )
        # Tokens of a window before its first label: one more is needed for it to teach anything.
        before = {Objective.CAUSAL: 1, Objective.MASKED: 0, Objective.PREFIX: prefix_length(sequence_length)}[objective]
        num_sequences = math.ceil((num_tokens - before) / sequence_length)
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
        self._objective = objective

    @property
    def fingerprint(self) -> str:
        """xxh3-128 of all that decides which tokens a sample holds; kept in checkpoints."""
        corpus, objective = self._corpus.fingerprint, self._objective.value
        decides = (corpus, objective, self._sequence_length, self._evaluation_fraction, self._seed)
        return xxhash.xxh3_128_hexdigest(repr(decides).encode())

    def batch(self, samples: range) -> Batch:
        """The training samples with these numbers; they count from 0 over all epochs of the run."""
        keys = [fork_seed(self._seed, _TRAINING, sample, 0) for sample in samples]
        return self._windows([(self._window_of(sample), key) for sample, key in zip(samples, keys, strict=True)])

    def num_unmasked(self, samples: range) -> int:
        """Labels that count in these training samples, those of other ranks included: no token is read for it."""
        return sum(self._num_labels(self._window_of(sample)) for sample in samples)

    def evaluation_batches(self, micro_batch_size: int, max_batches: int | None = None) -> Iterator[Batch]:
        """The held-out sequences in corpus order, always the same; the last batch may be smaller."""
        first, last = self.num_sequences, self.num_sequences + self.num_evaluation_sequences
        for start in range(first, last, micro_batch_size)[:max_batches]:
            windows = range(start, min(start + micro_batch_size, last))
            yield self._windows([(window, fork_seed(self._seed, _EVALUATION, window, 0)) for window in windows])

    def _window_of(self, sample: int) -> int:
        epoch, index = divmod(sample, self.num_sequences)
        return permuted(index, self.num_sequences, self._seed, epoch)

    def _num_labels(self, window: int) -> int:
        """Of the tokens that are left of the corpus at the window's start."""
        T, left = self._sequence_length, self._corpus.index.num_tokens - window * self._sequence_length
        if self._objective is Objective.CAUSAL:
            return min(T, left - 1)
        if self._objective is Objective.PREFIX:
            return min(T, left) - prefix_length(T)
        return num_masked(min(T, left))

    def _windows(self, windows: Sequence[tuple[int, int]]) -> Batch:
        """`windows`: number of each, and the key of what is drawn for it."""
        T, index = self._sequence_length, self._corpus.index
        tokens_BT = torch.full((len(windows), T), index.end_of_text, dtype=torch.int64)
        labels_BT = torch.full((len(windows), T), IGNORED_LABEL, dtype=torch.int64)
        for row, (window, key) in enumerate(windows):
            tokens = self._corpus.tokens(window * T, (window + 1) * T + (self._objective is Objective.CAUSAL))
            if self._objective is Objective.CAUSAL:
                tokens, labels = tokens[:-1], tokens[1:]
            elif self._objective is Objective.PREFIX:
                labels = np.where(np.arange(len(tokens)) < prefix_length(T), IGNORED_LABEL, tokens)
            else:
                assert index.mask is not None
                tokens, labels = masked(tokens, key, index.mask, index.vocab_size)
            tokens_BT[row, : len(tokens)] = torch.from_numpy(tokens)
            labels_BT[row, : len(labels)] = torch.from_numpy(labels)
        return Batch(tokens_BT, labels_BT, sum(self._num_labels(window) for window, _ in windows))


def num_masked(num_tokens: int) -> int:
    """Tokens of a window that are hidden: always as many, at least one, so that they are counted without drawing."""
    return max(1, round(MASKED_FRACTION * num_tokens))


def masked(tokens: Array, key: int, mask: int, vocab_size: int) -> tuple[Array, Array]:
    """Input and labels for a window whose hidden tokens `key` decides, the same on every machine.

    The places with the smallest hashes are hidden; the hash of that hash says by what.
    """
    hashes = splitmix64_array(np.uint64(key) ^ splitmix64_array(np.arange(len(tokens), dtype=np.uint64)))
    hidden = np.argsort(hashes, kind="stable")[: num_masked(len(tokens))]
    draws = splitmix64_array(hashes[hidden])
    chance = draws.astype(np.float64) / 2.0**64
    inputs, labels = tokens.copy(), np.full_like(tokens, IGNORED_LABEL)
    labels[hidden] = tokens[hidden]
    by_random = chance < MASKED_BY_MASK + MASKED_BY_RANDOM
    inputs[hidden[by_random]] = (splitmix64_array(draws) % np.uint64(vocab_size)).astype(np.int64)[by_random]
    inputs[hidden[chance < MASKED_BY_MASK]] = mask
    return inputs, labels


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
