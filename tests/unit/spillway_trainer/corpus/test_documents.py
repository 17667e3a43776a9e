"""Entry points of data: the corpus that their documents make as files, or an error that says what they did."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cases import user_data
from cases.chats import UNMARKED, VOCABULARY, conversations, model_directory, write_lines
from harness.places import TESTS
from spillway.api.model import Evaluation
from spillway.errors import UserError
from spillway_trainer.corpus import documents
from spillway_trainer.corpus import tokens as tokens_module
from spillway_trainer.corpus.data import TokenBatches
from spillway_trainer.corpus.objective import IGNORED_LABEL, TrainingObjective
from spillway_trainer.corpus.text_source import TextSource, entry_point, python_stdlib, text_source
from spillway_trainer.corpus.tokens import TRAINED, Corpus, TokenizerRecipe, build_corpus, open_corpus, prepare_corpus
from spillway_trainer.ranks import World
from spillway_trainer.trainer import LoopSettings, RunProgress, next_micro_batches, samples_of_step

TEXTS, CHATS, TOKENS = (f"cases.user_data:{name}" for name in ("texts", "Chats", "tokens"))


def silent(_line: str) -> None:
    pass


def recipe_in(root: Path, template: str = UNMARKED["chatml"]) -> TokenizerRecipe:
    return TokenizerRecipe(model_directory=model_directory(root / "model", "chatml", template))


def built(directory: Path, source: TextSource, recipe: TokenizerRecipe = TRAINED) -> Corpus:
    build_corpus(source, directory, VOCABULARY, silent, recipe)
    return open_corpus(directory, source, VOCABULARY, recipe)


def test_texts_make_the_corpus_of_their_lines(tmp_path: Path) -> None:
    given = [one if isinstance(one, dict) else {"text": one} for one in user_data.texts()]
    lines = write_lines(tmp_path / "lines.jsonl", [{"text": one["text"]} for one in given])
    expected, found = built(tmp_path / "a", text_source(lines)), built(tmp_path / "b", entry_point(TEXTS))
    assert found.fingerprint == expected.fingerprint
    assert found.index.num_documents == user_data.NUM_DOCUMENTS
    assert found.tokenizer_path.read_bytes() == expected.tokenizer_path.read_bytes()
    assert found.index.source == TEXTS
    assert {*(one.name for one in (tmp_path / "a").iterdir())} == {*(one.name for one in (tmp_path / "b").iterdir())}


def test_messages_make_the_corpus_of_their_lines(tmp_path: Path) -> None:
    chats = [{"messages": chat} for chat in conversations(user_data.NUM_DOCUMENTS)]
    source = text_source(write_lines(tmp_path / "chats.jsonl", chats), "spec.data.chat")
    recipe = recipe_in(tmp_path)
    expected, found = built(tmp_path / "a", source, recipe), built(tmp_path / "b", entry_point(CHATS), recipe)
    assert found.fingerprint == expected.fingerprint


def test_tokens_and_labels_are_those_of_the_function(tmp_path: Path) -> None:
    corpus = built(tmp_path / "corpus", entry_point(TOKENS), recipe_in(tmp_path))
    given: Any = user_data.tokens()
    batch = TokenBatches(corpus, 64, seed=0).batch(range(len(given)))
    expected = []
    for one in given:
        tokens, labels = np.array(one["input_ids"]), np.array(one.get("labels", one["input_ids"]))
        padding = 65 - len(tokens)
        row = [*tokens[:-1].tolist(), *[corpus.index.end_of_text] * padding]
        expected.append((row, [*labels[1:].tolist(), *[IGNORED_LABEL] * padding]))
    assert sorted(zip(batch.tokens_BT.tolist(), batch.labels_BT.tolist(), strict=True)) == sorted(expected)
    assert batch.num_unmasked == sum(label != IGNORED_LABEL for _, labels in expected for label in labels)


def test_tokens_come_from_files_of_chats_too(tmp_path: Path) -> None:
    lines: Any = [{name: np.array(given).tolist() for name, given in one.items()} for one in user_data.tokens()]  # type: ignore[attr-defined]
    source = text_source(write_lines(tmp_path / "tokens.jsonl", lines), "spec.data.chat")
    recipe = recipe_in(tmp_path)
    assert (
        built(tmp_path / "a", source, recipe).fingerprint
        == built(tmp_path / "b", entry_point(TOKENS), recipe).fingerprint
    )


def test_a_corpus_is_used_again_without_a_call_and_not_for_another_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_in(tmp_path)
    expected = built(tmp_path / "corpus", entry_point(CHATS), recipe).fingerprint
    monkeypatch.setattr(documents, "function_of", None)
    again = prepare_corpus(entry_point(CHATS), tmp_path / "corpus", VOCABULARY, silent, recipe)
    assert again.fingerprint == expected
    with pytest.raises(UserError, match=r"but the data is now cases\.user_data:tokens"):
        open_corpus(tmp_path / "corpus", entry_point(TOKENS), VOCABULARY, recipe)
    with pytest.raises(UserError, match="with another chat template"):
        open_corpus(tmp_path / "corpus", entry_point(CHATS), VOCABULARY, recipe_in(tmp_path, UNMARKED["llama3"]))


def test_messages_and_tokens_need_a_model_that_can_learn_them(tmp_path: Path) -> None:
    for name in (CHATS, TOKENS):
        with pytest.raises(
            UserError, match=r"chat and tokens need the tokenizer of a model directory; set spec\.model\.source"
        ):
            build_corpus(entry_point(name), tmp_path / "corpus", VOCABULARY, silent)
    recipe = recipe_in(tmp_path)
    corpus = built(tmp_path / "corpus", entry_point(CHATS), recipe)
    with pytest.raises(UserError, match="a model that predicts each token from those before it"):
        TokenBatches(corpus, 64, 0, TrainingObjective.PREFIX)
    held = text_source(write_lines(tmp_path / "held.jsonl", [{"text": "words"}]), "spec.data.evaluation.text")
    with pytest.raises(UserError, match=r"spec\.data\.evaluation\.text: chats are evaluated on chats"):
        prepare_corpus(entry_point(CHATS), tmp_path / "corpus", VOCABULARY, silent, recipe, held)


BAD = {
    "absent": "cases.user_data has no function absent",
    "NOT_CALLABLE": "cases.user_data has no function NOT_CALLABLE",
    "raises": "raised FileNotFoundError after 1 document: no such shard",
    "quits": "raised SystemExit after 1 document: enough",
    "nothing": "returned no document",
    "a_string": "returned str; the function must return an iterable or a sequence, each item a string",
    "splits": "returned dict of train, test: return one of them; the function must return",
    "numbers": "document 1: must be a string, .*; found int 3",
    "mixed": "document 2 is chat, but the documents before it are not",
    "no_json": "document 1: cannot be written as JSON: ",
    "no_response": "document 2: messages: no message has the role assistant",
    "large_token": r"document 2: input_ids\[1\] is 1000000, but the tokenizer of spec.model.source has only \d+ tokens",
    "float_token": r"document 1: input_ids\[0\] is 1\.0, of type float; tokens must be whole numbers",
    "batch_of_tokens": r"document 1: input_ids\[0\] is \[1, 2, 3\]: a nested list; give the tokens",
    "wrong_label": r"document 1: labels\[1\] is 1; it must be 2 \(input_ids\[1\]\), or -100",
    "short_labels": "document 1: labels: there are 1 labels for 2 input_ids",
    "no_label": "document 1: labels: no token after the first is a label",
}


@pytest.mark.parametrize("name", BAD)
def test_what_a_function_does_wrong_is_named_and_nothing_is_left(tmp_path: Path, name: str) -> None:
    recipe = recipe_in(tmp_path)
    with pytest.raises(UserError, match=rf"^spec\.data\.entrypoint = cases\.user_data:{name}: {BAD[name]}"):
        build_corpus(entry_point(f"cases.user_data:{name}"), tmp_path / "out" / "corpus", VOCABULARY, silent, recipe)
    assert [*(tmp_path / "out").iterdir()] == []


ENDS = {
    "hangs": "no document in 600 s; the log says where it hangs",
    "eats": r"used more than 2\.00 GiB of memory; yield documents one by one",
    "dies": "killed, most likely because it used too much memory",
    "exits": "ended the process with code 7",
    "leaves": "ended the process with code 0",
    "leaves_as_an_error": "ended the process with code 64",
    "speaks_of_a_timeout": "ended the process with code 3",
    "raises": "raised FileNotFoundError",
}


@pytest.mark.parametrize("name", ENDS)
def test_a_function_that_does_not_return_ends_its_own_process_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    told: list[str] = []
    source = entry_point(f"cases.user_data:{name}")
    with pytest.raises(UserError, match=rf"^spec\.data\.entrypoint = cases\.user_data:{name}: {ENDS[name]}"):
        prepare_corpus(source, tmp_path / "out" / "corpus", VOCABULARY, told.append)
    assert [*(tmp_path / "out").iterdir()] == []
    if name in ("hangs", "raises"):
        assert any(f"in {name}" in line for line in told), "the log says where"


def test_what_a_function_has_started_ends_with_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    corpus = prepare_corpus(entry_point("cases.user_data:starts_others"), tmp_path / "corpus", VOCABULARY, silent)
    assert corpus.index.num_documents == 400


def test_an_error_of_the_module_itself_is_told_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_data.py").write_text("import json\nX = {}['missing']\n")
    with pytest.raises(UserError, match=r"cannot import broken_data: KeyError: 'missing' \(.*broken_data.py, line 2"):
        build_corpus(entry_point("broken_data:load"), tmp_path / "corpus", VOCABULARY, silent)


def test_a_bound_on_memory_that_is_there_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1 << 40, 1 << 40)]
    monkeypatch.setattr(documents, "ENTRY_POINT_MEMORY_BYTES", 1 << 41)
    monkeypatch.setattr(documents.resource, "getrlimit", lambda _kind: limits[-1])
    monkeypatch.setattr(documents.resource, "setrlimit", lambda _kind, given: limits.append(given))
    with documents._bounded():
        pass
    assert limits == [(1 << 40, 1 << 40)] * 3


def test_the_disk_is_to_blame_where_documents_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_given: Any) -> Any:
        raise OSError(28, "No space left on device", "documents.jsonl")

    monkeypatch.setattr(documents, "_line", full)
    with pytest.raises(tokens_module.CorpusNotWritten, match="corpus not built: No space left"):
        build_corpus(entry_point(TEXTS), tmp_path / "corpus", VOCABULARY, silent)


# --- resume across rank counts ----------------------------------------------------------------------------------------

SEQUENCE, GLOBAL_BATCH, MICRO_BATCH = 32, 8, 2
Rows = Counter[tuple[tuple[int, ...], tuple[int, ...]]]


def test_a_function_that_never_ends_leaves_as_much_disk_as_it_fills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "SAY_SECONDS", 0.0)
    monkeypatch.setattr(documents.shutil, "disk_usage", lambda _: SimpleNamespace(free=200_000))
    with pytest.raises(UserError, match=r"so far, 19[56] KiB, but .* has only 195 KiB free for .*; return fewer"):
        documents.written_documents(entry_point("cases.user_data:endless"), tmp_path, silent)


def megatron(root: Path) -> Path:
    """An .idx and its .bin, as `datasets` of Megatron-LM have them: 2,000 tokens of two bytes in one document."""
    tokens = np.arange(2000, dtype="<u2") % 60
    (root / "a.bin").write_bytes(tokens.tobytes())
    head = b"MMIDIDX\0\0" + np.array(1, "<u8").tobytes() + b"\x08" + np.array([1, 2], "<u8").tobytes()
    sizes = np.array(2000, "<i4").tobytes() + np.array([0, 0, 1], "<i8").tobytes()
    (root / "a.idx").write_bytes(head + sizes)
    return root / "a.idx"


def corpus_of(kind: str, root: Path) -> Corpus:
    chats: list[Any] = [{"messages": chat} for chat in conversations(37)]
    recipe = recipe_in(root)
    if kind == "text":
        return built(root / "corpus", text_source(write_lines(root / "a.jsonl", [{"text": "yes no " * 999}])), recipe)
    if kind == "chat":
        return built(root / "corpus", text_source(write_lines(root / "a.jsonl", chats), "spec.data.chat"), recipe)
    if kind == "tokens":
        return built(root / "corpus", text_source(megatron(root), "spec.data.tokens"), recipe)
    if kind == "builtin":
        return built(root / "corpus", python_stdlib(), recipe)
    return built(root / "corpus", entry_point(kind), recipe)


def rows_of_step(corpus: Corpus, world: int, progress: RunProgress) -> Rows:
    """What all ranks of a new attempt read in its next step."""
    settings = LoopSettings(99, MICRO_BATCH, GLOBAL_BATCH // MICRO_BATCH // world, None, True, 1, 0)
    found: Rows = Counter()
    for rank in range(world):
        batches = TokenBatches(corpus, SEQUENCE, 0, evaluation=Evaluation(fraction=0.1))
        run: Any = SimpleNamespace(
            ranks=SimpleNamespace(world=World(rank=rank, size=world)), batches=batches, device=torch.device("cpu")
        )
        samples = samples_of_step(settings, run.ranks.world, progress)
        for batch in next_micro_batches(run, settings, samples).values():
            rows = zip(batch.tokens_BT.tolist(), batch.labels_BT.tolist(), strict=True)
            found.update((tuple(tokens), tuple(labels)) for tokens, labels in rows)
    progress.samples = samples.stop
    return found


def worlds(num_steps: int) -> Iterator[int]:
    yield from ((1, 2, 1, 4)[step % 4] for step in range(num_steps))


@pytest.mark.parametrize("kind", ["text", "chat", "tokens", "builtin", TEXTS, CHATS, TOKENS])
def test_resume_across_rank_counts_reads_the_samples_of_the_uninterrupted_run(tmp_path: Path, kind: str) -> None:
    """Each step by another number of ranks, some of them twice, because the attempt ended before its commit."""
    corpus = corpus_of(kind, tmp_path)
    per_pass = TokenBatches(corpus, SEQUENCE, 0, evaluation=Evaluation(fraction=0.1)).num_sequences
    num_steps = min(40, 2 * math.ceil(per_pass / GLOBAL_BATCH) + 1)
    whole, resumed = RunProgress(), RunProgress()
    expected = [rows_of_step(corpus, 1, whole) for _ in range(num_steps)]
    found: list[Rows] = []
    for step, world in enumerate(worlds(num_steps)):
        if step % 3 == 2:
            rows_of_step(corpus, world, RunProgress(samples=resumed.samples))  # lost
        found.append(rows_of_step(corpus, world, resumed))
    assert sum(found, Counter()) == sum(expected, Counter())
    assert found == expected
    assert whole.samples == resumed.samples == num_steps * GLOBAL_BATCH
