"""The order of samples: every one once an epoch, the same from any starting point."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.depth import examples
from spillway.errors import UserError
from spillway_trainer.data import Batch, TokenBatches, permuted
from spillway_trainer.durable_files import FileEntry, describe_file
from spillway_trainer.models.objective import IGNORED_LABEL, Objective, prefix_length
from spillway_trainer.tokens import Corpus, CorpusIndex

END = 9999


MASK = END + 1


def corpus_of(directory: Path, num_tokens: int, shard_tokens: int = 64, mask: int | None = None) -> Corpus:
    """Token i of the corpus is i, so that a batch tells where it was read."""
    entries: list[FileEntry] = []
    for start in range(0, num_tokens, shard_tokens):
        path = directory / f"tokens-{len(entries):05d}.bin"
        np.arange(start, min(start + shard_tokens, num_tokens), dtype="<u2").tofile(path)
        entries.append(describe_file(path))
    index = CorpusIndex(
        num_tokens=num_tokens, num_documents=1, vocab_size=END + 1 + (mask is not None), end_of_text=END, dtype="<u2",
        shard_tokens=shard_tokens, shards=tuple(entries), tokenizer_xxh3="", source="", stat_xxh3="", content_xxh3="",
        mask=mask,
    )  # fmt: skip
    return Corpus(directory, index)


def batches_of(directory: Path, num_tokens: int, T: int = 8, fraction: float = 0.0, seed: int = 0) -> TokenBatches:
    return TokenBatches(corpus_of(directory, num_tokens), T, fraction, seed)


def masked_batches(directory: Path, num_tokens: int, T: int = 8, seed: int = 0, fraction: float = 0.0) -> TokenBatches:
    return TokenBatches(corpus_of(directory, num_tokens, mask=MASK), T, fraction, seed, Objective.MASKED)


def prefix_batches(directory: Path, num_tokens: int, T: int = 8, fraction: float = 0.0) -> TokenBatches:
    return TokenBatches(corpus_of(directory, num_tokens), T, fraction, 0, Objective.PREFIX)


def labels_of(batch: Batch) -> list[int]:
    return batch.labels_BT[batch.labels_BT != IGNORED_LABEL].tolist()


@settings(deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 50))
def test_permuted_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    assert sorted(permuted(index, size, seed, epoch) for index in range(size)) == list(range(size))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {
        tuple(permuted(index, 100, seed, epoch) for index in range(100)) for seed in range(10) for epoch in range(10)
    }
    assert len(orders) == 100


def test_permuted_scatters_neighbours() -> None:
    """Mean distance of successive values of a random order of n is n / 3."""
    order = [permuted(index, 3000, 1, 0) for index in range(3000)]
    mean = sum(abs(a - b) for a, b in itertools.pairwise(order)) / 2999
    assert 900 < mean < 1100


def test_every_token_but_the_first_is_a_label_once_an_epoch(tmp_path: Path) -> None:
    batches = batches_of(tmp_path, num_tokens=203)
    assert sorted(labels_of(batches.batch(range(batches.num_sequences)))) == list(range(1, 203))


def test_label_is_the_following_token(tmp_path: Path) -> None:
    batch = batches_of(tmp_path, num_tokens=161).batch(range(20))
    assert torch.equal(batch.labels_BT, batch.tokens_BT + 1)


def test_short_last_window_is_padded_and_masked(tmp_path: Path) -> None:
    batch = batches_of(tmp_path, num_tokens=12).batch(range(2))
    (short,) = (batch.tokens_BT[:, 0] == 8).nonzero()[0].tolist()
    assert batch.tokens_BT[short].tolist() == [8, 9, 10, *[END] * 5]
    assert batch.labels_BT[short].tolist() == [9, 10, 11, *[IGNORED_LABEL] * 5]
    assert batch.num_unmasked == 11


@settings(max_examples=examples(30), deadline=None)
@given(num_tokens=st.integers(20, 400), cuts=st.lists(st.integers(1, 40), max_size=20))
def test_resuming_anywhere_repeats_and_skips_nothing(
    tmp_path_factory: pytest.TempPathFactory, num_tokens: int, cuts: list[int]
) -> None:
    """Two epochs in arbitrary batches, each read by a new process's objects: together they are the uncut run."""
    corpus = corpus_of(tmp_path_factory.mktemp("corpus"), num_tokens)
    whole = TokenBatches(corpus, 8, 0.0, seed=0)
    total = 2 * whole.num_sequences
    edges = [0, *(edge for edge in itertools.accumulate(cuts) if edge < total), total]
    rows = [TokenBatches(corpus, 8, 0.0, seed=0).batch(range(*pair)).tokens_BT for pair in itertools.pairwise(edges)]
    assert torch.equal(torch.cat(rows), whole.batch(range(total)).tokens_BT)


def test_next_epoch_holds_the_same_samples_in_another_order(tmp_path: Path) -> None:
    batches = batches_of(tmp_path, num_tokens=401)
    first, second = (batches.batch(range(start, start + 50)).tokens_BT[:, 0] for start in (0, 50))
    assert not torch.equal(first, second)
    assert torch.equal(first.sort().values, second.sort().values)


def test_held_out_tokens_are_the_last_and_never_trained_on(tmp_path: Path) -> None:
    batches = batches_of(tmp_path, num_tokens=401, fraction=0.1)
    trained = labels_of(batches.batch(range(batches.num_sequences)))
    evaluated = [label for batch in batches.evaluation_batches(3) for label in labels_of(batch)]
    assert evaluated == list(range(361, 401))
    assert sorted(trained + evaluated) == list(range(1, 401))


def test_evaluation_stops_after_the_batches_asked_for(tmp_path: Path) -> None:
    batches = batches_of(tmp_path, num_tokens=401, fraction=0.5)
    assert len(list(batches.evaluation_batches(4, max_batches=2))) == 2


def test_no_held_out_fraction_means_no_evaluation(tmp_path: Path) -> None:
    assert list(batches_of(tmp_path, num_tokens=401).evaluation_batches(4)) == []


@pytest.mark.parametrize(("num_tokens", "fraction", "needed"), [(8, 0.0, 9), (9, 0.01, 17)])
def test_too_small_corpus_is_refused_with_numbers(
    tmp_path: Path, num_tokens: int, fraction: float, needed: int
) -> None:
    with pytest.raises(UserError, match=rf"has {num_tokens} tokens, and training\.sequenceLength 8 .* least {needed}"):
        batches_of(tmp_path, num_tokens, fraction=fraction)


def test_smallest_allowed_corpus_trains(tmp_path: Path) -> None:
    assert batches_of(tmp_path, num_tokens=9).batch(range(1)).tokens_BT.tolist() == [list(range(8))]


@pytest.mark.parametrize("changes", [{"T": 4}, {"fraction": 0.1}, {"seed": 1}, {"num_tokens": 402}])
def test_fingerprint_tells_apart_what_changes_a_sample(tmp_path: Path, changes: dict[str, float]) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    asked: dict[str, float] = {"num_tokens": 401}
    one = batches_of(tmp_path / "a", **asked)  # type: ignore[arg-type]
    other = batches_of(tmp_path / "b", **(asked | changes))  # type: ignore[arg-type]
    assert one.fingerprint != other.fingerprint


def test_fingerprint_tells_objectives_apart(tmp_path: Path) -> None:
    made = (batches_of(tmp_path, 401), masked_batches(tmp_path, 401), prefix_batches(tmp_path, 401))
    assert len({batches.fingerprint for batches in made}) == 3


@pytest.mark.parametrize("token", [7, END + 1])
def test_a_shard_that_is_not_as_it_was_built_is_never_trained_on(tmp_path: Path, token: int) -> None:
    """Also with tokens of the vocabulary: a run that went on with it would only be another one."""
    batches = batches_of(tmp_path, num_tokens=401)
    np.full(64, token, dtype="<u2").tofile(tmp_path / "tokens-00003.bin")
    with pytest.raises(UserError, match=r"tokens-00003\.bin: not the tokens that were built"):
        batches.batch(range(50))


# --- hidden tokens ----------------------------------------------------------------------------------------------------


def test_masked_token_is_the_label_at_its_place_and_others_are_unchanged(tmp_path: Path) -> None:
    batch = masked_batches(tmp_path, num_tokens=4000, T=200).batch(range(20))
    hidden = batch.labels_BT != IGNORED_LABEL
    whole = torch.where(hidden, batch.labels_BT, batch.tokens_BT)
    assert torch.equal(whole, whole[:, :1] + torch.arange(200))


def test_most_hidden_tokens_become_the_mask_some_a_random_token_some_stay(tmp_path: Path) -> None:
    batch = masked_batches(tmp_path, num_tokens=9000, T=1000).batch(range(60))
    hidden = batch.labels_BT != IGNORED_LABEL
    assert hidden.sum(dim=1).tolist() == [150] * 60 == [batch.num_unmasked // 60] * 60
    by_mask = (batch.tokens_BT == MASK)[hidden].float().mean()
    unchanged = (batch.tokens_BT == batch.labels_BT)[hidden].float().mean()
    assert 0.78 < by_mask < 0.82
    assert 0.085 < unchanged < 0.115


def test_hidden_places_differ_between_samples_epochs_and_seeds(tmp_path: Path) -> None:
    batches = masked_batches(tmp_path, num_tokens=2000, T=100)
    other = masked_batches(tmp_path, num_tokens=2000, T=100, seed=1)
    places = [
        tuple((labels != IGNORED_LABEL).nonzero().flatten().tolist())
        for batch in (batches.batch(range(40)), other.batch(range(20)))
        for labels in batch.labels_BT
    ]
    assert len(set(places)) == 60


@settings(max_examples=examples(20), deadline=None)
@given(cuts=st.lists(st.integers(1, 15), max_size=8))
def test_a_resumed_run_hides_the_same_tokens(tmp_path_factory: pytest.TempPathFactory, cuts: list[int]) -> None:
    directory = tmp_path_factory.mktemp("corpus")
    whole = masked_batches(directory, num_tokens=333, T=16).batch(range(60))
    edges = [0, *(edge for edge in itertools.accumulate(cuts) if edge < 60), 60]
    parts = [masked_batches(directory, 333, T=16).batch(range(*pair)) for pair in itertools.pairwise(edges)]
    assert torch.equal(torch.cat([part.tokens_BT for part in parts]), whole.tokens_BT)
    assert torch.equal(torch.cat([part.labels_BT for part in parts]), whole.labels_BT)
    assert sum(part.num_unmasked for part in parts) == whole.num_unmasked


def test_evaluation_hides_the_same_tokens_every_time(tmp_path: Path) -> None:
    batches = masked_batches(tmp_path, num_tokens=500, T=16, fraction=0.3)
    first, second = (list(batches.evaluation_batches(4)) for _ in range(2))
    assert all(torch.equal(a.tokens_BT, b.tokens_BT) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a.labels_BT, b.labels_BT) for a, b in zip(first, second, strict=True))


def test_labels_are_counted_without_reading_them(tmp_path: Path) -> None:
    """Of every objective, the short last window included."""
    makers = (masked_batches, prefix_batches, batches_of)
    for batches in (make(tmp_path, 8 * 25 + 6) for make in makers):
        samples = range(2 * batches.num_sequences)
        batch = batches.batch(samples)
        assert batch.num_unmasked == batches.num_unmasked(samples) == len(labels_of(batch))


def test_masked_objective_rejects_a_corpus_without_a_mask_token(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no mask token"):
        TokenBatches(corpus_of(tmp_path, 100), 8, 0.0, 0, Objective.MASKED)


# --- a part to read, a part to say ------------------------------------------------------------------------------------


def test_the_tokens_behind_the_prefix_are_labels_of_their_own_places(tmp_path: Path) -> None:
    batch = prefix_batches(tmp_path, num_tokens=160).batch(range(20))
    P = prefix_length(8)
    assert torch.equal(batch.labels_BT[:, P:], batch.tokens_BT[:, P:])
    assert (batch.labels_BT[:, :P] == IGNORED_LABEL).all()


@pytest.mark.parametrize(("left", "num_sequences"), [(0, 4), (4, 4), (5, 5), (7, 5)])
def test_a_last_window_without_anything_to_say_is_left_out(tmp_path: Path, left: int, num_sequences: int) -> None:
    batches = prefix_batches(tmp_path, num_tokens=32 + left)
    assert batches.num_sequences == num_sequences
    assert all(batches.num_unmasked(range(sample, sample + 1)) > 0 for sample in range(num_sequences))
