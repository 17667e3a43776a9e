"""File operations for durable writes, used by corpus and checkpoints.

Tests replace DurableFiles by an implementation that is killed, fills up or loses power at a chosen operation.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import xxhash

ANOTHER_DIRECTORY = "another directory (spillway run --output, or spec.checkpoint.subPath)"
"""How a user moves a job's corpus and checkpoints."""
READ_BYTES = 4 * 2**20
"""Bytes per read while hashing: large enough to keep a disk busy, small enough to stay in the cache."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """The expected size and hash of a file: a checkpoint's manifest lists one for each of its files."""

    name: str
    nbytes: int
    xxh3_128: str
    """The hash of all bytes of the file, 32 hexadecimal digits."""


class DurableFiles:
    """Operations on names and contents. Content is on the disk when `write` returns. A creation, renaming or removal is
    on the disk when `sync_directory` of its directory has returned. Every failure is an OSError."""

    def make_directory(self, path: Path) -> None:
        """Creates one directory; it must not exist."""
        path.mkdir()

    def write(self, path: Path, chunks: Iterable[memoryview]) -> FileEntry:
        """Writes a new file (it must not exist) and fsyncs it. A chunk may be reused once the next one is requested."""
        digest = xxhash.xxh3_128()
        nbytes = 0
        with path.open("xb", buffering=0) as file:
            for chunk in chunks:
                rest = chunk.cast("B")
                digest.update(rest)
                nbytes += len(rest)
                while rest:
                    rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
            # A container's page cache counts against its memory limit, and a later read must see the disk's bytes.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return FileEntry(path.name, nbytes, digest.hexdigest())

    def rename(self, source: Path, target: Path) -> None:
        """Gives a file or directory its final name; atomic within one file system."""
        source.rename(target)

    def sync_directory(self, path: Path) -> None:
        """Makes the names in a directory durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @contextmanager
    def temporary_directory(self, path: Path) -> Iterator[None]:
        """Creates an empty directory that is removed when the block ends, however it ends, unless it was renamed."""
        try:
            self.remove_tree(path)
            self.make_directory(path)
            yield
        finally:
            # An error here must not hide the error that ended the block; the next start removes what could not be
            # removed now.
            with suppress(OSError):
                self.remove_tree(path)

    def remove_tree(self, path: Path) -> None:
        """Removes a file or a directory with everything in it; it is no error if it does not exist."""
        with suppress(FileNotFoundError, NotADirectoryError):
            if not path.is_dir() or path.is_symlink():
                path.unlink()
                return
            for child in path.iterdir():
                self.remove_tree(child)
            path.rmdir()


def open_regular(path: Path) -> FileIO:
    """Opens a regular file for reading. Raises OSError, also for a pipe, whose reader would block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return FileIO(descriptor)


def describe_file(path: Path) -> FileEntry:
    """Returns the length and hash of a file as it is on the disk now."""
    digest = xxhash.xxh3_128()
    buffer = bytearray(READ_BYTES)
    nbytes = 0
    with open_regular(path) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            nbytes += count
    return FileEntry(path.name, nbytes, digest.hexdigest())
