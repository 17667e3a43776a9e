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
from spillway.api.model import Evaluation
from spillway.errors import UserError
from spillway_trainer.checkpoints.durable_files import FileEntry, describe_file
from spillway_trainer.corpus.data import Batch, Split, TokenBatches, permuted
from spillway_trainer.corpus.objective import IGNORED_LABEL, TrainingObjective, prefix_length
from spillway_trainer.corpus.tokens import Corpus, CorpusIndex

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


def held(fraction: float = 0.0, num_sequences: int = 0, seed: int = 0) -> Evaluation | None:
    """Of the job; none without a share."""
    return Evaluation(fraction=repr(fraction), sequences=num_sequences, seed=seed) if fraction else None  # type: ignore[arg-type]


def batches_of(directory: Path, num_tokens: int, T: int = 8, fraction: float = 0.0, seed: int = 0) -> TokenBatches:
    return TokenBatches(corpus_of(directory, num_tokens), T, seed, evaluation=held(fraction))


def masked_batches(directory: Path, num_tokens: int, T: int = 8, seed: int = 0, fraction: float = 0.0) -> TokenBatches:
    return TokenBatches(corpus_of(directory, num_tokens, mask=MASK), T, seed, TrainingObjective.MASKED, held(fraction))


def prefix_batches(directory: Path, num_tokens: int, T: int = 8, fraction: float = 0.0) -> TokenBatches:
    return TokenBatches(corpus_of(directory, num_tokens), T, 0, TrainingObjective.PREFIX, held(fraction))


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
    whole = TokenBatches(corpus, 8, seed=0)
    total = 2 * whole.num_sequences
    edges = [0, *(edge for edge in itertools.accumulate(cuts) if edge < total), total]
    rows = [TokenBatches(corpus, 8, seed=0).batch(range(*pair)).tokens_BT for pair in itertools.pairwise(edges)]
    assert torch.equal(torch.cat(rows), whole.batch(range(total)).tokens_BT)


def test_next_epoch_holds_the_same_samples_in_another_order(tmp_path: Path) -> None:
    batches = batches_of(tmp_path, num_tokens=401)
    first, second = (batches.batch(range(start, start + 50)).tokens_BT[:, 0] for start in (0, 50))
    assert not torch.equal(first, second)
    assert torch.equal(first.sort().values, second.sort().values)


# --- what is held out -------------------------------------------------------------------------------------------------


def held_out_of(corpus: Corpus, evaluation: Evaluation | None, seed: int = 0) -> TokenBatches:
    return TokenBatches(corpus, 8, seed, evaluation=evaluation)


def evaluated_of(batches: TokenBatches, micro_batch_size: int = 3) -> list[int]:
    return [label for batch in batches.evaluation_batches(micro_batch_size) for label in labels_of(batch)]


@settings(deadline=None)
@given(size=st.integers(2, 2000), share=st.floats(0.0001, 0.5), seed=st.integers(0, 2**63))
def test_every_window_is_trained_on_or_held_out_and_never_both(size: int, share: float, seed: int) -> None:
    num_held_out = max(1, int(size * share))
    split = Split(size, num_held_out, seed)
    trained = [split.training(index) for index in range(size - num_held_out)]
    held_out = [split.held_out(index) for index in range(num_held_out)]
    assert sorted(trained + held_out) == list(range(size))
    assert (trained, held_out) == (sorted(trained), sorted(held_out))


def test_held_out_windows_are_stretches_as_many_as_each_is_long() -> None:
    split = Split(10_000, 100, seed=7)
    held_out = [split.held_out(index) for index in range(100)]
    begins = [window for window in held_out if window - 1 not in held_out]
    assert len(begins) == 10
    assert max(begins) - min(begins) > 5000, "they are all over the text"


def test_held_out_places_are_equally_likely_everywhere() -> None:
    """Of 2,000 seeds each window of 50 is held out by about 2,000 x 5 / 50; six standard deviations are 81."""
    counts = np.zeros(50)
    for seed in range(2000):
        split = Split(50, 5, seed)
        counts[[split.held_out(index) for index in range(5)]] += 1
    assert abs(counts[5:45] - 200).max() < 81


def test_held_out_tokens_are_a_share_by_seed_and_never_trained_on(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, 401)
    evaluated = {}
    for seed in (0, 1):
        batches = held_out_of(corpus, held(0.1, seed=seed))
        evaluated[seed] = evaluated_of(batches)
        trained = labels_of(batches.batch(range(batches.num_sequences)))
        assert len(evaluated[seed]) == 5 * 8
        assert sorted(trained + evaluated[seed]) == list(range(1, 401))
    assert evaluated[0] != evaluated[1]
    assert evaluated[0] != list(range(361, 401)), "not the end of the text"


def test_seeds_of_training_are_evaluated_on_the_same_text(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, 401)
    one, other = (evaluated_of(held_out_of(corpus, held(0.1), seed=seed)) for seed in (0, 1))
    assert one == other


@pytest.mark.parametrize(("fraction", "num_held_out"), [(0.07, 7), (0.29, 29), (0.001, 1), (0.5, 50)])
def test_held_out_share_is_exact_and_rounded_up(tmp_path: Path, fraction: float, num_held_out: int) -> None:
    """0.07 and 0.29 of 100 are not 8 and 30, as products of floats would have it."""
    assert batches_of(tmp_path, num_tokens=801, fraction=fraction).num_held_out == num_held_out


@pytest.mark.parametrize("micro_batch_size", [1, 3, 4, 64])
def test_evaluation_reads_as_many_sequences_as_asked_for(tmp_path: Path, micro_batch_size: int) -> None:
    corpus = corpus_of(tmp_path, 4001)
    batches = held_out_of(corpus, held(0.5, num_sequences=10))
    read = evaluated_of(batches, micro_batch_size)
    assert len(read) == 10 * 8
    assert read == evaluated_of(batches, 5) == sorted(read), "the same, however they are batched"
    assert set(read) < set(evaluated_of(held_out_of(corpus, held(0.5))))
    assert max(read) - min(read) > 2000, "from all of it"


def test_evaluation_of_fewer_sequences_than_asked_for_says_so(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, 401)
    said = {number: held_out_of(corpus, held(0.1, num_sequences=number)).evaluated for number in (64, 5, 4, 0)}
    assert said == {
        64: "evaluation: 5 of 5 held-out sequences, fewer than the 64 of data.evaluation.sequences",
        5: "evaluation: 5 of 5 held-out sequences",
        4: "evaluation: 4 of 5 held-out sequences",
        0: "evaluation: 5 of 5 held-out sequences",
    }


def test_no_held_out_fraction_means_no_evaluation(tmp_path: Path) -> None:
    batches = batches_of(tmp_path, num_tokens=401)
    assert (list(batches.evaluation_batches(4)), batches.evaluated) == ([], "")


def with_evaluation_text(directory: Path, num_tokens: int, num_evaluation_tokens: int) -> Corpus:
    (directory / "evaluation").mkdir(parents=True)
    corpus = corpus_of(directory, num_tokens)
    corpus.evaluation = corpus_of(directory / "evaluation", num_evaluation_tokens)
    return corpus


def test_evaluation_text_is_all_read_and_all_of_the_corpus_is_trained_on(tmp_path: Path) -> None:
    batches = held_out_of(with_evaluation_text(tmp_path, 401, 83), None)
    assert sorted(labels_of(batches.batch(range(batches.num_sequences)))) == list(range(1, 401))
    assert evaluated_of(batches) == list(range(1, 83))


def test_evaluation_text_without_a_label_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"spec\.data\.evaluation\.text: the text is too short to predict a token"):
        held_out_of(with_evaluation_text(tmp_path, 401, 1), None)


def test_fingerprint_tells_splits_and_evaluation_texts_apart(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, 401)
    made = [held_out_of(corpus, held_out) for held_out in (None, held(0.1), held(0.2), held(0.1, seed=1))]
    made += [held_out_of(with_evaluation_text(tmp_path / str(size), 401, size), None) for size in (83, 84)]
    assert len({batches.fingerprint for batches in made}) == len(made)


def test_checkpoints_of_the_split_at_the_end_are_of_another_run(tmp_path: Path) -> None:
    """Those without evaluation are resumed from."""
    corpus = corpus_of(tmp_path, 401)
    assert held_out_of(corpus, None).fingerprint == "845b9811384c15afea22492e657e2dad"
    assert held_out_of(corpus, held(0.1)).fingerprint != "899fe7f5b602264a4199fe86f8ac0f35"


@pytest.mark.parametrize(
    ("num_tokens", "fraction", "needs"),
    [(8, 0.0, " needs at least 9"), (9, 0.01, r" with spec\.data\.evaluation\.fraction 0\.01 needs at least 17")],
)
def test_too_small_corpus_is_rejected_with_numbers(
    tmp_path: Path, num_tokens: int, fraction: float, needs: str
) -> None:
    with pytest.raises(
        UserError, match=rf"has {num_tokens} tokens, but spec\.training\.sequenceLength 8{needs}; give more text"
    ):
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
    with pytest.raises(UserError, match=r"tokens-00003\.bin: its content has changed since it was built"):
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
        TokenBatches(corpus_of(tmp_path, 100), 8, 0, TrainingObjective.MASKED)


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
