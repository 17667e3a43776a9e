"""File operations for durable writes, used by corpus and checkpoints.

Tests put an implementation in place of DurableFiles that is killed, fills up or loses power at a chosen operation.
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

READ_BYTES = 4 * 2**20
"""Bytes per read while hashing: enough to keep a disk busy, small enough to stay in the cache."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What a file must be: a checkpoint's manifest lists one for each of its files."""

    name: str
    nbytes: int
    xxh3_128: str
    """32 hexadecimal digits over all bytes of the file"""


class DurableFiles:
    """Operations on names and contents. What was written is on the disk when `write` returns; what was created, renamed
    or removed is when `sync_directory` of its directory has returned. Every failure is an OSError."""

    def make_directory(self, path: Path) -> None:
        """Create one directory; it must not exist."""
        path.mkdir()

    def write(self, path: Path, chunks: Iterable[memoryview]) -> FileEntry:
        """Write a new file (it must not exist) and fsync it. A chunk may be reused once the next one is asked for."""
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
        """Give a file or directory its final name; atomic within one file system."""
        source.rename(target)

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @contextmanager
    def temporary_directory(self, path: Path) -> Iterator[None]:
        """A new, empty directory that is gone when the block ends, however it ends, unless it was renamed away."""
        try:
            self.remove_tree(path)
            self.make_directory(path)
            yield
        finally:
            # The cause of the end is what matters; a next start finds and removes what could not be removed now.
            with suppress(OSError):
                self.remove_tree(path)

    def remove_tree(self, path: Path) -> None:
        """Remove a file or a directory with all it holds; what is not there is no error."""
        with suppress(FileNotFoundError, NotADirectoryError):
            if not path.is_dir() or path.is_symlink():
                path.unlink()
                return
            for child in path.iterdir():
                self.remove_tree(child)
            path.rmdir()


def open_regular(path: Path) -> FileIO:
    """Opens for reading. Raises OSError, also for a pipe, whose reader would block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return FileIO(descriptor)


def describe_file(path: Path) -> FileEntry:
    """Length and hash of a file as it is on the disk now."""
    digest = xxhash.xxh3_128()
    buffer = bytearray(READ_BYTES)
    nbytes = 0
    with open_regular(path) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            nbytes += count
    return FileEntry(path.name, nbytes, digest.hexdigest())
