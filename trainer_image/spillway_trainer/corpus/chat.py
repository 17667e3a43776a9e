"""Chat data: a line of JSON -> text, by the model's chat template -> tokens, and which of them are labels.

    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}, ...]}
    {"prompt": ..., "completion": ...}      two strings, or two lists of messages
    {"input_ids": [...], "labels": [...]}   tokens; each label is its token, or -100 for no label; with or without masks

Labels are the tokens of the response, including tokens of which only some characters belong to it. Torch-free.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from tokenizers import Encoding, Tokenizer

from spillway.errors import UserError

from ..checkpoints.durable_files import describe_file
from .objective import IGNORED_LABEL
from .text_source import TextSource

FORMS = (
    '{"messages": [...]}, {"prompt": ..., "completion": ...} with two strings or two lists of messages, or '
    '{"input_ids": [...]}'
)
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_BATCH_CHARACTERS = 2**18
"""Characters encoded at once; limited because a token with its offsets takes a hundred bytes."""
MASKS = ("attention_mask", "completion_mask", "assistant_masks")
"""Fields beside input_ids, as `transformers` and TRL write them: 0 for each token that is no label."""
_VERSION = 2
"""Version of what is made from a line."""
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """What a model's directory says about chats."""

    directory: Path
    texts: Mapping[str, str]
    """Name -> Jinja template: "default" and perhaps "tool_use". Empty if the model has none."""
    tokens: Mapping[str, str]
    """The special tokens by the names that templates use: bos_token and so on."""

    @staticmethod
    def of(directory: Path) -> ChatTemplate:
        fields = tokenizer_config(directory)
        given = fields.get("chat_template") or {}
        try:
            several = given if isinstance(given, str) else {one["name"]: one["template"] for one in given}
            texts = {"default": several} if isinstance(several, str) else several
            if wrong := [name for name, text in texts.items() if not isinstance(text, str)]:
                raise TypeError(f"template {wrong[0]} is not a string")
            if (path := directory / "chat_template.jinja").exists():
                texts |= {"default": path.read_text(encoding="utf-8")}
        except (KeyError, TypeError, OSError, ValueError) as error:
            found = f"{type(error).__name__}: {error}"
            raise UserError(
                f"{directory}: cannot read the chat template: {found}; correct chat_template.jinja, or the field "
                "chat_template of tokenizer_config.json"
            ) from error
        tokens = {name: token for name, token in named_tokens(fields).items() if name.endswith("_token")}
        return ChatTemplate(directory, texts, tokens)

    @property
    def fingerprint(self) -> str:
        """xxh3-128 of everything that decides which tokens a line becomes, and which of them are labels."""
        tokenizer = describe_file(self.directory / "tokenizer.json").xxh3_128
        decides = [_VERSION, tokenizer, dict(self.texts), dict(self.tokens)]
        return xxhash.xxh3_128_hexdigest(json.dumps(decides, sort_keys=True).encode())


@dataclass(frozen=True, slots=True)
class Rendered:
    text: str
    responses: tuple[Span, ...]
    """For each response, characters start .. stop-1 of `text`."""
    by_template: bool
    """Whether the text contains all special tokens of the document; if not, they are added."""
    given: tuple[list[int], npt.NDArray[np.bool_]] | None = None
    """Tokens instead of a text, and which of them are labels."""


class Renderer:
    """Renders lines as texts. Raises UserError without the place of the line, which the caller adds."""

    def __init__(self, template: ChatTemplate, special_tokens: Sequence[str], num_tokens: int) -> None:
        self._template, self._num_tokens = template, num_tokens
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def rendered(self, line: bytes) -> Rendered:
        try:
            document = json.loads(line)
        except ValueError as error:
            raise UserError(f"not valid JSON: {error}; each line must be {FORMS}") from error
        self._reject_special(document)
        match document:
            case {"messages": list() as messages}:
                return self._conversation(document, _checked(messages, "messages"))
            case {"prompt": str() as prompt, "completion": str() as completion}:
                # JSON can express lone surrogates, which UTF-8 cannot.
                text = (prompt + completion).encode(errors="replace").decode()
                return Rendered(text, ((len(prompt), len(text)),), by_template=False)
            case {"prompt": list() as prompt, "completion": list() as completion}:
                asked, answered = _checked(prompt, "prompt"), _checked(completion, "completion")
                text = self._render(document, [*asked, *answered])
                before = self._render(document, asked, add_generation_prompt=True)
                if not text.startswith(before):
                    raise UserError(f"completion: {_no_prefix(before, text)}")
                return Rendered(text, ((len(before), len(text)),), by_template=True)
            case {"input_ids": list()} if isinstance(document.get("labels"), list | None):
                return Rendered("", (), by_template=True, given=_given(document, self._num_tokens))
        found = ", ".join(document) if isinstance(document, dict) else type(document).__name__
        raise UserError(f"must be {FORMS}; found {found or 'no field'}")

    def _conversation(self, document: Mapping[str, Any], messages: list[dict[str, Any]]) -> Rendered:
        if _MARKERS.search(self._text_of(document)):
            text, responses = self._render_marked(document, messages)
        else:
            text = self._render(document, messages)
            turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
            responses = tuple(self._response(document, messages, number, text) for number in turns)
        if not any(message["role"] == "assistant" for message in messages):
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
            raise UserError(
                f"messages: no message has the role assistant, only {roles}, so there is nothing to learn; correct the "
                "roles, or leave the line out"
            )
        if not any(start < stop for start, stop in responses):
            raise UserError(
                "messages: in the text that the chat template renders, no message of the assistant is found; correct "
                f"the template of {self._template.directory}, or leave the line out if its responses are empty"
            )
        return Rendered(text, responses, by_template=True)

    def _response(self, document: Mapping[str, Any], messages: list[dict[str, Any]], number: int, text: str) -> Span:
        """Returns what message `number` adds to the text of the messages before it and the prompt for a response."""
        try:
            before = self._render(document, messages[:number], add_generation_prompt=True)
            after = text if number == len(messages) - 1 else self._render(document, messages[: number + 1])
        except UserError as error:
            raise UserError(
                f"messages[{number}]: to find this response in the text, Spillway renders the conversation only up to "
                f"it, which failed ({error}); mark responses in the template with {{% generation %}}"
            ) from error
        for part in (before, after):
            if not text.startswith(part):
                raise UserError(f"messages[{number}]: {_no_prefix(part, text)}")
        return len(before), len(after)

    def _render(self, document: Mapping[str, Any], messages: list[dict[str, Any]], **options: bool) -> str:
        return self._render_marked(document, messages, **options)[0]

    def _render_marked(
        self, document: Mapping[str, Any], messages: list[dict[str, Any]], **options: bool
    ) -> tuple[str, tuple[Span, ...]]:
        """Returns the text, and the spans between the marks of responses in the template."""
        from jinja2 import TemplateError  # noqa: PLC0415 - comes with the extra [hf]
        from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415

        template = self._text_of(document)
        try:
            given = {**self._template.tokens, **(document.get("chat_template_kwargs") or {})}
            given |= {"add_generation_prompt": False} | options  # a prompt after the last response would be part of it
            made: Any = render_jinja_template(
                conversations=[messages],
                tools=document.get("tools"),
                chat_template=template,
                return_assistant_tokens_mask=_MARKERS.search(template) is not None,
                **given,
            )
        except TemplateError as error:
            raise UserError(f"rejected by the chat template of {self._template.directory}: {error}") from error
        except Exception as error:  # a template can run Python's operators
            raise UserError(
                f"cannot be rendered by the chat template of {self._template.directory}: {type(error).__name__}: "
                f"{error}"
            ) from error
        (text,), spans = made
        for number, message in enumerate(messages):
            if isinstance(parts := message.get("content"), list | dict) and str(parts) in text:
                raise UserError(
                    f"messages[{number}]: its content is a {type(parts).__name__}, which the chat template of "
                    f"{self._template.directory} writes as code; give the content as a string"
                )
        return text.encode(errors="replace").decode(), tuple(spans[0]) if spans else ()

    def _text_of(self, document: Mapping[str, Any]) -> str:
        texts = self._template.texts
        found = (texts.get("tool_use") if document.get("tools") else None) or texts.get("default")
        if found is None:
            raise UserError(
                f"messages need a chat template, and {self._template.directory} has none; put chat_template.jinja "
                "there, or use a model that was trained on chats"
            )
        return found

    def _reject_special(self, document: object) -> None:
        fields = document if isinstance(document, dict) else {}
        for name in ("messages", "prompt", "completion", "tools", "chat_template_kwargs"):
            given = fields.get(name)
            for number, part in enumerate(given) if isinstance(given, list) else [(None, given)]:
                if found := next(filter(None, map(self._special.search, _strings(part))), None):
                    where = name if number is None else f"{name}[{number}]"
                    raise UserError(
                        f"{where}: contains the special token {found[0]}, but only the chat template or the tokenizer "
                        "may add special tokens; remove the token, or leave the line out"
                    )


def _checked(messages: list[Any], name: str) -> list[dict[str, Any]]:
    """Returns messages without fields that are null, as `apply_chat_template` passes them. Raises UserError if one is
    no message."""
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f'{name}[{number}]: must be {{"role": ..., "content": ...}}; found {str(message)[:60]}')
    if not messages:
        raise UserError(f"{name}: is empty; leave the line out")
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _given(document: Mapping[str, Any], num_tokens: int) -> tuple[list[int], npt.NDArray[np.bool_]]:
    """Checks a line that holds tokens. Returns them without padding, and which of them are labels: those of `labels`
    (without it, all of them) that are 1 in each of MASKS."""
    tokens, labels = document["input_ids"], document.get("labels")
    wrong = next((at for at, one in enumerate(tokens) if type(one) is not int or not 0 <= one < num_tokens), None)
    if wrong is not None:
        found = f"input_ids[{wrong}] is {str(tokens[wrong])[:60]}"
        if type(tokens[wrong]) is list:
            raise UserError(f"{found}: a nested list; give the tokens of one document as a flat list")
        if type(tokens[wrong]) is not int:
            raise UserError(f"{found}, of type {type(tokens[wrong]).__name__}; tokens must be whole numbers")
        raise UserError(
            f"{found}, but the tokenizer of spec.model.source has only {num_tokens} tokens; use a model with the "
            "tokenizer that made the tokens"
        )
    labels = tokens if labels is None else labels
    if len(labels) != len(tokens):
        raise UserError(f"labels: there are {len(labels)} labels for {len(tokens)} input_ids; give a label for each")
    wrong = next((at for at, one in enumerate(labels) if one not in (tokens[at], IGNORED_LABEL)), None)
    if wrong is not None:
        raise UserError(
            f"labels[{wrong}] is {labels[wrong]!r}; it must be {tokens[wrong]} (input_ids[{wrong}]), or -100 (no label)"
        )
    is_label = np.array(labels) != IGNORED_LABEL
    masks = {name: document[name] for name in MASKS if document.get(name) is not None}
    for name, mask in masks.items():
        if not isinstance(mask, list) or len(mask) != len(tokens) or any(one not in (0, 1) for one in mask):
            raise UserError(f"{name}: must be a list with 0 or 1 for each of the {len(tokens)} input_ids")
        is_label &= np.array(mask, np.bool_)
    read = np.flatnonzero(masks.get("attention_mask", np.ones(len(tokens))))
    if len(read) and len(read) <= read[-1] - read[0]:
        raise UserError("attention_mask: has a 0 between its ones, but only padding at the ends can be left out")
    tokens, is_label = tokens[read[0] : read[-1] + 1] if len(read) else [], is_label[read]
    if not is_label[1:].any():
        raise UserError("labels: no token after the first is a label, so nothing can be learned; leave the line out")
    return tokens, is_label


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _strings(part)


def _no_prefix(part: str, text: str) -> str:
    same = next((at for at, (one, other) in enumerate(zip(part, text, strict=False)) if one != other), len(text))
    return (
        f"the chat template renders the first messages differently when the rest is absent (from the first difference "
        f"on, {part[same : same + 40]!r} instead of {text[same : same + 40]!r}), so Spillway cannot find the response "
        f"in the text; mark responses in the template with {{% generation %}}"
    )


class ChatEncoder:
    """Encodes lines to tokens, and notes which of them are labels."""

    def __init__(self, template: ChatTemplate, tokenizer_json: bytes, end_of_text: int) -> None:
        self._end_of_text = end_of_text
        self._tokenizer = tokenizer = Tokenizer.from_str(tokenizer_json.decode())
        tokenizer.no_truncation()
        tokenizer.no_padding()
        probe = tokenizer.encode("a")
        added = takewhile(lambda pair: pair[1], zip(probe.ids, probe.special_tokens_mask, strict=True))
        self._leading = [number for number, _ in added]
        """What the tokenizer puts before a text, such as <s>."""
        tokenizer.post_processor = None  # it may cut white space from the offsets
        special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
        self._renderer = Renderer(template, special, 1 + max(tokenizer.get_vocab(with_added_tokens=True).values()))
        self.documents = array("q")
        """For each document, its end in the corpus, and the index of its first label within the document."""
        self.num_labels = 0
        self._is_label = bytearray()
        """1 for each token that is a label, else 0, from the first token that `take_mask` has not taken."""

    def take_mask(self, num_tokens: int) -> npt.NDArray[np.uint8]:
        """Returns one bit for each of the next tokens that were encoded: whether it is a label."""
        mask = np.packbits(np.frombuffer(self._is_label[:num_tokens], np.bool_))
        del self._is_label[:num_tokens]
        return mask

    def encoded(self, source: TextSource, dtype: str, told: Callable[[Sized], None]) -> Iterator[npt.NDArray[Any]]:
        """Yields the tokens of each document; `take_mask` then returns which of them are labels."""
        batch: list[tuple[str, Rendered]] = []
        characters = 0
        for place, line in source.lines():
            try:
                rendered = self._renderer.rendered(line)
            except UserError as error:
                raise UserError(f"{place}: {error}") from error
            except RecursionError as error:
                raise UserError(f"{place}: JSON is nested too deeply; each line must be {FORMS}") from error
            told(line)
            batch.append((place, rendered))
            characters += len(rendered.text) + len(line) * (rendered.given is not None)
            if characters >= _BATCH_CHARACTERS:
                yield from self._encoded_batch(batch, dtype)
                batch, characters = [], 0
        yield from self._encoded_batch(batch, dtype)

    def _encoded_batch(self, batch: list[tuple[str, Rendered]], dtype: str) -> Iterator[npt.NDArray[Any]]:
        encodings = self._tokenizer.encode_batch([one.text for _, one in batch], add_special_tokens=False)
        for (place, rendered), encoding in zip(batch, encodings, strict=True):
            tokens, is_label = self._document(rendered, encoding)
            labels = np.flatnonzero(is_label[1:])
            if not len(labels):
                raise UserError(f"{place}: the response is empty (it has no token); leave the line out")
            self.num_labels += len(labels)
            ended = self.documents[-2] if self.documents else 0
            self.documents.extend((ended + len(tokens), int(labels[0]) + 1))
            self._is_label += is_label.tobytes()
            yield np.array(tokens, dtype=dtype)

    def _document(self, rendered: Rendered, encoding: Encoding) -> tuple[list[int], npt.NDArray[np.bool_]]:
        if rendered.given is not None:
            return rendered.given
        starts, stops = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        is_label = np.zeros(len(starts), dtype=np.bool_)
        for start, stop in rendered.responses:
            is_label |= (starts < stop) & (stops > start)
        if rendered.by_template:
            return encoding.ids, is_label
        tokens = [*self._leading, *encoding.ids, self._end_of_text]
        return tokens, np.concatenate((np.zeros(len(self._leading), np.bool_), is_label, np.ones(1, np.bool_)))


def tokenizer_config(directory: Path) -> dict[str, Any]:
    """Returns the content of tokenizer_config.json in a model's directory; empty if there is no such file."""
    path = directory / "tokenizer_config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read: {error}; restore the model's own file") from error
    if not isinstance(fields, dict):
        raise UserError(f"{path}: its content is not a JSON object; restore the model's own file")
    return fields


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns name -> token of a tokenizer_config, where a token is a string or an object with the key "content"."""
    tokens = {name: token.get("content") if isinstance(token, dict) else token for name, token in config.items()}
    return {name: token for name, token in tokens.items() if isinstance(token, str)}
