"""What failed writes and slow transfers of a spill device lead to."""

from __future__ import annotations

import errno

import pytest

from spillway.errors import SpillIOError, SpillVolumeFull
from spillway_trainer.tiers.spill_health import (
    HEALTHY,
    MAX_BAD_EXTENTS,
    SLOW_SECONDS,
    after_failed_write,
    after_transfer,
)

IO_ERROR = SpillIOError("write failed", errno=errno.EIO)


def test_a_bad_extent_is_a_bad_extent_and_the_third_is_a_bad_device() -> None:
    health, retired = HEALTHY, []
    for _ in range(MAX_BAD_EXTENTS):
        health = after_failed_write(health, IO_ERROR)
        retired.append(health.is_retired)
    assert retired == [False, False, True]


@pytest.mark.parametrize(
    "error",
    [SpillVolumeFull("no room", errno=errno.ENOSPC), SpillVolumeFull("no room", errno=errno.EDQUOT),
     SpillIOError("gone", errno=errno.ENODEV), SpillIOError("read only", errno=errno.EROFS)],
    ids=lambda error: errno.errorcode[error.details["errno"]],
)  # fmt: skip
def test_a_volume_that_is_full_or_gone_is_retired_at_once(error: SpillIOError | SpillVolumeFull) -> None:
    assert after_failed_write(HEALTHY, error).is_retired


def test_device_is_slow_after_ten_seconds_below_a_fifth_of_planned_rate() -> None:
    health, seconds = HEALTHY, 0.0
    while not health.is_slow:
        health = after_transfer(health, 100, 0.51, 1000.0)
        seconds += 0.51
    assert SLOW_SECONDS <= seconds < SLOW_SECONDS + 0.51
    assert not after_transfer(health, 100, 0.5, 1000.0).is_slow  # five times, and no more


def test_a_pause_is_not_a_slow_device() -> None:
    health = after_transfer(HEALTHY, 100, SLOW_SECONDS - 1, 1000.0)
    health = after_transfer(health, 100, 0.1, 1000.0)
    assert not after_transfer(health, 100, SLOW_SECONDS - 1, 1000.0).is_slow


def test_nothing_is_slow_where_no_rate_was_planned() -> None:
    assert not after_transfer(HEALTHY, 1, 3600.0, 0.0).is_slow
