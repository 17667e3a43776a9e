"""Names and manifest of a checkpoint, and the training state other than tensors.

docs/checkpoints.md describes the bytes. Does not import torch: `spillway ckpt` reads these without a trainer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from spillway.errors import UserError
from spillway.update_rules import MomentType, UpdateRule

from .durable_files import FileEntry, describe_file, open_regular
from .sealed_json import Unsealed, seal, unseal

MANIFEST = "manifest.json"
MANIFEST_VERSION, PIECES_VERSION = 1, 2
"""Versions of the format; the second one has tensors in pieces."""

_NAME = re.compile(r"step-(0|[1-9][0-9]*)\.e(0|[1-9][0-9]*)")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True, order=True)
class CheckpointName:
    """The name step-N.eE: committed by epoch E after N steps. Ordered by epoch, then step."""

    epoch: int
    step: int

    def __str__(self) -> str:
        return f"step-{self.step}.e{self.epoch}"

    @staticmethod
    def parse(text: str) -> CheckpointName | None:
        """Returns None if `text` is not a checkpoint's name (a temporary sibling, an epoch file, a user's file)."""
        match = _NAME.fullmatch(text)
        return CheckpointName(epoch=int(match[2]), step=int(match[1])) if match else None


@dataclass(frozen=True, slots=True)
class Problem:
    """One difference between a file and the manifest."""

    checkpoint: str
    file: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.checkpoint}/{self.file}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor of the checkpoint is, and its shape."""

    files: tuple[str, ...]
    """The file that has it, or those that have its pieces: flat, under its name, in this order end to end."""
    shape: tuple[int, ...]
    sizes: tuple[int, ...] = ()
    """Number of values of each piece; empty if there is one file."""

    def ranges(self, start: int, end: int) -> Iterator[tuple[str, int, int]]:
        """Yields where the values from `start` to before `end` of the flat tensor are: a file, and which of the values
        in it."""
        for file, size in zip(self.files, self.sizes or (prod(self.shape),), strict=True):
            if max(0, start) < min(size, end):
                yield file, max(0, start), min(size, end)
            start, end = start - size, end - size

    def to_json(self) -> dict[str, Any]:
        return {"file": self.files[0], "shape": self.shape} if len(self.files) == 1 else asdict(self)

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> TensorEntry:
        """Raises ValueError if the pieces do not make up the tensor."""
        if "file" in fields:
            return TensorEntry((fields["file"],), tuple(fields["shape"]))
        files, shape, sizes = (tuple(fields[name]) for name in ("files", "shape", "sizes"))
        if len(files) != len(sizes) or min(sizes) < 0 or sum(sizes) != prod(shape):
            raise ValueError(f"pieces of {sizes} values in {len(files)} files for a tensor of shape {shape}")
        return TensorEntry(files, shape, sizes)


@dataclass(frozen=True, slots=True)
class BestEvaluation:
    """The lowest evaluation loss of a run so far."""

    loss: float = math.inf
    step: int = 0
    """0: there was no evaluation."""
    since: int = 0
    """Number of evaluations since the last improvement."""

    def after(self, step: int, loss: float, min_delta: float) -> BestEvaluation:
        """Returns the value after the evaluation that follows `step`. A loss that is lower by less than `min_delta`
        becomes the best, but is not an improvement; NaN is neither."""
        since = 0 if loss < self.loss - min_delta else self.since + 1
        return BestEvaluation(loss, step, since) if loss < self.loss else replace(self, since=since)

    def stops(self, patience: int | None) -> bool:
        """Whether the run ends here by early stopping. `patience` None: never."""
        return patience is not None and self.since >= patience


NO_EVALUATION = BestEvaluation()


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Everything except tensors that a run needs to resume as if it had never stopped."""

    step: int
    """Optimizer steps completed."""
    seed: int
    samples_consumed: int
    """The position in the data, one integer (data.py)."""
    sequence_length: int
    scalars: Mapping[str, float]
    """The optimizer's scalars: powers of the betas, number of updates, and in float16 the loss scale. Exact
    (hexadecimal floats on disk)."""
    schedule: Mapping[str, Any]
    """Inputs of the learning-rate schedule; JSON values."""
    random_state: str
    """State of torch's CPU generator, base64."""
    data_xxh3: str
    """Fingerprint of everything that determines which tokens sample i holds (TokenBatches.fingerprint)."""
    tokenizer_xxh3: str
    model: Mapping[str, Any]
    """Description of the model (Chain.description); JSON values."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """The tokenizer's special tokens, as in tokenizer_config.json: eos_token, mask_token."""
    rule: str = UpdateRule.ADAMW.value
    """spec.training.optimizer.name. AdamW is not written, so that a version of Spillway without other rules can read
    the file."""
    moments: str = MomentType.FLOAT32.value
    """spec.training.optimizer.moments; float32 is not written, for the same reason."""
    best: BestEvaluation = NO_EVALUATION
    """Written only if there was an evaluation."""

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self) | {"scalars": {name: value.hex() for name, value in self.scalars.items()}}
        if self.rule == UpdateRule.ADAMW:
            del fields["rule"]
        if self.moments == MomentType.FLOAT32:
            del fields["moments"]
        fields["best"]["loss"] = self.best.loss.hex()
        if not self.best.step:
            del fields["best"]
        return fields

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> TrainingState:
        scalars = {name: float.fromhex(value) for name, value in fields["scalars"].items()}
        best = {**fields.get("best", {"loss": "inf"})}
        best["loss"] = float.fromhex(best["loss"])
        return TrainingState(**{**fields, "scalars": scalars, "best": BestEvaluation(**best)})


@dataclass(frozen=True, slots=True)
class Manifest:
    """manifest.json, written last, so that a checkpoint that has one is complete."""

    name: CheckpointName
    parent: CheckpointName | None
    """The checkpoint that this one continues: the previous one of its epoch, or the one from which the epoch
    resumed."""
    files: tuple[FileEntry, ...]
    tensors: Mapping[str, TensorEntry]
    """One for each kind of state (master.X, exp_avg.X ...) of every parameter X; a tied alias has none."""
    state: TrainingState
    spillway: str
    """The version of Spillway that wrote it."""

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.files)

    def to_bytes(self) -> bytes:
        in_pieces = any(len(entry.files) > 1 for entry in self.tensors.values())
        return seal(
            {
                "version": PIECES_VERSION if in_pieces else MANIFEST_VERSION,
                "step": self.name.step,
                "epoch": self.name.epoch,
                "parent": None if self.parent is None else str(self.parent),
                "files": [asdict(entry) for entry in self.files],
                "tensors": {name: entry.to_json() for name, entry in self.tensors.items()},
                "state": self.state.to_json(),
                "spillway": self.spillway,
            }
        )

    @staticmethod
    def from_bytes(content: bytes) -> Manifest:
        """Parses a manifest. Raises Unsealed when a byte differs from what was written, and UserError for a version
        that this code cannot read."""
        fields = unseal(content)
        if fields.get("version") not in (MANIFEST_VERSION, PIECES_VERSION):
            raise UserError(
                f"checkpoint of step {fields.get('step')}: written by Spillway {fields.get('spillway')} in checkpoint "
                f"format {fields.get('version')}, but this version of Spillway reads only formats {MANIFEST_VERSION} "
                f"and {PIECES_VERSION}; use the version of Spillway that wrote the checkpoint"
            )
        try:
            return Manifest._from_fields(fields)
        except (AttributeError, KeyError, TypeError, ValueError) as error:  # sealed, but not a manifest
            raise Unsealed(f"JSON that is not a manifest ({type(error).__name__}: {error})") from error

    @staticmethod
    def _from_fields(fields: Mapping[str, Any]) -> Manifest:
        return Manifest(
            name=CheckpointName(epoch=fields["epoch"], step=fields["step"]),
            parent=None if fields["parent"] is None else CheckpointName.parse(fields["parent"]),
            files=tuple(FileEntry(**{**entry, "nbytes": int(entry["nbytes"])}) for entry in fields["files"]),
            tensors={name: TensorEntry.from_json(entry) for name, entry in fields["tensors"].items()},
            state=TrainingState.from_json(fields["state"]),
            spillway=fields["spillway"],
        )


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A committed checkpoint with an intact manifest; `verify_checkpoint` checks its files."""

    path: Path
    manifest: Manifest

    def __str__(self) -> str:
        return str(self.manifest.name)


def open_checkpoint(path: Path) -> StoredCheckpoint:
    """Returns the checkpoint in directory `path`; reads only its manifest. Raises Unsealed when there is no intact
    manifest."""
    try:
        with open_regular(path / MANIFEST) as file:
            content = file.read()
    except FileNotFoundError:
        raise Unsealed("no such file") from None
    except OSError as error:
        raise Unsealed(error.strerror or str(error)) from error
    manifest = Manifest.from_bytes(content)
    name = CheckpointName.parse(path.name)
    if name is not None and name != manifest.name:
        raise Unsealed(f"the manifest of another checkpoint, {manifest.name}")
    return StoredCheckpoint(path, manifest)


def verify_checkpoint(path: Path) -> list[Problem]:
    """Reads every byte of the checkpoint in directory `path`; returns an empty list if it is as it was written."""
    try:
        checkpoint = open_checkpoint(path)
    except Unsealed as error:
        return [Problem(path.name, MANIFEST, "an intact manifest", str(error))]
    files = {entry.name for entry in checkpoint.manifest.files}
    strays = {file for entry in checkpoint.manifest.tensors.values() for file in entry.files} - files
    if strays:
        return [Problem(str(checkpoint), MANIFEST, "tensors in the files that it lists", repr(min(strays)))]
    problems = (_verify_file(checkpoint, entry) for entry in checkpoint.manifest.files)
    return [problem for problem in problems if problem is not None]


def _verify_file(checkpoint: StoredCheckpoint, expected: FileEntry) -> Problem | None:
    if not _FILE_NAME.fullmatch(expected.name):
        return Problem(str(checkpoint), MANIFEST, "file names without a path", repr(expected.name))
    try:
        found = describe_file(checkpoint.path / expected.name)
    except FileNotFoundError:
        return Problem(str(checkpoint), expected.name, f"{expected.nbytes} bytes", "no such file")
    except OSError as error:
        return Problem(str(checkpoint), expected.name, f"{expected.nbytes} bytes", error.strerror or str(error))
    if found == expected:
        return None
    if found.nbytes != expected.nbytes:
        return Problem(str(checkpoint), expected.name, f"{expected.nbytes} bytes", f"{found.nbytes} bytes")
    return Problem(str(checkpoint), expected.name, f"xxh3-128 {expected.xxh3_128}", found.xxh3_128)
