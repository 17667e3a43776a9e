"""NvmeSlab: all spilled bytes of one rank in one unlinked file, handed out in 4096-aligned extents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

from torch import Tensor

from spillway.errors import SpillVolumeFull
from spillway.units import format_bytes

from ..spill_file import SpillFile
from .extents import Extents, round_up
from .lanes import Region
from .releases import obtain


class ScratchFile(Protocol):
    """What NvmeSlab needs of a file: kernels.SpillFile, or a fake that fails."""

    @property
    def backend(self) -> str: ...

    def write_batch(self, writes: Sequence[tuple[int, Tensor, str]]) -> list[int]:
        """Write each (file offset, uint8 tensor, label); returns their CRC32C. Raises SpillIOError with the label."""

    def read_batch(self, reads: Sequence[tuple[int, Tensor, int, str]]) -> None:
        """Fill each tensor from its offset and check its CRC32C. Raises SpillIOError with the label, never zeros."""

    def register(self, memory: Tensor) -> None:
        """Told where most tensors will lie, so that it may pin this memory."""

    def close(self) -> None: ...


class OpenFile(Protocol):
    def __call__(self, directory: Path, nbytes: int, *, num_threads: int) -> ScratchFile: ...


class NvmeExtent(Region):
    """`nbytes` of the file from `offset`; a region of the lanes, dropped when its last user is complete."""

    __slots__ = ("_free", "offset")

    def __init__(self, offset: int, nbytes: int, label: str, free: Callable[[int], None]) -> None:
        super().__init__(nbytes, label)
        self.offset = offset
        self._free = free

    def drop(self) -> None:
        self._free(self.offset)


class NvmeSlab:
    """A preallocated file of `nbytes` in `directory` that nobody else sees and that no crash leaves behind."""

    def __init__(self, directory: Path, nbytes: int, num_io_threads: int, *, open_file: OpenFile = SpillFile) -> None:
        self.reclaim: Callable[[], bool] | None = None
        """waits for one release in flight; False when there is none. Set by whoever owns the lanes"""
        self._directory = directory
        self._extents = Extents(nbytes)
        self._file = open_file(directory, self._extents.capacity_bytes, num_threads=num_io_threads)
        self.write_batch = self._file.write_batch
        self.read_batch = self._file.read_batch
        self.register = self._file.register
        self.close = self._file.close

    def allocate(self, nbytes: int, label: str) -> NvmeExtent:
        """An extent of `nbytes`. Waits for releases in flight before it raises SpillVolumeFull."""
        offset = obtain(lambda: self._extents.allocate(nbytes, label), self.reclaim)
        if offset is None:
            self._refuse(nbytes, label)
        return NvmeExtent(offset, round_up(nbytes), label, self._extents.free)

    @property
    def backend(self) -> str:
        """The I/O engine in use."""
        return self._file.backend

    @property
    def capacity_bytes(self) -> int:
        return self._extents.capacity_bytes

    @property
    def held_bytes(self) -> int:
        return self._extents.held_bytes

    @property
    def peak_bytes(self) -> int:
        return self._extents.peak_bytes

    def reset_peak(self) -> None:
        self._extents.reset_peak()

    def _refuse(self, nbytes: int, label: str) -> NoReturn:
        held_bytes = self.held_bytes
        raise SpillVolumeFull(
            f"{self._directory}: {format_bytes(nbytes)} for {label} do not fit into the spill file of "
            f"{format_bytes(self.capacity_bytes)}; held are {format_bytes(held_bytes)}, the longest free run is "
            f"{format_bytes(self._extents.largest_free_bytes)}. Raise spec.memory.budget.nvme.",
            wanted_bytes=nbytes,
            held_bytes=held_bytes,
            budget_bytes=self.capacity_bytes,
        )
