"""NvmeSlab: all spilled bytes of one rank, in one unlinked file per device, handed out in 4096-aligned extents.

An extent of a slab on several devices is striped: it has a piece on each, sized by how fast each device has been so
far, and each device's own engine moves its piece. Callers see one run of bytes.

Bytes that a device cannot write are not lost: they are still in host memory when the write fails. They stay there
(`Kept`) until their extent is dropped, as long as the host slab has room or may grow. The device is retired by the
rules of spill_health.py, and the run continues and reports it. If there is no room, the step fails with the write's
error. Bytes that cannot be read are always an error.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn, Protocol

from torch import Tensor

from spillway.errors import SpillIOError, SpillVolumeFull, SpillwayError
from spillway.units import format_bytes

from ..kernels import dispatch as kernels
from .extents import Extents, round_up
from .host_slab import HostSlab
from .lanes import Buffer, Region, kept_error
from .releases import obtain
from .spill_file import SpillFile
from .spill_health import HEALTHY, DeviceHealth, after_failed_write, after_transfer

STRIPE_BYTES = 1 << 20
"""Minimum size of an extent's pieces: smaller transfers cost more than a second device gains."""
RAISE_BUDGET = "Raise spec.memory.budget.nvme."
WRITE_FAILED, DEVICE_RETIRED, DEVICE_SLOW, REDIRECTED = "write_failed", "device_retired", "device_slow", "redirected"
FAULT_KINDS = (WRITE_FAILED, DEVICE_RETIRED, DEVICE_SLOW, REDIRECTED)
"""The kinds that the metric counts. "redirected" is a spill that went to a higher tier because of a fault."""


class ScratchFile(Protocol):
    """The operations that NvmeSlab needs from a file: implemented by SpillFile and by a fake that fails."""

    @property
    def backend(self) -> str: ...

    def write_batch(self, writes: Sequence[tuple[int, Tensor, str]]) -> list[int]:
        """Writes each (file offset, uint8 tensor, label); returns their CRC32C. Raises SpillIOError with the label."""

    def read_batch(self, reads: Sequence[tuple[int, Tensor, int, str]]) -> None:
        """Fills each tensor from its offset and checks its CRC32C. Raises SpillIOError with the label, never returns
        zeros."""

    def give_back(self, runs: Sequence[tuple[int, int]]) -> None:
        """Returns the bytes of these (offset, size) runs to the volume; they are not used any more. Raises SpillIOError
        if that fails."""

    def close(self) -> None: ...


class OpenFile(Protocol):
    def __call__(self, directory: Path, nbytes: int, *, num_threads: int) -> ScratchFile: ...


class PlannedRates(NamedTuple):
    """Bytes per second of this rank's share of all devices, as the plan assumed; 0 = unknown."""

    read: float = 0.0
    write: float = 0.0


UNKNOWN_RATES = PlannedRates()


@dataclass(slots=True, eq=False)
class Device:
    """One volume: its file, the owners of its bytes, and its health."""

    index: int
    """Its index in the slab."""
    directory: Path
    file: ScratchFile
    extents: Extents
    reads: DeviceHealth = HEALTHY
    """Used only for the speed of reads: a failed read ends the step."""
    writes: DeviceHealth = HEALTHY
    moved_bytes: int = 0
    moving_seconds: float = 0.0

    @property
    def weight(self) -> float:
        """Bytes per second so far; 0 before the first transfer."""
        return self.moved_bytes / self.moving_seconds if self.moving_seconds else 0.0

    @property
    def load(self) -> float:
        """Its held bytes, in seconds at its own speed."""
        return self.extents.held_bytes / (self.weight or 1.0)


class ExtentPiece(NamedTuple):
    """A run of one device's bytes, which holds the extent's bytes from `start` on."""

    device: Device
    offset: int
    nbytes: int
    start: int


class Address(NamedTuple):
    """A place in an extent, in bytes from its start."""

    extent: NvmeExtent
    offset: int


class StoredPiece(NamedTuple):
    """A part of one write: where it is stored and the checksum that its bytes must have."""

    device: Device
    offset: int
    nbytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes that could not be written, in host memory."""

    memory: Tensor
    is_lent: bool = False
    """The memory stays with its owner; otherwise the extent frees it."""


Stored = tuple[StoredPiece, ...] | Kept
"""Where a write's bytes are stored: the argument of a later read."""


class NvmeExtent(Region):
    """A run of the slab's bytes; a region of the lanes, dropped when its last user is complete."""

    __slots__ = ("_retired", "_slab", "home", "kept", "pieces")

    def __init__(self, slab: NvmeSlab, pieces: Sequence[ExtentPiece], label: str) -> None:
        super().__init__(sum(piece.nbytes for piece in pieces), label)
        self._slab = slab
        self._retired: set[Device] = set()
        self.pieces = tuple(pieces)
        self.kept: dict[int, Kept] = {}
        """Bytes kept in host memory, by offset in the extent."""
        self.home: Buffer | None = None
        """The buffer that lends the memory of everything in `kept`."""

    def at(self, offset: int) -> Address:
        return Address(self, offset)

    def pieces_of(self, offset: int, nbytes: int) -> Iterator[ExtentPiece]:
        """Returns the pieces that hold some of these bytes, in order."""
        return (p for p in self.pieces if p.start < offset + nbytes and offset < p.start + p.nbytes)

    def retire(self, devices: Iterable[Device]) -> None:
        """Marks its pieces on `devices` as never to be used again."""
        self._retired.update(devices)

    def live_in(self, buffer: Buffer) -> None:
        """Makes `buffer`, which has all its bytes, keep them until this extent is dropped."""
        if self.home is None:
            self.home = buffer
            buffer.retain()

    def drop(self) -> None:
        """Safe in a destructor: takes no lock."""
        for piece in self.pieces:
            piece.device.extents.free(piece.offset, reusable=piece.device not in self._retired)
        self._slab.forget(self.kept.values())
        self.kept = {}
        if self.home is not None:
            self.home.drop()


class DevicePart(NamedTuple):
    """One device's part of one request: `tensor` is written to, or read from, `offset` of its file."""

    request: int
    device: Device
    offset: int
    tensor: Tensor
    label: str
    checksum: int = 0
    """The expected checksum of a read."""


def file_bytes(nbytes: int, num_devices: int) -> int:
    """Returns the bytes of each device's file, for a slab of `nbytes` in all."""
    return round_up(-(-nbytes // num_devices))


class NvmeSlab:
    """Preallocated files of `nbytes` in all, one in each of `directories`, that are invisible to others and that no
    crash leaves behind.

    `host` keeps bytes that cannot be written; without it such a write is an error. `tell` receives a line for each
    fault that the run survives, on the thread that noticed it.
    """

    def __init__(
        self,
        directories: Path | Sequence[Path],
        nbytes: int,
        num_io_threads: int,
        *,
        open_file: OpenFile = SpillFile,
        host: HostSlab | None = None,
        tell: Callable[[str], None] = lambda line: None,
        planned: PlannedRates = UNKNOWN_RATES,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.reclaim: Callable[[], bool] | None = None
        """Waits for one release in flight; False if there is none. Set by the owner of the lanes."""
        self.if_full = RAISE_BUDGET
        """Advice in the error for a full slab, worded by whoever set `nbytes`."""
        self.first_failure: SpillwayError | None = None
        """The first failure of a write."""
        self._host, self._tell, self._planned, self._clock = host, tell, planned, clock
        self._faults: Counter[str] = Counter()
        self._told: set[str] = set()
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._peak_bytes = 0
        self._devices: list[Device] = []
        places = [directories] if isinstance(directories, Path) else list(directories)
        try:
            for index, directory in enumerate(places):
                extents = Extents(file_bytes(nbytes, len(places)))
                file = open_file(directory, extents.capacity_bytes, num_threads=num_io_threads)
                self._devices.append(Device(index, directory, file, extents))
        except BaseException:
            self._close_files()
            raise
        # Two threads per device, because lanes read and write at the same time.
        self._threads = ThreadPoolExecutor(2 * len(places), "spill-device") if len(places) > 1 else None

    def allocate(self, nbytes: int, label: str) -> NvmeExtent:
        """Returns an extent of `nbytes`. Waits for releases in flight before it raises SpillVolumeFull."""
        pieces = obtain(lambda: self._place(round_up(max(nbytes, 1)), label), self.reclaim)
        if pieces is None:
            self._reject(nbytes, label)
        self._peak_bytes = max(self._peak_bytes, self.held_bytes)
        return NvmeExtent(self, pieces, label)

    def write_batch(
        self, writes: Sequence[tuple[Address, Tensor, str]], source: Buffer | None = None, *, copies: bool = True
    ) -> list[Stored]:
        """Writes each (address, uint8 tensor in whole blocks, label); returns the arguments that read them back.

        Bytes that a device rejects stay in host memory: in `source`, which has all bytes of one extent and becomes its
        home, or in a copy. Raises SpillIOError or SpillVolumeFull if there is no room for the copy, or if `copies` is
        False.
        """
        parts = [
            DevicePart(request, piece.device, offset, run, label)
            for request, (address, tensor, label) in enumerate(writes)
            if not self._is_kept(address, tensor.numel())
            for piece, offset, run in runs(address, tensor)
        ]
        checksums, errors = self._on_every_device(parts, self._write_to)
        newly_retired = [device for device, error in errors.items() if self._retires(device, error)]
        if not copies:
            self._say_survived(errors, newly_retired)  # the caller still has the bytes
        stored: list[Stored] = []
        for request, (address, tensor, label) in enumerate(writes):
            own = [part for part in parts if part.request == request]
            failed = next((errors[part.device] for part in own if part.device in errors), None)
            if failed is not None:
                address.extent.retire(errors)
            if own and failed is None:
                stored.append(tuple(StoredPiece(p.device, p.offset, p.tensor.numel(), checksums[id(p)]) for p in own))
            else:
                stored.append(self._keep(address, tensor, label, failed, source, copies=copies))
        if copies:
            self._say_survived(errors, newly_retired)
        return stored

    def read_batch(self, reads: Sequence[tuple[Stored, Tensor, str]]) -> None:
        """Fills each tensor with its stored bytes. Raises SpillIOError for bytes that do not come back as they were
        written: never returns zeros or other bytes."""
        parts: list[DevicePart] = []
        for request, (stored, tensor, label) in enumerate(reads):
            if isinstance(stored, Kept):
                kernels.copy(tensor, stored.memory)
                continue
            start = 0
            for device, offset, nbytes, checksum in stored:
                parts.append(DevicePart(request, device, offset, tensor[start : start + nbytes], label, checksum))
                start += nbytes
        _, errors = self._on_every_device(parts, self._read_from)
        for part in parts:  # in the order of the requests, so that the first failure is the one that is raised
            if part.device in errors:
                raise errors[part.device]

    def redirect(self, label: str, where: str) -> None:
        """Reports that `label` goes to `where` instead of this slab, because of an earlier fault."""
        self._count(REDIRECTED)
        self._say(
            f"redirected to {where}",
            f"{label}: goes to {where} instead of NVMe, because {self._state()}; later spills go there, too",
        )

    @property
    def survives(self) -> bool:
        """Whether the run survives a failed write if there is memory for its bytes."""
        return self._host is not None

    @property
    def takes_spills(self) -> bool:
        """False when every device is retired."""
        return not all(device.writes.is_retired for device in self._devices)

    @property
    def is_slow(self) -> bool:
        """True when no device is as fast as the plan needs: spills should then go to host memory while it has room."""
        return all(d.writes.is_slow or d.reads.is_slow for d in self._devices if not d.writes.is_retired)

    def host_has_room(self, nbytes: int) -> bool:
        """Whether host memory could take `nbytes` at once."""
        return self._host is not None and self._host.largest_free_bytes >= nbytes

    def faults(self) -> dict[str, int]:
        """Returns the number of faults survived so far, by kind."""
        return dict(self._faults)

    def give_back(self, nbytes: int) -> int:
        """Shrinks by `nbytes`, divided among the devices, or by less if not so much is free; returns by how much. Bytes
        in use do not move."""
        left = nbytes
        by_room = sorted(self._devices, key=lambda each: each.extents.capacity_bytes - each.extents.held_bytes)
        for num_before, device in enumerate(by_room):
            runs = device.extents.withdraw(max(0, left) // (len(by_room) - num_before))
            left -= sum(size for _, size in runs)
            try:
                device.file.give_back(runs)
            except SpillIOError as error:
                self._tell(f"spill: {error}. This part of the file is not used again, and its space is not freed")
        return nbytes - left

    def close(self) -> None:
        """Ends the threads and frees the bytes. No batch may be in progress. Idempotent."""
        if self._threads is not None:
            self._threads.shutdown()
        self._close_files()

    @property
    def backend(self) -> str:
        """The I/O engine in use, and the number of devices if there are several."""
        several = f" x{len(self._devices)}" if len(self._devices) > 1 else ""
        return f"{self._devices[0].file.backend}{several}"

    def device(self, index: int) -> Device:
        return self._devices[index]

    @property
    def directories(self) -> list[Path]:
        return [device.directory for device in self._devices]

    @property
    def capacity_bytes(self) -> int:
        return sum(device.extents.capacity_bytes for device in self._devices)

    @property
    def held_bytes(self) -> int:
        return sum(device.extents.held_bytes for device in self._devices)

    @property
    def peak_bytes(self) -> int:
        """Highest bytes held since the start or the last reset_peak()."""
        return self._peak_bytes

    def reset_peak(self) -> None:
        self._peak_bytes = self.held_bytes

    # --- where bytes go -----------------------------------------------------------------------------------------------

    def _place(self, nbytes: int, label: str) -> list[ExtentPiece] | None:
        """Returns pieces of `nbytes` in all on devices that take writes, fast ones first; None if there is no room."""
        self._check_process()
        usable = [device for device in self._devices if not device.writes.is_retired]
        quick = [device for device in usable if not device.writes.is_slow] or usable
        chosen = sorted(quick, key=lambda device: device.load)[: max(1, nbytes // STRIPE_BYTES)]
        wanted = list(zip(chosen, divided(nbytes, [device.weight for device in chosen]), strict=True))
        pieces, start = list[ExtentPiece](), 0
        for preferred, size in wanted:
            others = (device for device in usable if device is not preferred)
            piece = next(filter(None, (take(device, size, start, label) for device in (preferred, *others))), None)
            if piece is None:
                for taken in pieces:
                    taken.device.extents.free(taken.offset)
                return None
            pieces.append(piece)
            start += size
        return pieces or None

    def _reject(self, nbytes: int, label: str) -> NoReturn:
        held_bytes = self.held_bytes
        directories = ", ".join(str(device.directory) for device in self._devices)
        retired = ", ".join(str(device.directory) for device in self._devices if device.writes.is_retired)
        advice = (
            f"{retired} is not written to any more after this failure: {self.first_failure}"
            if retired
            else self.if_full
        )
        raise SpillVolumeFull(
            f"{directories}: {format_bytes(nbytes)} for {label} do not fit into the spill file of "
            f"{format_bytes(self.capacity_bytes)}; held: {format_bytes(held_bytes)}, the largest free block is "
            f"{format_bytes(max(device.extents.largest_free_bytes for device in self._devices))}. {advice}",
            wanted_bytes=nbytes,
            held_bytes=held_bytes,
            budget_bytes=self.capacity_bytes,
        )

    # --- transfers ----------------------------------------------------------------------------------------------------

    def _on_every_device(
        self, parts: Sequence[DevicePart], move: Callable[[Device, Sequence[DevicePart]], list[int]]
    ) -> tuple[dict[int, int], dict[Device, SpillwayError]]:
        """Has every device move its own parts, all at the same time. Returns the results of `move` by part, and the
        errors of devices that failed."""
        self._check_process()
        shares: dict[Device, list[DevicePart]] = {}
        for part in parts:
            shares.setdefault(part.device, []).append(part)
        moved = {device: self._start(move, device, share) for device, share in shares.items()}
        results: dict[int, int] = {}
        errors: dict[Device, SpillwayError] = {}
        for device, result in moved.items():
            try:
                results.update(zip(map(id, shares[device]), result(), strict=True))
            except (SpillIOError, SpillVolumeFull) as error:
                errors[device] = kept_error(error)
        return results, errors

    def _start(
        self, move: Callable[[Device, Sequence[DevicePart]], list[int]], device: Device, share: Sequence[DevicePart]
    ) -> Callable[[], list[int]]:
        if self._threads is None:
            return lambda: move(device, share)
        return self._threads.submit(move, device, share).result

    def _write_to(self, device: Device, parts: Sequence[DevicePart]) -> list[int]:
        started = self._clock()
        checksums = device.file.write_batch([(part.offset, part.tensor, part.label) for part in parts])
        self._note_pace(device, parts, self._clock() - started, is_write=True)
        return checksums

    def _read_from(self, device: Device, parts: Sequence[DevicePart]) -> list[int]:
        started = self._clock()
        device.file.read_batch([(part.offset, part.tensor, part.checksum, part.label) for part in parts])
        self._note_pace(device, parts, self._clock() - started, is_write=False)
        return [part.checksum for part in parts]

    # --- what went wrong ----------------------------------------------------------------------------------------------

    def _is_kept(self, address: Address, nbytes: int) -> bool:
        """Whether these bytes go to host memory without an attempt to write them: because they already have a place
        there, or because one of their devices is retired."""
        extent = address.extent
        return address.offset in extent.kept or any(
            piece.device.writes.is_retired for piece in extent.pieces_of(address.offset, nbytes)
        )

    def _keep(
        self,
        address: Address,
        tensor: Tensor,
        label: str,
        error: SpillwayError | None,
        source: Buffer | None,
        *,
        copies: bool,
    ) -> Kept:
        """Keeps the bytes in host memory from now on. If it has no room, raises `error`, or the error of the first
        failure."""
        extent = address.extent
        if source is not None and self._host is not None:
            extent.live_in(source)
            return extent.kept.setdefault(address.offset, Kept(tensor, is_lent=True))
        kept = extent.kept.get(address.offset)
        if kept is None:
            host = self._host if copies else None
            memory = host.allocate_now(tensor.numel(), f"kept {label}") if host is not None else None
            if memory is None:
                raise error or self.no_room_left(f"{format_bytes(tensor.numel())} of {label}")
            kept = extent.kept[address.offset] = Kept(memory)
        kernels.copy(kept.memory, tensor)
        return kept

    def no_room_left(self, what: str) -> SpillwayError:
        """Returns the error of a step that fails because `what` had to stay in memory after the first failure."""
        first = self.first_failure
        assert first is not None, "a device is retired by a failure"
        return type(first)(
            f"{first}. Since then the bytes meant for this device are kept in host memory, which has no space for "
            f"{what}. Repair the device, or raise spec.memory.budget.host",
            **first.details,
        )

    def forget(self, kept: Iterable[Kept]) -> None:
        """Frees the host memory in which an extent's bytes were kept. Safe in a destructor."""
        for each in kept:
            if self._host is not None and not each.is_lent:
                self._host.free(each.memory)

    def _retires(self, device: Device, error: SpillwayError) -> bool:
        """Records a failed write; returns whether it retires `device`."""
        with self._lock:
            self.first_failure = self.first_failure or error
            before = device.writes
            device.writes = after_failed_write(before, error)
        if self._host is not None:
            self._host.grow()
        return device.writes.is_retired and not before.is_retired

    def _say_survived(self, errors: Mapping[Device, SpillwayError], newly_retired: Sequence[Device]) -> None:
        if self._host is None:
            return  # it is the step's error, and reported as such
        for error in errors.values():
            self._count(WRITE_FAILED)
            self._tell(
                f"spill: {error}. The bytes of this write stay in host memory, and its place in the file is not used "
                "again"
            )
        for device in newly_retired:
            self._count(DEVICE_RETIRED)
            self._tell(f"spill: {device.directory} is not written to any more; its contents can still be read")

    def _note_pace(self, device: Device, parts: Sequence[DevicePart], seconds: float, *, is_write: bool) -> None:
        nbytes = sum(part.tensor.numel() for part in parts)
        planned = (self._planned.write if is_write else self._planned.read) / len(self._devices)
        with self._lock:
            device.moved_bytes += nbytes
            device.moving_seconds += seconds
            before = device.writes if is_write else device.reads
            now = after_transfer(before, nbytes, seconds, planned)
            if is_write:
                device.writes = now
            else:
                device.reads = now
        if now.is_slow and not before.is_slow:
            verb = "write" if is_write else "read"
            self._count(DEVICE_SLOW)
            self._say(
                f"{device.directory} slow to {verb}",
                f"{device.directory}: {verb} of {parts[0].label} at offset {parts[0].offset}: "
                f"{format_bytes(int(nbytes / seconds))}/s instead of the planned {format_bytes(int(planned))}/s; "
                f"slow for {now.slow_seconds:.0f} s, so later spills prefer faster volumes, or host memory that the "
                "plan leaves free",
            )

    def _state(self) -> str:
        if self.first_failure is not None:
            return f"a device failed ({self.first_failure})"
        return "the spill devices are slow"

    def _count(self, kind: str) -> None:
        with self._lock:
            self._faults[kind] += 1

    def _say(self, what: str, line: str) -> None:
        """Reports `line`, once per `what`."""
        with self._lock:
            if what in self._told:
                return
            self._told.add(what)
        self._tell(f"spill: {line}")

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"the spill file of process {self._process} was used in its forked child {os.getpid()}; the two would "
                "write to the same place. Start child processes before training begins, or with multiprocessing's "
                "start method spawn"
            )

    def _close_files(self) -> None:
        for device in self._devices:
            device.file.close()


def runs(address: Address, tensor: Tensor) -> Iterator[tuple[ExtentPiece, int, Tensor]]:
    """Yields the parts of `tensor` by piece of the extent: (piece, offset in its device's file, part)."""
    end = address.offset + tensor.numel()
    for piece in address.extent.pieces_of(address.offset, tensor.numel()):
        first, last = max(piece.start, address.offset), min(piece.start + piece.nbytes, end)
        yield piece, piece.offset + first - piece.start, tensor[first - address.offset : last - address.offset]


def take(device: Device, nbytes: int, start: int, label: str) -> ExtentPiece | None:
    offset = device.extents.allocate(nbytes, label)
    return None if offset is None else ExtentPiece(device, offset, nbytes, start)


def divided(nbytes: int, weights: Sequence[float]) -> list[int]:
    """Divides `nbytes`, whole blocks, into shares of whole blocks in proportion to `weights`; equal shares if a weight
    is unknown (0). A weight counts as at most four times the smallest, whatever was measured."""
    known = weights if all(weights) else [1.0] * len(weights)
    bounded = [min(weight, 4.0 * min(known)) for weight in known]
    sizes, left, total = [], nbytes, sum(bounded)
    for weight in bounded:
        share = left if total <= weight else round_up(int(left * weight / total))
        sizes.append(min(share, left))
        left -= sizes[-1]
        total -= weight
    return sizes
