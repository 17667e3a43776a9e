"""Spilling: activation spilling as a context manager around any forward, without a job.

    spilling = Spilling(model, "/mnt/nvme", nvme_bytes="16Gi")
    with spilling: loss = model(batch)
    loss.backward()

Everything that autograd saves inside the block forms one region: storages move out in the order in which they are
saved, in transfers of a few MiB, and come back in reverse order, a few MiB ahead of backward. Weights and small tensors
stay in memory.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from spillway.errors import SpillwayError, UserError
from spillway.plan import Policy, Tier
from spillway.units import format_bytes, parse_bytes

from ..kernels import native
from ..resident_parameters import ResidentParameters
from ..saved_tensors import ForwardVisit, Keeper, Packed, Packer, changed_in_place, has_storage, unpack
from ..tiers.device_ledger import ACTIVATIONS, DeviceLedger
from ..tiers.encrypted_file import encrypted
from ..tiers.host_slab import HostSlab
from ..tiers.lanes import CpuLanes
from ..tiers.nvme_slab import NvmeSlab
from ..tiers.spill_file import SpillFile
from ..tiers.volumes import reject_memory
from .lean import Forward, Wanted, wanted
from .rebuilding import OperatorTape
from .store import SavedBatch, SpillStore

MIB = 1 << 20
LOG = logging.getLogger("spillway")
"""Reports the consequences of a failing disk. A logger, because the program and its output belong to the user."""
NUM_IO_THREADS = 2
HOST_BYTES = 1 << 30
"""Address space for staging and reloads. Pages become resident only when used, and the window bounds their number."""
REGION = "the forward"
RAISE_NVME_BYTES = "Raise nvme_bytes; the first forward spills all tensors that it saves for backward."


class Spilling:
    """Moves the tensors that each forward inside the block saves to an unnamed file in `directory` of at most
    `nvme_bytes`. Sizes are numbers of bytes, or Kubernetes quantities such as "16Gi".

    `device_bytes`: bytes of saved tensors that may stay in memory. The last tensors of each forward stay, because
    backward needs them first. How many bytes come before them is known from the previous forward, so the first forward
    spills everything; if a forward saves more than the previous one, what exceeds `device_bytes` is spilled, too. 0
    always spills everything.

    `encrypts`: encrypts the contents of the file (AES-256-XTS) with a random key that exists only as long as the file.

    `close` frees the file. A Spilling closes by itself once neither the program nor an autograd graph refers to it.

    Threads may share a Spilling. Backward gets the same values as without it, even of tensors that were written through
    `.data` or numpy, or were given other memory (`.data = ...`); where `lean` cannot provide them, backward raises
    RuntimeError.
    """

    def __init__(  # noqa: PLR0913 - four of them are sizes for tests
        self,
        module: nn.Module,
        directory: str | Path,
        *,
        nvme_bytes: int | str,
        device_bytes: int | str = 0,
        lean: bool = True,
        minimum_bytes: int = MIB,
        transfer_bytes: int = 4 * MIB,
        ahead_bytes: int = 8 * MIB,
        window_bytes: int = 16 * MIB,
        encrypts: bool = False,
    ) -> None:
        nvme_bytes, device_bytes = (
            parsed(name, size) for name, size in (("nvme_bytes", nvme_bytes), ("device_bytes", device_bytes))
        )
        check(module, nvme_bytes, device_bytes, minimum_bytes, transfer_bytes, ahead_bytes, window_bytes)
        if not str(directory):
            raise UserError(
                "Spilling: directory is an empty string; give a directory on the disk that should hold spilled tensors"
            )
        for name, tensor in named_tensors(module):
            if not tensor.is_cpu:
                raise UserError(
                    f"{name} is on {tensor.device}: Spilling supports CPU tensors only; move the model to the CPU"
                )
        reject_memory(Path(directory), f"Spilling in {directory}")
        self._module = module
        self._kept_bytes = max(0, device_bytes - 2 * transfer_bytes)
        self._spills_all = device_bytes == 0
        self._lean = lean
        self._proven: dict[object, bool] = {}
        self._last: Forward | None = None
        self._entered: dict[int, list[SpilledForward]] = defaultdict(list)
        """Forwards in progress, by thread, the innermost last."""
        self._lock = threading.RLock()
        self._visits = weakref.WeakSet[ForwardVisit]()
        """Forwards that an autograd graph still refers to."""
        self._is_torn = False
        """Whether an interrupt (Ctrl-C) may have left something incomplete."""
        self._place = (Path(directory), nvme_bytes, encrypts)
        self._sizes = {
            "minimum_bytes": minimum_bytes, "window_bytes": window_bytes,
            "transfer_bytes": transfer_bytes, "ahead_bytes": ahead_bytes,
        }  # fmt: skip
        self._open()

    def _open(self) -> None:
        directory, nvme_bytes, encrypts = self._place
        self.host, self.ledger = HostSlab(HOST_BYTES), DeviceLedger(None)
        self.lanes = CpuLanes(self.host, self.ledger)
        file = encrypted(SpillFile) if encrypts else SpillFile
        self.nvme = NvmeSlab(directory, nvme_bytes, NUM_IO_THREADS, open_file=file, host=self.host, tell=LOG.warning)
        self.nvme.reclaim, self.nvme.if_full = self.lanes.reclaim, RAISE_NVME_BYTES
        self.store = SpillStore(self.lanes, self.ledger, self.nvme, **self._sizes)
        # Graphs refer to the store, and may live longer than this object.
        self._forgotten = weakref.finalize(self.store, close_beside, self.lanes, self.nvme)
        self._is_torn = False

    def __enter__(self) -> Spilling:
        if torch.compiler.is_compiling() or torch._C._dynamo.eval_frame.get_eval_frame_callback():
            raise UserError(
                "Spilling: its with block runs inside a function that torch.compile compiles, and torch.compile cannot "
                "trace it; put the with block around the call of the compiled function, or decorate the function that "
                "contains the block with torch.compiler.disable"
            )
        num_outer = len(self._entered[threading.get_ident()])
        try:
            with self._lock:
                self._enter()
            return self
        except BaseException as error:
            self._leave(num_outer, error)
            raise

    def _enter(self) -> None:
        if not self._forgotten.alive:
            raise UserError("this Spilling is closed and its spill file is removed; create a new Spilling")
        if not self._is_torn and not self._visits and any(self.held_bytes().values()):
            with suppress(SpillwayError):  # the error belongs to a graph that nobody refers to any more
                self.store.drain()
            self._is_torn = any(self.held_bytes().values())
        if self._is_torn:
            self._open()
        # Memory is fullest at the end of a step's forward, so give back now what the reloads before it left behind.
        native.mark_tensor_pool()
        self.host.give_pages_back()
        want = wanted(self._last, self._kept_bytes)
        if self._spills_all:
            want = Wanted(None if want.rebuilt_bytes != 0 else 0, None)
        batch = self.store.open(REGION, Policy.NVME, want.moved_bytes, self._kept_bytes)
        parameters = ResidentParameters(named_tensors(self._module))
        visit = ForwardVisit(REGION, None, batch, parameters)
        packer = Packer(visit, Keeper(REGION, parameters, self.ledger), (), None)
        pack, recorder, entered = packer.pack, None, ExitStack()
        if self._lean and want.rebuilt_bytes != 0 and torch.is_grad_enabled():
            limit_bytes, minimum_bytes = want.rebuilt_bytes, self.store.minimum_bytes
            recorder = OperatorTape(packer, visit, self.ledger, minimum_bytes, limit_bytes, self._proven)
            pack = recorder.pack
        self._visits.add(visit)
        self._entered[threading.get_ident()].append(SpilledForward(entered, visit, batch, recorder))
        if recorder is not None:
            entered.enter_context(recorder)
        entered.enter_context(saved_tensors_hooks(partial(self._pack, pack), self._unpack))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        num_outer = len(self._entered[threading.get_ident()]) - 1
        try:
            region = self._entered[threading.get_ident()][num_outer]
            region.entered.close()
            if kind is None:
                with self._lock:
                    self._finish(region)
            self._leave(num_outer, error)
        except BaseException as met:
            self._leave(num_outer, met)
            raise

    def _finish(self, region: SpilledForward) -> None:
        for result in () if region.recorder is None else region.recorder.results.values():
            result.hold()
        region.batch.flush()
        found = region.found(self._last)
        if found.saved_bytes or (region.visit.saved and self._last is None):
            self._last = found

    def _leave(self, num_outer: int, error: BaseException | None) -> None:
        """Ends this thread's regions except the outer `num_outer`. Can be called again if an interrupt cut a call
        short."""
        self._is_torn |= error is not None and not isinstance(error, Exception)
        regions = self._entered[threading.get_ident()]
        while len(regions) > num_outer:
            regions[-1].entered.close()
            regions.pop()

    def _pack(self, pack: Callable[[Tensor], Packed], tensor: Tensor) -> tuple[Packed, SavedVariable]:
        with self._lock:
            return pack(tensor), SavedVariable(tensor)

    def _unpack(self, packed: tuple[Packed, SavedVariable]) -> Tensor:
        try:
            with self._lock:
                elsewhere = packed[1].elsewhere()
                return unpack(packed[0]) if elsewhere is None else elsewhere
        except BaseException as error:
            self._is_torn |= not isinstance(error, Exception)
            raise

    def held_bytes(self) -> dict[Tier, int]:
        """Bytes of saved tensors by tier, now."""
        return {
            Tier.DEVICE: self.ledger.by_purpose().get(ACTIVATIONS, 0),
            Tier.NVME: self.store.held_bytes(Tier.NVME),
        }

    def stats(self) -> SpillingStats:
        """Bytes moved and seconds waited since construction, and bytes held now."""
        moved, held = self.lanes.moved_bytes(), self.held_bytes()
        return SpillingStats(
            written_bytes=moved.get("nvme_write", 0),
            read_bytes=moved.get("nvme_read", 0),
            held_on_nvme_bytes=held[Tier.NVME],
            held_in_memory_bytes=held[Tier.DEVICE],
            waited_seconds=self.lanes.stalled_seconds(),
        )

    def close(self) -> None:
        """Finishes everything in flight and frees the file. Raises UserError while a graph still needs the file (except
        after an interrupt), and the error of a write that failed. Idempotent."""
        if not self._forgotten.alive:
            return
        self._leave(0, None)  # ends regions that an interrupt left entered
        with self._lock:
            if not self._is_torn:
                self.store.drain()
                if self._visits:
                    forget_failed_backward()
                if self._visits and (held_bytes := sum(self.held_bytes().values())):
                    raise UserError(
                        f"Spilling.close: {format_bytes(held_bytes)} of saved tensors still belong to an autograd "
                        "graph; first run backward, or delete the tensors that keep the graph alive (a loss, an output)"
                    )
            self._forgotten.detach()
            close_parts(self.lanes, self.nvme)


class SpillingStats(NamedTuple):
    """What `Spilling.stats` returns."""

    written_bytes: int
    """Bytes written to the file."""
    read_bytes: int
    """Bytes read from the file."""
    held_on_nvme_bytes: int
    held_in_memory_bytes: int
    """Like `held_on_nvme_bytes`, bytes of saved tensors."""
    waited_seconds: float
    """Seconds that forward and backward waited for the disk."""


class SavedVariable:
    """A saved tensor as autograd refers to it. If `.data = ...` gave the tensor other memory, backward gets the tensor
    with its new memory; but an output of the very node that saves it is remembered with its original memory."""

    def __init__(self, tensor: Tensor) -> None:
        node = tensor.grad_fn
        is_output = node is not None and node._sequence_nr() + 1 == torch._C._autograd._get_sequence_nr()
        self._ref = None if is_output or not has_storage(tensor) else weakref.ref(tensor)
        self._key, self._version = self._ref and tensor.untyped_storage()._cdata, tensor._version

    def elsewhere(self) -> Tensor | None:
        tensor = None if self._ref is None else self._ref()
        if tensor is None or tensor.untyped_storage()._cdata == self._key:  # the handle reserves this address
            return None
        if tensor._version != self._version:
            raise changed_in_place(REGION, tensor.shape, self._version, tensor._version)
        return tensor.detach()


class SpilledForward(NamedTuple):
    """One forward in progress."""

    entered: ExitStack
    visit: ForwardVisit
    batch: SavedBatch
    recorder: OperatorTape | None

    def found(self, last: Forward | None) -> Forward:
        if self.recorder is not None:
            rebuilt_bytes, rebuildable_bytes = self.recorder.rebuilt_bytes, self.recorder.rebuildable_bytes
            return Forward(self.batch.offered_bytes, rebuilt_bytes, rebuildable_bytes)
        # Nobody looked for rebuildable tensors, because none were needed or none exist. The last count stays valid as
        # long as forwards save the same number of bytes.
        is_alike = last is not None and last.saved_bytes == self.batch.offered_bytes
        return Forward(self.batch.offered_bytes, 0, last.rebuildable_bytes if last is not None and is_alike else None)


def parsed(name: str, size: int | str) -> int:
    """`size` in bytes; a string is parsed as a quantity. Raises UserError if it is none."""
    if not isinstance(size, str):
        return size
    try:
        return parse_bytes(size)
    except ValueError as error:
        raise UserError(f"{name} = {size!r}: {error}") from None


def check(module: nn.Module, nvme_bytes: int, device_bytes: int, *sizes: int) -> None:
    """Raises UserError if `module` is not a module, or a size is not a whole number of bytes."""
    if not isinstance(module, nn.Module):
        raise UserError(
            f"Spilling: the first argument is a {type(module).__name__}; give the nn.Module whose activations should "
            "be spilled"
        )
    names = ("nvme_bytes", "device_bytes", "minimum_bytes", "transfer_bytes", "ahead_bytes", "window_bytes")
    for name, value in zip(names, (nvme_bytes, device_bytes, *sizes), strict=True):
        least = 0 if name == "device_bytes" else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UserError(f"Spilling: {name} = {value!r}: give a whole number of bytes, {least} or more")


def close_beside(lanes: CpuLanes, nvme: NvmeSlab) -> None:
    """Closes the parts of an unreachable Spilling on a thread of its own, because the garbage collector may run on any
    thread, even on a lane's, which cannot wait for its own end. The interpreter waits for the new thread: if it ended
    the thread inside torch, the process would abort."""
    if threading.main_thread().is_alive():
        threading.Thread(target=close_parts, args=(lanes, nvme), name="spilling-close").start()
    else:  # the interpreter is shutting down and starts no more threads
        close_parts(lanes, nvme)


def forget_failed_backward() -> None:
    """Releases the graph of a backward that raised on this thread. torch keeps the nodes that this backward had queued,
    and with them the graph. The next backward drops queued nodes younger than one of its own, and the first node of a
    new thread is older than all of them."""
    made: list[Tensor] = []
    thread = threading.Thread(target=lambda: made.append(torch.zeros((), requires_grad=True) * 1))
    thread.start()
    thread.join()
    made[0].backward()  # type: ignore[no-untyped-call]


def close_parts(lanes: CpuLanes, nvme: NvmeSlab) -> None:
    lanes.close()
    nvme.close()
    native.empty_tensor_pool()


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
