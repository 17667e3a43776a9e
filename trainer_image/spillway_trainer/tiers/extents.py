"""Extents: allocation of byte ranges in a host slab or spill file.

Allocation is first fit over an address-ordered free list: low addresses are reused first, so the used part of a slab
stays dense and writes to a spill file stay close together. Neighbouring free extents are merged at once.
"""

from __future__ import annotations

import bisect
import threading
from collections import Counter, deque
from collections.abc import Callable

ALIGNMENT_BYTES = 4096
"""O_DIRECT requires this alignment of addresses, offsets and lengths. Pages are no larger."""


def round_up(nbytes: int) -> int:
    """Returns `nbytes` rounded up to the alignment of extents."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Extents:
    """Allocates offsets in [0, `capacity_bytes`).

    `free` may be called by a destructor, which the garbage collector can start inside any other call of the same
    thread. So it only appends to a queue (atomic, no lock); the next allocation or query processes the queue.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        """Excludes space that was withdrawn."""
        self.peak_bytes = 0
        self._starts = [0] if self.capacity_bytes else []
        self._sizes = {0: self.capacity_bytes} if self.capacity_bytes else {}
        self._owned: dict[int, tuple[int, str]] = {}
        self._held_bytes = 0
        self._freed: deque[tuple[int, bool]] = deque()
        """Freed extents: (offset, whether it may be used again)."""
        self._lock = threading.Lock()

    def allocate(self, nbytes: int, label: str) -> int | None:
        """Returns the offset of an extent of at least `nbytes` (rounded up to 4096), or None if no free run is long
        enough."""
        wanted = round_up(max(nbytes, 1))
        with self._lock:
            self._take_back()
            for index, start in enumerate(self._starts):
                if self._sizes[start] >= wanted:
                    self._carve(index, wanted)
                    self._owned[start] = (wanted, label)
                    self._held_bytes += wanted
                    self.peak_bytes = max(self.peak_bytes, self._held_bytes)
                    return start
        return None

    def free(self, offset: int, *, reusable: bool = True) -> None:
        """Gives the extent at `offset` back; it is never allocated again unless `reusable`. Safe in a destructor."""
        self._freed.append((offset, reusable))

    @property
    def held_bytes(self) -> int:
        with self._lock:
            self._take_back()
            return self._held_bytes

    @property
    def largest_free_bytes(self) -> int:
        with self._lock:
            self._take_back()
            return max(self._sizes.values(), default=0)

    def withdraw(self, nbytes: int) -> list[tuple[int, int]]:
        """Removes free runs of `nbytes` in all (rounded up to 4096), or every free run if there is less, from the space
        for good, highest addresses first. Returns (start, size) of each."""
        withdrawn, left = list[tuple[int, int]](), round_up(nbytes)
        with self._lock:
            self._take_back()
            while left > 0 and self._starts:
                start = self._starts[-1]
                size = min(left, self._sizes[start])
                self._sizes[start] -= size
                withdrawn.append((start + self._sizes[start], size))
                if not self._sizes[start]:
                    del self._sizes[self._starts.pop()]
                self.capacity_bytes -= size
                left -= size
        return withdrawn

    def reset_peak(self) -> None:
        self.peak_bytes = self.held_bytes

    def each_free(self, use: Callable[[int, int], None]) -> None:
        """Calls `use(start, size)` for every free run. Nothing can be allocated meanwhile."""
        with self._lock:
            self._take_back()
            for start in self._starts:
                use(start, self._sizes[start])

    def holders(self) -> dict[str, int]:
        """Returns bytes held by label, largest first."""
        with self._lock:
            self._take_back()
            held: Counter[str] = Counter()
            for size, label in self._owned.values():
                held[label] += size
        return dict(held.most_common())

    def _carve(self, index: int, wanted: int) -> None:
        start = self._starts[index]
        rest = self._sizes.pop(start) - wanted
        if rest:
            self._starts[index] = start + wanted
            self._sizes[start + wanted] = rest
        else:
            del self._starts[index]

    def _take_back(self) -> None:
        while self._freed:
            offset, reusable = self._freed.popleft()
            size, _ = self._owned.pop(offset)
            self._held_bytes -= size
            if reusable:
                self._merge(offset, size)

    def _merge(self, start: int, size: int) -> None:
        index = bisect.bisect_left(self._starts, start)
        if index < len(self._starts) and start + size == self._starts[index]:
            size += self._sizes.pop(self._starts.pop(index))
        before = self._starts[index - 1] if index else None
        if before is not None and before + self._sizes[before] == start:
            self._sizes[before] += size
        else:
            self._starts.insert(index, start)
            self._sizes[start] = size
