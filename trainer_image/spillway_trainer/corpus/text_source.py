"""Sources of text and of chats: a file, a directory, an entry point, or Python's standard library. Torch-free."""

from __future__ import annotations

import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import xxhash

from spillway.api.model import Location
from spillway.errors import UserError
from spillway.extras import need
from spillway.units import counted, format_bytes

from ..checkpoints.durable_files import describe_file

PYTHON_STDLIB = "PythonStdlib"
TEXT_SUFFIXES = (
    *(".txt", ".md", ".rst", ".tex", ".html", ".jsonl", ".parquet", ".arrow"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".go", ".rs", ".java", ".js", ".ts", ".sh"),
)
"""Files of a directory that count as text; a single file given by name may have any suffix."""
KINDS = {
    "text": ("text files", TEXT_SUFFIXES),
    "chat": (".jsonl, .parquet or .arrow files of chats", (".jsonl", ".parquet", ".arrow")),
    "tokens": (".idx files of Megatron-LM", (".bin", ".idx")),
}
"""Fields of spec.data -> what the files of a directory hold, and the suffixes of their names."""
PIECE_CHARACTERS = 2**20
"""A long document is read and encoded in pieces of about this many characters, cut at line ends."""

_BINARY_PROBE_BYTES = 8192
_TABLES = (".parquet", ".arrow")
"""Files of rows: Parquet, and Arrow as the library `datasets` saves it."""
_ROWS_AT_ONCE = 64
_ARROW_FILE = b"ARROW1"
_PART = re.compile(r"(.*)-(\d+)-of-(\d+)(\.\w+)")
CHAT_COLUMNS = (
    "messages", "prompt", "completion", "tools", "chat_template_kwargs",
    "input_ids", "labels", "attention_mask", "completion_mask", "assistant_masks",
)  # fmt: skip
_NOT_IN_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(slots=True)
class Tally:
    """Counts what was read, and what was not as it should be."""

    documents: int = 0
    undecodable: int = 0
    """Files with bytes that are not UTF-8 and became U+FFFD."""
    binary: int = 0
    """Files with NUL bytes, skipped."""
    malformed: int = 0
    """Lines of .jsonl files, and rows of tables, that have no "text" and were skipped."""

    def sentence(self) -> str:
        """Says what was wrong; empty if nothing was."""
        found = (
            (self.undecodable, "files with undecodable bytes (replaced by U+FFFD)"),
            (self.binary, "binary files (skipped)"),
            (self.malformed, 'lines or rows without a "text" (skipped)'),
        )
        return ", ".join(f"{count} {what}" for count, what in found if count)


@dataclass(frozen=True, slots=True)
class TextPiece:
    text: str
    ends_document: bool


@dataclass(frozen=True, slots=True)
class TextSource:
    description: str
    """For messages: the path as given, package.module:function, or PythonStdlib."""
    option: tuple[str, str]
    """Command-line form, understood by `python -m spillway_trainer.corpus.tokens`."""
    root: Path
    files: tuple[str, ...]
    """Relative to `root`, sorted. Empty for an entry point, which is not called to find out whether it has changed."""
    place: str = ""
    """For messages: what comes before the number of a line; empty: the name of its file."""

    @property
    def kind(self) -> str:
        """text, chat, tokens, entrypoint or builtin: the name of the field in spec.data."""
        return self.option[0].removeprefix("--")

    @property
    def nbytes(self) -> int:
        return sum((self.root / name).stat().st_size for name in self.files)

    def __str__(self) -> str:
        if self.kind == "entrypoint":
            return self.description
        return f"{self.description} ({counted(len(self.files), 'file')}, {format_bytes(self.nbytes)})"

    def pieces(self, tally: Tally) -> Iterator[TextPiece]:
        """Yields all text in order. A long document is several pieces; an empty one is left out."""
        for name in self.files:
            path = self.root / name
            if path.suffix in _TABLES:
                yield from _texts_of_rows(path, tally)
                continue
            if _is_binary(path):
                tally.binary += 1
                continue
            undecodable = False
            for piece in _lines_of_json(path, tally) if path.suffix == ".jsonl" else _pieces_of(path):
                undecodable |= "\ufffd" in piece.text
                tally.documents += piece.ends_document
                yield piece
            tally.undecodable += undecodable

    def lines(self) -> Iterator[tuple[str, bytes]]:
        """Yields all lines that are not blank, and all rows as such lines, each with its place for messages."""
        for name in self.files:
            if Path(name).suffix in _TABLES:
                for number, row in enumerate(_rows(self.root / name, CHAT_COLUMNS), 1):
                    place = f"{self.root / name}: row {number}"
                    try:
                        yield place, json.dumps(row, default=_as_text).encode()
                    except TypeError as error:
                        raise UserError(f"{place}: {error}; convert it to a string, or remove it") from error
                continue
            with (self.root / name).open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield f"{self.place or f'{self.root / name}:'}{number}", line

    def stat_fingerprint(self) -> str:
        """Returns the xxh3-128 over names, sizes and modification times: if equal, files are unchanged. Reads no
        file."""
        return self._fingerprint(lambda path: f"{path.stat().st_size} {path.stat().st_mtime_ns}")

    def content_fingerprint(self) -> str:
        """Returns the xxh3-128 over names, sizes and hashes of the contents. Reads every byte."""
        return self._fingerprint(lambda path: f"{path.stat().st_size} {describe_file(path).xxh3_128}")

    def _fingerprint(self, describe: Callable[[Path], str]) -> str:
        digest = xxhash.xxh3_128(b"" if self.files else self.description.encode())
        for name in self.files:
            digest.update(f"{name}\0{describe(self.root / name)}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()


def text_source(path: Path, field: str = "spec.data.text") -> TextSource:
    """Returns one file, or all files under a directory, of the kind that `field` is for. Raises UserError, which names
    `field`, if there is nothing to read."""
    kind = field.rpartition(".")[2]
    what, suffixes = KINDS[kind]
    if not path.exists():
        raise UserError(f"{field}: {path} does not exist; give a file, or a directory of {what}")
    if path.is_file():
        whole = path.resolve()
        root, files = whole.parent, [whole.name]
        if kind == "tokens":
            files = [whole.with_suffix(suffix).name for suffix in suffixes]
            if absent := next((name for name in files if not (root / name).is_file()), None):
                raise UserError(
                    f"{field}: {path} has no {root / absent} next to it; put the .idx and .bin files in one directory"
                )
    else:
        root = path.resolve()
        files = [name for name in _walk(root, frozenset()) if Path(name).suffix in suffixes]
        if absent := next(_missing_parts(files), None):
            raise UserError(
                f"{field}: {path} lacks {absent}, a part of the same data set; copy the whole directory again"
            )
    source = TextSource(str(path), (f"--{kind}", str(path)), root, tuple(files))
    if source.nbytes == 0:
        if path.is_file():
            raise UserError(f"{field}: {path} is empty; give a file with text in it")
        found = "all of them are empty" if files else "there is none"
        raise UserError(
            f"{field}: looked in {path} for files named *{' *'.join(suffixes)}, but {found}; give a directory of {what}"
        )
    return source


def python_stdlib() -> TextSource:
    """The .py files of the running interpreter's standard library without its tests: text that every trainer has."""
    root = Path(sysconfig.get_path("stdlib")).resolve()
    files = tuple(name for name in _walk(root, _NOT_IN_STDLIB) if name.endswith(".py"))
    if not files:
        raise UserError(
            f"spec.data.builtin: {root} has no source files of Python's standard library; use spec.data.text"
        )
    return TextSource(PYTHON_STDLIB, ("--builtin", PYTHON_STDLIB), root, files)


def entry_point(name: str) -> TextSource:
    """The documents that a function returns (corpus/documents.py)."""
    return TextSource(name, ("--entrypoint", name), Path(), ())


def _walk(root: Path, left_out: frozenset[str]) -> Iterator[str]:
    """Yields the names of the files under `root`, sorted. Leaves out hidden directories, those of `left_out`, and links
    that lead out of `root`."""
    for directory, subdirectories, files in os.walk(root, onerror=_reject_unreadable):
        subdirectories[:] = sorted(name for name in subdirectories if name not in left_out and name[0] != ".")
        for name in sorted(files):
            path = Path(directory, name)
            # `is_file` comes first: unlike `resolve`, it does not raise for links in a circle.
            if path.is_file() and path.resolve().is_relative_to(root):
                yield str(path.relative_to(root))


def _reject_unreadable(error: OSError) -> None:
    raise UserError(
        f"cannot read {error.filename}: {error.strerror}; make this directory readable, or move it out of the data"
    )


def _missing_parts(files: Sequence[str]) -> Iterator[str]:
    """Yields the missing ones of files that are named NAME-00001-of-00003.SUFFIX."""
    there = set(files)
    parts = {(found[1], found[3], found[4]) for name in files if (found := _PART.fullmatch(name))}
    for name, number, suffix in sorted(parts):
        every = (f"{name}-{at:0{len(number)}d}-of-{number}{suffix}" for at in range(int(number)))
        yield from (one for one in every if one not in there)


def _as_text(value: object) -> str:
    """Converts values that a table may hold beside the text and JSON cannot."""
    if isinstance(value, date | time | timedelta | Decimal):
        return str(value)
    raise TypeError(f"has a value of type {type(value).__name__}")


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" in file.read(_BINARY_PROBE_BYTES)


def _pieces_of(path: Path) -> Iterator[TextPiece]:
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        text = file.read(PIECE_CHARACTERS)
        while text:
            text += file.readline(PIECE_CHARACTERS)  # bounded: a file may have no line ends
            following = file.read(PIECE_CHARACTERS)
            yield TextPiece(text, ends_document=not following)
            text = following


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[dict[str, object]]:
    """Yields the rows of a table, with those of `columns` that it has. Raises UserError if it has none of them, or is
    damaged."""
    need("tables")
    import pyarrow  # noqa: PLC0415 - for those who have such files
    import pyarrow.parquet  # noqa: PLC0415

    try:
        with path.open("rb") as file:
            parquet = path.suffix == ".parquet"
            table = pyarrow.parquet.ParquetFile(file) if parquet else _batches_of_arrow(file)
            names = (table.schema_arrow if parquet else table.schema).names
            wanted = [name for name in columns if name in names]
            if not wanted:
                raise UserError(
                    f"{path}: has the columns {', '.join(names)}, but none named {' or '.join(columns)}; rename the "
                    "column with the data"
                )
            for batch in table.iter_batches(_ROWS_AT_ONCE, columns=wanted) if parquet else table:
                yield from batch.select(wanted).to_pylist()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: a string in it is not valid UTF-8: {error}; write the file again") from error
    except KeyError as error:
        raise UserError(f"{path}: {error.args[0]}; give each column a name of its own") from error
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot be read as {path.suffix[1:]}: {error}; copy it again") from error


def _batches_of_arrow(file: Any) -> Any:
    """Returns the batches of either format: the one that is written as a stream, or the one with an index at its
    end."""
    import pyarrow  # noqa: PLC0415 - as above

    if file.peek(len(_ARROW_FILE))[: len(_ARROW_FILE)] != _ARROW_FILE:
        return pyarrow.ipc.open_stream(file)
    opened = pyarrow.ipc.open_file(file)
    batches = map(opened.get_batch, range(opened.num_record_batches))
    return pyarrow.RecordBatchReader.from_batches(opened.schema, batches)


def _texts_of_rows(path: Path, tally: Tally) -> Iterator[TextPiece]:
    for row in _rows(path, ("text",)):
        if isinstance(text := row["text"], str) and text:
            tally.documents += 1
            yield TextPiece(text, ends_document=True)
        else:
            tally.malformed += 1


def _lines_of_json(path: Path, tally: Tally) -> Iterator[TextPiece]:
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for line in file:
            text = _text_of(line)
            if text:
                yield TextPiece(text, ends_document=True)
            elif line.strip():
                tally.malformed += 1


def _text_of(line: str) -> str:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    text = document.get("text") if isinstance(document, dict) else None
    # JSON can express lone surrogates, which UTF-8 cannot.
    return text.encode(errors="replace").decode() if isinstance(text, str) else ""


def directory_of(location: Location, claims: Mapping[str, str | Path], field: str) -> Path:
    """Returns the directory (or file) of a location as this process sees it. Raises UserError for a claim that is not
    mounted."""
    if location.path is not None:
        return Path(location.path)
    assert location.claim is not None
    if location.claim not in claims:
        raise UserError(
            f"{field}.claim = {location.claim}: this claim is not mounted; mounted are {sorted(claims)}. In a local "
            "run, name its directory with --claim NAME=DIR"
        )
    return Path(claims[location.claim]) / location.sub_path
