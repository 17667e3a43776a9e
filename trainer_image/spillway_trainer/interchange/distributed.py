"""torch.distributed.checkpoint: model and optimizer as `get_state_dict` names them (FSDP2, DDP, torchtitan).

    .metadata       a pickle: type, size and chunks of every key, and the file and position of each chunk
    __R_N.distcp    the chunks, each a file of torch.save by itself

The keys of a parameter X are "<model prefix>X" and "<optimizer prefix>state.X.{exp_avg,exp_avg_sq,step}". The caller
chooses the prefixes ("model.", "optimizer.", "app.optim.", none). torch's own reader unpickles whatever `.metadata` and
the chunks hold; here, both are read as data.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.serialization import _get_layout

from spillway.errors import UserError

from .foreign import (
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    Foreign,
    float32_values,
    laid_out,
    read_torch_stream,
    readable,
    the_one,
    whole_number,
)

PROGRAM = "torch.distributed.checkpoint"
METADATA = ".metadata"
MODEL, OPTIMIZER = "model", "optimizer"
"""Top-level keys of the written dictionary, as in torch's and torchtitan's examples."""

_STATE_KEY = re.compile(r"(?P<prefix>(?:.*?\.)??)state\.(?P<name>.+)\.(?P<kind>[a-z_0-9]+)")
_METADATA_CLASSES = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)


def _enum_member(owner: Any, name: str) -> Any:
    """`getattr` for what is allowed: some Pythons (3.11.0 to 3.11.3 among them) pickle members of an enum with it."""
    if owner is metadata._MEM_FORMAT_ENCODING and name in owner.__members__:
        return owner[name]
    raise pickle.UnpicklingError(f"getattr({owner!r}, {name!r})")


_ALLOWED: Mapping[tuple[str, str], Any] = {
    **{(metadata.__name__, name): getattr(metadata, name) for name in _METADATA_CLASSES},
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("builtins", "getattr"): _enum_member,
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib", "PurePosixPath"): PurePosixPath,
    ("pathlib", "WindowsPath"): PurePosixPath,
}
"""Types that `.metadata` consists of, in addition to tensor types."""


class _MetadataReader(pickle.Unpickler):
    """Rebuilds the types in `_ALLOWED`, and rejects everything else before it is created."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"{module}.{name}")


@dataclass(frozen=True, slots=True)
class Keys:
    """Under which keys the states of a checkpoint are stored."""

    model_prefix: str
    optimizer_prefix: str
    names: Sequence[str]
    """Parameters with moments."""

    def of(self, kind: str, name: str) -> str:
        return f"{self.model_prefix}{name}" if kind == MASTER else f"{self.optimizer_prefix}state.{name}.{kind}"


def read_distributed(directory: Path) -> Foreign:
    """Reads a checkpoint. Raises UserError if it is incomplete, or holds anything else than Adam's states."""
    described = _read_metadata(directory / METADATA)
    stored = _Stored(directory, described)
    keys = find_keys(stored.shapes, directory)
    updates = {name: stored.number(keys.of("step", name)) for name in keys.names}
    num_updates: int = the_one(updates, f"{directory}: updates counted by the optimizer")
    return Foreign(
        path=directory,
        format=PROGRAM,
        shapes={name: stored.shapes[keys.of(MASTER, name)] for name in keys.names},
        num_steps=num_updates,
        num_updates=num_updates,
        betas=stored.betas(keys),
        read=lambda kind, name: stored.tensor(keys.of(kind, name)),
    )


def _read_metadata(path: Path) -> metadata.Metadata:
    with readable(path), path.open("rb") as file:
        described = _MetadataReader(file).load()
    if not isinstance(described, metadata.Metadata):
        raise UserError(
            f"{path}: contains a {type(described).__name__}, but the metadata of a {PROGRAM} checkpoint must be in "
            "this file; copy the checkpoint again, or name another"
        )
    return described


def find_keys(keys: Collection[str], directory: Path) -> Keys:
    """Finds prefixes and names from the keys alone. Raises UserError if there are none, or several of either prefix."""
    kinds: dict[tuple[str, str], set[str]] = defaultdict(set)
    for key in keys:
        if match := _STATE_KEY.fullmatch(key):
            kinds[match["prefix"], match["name"]].add(match["kind"])
    found = {of: kinds[of] for of in kinds if kinds[of] & {EXP_AVG, EXP_AVG_SQ}}
    if not found:
        raise UserError(
            f"{directory}: contains no optimizer states of Adam or AdamW (keys that end in state.PARAMETER.exp_avg); "
            "save the checkpoint together with its optimizer states"
        )
    prefixes = sorted({prefix for prefix, _ in found})
    if len(prefixes) > 1:
        raise UserError(
            f"{directory}: contains the states of {len(prefixes)} optimizers (key prefixes {', '.join(prefixes)}), but "
            "only one can be imported; save the states of one optimizer"
        )
    for (prefix, name), held in sorted(found.items()):
        if held != {EXP_AVG, EXP_AVG_SQ, "step"}:
            listed = ", ".join(sorted(held))
            raise UserError(
                f"{directory}: the optimizer state {prefix}state.{name} has {listed}, but only states of Adam and "
                "AdamW can be imported, which consist of exp_avg, exp_avg_sq and step"
            )
    names = sorted(name for _, name in found)
    return Keys(_model_prefix(set(keys), names, prefixes[0], directory), prefixes[0], names)


def _model_prefix(keys: Collection[str], names: Sequence[str], optimizer_prefix: str, directory: Path) -> str:
    """Returns the prefix of every parameter's name among the weights. Raises UserError unless there is exactly one."""
    ends = (key.removesuffix(names[0]) for key in keys if key.endswith(names[0]))
    candidates = [end for end in ends if (not end or end.endswith(".")) and not end.endswith("state.")]
    fitting = sorted(end for end in candidates if all(f"{end}{name}" in keys for name in names))
    if len(fitting) != 1:
        found = "none" if not fitting else ", ".join(repr(end) for end in fitting)
        raise UserError(
            f"{directory}: for the parameters in {optimizer_prefix}state, all weights must be saved once, under the "
            f"same key prefix, but the prefixes found are: {found}; save the checkpoint with one copy of the weights"
        )
    return fitting[0]


class _Stored:
    """Values by key, assembled from chunks."""

    def __init__(self, directory: Path, described: metadata.Metadata) -> None:
        self._directory = directory
        with laid_out(directory / METADATA, PROGRAM):
            self._entries = dict(described.state_dict_metadata)
            self._places: dict[tuple[str, tuple[int, ...] | None], filesystem._StorageInfo] = {}
            for index, place in described.storage_data.items():
                offset = None if index.offset is None else tuple(index.offset)
                self._places[index.fqn, offset] = place
            self.shapes: dict[str, tuple[int, ...] | None] = {
                key: tuple(entry.size) if isinstance(entry, metadata.TensorStorageMetadata) else None
                for key, entry in self._entries.items()
            }

    def tensor(self, key: str) -> Tensor:
        """Returns the whole tensor in float32. Raises UserError unless the chunks cover it exactly."""
        entry = self._entries[key]
        what = f"{self._directory}: {key}"
        if not isinstance(entry, metadata.TensorStorageMetadata):
            raise UserError(
                f"{what}: expected a tensor, found other data; save the checkpoint again with a tensor here"
            )
        with laid_out(self._directory / METADATA, PROGRAM):
            whole = torch.empty(self._checked_size(entry, what), dtype=torch.float32)
            for chunk in entry.chunks:
                value = float32_values(self._load(key, tuple(chunk.offsets)), what)
                if tuple(value.shape) != tuple(chunk.sizes):
                    raise UserError(
                        f"{what}: a stored piece of this tensor has shape {tuple(value.shape)}, but the metadata says "
                        f"{tuple(chunk.sizes)}; copy the checkpoint again"
                    )
                place = tuple(
                    slice(start, start + length) for start, length in zip(chunk.offsets, chunk.sizes, strict=True)
                )
                whole[place].copy_(value)
        return whole

    def number(self, key: str) -> int:
        if key not in self._entries:
            raise UserError(f"{self._directory}: the checkpoint has no value {key}; save all states of its optimizer")
        offset = () if self.shapes[key] is not None else None
        return whole_number(self._load(key, offset), f"{self._directory}: {key}")

    def betas(self, keys: Keys) -> tuple[float, float] | None:
        """Returns the betas of the groups, which are either numbered or one per parameter; None if there are none."""
        pattern = re.compile(re.escape(keys.optimizer_prefix) + r"param_groups\..+\.betas")
        found: dict[str, Any] = {}
        for key in filter(pattern.fullmatch, self._entries):
            with laid_out(self._directory, PROGRAM):
                beta1, beta2 = self._load(key, None)
                found[key] = (float(beta1), float(beta2))
        return the_one(found, f"{self._directory}: betas") if found else None

    def _checked_size(self, entry: metadata.TensorStorageMetadata, what: str) -> tuple[int, ...]:
        """Returns the tensor's size. Raises UserError unless the chunks cover it: they must not overlap or reach beyond
        it, and must hold as many values as it has."""
        size = tuple(entry.size)
        boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
        inside = all(
            len(offsets) == len(sizes) == len(size)
            and all(min(o, n) >= 0 and o + n <= whole for o, n, whole in zip(offsets, sizes, size, strict=True))
            for offsets, sizes in boxes
        )
        filled = [box for box in boxes if math.prod(box[1])]
        if not inside or sum(math.prod(sizes) for _, sizes in boxes) != math.prod(size) or _overlap(filled):
            raise UserError(
                f"{what}: the {len(boxes)} stored pieces of this tensor do not exactly fill its shape {size}; copy the "
                "checkpoint again"
            )
        return size

    def _load(self, key: str, offset: tuple[int, ...] | None) -> Any:
        what = f"{self._directory}: {key}"
        place = self._places.get((key, offset))
        if place is None:
            raise UserError(
                f"{what}: the metadata does not say in which file this value is stored; copy the checkpoint again"
            )
        with laid_out(self._directory / METADATA, PROGRAM):
            name, start, length = str(place.relative_path), int(place.offset), int(place.length)
            if getattr(place, "transform_descriptors", None):
                raise UserError(
                    f"{what}: was saved with transforms of its bytes ({place.transform_descriptors}), which cannot be "
                    "undone here; save the checkpoint without transforms"
                )
        if PurePosixPath(name).name != name:
            raise UserError(
                f"{self._directory / METADATA}: names the file {name}, but may name only files that are directly in "
                "the checkpoint's directory; copy the checkpoint again"
            )
        path = self._directory / name
        with readable(path), path.open("rb") as file:
            file.seek(start)
            content = file.read(length)
        if len(content) != length:
            raise UserError(f"{path}: the file ends before the end of {key}; copy the checkpoint again")
        return read_torch_stream(io.BytesIO(content), path)


def _overlap(boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether any two boxes overlap. Sorted by offset, so that for the usual split along one dimension only neighbours
    are compared."""
    ordered = sorted(boxes)
    for index, (offsets, sizes) in enumerate(ordered):
        for other_offsets, other_sizes in ordered[index + 1 :]:
            if other_offsets[:1] >= tuple(o + n for o, n in zip(offsets[:1], sizes[:1], strict=True)):
                break
            pairs = zip(offsets, sizes, other_offsets, other_sizes, strict=True)
            if all(o < other + m and other < o + n for o, n, other, m in pairs):
                return True
    return False


def write_distributed(
    directory: Path,
    states: Iterable[tuple[str, str, Tensor]],
    aliases: Mapping[str, str],
    num_updates: int,
) -> None:
    """Fill the new directory. `states`: (kind, name, value); `aliases`: name of a tied parameter -> its owner's."""
    model: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for kind, name, value in states:
        if kind == MASTER:
            model[name] = value
            moments[name]["step"] = torch.tensor(float(num_updates))
        else:
            moments[name][kind] = value
    model |= {alias: model[owner] for alias, owner in aliases.items()}
    content = {MODEL: model, OPTIMIZER: {"state": dict(moments)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that there is only one process
        save(content, storage_writer=FileSystemWriter(directory), no_dist=True)
