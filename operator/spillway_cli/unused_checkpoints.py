"""`spillway ckpt gc`: checkpoint directories of TrainingJobs that no longer exist.

Deletes only directories that say which job they belong to (runs in a cluster write their owner into epoch-E.json), and
only if nothing was written there for a while, because a job may be newer than the list of jobs.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from spillway.api.sweep.members import DIRECTORY as MEMBERS
from spillway.errors import ExitCode, UserError
from spillway.units import format_bytes, format_seconds
from spillway_trainer.checkpoints.directory import Owner, owner_of

from .cluster.api import connect, jobs_path
from .console import Format, print_json, result_console, table

DEEPEST = 6
"""Levels below DIR that are searched."""
_AGE = re.compile(r"([1-9][0-9]{0,5})([mhd])")
_SECONDS = {"m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True)
class Found:
    """The directory of one job."""

    path: Path
    owners: tuple[Owner | None, ...]
    """Owners of all checkpoint directories in it: a sweep has one directory per member, and another job's may lie
    below."""
    nbytes: int
    written_seconds: float
    """Unix seconds of the last change."""


def seconds_in(age: str) -> int:
    """Seconds in an age such as "30m", "12h" or "7d". Raises UserError for anything else."""
    match = _AGE.fullmatch(age)
    if match is None:
        raise UserError(f"--older-than {age}: write a number and a unit (m, h or d), for example 7d")
    return int(match[1]) * _SECONDS[match[2]]


def collect(directory: Path, older_than: str, context: str | None, output: Format, *, delete: bool) -> int:
    """Lists, and with `delete` removes, directories below `directory` whose job no longer exists."""
    least_age = seconds_in(older_than)
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory; give the directory where a claim with checkpoints is mounted")
    found = [read(path) for path in job_directories(directory)]
    living = {str(job["metadata"]["uid"]) for job in connect(context).items(jobs_path(None))}
    now = time.time()
    states = {one.path: state_of(one, living, now, least_age) for one in found}
    unused = [one for one in found if states[one.path] == "unused"]
    for one in unused if delete else ():
        try:
            shutil.rmtree(one.path)
        except OSError as error:
            raise UserError(f"{one.path}: not deleted: {error.strerror or error}") from error
    freed = sum(one.nbytes for one in unused)
    if output is Format.JSON:
        documents = [as_json(one, states[one.path]) for one in found]
        print_json({"directories": documents, "unusedBytes": freed, "deleted": delete})
        return ExitCode.COMPLETED
    shown = table("directory", "job", "size", "last written", "state")
    for one in found:
        job = ", ".join(f"{owner.namespace}/{owner.name}" for owner in one.owners if owner is not None) or "-"
        age = f"{format_seconds(max(0.0, now - one.written_seconds))} ago"
        shown.add_row(str(one.path), job, format_bytes(one.nbytes), age, states[one.path])
    result_console().print(shown if found else f"no checkpoints below {directory}")
    if unused:
        done = "deleted" if delete else "unused; delete them with --delete"
        result_console().print(f"{len(unused)} of {len(found)} directories, {format_bytes(freed)}: {done}")
    return ExitCode.COMPLETED


def state_of(one: Found, living: set[str], now: float, least_age: int) -> str:
    if None in one.owners:
        return "kept: the directory does not say which job it belongs to"
    if any(owner is not None and owner.uid in living for owner in one.owners):
        return "in use: the job exists"
    if now - one.written_seconds < least_age:
        return "kept: written to more recently than --older-than"
    return "unused"


def job_directories(directory: Path) -> Iterator[Path]:
    """Yields directories with checkpoints; for all members of a sweep, the one of their sweep. Links are not
    followed."""
    seen: set[Path] = set()
    for folder, names, files in os.walk(directory):
        here = Path(folder)
        if len(here.relative_to(directory).parts) >= DEEPEST:
            names.clear()
        if any(is_epoch_file(name) for name in files):
            job = here.parent.parent if here.parent.name == MEMBERS else here
            names.clear()
            if job not in seen:
                seen.add(job)
                yield job


def is_epoch_file(name: str) -> bool:
    return name.startswith("epoch-") and name.endswith(".json")


def read(path: Path) -> Found:
    """Reads sizes and times of all files; files that vanish meanwhile do not count."""
    owners: list[Owner | None] = []
    nbytes, newest = 0, 0.0
    for folder, _, files in os.walk(path):
        if any(is_epoch_file(name) for name in files) and (owner := owner_of(Path(folder))) not in owners:
            owners.append(owner)
        for name in files:
            try:
                status = os.lstat(Path(folder) / name)
            except FileNotFoundError:
                continue
            nbytes, newest = nbytes + status.st_size, max(newest, status.st_mtime)
    return Found(path, tuple(owners), nbytes, newest)


def as_json(one: Found, state: str) -> dict[str, object]:
    owners = [owner._asdict() for owner in one.owners if owner is not None]
    written = datetime.fromtimestamp(one.written_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"path": str(one.path), "owners": owners, "bytes": one.nbytes, "lastWritten": written, "state": state}
