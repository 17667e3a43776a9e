"""ReloadOrder: records the order in which backward reads spilled storages, and prefetches in that order next step.

The order is the reverse of forward except where layers share a tensor: an encoder's output or a bias table is saved
once and read by every decoder layer, long before its neighbours. Reloading in reverse order would load those
neighbours too early and hold the shared tensor from its first read to its last. A storage that is read again much
later is dropped in between and reloaded.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

from spillway.errors import DeviceOutOfMemory, HostOutOfMemory

from .records import Record, SourceTransfer

FAR = 2
"""Multiple of the bytes that reloads run ahead: a storage whose next use is further away than this is freed in
between."""


class ReloadGroup(NamedTuple):
    """Reloads that are submitted together."""

    step: int
    """Index, among backward's uses, of the first use of any of them."""
    numbers: tuple[int, ...]
    nbytes: int


class Foreseen(NamedTuple):
    """The reloads that are predicted for one backward."""

    came_to: list[int]
    """The number of the storage that each step uses."""
    groups: list[ReloadGroup]
    leaves: frozenset[int]
    """Steps whose storage is used again, but so much later that it is freed in between."""


def foreseen(came_to: Sequence[int], sizes: Sequence[int], ahead_bytes: int, group_bytes: int) -> Foreseen:
    """The reloads of a backward that uses storages in the order `came_to`, with `sizes` by storage number.

    A group takes what is needed next, up to `group_bytes`. Pure.
    """
    arrived, total, last = [], 0, dict[int, int]()
    leaves: set[int] = set()
    for step, number in enumerate(came_to):
        arrived.append(total)  # bytes that arrive for the first time before this step
        if number not in last:
            total += sizes[number]
        elif total - arrived[last[number] + 1] > FAR * ahead_bytes:
            leaves.add(last[number])
        last[number] = step
    groups: list[ReloadGroup] = []
    here: set[int] = set()
    together: list[int] = []
    first = nbytes = 0
    for step, number in enumerate(came_to):
        if number not in here:
            first = first if together else step
            together.append(number)
            nbytes += sizes[number]
            here.add(number)
        if together and (nbytes >= group_bytes or (step in leaves and number in together)):
            groups.append(ReloadGroup(first, tuple(together), nbytes))
            together, nbytes = [], 0
        if step in leaves:
            here.remove(number)
    if together:
        groups.append(ReloadGroup(first, tuple(together), nbytes))
    return Foreseen(list(came_to), groups, frozenset(leaves))


class ReloadOrder:
    """The order in which backward uses one batch, and the order predicted from the previous batch."""

    def __init__(self, before: ReloadOrder | None, ahead_bytes: int, group_bytes: int) -> None:
        self._before = before
        self._ahead_bytes, self._group_bytes = ahead_bytes, group_bytes
        self.sizes: list[int] = []
        """Sizes of the moved storages, by number: in the order of forward."""
        self.came_to: list[int] = []
        self._records: list[weakref.ref[Record]] = []
        self._foreseen: Foreseen | None = None
        self._num_loaded = self._num_reached = 0
        """Numbers of groups that are loaded, and of those that backward has come to."""
        self._bytes = 0
        """Bytes of groups that are loaded and not yet used."""
        self._leaving: weakref.ref[Record] | None = None

    def add(self, record: Record, ref: weakref.ref[Record]) -> None:
        """Gives `record`, which leaves the device, its number."""
        record.number = len(self.sizes)
        self.sizes.append(record.nbytes)
        self._records.append(ref)

    def foresee(self) -> None:
        """Called when backward begins: it is expected to repeat the last one, if the same storages left the device."""
        before, self._before = self._before, None
        num_saved = len(self.sizes)
        if before is None or before.sizes[:num_saved] != self.sizes:
            return
        known, came_to = before._foreseen, before.came_to
        if len(before.sizes) > num_saved:  # its last storages stay on the device by now
            came_to = [number for number in came_to if number < num_saved]
        if known is None or known.came_to != came_to:
            known = foreseen(came_to, self.sizes, self._ahead_bytes, self._group_bytes)
        self._foreseen = known

    def come_to(self, record: Record) -> bool:
        """Called when backward needs `record`, which is loaded: reloads what it needs next. False if that is
        unknown."""
        self._give_up(record)
        step, number = len(self.came_to), record.number
        self.came_to.append(number)
        known = self._foreseen
        if known is None:
            return False
        if step >= len(known.came_to) or known.came_to[step] != number:
            self._foreseen = None  # not the same graph as the last one
            return False
        if step in known.leaves:
            self._leaving = weakref.ref(record)
        groups = known.groups
        while self._num_reached < len(groups) and groups[self._num_reached].step <= step:
            if self._num_reached < self._num_loaded:
                self._bytes -= groups[self._num_reached].nbytes
            else:
                self._num_loaded += 1  # backward came to it before its reload
            self._num_reached += 1
        self.run_ahead()
        return True

    def run_ahead(self) -> bool:
        """Reloads what is needed next, within the bytes that may run ahead. False if that is unknown."""
        known = self._foreseen
        if known is None:
            return False
        while self._num_loaded < len(known.groups):
            group = known.groups[self._num_loaded]
            if self._bytes and self._bytes + group.nbytes > self._ahead_bytes:
                break
            try:
                self._load(group)
            except (DeviceOutOfMemory, HostOutOfMemory):
                break  # no room yet: loaded when first needed, once what is used before it has left
            self._bytes += group.nbytes
            self._num_loaded += 1
        return True

    def _load(self, group: ReloadGroup) -> None:
        together: dict[SourceTransfer, list[Record]] = {}
        for number in group.numbers:
            record = self._records[number]()
            if record is not None and record.transfer is not None:
                together.setdefault(record.transfer, []).append(record)
        for transfer, records in together.items():
            transfer.load(records)

    def _give_up(self, needed: Record) -> None:
        """Unloads the storage that backward used last, if it is needed again only much later."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None and (record := leaving()) is not None and record is not needed:
            record.unload()
