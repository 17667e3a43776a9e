"""SpillFile: one unlinked, preallocated file per device and rank, written and read in batches.

The file is scratch. It has no name (O_TMPFILE, or created and unlinked at once), so that its bytes are freed however
the process ends. In a pod's emptyDir it keeps a name, because the kubelet counts only files that it can list, and the
volume ends with the pod. It is allocated in full before the first write, so that a full volume is an error at the start
and not in step 812. It is never synced. A read returns the bytes that were written or raises: never zeros, never other
bytes.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from spillway.errors import SpillIOError, SpillVolumeFull, SpillwayError, UserError
from spillway.units import format_bytes

from ..kernels import native
from ..kernels.io_engine import Direction, IoEngine, IoRequest, PythonEngine, SystemCall, TransferFailure

BLOCK_BYTES = 4096
"""Offsets, sizes and addresses of transfers are multiples of this, as O_DIRECT requires on every common device."""
_ZEROS_BYTES = 4 << 20
_VOLUME_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_WHAT_HELPS = {
    errno.EDQUOT: "raise the quota of this user or project, which is used up even if the disk has free space",
    errno.EFBIG: "use more directories, because the file system allows no file of this size",
}
"""Advice where freeing space does not help, by errno."""
_PUNCH_HOLE = 0x01 | 0x02
"""linux/falloc.h: FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE."""
_BAD_DIRECTORY = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG)
_NO_O_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR)


class Write(NamedTuple):
    """Bytes to write: a uint8 CPU tensor whose address and size are multiples of BLOCK_BYTES."""

    offset: int
    tensor: Tensor
    label: str = ""


class Read(NamedTuple):
    """The tensor to read into, and the checksum that `write_batch` returned for these bytes."""

    offset: int
    tensor: Tensor
    checksum: int
    label: str = ""


class SpillFile:
    """A scratch file of `nbytes` (rounded up to whole blocks) on the volume of `directory`, with `num_threads`
    transfers at a time.

    Raises UserError if the directory is absent or not writable, and SpillVolumeFull if the volume has no room; in both
    cases nothing is left behind. `listed`: the file has a name until it is closed, which remains if the process is
    killed. `descriptor`: that of a file of this size which another process made and will free. `call` replaces pread
    and pwrite in fault tests.
    """

    def __init__(
        self,
        directory: str | Path,
        nbytes: int,
        *,
        num_threads: int = 4,
        listed: bool = False,
        descriptor: int | None = None,
        call: SystemCall | None = None,
    ) -> None:
        if nbytes < 1 or num_threads < 1:
            raise ValueError(
                f"spill file of {nbytes} bytes with {num_threads} threads: both numbers must be at least 1"
            )
        self.directory = Path(directory)
        self.nbytes = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
        self._path = self.directory / f"slab-{secrets.token_hex(8)}" if listed and descriptor is None else None
        if descriptor is None:
            self._file, self.is_direct = _open(self.directory, self._path)
        else:
            self._file, self.is_direct = descriptor, bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        try:
            if descriptor is None:
                _preallocate(self._file, self.directory, self.nbytes)
            engine_type = native.NativeEngine if native.available() else PythonEngine
            self._engine: IoEngine = engine_type(self._file, num_threads, call)
        except BaseException:
            os.close(self._file)
            self._remove()
            raise
        self._is_open = True

    @property
    def descriptor(self) -> int:
        """The file descriptor, for a child process that shares the file."""
        return self._file

    @property
    def backend(self) -> str:
        """How bytes are transferred: "threads" or "python", then "+O_DIRECT" or "+buffered"."""
        return f"{self._engine.name}+{'O_DIRECT' if self.is_direct else 'buffered'}"

    def write_batch(self, requests: Sequence[Write | tuple[int, Tensor] | tuple[int, Tensor, str]]) -> list[int]:
        """Writes all requests, in any order; returns their checksums when all are done.

        Raises the SpillVolumeFull or SpillIOError of the first request that failed; the extents of a failed batch have
        undefined contents.
        """
        named = [Write(*request) for request in requests]
        transfers = [IoRequest(request.offset, request.tensor) for request in named]
        self._perform(Direction.WRITE, transfers, [request.label for request in named])
        return [transfer.checksum for transfer in transfers]

    def read_batch(self, requests: Sequence[Read | tuple[int, Tensor, int, str]]) -> None:
        """Reads all requests, in any order; returns when every byte has arrived and every checksum is right.

        Raises the SpillIOError of the first request that failed; then no tensor of the batch may be used.
        """
        named = [Read(*request) for request in requests]
        transfers = [IoRequest(request.offset, request.tensor, request.checksum) for request in named]
        self._perform(Direction.READ, transfers, [request.label for request in named])

    def give_back(self, runs: Sequence[tuple[int, int]]) -> None:
        """Returns the bytes of these (offset, size) runs to the volume: a run at the end of the file is truncated, any
        other becomes a hole. No transfer may use them afterwards. Raises SpillIOError."""
        for offset, nbytes in sorted(runs, reverse=True):
            try:
                if offset + nbytes == self.nbytes:
                    os.ftruncate(self._file, offset)
                    self.nbytes = offset
                else:
                    _punch_hole(self._file, offset, nbytes)
            except OSError as error:
                raise SpillIOError(
                    f"{self.directory}: the file system cannot free {format_bytes(nbytes)} of the spill file at offset "
                    f"{offset}: {error.strerror} (errno {error.errno}); use a file system that supports hole punching "
                    "(ext4, XFS)",
                    errno=error.errno,
                    offset=offset,
                ) from error

    def close(self) -> None:
        """Ends the threads and frees the bytes. No batch may be in progress. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._engine.close()
            os.close(self._file)
            self._remove()

    def _remove(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _perform(self, direction: Direction, transfers: list[IoRequest], labels: list[str]) -> None:
        if not self._is_open:
            raise ValueError(f"{self.directory}: the spill file is closed")
        for transfer, label in zip(transfers, labels, strict=True):
            self._check(transfer, label)
        self._engine.transfer(direction, transfers)
        for transfer, label in zip(transfers, labels, strict=True):
            if transfer.failure:
                self._raise(direction, transfer, label)

    def _check(self, transfer: IoRequest, label: str) -> None:
        tensor, offset = transfer.tensor, transfer.offset
        if tensor.dtype != torch.uint8 or not tensor.is_contiguous() or not tensor.is_cpu:
            raise ValueError(
                f"{label}: give a contiguous uint8 tensor on the CPU, not {tensor.dtype} on {tensor.device}"
            )
        if offset % BLOCK_BYTES or tensor.numel() % BLOCK_BYTES or tensor.data_ptr() % BLOCK_BYTES:
            raise ValueError(
                f"{label}: offset {offset}, size {tensor.numel()} and memory address {tensor.data_ptr():#x} must all "
                f"be multiples of {BLOCK_BYTES} bytes"
            )
        if offset < 0 or offset + tensor.numel() > self.nbytes:
            raise ValueError(
                f"{label}: bytes {offset} to {offset + tensor.numel()} lie outside the spill file ({self.nbytes} bytes)"
            )

    def _raise(self, direction: Direction, transfer: IoRequest, label: str) -> NoReturn:
        verb = "write" if direction is Direction.WRITE else "read"
        where = f"{self.directory}: {verb} of {label or 'spilled data'} at offset {transfer.error_offset}"
        details = {"label": label, "offset": transfer.error_offset}
        if transfer.failure is TransferFailure.CHECKSUM_MISMATCH:
            raise SpillIOError(
                f"{where}: the {transfer.tensor.numel()} bytes that were read differ from those written (checksum: "
                f"expected {transfer.checksum:#010x}, found {transfer.found:#010x}); the disk or its driver is "
                "faulty, so use another disk",
                **details,
            )
        if transfer.failure is TransferFailure.END_OF_FILE:
            raise SpillIOError(
                f"{where}: the spill file is shorter than that, so another process truncated it, or its volume lost "
                "data; if this happens again, use another volume",
                **details,
            )
        if transfer.os_error in _VOLUME_FULL:
            raise _volume_full(
                self.directory, transfer.tensor.numel(), transfer.os_error, label, offset=transfer.error_offset
            )
        raise SpillIOError(
            f"{where}: {os.strerror(transfer.os_error)} (errno {transfer.os_error}); see the kernel log (dmesg) for "
            "errors of this disk",
            errno=transfer.os_error,
            **details,
        )


def _open(directory: Path, path: Path | None) -> tuple[int, bool]:
    """Opens an empty file, nameless or at `path`; returns it and whether it supports O_DIRECT."""
    try:
        direct = _open_direct(directory, path)
        return (_open_empty(directory, path, 0), False) if direct is None else (direct, True)
    except OSError as error:
        raise _open_error(directory, error) from error


def _open_direct(directory: Path, path: Path | None) -> int | None:
    """Opens the file with O_DIRECT; None if the file system does not support it. A real transfer decides, because
    open(2) may succeed where transfers fail."""
    file = None
    try:
        file = _open_empty(directory, path, os.O_DIRECT)
        with mmap.mmap(-1, BLOCK_BYTES) as block:
            os.pwrite(file, block, 0)
            os.preadv(file, [block], 0)
    except OSError as error:
        if file is not None:
            os.close(file)
        if path is not None:
            path.unlink(missing_ok=True)
        if error.errno == errno.EINVAL:
            return None
        raise
    return file


def _open_empty(directory: Path, path: Path | None, flags: int) -> int:
    flags |= os.O_RDWR | os.O_CLOEXEC | os.O_EXCL
    if path is not None:
        return os.open(path, flags | os.O_CREAT, 0o600)
    try:
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in _NO_O_TMPFILE:
            raise
    path = directory / f".spillway-{secrets.token_hex(8)}"
    file = os.open(path, flags | os.O_CREAT, 0o600)
    path.unlink()
    return file


def _open_error(directory: Path, error: OSError) -> SpillwayError:
    if error.errno in _BAD_DIRECTORY:
        return UserError(
            f"spill directory {directory} cannot be used ({error.strerror}); give a directory that exists and is "
            "writable"
        )
    if error.errno in _VOLUME_FULL:
        return _volume_full(directory, BLOCK_BYTES, error.errno, "the first block")
    return SpillIOError(
        f"{directory}: cannot create a spill file: {error.strerror}; check the volume, or spill elsewhere (spillway "
        "run --spill, or spec.spill.storageClassName)",
        errno=error.errno,
    )


def _preallocate(file: int, directory: Path, nbytes: int) -> None:
    reject_beyond_the_process_limit(directory, nbytes)
    # Checked first, because an allocation that fails fills the volume for everybody until it is undone.
    if nbytes > _free_bytes(directory):
        raise _volume_full(directory, nbytes, errno.ENOSPC, "the spill file")
    try:
        try:
            os.posix_fallocate(file, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            _write_zeros(file, nbytes)  # no fallocate(2) here, and glibc's emulation cannot write to O_DIRECT files
    except OSError as error:
        with suppress(OSError):
            os.ftruncate(file, 0)
        if error.errno in _VOLUME_FULL:
            raise _volume_full(directory, nbytes, error.errno, "the spill file") from error
        raise SpillIOError(
            f"{directory}: cannot allocate {format_bytes(nbytes)} for the spill file: {error.strerror}; see the kernel "
            "log (dmesg) for errors of this disk, or use another volume",
            errno=error.errno,
        ) from error


def reject_beyond_the_process_limit(directory: Path, nbytes: int) -> None:
    """Raises SpillVolumeFull if `nbytes` exceeds the file size that this process may write, whatever space the volume
    has."""
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if most == resource.RLIM_INFINITY or nbytes <= most:
        return
    raise SpillVolumeFull(
        f"{directory}: the spill file needs {nbytes} bytes ({format_bytes(nbytes)}), but this process may write "
        f"files of at most {most} bytes ({format_bytes(most)}) (RLIMIT_FSIZE); raise that limit (ulimit "
        "-f), use more directories, or lower spec.memory.budget.nvme",
        wanted_bytes=nbytes,
        limit_bytes=most,
        errno=errno.EFBIG,
    )


def _write_zeros(file: int, nbytes: int) -> None:
    with mmap.mmap(-1, _ZEROS_BYTES) as zeros, memoryview(zeros) as view:
        offset = 0
        while offset < nbytes:
            with view[: min(_ZEROS_BYTES, nbytes - offset)] as part:
                offset += os.pwrite(file, part, offset)


def _punch_hole(file: int, offset: int, nbytes: int) -> None:
    """Calls fallocate(2), which Python does not provide."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if fallocate(file, _PUNCH_HOLE, offset, nbytes):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _free_bytes(directory: Path) -> int:
    volume = os.statvfs(directory)
    return volume.f_bavail * volume.f_frsize


def _volume_full(
    directory: Path, wanted: int, os_error: int, label: str, *, offset: int | None = None
) -> SpillVolumeFull:
    """`offset`: the position in the file of the write that found the volume full."""
    free = _free_bytes(directory)
    where = "" if offset is None else f" at offset {offset}"
    return SpillVolumeFull(
        f"{directory}: no room for {label or 'spilled data'}{where} ({os.strerror(os_error)}, errno {os_error}): "
        f"{wanted} bytes ({format_bytes(wanted)}) are needed, {free} bytes ({format_bytes(free)}) are free; "
        f"{_WHAT_HELPS.get(os_error, 'free some space')}, give another directory, or lower spec.memory.budget.nvme",
        label=label,
        wanted_bytes=wanted,
        free_bytes=free,
        errno=os_error,
        **({} if offset is None else {"offset": offset}),
    )
