"""LazyLanes: an operation runs only when something waits for it, and memory is poisoned until then.

Data that must not be read yet does not exist yet, so a missing edge changes the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from spillway.plan import Tier
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.lanes import DONE, Buffer, Event, Lanes, Operation, Region, Submission, acquire
from spillway_trainer.tiers.releases import Releases


class LazyOperation(Operation):
    """An operation that the first waiting thread runs, after the operations that it depends on."""

    __slots__ = ("_releases",)

    def __init__(self, work: Callable[[], None], after: Sequence[Event], label: str, releases: Releases) -> None:
        super().__init__(work, after, label)
        self._releases = releases

    def wait(self) -> None:
        if not self.done:
            self.run()
            self._releases.sweep()
        self.raise_error()


class LazyLanes(Lanes):
    """The lanes for parity tests, in one thread: operations run as late as the law of ordering allows, with poisoned
    memory.

    An operation runs when its event is waited for (or never). A buffer is filled with 0xFF when it is acquired and
    again when its release takes effect, and so is a released source that nobody else holds. Therefore a missing wait,
    edge or release event changes bits.
    """

    direct_io = False

    def __init__(self, host: HostSlab, ledger: DeviceLedger) -> None:
        self._host, self._ledger = host, ledger
        self._releases = Releases(poisons=True)
        self._moved: Counter[str] = Counter()
        host.reclaim = ledger.reclaim = self.reclaim

    def acquire(self, tier: Tier, nbytes: int, label: str) -> Buffer:
        buffer = acquire(self._host, self._ledger, tier, nbytes, label)
        buffer.poison()
        return buffer

    def release(self, region: Region, after: Sequence[Event] = ()) -> None:
        self._releases.add(region, after)

    def reclaim(self) -> bool:
        return self._releases.wait_for_one()

    def enqueue(self, given: Submission) -> Event:
        self._moved[given.lane.value] += given.nbytes
        return LazyOperation(given.work, given.after, given.label, self._releases)

    def compute(self, *, reads: Sequence[Region] = (), writes: Sequence[Region] = (), label: str = "") -> None:
        return

    def computed(self) -> Event:
        return DONE

    def wait(self, event: Event) -> None:
        event.wait()

    def moved_bytes(self) -> dict[str, int]:
        return dict(self._moved)

    def stalled_seconds(self) -> float:
        return 0.0

    def busy_seconds(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        while self._releases.wait_for_one():
            pass
