"""Activation spilling without the rest of Spillway: a context manager around any forward.

    spilling = Spilling(model, "/mnt/nvme", nvme_bytes=16 << 30)
    with spilling: loss = model(batch)
    loss.backward()

Inside, what autograd saves is one region: storages leave in the order in which they are saved, in transfers of a few
MiB, and come back in the reverse order, a few MiB ahead of backward. Weights and small tensors stay.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from spillway.errors import UserError
from spillway.plan import Answer, Tier
from spillway.units import format_bytes

from .. import native
from ..resident_parameters import ResidentParameters
from ..saved_tensors import Keeper, Packer, Visit, unpack
from ..spill_file import SpillFile
from ..tiers.device_ledger import ACTIVATIONS, DeviceLedger
from ..tiers.encrypted_file import encrypted
from ..tiers.host_slab import HostSlab
from ..tiers.lanes import CpuLanes
from ..tiers.nvme_slab import NvmeSlab
from ..volumes import refuse_memory
from .lean import Forward, Wanted, wanted
from .rebuilding import Recorder
from .store import Batch, SpillStore

MIB = 1 << 20
LOG = logging.getLogger("spillway")
"""what a failing disk led to: the program is somebody else's, and so is its output"""
NUM_IO_THREADS = 2
HOST_BYTES = 1 << 30
"""addresses for staging and reloads; pages become resident as they are used, and the window bounds how many are"""
REGION = "the forward"
RAISE_NVME_BYTES = "Raise nvme_bytes: the file holds what a forward saves, and the first forward spills all of it."


class Spilling:
    """Saved tensors of each forward inside go to a nameless file in `directory`, of at most `nvme_bytes`.

    `device_bytes`: saved tensors that may stay in memory: the last ones of each forward, which backward needs first.
    How many come before them is known from the forward before; the first one spills all, and of a longer one what
    comes beyond `device_bytes` leaves, too. 0 spills all, always.

    `encrypts`: what goes to the file is encrypted (AES-256-XTS) with a random key that ends with it.

    `close` frees the file. One that nobody refers to any more, and no graph either, closes by itself.
    """

    def __init__(  # noqa: PLR0913 - four of them are sizes for tests
        self,
        module: nn.Module,
        directory: str | Path,
        *,
        nvme_bytes: int,
        device_bytes: int = 0,
        lean: bool = True,
        minimum_bytes: int = MIB,
        transfer_bytes: int = 4 * MIB,
        ahead_bytes: int = 8 * MIB,
        window_bytes: int = 16 * MIB,
        encrypts: bool = False,
    ) -> None:
        check(module, nvme_bytes, device_bytes, minimum_bytes, transfer_bytes, ahead_bytes, window_bytes)
        for name, tensor in named_tensors(module):
            if not tensor.is_cpu:
                raise UserError(
                    f"{name} is on {tensor.device}: activation spilling on its own moves tensors of the CPU; move the "
                    "model there"
                )
        refuse_memory(Path(directory), f"Spilling in {directory}")
        self._module = module
        self.host, self.ledger = HostSlab(HOST_BYTES), DeviceLedger(None)
        pooled_bytes = native.POOLED_BYTES if native.attach_tensor_pool() else math.inf
        self.lanes = CpuLanes(self.host, self.ledger, direct_io=True, pooled_bytes=pooled_bytes)
        open_file = encrypted(SpillFile) if encrypts else SpillFile
        self.nvme = NvmeSlab(
            Path(directory), nvme_bytes, NUM_IO_THREADS, open_file=open_file, host=self.host, tell=LOG.warning
        )
        self.nvme.reclaim, self.nvme.if_full = self.lanes.reclaim, RAISE_NVME_BYTES
        self.store = SpillStore(
            self.lanes,
            self.ledger,
            self.nvme,
            minimum_bytes,
            window_bytes,
            transfer_bytes=transfer_bytes,
            ahead_bytes=ahead_bytes,
        )
        self._kept_bytes = max(0, device_bytes - 2 * transfer_bytes)
        self._spills_all = device_bytes == 0
        self._lean = lean
        self._proven: dict[object, bool] = {}
        self._last: Forward | None = None
        self._entered: list[Region] = []
        # Graphs refer to the store, and may live longer than this object.
        self._forgotten = weakref.finalize(self.store, close_beside, self.lanes, self.nvme)

    def __enter__(self) -> Spilling:
        if not self._forgotten.alive:
            raise UserError("this Spilling is closed, and its file is gone: make another one")
        # The fullest moment of a step is the end of its forward: what reloads before it left behind goes.
        native.mark_tensor_pool()
        self.host.give_pages_back()
        want = wanted(self._last, self._kept_bytes)
        if self._spills_all:
            want = Wanted(None if want.rebuilt_bytes != 0 else 0, None)
        batch = self.store.open(REGION, Answer.NVME, want.moved_bytes, self._kept_bytes)
        parameters = ResidentParameters(named_tensors(self._module))
        visit = Visit(REGION, None, batch, parameters)
        packer = Packer(visit, Keeper(REGION, parameters, self.ledger), (), None)
        pack, recorder, entered = packer.pack, None, ExitStack()
        if self._lean and want.rebuilt_bytes != 0 and torch.is_grad_enabled():
            limit_bytes, minimum_bytes = want.rebuilt_bytes, self.store.minimum_bytes
            recorder = Recorder(packer, visit, self.ledger, minimum_bytes, limit_bytes, self._proven)
            pack = recorder.pack
            entered.enter_context(recorder)
        entered.enter_context(saved_tensors_hooks(pack, unpack))
        self._entered.append(Region(entered, visit, batch, recorder))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        region = self._entered.pop()
        region.entered.__exit__(kind, error, trace)
        if kind is None:
            region.batch.flush()
            found = region.found(self._last)
            if found.saved_bytes or (region.visit.saved and self._last is None):
                self._last = found

    def held_bytes(self) -> dict[Tier, int]:
        """Bytes of saved tensors by tier, now."""
        return {
            Tier.DEVICE: self.ledger.by_purpose().get(ACTIVATIONS, 0),
            Tier.NVME: self.store.held_bytes(Tier.NVME),
        }

    def close(self) -> None:
        """Everything in flight ends; the file is gone. Raises UserError while a graph still needs it, and what a write
        met. Idempotent."""
        if not self._forgotten.alive:
            return
        self.store.drain()
        if held_bytes := sum(self.held_bytes().values()):
            raise UserError(
                f"{format_bytes(held_bytes)} of saved tensors still belong to a graph: go backward, or drop what "
                "refers to it (a loss, an output), before close()"
            )
        self._forgotten.detach()
        close_parts(self.lanes, self.nvme)


class Region(NamedTuple):
    """One forward, under way."""

    entered: ExitStack
    visit: Visit
    batch: Batch
    recorder: Recorder | None

    def found(self, last: Forward | None) -> Forward:
        if self.recorder is not None:
            rebuilt_bytes, rebuildable_bytes = self.recorder.rebuilt_bytes, self.recorder.rebuildable_bytes
            return Forward(self.batch.offered_bytes, rebuilt_bytes, rebuildable_bytes)
        # Nobody looked, because there was no need or nothing to find; so it is again, while forwards are alike.
        is_alike = last is not None and last.saved_bytes == self.batch.offered_bytes
        return Forward(self.batch.offered_bytes, 0, last.rebuildable_bytes if last is not None and is_alike else None)


def check(module: nn.Module, nvme_bytes: int, device_bytes: int, *sizes: int) -> None:
    """Raises UserError for what is no module, and for what are no bytes."""
    if not isinstance(module, nn.Module):
        raise UserError(
            f"the first argument is a {type(module).__name__}: give the nn.Module whose forward runs inside"
        )
    names = ("nvme_bytes", "device_bytes", "minimum_bytes", "transfer_bytes", "ahead_bytes", "window_bytes")
    for name, value in zip(names, (nvme_bytes, device_bytes, *sizes), strict=True):
        least = 0 if name == "device_bytes" else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UserError(f"{name} = {value!r}: give a whole number of bytes, {least} or more")


def close_beside(lanes: CpuLanes, nvme: NvmeSlab) -> None:
    """Of what nobody can reach any more: on a thread of its own, because the collector runs on any, also on a lane's,
    which cannot wait for its own end. The interpreter waits for it: a thread that it ends in torch aborts the process.
    """
    if threading.main_thread().is_alive():
        threading.Thread(target=close_parts, args=(lanes, nvme), name="spilling-close").start()
    else:  # the interpreter ends: no thread begins any more
        close_parts(lanes, nvme)


def close_parts(lanes: CpuLanes, nvme: NvmeSlab) -> None:
    lanes.close()
    nvme.close()
    native.empty_tensor_pool()


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
