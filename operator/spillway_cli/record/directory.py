"""RunDirectory: the files of a local run, and the lock that keeps two runs out of one directory.

OUTPUT/  job.json plan.json run.jsonl report.html  corpus/  checkpoints/
         attempts/attempt-E/{trainer.log,termination.json,ended.json}  members/NAME/run.jsonl of a sweep
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from spillway.api.sweep.members import DIRECTORY as MEMBERS_DIRECTORY
from spillway.api.sweep.members import member_directory
from spillway.errors import UserError

LOCK_TRIES, LOCK_PAUSE_SECONDS = 3, 0.05
"""Retries, because `spillway top` briefly holds the lock while it checks it."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    path: Path

    @property
    def job_file(self) -> Path:
        return self.path / "job.json"

    @property
    def plan_file(self) -> Path:
        return self.path / "plan.json"

    @property
    def log(self) -> Path:
        return self.path / "run.jsonl"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def corpus(self) -> Path:
        return self.path / "corpus"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def member_checkpoints(self) -> Path:
        """The directory with a subdirectory for each member of a sweep."""
        return self.checkpoints / MEMBERS_DIRECTORY

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    def member(self, name: str) -> RunDirectory:
        """The directory of one member of a sweep, with its own run.jsonl."""
        return RunDirectory(Path(member_directory(self.path, name)))

    def attempt(self, epoch: int) -> Path:
        return self.attempts / f"attempt-{epoch}"


def create_run_directory(path: Path, option: str = "--output") -> RunDirectory:
    """Creates the directory that `option` names and checks that it is writable. Raises UserError with the reason."""
    if not is_text(path):
        raise UserError(f"{option} {path}: the path is not valid UTF-8; name another directory")
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".spillway-write-probe"
        probe.touch()
        probe.unlink()
    except FileExistsError as error:
        raise UserError(f"{option} {path}: is a file; name a directory") from error
    except OSError as error:
        raise UserError(
            f"{option} {path}: not writable ({error.strerror}); name a directory that you may write to"
        ) from error
    return RunDirectory(path.resolve())


def is_text(path: Path) -> bool:
    """Whether job.json can hold the absolute path: file names are bytes, and not always UTF-8."""
    try:
        str(path.resolve()).encode()
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def explained_if_disk_is_full(run: RunDirectory, *made: Path) -> Iterator[None]:
    """Turns an OSError into a UserError that names the directory; removes those folders of `made` that are empty."""
    try:
        yield
    except OSError as error:
        for directory in made:
            with suppress(OSError):
                directory.rmdir()
        raise UserError(f"--output {run.path}: {error.strerror}; free space, or name another directory") from error


@contextmanager
def exclusive(run: RunDirectory) -> Iterator[int]:
    """Locks the directory for one run; yields the lock's descriptor.

    The lock belongs to the open file: a trainer that inherits the descriptor keeps it, so that no run starts while a
    trainer that outlived its parent still writes its last checkpoint.
    """
    descriptor = os.open(run.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        lock(descriptor)
    except BlockingIOError as error:
        os.close(descriptor)
        raise UserError(
            f"--output {run.path}: another run is training here (or its trainer is still committing a checkpoint); "
            "wait for it, stop it, or name another directory"
        ) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def lock(descriptor: int) -> None:
    """Takes the lock. Raises BlockingIOError when it is held for longer than `is_taken` would hold it."""
    for _ in range(LOCK_TRIES - 1):
        with suppress(BlockingIOError):
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(LOCK_PAUSE_SECONDS)
    return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_taken(run: RunDirectory) -> bool:
    """Whether a run, or a trainer that outlived it, holds the directory."""
    descriptor = os.open(run.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)  # also releases the shared lock


_EPOCH_NAME = re.compile(r"(?:epoch-|attempt-|step-[0-9]+\.e)([0-9]+)(?:\.json)?")


def next_epoch(run: RunDirectory) -> int:
    """1 + the highest attempt number in checkpoints or attempts: numbers only rise, which fences earlier attempts."""
    return 1 + max((*epochs_of(run.checkpoints), *epochs_of(run.attempts)), default=0)


def epochs_of(directory: Path) -> list[int]:
    """Attempt numbers in a directory's names (attempt-E, epoch-E.json, step-N.eE); it need not exist."""
    names = os.listdir(directory) if directory.is_dir() else []
    return sorted(int(match[1]) for match in map(_EPOCH_NAME.fullmatch, names) if match)


def write_atomic(path: Path, text: str) -> None:
    """Replaces a file atomically: readers, also after a crash, see the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def existing_run(path: Path) -> RunDirectory:
    """The run directory that a command reads. Raises UserError when it contains no run."""
    run = RunDirectory(path.resolve())
    if not run.log.is_file() and not run.job_file.is_file():
        found = "no run here (neither job.json nor run.jsonl)" if run.path.is_dir() else "no such directory"
        raise UserError(f"{path}: {found}; name the --output of a `spillway run`")
    return run


def names_a_directory(name: str) -> bool:
    """Whether the word means a run directory: a path, or the name of a directory here (a job of that name needs -n)."""
    return os.sep in name or name in (".", "..") or Path(name).is_dir()


def run_at(name: str) -> RunDirectory:
    """The run directory `name`, which could also be a job's name. Raises UserError when it contains no run."""
    try:
        return existing_run(Path(name))
    except UserError as error:
        job = "" if os.sep in name else f"; for the TrainingJob {name}, give its --namespace"
        raise UserError(f"{error}{job}") from error
