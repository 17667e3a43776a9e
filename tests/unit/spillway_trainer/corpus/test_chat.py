"""Chats: the tokens and labels that transformers and TRL make, or an error with the place."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from cases.chats import MARKED, NAMED, UNMARKED, VOCABULARY, conversations, model_directory, write_lines
from spillway.api.model import Evaluation
from spillway.errors import UserError
from spillway.units import format_count
from spillway_trainer.corpus.chat import ChatEncoder, ChatTemplate
from spillway_trainer.corpus.data import TokenBatches
from spillway_trainer.corpus.objective import IGNORED_LABEL
from spillway_trainer.corpus.text_source import text_source
from spillway_trainer.corpus.tokens import (
    Corpus,
    TokenizerRecipe,
    build_corpus,
    given_tokenizer,
    open_corpus,
    prepare_corpus,
)

Tokens = list[tuple[list[int], list[int]]]
NUM_CONVERSATIONS = 1000


def silent(_line: str) -> None:
    pass


def ours(root: Path, family: str, template: str | None, lines: list[Any], **options: bool) -> Tokens:
    """Tokens and mask of each line."""
    directory = model_directory(root / "model", family, template, **options)
    source = text_source(write_lines(root / "chats.jsonl", lines), "spec.data.chat")
    given = given_tokenizer(directory, VOCABULARY)
    encoder = ChatEncoder(ChatTemplate.of(directory), given.file, given.end_of_text)
    documents = [tokens.tolist() for tokens in encoder.encoded(source, "<u2", silent)]
    mask = np.unpackbits(encoder.take_mask(sum(map(len, documents)))).tolist()
    stops = [*itertools.accumulate(map(len, documents))]
    return [(tokens, mask[stop - len(tokens) : stop]) for tokens, stop in zip(documents, stops, strict=True)]


def theirs(root: Path, family: str) -> PreTrainedTokenizerFast:
    """transformers' own tokenizer of that directory, with the marked template."""
    names = {name: one["content"] if isinstance(one, dict) else one for name, one in NAMED[family].items()}
    made = PreTrainedTokenizerFast(tokenizer_file=str(root / "model" / "tokenizer.json"), **names)
    made.chat_template = MARKED[family]
    return made


@pytest.mark.parametrize("family", MARKED)
@pytest.mark.parametrize("templates", [MARKED, UNMARKED], ids=["marked", "unmarked"])
def test_tokens_and_masks_are_those_of_transformers(tmp_path: Path, family: str, templates: dict[str, str]) -> None:
    chats = conversations(NUM_CONVERSATIONS)
    found = ours(tmp_path, family, templates[family], [{"messages": chat} for chat in chats])
    tokenizer = theirs(tmp_path, family)
    expected = [
        tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        for chat in chats
    ]
    assert found == [(one["input_ids"], one["assistant_masks"]) for one in expected]


@pytest.mark.parametrize("family", MARKED)
def test_completions_of_messages_have_the_mask_of_trl(tmp_path: Path, family: str) -> None:
    """TRL: 0 for each token of the prompt with the prompt for a response, 1 for the others."""
    pairs = [{"prompt": chat[:-1], "completion": chat[-1:]} for chat in conversations(200, seed=1)]
    found = ours(tmp_path, family, UNMARKED[family], pairs)
    tokenizer = theirs(tmp_path, family)
    for (tokens, mask), pair in zip(found, pairs, strict=True):
        prompt = tokenizer.apply_chat_template(pair["prompt"], add_generation_prompt=True)["input_ids"]
        whole = tokenizer.apply_chat_template(pair["prompt"] + pair["completion"])["input_ids"]
        assert tokens == whole
        if whole[: len(prompt)] == prompt:  # else TRL warns: a token has characters of both, and is a label here
            assert mask == [0] * len(prompt) + [1] * (len(whole) - len(prompt))


@pytest.mark.parametrize("family", MARKED)
def test_completions_of_text_have_the_tokens_and_the_mask_of_trl(tmp_path: Path, family: str) -> None:
    """No template is needed; a model's <s> comes first, and the end of text is the last label."""
    pairs = [{"prompt": f"{one}\n", "completion": f"is {one} 🙂"} for one in ("yes", "don't", "日本語", "")]
    found = ours(tmp_path, family, None, pairs)
    tokenizer = theirs(tmp_path, family)
    for (tokens, mask), pair in zip(found, pairs, strict=True):
        prompt = tokenizer(pair["prompt"])["input_ids"]
        whole = tokenizer(pair["prompt"] + pair["completion"] + tokenizer.eos_token)["input_ids"]
        assert tokens == whole
        assert mask == [0] * len(prompt) + [1] * (len(whole) - len(prompt))


def test_a_token_with_characters_of_prompt_and_completion_is_a_label(tmp_path: Path) -> None:
    ((tokens, mask),) = ours(tmp_path, "chatml", None, [{"prompt": "the quick ", "completion": "brown"}])
    tokenizer = theirs(tmp_path, "chatml")
    labels = [token for token, is_label in zip(tokens, mask, strict=True) if is_label]
    assert tokenizer.decode(labels) == " brown<|im_end|>"


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_every_token_of_the_first_and_the_last_character_is_a_label(tmp_path: Path, trim_offsets: bool) -> None:
    """transformers' mask has only the first token of the last character, and none after white space that a tokenizer
    leaves out of its offsets."""
    template = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    template += "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    chat = [{"role": "user", "content": "yes"}, {"role": "assistant", "content": " \n🙂"}]
    ((tokens, mask),) = ours(tmp_path, "chatml", template, [{"messages": chat}], trim_offsets=trim_offsets)
    labels = [token for token, is_label in zip(tokens, mask, strict=True) if is_label]
    assert theirs(tmp_path, "chatml").decode(labels) == " \n🙂"


def test_tools_and_further_arguments_reach_the_template(tmp_path: Path) -> None:
    template = UNMARKED["chatml"] + "{% if think %}T{% endif %}{% for tool in tools or [] %}{{ tool.name }}{% endfor %}"
    chat = [{"role": "user", "content": "yes"}, {"role": "assistant", "content": "no", "rejection": None}]
    line = {"messages": chat, "tools": [{"name": "f"}], "chat_template_kwargs": {"think": True}}
    with pytest.raises(UserError, match=r"messages\[1\]: the chat template renders .* difference on, 'Tf' instead of "):
        ours(tmp_path, "chatml", template, [line])
    marked = template.replace(UNMARKED["chatml"], MARKED["chatml"])
    ((tokens, _),) = ours(tmp_path, "chatml", marked, [line])
    assert theirs(tmp_path, "chatml").decode(tokens).endswith("no<|im_end|>\nTf")


def test_no_prompt_for_a_response_follows_the_last_one(tmp_path: Path) -> None:
    line = {"messages": [USER, ASSISTANT]}
    asked = line | {"chat_template_kwargs": {"add_generation_prompt": True}}
    plain, same = (ours(tmp_path, "chatml", UNMARKED["chatml"], [one]) for one in (line, asked))
    assert same == plain


def test_a_template_that_is_no_string_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": [{"name": "default", "template": 3}]}))
    with pytest.raises(UserError, match="cannot read the chat template: TypeError: template default is not a string"):
        ChatTemplate.of(tmp_path)


USER, ASSISTANT = {"role": "user", "content": "yes"}, {"role": "assistant", "content": "no"}
GOOD = {"messages": [USER, ASSISTANT]}
FORGETS = "{% for m in messages if m.role == 'user' or m == messages[-1] %}{{ m.content }}\n{% endfor %}"
"""As templates that take the reasoning out of earlier responses."""
PLAIN = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
BAD: dict[str, tuple[str | None, Any, str]] = {
    "no JSON": (MARKED["gemma"], "{nothing", r"not valid JSON: .*each line must be \{\"messages\""),
    "no UTF-8": (MARKED["gemma"], b"\xff\xfe{".decode("latin-1"), "not valid JSON"),
    "no object": (MARKED["gemma"], "7", "found int"),
    "other fields": (MARKED["gemma"], {"text": "yes", "id": 1}, "found text, id"),
    "half a pair": (MARKED["gemma"], {"prompt": "yes", "completion": [ASSISTANT]}, "found prompt, completion"),
    "a message of text": (MARKED["gemma"], {"messages": ["yes"]}, r"messages\[0\]: must be .*found yes"),
    "a message without role": (MARKED["gemma"], {"messages": [USER, {"content": "no"}]}, r"messages\[1\]: must be"),
    "a nested line": (MARKED["gemma"], '{"messages": ' + 100_000 * "[", "JSON is nested too deeply"),
    "a template of nothing": ("{# no text #}", GOOD, "no message of the assistant is found; correct the template of"),
    "marks in a comment": ("{# {% generation %} #}yes", GOOD, "no message of the assistant is found"),
    "no message": (MARKED["gemma"], {"messages": []}, "messages: is empty"),
    "no response": (UNMARKED["chatml"], {"messages": [USER]}, "role assistant, only user, so"),
    "no marked response": (MARKED["chatml"], {"messages": [USER]}, "role assistant, only user, so"),
    "order": (MARKED["gemma"], {"messages": [USER, USER, ASSISTANT]}, "model: Conversation roles must alternate"),
    "system": (MARKED["gemma"], {"messages": [{"role": "system"}, USER]}, "model: System role not supported"),
    "first": (UNMARKED["gemma"], {"messages": [ASSISTANT]}, "model: Conversation roles must alternate"),
    "alone": (FORGETS + "{{ messages[1].content }}", GOOD, r"messages\[1\]: .*mark responses .* {% gen"),
    "forgets": (FORGETS, {"messages": [*GOOD["messages"], USER, USER | {"role": "assistant"}]}, r"messages.1.: .*'no"),
    "no content": (MARKED["chatml"], {"messages": [USER, {"role": "assistant"}]}, "rejected by the chat template of"),
    "bad template": ("{% if %}", GOOD, "rejected by the chat template of .*model"),
    "no template": (None, GOOD, "messages need a chat template, and .*model has none"),
    "special": (MARKED["gemma"], {"messages": [USER, {"role": "assistant", "content": "a<bos>"}]},
                r"messages\[1\]: contains the special token <bos>"),
    "special tool": (MARKED["gemma"], GOOD | {"tools": [{"f": {"<eos>": 1}}]}, r"tools\[0\]: contains .* <eos>"),
    "no arguments": (MARKED["gemma"], GOOD | {"chat_template_kwargs": 7}, "cannot be rendered by .*model: TypeError"),
    "special text": (None, {"prompt": "a", "completion": "b<|im_end|>"}, r"completion: contains .* <\|im_end\|>"),
    "no token": (None, {"prompt": "", "completion": ""}, "the response is empty"),
    "other roles": (PLAIN, {"messages": [USER | {"role": "human"}, USER | {"role": "gpt"}]},
                    "messages: no message has the role assistant, only human, gpt"),
    "parts": (PLAIN, {"messages": [USER, ASSISTANT | {"content": [{"type": "text", "text": "no"}]}]},
              r"messages\[1\]: its content is a list, which the chat template of .* writes as code"),
    "a short mask": (None, {"input_ids": [7, 8], "completion_mask": [1]}, "completion_mask: must be a list with "),
    "a hole": (None, {"input_ids": [7, 8, 9], "attention_mask": [1, 0, 1]}, "attention_mask: has a 0 between its ones"),
    "all padding": (None, {"input_ids": [7, 8], "attention_mask": [0, 0]}, "no token after the first is a label"),
}  # fmt: skip


NEEDS_NO_TEMPLATE = ("bad template", "alone", "a template of nothing", "marks in a comment")
"""The good line before the bad one of these is a prompt with its completion."""


@pytest.mark.parametrize("case", BAD)
def test_a_bad_line_is_rejected_with_its_place_and_leaves_nothing(tmp_path: Path, case: str) -> None:
    template, line, sentence = BAD[case]
    directory = model_directory(tmp_path / "model", "gemma" if template else "chatml", template)
    good: Any = GOOD if template and case not in NEEDS_NO_TEMPLATE else {"prompt": "a", "completion": "b"}
    path = write_lines(tmp_path / "chats" / "a.jsonl", [good, "", line])
    if case == "no UTF-8":
        path.write_bytes(path.read_text().encode("latin-1"))
    source = text_source(tmp_path / "chats", "spec.data.chat")
    recipe = TokenizerRecipe(model_directory=directory)
    with pytest.raises(UserError, match=rf"a\.jsonl:3: .*(?:{sentence})"):
        build_corpus(source, tmp_path / "out" / "corpus", VOCABULARY, silent, recipe)
    assert not any((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("fields", "tokens", "labels"),
    [
        ({"attention_mask": [0, 1, 1, 1, 0]}, [8, 9, 10], [1, 1, 1]),
        ({"completion_mask": [0, 0, 1, True, 0]}, [7, 8, 9, 10, 11], [0, 0, 1, 1, 0]),
        ({"assistant_masks": [0, 1, 0, 1, 0], "attention_mask": [1, 1, 1, 1, 0]}, [7, 8, 9, 10], [0, 1, 0, 1]),
        ({"labels": [-100, 8, 9, 10, 11], "assistant_masks": [1, 1, 1, 0, 1]}, [7, 8, 9, 10, 11], [0, 1, 1, 0, 1]),
    ],
)
def test_masks_beside_tokens_say_what_is_padding_and_no_label(
    tmp_path: Path, fields: dict[str, Any], tokens: list[int], labels: list[int]
) -> None:
    ((found, mask),) = ours(tmp_path, "chatml", MARKED["chatml"], [{"input_ids": [7, 8, 9, 10, 11], **fields}])
    assert (found, [int(one) for one in mask]) == (tokens, labels)


# --- the corpus, and what the step loop reads of it -------------------------------------------------------------------


def built(root: Path, lines: list[Any], shard_tokens: int = 2**20, template: str | None = MARKED["chatml"]) -> Corpus:
    """Below `root`; of the family chatml."""
    recipe = TokenizerRecipe(model_directory=model_directory(root / "model", "chatml", template))
    source = text_source(write_lines(root / "chats.jsonl", lines), "spec.data.chat")
    build_corpus(source, root / "corpus", VOCABULARY, silent, recipe, shard_tokens=shard_tokens)
    return open_corpus(root / "corpus", source, VOCABULARY, recipe)


@pytest.mark.parametrize("shard_tokens", [7, 64, 2**20])
def test_the_corpus_holds_every_document_with_its_labels(tmp_path: Path, shard_tokens: int) -> None:
    lines = [{"messages": chat} for chat in conversations(20)]
    corpus, documents = built(tmp_path, lines, shard_tokens), ours(tmp_path / "here", "chatml", MARKED["chatml"], lines)
    start = 0
    for (stop, first), (tokens, mask) in zip(corpus.documents, documents, strict=True):
        assert (corpus.tokens(start, stop).tolist(), corpus.is_label(start, stop).tolist()) == (tokens, mask)
        assert first == mask.index(1)
        start = stop
    assert (corpus.index.num_tokens, corpus.index.num_documents) == (start, 20)


def test_a_child_builds_it_and_says_how_many_labels_there_are(tmp_path: Path) -> None:
    lines = [{"messages": chat} for chat in conversations(20)]
    here, said = built(tmp_path, lines), list[str]()
    source = text_source(tmp_path / "chats.jsonl", "spec.data.chat")
    recipe = TokenizerRecipe(model_directory=tmp_path / "model")
    child = prepare_corpus(source, tmp_path / "child", VOCABULARY, said.append, recipe, source)
    assert child.fingerprint == here.fingerprint
    assert child.evaluation is not None and child.evaluation.fingerprint == here.fingerprint
    labels = int(here.is_label(0, here.index.num_tokens).sum())
    assert any(
        f"20 documents, {format_count(here.index.num_tokens)} tokens, {format_count(labels)} of them labels" in line
        for line in said
    )
    write_lines(tmp_path / "chats.jsonl", ["nothing"])
    with pytest.raises(UserError, match=r"chats\.jsonl:1: not valid JSON"):
        prepare_corpus(
            text_source(tmp_path / "chats.jsonl", "spec.data.chat"), tmp_path / "other", VOCABULARY, silent, recipe
        )
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("change", ["template", "end of text", "tokenizer", "text", "mask", "documents"])
def test_a_corpus_is_used_again_only_with_all_that_it_was_made_from(tmp_path: Path, change: str) -> None:
    built(tmp_path, [GOOD])
    model, recipe = tmp_path / "model", TokenizerRecipe(model_directory=tmp_path / "model")
    source, sentence = (
        text_source(tmp_path / "chats.jsonl", "spec.data.chat"),
        "another chat template or tokenizer",
    )
    assert open_corpus(tmp_path / "corpus", source, VOCABULARY, recipe).index.num_documents == 1
    if change == "template":
        (model / "chat_template.jinja").write_text(UNMARKED["chatml"])
    elif change == "end of text":
        config = (model / "tokenizer_config.json").read_text()
        (model / "tokenizer_config.json").write_text(config.replace('<|im_end|>"', '<|endoftext|>"', 1))
    elif change == "tokenizer":
        (model / "tokenizer.json").write_text((model / "tokenizer.json").read_text() + " ")
    elif change == "text":
        source = text_source(tmp_path / "chats.jsonl")
    else:
        (path,) = (tmp_path / "corpus").glob(f"{change}*.bin")
        path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
        sentence = f"{path.name}: its content has changed since it was built"
    with pytest.raises(UserError, match=sentence):
        open_corpus(tmp_path / "corpus", source, VOCABULARY, recipe).is_label(0, 1)


def test_a_tokenizer_larger_than_the_model_is_rejected_before_anything_is_encoded(tmp_path: Path) -> None:
    recipe = TokenizerRecipe(model_directory=model_directory(tmp_path / "model", "gemma", MARKED["gemma"]))
    source = text_source(write_lines(tmp_path / "chats.jsonl", ["no JSON"]), "spec.data.chat")
    with pytest.raises(UserError, match=r"tokenizer\.json: has \d+ tokens, but the model's vocabSize is 100"):
        build_corpus(source, tmp_path / "corpus", 100, silent, recipe)


def test_a_document_is_a_row_with_the_labels_of_its_responses(tmp_path: Path) -> None:
    lines = [{"messages": chat} for chat in conversations(30)]
    corpus, documents = built(tmp_path, lines), ours(tmp_path / "here", "chatml", MARKED["chatml"], lines)
    T = 24
    batches = TokenBatches(corpus, T, seed=3)
    expected = {}
    for tokens, mask in documents:
        inputs, labels = tokens[:-1][:T], tokens[1:][:T]
        labels = [token if is_label else IGNORED_LABEL for token, is_label in zip(labels, mask[1:], strict=False)]
        if set(labels) != {IGNORED_LABEL}:
            padding = T - len(inputs)
            row = inputs + [corpus.index.end_of_text] * padding, labels + [IGNORED_LABEL] * padding
            expected[str(row)] = row
    num = batches.num_sequences
    for epoch in range(2):
        samples = range(epoch * num, (epoch + 1) * num)
        batch = batches.batch(samples)
        rows = list(zip(batch.tokens_BT.tolist(), batch.labels_BT.tolist(), strict=True))
        assert sorted(map(str, rows)) == sorted(expected), "each once"
        counted = int((batch.labels_BT != IGNORED_LABEL).sum())
        assert counted == batch.num_unmasked == batches.num_unmasked(samples)
    num_cut = sum(len(tokens) > T + 1 for tokens, _ in documents)
    assert num_cut and num < 30, "the case covers both"
    assert batches.said == [
        f"chats: {num_cut} of 30 are longer than training.sequenceLength {T} and are cut; {30 - num} have no response "
        "within that length and are left out"
    ]
    assert TokenBatches(corpus, 10_000, seed=3).said == [""]


def test_held_out_chats_are_never_trained_on(tmp_path: Path) -> None:
    corpus = built(tmp_path, [{"prompt": f"{number}", "completion": "yes"} for number in range(40)], template=None)
    batches = TokenBatches(corpus, 16, seed=3, evaluation=Evaluation(fraction="0.2"))  # type: ignore[arg-type]
    trained = {str(row) for row in batches.batch(range(batches.num_sequences)).tokens_BT.tolist()}
    held_out = {str(row) for batch in batches.evaluation_batches(4) for row in batch.tokens_BT.tolist()}
    assert (len(trained), len(held_out), len(trained | held_out)) == (32, 8, 40)


def test_chats_without_a_response_in_reach_are_rejected(tmp_path: Path) -> None:
    corpus = built(tmp_path, [GOOD, GOOD])
    with pytest.raises(UserError, match=r"none of 2 chats has a response within spec\.training\.sequenceLength 3; "):
        TokenBatches(corpus, 3, seed=0)
