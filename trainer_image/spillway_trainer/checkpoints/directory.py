"""The checkpoint directory of a run: resuming, committing, pruning.

docs/checkpoints.md states the rules one by one. Does not import torch: `spillway ckpt` uses it to list and verify.

    Epoch.start -> epoch-E.json      records what epoch E resumes from; from then on every earlier epoch is fenced
    Epoch.pending -> step-N.eE.tmp   one rank writes all files, or each rank writes its Part
    Pending.commit -> step-N.eE      manifest last, then the rename
    Epoch.prune                      keeps the newest checkpoints that verify
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast

from spillway import __version__
from spillway.errors import CheckpointCorrupt, Fenced, UserError

from .durable_files import ANOTHER_DIRECTORY, DurableFiles, FileEntry, describe_file
from .manifest import (
    MANIFEST,
    CheckpointName,
    Manifest,
    Problem,
    StoredCheckpoint,
    TensorEntry,
    TrainingState,
    open_checkpoint,
    verify_checkpoint,
)
from .sealed_json import Unsealed, seal, unseal

MINIMUM_KEPT = 2
"""Number of an epoch's newest checkpoints that are never pruned: the newest may turn out to be corrupt."""
EPOCH_VERSION = 1

_FREE_SPACE = "Free space on the volume with the checkpoints, or use a larger volume"
_REMEDIES = {
    errno.ENOSPC: _FREE_SPACE,
    errno.EDQUOT: _FREE_SPACE,
    errno.EFBIG: "Raise the limit for the size of a file (ulimit -f)",
    errno.ENOENT: "The directory with the checkpoints was removed or unmounted: restore it",
}
_EPOCH_FILE = re.compile(r"epoch-(0|[1-9][0-9]*)\.json")
_TEMPORARY = re.compile(r"(?:step-[0-9]+\.e|epoch-)(?P<epoch>[0-9]+)(?:\.json)?\.tmp")


class CheckpointNotWritten(UserError):
    """The disk rejected a checkpoint or the removal of old ones. Committed checkpoints are intact and training can
    continue."""


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """One line of `spillway ckpt ls`, from the manifest alone: nothing is hashed."""

    name: str
    step: int
    epoch: int
    parent: str | None
    nbytes: int
    num_tensors: int
    modified_seconds: float
    """Time of the commit, seconds since 1970."""
    schedule: Mapping[str, Any]
    """The learning-rate schedule with which it was trained (schedule.LearningRate); empty: unknown."""
    in_lineage: bool
    """False if an epoch committed it after it was superseded, so that resume ignores it."""
    problem: str
    """Why the manifest is unusable; empty if it is usable."""
    best_step: int = 0
    """Step of the lowest evaluation loss until then, if the job keeps the checkpoint of that step or stops early; else
    0."""


@dataclass(frozen=True, slots=True)
class Resume:
    """The point from which a new epoch continues."""

    checkpoint: StoredCheckpoint | None
    """The checkpoint to resume from; None: the run begins from the start."""
    passed_over: tuple[Problem, ...]
    """The problems of newer checkpoints that did not verify."""


def list_checkpoints(directory: Path) -> list[CheckpointSummary]:
    """Returns all committed checkpoints, newest first."""
    names = names_in(directory)
    heirs = set(lineage(_bases(directory, names), names))
    return [_summary(directory, name, name in heirs) for name in sorted(names, reverse=True)]


def verify(directory: Path) -> list[Problem]:
    """Reads every byte of one checkpoint, or of all checkpoints and epoch files of a run; empty if all is as it was
    written."""
    if (directory / MANIFEST).exists() or CheckpointName.parse(directory.name):
        return verify_checkpoint(directory)
    problems = [problem for number in sorted(_epoch_numbers(directory)) for problem in _verify_epoch(directory, number)]
    for name in sorted(names_in(directory)):
        try:
            problems += verify_checkpoint(directory / str(name))
        except UserError as error:  # a later format: the others can be verified all the same
            problems.append(Problem(str(name), MANIFEST, "a format that this version of Spillway reads", str(error)))
    return problems


def lineage(bases: Mapping[int, CheckpointName | None], names: Iterable[CheckpointName]) -> list[CheckpointName]:
    """Returns the checkpoints from which a new epoch may resume, best first.

    The newest epoch comes first with all of its checkpoints; then the epoch from which it resumed, up to the step at
    which it did; and so on. A checkpoint that an epoch committed after it was superseded is in no lineage.
    """
    heirs: list[CheckpointName] = []
    epoch, last_step = max(bases, default=None), float("inf")
    while epoch is not None:
        heirs += sorted((name for name in names if name.epoch == epoch and name.step <= last_step), reverse=True)
        base = bases[epoch]
        epoch, last_step = (None, 0) if base is None else (base.epoch, base.step)
    return heirs


def choose_resume(directory: Path) -> Resume:
    """Returns the newest checkpoint of the lineage that verifies.

    Raises CheckpointCorrupt if the lineage names checkpoints but none of them can be used.
    """
    names = names_in(directory)
    bases = _bases(directory, names)
    problems: list[Problem] = []
    for name in lineage(bases, names):
        found = verify_checkpoint(directory / str(name))
        if not found:
            return Resume(open_checkpoint(directory / str(name)), tuple(problems))
        problems += found
    newest = bases[max(bases)] if bases else None
    if newest is not None and newest not in names:
        problems.append(Problem(str(newest), MANIFEST, "the checkpoint that the last attempt resumed from", "nothing"))
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise CheckpointCorrupt(
            f"{directory}: every checkpoint from which this run could resume is damaged or missing:\n{lines}\n"
            f"restore one of them from a copy, or train from the start in {ANOTHER_DIRECTORY}",
            problems=[str(problem) for problem in problems],
        )
    return Resume(None, ())


def checkpoints_at(path: Path) -> Path:
    """Returns `path` itself if it is a checkpoint or a directory of them, or the checkpoints directory in it if it is
    the --output of `spillway run`. Raises UserError when there is no checkpoint."""
    below = path / "checkpoints"
    place = below if below.is_dir() else path
    if not place.is_dir() or not (CheckpointName.parse(place.name) or names_in(place)):
        raise UserError(
            "contains no checkpoint; name a checkpoint (step-N.eE), the --output directory of a run, or the "
            "checkpoints directory in it"
        )
    return place


@cache
def newest_at(path: Path) -> Resume:
    """Returns the checkpoint at `path`, or the newest intact one of a run. Every byte of it is read, once per process.
    Raises UserError when there is none."""
    place = checkpoints_at(path)
    try:
        if CheckpointName.parse(place.name) is None:
            return choose_resume(place)
        problems = list(map(str, verify_checkpoint(place)))
        if not problems:
            return Resume(open_checkpoint(place), ())
    except CheckpointCorrupt as error:
        problems = cast("list[str]", error.details["problems"])
    raise UserError(f"the checkpoint is damaged: {problems[0]}; restore a good copy, or name another checkpoint")


def tokenizer_of(checkpoint: StoredCheckpoint, places: Iterable[Path] = ()) -> Path:
    """Returns the tokenizer.json with which a checkpoint was trained, from a corpus* directory of one of `places` or
    near the checkpoint. Raises UserError when it is not found."""
    near = (*places, *checkpoint.path.parents[:4])  # a sweep's corpora are above its members' checkpoints
    for file in (file for place in near for file in sorted(place.glob("corpus*/tokenizer.json"))):
        if describe_file(file).xxh3_128 == checkpoint.manifest.state.tokenizer_xxh3:
            return file
    looked = ", ".join(str(place / "corpus*") for place in near)
    raise UserError(
        f"{checkpoint.path}: its tokenizer.json was not found in {looked}; restore the corpus directory of the run "
        "that wrote this checkpoint"
    )


class Part:
    """What one process writes of a checkpoint, into its temporary directory `path`. `prefix`: of its files' names."""

    def __init__(self, path: Path, files: DurableFiles, prefix: str = "tensors") -> None:
        self.path, self.files, self.prefix = path, files, prefix
        self.written: list[FileEntry] = []
        self.tensors: dict[str, TensorEntry] = {}

    def to_json(self) -> str:
        tensors = {name: entry.to_json() for name, entry in self.tensors.items()}
        return json.dumps({"files": [asdict(entry) for entry in self.written], "tensors": tensors})


class Pending(Part):
    """A checkpoint that is being written: a temporary sibling until `commit` gives it its name."""

    def __init__(self, epoch: Epoch, name: CheckpointName) -> None:
        super().__init__(epoch.directory / f"{name}.tmp", epoch.files)
        self.name = name
        self._epoch = epoch

    def join(self, parts: Iterable[str], shapes: Mapping[str, Sequence[int]]) -> None:
        """Adds the parts that all ranks wrote (Part.to_json), in the order of ranks. `shapes`: of all tensors, in the
        order of the manifest."""
        found = [json.loads(part) for part in parts]
        self.written += [FileEntry(**entry) for part in found for entry in part["files"]]
        for name, shape in shapes.items():
            pieces = [TensorEntry.from_json(part["tensors"][name]) for part in found if name in part["tensors"]]
            sizes = tuple(prod(piece.shape) for piece in pieces)
            assert sum(sizes) == prod(shape), f"{name}: {sizes} of {shape}"
            files = tuple(file for piece in pieces for file in piece.files)
            self.tensors[name] = TensorEntry(files, tuple(shape), sizes if len(files) > 1 else ())

    def commit(self, state: TrainingState) -> StoredCheckpoint:
        """Commits the checkpoint. Once this returns, it survives a power failure; before the rename it does not
        exist. Raises as Epoch.pending."""
        assert state.step == self.name.step, f"state of step {state.step} in {self.name}"
        epoch, target = self._epoch, self._epoch.directory / str(self.name)
        manifest = Manifest(
            self.name, epoch.parent, tuple(self.written), dict(self.tensors), state, spillway=__version__
        )
        with not_written(target):
            self.files.write(self.path / MANIFEST, [memoryview(manifest.to_bytes())])
            self.files.sync_directory(self.path)
            epoch.check_fence()
            _reject_existing(target)
            self.files.rename(self.path, target)
            self.files.sync_directory(epoch.directory)
        epoch.parent = self.name
        return StoredCheckpoint(target, manifest)


class Owner(NamedTuple):
    """The TrainingJob whose checkpoints a directory holds."""

    namespace: str
    name: str
    uid: str


def owner_of(directory: Path) -> Owner | None:
    """Returns the owner in the newest intact epoch file that names one; None for a local run and for a directory
    without checkpoints."""
    for number in sorted(_epoch_numbers(directory), reverse=True):
        with suppress(Unsealed, FileNotFoundError):
            said = unseal((directory / f"epoch-{number}.json").read_bytes()).get("owner")
            if isinstance(said, dict):
                return Owner(str(said.get("namespace")), str(said.get("name")), str(said.get("uid")))
    return None


class Epoch:
    """One attempt's hold on the checkpoint directory. Only rank 0 has one; other ranks may write a Part."""

    def __init__(self, directory: Path, number: int, resume: Resume, files: DurableFiles) -> None:
        self.directory = directory
        self.number = number
        self.resume = resume
        self.files = files
        self.parent = None if resume.checkpoint is None else resume.checkpoint.manifest.name
        """The newest checkpoint of this epoch's own lineage."""
        self.verified: set[CheckpointName] = set()
        """Checkpoints that this process need not read again."""

    @staticmethod
    def start(directory: Path, number: int, files: DurableFiles | None = None, owner: Owner | None = None) -> Epoch:
        """Chooses what to resume from, records it in epoch-E.json, and removes the leftovers of killed writers.

        Raises Fenced when this epoch or a later one has already begun, CheckpointCorrupt as `choose_resume`, and
        UserError for a directory of another owner.
        """
        files = files or DurableFiles()
        try:
            _make_directories(directory, files)
            known = owner_of(directory)
            if owner is not None and known is not None and known.uid != owner.uid:
                raise UserError(
                    f"{directory}: holds the checkpoints of another TrainingJob, {known.namespace}/{known.name} (uid "
                    f"{known.uid}); set another spec.checkpoint.subPath for this job"
                )
            if any(seen >= number for seen in _epochs_seen(directory)):
                raise _fenced(directory, number)
            epoch = Epoch(directory, number, choose_resume(directory), files)
            epoch._announce(owner)
            epoch._remove_leftovers()
        except OSError as error:
            raise CheckpointNotWritten(
                f"{directory}: cannot keep checkpoints in this directory: {error.strerror or error}; check that it is "
                "writable and its disk has free space"
            ) from error
        return epoch

    def check_fence(self) -> None:
        """Raises Fenced if a later epoch has begun, because nothing would read what this epoch still writes."""
        check_fence(self.directory, self.number)

    @contextmanager
    def pending(self, step: int) -> Iterator[Pending]:
        """Yields a checkpoint to fill and commit. If the block ends before the commit, for any reason, nothing is left
        behind.

        Raises CheckpointNotWritten when the disk rejects (full, read-only) or the name is taken, and Fenced.
        """
        self.check_fence()
        pending = Pending(self, CheckpointName(epoch=self.number, step=step))
        _reject_existing(self.directory / str(pending.name))
        with not_written(self.directory / str(pending.name)), self.files.temporary_directory(pending.path):
            yield pending

    def prune(self, keep: int, best_step: int = 0) -> list[CheckpointName]:
        """Removes checkpoints that are no longer needed and returns their names.

        Needed are: the newest `keep` (at least two) of this epoch's checkpoints that verify, all newer ones, and the
        newest one of step `best_step`. If fewer than that verify, nothing is removed; otherwise checkpoints of earlier
        epochs are removed, too.
        """
        names = names_in(self.directory)
        kept = self._newest_verified((name for name in names if name.epoch == self.number), max(keep, MINIMUM_KEPT))
        if not kept:
            return []
        best = max((name for name in names if name.step == best_step), default=None)
        doomed = sorted(name for name in names if name < kept[-1] and name != best)
        try:
            temporaries = [self._retire(self.directory / str(name)) for name in doomed]
            self.files.sync_directory(self.directory)
            for temporary in temporaries:
                self.files.remove_tree(temporary)
        except OSError as error:
            raise CheckpointNotWritten(
                f"{self.directory}: cannot remove old checkpoints: {error.strerror or error}; newer checkpoints are "
                "intact. Check that this directory is writable"
            ) from error
        return doomed

    def _retire(self, path: Path) -> Path:
        """Renames a checkpoint before its files are removed: a kill in the middle must not leave a checkpoint that
        lacks files."""
        self.check_fence()  # a later epoch may be resuming from this one
        temporary = path.with_name(f"{path.name}.tmp")
        self.files.rename(path, temporary)
        return temporary

    def _newest_verified(self, names: Iterable[CheckpointName], count: int) -> list[CheckpointName]:
        """Returns the newest `count` that verify, newest first; none if there are fewer. Each is read once per
        process."""
        kept: list[CheckpointName] = []
        for name in sorted(names, reverse=True):
            if name in self.verified or not verify_checkpoint(self.directory / str(name)):
                self.verified.add(name)
                kept.append(name)
            if len(kept) == count:
                return kept
        return []

    def _announce(self, owner: Owner | None) -> None:
        path = self.directory / f"epoch-{self.number}.json"
        temporary = path.with_name(f"{path.name}.tmp")
        base = None if self.parent is None else str(self.parent)
        said = {"version": EPOCH_VERSION, "epoch": self.number, "resumes_from": base}
        content = seal(said if owner is None else {**said, "owner": owner._asdict()})
        self.files.remove_tree(temporary)
        self.files.write(temporary, [memoryview(content)])
        self.files.rename(temporary, path)
        self.files.sync_directory(self.directory)
        if self.resume.checkpoint is not None and not (self.resume.checkpoint.path / MANIFEST).exists():
            raise CheckpointCorrupt(
                f"{self.resume.checkpoint.path}: this checkpoint was removed while attempt {self.number} was starting "
                "from it; start the job again, and remove no checkpoints meanwhile"
            )

    def _remove_leftovers(self) -> None:
        for path in self.directory.iterdir():
            match = _TEMPORARY.fullmatch(path.name)
            if match and int(match["epoch"]) <= self.number:
                with suppress(OSError):  # another rank of an earlier epoch may still write; the next start removes it
                    self.files.remove_tree(path)


def _make_directories(directory: Path, files: DurableFiles) -> None:
    if not directory.exists():
        _make_directories(directory.parent, files)
        files.make_directory(directory)
        files.sync_directory(directory.parent)


def names_in(directory: Path) -> list[CheckpointName]:
    """Returns the names of the committed checkpoints, in no order; none if there is no directory."""
    parsed = (CheckpointName.parse(name) for name in _listing(directory))
    return [name for name in parsed if name is not None]


def _epoch_numbers(directory: Path) -> list[int]:
    matches = (_EPOCH_FILE.fullmatch(name) for name in _listing(directory))
    return [int(match[1]) for match in matches if match]


def _epochs_seen(directory: Path) -> set[int]:
    """Returns the epochs that have begun, including those whose epoch file was lost but not their checkpoints."""
    return {*_epoch_numbers(directory), *(name.epoch for name in names_in(directory))}


def _listing(directory: Path) -> list[str]:
    try:
        return [path.name for path in directory.iterdir()]
    except FileNotFoundError:
        return []


def _bases(directory: Path, names: Iterable[CheckpointName]) -> dict[int, CheckpointName | None]:
    """Returns the checkpoint from which each epoch resumed. An epoch whose file is lost counts as resuming from the
    newest checkpoint before it."""
    bases: dict[int, CheckpointName | None] = {}
    for number in _epochs_seen(directory):
        try:
            bases[number] = _read_base(directory, number)
        except Unsealed:
            bases[number] = max((name for name in names if name.epoch < number), default=None)
    # An epoch that an epoch file names may have lost both its file and its checkpoints: its lineage then ends there.
    for base in [base for base in bases.values() if base is not None and base.epoch not in bases]:
        bases[base.epoch] = None
    return bases


def _read_base(directory: Path, number: int) -> CheckpointName | None:
    try:
        fields = unseal((directory / f"epoch-{number}.json").read_bytes())
    except FileNotFoundError:
        raise Unsealed("no such file") from None
    if fields.get("version") != EPOCH_VERSION:
        raise UserError(
            f"{directory / f'epoch-{number}.json'}: is in file format {fields.get('version')}, but this version of "
            f"Spillway reads only format {EPOCH_VERSION}; use the version of Spillway that wrote the file"
        )
    base = None if fields["resumes_from"] is None else CheckpointName.parse(fields["resumes_from"])
    if fields["epoch"] != number or (base is not None and base.epoch >= number):
        raise Unsealed(f"a record of attempt {fields['epoch']} that does not belong in this file")
    return base


def _verify_epoch(directory: Path, number: int) -> list[Problem]:
    try:
        _read_base(directory, number)
    except Unsealed as error:
        return [Problem(directory.name, f"epoch-{number}.json", "an intact record of an attempt", str(error))]
    return []


def _summary(directory: Path, name: CheckpointName, in_lineage: bool) -> CheckpointSummary:
    path = directory / str(name)
    modified = path.stat().st_mtime
    try:
        manifest = open_checkpoint(path).manifest
    except (Unsealed, UserError) as error:
        problem = f"{MANIFEST}: expected an intact manifest, found {error}"
        return CheckpointSummary(str(name), name.step, name.epoch, None, 0, 0, modified, {}, in_lineage, problem)
    parent = None if manifest.parent is None else str(manifest.parent)
    size, schedule = manifest.nbytes, manifest.state.schedule
    return CheckpointSummary(
        str(name), name.step, name.epoch, parent, size, len(manifest.tensors), modified, schedule, in_lineage, "",
        manifest.state.best.step,
    )  # fmt: skip


def check_fence(directory: Path, number: int) -> None:
    """Raises Fenced if an epoch later than `number` has begun."""
    if any(seen > number for seen in _epochs_seen(directory)):
        raise _fenced(directory, number)


@contextmanager
def not_written(target: Path) -> Iterator[None]:
    """Raises an OSError in its block as the failure to write the checkpoint `target` (CheckpointNotWritten), or as
    Fenced if a later epoch has begun, because that epoch removes temporary files."""
    try:
        yield
    except OSError as error:
        name = CheckpointName.parse(target.name)
        assert name is not None, target
        check_fence(target.parent, name.epoch)
        where = f" ({error.filename})" if error.filename else ""
        intact = "; earlier checkpoints are intact" if names_in(target.parent) else ""
        raise CheckpointNotWritten(
            f"{target}: this checkpoint was not written: {error.strerror or error}{where}{intact}. "
            f"{_REMEDIES.get(error.errno or 0, 'Check that the volume with the checkpoints is mounted and writable')}"
        ) from error


def _reject_existing(target: Path) -> None:
    if target.exists():
        raise CheckpointNotWritten(
            f"{target}: a checkpoint with this name already exists and is never overwritten; move it to another "
            "directory"
        )


def _fenced(directory: Path, number: int) -> Fenced:
    newest = max(_epochs_seen(directory))
    found = (
        f"another process has already begun attempt {number}"
        if newest == number
        else f"attempt {newest} has taken over the run"
    )
    return Fenced(
        f"{directory}: {found}; this process of attempt {number} ends, because only one process may write checkpoints "
        "in this directory",
        epoch=number,
        newest_epoch=newest,
    )
