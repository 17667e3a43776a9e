"""The process of a CPU device: its part of the cores."""

from __future__ import annotations

import pytest

from spillway_trainer.sweep.worker import cores_of


@pytest.mark.parametrize(
    ("num_devices", "cores", "parts"),
    [
        (2, {0, 1}, [{0}, {1}]),
        (2, {4, 1, 9}, [{1}, {4, 9}]),
        (3, {0, 1, 2, 3, 4, 5, 6}, [{0, 1}, {2, 3}, {4, 5, 6}]),
        (3, {5, 7}, [{5, 7}] * 3),
    ],
)
def test_devices_divide_the_cores_if_there_are_enough(num_devices: int, cores: set[int], parts: list[set[int]]) -> None:
    assert [cores_of(device, num_devices, cores) for device in range(num_devices)] == parts
