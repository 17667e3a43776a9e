"""Tokens of Megatron-LM's indexed data sets: NAME.bin holds the tokens, NAME.idx says what is in it. Torch-free.

NAME.idx: MMIDIDX\\0\\0, version, type, numbers of sequences and document ends; lengths, byte offsets, document ends
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sized
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spillway.errors import UserError

from .text_source import Tally, TextSource

_MAGIC, _VERSION = b"MMIDIDX\0\0", 1
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_TOKENS_AT_ONCE = 2**20


def megatron_tokens(
    source: TextSource, vocab_size: int, dtype: str, tally: Tally, told: Callable[[Sized], None]
) -> Iterator[npt.NDArray[Any]]:
    """Yields all tokens, file by file, unchanged: nothing is put between documents. Raises UserError for a token that
    the vocabulary does not have."""
    for name in source.files:
        if not name.endswith(".idx"):
            continue
        tokens, num_documents = _opened(source.root / name)
        tally.documents += num_documents
        for start in range(0, len(tokens), _TOKENS_AT_ONCE):
            part = np.array(tokens[start : start + _TOKENS_AT_ONCE])
            wrong = np.flatnonzero((part < 0) | (part >= vocab_size))
            if len(wrong):
                raise UserError(
                    f"{(source.root / name).with_suffix('.bin')}: token {start + wrong[0]} is {part[wrong[0]]}, but "
                    f"the tokenizer of spec.model.source has only {vocab_size} tokens; use a model with the tokenizer "
                    f"that made this file"
                )
            told(part.view(np.uint8))
            yield part.astype(dtype)


def _opened(index: Path) -> tuple[npt.NDArray[Any], int]:
    """Returns the tokens, memory-mapped, and the number of documents. Raises UserError unless both files agree."""
    with index.open("rb") as file:
        head = file.read(_HEADER.size)
    if len(head) < _HEADER.size or not head.startswith(_MAGIC):
        raise UserError(
            f"{index}: expected an index of Megatron-LM, which begins with MMIDIDX; found {head[:9]!r}; give an .idx "
            "file that Megatron-LM wrote"
        )
    _, version, kind, num_sequences, num_ends = _HEADER.unpack(head)
    if version != _VERSION or kind not in _TYPES:
        known = f"version {_VERSION} with integers (types {', '.join(map(str, _TYPES))})"
        raise UserError(f"{index}: expected {known}, found version {version}, type {kind}; write the file again")
    if index.stat().st_size < _HEADER.size + 12 * num_sequences:
        raise UserError(
            f"{index}: is too short for the {num_sequences} sequences that it names; copy the .idx and .bin files again"
        )
    lengths = np.fromfile(index, "<i4", num_sequences, offset=_HEADER.size)
    offsets = np.fromfile(index, "<i8", num_sequences, offset=_HEADER.size + 4 * num_sequences)
    stops = np.cumsum(lengths, dtype=np.int64) * np.dtype(_TYPES[kind]).itemsize
    if (lengths < 0).any() or not np.array_equal(offsets[1:], stops[:-1]) or offsets[:1].any():
        raise UserError(
            f"{index}: its {num_sequences} sequences do not follow one another without gaps in the .bin file; write "
            "the .idx and .bin files again"
        )
    path, expected = index.with_suffix(".bin"), int(stops[-1]) if num_sequences else 0
    found = path.stat().st_size if path.exists() else None
    if found != expected:
        raise UserError(
            f"{path}: expected {expected} bytes, as {index.name} says, found {'no file' if found is None else found}; "
            "copy the .idx and .bin files again"
        )
    tokens = np.memmap(path, dtype=_TYPES[kind], mode="r") if expected else np.empty(0, _TYPES[kind])
    return tokens, max(0, num_ends - 1)
