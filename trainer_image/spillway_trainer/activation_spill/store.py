"""SpillStore: takes what segments save, one batch per forward, and bounds the bytes in flight."""

from __future__ import annotations

import weakref
from collections import deque

import torch
from torch import Tensor, UntypedStorage

from spillway.errors import DeviceOutOfMemory, HostOutOfMemory, SpillVolumeFull
from spillway.plan import Policy, Tier

from ..saved_tensors import KeptTensor, SpilledHandle
from ..tiers.arena import TORCH_ALIGNMENT_BYTES
from ..tiers.device_ledger import DeviceLedger
from ..tiers.lanes import Event, Lanes
from ..tiers.nvme_slab import NvmeSlab
from .chooser import StoragePolicy
from .records import Record, SpilledTensor
from .reload_order import ReloadOrder
from .transfer import Bounces, NvmeCopy, Transfer, copy_to_host, copy_to_nvme, write_to_nvme


class Window:
    """Bounds the bytes in flight: whoever goes beyond the limit waits for the oldest, instead of running out of
    memory."""

    def __init__(self, lanes: Lanes, limit_bytes: int) -> None:
        self._lanes = lanes
        self._limit_bytes = limit_bytes
        self._in_flight: deque[tuple[Event, int]] = deque()
        self._bytes = 0

    def add(self, event: Event, nbytes: int) -> None:
        self._in_flight.append((event, nbytes))
        self._bytes += nbytes
        while self._bytes > self._limit_bytes or (self._in_flight and self._in_flight[0][0].done):
            self._wait_for_oldest()

    def drain(self) -> None:
        while self._in_flight:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        event, nbytes = self._in_flight.popleft()
        self._bytes -= nbytes
        self._lanes.wait(event)  # the compute lane waits, and counts the time
        event.wait()  # then the host, too, knows that the memory is free


class SpillStore:
    """An ActivationStore that moves storages to host memory and the spill file."""

    def __init__(
        self,
        lanes: Lanes,
        ledger: DeviceLedger,
        nvme: NvmeSlab | None,
        minimum_bytes: int,
        window_bytes: int,
        *,
        transfer_bytes: int | None = None,
        ahead_bytes: int | None = None,
    ) -> None:
        """`transfer_bytes`: a batch submits what it has as soon as it has this much (None: when its forward is over).
        `ahead_bytes`: how far reloads run ahead of backward inside a batch (None: all of it)."""
        self.lanes = lanes
        self.ledger = ledger
        self.minimum_bytes = minimum_bytes
        self.transfer_bytes = transfer_bytes
        self.ahead_bytes = ahead_bytes
        self.plans_host = False
        """Whether the plan has segments use host memory: spills redirected there from a slow device would take their
        space."""
        self.records: dict[int, weakref.ref[Record]] = {}
        """Records by the address of a storage object: that of their source, or of their reload."""
        self._nvme = nvme
        self._copies = Window(lanes, window_bytes)
        self._writes = Window(lanes, window_bytes)
        self._transfers: weakref.WeakSet[Transfer] = weakref.WeakSet()
        self._bounces = Bounces()
        self._reload_orders: dict[str, ReloadOrder] = {}
        """By segment: that of the last batch that backward reached."""

    def open(
        self,
        segment: str,
        answer: Policy,
        moved_bytes: int | None = None,
        kept_bytes: int = 0,
        placement: StoragePolicy | None = None,
    ) -> SavedBatch:
        """A batch for one forward through `segment`. Of the storages that it is offered, it takes over the first
        `moved_bytes` (None: all), and leaves at most `kept_bytes` of the others where they are. `placement` answers for
        each storage instead of `answer`."""
        order = None
        if self.ahead_bytes is not None:
            order = ReloadOrder(
                self._reload_orders.get(segment), self.ahead_bytes, self.transfer_bytes or self.ahead_bytes
            )
        return SavedBatch(self, segment, answer, moved_bytes, kept_bytes, placement, order)

    def start_backward(self, segment: str, order: ReloadOrder) -> None:
        """Called when backward reaches a batch of `segment`: backward of the next batch is expected to follow the same
        order."""
        self._reload_orders[segment] = order
        self._bounces.give_pages_back()

    def move(self, segment: str, answer: Policy, records: list[Record]) -> Transfer | None:
        """Submits the copies of `records`; waits while more than the window is in flight. None if NVMe no longer takes
        them and host memory has no room either: then they stay on the device."""
        if answer is Policy.NVME:
            assert self._nvme is not None, "build() rejects such a plan"
            transfer = self._spill(self._nvme, segment, records)
        else:
            transfer = self._offload_or_keep(segment, records)
        if transfer is not None:
            self._transfers.add(transfer)
        return transfer

    def _offload_or_keep(self, segment: str, records: list[Record]) -> Transfer | None:
        """Moves `records` to host memory. None, and they stay on the device, if spills that a failed NVMe device no
        longer takes have filled host memory."""
        try:
            return self._offload(segment, records)
        except HostOutOfMemory:
            if self._nvme is None or self._nvme.first_failure is None:
                raise  # no device failed: the plan gave too little
            self._nvme.redirect(f"activations of {segment}", "the device")
            return None

    def _offload(self, segment: str, records: list[Record]) -> Transfer:
        offloaded = copy_to_host(self.lanes, self.ledger, segment, records)
        self._copies.add(offloaded.stored, sum(record.nbytes for record in records))
        return Transfer(self.lanes, self.ledger, segment, records, offloaded)

    def _spill(self, nvme: NvmeSlab, segment: str, records: list[Record]) -> Transfer | None:
        """Moves `records` to NVMe or, once a device has failed or is slow, to the tier above that has room."""
        nbytes = sum(record.nbytes for record in records)
        # Staging for what is already on NVMe needs host memory, too: redirected spills must not take its room.
        if nvme.is_slow and nvme.takes_spills and not self.plans_host and nvme.host_has_room(3 * nbytes):
            nvme.redirect(f"activations of {segment}", "host memory")
            return self._offload(segment, records)
        try:
            if nvme.takes_spills:
                spilled = self._to_nvme(nvme, segment, records)
                self._copies.add(spilled.copied, nbytes)
                self._writes.add(spilled.stored, spilled.nbytes)
                return Transfer(self.lanes, self.ledger, segment, records, spilled)
        except (SpillVolumeFull, HostOutOfMemory):
            if nvme.first_failure is None:
                raise  # no device failed: the plan gave too little
        try:
            transfer = self._offload(segment, records)
        except HostOutOfMemory:
            nvme.redirect(f"activations of {segment}", "the device")
            return None
        nvme.redirect(f"activations of {segment}", "host memory")
        return transfer

    def _to_nvme(self, nvme: NvmeSlab, segment: str, records: list[Record]) -> NvmeCopy:
        if self.lanes.direct_io:
            return write_to_nvme(self.lanes, self.ledger, nvme, segment, records, self._bounces)
        return copy_to_nvme(self.lanes, self.ledger, nvme, segment, records)

    def held_bytes(self, tier: Tier) -> int:
        """Bytes of live transfers in `tier`, without staging."""
        return sum(transfer.nbytes for transfer in self._transfers if transfer.tier is tier)

    def drain(self) -> None:
        """Waits for every copy and write, and forgets records that are gone. Raises the error of a copy or write that
        failed."""
        self.records = {key: ref for key, ref in self.records.items() if ref() is not None}
        self._copies.drain()
        self._writes.drain()


class SavedBatch:
    """What one forward through one segment saved."""

    __slots__ = (
        "__weakref__",
        "_answer",
        "_is_backward",
        "_kept",
        "_kept_bytes",
        "_limit_bytes",
        "_moved_bytes",
        "_pending",
        "_pending_bytes",
        "_placement",
        "_reload_order",
        "_store",
        "_transfers",
        "_trigger",
        "backward_label",
        "minimum_bytes",
        "offered_bytes",
        "segment",
    )

    def __init__(
        self,
        store: SpillStore,
        segment: str,
        answer: Policy,
        moved_bytes: int | None,
        kept_bytes: int,
        placement: StoragePolicy | None,
        reload_order: ReloadOrder | None = None,
    ) -> None:
        self._store = store
        self._reload_order = reload_order
        """None: the batch is reloaded as a whole."""
        self._is_backward = False
        self._answer = answer
        self.minimum_bytes = store.minimum_bytes
        self._placement = placement
        self._moved_bytes = moved_bytes
        self._limit_bytes = kept_bytes
        self._kept: set[int] = set()
        """Keys of offered storages that are kept."""
        self._kept_bytes = 0
        self._trigger: int | None = None
        """The kept storage whose use starts the reloads: backward comes to it as far before the first moved one as
        reloads may run ahead."""
        self.offered_bytes = 0
        """Bytes of storages that could move, each counted once."""
        self._pending: dict[Policy, list[weakref.ref[Record]]] = {}
        self._pending_bytes = 0
        self._transfers: list[weakref.ref[Transfer]] = []
        self.segment = segment
        self.backward_label = f"backward of {segment}"

    def put(self, tensor: Tensor, storage: UntypedStorage | None = None) -> SpilledHandle | KeptTensor | None:
        store = self._store
        if storage is None:
            storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if (
            nbytes < self.minimum_bytes
            or not (tensor.is_floating_point() or (tensor.is_cuda and tensor.dtype is torch.bool))  # dropout masks
            or tensor.is_neg()
            or storage.data_ptr() % TORCH_ALIGNMENT_BYTES
        ):
            return None
        key: int = storage._cdata
        known = store.records.get(key)
        record = known() if known is not None else None
        if record is None or not record.holds(tensor):
            if not self._takes(key, nbytes):
                return PrefetchTrigger(self, tensor, store.ledger, storage) if key == self._trigger else None
            answer = self._answer if self._placement is None else self._placement.answer(storage)
            pending = self._pending.setdefault(answer, [])
            record = Record(store.lanes, store.ledger, self, len(pending), tensor, storage)
            store.records[key] = ref = weakref.ref(record)
            pending.append(ref)
            if self._reload_order is not None:
                self._reload_order.add(record, ref)
            self._pending_bytes += nbytes
            limit_bytes = store.transfer_bytes
            if limit_bytes is not None and self._pending_bytes >= limit_bytes:
                self.flush()
        handle = SpilledTensor(record, tensor, with_batch=record.batch is self)
        return handle if self._placement is None else self._placement.watched(handle, storage)

    def _takes(self, key: int, nbytes: int) -> bool:
        """Whether a storage that is offered for the first time moves. The first ones do, because backward needs them
        last. So do those beyond the bytes that may stay, in a forward that saves more than was foreseen."""
        if key in self._kept:
            return False
        before = self.offered_bytes
        self.offered_bytes += nbytes
        if self._moved_bytes is None or before < self._moved_bytes:
            return True
        if self._kept_bytes + nbytes > self._limit_bytes:
            return True
        self._kept.add(key)
        self._kept_bytes += nbytes
        if self._trigger is None and self._kept_bytes > (self._store.ahead_bytes or 0):
            self._trigger = key
        return False

    def know(self, tensor: Tensor, record: Record) -> None:
        """Notes that `record` has the storage of `tensor`; a lookup asks the record whether it still does."""
        self._store.records[tensor.untyped_storage()._cdata] = weakref.ref(record)

    def flush(self) -> None:
        """Submits what is pending. A batch that submits while its forward runs leaves storages that the forward still
        uses to the next flush."""
        pending, self._pending = self._pending, {}
        self._pending_bytes = 0
        for answer, refs in pending.items():
            records = []
            for ref in refs:
                record = ref()
                if record is None or record.is_loaded:
                    continue
                if self._store.transfer_bytes is not None and record.is_reachable:
                    self._pending.setdefault(answer, []).append(ref)
                else:
                    records.append(record)
            if records:
                self._submit(answer, records)

    def _submit(self, answer: Policy, records: list[Record]) -> None:
        transfer = self._store.move(self.segment, answer, records)
        if transfer is None:
            for record in records:
                record.stay()
            return
        transfer.number = len(self._transfers)
        self._transfers.append(weakref.ref(transfer))
        for record in records:
            record.transfer = transfer

    def prefetch(self) -> None:
        if self._trigger is None:
            self.reload_last()

    def reload_last(self) -> None:
        """Called when backward is about to come to what was moved: submits the first reloads."""
        self._start_backward()
        if self._reload_order is None or not self._reload_order.run_ahead():
            self._reload_before(len(self._transfers))

    def come_to(self, record: Record) -> None:
        """Called when backward needs `record`: submits the reloads of what it needs next."""
        self._start_backward()
        transfer = record.transfer  # None if no tier took it
        if (
            (self._reload_order is not None and self._reload_order.come_to(record))
            or transfer is None
            or transfer.is_entered
        ):
            return
        transfer.is_entered = True
        self._reload_before(transfer.number)

    def _start_backward(self) -> None:
        if not self._is_backward:
            self._is_backward = True
            if self._reload_order is not None:
                self._reload_order.foresee()
                self._store.start_backward(self.segment, self._reload_order)

    def _reload_before(self, number: int) -> None:
        """Submits the reloads of the transfers before `number`, the last one first, as far as they may run ahead of
        backward."""
        limit_bytes, ahead_bytes = self._store.ahead_bytes, 0
        for ref in reversed(self._transfers[:number]):
            if limit_bytes is not None and ahead_bytes >= limit_bytes:
                return
            if (transfer := ref()) is not None:
                ahead_bytes += transfer.nbytes
                try:
                    transfer.load()
                except (DeviceOutOfMemory, HostOutOfMemory):
                    return  # no room yet: loaded when first needed, once what backward uses before it has left


class PrefetchTrigger(KeptTensor):
    """A kept tensor whose unpacking starts prefetching. Starting earlier would raise peak memory: when backward begins,
    every kept tensor is still alive."""

    __slots__ = ("_batch",)

    def __init__(self, batch: SavedBatch, tensor: Tensor, ledger: DeviceLedger, storage: UntypedStorage) -> None:
        super().__init__(tensor, batch.segment, ledger.charge_saved(storage), ledger.release_saved)
        self._batch = weakref.ref(batch)

    def tensor(self) -> Tensor:
        if (batch := self._batch()) is not None:
            batch.reload_last()
        return super().tensor()
