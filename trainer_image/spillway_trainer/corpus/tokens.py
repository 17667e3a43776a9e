"""Tokenizes text: source files -> tokenizer -> packed memory-mapped shards, built once per run.

The tokenizer is byte-level BPE trained on the text, or that of the model from which training starts.

docs/data.md describes the files. Torch-free. The build runs in a child process (`prepare_corpus`), because training a
tokenizer takes hundreds of megabytes and starts threads, and the trainer has a memory budget and may fork.
"""

from __future__ import annotations

import argparse
import errno
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from spillway.api.model import CHATS_NEED_CAUSAL, TEXT_EVALUATES_NO_CHAT
from spillway.errors import ExitCode, HostOutOfMemory, UserError
from spillway.units import MIB, counted, format_bytes, format_count

from ..checkpoints.durable_files import ANOTHER_DIRECTORY, DurableFiles, FileEntry, describe_file
from ..checkpoints.sealed_json import Unsealed, seal, unseal
from ..ending import leave
from .chat import ChatEncoder, ChatTemplate, named_tokens, tokenizer_config
from .documents import SAY_SECONDS, ended_early, written_documents
from .megatron import megatron_tokens
from .objective import TrainingObjective
from .text_source import KINDS, PYTHON_STDLIB, Tally, TextPiece, TextSource, entry_point, python_stdlib, text_source

END_OF_TEXT, MASK = "<|endoftext|>", "[MASK]"
END_OF_TEXT_ID = 0
"""Special tokens come first in the tokenizers that Spillway trains."""
MINIMUM_VOCAB_SIZE = 257
"""One token for every byte, and the end of text."""
SAMPLE_BYTES = 32 * MIB
"""Most bytes of text that a tokenizer is trained on, sampled evenly from the whole corpus."""
SHARD_TOKENS = 16 * 2**20
UINT16_VOCAB_SIZE = 2**16
INDEX_VERSION = 1
CHAT_INDEX_VERSION = 2
"""Version of an index with masks and documents."""

NO_MASK = "has no mask token, but this model is trained to predict masked tokens"
_DISK_REJECTED = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_NOT_WRITTEN = 65
"""Exit code of a build that the disk stopped; every other user error is ExitCode.USER_ERROR."""
_BATCH_CHARACTERS = 4 * 2**20
"""Characters encoded at once; bounds the memory of the build."""


@dataclass(frozen=True, slots=True)
class TokenizerRecipe:
    """Where the tokenizer comes from: trained on the text, or given."""

    has_mask: bool = False
    """Whether a trained tokenizer gets a mask token, for a model that learns to predict hidden tokens."""
    model_directory: Path | None = None
    """A Hugging Face directory whose tokenizer.json is used unchanged; None: train one."""

    @property
    def options(self) -> list[str]:
        """Options for `python -m spillway_trainer.corpus.tokens`."""
        given = [] if self.model_directory is None else ["--tokenizer", str(self.model_directory)]
        return given or ["--mask"] * self.has_mask


TRAINED = TokenizerRecipe()


class CorpusNotWritten(UserError):
    """The disk has no room for the corpus, or takes no data at all."""


@dataclass(frozen=True, slots=True)
class CorpusIndex:
    """index.json: what the shards hold and what they were made from."""

    num_tokens: int
    num_documents: int
    vocab_size: int
    """Size of the tokenizer's vocabulary: every token is smaller."""
    end_of_text: int
    dtype: str
    """numpy's name of the little-endian integer: <u2 or <u4."""
    shard_tokens: int
    """Tokens per shard; the last one may hold fewer."""
    shards: tuple[FileEntry, ...]
    tokenizer_xxh3: str
    source: str
    stat_xxh3: str
    content_xxh3: str
    mask: int | None = None
    """Token that hides another one; None if the tokenizer has none."""
    masks: tuple[FileEntry, ...] = ()
    """For chats, one file per shard: one bit per token, set if the token is a label."""
    documents: FileEntry | None = None
    """For chats, two little-endian int64 per document: its end in the corpus, and the index of its first label within
    the document."""
    chat_xxh3: str = ""
    """For chats: ChatTemplate.fingerprint."""

    def to_bytes(self) -> bytes:
        fields = {"version": CHAT_INDEX_VERSION if self.documents else INDEX_VERSION, **asdict(self)}
        if self.documents is None:
            fields = {name: value for name, value in fields.items() if name not in _OF_CHATS}
        return seal(fields)

    @staticmethod
    def from_bytes(content: bytes) -> CorpusIndex:
        """Raises Unsealed when a byte differs from what was written, or when another version wrote it."""
        fields = unseal(content)
        if fields.pop("version") not in (INDEX_VERSION, CHAT_INDEX_VERSION):
            raise Unsealed("an index that another version of Spillway wrote")
        for name in ("shards", "masks"):
            fields[name] = tuple(FileEntry(**entry) for entry in fields.get(name, ()))
        documents = fields.pop("documents", None)
        return CorpusIndex(**fields, documents=FileEntry(**documents) if documents else None)

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """All files but the tokenizer's and the index itself."""
        return (*self.shards, *self.masks, *((self.documents,) if self.documents else ()))


_OF_CHATS = ("masks", "documents", "chat_xxh3")


class Corpus:
    """Packed tokens, memory-mapped. Documents follow one another; each document of text ends with
    `index.end_of_text`."""

    def __init__(self, directory: Path, index: CorpusIndex) -> None:
        self.directory = directory
        self.index = index
        self.evaluation: Corpus | None = None
        """Corpus of a separate text to evaluate on, made with the same tokenizer."""
        self._shards: list[npt.NDArray[Any]] = [
            np.memmap(directory / entry.name, dtype=index.dtype, mode="r") for entry in index.shards
        ]
        self._masks: list[npt.NDArray[np.uint8]] = [
            np.memmap(directory / entry.name, dtype=np.uint8, mode="r") for entry in index.masks
        ]
        self._unread = {*range(len(self._shards))}
        """Shards whose bytes have not been compared with the index yet."""

    @property
    def fingerprint(self) -> str:
        """xxh3-128 over the hashes of all `index.files`: equal means the same tokens, documents and labels."""
        return xxhash.xxh3_128_hexdigest(" ".join(entry.xxh3_128 for entry in self.index.files).encode())

    @property
    def tokenizer_path(self) -> Path:
        return self.directory / "tokenizer.json"

    @property
    def special_tokens(self) -> dict[str, str]:
        """The special tokens by their names in tokenizer_config.json: eos_token and, if there is one, mask_token."""
        tokenizer = Tokenizer.from_file(str(self.tokenizer_path))
        numbers = {"eos_token": self.index.end_of_text, "mask_token": self.index.mask}
        return {name: str(tokenizer.id_to_token(number)) for name, number in numbers.items() if number is not None}

    @property
    def documents(self) -> npt.NDArray[np.int64]:
        """For chats, one row per document: its end in the corpus, and the index of its first label within the
        document."""
        assert self.index.documents is not None
        made = np.memmap(self.directory / self.index.documents.name, dtype="<i8", mode="r")
        return made.reshape(-1, 2)

    def tokens(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Returns tokens start .. stop-1 of the corpus as a new array; stop is limited to the end of the corpus.

        A shard is hashed before its first use: hashing all shards at the start would delay a run with a large corpus.
        Raises UserError if a shard is not as it was built.
        """
        parts = [self._shards[shard][first:last] for shard, first, last in self._checked_shards(start, stop)]
        return np.concatenate(parts).astype(np.int64)

    def is_label(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """For chats: returns for each of tokens start .. stop-1 whether the loss counts it. Checks shards as `tokens`
        does."""
        parts = [
            np.unpackbits(self._masks[shard][first // 8 : -(-last // 8)])[first % 8 :][: last - first]
            for shard, first, last in self._checked_shards(start, stop)
        ]
        return np.concatenate([np.empty(0, np.uint8), *parts]).astype(np.bool_)

    def _checked_shards(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yields each shard that holds some of tokens start .. stop-1, after checking it, and where in it they begin
        and end."""
        stop, size = min(stop, self.index.num_tokens), self.index.shard_tokens
        while start < stop:
            shard, first = divmod(start, size)
            if shard in self._unread:
                for entries in (self.index.shards, self.index.masks):
                    if entries:
                        _check_file(self.directory, entries[shard])
                self._unread.remove(shard)
            last = min(size, first + stop - start)
            yield shard, first, last
            start += last - first


def prepare_corpus(
    source: TextSource,
    directory: Path,
    vocab_size: int,
    report: Callable[[str], None],
    recipe: TokenizerRecipe = TRAINED,
    evaluation: TextSource | None = None,
) -> Corpus:
    """Open the corpus in `directory`, after building it in a child process if there is none yet. The corpus of the
    `evaluation` text is in a subdirectory, made with the same tokenizer.

    `vocab_size` is the model's. `report` gets a line for everything that was bounded, replaced or skipped.
    """
    if not has_corpus(directory):
        _build_in_child(source, directory, vocab_size, report, recipe)
    corpus = open_corpus(directory, source, vocab_size, recipe)
    if evaluation is not None:
        if evaluation.kind == "text" and corpus.index.documents is not None:
            raise UserError(f"spec.data.evaluation.text: {TEXT_EVALUATES_NO_CHAT}")
        same = TokenizerRecipe(model_directory=recipe.model_directory or directory)
        corpus.evaluation = prepare_corpus(evaluation, directory / "evaluation", vocab_size, report, same)
        if corpus.evaluation.index.tokenizer_xxh3 != corpus.index.tokenizer_xxh3:
            raise UserError(
                f"{directory}/evaluation: built with another tokenizer than the training corpus; remove this "
                "directory, and the next start builds it again"
            )
    return corpus


def has_corpus(directory: Path) -> bool:
    """Whether there is a corpus, intact or not: a directory that contains anything is never overwritten."""
    return directory.exists() and any(directory.iterdir())


def open_corpus(directory: Path, source: TextSource, vocab_size: int, recipe: TokenizerRecipe = TRAINED) -> Corpus:
    """Open a corpus that was built before. Raises UserError unless it is intact and was made from this source for this
    model."""
    try:
        index = CorpusIndex.from_bytes((directory / "index.json").read_bytes())
    except (OSError, Unsealed) as error:
        raise UserError(
            f"{directory / 'index.json'}: expected the index of a corpus, found {error}; "
            "remove the directory to build the corpus again"
        ) from error
    _check_files(directory, index)
    if index.vocab_size > vocab_size:
        raise UserError(
            f"{directory}: its tokenizer has {index.vocab_size} tokens, but the model's vocabSize is {vocab_size}; "
            f"set vocabSize to {index.vocab_size} or more, or build a new corpus in {ANOTHER_DIRECTORY}"
        )
    if index.stat_xxh3 != source.stat_fingerprint() and index.content_xxh3 != source.content_fingerprint():
        changed = f"the data is now {source}" if index.source != str(source) else "its content has changed"
        raise UserError(
            f"{directory}: built from {index.source}, but {changed}; restore the old data, or build a "
            f"new corpus in {ANOTHER_DIRECTORY}"
        )
    is_chat = source.kind == "chat" or (source.kind == "entrypoint" and index.documents is not None)
    if index.chat_xxh3 != (ChatTemplate.of(_of_model(recipe)).fingerprint if is_chat else ""):
        raise UserError(
            f"{directory}: this corpus was built from the same files in another way: as text instead of chats or the "
            f"reverse, or with another chat template or tokenizer than {recipe.model_directory} has now. Undo that "
            f"change, or build a new corpus in {ANOTHER_DIRECTORY}"
        )
    return Corpus(directory, index)


def _of_model(recipe: TokenizerRecipe) -> Path:
    if recipe.model_directory is None:
        raise UserError("spec.data: chat and tokens need the tokenizer of a model directory; set spec.model.source")
    return recipe.model_directory


def build_corpus(
    source: TextSource,
    directory: Path,
    vocab_size: int,
    report: Callable[[str], None],
    recipe: TokenizerRecipe = TRAINED,
    *,
    files: DurableFiles | None = None,
    shard_tokens: int = SHARD_TOKENS,
    temporary: Path | None = None,
) -> None:
    """Train a tokenizer, or take the given one, and encode the source, in a `temporary` sibling that is renamed to
    `directory` when complete.

    If another process was faster (the one of a killed attempt may still be running), its corpus stays and this one is
    dropped.
    """
    files = files or DurableFiles()
    minimum = MINIMUM_VOCAB_SIZE + recipe.has_mask
    if recipe.model_directory is None and vocab_size < minimum:
        raise UserError(
            f"spec.model.config.vocabSize = {vocab_size}: a tokenizer needs at least {minimum} tokens "
            f"(one for each byte, one for the end of a text{', one as the mask' if recipe.has_mask else ''}); set "
            f"vocabSize to {minimum} or more"
        )
    temporary = temporary or _temporary_sibling(directory)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with files.temporary_directory(temporary):
            read = written_documents(source, temporary, report) if source.kind == "entrypoint" else source
            if read.kind == "tokens":
                _of_model(recipe)
            template = ChatTemplate.of(_of_model(recipe)) if read.kind == "chat" else None
            tokenizer = chosen_tokenizer(read, vocab_size, report, recipe)
            _fill(source, read, temporary, tokenizer, template, report, files, shard_tokens)
            if read is not source:
                files.remove_tree(temporary / read.files[0])
            _move_into_place(temporary, directory, files)
    except OSError as error:
        if (directory / "index.json").exists():
            return  # the faster process removed our files, too
        kind = CorpusNotWritten if error.errno in _DISK_REJECTED else UserError
        raise kind(
            f"{directory}: corpus not built: {error.strerror or error} ({error.filename or temporary}); "
            f"check that the text is readable and the disk has space, or use other text or {ANOTHER_DIRECTORY}"
        ) from error


def _temporary_sibling(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.{secrets.token_hex(4)}.tmp")


@dataclass(frozen=True, slots=True)
class ChosenTokenizer:
    tokenizer: Tokenizer
    file: bytes
    """Content of tokenizer.json."""
    end_of_text: int
    mask: int | None

    @property
    def vocab_size(self) -> int:
        """One more than the largest token; some numbers below may be unused."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def _fill(
    source: TextSource,
    read: TextSource,
    directory: Path,
    chosen: ChosenTokenizer,
    template: ChatTemplate | None,
    report: Callable[[str], None],
    files: DurableFiles,
    shard_tokens: int,
) -> None:
    """Writes all files of the corpus into `directory`. `template`: given for chats. `read`: `source`, or the file that
    an entry point's documents were written to."""
    tokenizer_entry = files.write(directory / "tokenizer.json", [memoryview(chosen.file)])
    dtype = "<u2" if chosen.vocab_size <= UINT16_VOCAB_SIZE else "<u4"
    tally = Tally()
    chat = ChatEncoder(template, chosen.file, chosen.end_of_text) if template else None
    told = ProgressPrinter(report, "corpus: encoding", read.nbytes)
    if chat:
        encoded = chat.encoded(read, dtype, told.more)
    elif read.kind == "tokens":
        encoded = megatron_tokens(read, chosen.vocab_size, dtype, tally, told.more)
    else:
        encoded = _encoded(read, chosen, dtype, tally, told)
    shards: list[FileEntry] = []
    masks: list[FileEntry] = []
    num_tokens = 0
    for shard in _packed(encoded, shard_tokens):
        num_tokens += len(shard)
        if chat:
            masks.append(files.write(directory / f"mask-{len(masks):05d}.bin", [chat.take_mask(len(shard)).data]))
        shards.append(files.write(directory / f"tokens-{len(shards):05d}.bin", [shard.data]))
    if not num_tokens:
        skipped = f": {tally.sentence()}" if tally.sentence() else ""
        raise UserError(f"spec.data: {source} contains no {'chat' if chat else f'text{skipped}'}")
    documents = np.array(chat.documents, dtype="<i8") if chat else None
    index = CorpusIndex(
        num_tokens=num_tokens,
        num_documents=tally.documents if documents is None else len(documents) // 2,
        vocab_size=chosen.vocab_size,
        end_of_text=chosen.end_of_text,
        dtype=dtype,
        shard_tokens=shard_tokens,
        shards=tuple(shards),
        tokenizer_xxh3=tokenizer_entry.xxh3_128,
        source=str(source),
        stat_xxh3=source.stat_fingerprint(),
        content_xxh3=source.content_fingerprint(),
        mask=chosen.mask,
        masks=tuple(masks),
        documents=None if documents is None else files.write(directory / "documents.bin", [documents.data]),
        chat_xxh3=template.fingerprint if template else "",
    )
    files.write(directory / "index.json", [memoryview(index.to_bytes())])
    files.sync_directory(directory)
    report(
        f"corpus: {source} -> {counted(index.num_documents, 'document')}, {format_count(num_tokens)} tokens, "
        f"{f'{format_count(chat.num_labels)} of them labels, ' if chat else ''}vocabulary of {index.vocab_size}"
    )
    if sentence := tally.sentence():
        report(f"corpus: {sentence}")


def _move_into_place(temporary: Path, directory: Path, files: DurableFiles) -> None:
    if not (directory / "index.json").exists():
        files.rename(temporary, directory)
        files.sync_directory(directory.parent)
    # From here on temporary siblings are of no use to any process, not even those of killed builds.
    for leftover in directory.parent.glob(f"{directory.name}.*.tmp"):
        files.remove_tree(leftover)


def chosen_tokenizer(
    source: TextSource, vocab_size: int, report: Callable[[str], None], recipe: TokenizerRecipe
) -> ChosenTokenizer:
    if recipe.model_directory is not None:
        return given_tokenizer(recipe.model_directory, vocab_size)
    tokenizer = train_tokenizer(source, vocab_size, report, recipe.has_mask)
    text = tokenizer.to_str(pretty=True).encode()
    assert tokenizer.token_to_id(END_OF_TEXT) == END_OF_TEXT_ID
    return ChosenTokenizer(tokenizer, text, END_OF_TEXT_ID, tokenizer.token_to_id(MASK) if recipe.has_mask else None)


def check_tokenizer(directory: Path, vocab_size: int, objective: TrainingObjective, *, is_chat: bool) -> None:
    """Raises UserError for whatever a run would reject about the tokenizer of a model's directory."""
    if is_chat and objective is not TrainingObjective.CAUSAL:
        raise UserError(CHATS_NEED_CAUSAL)
    chosen = given_tokenizer(directory, vocab_size)
    if objective is TrainingObjective.MASKED and chosen.mask is None:
        raise UserError(f"spec.model.source: {directory / 'tokenizer.json'}: {NO_MASK}; name it as mask_token")
    if is_chat:
        ChatTemplate.of(directory)


def given_tokenizer(directory: Path, vocab_size: int) -> ChosenTokenizer:
    """Reads the tokenizer of a Hugging Face directory. Raises UserError if there is none, if it has no token that ends
    a document, or if it has more tokens than the model."""
    path = directory / "tokenizer.json"
    try:
        text = path.read_bytes()
        tokenizer = Tokenizer.from_str(text.decode())
    except OSError as error:
        raise UserError(
            f"spec.model.source: {path}: {error.strerror}; add the tokenizer that the weights in this directory were "
            "trained with"
        ) from error
    except Exception as error:  # `tokenizers` raises no narrower type
        raise UserError(
            f"spec.model.source: {path}: not a valid tokenizer file of Hugging Face tokenizers: {error}; restore the "
            "model's own tokenizer.json"
        ) from error
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    named = named_tokens(tokenizer_config(directory))
    ends = [named.get("eos_token"), named.get("sep_token"), END_OF_TEXT, "</s>", "[SEP]"]
    end_of_text = _first_known(tokenizer, ends)
    if end_of_text is None:
        raise UserError(
            f"spec.model.source: {path}: has no token for the end of a text; name one as eos_token in "
            f"tokenizer_config.json"
        )
    mask = _first_known(tokenizer, [named.get("mask_token"), MASK, "<mask>"])
    chosen = ChosenTokenizer(tokenizer, text, end_of_text, mask)
    if chosen.vocab_size > vocab_size:
        raise UserError(
            f"spec.model.source: {path}: has {chosen.vocab_size} tokens, but the model's vocabSize is {vocab_size}; "
            "use the tokenizer that the model was trained with"
        )
    return chosen


def _first_known(tokenizer: Tokenizer, tokens: Sequence[str | None]) -> int | None:
    numbers = (tokenizer.token_to_id(token) for token in tokens if token is not None)
    return next((int(number) for number in numbers if number is not None), None)


def train_tokenizer(
    source: TextSource, vocab_size: int, report: Callable[[str], None], has_mask: bool = False
) -> Tokenizer:
    """Trains a byte-level BPE tokenizer with at most `vocab_size` tokens, which is the same for the same text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.encode_special_tokens = True  # a text that spells out the end of text must not end a document
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, MASK] if has_mask else [END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    if source.nbytes > SAMPLE_BYTES:
        report(f"tokenizer: trained on {format_bytes(SAMPLE_BYTES)} sampled evenly from {source}")
    tokenizer.train_from_iterator(_told_sample(source, report), trainer)
    return tokenizer


def _told_sample(source: TextSource, report: Callable[[str], None]) -> Iterator[str]:
    """Yields `sample` and reports progress. After its end, the library chooses the tokens and reports no progress."""
    told = ProgressPrinter(report, "tokenizer: reading text", source.nbytes)
    for text in sample(source):
        told.more(text)
        yield text
    report("tokenizer: choosing tokens")


def sample(source: TextSource) -> Iterator[str]:
    """Yields every piece of a small source; of a large one, pieces of SAMPLE_BYTES in total, evenly spread."""
    total, seen, taken = source.nbytes, 0, 0
    for piece in source.pieces(Tally()):
        if total <= SAMPLE_BYTES or taken * total <= seen * SAMPLE_BYTES:
            taken += len(piece.text)
            yield piece.text
        seen += len(piece.text)


@dataclass(slots=True)
class ProgressPrinter:
    """Reports how much of a text is done: at the beginning, and then every few seconds."""

    report: Callable[[str], None]
    doing: str
    num_bytes: int
    clock: Callable[[], float] = time.monotonic
    _done: int = 0
    _said: float = -math.inf

    def more(self, text: Sized) -> None:
        """Call this when `text`, or bytes, is about to be processed."""
        if self.clock() - self._said >= SAY_SECONDS:
            self._said = self.clock()
            done = min(self._done, self.num_bytes)
            self.report(f"{self.doing}, {format_bytes(done)} of {format_bytes(self.num_bytes)}")
        self._done += len(text)


def _encoded(
    source: TextSource, chosen: ChosenTokenizer, dtype: str, tally: Tally, told: ProgressPrinter
) -> Iterator[npt.NDArray[Any]]:
    """Yields the tokens piece by piece, in order, with an end of text after each document."""
    for batch in _batches(source, tally):
        for piece in batch:
            told.more(piece.text)
        encodings = chosen.tokenizer.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
        for piece, encoding in zip(batch, encodings, strict=True):
            yield np.array(encoding.ids + [chosen.end_of_text] * piece.ends_document, dtype=dtype)


def _batches(source: TextSource, tally: Tally) -> Iterator[list[TextPiece]]:
    batch: list[TextPiece] = []
    characters = 0
    for piece in source.pieces(tally):
        batch.append(piece)
        characters += len(piece.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _packed(arrays: Iterator[npt.NDArray[Any]], shard_tokens: int) -> Iterator[npt.NDArray[Any]]:
    """Yields the same tokens in arrays of exactly `shard_tokens` tokens; only the last one may be shorter."""
    held: list[npt.NDArray[Any]] = []
    num_held = 0
    for array in arrays:
        held.append(array)
        num_held += len(array)
        if num_held >= shard_tokens:
            tokens = np.concatenate(held)
            whole = num_held - num_held % shard_tokens
            yield from np.split(tokens[:whole], whole // shard_tokens)
            held, num_held = [tokens[whole:]], num_held - whole
    if num_held:
        yield np.concatenate(held)


def _check_files(directory: Path, index: CorpusIndex) -> None:
    """Checks the lengths of all files and the content of tokenizer and documents. The content of a shard is checked
    when it is read."""
    for entry in index.files:
        path = directory / entry.name
        found = path.stat().st_size if path.exists() else None
        if found != entry.nbytes:
            raise UserError(
                f"{path}: expected {entry.nbytes} bytes, found {'no file' if found is None else found}; "
                "remove the directory to build the corpus again"
            )
    path = directory / "tokenizer.json"
    if not path.exists() or describe_file(path).xxh3_128 != index.tokenizer_xxh3:
        raise UserError(
            f"{path}: not the tokenizer that made the tokens in the same directory; restore it, or remove the "
            "directory to build the corpus again"
        )
    if index.documents:
        _check_file(directory, index.documents)


def _check_file(directory: Path, entry: FileEntry) -> None:
    path = directory / entry.name
    if describe_file(path) != entry:
        raise UserError(
            f"{path}: its content has changed since it was built; remove the directory to build the corpus again"
        )


def _build_in_child(
    source: TextSource, directory: Path, vocab_size: int, report: Callable[[str], None], recipe: TokenizerRecipe
) -> None:
    temporary = _temporary_sibling(directory)
    options = [*source.option, *recipe.options, "--temporary", str(temporary)]
    # -P: files in the current directory must not shadow modules.
    command = [sys.executable, "-P", "-m", "spillway_trainer.corpus.tokens", *options, str(directory), str(vocab_size)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "true"}
    report(f"corpus: building from {source}")
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        ) as child,
    ):

        def end_all() -> None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)

        def end_what_is_left() -> None:
            """Ends processes that the user's function started, once the child has ended: they inherited the pipe."""
            child.wait()
            end_all()

        ending = threading.Thread(target=end_what_is_left, daemon=True, name="corpus")
        ending.start()
        try:
            for line in child.stdout or ():
                report(line.rstrip("\n"))
        finally:
            end_all()
            ending.join()
            with suppress(OSError):  # exists only if the child was killed
                DurableFiles().remove_tree(temporary)
        errors.seek(0)
        message = errors.read().strip()
    if child.returncode == _NOT_WRITTEN and message:
        raise CorpusNotWritten(message)
    if child.returncode == ExitCode.USER_ERROR and message:
        raise UserError(message)
    if source.kind == "entrypoint" and (child.returncode != 0 or not has_corpus(directory)):
        report(message)
        raise UserError(f"spec.data.entrypoint = {source}: {ended_early(child.returncode, message)}")
    if child.returncode == -9:
        raise HostOutOfMemory(
            f"{directory}: the process that tokenizes the data was killed, probably because memory ran out; free "
            "memory on this machine, or in a cluster raise spec.pod.resources.memory (not in mode Disabled)"
        )
    if child.returncode != 0:
        raise RuntimeError(f"the process that tokenizes the data ended with code {child.returncode}: {message}")


def main() -> int:
    """`python -m spillway_trainer.corpus.tokens (--text PATH | --chat PATH | --tokens PATH | --entrypoint
    NAME | --builtin PythonStdlib) [--tokenizer DIRECTORY | --mask] DIRECTORY VOCAB_SIZE`."""
    parser = argparse.ArgumentParser(
        prog="spillway_trainer.corpus.tokens", description="Build a corpus of packed tokens."
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--text", type=Path, help="a text file or a directory of text files")
    which.add_argument("--chat", type=Path, help="a .jsonl file of chats or a directory of such files")
    which.add_argument("--tokens", type=Path, help="an .idx file of Megatron-LM or a directory of such files")
    which.add_argument("--entrypoint", help="package.module:function that returns documents")
    which.add_argument("--builtin", choices=[PYTHON_STDLIB], help="text that every trainer image contains")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--tokenizer", type=Path, help="a model directory whose tokenizer is used; default: train one")
    kind.add_argument("--mask", action="store_true", help="train a tokenizer that has a mask token")
    parser.add_argument(
        "--temporary", type=Path, help="temporary directory in which the corpus is built, next to DIRECTORY"
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("vocab_size", type=int)
    arguments = parser.parse_args()
    try:
        given = {f"spec.data.{kind}": getattr(arguments, kind) for kind in KINDS}
        source = next((text_source(path, field) for field, path in given.items() if path), None)
        source = source or (entry_point(arguments.entrypoint) if arguments.entrypoint else python_stdlib())
        recipe, say = TokenizerRecipe(arguments.mask, arguments.tokenizer), partial(print, flush=True)
        build_corpus(source, arguments.directory, arguments.vocab_size, say, recipe, temporary=arguments.temporary)
    except UserError as error:
        print(error, file=sys.stderr)
        return _NOT_WRITTEN if isinstance(error, CorpusNotWritten) else error.exit_code
    return 0


if __name__ == "__main__":
    leave(main())  # without waiting for threads, which a user's function may have left
