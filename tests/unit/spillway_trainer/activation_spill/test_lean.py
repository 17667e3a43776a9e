"""What counts as cheap to make again, and how much of a forward is to go."""

from __future__ import annotations

import pytest

from spillway_trainer.activation_spill.lean import (
    MAX_KERNELS,
    MAX_OPERAND,
    MAX_TRAFFIC,
    Cost,
    Forward,
    Wanted,
    is_cheap,
    total,
    wanted,
)


def test_a_chain_costs_what_its_links_cost_and_its_own_pass() -> None:
    scaled = total(100, [100, 4], [])
    assert scaled == Cost(1, 204, 100)
    assert total(100, [100, 8], [scaled]) == Cost(2, 412, 100)


@pytest.mark.parametrize(
    ("cost", "cheap"),
    [
        (Cost(MAX_KERNELS, MAX_TRAFFIC * 10, MAX_OPERAND * 10), True),
        (Cost(MAX_KERNELS + 1, 1, 1), False),
        (Cost(1, MAX_TRAFFIC * 10 + 1, 1), False),
        (Cost(1, 1, MAX_OPERAND * 10 + 1), False),
    ],
    ids=str,
)
def test_cheap_means_few_kernels_little_traffic_and_no_large_operand(cost: Cost, cheap: bool) -> None:
    assert is_cheap(cost, 10) is cheap


@pytest.mark.parametrize(
    ("last", "kept_bytes", "expected"),
    [
        (None, 50, Wanted(None, None)),
        (Forward(100, 0, 40), 100, Wanted(0, 0)),
        (Forward(100, 0, 40), 90, Wanted(10, 0)),
        (Forward(60, 40, 40), 90, Wanted(10, 0)),
        (Forward(60, 40, 40), 20, Wanted(40, 40)),
        (Forward(100, 0, 0), 20, Wanted(0, 80)),
        (Forward(100, 0, None), 20, Wanted(80, 80)),
        (Forward(100, 0, None), 120, Wanted(0, 0)),
    ],
    ids=str,
)
def test_what_is_too_much_is_rebuilt_as_far_as_it_can_be_and_moved_beyond(
    last: Forward | None, kept_bytes: int, expected: Wanted
) -> None:
    assert wanted(last, kept_bytes) == expected
