"""Record: one storage that autograd saved, however many views of it were saved."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, UntypedStorage

from ..saved_tensors import changed_in_place
from ..tiers.device_ledger import DeviceLedger
from ..tiers.lanes import Buffer, Event, Lanes, Region, owned_once


class SavedBy(Protocol):
    """What one forward saved (store.SavedBatch), as its records see it."""

    segment: str
    backward_label: str

    def know(self, tensor: Tensor, record: Record) -> None: ...

    def come_to(self, record: Record) -> None: ...


class SourceTransfer(Protocol):
    """The copy that a record is a part of (transfer.Transfer)."""

    number: int
    is_entered: bool

    def load(self, records: Sequence[Record] | None = None) -> None: ...


class Record:
    """One generation of a storage: its source on the device, its copy (a part of a Transfer), and its reload.

    Handles own the record. When the last one is gone, the record releases its reload buffer and its part of the
    transfer.
    """

    __slots__ = (
        "__weakref__",
        "_awaited",
        "_charge",
        "_key",
        "_label",
        "_lanes",
        "_ledger",
        "_loaded",
        "_origin",
        "_reload",
        "_source",
        "_stays",
        "_storage_address",
        "batch",
        "index",
        "nbytes",
        "number",
        "offset",
        "transfer",
        "version",
    )

    def __init__(
        self, lanes: Lanes, ledger: DeviceLedger, batch: SavedBy, index: int, tensor: Tensor, storage: UntypedStorage
    ) -> None:
        """`storage`: that of `tensor`; it stays charged to the device until it is copied. Raises DeviceOutOfMemory when
        it does not fit."""
        self._lanes = lanes
        self._ledger = ledger
        key = ledger.charge_saved(storage)
        self._charge: int | None = key
        self._source = tensor.detach()
        self._origin = weakref.ref(origin(tensor))
        # A weak reference: while it lives, the address of the storage object is not used for another one.
        self._storage_address = storage._weak_ref()
        self._key = key
        self._reload: Buffer | None = None
        self._loaded: Event | None = None
        self._awaited = False
        self._stays = False
        """Whether the source stays on the device, because no tier took it or because it was needed before it was
        copied."""
        self._label = ""
        self.batch = batch
        self.index = index
        self.nbytes = storage.nbytes()
        self.number = 0
        """Index among the storages that its batch moves, in the order of forward."""
        self.version = tensor._version
        self.transfer: SourceTransfer | None = None
        self.offset = 0
        """Bytes from the start of the transfer."""

    @property
    def label(self) -> str:
        if not self._label:  # the write, the buffer and the read of a record use it
            self._label = f"saved storage {self.index} of {self.batch.segment}"
        return self._label

    @property
    def is_loaded(self) -> bool:
        """True when the reload is complete or on its way, or none is needed."""
        return self._reload is not None or self._stays

    @property
    def is_reachable(self) -> bool:
        """Whether others can still write into the source, even undetected: through `.data`, or through the numpy array
        that it was made from. Moving it would free nothing yet."""
        storage = self._source.untyped_storage()
        num_users: int = torch._C._storage_Use_Count(storage._cdata)
        return num_users > self._ledger.num_holders(self._key) + 1 or not storage.resizable()  # + 1: `storage`

    @property
    def witness(self) -> Tensor:
        """A tensor that shares the version counter of the saved one; empty once the source is copied."""
        return self._source

    def holds(self, tensor: Tensor) -> bool:
        """Whether `tensor` views this generation of the storage: the source, or its reload, unchanged since it was
        saved."""
        key: int = tensor.untyped_storage()._cdata
        if key == self._key:
            return tensor._version == self.version and share_counter(tensor, self._source, self._origin)
        reload = self._reload
        is_reload = reload is not None and reload.tensor.untyped_storage()._cdata == key
        return is_reload and tensor._version == self.version

    def lend_source(self) -> tuple[Tensor, int]:
        """Hands the source and its charge over to a Sources."""
        assert self._charge is not None
        charge, self._charge = self._charge, None
        return self._source, charge

    def stay(self, charge: int | None = None) -> None:
        """Keeps the source on the device instead of a copy, under its own charge or the `charge` that it was lent
        with."""
        self._stays = True
        if charge is not None:
            self._charge = charge

    def load_into(self, buffer: Buffer, loaded: Event) -> None:
        self._reload, self._loaded = buffer, loaded
        # Make the record known by its reload, too: a reload that is saved again is not copied again.
        self.batch.know(buffer.tensor, self)

    def unload(self) -> None:
        """Releases the reload; the next use loads it again."""
        if self._reload is not None and self._loaded is not None:
            last = self._lanes.computed() if self._awaited else self._loaded
            self._lanes.release(self._reload, after=(last,))
        self._reload, self._loaded, self._awaited = None, None, False

    def storage(self, size: torch.Size, *, with_batch: bool) -> UntypedStorage:
        """The storage on the device, once its reload is complete. `with_batch`: if no reload is on its way, loads the
        whole transfer.

        `size` appears in the error that is raised if the source was changed in place after it was saved.
        """
        if self._source._version != self.version:
            raise changed_in_place(self.batch.segment, size, self.version, self._source._version)
        if not self.is_loaded:
            self._load_cold(with_batch=with_batch)
        self.batch.come_to(self)
        if self._stays:
            return self._source.untyped_storage()
        assert self._reload is not None
        assert self._loaded is not None
        if not self._awaited:
            self._lanes.wait(self._loaded)
            self._awaited = True
        self._lanes.compute(reads=(self._reload,), label=self.batch.backward_label)
        return self._reload.tensor.untyped_storage()

    def _load_cold(self, *, with_batch: bool) -> None:
        if self.transfer is None:  # needed while its segment's forward still runs, or others held it until now
            self.stay()
        else:
            self.transfer.load(None if with_batch else [self])

    def __del__(self) -> None:
        if not hasattr(self, "offset"):
            return  # the charge was rejected
        UntypedStorage._free_weak_ref(self._storage_address)  # type: ignore[no-untyped-call]
        if self._charge is not None:
            self._ledger.release_saved(self._charge)
        self.unload()


def origin(tensor: Tensor) -> Tensor:
    """The tensor that `tensor` is a view of, or `tensor` itself: both have the same version counter."""
    base: Tensor | None = tensor._base
    return tensor if base is None else base


def share_counter(first: Tensor, second: Tensor, known: weakref.ref[Tensor]) -> bool:
    """Whether an in-place change of one shows in the version of the other. `known`: the origin of a tensor that
    `second` shares its counter with.

    Not all tensors that share a storage share a counter: torch splits some results (the gates of a recurrent cell) into
    tensors with counters of their own, so one may still be written while another is being copied. torch does not tell
    which ones do, so the counter is changed and set back, at 0.9 us. The counter of a tensor that its user still holds,
    such as a parameter or an input, is not touched: another thread may run backward with it and would see the change.
    """
    if known() is origin(first):
        return True
    version = first._version
    _set_version((first,), (version + _PROBE,))
    shared = second._version == version + _PROBE
    _set_version((first,), (version,))
    return shared


def counted_with(witness: Tensor, tensor: Tensor) -> Tensor:
    """`tensor` with the version counter of `witness`: an in-place change of one shows in the version of both."""
    made = witness.detach()
    made.data = tensor
    return made


_PROBE = 1 << 20
_set_version = torch._C._autograd._unsafe_set_version_counter


class Sources(Region):
    """The storages that one transfer copies, while they are on the device: lent to the lanes until they are copied.

    When dropped, each source gives up its storage and remains a witness: the record's tensor, now empty, shares the
    version counter of the saved one, so backward detects an in-place change even long after the copy.
    """

    __slots__ = ("_is_retained", "_ledger", "_lent", "_owner", "is_taken")

    def __init__(self, ledger: DeviceLedger, records: Sequence[Record], label: str) -> None:
        super().__init__(sum(record.nbytes for record in records), label)
        self._ledger = ledger
        self._lent = [record.lend_source() for record in records]
        self._owner = [self]
        """Whoever empties this list gets the sources: the lanes, which free them, or an earlier use."""
        self.is_taken = False
        self._is_retained = False

    def retain(self) -> None:
        """Keeps the sources, because the tier that they were written to rejected them: dropping does nothing until they
        are taken back."""
        self._is_retained = True

    def bytes(self) -> list[Tensor]:
        """Each storage as a uint8 tensor."""
        return [storage_bytes(tensor) for tensor, _ in self._lent]

    def take_back(self) -> list[tuple[Tensor, int]] | None:
        """Returns the sources and their charges, in the order of the records; None if they were given up already."""
        if not self._take():
            return None
        self.is_taken = True
        lent, self._lent = self._lent, []
        return lent

    def _take(self) -> bool:
        try:
            self._owner.pop()  # atomic: another thread may try the same
        except IndexError:
            return False
        return True

    def drop(self) -> None:
        if self._is_retained or not self._take():
            return
        lent, self._lent = self._lent, []
        for tensor, charge in lent:
            self._ledger.release_saved(charge)
            tensor.data = empty(torch.uint8, tensor.device)

    def poison(self) -> None:
        for tensor, _ in self._lent:
            if owned_once(tensor) and not self._is_retained:
                storage_bytes(tensor).fill_(0xFF)


def storage_bytes(tensor: Tensor) -> Tensor:
    return empty(torch.uint8, tensor.device).set_(tensor.untyped_storage())


class SpilledTensor:
    """A view of a record: what `pack` returned for one saved tensor."""

    __slots__ = ("__weakref__", "_dtype", "_offset", "_record", "_size", "_stride", "_with_batch")

    def __init__(self, record: Record, tensor: Tensor, *, with_batch: bool) -> None:
        self._record = record
        self._dtype = tensor.dtype
        self._size = tensor.shape
        self._stride = tensor.stride()
        self._offset = tensor.storage_offset()
        self._with_batch = with_batch

    def tensor(self) -> Tensor:
        storage = self._record.storage(self._size, with_batch=self._with_batch)
        found = empty(self._dtype, storage.device).set_(storage, self._offset, self._size, self._stride)
        return counted_with(self._record.witness, found)

    def prefetch(self) -> None:
        _load(self._record)

    def unload(self) -> Callable[[], None]:
        self._record.unload()
        return partial(_load_if_held, weakref.ref(self._record))


_EMPTY: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def empty(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new tensor without values, for `set_`; takes a quarter of the time of `torch.empty`."""
    template = _EMPTY.get((dtype, device))
    if template is None:
        template = _EMPTY[dtype, device] = torch.empty(0, dtype=dtype, device=device)
    return template.data


def _load(record: Record) -> None:
    if record.transfer is not None:
        record.transfer.load([record])


def _load_if_held(ref: weakref.ref[Record]) -> None:
    if (record := ref()) is not None:
        _load(record)
