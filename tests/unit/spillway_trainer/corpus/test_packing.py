"""Which documents share a row, and what a packed batch holds."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from cases.chats import MARKED, VOCABULARY, conversations, model_directory, write_lines
from spillway.api.model import Evaluation
from spillway.errors import UserError
from spillway_trainer.corpus.data import TokenBatches
from spillway_trainer.corpus.objective import IGNORED_LABEL
from spillway_trainer.corpus.packing import packed_rows
from spillway_trainer.corpus.text_source import TextSource, text_source
from spillway_trainer.corpus.tokens import TRAINED, Corpus, TokenizerRecipe, build_corpus, open_corpus

T = 512


def rows_of(lengths: list[int], room: int) -> list[list[int]]:
    order, ends = packed_rows(np.array(lengths, dtype=np.int64), room)
    return [part.tolist() for part in np.split(order, ends[:-1])]


def corpus_of(directory: Path, count: int = 60) -> Corpus:
    lines = write_lines(directory / "chats.jsonl", [{"messages": chat} for chat in conversations(count)])
    recipe = TokenizerRecipe(model_directory=model_directory(directory / "model", "chatml", MARKED["chatml"]))
    return built(directory, text_source(lines, "spec.data.chat"), recipe)


def built(directory: Path, source: TextSource, recipe: TokenizerRecipe = TRAINED) -> Corpus:
    build_corpus(source, directory / "corpus", VOCABULARY, lambda _: None, recipe)
    return open_corpus(directory / "corpus", source, VOCABULARY, recipe)


def to_last_label(tokens: Tensor, labels: Tensor) -> list[list[int]]:
    end = int((labels != IGNORED_LABEL).nonzero().max()) + 1
    return [tokens[:end].tolist(), labels[:end].tolist()]


def test_documents_fill_the_row_with_the_least_room_that_holds_them() -> None:
    assert rows_of([3, 7, 5, 2, 3], 10) == [[0, 1], [2, 3, 4]]
    assert rows_of([10, 10], 10) == [[0], [1]]
    assert rows_of([1], 10) == [[0]]


@pytest.mark.parametrize("seed", range(20))
def test_every_document_is_in_one_row_and_no_row_overflows(seed: int) -> None:
    rng = random.Random(seed)
    room = rng.choice([8, 100, 4096])
    lengths = [rng.randint(1, room if rng.random() < 0.1 else max(1, room // 4)) for _ in range(500)]
    rows = rows_of(lengths, room)
    assert sorted(document for row in rows for document in row) == list(range(500))
    assert all(sum(lengths[document] for document in row) <= room for row in rows)
    halves = [sum(lengths[document] for document in row) <= room / 2 for row in rows]
    assert sum(halves) <= 1, "else two rows could be one"


def test_a_packed_epoch_holds_each_document_once_with_its_labels(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path)
    alone, packed = TokenBatches(corpus, T, seed=3), TokenBatches(corpus, T, seed=3, packs=True)
    expected, batch = alone.batch(range(alone.num_sequences)), packed.batch(range(packed.num_sequences))
    assert batch.documents is not None and expected.documents is None
    assert all(sum(lengths) == T for lengths in batch.documents.lengths)
    found = [
        document
        for tokens, labels, lengths in zip(batch.tokens_BT, batch.labels_BT, batch.documents.lengths, strict=True)
        for document in zip(tokens.split(lengths), labels.split(lengths), strict=True)
        if (document[1] != IGNORED_LABEL).any()
    ]
    rows = zip(expected.tokens_BT, expected.labels_BT, strict=True)
    assert sorted(itertools.starmap(to_last_label, found)) == sorted(itertools.starmap(to_last_label, rows))
    whole = np.minimum(np.diff(corpus.documents[:, 0], prepend=0) - 1, T)
    assert sorted(len(tokens) for tokens, _ in found) == sorted(whole)
    assert packed.num_sequences < alone.num_sequences / 2
    assert batch.num_unmasked == expected.num_unmasked == packed.num_unmasked(range(packed.num_sequences))


def test_packing_is_said_and_part_of_what_decides_the_samples(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path)
    alone, packed = TokenBatches(corpus, T, seed=3), TokenBatches(corpus, T, seed=3, packs=True)
    assert packed.fingerprint != alone.fingerprint
    (*_, said) = packed.said
    assert said.startswith(f"packing: {alone.num_sequences} chats in {packed.num_sequences} rows of {T} tokens, ")


def test_evaluation_holds_out_rows_and_says_if_none_is_left(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path)
    held = Evaluation(fraction="0.25")  # type: ignore[arg-type]
    batches = TokenBatches(corpus, T, seed=3, evaluation=held, packs=True)
    trained = {json.dumps(row) for row in batches.batch(range(batches.num_sequences)).tokens_BT.tolist()}
    evaluated = list(batches.evaluation_batches(4))
    assert all(batch.documents is not None for batch in evaluated)
    assert trained.isdisjoint(json.dumps(row) for batch in evaluated for row in batch.tokens_BT.tolist())
    with pytest.raises(UserError, match=r"into 1 row of 100000 tokens .* no row is left to train on"):
        TokenBatches(corpus, 100_000, seed=3, evaluation=held, packs=True)


def test_text_is_not_packed(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text of no interest " * 50)
    corpus = built(tmp_path, text_source(tmp_path / "text.txt"))
    with pytest.raises(UserError, match=r"spec\.data\.packing: needs chats"):
        TokenBatches(corpus, T, seed=3, packs=True)
