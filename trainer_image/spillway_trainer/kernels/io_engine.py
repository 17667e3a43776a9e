"""Moves batches between tensors and an open file: the interface, and its plain Python form.

`native.NativeEngine` is the fast one; `PythonEngine` is used if the native library is absent or switched off. Both cut
requests into pieces, keep several in flight, resume short transfers at a whole sector, retry EINTR and EAGAIN, and
verify the checksums of what they read. tests/faults/test_spill_file.py checks that they behave the same.
"""

from __future__ import annotations

import errno
import os
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from torch import Tensor

_PIECE_BYTES = 4 << 20
_SECTOR_BYTES = 512
"""O_DIRECT cannot resume at other offsets, and a device's short transfers end at a sector."""
_MAX_IDLE_CALLS = 1000
"""Consecutive calls that move nothing (EINTR, EAGAIN, less than a sector) after which a transfer fails."""


class Direction(IntEnum):
    """The enum spillway_direction of csrc/include/spillway.h."""

    READ = 0
    WRITE = 1


class TransferFailure(IntEnum):
    """Why a transfer failed: the codes of spillway_error that are possible for a transfer."""

    NONE = 0
    IO_FAILED = 5
    END_OF_FILE = 6
    CHECKSUM_MISMATCH = 7


@dataclass(slots=True)
class IoRequest:
    """One request to an engine, and its outcome."""

    offset: int
    tensor: Tensor
    """uint8, contiguous, on the CPU."""
    checksum: int = 0
    """For a read, the expected checksum; for a write, that of the bytes, set by the engine. CRC-32C natively, zlib's
    CRC-32 in Python; only compared with values of the same engine."""
    found: int = 0
    """For a read, the checksum of the bytes that arrived."""
    failure: TransferFailure = TransferFailure.NONE
    os_error: int = 0
    """errno if `failure` is IO_FAILED."""
    error_offset: int = 0
    """File offset at which the transfer stopped."""


SystemCall = Callable[[Direction, int, memoryview, int], int]
"""(direction, file, memory, offset) -> bytes moved, or -errno. Fault tests use their own in place of `system_call`."""


def system_call(direction: Direction, file: int, memory: memoryview, offset: int) -> int:
    """Calls pwrite(2) or pread(2) for the whole of `memory`."""
    try:
        if direction is Direction.WRITE:
            return os.pwrite(file, memory, offset)
        return os.preadv(file, [memory], offset)
    except OSError as error:
        return -(error.errno or errno.EIO)


class IoEngine(Protocol):
    """Transfers over one open file, which belongs to the caller and must outlive the engine."""

    name: str
    """How it moves bytes, as shown to people: "threads" or "python"."""

    def transfer(self, direction: Direction, transfers: Sequence[IoRequest]) -> None:
        """Performs all transfers, in any order, and sets their outcomes; returns when all have ended. Thread-safe."""

    def close(self) -> None:
        """Ends the threads. The engine must be idle."""


@dataclass(slots=True)
class _Piece:
    """A range of one transfer that one thread moves, and its outcome."""

    transfer: IoRequest
    memory: memoryview
    offset: int
    moved: int = 0
    failure: TransferFailure = TransferFailure.NONE
    os_error: int = 0


class PythonEngine:
    """os.pwrite and os.preadv on threads of its own."""

    name = "python"

    def __init__(self, file: int, num_threads: int, call: SystemCall | None = None) -> None:
        self._file = file
        self._call = call or system_call
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, "spillway-io")
        self._process = os.getpid()

    def transfer(self, direction: Direction, transfers: Sequence[IoRequest]) -> None:
        if self._process != os.getpid():  # threads do not survive a fork
            self._threads, self._process = ThreadPoolExecutor(self._num_threads, "spillway-io"), os.getpid()
        pieces = [piece for transfer in transfers for piece in _cut(transfer)]
        for _ in self._threads.map(lambda piece: self._move(direction, piece), pieces):
            pass
        for piece in reversed(pieces):  # so that a transfer keeps its first failure
            if piece.failure:
                transfer = piece.transfer
                transfer.failure, transfer.os_error = piece.failure, piece.os_error
                transfer.error_offset = piece.offset + piece.moved
        for transfer in transfers:
            _finish(direction, transfer)

    def close(self) -> None:
        self._threads.shutdown()

    def _move(self, direction: Direction, piece: _Piece) -> None:
        idle_calls = 0
        while piece.moved < len(piece.memory):
            result = self._call(direction, self._file, piece.memory[piece.moved :], piece.offset + piece.moved)
            if result == 0 and direction is Direction.READ:
                piece.failure = TransferFailure.END_OF_FILE
                return
            again = result in (-errno.EINTR, -errno.EAGAIN, 0)
            if result < 0 and not again:
                piece.failure, piece.os_error = TransferFailure.IO_FAILED, -result
                return
            before = piece.moved
            if not again:
                piece.moved = _resume_point(piece, result)
            idle_calls = 0 if piece.moved > before else idle_calls + 1
            if idle_calls >= _MAX_IDLE_CALLS:
                piece.failure, piece.os_error = TransferFailure.IO_FAILED, -result if result < 0 else errno.EIO
                return
            if result == -errno.EAGAIN:
                time.sleep(0)


def memory_of(tensor: Tensor) -> memoryview:
    """Returns the bytes of a contiguous uint8 CPU tensor, sharing its memory."""
    return tensor.numpy().data


def _cut(transfer: IoRequest) -> list[_Piece]:
    transfer.failure, transfer.os_error, transfer.error_offset = TransferFailure.NONE, 0, 0
    memory = memory_of(transfer.tensor)
    starts = range(0, len(memory), _PIECE_BYTES)
    return [_Piece(transfer, memory[start : start + _PIECE_BYTES], transfer.offset + start) for start in starts]


def _resume_point(piece: _Piece, moved_now: int) -> int:
    moved = min(piece.moved + moved_now, len(piece.memory))
    return moved if moved == len(piece.memory) else moved - moved % _SECTOR_BYTES


def _finish(direction: Direction, transfer: IoRequest) -> None:
    checksum = zlib.crc32(memory_of(transfer.tensor))
    if direction is Direction.WRITE:
        transfer.checksum = checksum
        return
    transfer.found = checksum
    if transfer.failure is TransferFailure.NONE and checksum != transfer.checksum:
        transfer.failure, transfer.error_offset = TransferFailure.CHECKSUM_MISMATCH, transfer.offset
