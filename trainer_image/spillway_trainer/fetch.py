"""Downloads what a Location's `fetch` names, once, before anything reads the directory.

    list the files -> D.fetching/<name>.part, four at a time -> size and checksum -> D.fetching/<name> -> rename to D

D is either complete or absent. A download that was killed continues where each file ended; a file that has changed at
its source meanwhile starts again. Two jobs that fetch into the same D take turns, and the second finds it complete.
D/.fetched says where D came from; files that did not come from a download are never overwritten.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

from spillway.api.training_job import TrainingJobSpec
from spillway.errors import UserError
from spillway.units import counted, format_bytes

from .checkpoints.durable_files import DurableFiles
from .corpus.text_source import directory_of

MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""Which files of a model's directory are fetched: a hub may keep the same weights in four formats."""
NUM_AT_ONCE = 4
READ_BYTES = 16 << 20
PATIENCE_SECONDS = 300.0
"""How long a source may leave requests unanswered before the download fails; the next download continues from there."""
LONGEST_WAIT_SECONDS = 30.0
TELL_SECONDS = 10.0
RECORD = ".fetched"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as its source describes it."""

    path: str
    """Its path in the source's file system."""
    name: str
    """Its path relative to the directory."""
    nbytes: int | None
    """None if the source does not say."""
    version: str
    """Changes when the file changes; empty if the source says nothing."""
    algorithm: str = ""
    """How `digest` is computed: md5, sha256, or git (the SHA-1 of a git blob); empty if the source gives no digest."""
    digest: str = ""


def fetch_all(spec: TrainingJobSpec, claims: Mapping[str, str | Path], tell: Callable[[str], None]) -> None:
    """Fetches everything that the job's locations name and that is not there yet. Raises UserError."""
    for field, place in spec.places.items():
        if place.fetch is not None:
            directory = directory_of(place, claims, f"spec.{field}")
            patterns = MODEL_FILES if field == "model.source" else ("*",)
            fetch(f"spec.{field}.fetch.uri", place.fetch.uri, directory, patterns, tell)


def fetch(field: str, uri: str, directory: Path, patterns: Sequence[str], tell: Callable[[str], None]) -> None:
    """Fills `directory` with the files at `uri` whose names match one of `patterns`. Raises UserError, with `field`."""
    where = f"{field} = {uri}"
    directory = directory.resolve()
    staging = directory.with_name(f"{directory.name}.fetching")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _turn(directory, where, tell):
            if _is_there(directory, uri, where):
                return
            source = _Source(uri, where)
            found = source.files(patterns)
            left = sum(remote.nbytes or 0 for remote in found) - _size(staging)
            if left > (free := shutil.disk_usage(directory.parent).free):
                raise UserError(f"{where}: {format_bytes(left)} to fetch, but {directory.parent} has "
                                f"{format_bytes(free)} free; use a larger volume")  # fmt: skip
            _forget_changed(staging, uri, found)
            _Download(source, found, staging, tell).run()
            for place, _, _ in os.walk(staging):
                DurableFiles().sync_directory(Path(place))
            if directory.exists():
                directory.rmdir()  # empty, as _is_there found
            staging.rename(directory)
            DurableFiles().sync_directory(directory.parent)
            tell(f"{where}: complete, {counted(len(found), 'file')}, {format_bytes(_size(directory))}")
    except OSError as error:
        raise UserError(
            f"{where}: cannot write {error.filename or directory}: {error.strerror or error}; check that the directory "
            "is writable and its disk has free space"
        ) from error


@contextmanager
def _turn(directory: Path, where: str, tell: Callable[[str], None]) -> Iterator[None]:
    """Lets one job at a time download into a directory. The lock file beside it is never removed: if it were, a third
    job would lock another file."""
    with directory.with_name(f"{directory.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(f"{where}: another job is downloading into {directory}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _is_there(directory: Path, uri: str, where: str) -> bool:
    record = directory / RECORD
    if not record.exists():
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise UserError(
                f"{where}: {directory} contains files that were not downloaded; move them away, or name another "
                "directory"
            )
        return False
    try:
        came_from = json.loads(record.read_text(encoding="utf-8"))["uri"]
    except (ValueError, KeyError, TypeError):
        came_from = "an unknown place"
    if came_from != uri:
        raise UserError(f"{where}: {directory} was downloaded from {came_from}; remove it, or name another directory")
    return True


def _forget_changed(staging: Path, uri: str, found: Sequence[RemoteFile]) -> None:
    """Deletes from an earlier try the files that have changed at their source, and notes what is fetched now."""
    listing = staging / RECORD
    versions = {one.name: one.version for one in found}
    try:
        before = json.loads(listing.read_text(encoding="utf-8"))
        known = dict(before["files"]) if before["uri"] == uri else {}
    except (OSError, ValueError, KeyError, TypeError):
        known = {}
    wanted = {name for name, version in versions.items() if version and known.get(name) == version}
    for file in [one for one in staging.rglob("*") if one.is_file()] if staging.exists() else ():
        if str(file.relative_to(staging)).removesuffix(".part") not in wanted:
            file.unlink()
    staging.mkdir(parents=True, exist_ok=True)
    new = staging / f"{RECORD}.new"
    new.write_text(json.dumps({"uri": uri, "files": versions}, indent=1) + "\n", encoding="utf-8")
    new.replace(listing)


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


# --- the source -------------------------------------------------------------------------------------------------------


class _Source:
    """A place that fsspec can read."""

    def __init__(self, uri: str, where: str) -> None:
        self.where = where
        scheme = uri.partition("://")[0]
        needed = {"s3": "s3fs", "hf": "huggingface_hub", "https": "aiohttp", "http": "aiohttp"}[scheme]
        if find_spec("fsspec") is None or find_spec(needed) is None:
            raise UserError(
                f"{where}: this download needs the Python packages fsspec and {needed}; run pip install "
                "'spillway-training[fetch,hf]'"
            )
        import fsspec  # noqa: PLC0415 - takes half a second, which only a job that fetches should pay

        self.files_of, self.root = fsspec.core.url_to_fs(uri)
        self._scheme = scheme

    def files(self, patterns: Sequence[str]) -> list[RemoteFile]:
        """Returns the files that match one of `patterns`. Raises UserError if there are none, or if a name is not
        allowed."""

        def listed() -> dict[str, Mapping[str, Any]]:
            self.files_of.invalidate_cache()
            if self._scheme in ("http", "https"):  # one file: the links of a page are not a directory
                return {self.root: self.files_of.info(self.root)}
            return dict(self.files_of.find(self.root, detail=True))

        every = [self._described(path, info) for path, info in self.tried(listed).items() if not path.endswith("/")]
        if self._scheme == "hf" and patterns == ("*",):  # the README of a data set is not text to train on
            every = [one for one in every if one.name != "README.md"]
        chosen = [one for one in every if any(fnmatch(PurePosixPath(one.name).name, pattern) for pattern in patterns)]
        if not chosen:
            what = (
                f"found {counted(len(every), 'file')}, but none named {', '.join(patterns)}"
                if every
                else "nothing is there"
            )
            raise UserError(f"{self.where}: {what}; correct the address")
        for one in chosen:
            parts = PurePosixPath(one.name).parts
            if not parts or ".." in parts or one.name.startswith("/") or "\\" in one.name or parts[0] == RECORD:
                raise UserError(f"{self.where}: a file may not be named {one.name!r}; rename it at the source")
        return sorted(chosen, key=lambda one: one.name)

    def _described(self, path: str, info: Mapping[str, Any]) -> RemoteFile:
        beside = path.removeprefix(self.root).lstrip("/")
        name = beside or PurePosixPath(path.partition("?")[0]).name
        size = info.get("size")
        tag = str(info.get("ETag") or "").strip('"')
        algorithm = digest = ""
        if self._scheme == "s3" and len(tag) == 32:  # an MD5, because the object was uploaded in one part
            algorithm, digest = "md5", tag
        if lfs := info.get("lfs"):
            algorithm, digest = "sha256", str(lfs["sha256"])
        elif info.get("blob_id"):
            algorithm, digest = "git", str(info["blob_id"])
        version = digest or tag or str(info.get("LastModified") or "")
        return RemoteFile(path, name, None if size is None else int(size), version, algorithm, digest)

    def is_own_digest(self, remote: RemoteFile) -> bool:
        """Whether `digest` is that of the file's bytes: it is not if S3 encrypts the object with a customer's key."""
        if remote.algorithm != "md5":
            return True
        bucket, _, key = remote.path.partition("/")
        head = self.tried(lambda: self.files_of.call_s3("head_object", Bucket=bucket, Key=key))
        return head.get("ServerSideEncryption") in (None, "AES256") and not head.get("SSECustomerAlgorithm")

    def tried(self, call: Callable[[], Any], progress: Callable[[], int] = lambda: 0) -> Any:
        """Returns the result of `call`. Repeats it after errors that may pass, until it has made no `progress` for
        PATIENCE_SECONDS; raises UserError then."""
        since, pause, known = time.monotonic(), 1.0, progress()
        while True:
            try:
                return call()
            except UserError:
                raise
            except Exception as error:  # from any of three libraries
                if isinstance(error, OSError) and error.filename and _is_local(error.filename):
                    raise  # an error of the local disk
                if (why := _permanent(error)) is not None:
                    raise UserError(f"{self.where}: {why}") from error
                if progress() > known:
                    since, pause, known = time.monotonic(), 1.0, progress()
                if time.monotonic() - since + pause > PATIENCE_SECONDS:
                    said = f"{type(error).__name__}: {error}"[:300]
                    raise UserError(f"{self.where}: no answer in {PATIENCE_SECONDS:.0f} s: {said}; check the network "
                                    "and the address, then try again: files that are already fetched are "
                                    "kept") from error  # fmt: skip
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_WAIT_SECONDS)


def _is_local(name: object) -> bool:
    return isinstance(name, str | os.PathLike) and Path(name).is_absolute()


_CREDENTIALS = "give credentials: the keys of the Secret fetch.secretName, or the environment of a local run"
_STATUS = {401: f"access denied; {_CREDENTIALS}", 403: f"access denied; {_CREDENTIALS}", 404: "not found"}


def _permanent(error: Exception) -> str | None:
    """Returns what to do about an error that no repetition can mend; None if the error may pass."""
    name = type(error).__name__
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    denied = name in ("NoCredentialsError", "PartialCredentialsError", "GatedRepoError")
    if denied or isinstance(error, PermissionError):
        return f"access denied ({str(error)[:200]}); {_CREDENTIALS}"
    if isinstance(error, FileNotFoundError) or name in ("RepositoryNotFoundError", "RevisionNotFoundError"):
        return f"not found ({str(error)[:200]}); correct the address, or {_CREDENTIALS}"
    return _STATUS.get(status) if isinstance(status, int) else None


# --- the download -----------------------------------------------------------------------------------------------------


class _Download:
    """Downloads several files at once into `staging`."""

    def __init__(
        self, source: _Source, files: Sequence[RemoteFile], staging: Path, tell: Callable[[str], None]
    ) -> None:
        self._source, self._files, self._staging, self._tell = source, files, staging, tell
        self._lock = threading.Lock()
        self._nbytes: dict[str, int] = {}
        """Bytes of each file that are on this disk."""
        self._fetched = self._num_files = 0
        self._told = self._begun = time.monotonic()
        self._stops = threading.Event()

    def run(self) -> None:
        """Downloads all files. Raises the error of the first one that fails, once the others have stopped."""
        with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
            asked = [threads.submit(self._file, remote) for remote in self._files]
            try:
                done, others = wait(asked, return_when=FIRST_EXCEPTION)
            finally:
                self._stops.set()
                threads.shutdown(cancel_futures=True)
            for one in (*done, *others):
                one.result()

    def _file(self, remote: RemoteFile) -> None:
        final = self._staging / remote.name
        final.parent.mkdir(parents=True, exist_ok=True)
        part = final.with_name(f"{final.name}.part")
        if not final.exists():
            for again in (True, False):
                self._source.tried(lambda: self._read(remote, part), lambda: self._nbytes.get(remote.name, 0))
                if (problem := self._problem(remote, part)) is None:
                    break
                part.unlink()
                if not again:
                    raise UserError(f"{self._source.where}: {remote.name}: {problem}, in two tries; the file changes "
                    f"while it is fetched, or is damaged in transfer; try again")  # fmt: skip
            part.rename(final)
        else:
            self._have(remote, final.stat().st_size)
        with self._lock:
            self._num_files += 1

    def _read(self, remote: RemoteFile, part: Path) -> None:
        """Appends the missing bytes to `part`, and flushes it to the disk."""
        with part.open("ab") as file, self._source.files_of.open(remote.path, "rb", cache_type="none") as opened:
            if at := file.tell():
                try:
                    opened.seek(at)
                except (ValueError, OSError):  # the server cannot seek: start from the beginning
                    file.truncate(0)
            while remote.nbytes is None or file.tell() < remote.nbytes:
                if self._stops.is_set():
                    raise UserError("stopped")  # only the other file's error is reported
                left = READ_BYTES if remote.nbytes is None else remote.nbytes - file.tell()
                data = opened.read(min(READ_BYTES, left))
                if not data:
                    break
                file.write(data)
                self._have(remote, file.tell(), len(data))
            file.flush()
            os.fsync(file.fileno())

    def _problem(self, remote: RemoteFile, part: Path) -> str | None:
        size = part.stat().st_size
        if remote.nbytes is not None and size != remote.nbytes:
            return f"{size} bytes were received instead of {remote.nbytes}"
        if not remote.digest:
            return None
        found = hashlib.new({"git": "sha1"}.get(remote.algorithm, remote.algorithm), usedforsecurity=False)
        if remote.algorithm == "git":
            found.update(b"blob %d\0" % size)
        with part.open("rb") as file:
            while data := file.read(READ_BYTES):
                found.update(data)
        if found.hexdigest() == remote.digest or not self._source.is_own_digest(remote):
            return None
        return f"its {remote.algorithm} is {found.hexdigest()}, not {remote.digest}"

    def _have(self, remote: RemoteFile, nbytes: int, new: int = 0) -> None:
        with self._lock:
            self._nbytes[remote.name] = nbytes
            self._fetched += new
            now = time.monotonic()
            if now - self._told < TELL_SECONDS:
                return
            self._told = now
            total = sum(one.nbytes or 0 for one in self._files)
            rate = self._fetched / (now - self._begun)
            self._tell(f"{self._source.where}: {format_bytes(sum(self._nbytes.values()))} of {format_bytes(total)}, "
                       f"{self._num_files} of {len(self._files)} files, {format_bytes(int(rate))}/s")  # fmt: skip
