"""Activation spilling without the rest of Spillway: a context manager around any forward.

    spilling = Spilling(model, "/mnt/nvme", nvme_bytes=16 << 30)
    with spilling: loss = model(batch)
    loss.backward()

Inside, what autograd saves is one region: storages leave in the order in which they are saved, in transfers of a few
MiB, and come back in the reverse order, a few MiB ahead of backward. Weights and small tensors stay.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from spillway.errors import UserError
from spillway.plan import Answer, Tier

from ..resident_parameters import ResidentParameters
from ..saved_tensors import Keeper, Packer, Visit, unpack
from ..tiers.device_ledger import ACTIVATIONS, DeviceLedger
from ..tiers.host_slab import HostSlab
from ..tiers.lanes import CpuLanes
from ..tiers.nvme_slab import NvmeSlab
from .store import Batch, SpillStore

MIB = 1 << 20
LOG = logging.getLogger("spillway")
"""what a failing disk led to: the program is somebody else's, and so is its output"""
NUM_IO_THREADS = 2
HOST_BYTES = 1 << 30
"""addresses for staging and reloads; pages become resident as they are used, and the window bounds how many are"""
REGION = "the forward"


class Spilling:
    """Saved tensors of each forward inside go to a nameless file in `directory`, of at most `nvme_bytes`.

    `device_bytes`: saved tensors that may stay in memory: the last ones of each forward, which backward needs first.
    How many come before them is known from the forward before; the first one spills all. 0 spills all, always.
    """

    def __init__(
        self,
        module: nn.Module,
        directory: str | Path,
        *,
        nvme_bytes: int,
        device_bytes: int = 0,
        minimum_bytes: int = MIB,
        transfer_bytes: int = 4 * MIB,
        ahead_bytes: int = 8 * MIB,
        window_bytes: int = 16 * MIB,
    ) -> None:
        for name, tensor in named_tensors(module):
            if not tensor.is_cpu:
                raise UserError(
                    f"{name} is on {tensor.device}: activation spilling on its own moves tensors of the CPU; move the "
                    "model there"
                )
        self._module = module
        self.host, self.ledger = HostSlab(HOST_BYTES), DeviceLedger(None)
        self.lanes = CpuLanes(self.host, self.ledger, direct_io=True)
        self.nvme = NvmeSlab(Path(directory), nvme_bytes, NUM_IO_THREADS, host=self.host, tell=LOG.warning)
        self.nvme.reclaim = self.lanes.reclaim
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
        self._last_bytes: int | None = None
        self._entered: list[tuple[saved_tensors_hooks, Batch]] = []

    def __enter__(self) -> Spilling:
        self.host.give_pages_back()  # of the reloads before: the fullest moment of a step is the end of its forward
        moved_bytes = None if self._last_bytes is None or self._spills_all else self._last_bytes - self._kept_bytes
        batch = self.store.open(REGION, Answer.NVME, moved_bytes)
        parameters = ResidentParameters(named_tensors(self._module))
        visit = Visit(REGION, None, batch, parameters)
        packer = Packer(visit, Keeper(REGION, parameters, self.ledger), (), None)
        hooks = saved_tensors_hooks(packer.pack, unpack)
        hooks.__enter__()
        self._entered.append((hooks, batch))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        hooks, batch = self._entered.pop()
        hooks.__exit__(kind, error, trace)
        if kind is None:
            batch.flush()
            if batch.offered_bytes:
                self._last_bytes = batch.offered_bytes

    def held_bytes(self) -> dict[Tier, int]:
        """Bytes of saved tensors by tier, now."""
        return {
            Tier.DEVICE: self.ledger.by_purpose().get(ACTIVATIONS, 0),
            Tier.NVME: self.store.held_bytes(Tier.NVME),
        }

    def close(self) -> None:
        """Everything in flight ends; the file is gone. No graph may be alive. Raises what a write met."""
        self.store.drain()
        self.lanes.close()
        self.nvme.close()


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
