"""A spill file in memory that fails, corrupts data or stalls when a test asks for it."""

from __future__ import annotations

import errno
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from spillway.errors import SpillIOError


class FakeSpillFile:
    """Stands in for SpillFile; `failing` and `stalled` may change at any time."""

    backend = "fake"

    def __init__(self, directory: Path, nbytes: int, *, num_threads: int) -> None:
        self.directory, self.nbytes = directory, nbytes
        self.failing: set[str] = set()
        """with "read" or "write", that operation fails with EIO; with "flip", one bit of each read is wrong"""
        self.stalled: threading.Event | None = None
        """if there is one, reads and writes wait until it is set"""
        self.is_closed = False
        self._blocks: dict[int, Tensor] = {}

    def write_batch(self, writes: Sequence[tuple[int, Tensor, str]]) -> list[int]:
        self._hold_up()
        for offset, tensor, label in writes:
            if "write" in self.failing:
                self._fail("write", label, offset)
            self._blocks[offset] = tensor.clone()
        return [checksum(tensor) for _, tensor, _ in writes]

    def read_batch(self, reads: Sequence[tuple[int, Tensor, int, str]]) -> None:
        self._hold_up()
        for offset, tensor, expected, label in reads:
            if "read" in self.failing:
                self._fail("read", label, offset)
            tensor.copy_(self._blocks[offset])
            if "flip" in self.failing:
                tensor[0] ^= 1
            if checksum(tensor) != expected:
                raise SpillIOError(
                    f"{self.directory}: {label} at offset {offset}: checksum", label=label, offset=offset
                )

    def give_back(self, runs: Sequence[tuple[int, int]]) -> None:
        """Does nothing, because there is no volume."""

    def close(self) -> None:
        self.is_closed = True

    def _hold_up(self) -> None:
        if self.stalled is not None:
            self.stalled.wait()

    def _fail(self, verb: str, label: str, offset: int) -> None:
        raise SpillIOError(
            f"{self.directory}: {verb} of {label} at offset {offset}: Input/output error (errno {errno.EIO})",
            errno=errno.EIO,
            label=label,
            offset=offset,
        )


def checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.numpy())
