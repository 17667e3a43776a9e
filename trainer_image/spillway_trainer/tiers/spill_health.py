"""Decides how the trainer responds to failed writes and slow transfers of a spill device. Pure: no clock, no device.

A write that fails leaves its bytes in host memory (nvme_slab.py), and its extent is never used again. The device is
retired, so that it takes no more writes, if the error says that there is no room or that the device is gone, or at the
third failed write. If a device is slow for 10 seconds without a break, later spills prefer host memory until a transfer
is fast again.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, replace

from spillway.errors import SpillVolumeFull, SpillwayError

MAX_BAD_EXTENTS = 3
"""Number of failed writes that retire a device: one may be a bad block, this many are not."""
SLOW_FACTOR = 5.0
"""A transfer is slow if it takes this many times its planned time."""
SLOW_SECONDS = 10.0
"""Seconds of consecutive slow transfers before spills are redirected: a drive that collects garbage pauses for less."""
GONE = (errno.ENODEV, errno.ENXIO, errno.EROFS, errno.ESTALE, errno.EBADF)
"""Values of errno after which no later write can succeed."""


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """The state of one device. A retired device takes no writes, but its contents can still be read."""

    num_bad_extents: int = 0
    is_retired: bool = False
    slow_seconds: float = 0.0
    """Seconds of the current run of consecutive transfers that each took more than SLOW_FACTOR times their planned
    time."""

    @property
    def is_slow(self) -> bool:
        return self.slow_seconds >= SLOW_SECONDS


HEALTHY = DeviceHealth()


def after_failed_write(health: DeviceHealth, error: SpillwayError) -> DeviceHealth:
    """Returns the health after one more failed write. A volume that is full or gone is retired at once."""
    num_bad = health.num_bad_extents + 1
    is_lost = isinstance(error, SpillVolumeFull) or error.details.get("errno") in GONE
    return replace(
        health, num_bad_extents=num_bad, is_retired=health.is_retired or is_lost or num_bad >= MAX_BAD_EXTENTS
    )


def after_transfer(health: DeviceHealth, nbytes: int, seconds: float, planned_bytes_per_second: float) -> DeviceHealth:
    """Returns the health after a transfer of `nbytes` in `seconds`. A planned rate of 0 is unknown, and then nothing is
    slow."""
    planned = nbytes / planned_bytes_per_second if planned_bytes_per_second > 0.0 else float("inf")
    return replace(health, slow_seconds=health.slow_seconds + seconds if seconds > SLOW_FACTOR * planned else 0.0)
