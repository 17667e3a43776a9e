"""Text sources, tokenizer and packed shards."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from fakes.failing_files import CountingFiles, full_at
from spillway.errors import UserError
from spillway_trainer.corpus import text_source as text_source_module
from spillway_trainer.corpus import tokens as tokens_module
from spillway_trainer.corpus.text_source import Tally, python_stdlib, text_source
from spillway_trainer.corpus.tokens import (
    END_OF_TEXT,
    TRAINED,
    Corpus,
    ProgressPrinter,
    TokenizerRecipe,
    build_corpus,
    open_corpus,
    prepare_corpus,
)

TEXT = "the quick brown fox jumps over the lazy dog\n" * 50
CODE = Path(__file__).read_text()


def silent(_line: str) -> None:
    pass


def write(directory: Path, **files: str | bytes) -> Path:
    """Files by name; `__` stands for the dot before the suffix."""
    directory.mkdir(exist_ok=True)
    for name, content in files.items():
        path = directory / name.replace("__", ".")
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return directory


def texts(directory: Path, tally: Tally | None = None) -> list[str]:
    return [piece.text for piece in text_source(directory).pieces(tally or Tally())]


def built(text: Path, directory: Path, vocab_size: int = 300, shard_tokens: int = 2**20) -> Corpus:
    source = text_source(text)
    build_corpus(source, directory, vocab_size, silent, shard_tokens=shard_tokens)
    return open_corpus(directory, source, vocab_size)


def decoded(corpus: Corpus) -> str:
    tokenizer = Tokenizer.from_file(str(corpus.tokenizer_path))
    ids = corpus.tokens(0, corpus.index.num_tokens).tolist()
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def test_directory_is_walked_in_sorted_order(tmp_path: Path) -> None:
    root = write(tmp_path / "text", b__txt="b", a__py="a")
    write(root / "a", z__md="a/z")
    assert texts(root) == ["a", "b", "a/z"]


def test_files_of_other_kinds_and_hidden_directories_are_left_out(tmp_path: Path) -> None:
    root = write(tmp_path / "text", a__txt="a", b__png="b", c="c")
    write(root / ".git", d__txt="d")
    assert texts(root) == ["a"]


def test_single_file_may_have_any_suffix(tmp_path: Path) -> None:
    write(tmp_path, corpus__dat="words")
    assert texts(tmp_path / "corpus.dat") == ["words"]


def test_links_out_of_the_tree_are_not_followed(tmp_path: Path) -> None:
    write(tmp_path, secret__txt="secret")
    root = write(tmp_path / "text", a__txt="a")
    (root / "b.txt").symlink_to(tmp_path / "secret.txt")
    (root / "c").symlink_to(tmp_path, target_is_directory=True)
    assert texts(root) == ["a"]


def test_links_that_lead_in_a_circle_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to("b.txt")
    (tmp_path / "b.txt").symlink_to("a.txt")
    (tmp_path / "c.txt").write_text("text")
    assert text_source(tmp_path).files == ("c.txt",)


def test_a_directory_that_cannot_be_read_is_rejected_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's rejection is injected: tests may run as root, to whom nothing is unreadable."""

    def reject(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr("os.scandir", reject)
    with pytest.raises(UserError, match=f"cannot read {tmp_path}: Permission denied"):
        text_source(tmp_path)


def test_links_within_the_tree_are_read_as_in_a_mounted_config_map(tmp_path: Path) -> None:
    root = write(tmp_path / "text")
    write(root / "..data", a__txt="a")
    (root / "a.txt").symlink_to(Path("..data", "a.txt"))
    assert texts(root) == ["a"]


def test_jsonl_gives_one_document_a_line(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "one"}), "not json", json.dumps({"other": 1}), "", json.dumps({"text": "two"})]
    tally = Tally()
    lines.append('{"text": ' + 100_000 * "[" + "}")
    assert texts(write(tmp_path / "text", a__jsonl="\ufeff" + "\n".join(lines)), tally) == ["one", "two"]
    assert (tally.documents, tally.malformed) == (2, 3)


def test_undecodable_bytes_are_replaced_and_counted(tmp_path: Path) -> None:
    tally = Tally()
    assert texts(write(tmp_path / "text", a__txt=b"caf\xe9", b__txt="plain"), tally) == ["caf\ufffd", "plain"]
    assert tally.undecodable == 1


def test_binary_files_are_skipped_and_counted(tmp_path: Path) -> None:
    tally = Tally()
    assert texts(write(tmp_path / "text", a__txt=b"\x7fELF\x00\x00", b__txt="plain"), tally) == ["plain"]
    assert tally.binary == 1


def test_long_document_comes_in_pieces_cut_at_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_source_module, "PIECE_CHARACTERS", 10)
    pieces = list(text_source(write(tmp_path / "text", a__txt="one two\nthree four\nfive\n")).pieces(Tally()))
    assert [piece.text for piece in pieces] == ["one two\nthree four\n", "five\n"]
    assert [piece.ends_document for piece in pieces] == [False, True]


def test_missing_path_is_rejected_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"spec\.data\.text: .*/nowhere does not exist"):
        text_source(tmp_path / "nowhere")


def test_directory_without_text_is_rejected_with_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"\*\.txt .*\*\.jsonl.*none"):
        text_source(write(tmp_path / "text", a__png="x"))


def test_empty_files_are_no_corpus(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="all of them are empty"):
        text_source(write(tmp_path / "text", a__txt=""))


def test_corpus_without_a_document_is_rejected_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="1 binary files"):
        built(write(tmp_path / "text", a__txt=b"\x00" * 100), tmp_path / "corpus")
    assert not list(tmp_path.glob("corpus*"))


def test_stdlib_has_its_modules_but_not_its_tests() -> None:
    source = python_stdlib()
    assert {"os.py", "json/decoder.py"} <= set(source.files)
    assert not any("test" in Path(name).parts or "site-packages" in name for name in source.files)


def test_tokens_decode_to_the_text_with_an_end_after_each_document(tmp_path: Path) -> None:
    root = write(tmp_path / "text", a__txt="naïve 中文 😀\tx\r\n", b__txt=TEXT)
    corpus = built(root, tmp_path / "corpus")
    assert decoded(corpus) == f"naïve 中文 😀\tx\r\n{END_OF_TEXT}{TEXT}{END_OF_TEXT}"


def test_text_that_spells_the_end_of_text_ends_no_document(tmp_path: Path) -> None:
    corpus = built(write(tmp_path / "text", a__txt=f"before {END_OF_TEXT} after"), tmp_path / "corpus")
    ids = corpus.tokens(0, corpus.index.num_tokens).tolist()
    assert ids.count(corpus.index.end_of_text) == corpus.index.num_documents == 1


def test_document_read_in_pieces_ends_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_source_module, "PIECE_CHARACTERS", 100)
    corpus = built(write(tmp_path / "text", a__txt=TEXT, b__txt="short"), tmp_path / "corpus")
    assert decoded(corpus) == f"{TEXT}{END_OF_TEXT}short{END_OF_TEXT}"


def test_vocabulary_never_exceeds_what_was_asked_for(tmp_path: Path) -> None:
    corpus = built(write(tmp_path / "text", a__txt=TEXT), tmp_path / "corpus", vocab_size=280)
    assert corpus.tokens(0, corpus.index.num_tokens).max() < corpus.index.vocab_size == 280


def test_build_is_deterministic(tmp_path: Path) -> None:
    root = write(tmp_path / "text", a__txt=TEXT, b__py=CODE)
    files = [
        {path.name: path.read_bytes() for path in built(root, tmp_path / name).directory.iterdir()}
        for name in ("one", "two")
    ]
    assert files[0] == files[1]


def test_tokens_read_across_shards(tmp_path: Path) -> None:
    root = write(tmp_path / "text", a__py=CODE)
    whole, cut = built(root, tmp_path / "whole"), built(root, tmp_path / "cut", shard_tokens=100)
    assert len(cut.index.shards) > 10
    assert {entry.nbytes for entry in cut.index.shards[:-1]} == {200}
    assert cut.tokens(0, cut.index.num_tokens).tolist() == whole.tokens(0, whole.index.num_tokens).tolist()
    assert cut.tokens(150, 420).tolist() == whole.tokens(150, 420).tolist()


def test_large_vocabulary_is_packed_in_four_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "UINT16_VOCAB_SIZE", 260)
    corpus = built(write(tmp_path / "text", a__txt=TEXT), tmp_path / "corpus")
    assert corpus.index.dtype == "<u4"
    assert decoded(corpus) == TEXT + END_OF_TEXT


def test_tokenizer_of_a_large_source_is_trained_on_an_even_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens_module, "SAMPLE_BYTES", 1000)
    files = {f"f{number:03d}__txt": f"{number:03d}" * 33 + "\n" for number in range(100)}
    sample = list(tokens_module.sample(text_source(write(tmp_path / "text", **files))))
    assert sum(map(len, sample)) in range(1000, 1101)
    assert [int(text[:3]) // 10 for text in sample] == list(range(10))


def test_bounded_sample_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "SAMPLE_BYTES", 1000)
    lines: list[str] = []
    source = text_source(write(tmp_path / "text", a__txt=TEXT))
    build_corpus(source, tmp_path / "corpus", 300, lines.append)
    assert any(line.startswith("tokenizer: trained on 1000 B sampled evenly") for line in lines)


def test_existing_corpus_is_reused(tmp_path: Path) -> None:
    root = write(tmp_path / "text", a__txt=TEXT)
    built(root, tmp_path / "corpus")
    before = (tmp_path / "corpus" / "index.json").stat().st_ino
    prepare_corpus(text_source(root), tmp_path / "corpus", 300, silent)
    assert (tmp_path / "corpus" / "index.json").stat().st_ino == before


def test_touched_but_equal_text_is_the_same_source(tmp_path: Path) -> None:
    root = write(tmp_path / "text", a__txt=TEXT)
    built(root, tmp_path / "corpus")
    os.utime(root / "a.txt", (1, 1))
    assert open_corpus(tmp_path / "corpus", text_source(root), 300).index.num_documents == 1


def changed_text(corpus: Path, text: Path) -> None:
    (text / "a.txt").write_text(TEXT.replace("fox", "cat"))


def another_file(corpus: Path, text: Path) -> None:
    (text / "b.txt").write_text(TEXT)


def changed_tokenizer(corpus: Path, text: Path) -> None:
    path = corpus / "tokenizer.json"
    path.write_text(path.read_text() + " ")


def lost_shard(corpus: Path, text: Path) -> None:
    (corpus / "tokens-00000.bin").unlink()


def short_shard(corpus: Path, text: Path) -> None:
    os.truncate(corpus / "tokens-00000.bin", 10)


def changed_index(corpus: Path, text: Path) -> None:
    path = corpus / "index.json"
    path.write_text(path.read_text().replace('"num_documents": 1', '"num_documents": 2'))


def lost_index(corpus: Path, text: Path) -> None:
    (corpus / "index.json").unlink()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (changed_text, "but its content has changed; restore the old data"),
        (another_file, "but the data is now .*; restore the old data"),
        (changed_tokenizer, "not the tokenizer that made the tokens"),
        (lost_shard, "found no file"),
        (short_shard, "found 10"),
        (changed_index, "expected the index of a corpus, found content with checksum"),
        (lost_index, "expected the index of a corpus, found .*No such file"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_corpus_that_is_not_as_it_was_built_is_rejected(
    tmp_path: Path, change: Callable[[Path, Path], None], sentence: str
) -> None:
    root = write(tmp_path / "text", a__txt=TEXT)
    built(root, tmp_path / "corpus")
    change(tmp_path / "corpus", root)
    with pytest.raises(UserError, match=sentence):
        prepare_corpus(text_source(root), tmp_path / "corpus", 300, silent)


def test_model_with_a_smaller_vocabulary_is_rejected_with_both_numbers(tmp_path: Path) -> None:
    root = write(tmp_path / "text", a__py=CODE)
    corpus = built(root, tmp_path / "corpus")
    assert corpus.index.vocab_size == 300
    with pytest.raises(UserError, match="has 300 tokens, but the model's vocabSize is 299"):
        open_corpus(tmp_path / "corpus", text_source(root), 299)


def test_vocabulary_too_small_for_bytes_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"vocabSize = 256: .* at least 257"):
        built(write(tmp_path / "text", a__txt=TEXT), tmp_path / "corpus", vocab_size=256)


def test_child_process_builds_what_this_process_would(tmp_path: Path) -> None:
    root = write(tmp_path / "text", a__py=CODE)
    lines: list[str] = []
    child = prepare_corpus(text_source(root), tmp_path / "child", 300, lines.append)
    assert child.fingerprint == built(root, tmp_path / "here").fingerprint
    assert lines[0].startswith("corpus: building from ")
    assert "tokenizer: choosing tokens" in lines
    assert "vocabulary of 300" in lines[-1]


def test_sentence_of_the_child_process_is_raised_here(tmp_path: Path) -> None:
    root = write(tmp_path / "text", a__txt=TEXT)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="corpus not built: File exists"):
        prepare_corpus(text_source(root), tmp_path / "file" / "corpus", 300, silent)


class Killed(BaseException):
    """Passes every `except` of the build, as a kill does."""


def test_kill_at_every_operation_leaves_nothing_that_is_believed(tmp_path: Path) -> None:
    source = text_source(write(tmp_path / "text", a__txt=TEXT))
    numbers: list[int] = []
    build_corpus(source, tmp_path / "count", 300, silent, files=CountingFiles(numbers.append))
    for operation in numbers:
        directory = tmp_path / str(operation) / "corpus"

        def kill(number: int, at: int = operation) -> None:
            if number >= at:
                raise Killed

        with pytest.raises(Killed):
            build_corpus(source, directory, 300, silent, files=CountingFiles(kill))
        build_corpus(source, directory, 300, silent)
        assert open_corpus(directory, source, 300).index.num_documents == 1
        assert [path.name for path in directory.parent.iterdir()] == ["corpus"]


def test_full_disk_at_every_operation_is_a_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    source = text_source(write(tmp_path / "text", a__txt=TEXT))
    numbers: list[int] = []
    build_corpus(source, tmp_path / "count", 300, silent, files=CountingFiles(numbers.append))
    for operation in numbers[:-1]:  # the last one follows the rename
        directory = tmp_path / str(operation) / "corpus"
        with pytest.raises(UserError, match="corpus not built: No space left on device"):
            build_corpus(source, directory, 300, silent, files=full_at(operation))
        assert not list(directory.parent.iterdir())


def test_slower_of_two_builders_leaves_the_faster_ones_corpus(tmp_path: Path) -> None:
    root = write(tmp_path / "text", a__txt=TEXT)
    built(root, tmp_path / "corpus")
    before = (tmp_path / "corpus" / "index.json").stat().st_ino
    built(root, tmp_path / "corpus")
    assert (tmp_path / "corpus" / "index.json").stat().st_ino == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "text"]


def test_slower_corpus_builder_keeps_the_corpus_of_the_faster_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child of a killed attempt may still build while the next attempt's child does."""
    root = write(tmp_path / "text", a__txt=TEXT)
    train = tokens_module.train_tokenizer

    def overtaken(*arguments: Any) -> Tokenizer:
        monkeypatch.setattr(tokens_module, "train_tokenizer", train)
        built(root, tmp_path / "corpus")
        return train(*arguments)

    monkeypatch.setattr(tokens_module, "train_tokenizer", overtaken)
    assert decoded(built(root, tmp_path / "corpus")) == TEXT + END_OF_TEXT
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "text"]


# --- given tokenizers, and the mask -----------------------------------------------------------------------------------


def model_directory(root: Path, config: dict[str, Any] | None = None) -> Path:
    """A directory with a tokenizer of its own: words of TEXT, none of our special tokens."""
    root.mkdir()
    vocabulary = {"[PAD]": 0, "[SEP]": 1, "[MASK]": 2, "</s>": 3, "[UNK]": 4}
    vocabulary |= {word: 10 + number for number, word in enumerate(sorted(set(TEXT.split())))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["[PAD]", "[SEP]", "[MASK]", "</s>"])
    tokenizer.enable_truncation(3)
    tokenizer.save(str(root / "tokenizer.json"))
    if config is not None:
        (root / "tokenizer_config.json").write_text(json.dumps(config))
    return root


@pytest.mark.parametrize(
    ("config", "end_of_text"),
    [(None, 3), ({"sep_token": "[SEP]"}, 1), ({"eos_token": {"content": "[PAD]"}, "sep_token": "[SEP]"}, 0)],
)
def test_a_given_tokenizer_is_used_as_it_is(tmp_path: Path, config: dict[str, Any] | None, end_of_text: int) -> None:
    """Nothing is cut, whatever it was set to; a document ends with the token that its configuration names."""
    given = model_directory(tmp_path / "model", config)
    source = text_source(write(tmp_path / "text", a__txt="one word"))
    build_corpus(source, tmp_path / "corpus", 1000, silent, TokenizerRecipe(model_directory=given))
    corpus = open_corpus(tmp_path / "corpus", source, 1000)
    assert corpus.tokenizer_path.read_bytes() == (given / "tokenizer.json").read_bytes()
    assert corpus.index.end_of_text == corpus.tokens(0, 100)[-1] == end_of_text
    assert corpus.index.mask == 2
    assert corpus.special_tokens["mask_token"] == "[MASK]"


def test_a_child_builds_with_a_given_tokenizer_too(tmp_path: Path) -> None:
    given = model_directory(tmp_path / "model")
    source = text_source(write(tmp_path / "text", a__txt=TEXT))
    recipe = TokenizerRecipe(model_directory=given)
    child = prepare_corpus(source, tmp_path / "child", 1000, silent, recipe)
    build_corpus(source, tmp_path / "here", 1000, silent, recipe)
    assert child.fingerprint == open_corpus(tmp_path / "here", source, 1000).fingerprint


def test_a_model_without_a_tokenizer_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    source = text_source(write(tmp_path / "text", a__txt=TEXT))
    with pytest.raises(
        UserError, match=r"tokenizer\.json: No such file .* that the weights in this directory were trained with"
    ):
        build_corpus(source, tmp_path / "corpus", 1000, silent, TokenizerRecipe(model_directory=tmp_path / "model"))


def test_a_tokenizer_larger_than_the_model_is_rejected(tmp_path: Path) -> None:
    source = text_source(write(tmp_path / "text", a__txt=TEXT))
    recipe = TokenizerRecipe(model_directory=model_directory(tmp_path / "model"))
    with pytest.raises(UserError, match="the model's vocabSize is 8"):
        prepare_corpus(source, tmp_path / "corpus", 8, silent, recipe)


def test_a_trained_tokenizer_has_a_mask_when_asked_for(tmp_path: Path) -> None:
    source = text_source(write(tmp_path / "text", a__txt=TEXT + " [MASK]"))
    build_corpus(source, tmp_path / "corpus", 300, silent, TokenizerRecipe(has_mask=True))
    corpus = open_corpus(tmp_path / "corpus", source, 300)
    assert corpus.special_tokens == {"eos_token": END_OF_TEXT, "mask_token": "[MASK]"}
    assert corpus.index.mask not in corpus.tokens(0, 10_000), "text that spells it out stays text"


# --- text to evaluate on ----------------------------------------------------------------------------------------------


def with_evaluation(root: Path, recipe: TokenizerRecipe = TRAINED) -> Corpus:
    """Of root/text and root/held, below root/corpus."""
    texts = [text_source(root / name) for name in ("text", "held")]
    return prepare_corpus(texts[0], root / "corpus", 1000, silent, recipe, texts[1])


@pytest.mark.parametrize("kind", ["trained", "with a mask", "given"])
def test_evaluation_text_has_the_tokens_of_the_trainings_tokenizer(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "text", a__txt=TEXT)
    write(tmp_path / "held", a__txt=TEXT)
    given = model_directory(tmp_path / "model", {"eos_token": "[PAD]"}) if kind == "given" else None
    corpus = with_evaluation(tmp_path, TokenizerRecipe(kind == "with a mask", given))
    assert corpus.evaluation is not None
    assert corpus.evaluation.fingerprint == corpus.fingerprint
    assert (corpus.evaluation.index.end_of_text, corpus.evaluation.index.mask) == (
        corpus.index.end_of_text, corpus.index.mask,
    )  # fmt: skip


def test_evaluation_text_neither_trains_nor_makes_the_tokenizer(tmp_path: Path) -> None:
    write(tmp_path / "text", a__txt=TEXT)
    write(tmp_path / "held", a__txt=CODE)
    corpus, alone = with_evaluation(tmp_path), built(tmp_path / "text", tmp_path / "alone", vocab_size=1000)
    assert (corpus.fingerprint, corpus.index.tokenizer_xxh3) == (alone.fingerprint, alone.index.tokenizer_xxh3)
    assert corpus.evaluation is not None and decoded(corpus.evaluation) == CODE + END_OF_TEXT


def test_evaluation_text_that_has_changed_is_rejected(tmp_path: Path) -> None:
    write(tmp_path / "text", a__txt=TEXT)
    write(tmp_path / "held", a__txt=TEXT)
    with_evaluation(tmp_path)
    (tmp_path / "held" / "a.txt").write_text(TEXT.replace("fox", "cat"))
    with pytest.raises(UserError, match=r"corpus/evaluation: built from .*, but its content has changed"):
        with_evaluation(tmp_path)


def test_evaluation_text_in_tokens_of_another_tokenizer_is_rejected(tmp_path: Path) -> None:
    write(tmp_path / "text", a__txt=TEXT)
    write(tmp_path / "held", a__txt=TEXT)
    with_evaluation(tmp_path)
    (tmp_path / "corpus").rename(tmp_path / "old")
    (tmp_path / "text" / "a.txt").write_text(CODE)
    built(tmp_path / "text", tmp_path / "corpus")
    (tmp_path / "old" / "evaluation").rename(tmp_path / "corpus" / "evaluation")
    with pytest.raises(UserError, match="corpus/evaluation: built with another tokenizer"):
        with_evaluation(tmp_path)


def test_a_long_build_says_how_far_it_is_now_and_then() -> None:
    lines: list[str] = []
    times = iter([0.0, 0.0, 1.0, 5.0, 5.0, 6.0])
    told = ProgressPrinter(lines.append, "encoding", 3 * 1024, lambda: next(times))
    for _ in range(4):
        told.more("x" * 1024)
    assert lines == ["encoding, 0 B of 3.00 KiB", "encoding, 2.00 KiB of 3.00 KiB"]
