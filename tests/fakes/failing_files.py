"""Stand-ins for DurableFiles that end the process, run out of space or lose power at the n-th operation."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from spillway_trainer.checkpoints.durable_files import DurableFiles, FileEntry


class CountingFiles(DurableFiles):
    """Calls `before(n)` ahead of operation n = 0, 1, ... Operations are all changes of names, and writes of each half
    of a file's chunk, so that a crash can happen in the middle of a file."""

    def __init__(self, before: Callable[[int], None]) -> None:
        self._numbers = itertools.count()
        self._before = before

    def _next(self) -> None:
        self._before(next(self._numbers))

    def make_directory(self, path: Path) -> None:
        self._next()
        super().make_directory(path)

    def write(self, path: Path, chunks: Iterable[memoryview]) -> FileEntry:
        self._next()
        entry = super().write(path, self._counted(chunks))
        self._next()
        return entry

    def _counted(self, chunks: Iterable[memoryview]) -> Iterator[memoryview]:
        for chunk in chunks:
            flat = chunk.cast("B")
            for half in (flat[: len(flat) // 2], flat[len(flat) // 2 :]):
                yield half
                self._next()

    def rename(self, source: Path, target: Path) -> None:
        self._next()
        super().rename(source, target)

    def sync_directory(self, path: Path) -> None:
        self._next()
        super().sync_directory(path)

    def remove_tree(self, path: Path) -> None:
        if path.exists():
            self._next()
        super().remove_tree(path)


def killed_at(operation: int) -> CountingFiles:
    """Files that end the process at operation `operation` without any cleanup, as kill -9 would. For forked children
    only."""

    def before(number: int) -> None:
        if number == operation:
            os._exit(137)

    return CountingFiles(before)


def full_at(operation: int) -> CountingFiles:
    """Files on a disk that is full at operation `operation` only, as if what is removed afterwards makes room again."""

    def before(number: int) -> None:
        if number == operation:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return CountingFiles(before)


class PowerCut(BaseException):
    """Raised when the machine loses power: no cleanup may follow."""


class LosingFiles(DurableFiles):
    """Files that lose power at an operation. Changes of names that were not synced are lost: created files disappear,
    and renamed ones have their old names again. A file's contents are durable when `write` returns, as DurableFiles
    promises."""

    def __init__(self, operation: int) -> None:
        self._left = operation
        self._unsynced: list[tuple[Path, Callable[[], None]]] = []
        """(directory, function that undoes the change) for each name that changed since its directory was synced,
        oldest first"""
        self._renames: list[tuple[Path, Path]] = []
        self._off = False

    def _step(self) -> None:
        if self._off:
            raise PowerCut
        if self._left == 0:
            self.cut()
        self._left -= 1

    def cut(self) -> None:
        self._off = True
        for _, undo in reversed(self._unsynced):
            undo()
        raise PowerCut

    def make_directory(self, path: Path) -> None:
        self._step()
        super().make_directory(path)
        self._unsynced.append((path.parent, lambda: shutil.rmtree(self._now(path), ignore_errors=True)))

    def write(self, path: Path, chunks: Iterable[memoryview]) -> FileEntry:
        self._step()
        entry = super().write(path, chunks)
        self._unsynced.append((path.parent, lambda: self._now(path).unlink(missing_ok=True)))
        return entry

    def rename(self, source: Path, target: Path) -> None:
        self._step()
        super().rename(source, target)
        self._renames.append((source, target))
        self._unsynced.append((source.parent, lambda: self._rename_back(source, target)))

    def _rename_back(self, source: Path, target: Path) -> None:
        target.rename(source)
        self._renames.remove((source, target))

    def _now(self, path: Path) -> Path:
        """The present path of a file that was written as `path`."""
        for source, target in self._renames:
            if path.is_relative_to(source):
                path = target / path.relative_to(source)
        return path

    def sync_directory(self, path: Path) -> None:
        self._step()
        super().sync_directory(path)
        self._unsynced = [(directory, undo) for directory, undo in self._unsynced if directory != path]

    def remove_tree(self, path: Path) -> None:
        if path.exists():
            self._step()
            super().remove_tree(path)
