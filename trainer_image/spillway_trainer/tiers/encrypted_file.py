"""EncryptedFile: a scratch file whose bytes are encrypted with AES-256-XTS before they reach the device. Only this
process has the key, which is discarded with the file.

The data unit is a block of 4096 bytes. Its tweak is its position in the file and the number of the write, so no two
writes have the same tweak, even at the same position. Checksums are of the encrypted bytes on the device, so a change
made by the device is detected before decryption. docs/adr/0018-encrypted-spill-files.md has the reasons.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import dispatch as kernels
from ..kernels.io_engine import Direction
from .nvme_slab import OpenFile, ScratchFile
from .spill_file import BLOCK_BYTES

BOUNCE_BYTES = 8 << 20
"""Size of each file's buffer for encrypted bytes that are about to be written; the source stays unchanged."""
CHECKSUM_BITS = 32


class BouncePart(NamedTuple):
    """A part of a request that fits into the bounce buffer."""

    request: int
    offset: int
    tensor: Tensor
    label: str


class EncryptedFile:
    """A nvme_slab.ScratchFile that stores its bytes encrypted in `file`, which it closes. `write_batch` returns, per
    request, the number of the write joined with the checksums of the request's parts, to be passed to `read_batch`
    unchanged."""

    def __init__(self, file: ScratchFile) -> None:
        self._file = file
        self._cipher = kernels.new_cipher()
        self._process = os.getpid()
        self._numbers = itertools.count(1)
        self._bounce = torch.frombuffer(mmap.mmap(-1, BOUNCE_BYTES), dtype=torch.uint8)
        self._writing = threading.Lock()
        """Its holder owns the bounce buffer."""

    @property
    def backend(self) -> str:
        return f"{self._file.backend}+AES-256-XTS"

    def write_batch(self, writes: Sequence[tuple[int, Tensor, str]]) -> list[int]:
        """As ScratchFile.write_batch. Raises RuntimeError in a child of the process that opened the file, because its
        writes would have the same numbers as its parent's."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"the encrypted spill file of process {self._process} was written to in its child process "
                f"{os.getpid()}; the two processes would encrypt different data with the same key and tweak, which is "
                "not safe. Open a separate spill file in the child process"
            )
        checksums: list[list[int]] = [[] for _ in writes]
        with self._writing:
            number = next(self._numbers)
            for window in windows(parts_of(writes)):
                for part, checksum in zip(window, self._write(window, number), strict=True):
                    checksums[part.request].append(checksum)
        return [joined(number, each) for each in checksums]

    def read_batch(self, reads: Sequence[tuple[int, Tensor, int, str]]) -> None:
        """As ScratchFile.read_batch. Nothing is decrypted before all checksums have been verified."""
        parts = parts_of([(offset, tensor, label) for offset, tensor, _, label in reads])
        numbers, checksums = list[int](), list[int]()
        for _, tensor, token, _ in reads:
            number, own = divided(token, -(-tensor.numel() // BOUNCE_BYTES))
            numbers.append(number)
            checksums += own
        self._file.read_batch(
            [(part.offset, part.tensor, checksum, part.label) for part, checksum in zip(parts, checksums, strict=True)]
        )
        for part in parts:
            self._apply(Direction.READ, part.tensor, part.tensor, part.offset, numbers[part.request])

    def give_back(self, runs: Sequence[tuple[int, int]]) -> None:
        self._file.give_back(runs)

    def close(self) -> None:
        """Wipes the key and closes the file. Idempotent."""
        self._cipher.close()
        self._file.close()

    def _write(self, window: Sequence[BouncePart], number: int) -> list[int]:
        encrypted, start = list[tuple[int, Tensor, str]](), 0
        for part in window:
            place = self._bounce[start : start + part.tensor.numel()]
            self._apply(Direction.WRITE, place, part.tensor, part.offset, number)
            encrypted.append((part.offset, place, part.label))
            start += part.tensor.numel()
        return self._file.write_batch(encrypted)

    def _apply(self, direction: Direction, dst: Tensor, src: Tensor, offset: int, number: int) -> None:
        self._cipher.apply(
            direction, dst, src, first_unit=offset // BLOCK_BYTES, sequence=number, unit_bytes=BLOCK_BYTES
        )


def encrypted(open_file: OpenFile) -> OpenFile:
    """Returns `open_file` with encryption of everything that is written."""

    def opened(directory: Path, nbytes: int, *, num_threads: int) -> ScratchFile:
        file = open_file(directory, nbytes, num_threads=num_threads)
        try:
            return EncryptedFile(file)
        except BaseException:
            file.close()
            raise

    return opened


def parts_of(requests: Sequence[tuple[int, Tensor, str]]) -> list[BouncePart]:
    """Returns the parts of all requests, in order; each starts a whole number of bounce buffers into its request."""
    return [
        BouncePart(request, offset + start, tensor[start : start + BOUNCE_BYTES], label)
        for request, (offset, tensor, label) in enumerate(requests)
        for start in range(0, tensor.numel(), BOUNCE_BYTES)
    ]


def windows(parts: Iterable[BouncePart]) -> Iterator[list[BouncePart]]:
    """Yields the parts in groups that fit into the bounce buffer."""
    window, nbytes = list[BouncePart](), 0
    for part in parts:
        if nbytes + part.tensor.numel() > BOUNCE_BYTES:
            yield window
            window, nbytes = [], 0
        window.append(part)
        nbytes += part.tensor.numel()
    if window:
        yield window


def joined(number: int, checksums: Sequence[int]) -> int:
    """Returns one integer of a write's number and its parts' checksums, the last checksum in the lowest bits."""
    for checksum in checksums:
        number = number << CHECKSUM_BITS | checksum
    return number


def divided(token: int, num_parts: int) -> tuple[int, list[int]]:
    """The inverse of `joined`."""
    checksums = [token >> CHECKSUM_BITS * i & (1 << CHECKSUM_BITS) - 1 for i in reversed(range(num_parts))]
    return token >> CHECKSUM_BITS * num_parts, checksums
