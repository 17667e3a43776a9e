"""DeviceLedger: enforces the device's byte budget where the device itself does not (a CPU).

Everything that the trainer holds on the device is charged here by purpose: parameters, gradients, optimizer states,
saved activations, buffers. A charge beyond the planned bytes waits for releases in flight. A charge beyond the budget
raises DeviceOutOfMemory, as an allocation on a GPU would.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Callable

from torch import UntypedStorage

from spillway.errors import DeviceOutOfMemory
from spillway.units import format_bytes

from ..ending import OFFLOAD_MORE
from .releases import obtain

ACTIVATIONS = "activations"
"""The purpose of tensors that autograd saved for backward."""


class DeviceLedger:
    """Counts the bytes held on the device, by purpose, against a budget (None: unlimited).

    `release` and `release_saved` may run in a destructor, which the garbage collector can start inside any other call
    of the same thread. So they only append to a queue (atomic, no lock). Every charge and query processes the queue
    first; the peak stays right, because only a charge can reach it.
    """

    def __init__(self, budget_bytes: int | None, planned_bytes: float = math.inf) -> None:
        self.budget_bytes = budget_bytes
        self._most_bytes = math.inf if budget_bytes is None else budget_bytes
        self._planned_bytes = min(planned_bytes, self._most_bytes)
        self.reclaim: Callable[[], bool] | None = None
        """Waits for one release in flight; False if there is none. Set by the lanes, which know what is in flight."""
        self._held: Counter[str] = Counter()
        self._held_bytes = 0
        self._peak_bytes = 0
        self._saved: dict[int, int] = {}
        """Key of a storage -> its size in bytes."""
        self._saved_bytes = 0
        self._shared: dict[int, int] = {}
        """Key of a storage with several holders -> the number of holders beyond the first."""
        self._released: deque[tuple[str, int]] = deque()
        """Released charges: (purpose, bytes)."""
        self._released_saved: deque[int] = deque()
        """Keys of storages that lost a holder."""
        self.release_saved: Callable[[int], None] = self._released_saved.append
        """Called with a key, removes one of its holders. Safe in a destructor."""
        self._lock = threading.Lock()

    def charge(self, purpose: str, nbytes: int) -> None:
        """Counts `nbytes` for `purpose`. Waits for releases in flight before it exceeds the planned bytes, and before
        it raises DeviceOutOfMemory."""
        if not self._try_charge(purpose, nbytes, self._planned_bytes):
            self._retry(purpose, nbytes)

    def release(self, purpose: str, nbytes: int) -> None:
        """Subtracts bytes that were charged for the same purpose. Safe in a destructor."""
        self._released.append((purpose, nbytes))

    def charge_saved(self, storage: UntypedStorage, limit_bytes: float | None = None) -> int:
        """Counts one more holder of a saved storage, and its bytes with the first holder; returns the key to release.
        Does not wait while the total stays within `limit_bytes` (None: the planned bytes).

        The key is the address of torch's storage object. A holder calls `release_saved` before it drops the storage,
        and the queue is processed before a key is looked up, so a key that is found never belongs to an earlier
        storage.
        """
        # Runs once per saved tensor, on the thread that launches compute: therefore inlined, without calls.
        key: int = storage._cdata
        with self._lock:
            if self._released_saved or self._released:
                self._settle()
            if key in self._saved:
                self._shared[key] = self._shared.get(key, 0) + 1
                return key
            nbytes = storage.nbytes()
            held_bytes = self._held_bytes + nbytes
            if held_bytes <= (self._planned_bytes if limit_bytes is None else limit_bytes):
                self._saved[key] = nbytes
                self._saved_bytes += nbytes
                self._held_bytes = held_bytes
                if held_bytes > self._peak_bytes:  # noqa: PLR1730  max() is a call
                    self._peak_bytes = held_bytes
                return key
        self.charge(ACTIVATIONS, nbytes)  # waits for releases in flight, which make room
        self.release(ACTIVATIONS, nbytes)
        return self.charge_saved(storage, self._most_bytes)

    def num_holders(self, key: int) -> int:
        """Returns the number of holders of the saved storage with this key; it must have at least one."""
        with self._lock:
            self._settle()
            return 1 + self._shared.get(key, 0)

    @property
    def held_bytes(self) -> int:
        with self._lock:
            self._settle()
            return self._held_bytes

    @property
    def peak_bytes(self) -> int:
        """Highest bytes held since the start or the last reset_peak()."""
        return self._peak_bytes

    def reset_peak(self) -> None:
        self._peak_bytes = self.held_bytes

    def by_purpose(self) -> dict[str, int]:
        """Returns bytes held by purpose, largest first."""
        with self._lock:
            self._settle()
            held = self._held + Counter({ACTIVATIONS: self._saved_bytes})  # the sum omits zeros
            return dict(held.most_common())

    def _retry(self, purpose: str, nbytes: int) -> None:
        within_plan = obtain(lambda: self._try_charge(purpose, nbytes, self._planned_bytes) or None, self.reclaim)
        if within_plan is None and not self._try_charge(purpose, nbytes, self._most_bytes):
            self._reject(purpose, nbytes)

    def _try_charge(self, purpose: str, nbytes: int, limit_bytes: float) -> bool:
        with self._lock:
            self._settle()
            return self._add(purpose, nbytes, limit_bytes)

    def _add(self, purpose: str, nbytes: int, limit_bytes: float) -> bool:
        held_bytes = self._held_bytes + nbytes
        if held_bytes > limit_bytes:
            return False
        self._held[purpose] += nbytes
        self._held_bytes = held_bytes
        self._peak_bytes = max(self._peak_bytes, held_bytes)
        return True

    def _settle(self) -> None:
        released = self._released
        while released:
            purpose, nbytes = released.popleft()
            self._held[purpose] -= nbytes
            self._held_bytes -= nbytes
        if self._released_saved:
            self._settle_saved()

    def _settle_saved(self) -> None:
        released, saved, shared, saved_bytes = self._released_saved, self._saved, self._shared, 0
        while released:
            key = released.popleft()
            if key in shared:
                shared[key] -= 1
                if not shared[key]:
                    del shared[key]
            else:
                saved_bytes += saved.pop(key)
        self._saved_bytes -= saved_bytes
        self._held_bytes -= saved_bytes

    def _reject(self, purpose: str, nbytes: int) -> None:
        held = self.by_purpose()
        total = sum(held.values())
        holders = ", ".join(f"{name} {format_bytes(size)}" for name, size in held.items()) or "nothing"
        raise DeviceOutOfMemory(
            f"device memory: {format_bytes(nbytes)} more for {purpose} exceed this rank's limit of "
            f"{format_bytes(self.budget_bytes or 0)} (spec.memory.budget.device, or the plan and a margin, if that is "
            f"less); held: {format_bytes(total)} ({holders}). With spec.memory.mode Auto, another plan is tried; "
            f"else raise the budget, {OFFLOAD_MORE}.",
            purpose=purpose,
            wanted_bytes=nbytes,
            held_bytes=total,
            budget_bytes=self.budget_bytes,
        )
