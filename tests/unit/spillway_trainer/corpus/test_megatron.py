"""Tokens in the format of Megatron-LM: read as they were written, or rejected with the file and what it holds."""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
import pytest

from cases.chats import VOCABULARY, model_directory
from spillway.errors import UserError
from spillway_trainer.corpus.data import TokenBatches
from spillway_trainer.corpus.text_source import text_source
from spillway_trainer.corpus.tokens import Corpus, TokenizerRecipe, build_corpus, open_corpus, prepare_corpus

DOCUMENTS = [[5, 6, 7], [8], [9, 10, 11, 12, 300]]
KINDS = {1: "<u1", 4: "<i4", 5: "<i8", 8: "<u2"}


def silent(_line: str) -> None:
    pass


def write(prefix: Path, documents: list[list[int]], kind: int = 8) -> Path:
    """As Megatron-LM's IndexedDatasetBuilder: a sequence for each document."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    size, lengths = np.dtype(KINDS[kind]).itemsize, [len(one) for one in documents]
    prefix.with_name(f"{prefix.name}.bin").write_bytes(np.array([*chain(*documents)], KINDS[kind]).tobytes())
    index = prefix.with_name(f"{prefix.name}.idx")
    index.write_bytes(
        b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", kind)
        + struct.pack("<Q", len(documents)) + struct.pack("<Q", len(documents) + 1)
        + np.array(lengths, "<i4").tobytes()
        + np.array([0, *accumulate(length * size for length in lengths)][:-1], "<i8").tobytes()
        + np.arange(len(documents) + 1, dtype="<i8").tobytes()
    )  # fmt: skip
    return index


def built(root: Path, path: Path, **options: int) -> Corpus:
    recipe = TokenizerRecipe(model_directory=model_directory(root / "model", "mistral", None))
    source = text_source(path, "spec.data.tokens")
    build_corpus(source, root / "out" / "corpus", VOCABULARY, silent, recipe, **options)
    return open_corpus(root / "out" / "corpus", source, VOCABULARY, recipe)


@pytest.mark.parametrize("kind", [4, 5, 8])
def test_a_corpus_has_the_tokens_of_its_files_in_order(tmp_path: Path, kind: int) -> None:
    write(tmp_path / "data" / "b_text_document", DOCUMENTS, kind)
    write(tmp_path / "data" / "a_text_document", [[1, 2]], kind)
    corpus = built(tmp_path, tmp_path / "data", shard_tokens=4)
    assert corpus.tokens(0, 100).tolist() == [1, 2, *chain(*DOCUMENTS)]
    assert (corpus.index.num_documents, corpus.index.dtype, corpus.index.documents) == (4, "<u2", None)
    assert TokenBatches(corpus, 4, seed=0).num_sequences == 3


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_either_file_names_both_and_a_child_builds_the_same(tmp_path: Path, suffix: str) -> None:
    index = write(tmp_path / "data" / "x", DOCUMENTS)
    write(tmp_path / "data" / "other", [[1]])
    corpus = built(tmp_path, index.with_suffix(suffix))
    assert corpus.tokens(0, 100).tolist() == [*chain(*DOCUMENTS)]
    recipe = TokenizerRecipe(model_directory=tmp_path / "model")
    source = text_source(index, "spec.data.tokens")
    assert prepare_corpus(source, tmp_path / "child", VOCABULARY, silent, recipe).fingerprint == corpus.fingerprint


def other_magic(index: Path) -> None:
    index.write_bytes(b"TNTIDX\0\0\0" + index.read_bytes()[9:])


def version_2(index: Path) -> None:
    index.write_bytes(index.read_bytes()[:9] + struct.pack("<Q", 2) + index.read_bytes()[17:])


def floats(index: Path) -> None:
    index.write_bytes(index.read_bytes()[:17] + b"\7" + index.read_bytes()[18:])


def short_header(index: Path) -> None:
    index.write_bytes(index.read_bytes()[:20])


def short_index(index: Path) -> None:
    index.write_bytes(index.read_bytes()[:50])


def too_many(index: Path) -> None:
    content = index.read_bytes()
    index.write_bytes(content[:18] + struct.pack("<Q", 1 << 62) + content[26:])


def negative_length(index: Path) -> None:
    content = bytearray(index.read_bytes())
    first, second = struct.unpack_from("<ii", content, 34)
    struct.pack_into("<ii", content, 34, first + second + 1, -1)
    struct.pack_into("<q", content, 34 + 3 * 4 + 8, 2 * (first + second + 1))
    index.write_bytes(content)


def gap(index: Path) -> None:
    content = bytearray(index.read_bytes())
    content[34 + 3 * 4 + 8] += 2
    index.write_bytes(content)


def short_data(index: Path) -> None:
    index.with_suffix(".bin").write_bytes(index.with_suffix(".bin").read_bytes()[:-2])


def no_data(index: Path) -> None:
    index.with_suffix(".bin").unlink()


def large_token(index: Path) -> None:
    write(index.with_suffix(""), [[1, 2, 9999]])


def negative_token(index: Path) -> None:
    write(index.with_suffix(""), [[1, -1]], kind=4)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (other_magic, r"x\.idx: expected an index of Megatron-LM, which begins with MMIDIDX; found b'TNTIDX"),
        (version_2, r"x\.idx: expected version 1 with integers .*found version 2, type 8"),
        (floats, r"x\.idx: .*found version 1, type 7"),
        (short_header, r"x\.idx: expected an index of Megatron-LM"),
        (short_index, r"x\.idx: is too short for the 3 sequences that it names"),
        (too_many, r"x\.idx: is too short for the 4611686018427387904 sequences"),
        (negative_length, r"x\.idx: its 3 sequences do not follow one another"),
        (gap, r"x\.idx: its 3 sequences do not follow one another"),
        (short_data, r"x\.bin: expected 18 bytes, as x\.idx says, found 16"),
        (no_data, r"x\.bin: expected 18 bytes, as x\.idx says, found no file"),
        (large_token, r"x\.bin: token 2 is 9999, but the tokenizer of spec\.model\.source has only \d+ tokens"),
        (negative_token, r"x\.bin: token 1 is -1"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_files_that_do_not_agree_are_rejected_and_leave_nothing(
    tmp_path: Path, change: Callable[[Path], None], sentence: str
) -> None:
    change(write(tmp_path / "data" / "x", DOCUMENTS))
    with pytest.raises(UserError, match=sentence):
        built(tmp_path, tmp_path / "data")
    assert not any((tmp_path / "out").iterdir())


def test_a_file_without_the_other_is_rejected_at_once(tmp_path: Path) -> None:
    index = write(tmp_path / "x", DOCUMENTS)
    index.unlink()
    with pytest.raises(UserError, match=r"spec\.data\.tokens: .*x\.bin has no .*x\.idx next to it"):
        text_source(index.with_suffix(".bin"), "spec.data.tokens")
