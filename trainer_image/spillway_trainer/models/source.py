"""A Hugging Face model directory: config.json, weights in safetensors files, tokenizer.json. One tensor is read at a
time; nothing is unpickled.

Opening a directory reads only the headers, so that a wrong directory is rejected before anything is built.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spillway.errors import UserError

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
PREFIX = "model."
"""A parameter's name is this prefix and its name in the files; with an adapter, the original module is one level
below."""
FLOATS = ("F32", "F16", "BF16")
SAMPLED_BYTES = 4096
"""Number of first bytes of each tensor that enter the directory's digest."""
MAX_HEADER_BYTES = 100 * 2**20
"""The format's own bound."""
MOST_NAMED = 3
BITS = {"64": 64, "32": 32, "16": 16, "8": 8, "BOOL": 8}
"""Bits of one value, by the end of its type's name."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte in the file."""


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    path: Path
    config: Mapping[str, Any]
    """Content of config.json."""
    tensors: Mapping[str, StoredTensor]

    def digest(self) -> str:
        """Returns the xxh3-128 over names, types, shapes and the first SAMPLED_BYTES of every tensor. Training changes
        all tensors, so other weights have another digest, and a start need not read all of them."""
        digest = xxhash.xxh3_128()
        for name, tensor in sorted(self.tensors.items()):
            digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
            with tensor.file.open("rb") as file:
                file.seek(tensor.start)
                digest.update(file.read(min(SAMPLED_BYTES, _nbytes(tensor))))
        return digest.hexdigest()

    def value(self, name: str) -> Tensor:
        """Returns one tensor in its stored type."""
        try:
            with safe_open(self.tensors[name].file, framework="pt") as file:
                value: Tensor = file.get_tensor(name)
                return value
        except OSError as error:
            raise UserError(f"{self.tensors[name].file}: cannot read {name}: {error.strerror or error}") from error
        except SafetensorError as error:
            raise UserError(f"{self.tensors[name].file}: cannot read {name}: {error}; copy the file again") from error


def open_model_directory(path: Path) -> ModelDirectory:
    """Opens a directory. Raises UserError if `path` is no directory of a model with weights in safetensors."""
    if not path.is_dir():
        raise UserError(
            f"spec.model.source: {path} is not a directory; name one with config.json and model.safetensors"
        )
    config = _read_json(path / "config.json")
    files = _weight_files(path)
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in _header(file).items():
            if name in tensors:
                raise UserError(
                    f"{path}: tensor {name} is in {tensors[name].file.name} and in {file.name}; remove it from one of "
                    "the two files"
                )
            tensors[name] = tensor
    return ModelDirectory(path, config, tensors)


def _weight_files(path: Path) -> list[Path]:
    if (path / ONE_FILE).is_file():
        return [path / ONE_FILE]
    if (path / INDEX).is_file():
        shards = _read_json(path / INDEX).get("weight_map")
        if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
            raise UserError(
                f"{path / INDEX}: has no weight_map from tensor names to file names; copy the whole directory again"
            )
        files = sorted(path / name for name in set(shards.values()))
        there = {file.name for file in path.iterdir() if file.is_file()}
        missing = [file.name for file in files if file.parent != path or file.name not in there]
        if missing:
            raise UserError(
                f"{path / INDEX}: names {len(missing)} weight files that are missing from its directory, first "
                f"{missing[0]}; copy the whole directory again"
            )
        return files
    pickled = sorted(file.name for file in path.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickled:
        raise UserError(
            f"{path}: holds {pickled[0]} and no {ONE_FILE}; pickled files can run code when read, so they "
            "are not opened. Load the model in transformers and call save_pretrained(), which writes safetensors"
        )
    raise UserError(f"{path}: has neither {ONE_FILE} nor {INDEX}; give a directory that save_pretrained() wrote")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not valid JSON ({error})"
        raise UserError(f"{path}: {reason}; spec.model.source needs a Hugging Face model directory") from error
    if not isinstance(document, dict):
        raise UserError(f"{path}: expected a JSON object; spec.model.source needs a Hugging Face model directory")
    return document


def _header(path: Path) -> dict[str, StoredTensor]:
    """Reads the header of a file; https://github.com/huggingface/safetensors, Format: length as little-endian uint64,
    JSON, data."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            fields: dict[str, Any] = json.loads(file.read(length) if length <= MAX_HEADER_BYTES else b"")
        _check_metadata(fields.pop("__metadata__", {}))
        ends = {name: _end(entry) for name, entry in fields.items()}
        found = {
            name: StoredTensor(path, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
            for name, entry in fields.items()
        }
        size = max(ends.values(), default=0)
        whole = path.stat().st_size == 8 + length + size
        wrong = _misplaced(fields)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; make the file readable") from error
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a safetensors file; copy the file again") from error
    if not whole:
        raise UserError(
            f"{path}: has {path.stat().st_size} bytes, but its header says {8 + length + size}; copy the file again"
        )
    if wrong:
        raise UserError(
            f"{path}: the byte range of tensor {wrong} does not match its type, shape and offset; copy the file again"
        )
    return found


def _check_metadata(metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ is not an object of strings")


def _end(entry: Any) -> int:
    """Returns where a tensor ends in the data. Raises ValueError and the like for a malformed field."""
    numbers = [*entry["shape"], *entry["data_offsets"]]
    if not isinstance(entry["dtype"], str) or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("neither a type nor sizes")
    _, end = entry["data_offsets"]
    return int(end)


def _misplaced(fields: Mapping[str, Any]) -> str | None:
    """Returns the first tensor that does not begin where the one before it ends, or whose size does not fit its shape;
    None if all are right."""
    place = 0
    for name, entry in sorted(fields.items(), key=lambda item: item[1]["data_offsets"]):
        start, end = entry["data_offsets"]
        bits = next((bits for kind, bits in BITS.items() if entry["dtype"].endswith(kind)), None)
        if start != place or end < start or (bits and 8 * (end - start) != bits * math.prod(entry["shape"])):
            return name
        place = end
    return None


def _nbytes(tensor: StoredTensor) -> int:
    return (4 if tensor.dtype == "F32" else 2) * math.prod(tensor.shape)


Merge = Callable[[Mapping[str, Tensor]], Tensor]
"""Makes the value of a parameter from its stored tensors."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The stored tensors that are a model's parameters."""

    directory: ModelDirectory
    stored: Mapping[str, tuple[str, ...]]
    """Parameter -> its names in the files: several if a tied one was stored under each of its names, or if its value is
    merged from several tensors."""
    merges: Mapping[str, Merge]
    xxh3: str
    """ModelDirectory.digest"""

    def value(self, parameter: str) -> Tensor:
        """Returns the value of a parameter. Raises UserError if tied names hold different values."""
        if parameter in self.merges:
            return self.merges[parameter]({name: self.directory.value(name) for name in self.stored[parameter]})
        first, *others = self.stored[parameter]
        value = self.directory.value(first)
        for other in others:
            if not torch.equal(_bits(value), _bits(self.directory.value(other))):
                raise UserError(
                    f"{self.directory.path}: according to config.json, {first} and {other} are one parameter, but "
                    "they hold different values; set tie_word_embeddings to false in config.json, or remove one of "
                    "the two tensors from the files"
                )
        return value


def _bits(value: Tensor) -> Tensor:
    """Returns bits that are equal for equal values of any type, and for equal NaNs."""
    return value.float().view(torch.int32)


def match(
    directory: ModelDirectory,
    shapes: Mapping[str, tuple[int, ...]],
    stored_as: Mapping[str, str | None],
    merges: Mapping[str, Merge],
) -> Weights:
    """Finds which stored tensor is which parameter. `stored_as`: stored name -> parameter; None: the model does not use
    it. `merges`: how a parameter is made from several stored tensors.

    Raises UserError that names parameters without a tensor, tensors without a parameter, and other shapes or types.
    """
    found: dict[str, list[str]] = {}
    for stored, parameter in stored_as.items():
        if parameter is not None:
            found.setdefault(parameter, []).append(stored)
    problems = [
        *_listed("missing", (stored_name(name) for name in shapes if name not in found)),
        *_listed("unexpected", (stored for name in found if name not in shapes for stored in found[name])),
    ]
    tensors = directory.tensors
    wrong = [
        f"{stored} is {tensors[stored].dtype} {list(tensors[stored].shape)}, but must be {' or '.join(FLOATS)} and "
        f"{list(shapes[name])}"
        for name, names in found.items()
        if name in shapes and name not in merges
        for stored in names
        if tensors[stored].shape != shapes[name] or tensors[stored].dtype not in FLOATS
    ]
    wrong += [
        f"{found[name][0]} and {len(found[name]) - 1} more do not add up to {stored_name(name)}, {list(shapes[name])}"
        for name, merge in merges.items()
        if not _can_merge(merge, {stored: tensors[stored] for stored in found[name]}, shapes[name])
    ]
    problems += _listed("of another shape or type", wrong)
    if problems:
        raise UserError(
            f"{directory.path}: the tensors in the weight files do not match config.json: {'; '.join(problems)}"
        )
    return Weights(directory, {name: tuple(stored) for name, stored in found.items()}, merges, directory.digest())


def _can_merge(merge: Merge, tensors: Mapping[str, StoredTensor], shape: tuple[int, ...]) -> bool:
    try:
        merged = merge({name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors.items()})
    except (RuntimeError, ValueError, KeyError, TypeError):  # whatever torch says of shapes that do not go together
        return False
    return merged.shape == shape and all(tensor.dtype in FLOATS for tensor in tensors.values())


def stored_name(parameter: str) -> str:
    """Returns the name in the files of one of our parameters."""
    return parameter.removeprefix(PREFIX).replace(".base_layer.", ".")


def _listed(what: str, names: Iterable[str]) -> list[str]:
    listed = sorted(names)
    more = f" and {len(listed) - MOST_NAMED} more" if len(listed) > MOST_NAMED else ""
    return [f"{len(listed)} {what}: {', '.join(listed[:MOST_NAMED])}{more}"] if listed else []
