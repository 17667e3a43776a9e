"""What the step loop reads: the sequences of a run, in an order in which one integer is the position.

Shapes: B = sequences asked for, T = sequence length. Everything is a function of (corpus, objective, sequence length,
what is held out, seed, sample index), so resuming is O(1), and the only state is the number of samples consumed.

Labels of window w, which begins at token wT:

    causal   each token but the first, T of T + 1: the label of the one before it
    masked   MASKED_FRACTION of T tokens, drawn from (seed, sample): they are hidden, most of them by the mask
    prefix   of T tokens, those after the first prefix_length(T), which the model's encoder reads

In a corpus of chats, a window is one document from its beginning, or a row of several documents (corpus/packing.py),
and the labels are those of its responses (corpus/chat.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from spillway.api.model import CHATS_NEED_CAUSAL, PACKING_NEEDS_CHATS, Evaluation
from spillway.errors import UserError
from spillway.units import counted

from ..checkpoints.durable_files import ANOTHER_DIRECTORY
from ..seeds import fork_seed, splitmix64, splitmix64_array
from .objective import IGNORED_LABEL, TrainingObjective, prefix_length
from .packing import Array, Documents, packed_rows
from .tokens import NO_MASK, Corpus

MASKED_FRACTION = 0.15
MASKED_BY_MASK, MASKED_BY_RANDOM = 0.8, 0.1
"""Shares of the hidden tokens that become the mask and a random token; the rest is unchanged (Devlin et al. 2019)."""

_ROUNDS = 6
_TRAINING, _EVALUATION, _SPLIT, _READ = range(4)


@dataclass(frozen=True, slots=True)
class Batch:
    tokens_BT: Tensor
    """int64."""
    labels_BT: Tensor
    """int64, the expected token at each position; IGNORED_LABEL if there is none."""
    num_unmasked: int
    """Number of labels that count in the loss."""
    documents: Documents | None = None
    """Given if rows hold several documents."""

    def given(self, num_tokens: int) -> tuple[Any, ...]:
        """Returns the arguments of a Chain's forward, for a loss that is divided by `num_tokens`."""
        documents = () if self.documents is None else (self.documents,)
        return self.tokens_BT, self.labels_BT, num_tokens, *documents

    def on(self, device: torch.device) -> Batch:
        """Returns the batch with its tensors on `device`; the host does not wait for the copies."""
        if device.type == "cpu":
            return self
        given = self.tokens_BT, self.labels_BT
        tokens_BT, labels_BT = (tensor.pin_memory().to(device, non_blocking=True) for tensor in given)
        return replace(self, tokens_BT=tokens_BT, labels_BT=labels_BT)


class Windows:
    """Consecutive windows of a corpus, T tokens apart: every token is a label at most once. The last window may be
    short and is padded; a window without a label is left out."""

    def __init__(self, corpus: Corpus, sequence_length: int, objective: TrainingObjective) -> None:
        self._corpus, self._sequence_length, self._objective = corpus, sequence_length, objective
        # Tokens of a window before its first label: a window must be longer to teach anything.
        before = {
            TrainingObjective.CAUSAL: 1,
            TrainingObjective.MASKED: 0,
            TrainingObjective.PREFIX: prefix_length(sequence_length),
        }[objective]
        self.num = max(0, math.ceil((corpus.index.num_tokens - before) / sequence_length))
        self.said: list[str] = []
        """Lines for the user; an empty one says nothing."""

    def num_labels(self, window: int) -> int:
        """Returns the number of labels in a window, from the number of tokens between its start and the corpus's
        end."""
        T, left = self._sequence_length, self._corpus.index.num_tokens - window * self._sequence_length
        if self._objective is TrainingObjective.CAUSAL:
            return min(T, left - 1)
        if self._objective is TrainingObjective.PREFIX:
            return min(T, left) - prefix_length(T)
        return num_masked(min(T, left))

    def batch(self, windows: Sequence[tuple[int, int]]) -> Batch:
        """Returns these windows as a batch. `windows`: the number of each, and the key of what is drawn for it."""
        shape = len(windows), self._sequence_length
        tokens_BT = torch.full(shape, self._corpus.index.end_of_text, dtype=torch.int64)
        labels_BT = torch.full(shape, IGNORED_LABEL, dtype=torch.int64)
        for row, (window, key) in enumerate(windows):
            tokens, labels = self._tokens_and_labels(window, key)
            tokens_BT[row, : len(tokens)] = torch.from_numpy(tokens)
            labels_BT[row, : len(labels)] = torch.from_numpy(labels)
        num_unmasked = int((labels_BT != IGNORED_LABEL).sum())
        return Batch(tokens_BT, labels_BT, num_unmasked, self._documents([window for window, _ in windows]))

    def _documents(self, windows: Sequence[int]) -> Documents | None:
        """Returns the documents of each row; None if each row is a single document."""
        return None

    def _tokens_and_labels(self, window: int, key: int) -> tuple[Array, Array]:
        T, index = self._sequence_length, self._corpus.index
        tokens = self._corpus.tokens(window * T, (window + 1) * T + (self._objective is TrainingObjective.CAUSAL))
        if self._objective is TrainingObjective.CAUSAL:
            return tokens[:-1], tokens[1:]
        if self._objective is TrainingObjective.PREFIX:
            return tokens, np.where(np.arange(len(tokens)) < prefix_length(T), IGNORED_LABEL, tokens)
        assert index.mask is not None
        return masked(tokens, key, index.mask, index.vocab_size)


class Chats(Windows):
    """The documents of a corpus of chats, one per window: the first T + 1 tokens, and padding. Documents without a
    label among these tokens are left out."""

    def __init__(self, corpus: Corpus, sequence_length: int) -> None:
        super().__init__(corpus, sequence_length, TrainingObjective.CAUSAL)
        stops, first_labels = corpus.documents.T
        self._stops, self._kept = stops, np.flatnonzero(first_labels <= sequence_length)
        self.num = len(self._kept)
        num_cut = int(np.count_nonzero(np.diff(stops, prepend=0) > sequence_length + 1))
        left_out = f"; {len(stops) - self.num} have no response within that length and are left out"
        cut = (
            f"chats: {num_cut} of {len(stops)} are longer than training.sequenceLength {sequence_length} and are cut"
            f"{left_out if self.num < len(stops) else ''}"
        )
        self.said = [cut if num_cut else ""]

    def num_labels(self, window: int) -> int:
        start, stop = self._place(window)
        return int(self._corpus.is_label(start + 1, stop).sum())

    def _tokens_and_labels(self, window: int, key: int) -> tuple[Array, Array]:
        start, stop = self._place(window)
        tokens = self._corpus.tokens(start, stop)
        return tokens[:-1], np.where(self._corpus.is_label(start + 1, stop), tokens[1:], IGNORED_LABEL)

    def _place(self, window: int) -> tuple[int, int]:
        document = self._kept[window]
        start = int(self._stops[document - 1]) if document else 0
        return start, min(int(self._stops[document]), start + self._sequence_length + 1)


class PackedChats(Chats):
    """Chats of which a window holds a row: several documents, one after another, and padding."""

    def __init__(self, corpus: Corpus, sequence_length: int) -> None:
        super().__init__(corpus, sequence_length)
        lengths = np.minimum(np.diff(self._stops, prepend=0)[self._kept] - 1, sequence_length)
        self._rows, self._ends = packed_rows(lengths, sequence_length)
        self._lengths = lengths[self._rows]
        self.num = len(self._ends)
        self.said.append(
            f"packing: {counted(len(lengths), 'chat')} in {counted(self.num, 'row')} of {sequence_length} tokens, "
            f"{lengths.sum() / (max(1, self.num) * sequence_length):.0%} full"
        )

    def num_labels(self, window: int) -> int:
        return sum(map(super().num_labels, self._rows[self._in_row(window)]))

    def _tokens_and_labels(self, window: int, key: int) -> tuple[Array, Array]:
        read = super()._tokens_and_labels
        tokens, labels = zip(*(read(one, key) for one in self._rows[self._in_row(window)]), strict=True)
        return np.concatenate(tokens), np.concatenate(labels)

    def _documents(self, windows: Sequence[int]) -> Documents:
        rows = [self._lengths[self._in_row(window)].tolist() for window in windows]
        padding = [self._sequence_length - sum(row) for row in rows]
        return Documents(tuple((*row, *[left] * (left > 0)) for row, left in zip(rows, padding, strict=True)))

    def _in_row(self, window: int) -> slice:
        return slice(int(self._ends[window - 1]) if window else 0, int(self._ends[window]))


def windows_of(corpus: Corpus, sequence_length: int, objective: TrainingObjective, *, packs: bool = False) -> Windows:
    if corpus.index.documents is None:
        if packs:
            raise UserError(f"spec.data.packing: {PACKING_NEEDS_CHATS}")
        return Windows(corpus, sequence_length, objective)
    if objective is not TrainingObjective.CAUSAL:
        raise UserError(CHATS_NEED_CAUSAL)
    return PackedChats(corpus, sequence_length) if packs else Chats(corpus, sequence_length)


class Split:
    """Chooses which of `num_windows` windows are held out: stretches of neighbouring windows, about as many as the root
    of `num_held_out` and of nearly equal length, each before a training window that is drawn from the seed.

    Stretches, because the text beside a window tells much about what is in it: only the ends of a stretch have
    neighbours that are trained on.
    """

    def __init__(self, num_windows: int, num_held_out: int, seed: int) -> None:
        num_training, num_stretches = num_windows - num_held_out, math.isqrt(num_held_out)
        seed = fork_seed(seed, _SPLIT, 0, 0)
        drawn = (permuted(number, num_training + 1, seed, 0) for number in range(num_stretches))
        self._before = np.sort(np.fromiter(drawn, np.int64, num_stretches))
        """Number of training windows before each stretch."""
        self._ends = np.arange(num_stretches + 1, dtype=np.int64) * num_held_out // max(1, num_stretches)
        """Number of windows in the first n stretches."""

    def training(self, index: int) -> int:
        """Returns the window that is the training window `index`."""
        return index + int(self._ends[np.searchsorted(self._before, index, side="right")])

    def held_out(self, index: int) -> int:
        """Returns the window that is the held-out window `index`."""
        return index + int(self._before[np.searchsorted(self._ends, index, side="right") - 1])


class TokenBatches:
    """The samples of a run, and the sequences that its evaluations read."""

    def __init__(
        self,
        corpus: Corpus,
        sequence_length: int,
        seed: int,
        objective: TrainingObjective = TrainingObjective.CAUSAL,
        evaluation: Evaluation | None = None,
        *,
        packs: bool = False,
    ) -> None:
        """Raises UserError if the corpus is too small for one training sequence (and one held out, if any), if the text
        to evaluate on is too small for one sequence, or if the objective needs a mask and the tokenizer has none."""
        num_tokens, fraction = corpus.index.num_tokens, (evaluation and evaluation.fraction) or 0.0
        if objective is TrainingObjective.MASKED and corpus.index.mask is None:
            raise UserError(
                f"{corpus.tokenizer_path}: {NO_MASK}; use {ANOTHER_DIRECTORY}, where a new tokenizer is trained, or a "
                "spec.model.source whose tokenizer has a mask token"
            )
        self._windows = windows_of(corpus, sequence_length, objective, packs=packs)
        self.said = self._windows.said
        """Lines for the user: how many chats are cut, and how they are packed."""
        num_held_out = math.ceil(self._windows.num * Fraction(repr(fraction)))
        if isinstance(self._windows, Chats):
            if not self._windows.num:
                raise UserError(
                    f"{corpus.directory}: none of {counted(corpus.index.num_documents, 'chat')} has a response within "
                    f"spec.training.sequenceLength {sequence_length}; give other chats, or raise sequenceLength in a "
                    "new job"
                )
            if self._windows.num <= num_held_out:
                if packs:
                    raise UserError(
                        f"{corpus.directory}: packing puts the chats into {counted(self._windows.num, 'row')} of "
                        f"{sequence_length} tokens (spec.training.sequenceLength), and evaluation holds out "
                        f"{num_held_out} of these (spec.data.evaluation.fraction {fraction}), so no row is left to "
                        "train on; give more chats, or, in a new job, lower sequenceLength or set spec.data.packing to "
                        "false"
                    )
                raise UserError(
                    f"{corpus.directory}: {self._windows.num} of {corpus.index.num_documents} chats have a "
                    f"response within spec.training.sequenceLength {sequence_length}. Evaluation holds out "
                    f"{num_held_out} of these (spec.data.evaluation.fraction {fraction}), so no chat is left to train "
                    "on; give more chats, or raise sequenceLength in a new job"
                )
        elif num_tokens <= sequence_length or self._windows.num <= num_held_out:
            needed = sequence_length * (2 if fraction else 1) + 1
            evaluates = f" with spec.data.evaluation.fraction {fraction}" if fraction else ""
            raise UserError(
                f"{corpus.directory}: the corpus has {counted(num_tokens, 'token')}, but spec.training.sequenceLength "
                f"{sequence_length}{evaluates} needs at least {needed}; give more text, or lower sequenceLength in a "
                "new job"
            )
        self.num_sequences = self._windows.num - num_held_out
        """Number of training sequences, that is, samples per epoch."""
        self._asked, self._draw = (evaluation.sequences, evaluation.seed) if evaluation else (0, 0)
        self._split = Split(self._windows.num, num_held_out, self._draw)
        self._evaluated = self._windows
        held_out: object = (fraction, self._draw) if fraction else 0.0
        self._held_out_window: Callable[[int], int] = self._split.held_out
        if corpus.evaluation is not None:
            self._evaluated = windows_of(corpus.evaluation, sequence_length, objective, packs=packs)
            self._held_out_window = int
            num_held_out, held_out = self._evaluated.num, corpus.evaluation.fingerprint
            if not num_held_out:
                if corpus.index.documents is None:
                    raise UserError(
                        "spec.data.evaluation.text: the text is too short to predict a token; give more text"
                    )
                raise UserError(
                    "spec.data.evaluation.chat: no chat has a response within spec.training.sequenceLength "
                    f"{sequence_length}; give other chats, or raise sequenceLength in a new job"
                )
        self.num_held_out = num_held_out
        self.num_evaluated = min(self._asked or num_held_out, num_held_out)
        """Number of sequences in an evaluation."""
        self._seed = seed
        decides = (corpus.fingerprint, objective.value, sequence_length, held_out, seed, *["packed"] * packs)
        self.fingerprint = xxhash.xxh3_128_hexdigest(repr(decides).encode())
        """xxh3-128 of everything that decides which tokens a sample or an evaluation holds; kept in checkpoints."""

    @property
    def evaluated(self) -> str:
        """Line for the user: what an evaluation reads. Empty if there is no evaluation."""
        fewer = f", fewer than the {self._asked} of data.evaluation.sequences" * (self._asked > self.num_held_out)
        said = f"evaluation: {self.num_evaluated} of {self.num_held_out} held-out sequences{fewer}"
        return said if self.num_held_out else ""

    def batch(self, samples: range) -> Batch:
        """Returns the training samples with these numbers, which count from 0 over all epochs of the run."""
        keys = [fork_seed(self._seed, _TRAINING, sample, 0) for sample in samples]
        return self._windows.batch([(self._window_of(sample), key) for sample, key in zip(samples, keys, strict=True)])

    def num_unmasked(self, samples: range) -> int:
        """Returns the number of labels that count in these training samples, including those of other ranks. Reads no
        tokens."""
        return sum(self._windows.num_labels(self._window_of(sample)) for sample in samples)

    def evaluation_batches(self, micro_batch_size: int) -> Iterator[Batch]:
        """Yields the sequences of an evaluation, which are always the same; the last batch may be smaller."""
        drawn: Sequence[int] = range(self.num_held_out)
        if self.num_evaluated < self.num_held_out:
            seed = fork_seed(self._draw, _READ, 0, 0)
            drawn = sorted(permuted(number, self.num_held_out, seed, 0) for number in range(self.num_evaluated))
        for start in range(0, self.num_evaluated, micro_batch_size):
            windows = map(self._held_out_window, drawn[start : start + micro_batch_size])
            keyed = [(window, fork_seed(self._draw, _EVALUATION, window, 0)) for window in windows]
            yield self._evaluated.batch(keyed)

    def _window_of(self, sample: int) -> int:
        epoch, index = divmod(sample, self.num_sequences)
        return self._split.training(permuted(index, self.num_sequences, self._seed, epoch))


def num_masked(num_tokens: int) -> int:
    """Returns how many tokens of a window are hidden: a fixed number, at least one, so that no drawing is needed to
    count them."""
    return max(1, round(MASKED_FRACTION * num_tokens))


def masked(tokens: Array, key: int, mask: int, vocab_size: int) -> tuple[Array, Array]:
    """Returns inputs and labels of a window. `key` decides which tokens are hidden, the same on every machine.

    The positions with the smallest hashes are hidden; the hash of that hash decides what replaces the token.
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
    """Returns where `index` goes in the permutation of 0 .. size-1 that belongs to (seed, epoch).

    A Feistel network over the smallest even number of bits that holds `size`, walked along its cycle until the value is
    below `size` again (Black and Rogaway, Ciphers with Arbitrary Finite Domains): it needs no table, and about two
    walks on average.
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
