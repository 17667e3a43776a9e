"""activation_spill.reload_order: what reloads do when the order in which backward comes to storages is known."""

from __future__ import annotations

import random

import pytest

from spillway_trainer.activation_spill.reload_order import ReloadGroup, foreseen


def test_the_nearest_are_reloaded_first_in_groups() -> None:
    known = foreseen([3, 2, 1, 0], [4, 4, 1, 2], ahead_bytes=8, group_bytes=3)
    assert known.groups == [ReloadGroup(0, (3, 2), 3), ReloadGroup(2, (1,), 4), ReloadGroup(3, (0,), 4)]
    assert known.leaves == frozenset()


def test_what_is_needed_again_soon_stays_and_is_reloaded_once() -> None:
    known = foreseen([2, 2, 1, 2, 0], [4, 4, 4], ahead_bytes=4, group_bytes=4)
    assert [group.numbers for group in known.groups] == [(2,), (1,), (0,)]
    assert known.leaves == frozenset()


def test_tensor_needed_much_later_leaves_and_is_reloaded_before_its_use() -> None:
    known = foreseen([0, 4, 3, 2, 0, 1], [4] * 5, ahead_bytes=4, group_bytes=4)
    assert known.leaves == frozenset({0})  # three others come in before step 4
    assert known.groups == [ReloadGroup(step, (number,), 4) for step, number in enumerate([0, 4, 3, 2, 0, 1])]


@pytest.mark.parametrize("seed", range(20))
def test_each_need_finds_its_storage_reloaded_before_it_and_not_given_up(seed: int) -> None:
    numbers = random.Random(seed)
    sizes = [numbers.randrange(1, 20) for _ in range(12)]
    came_to = [numbers.randrange(12) for _ in range(60)]
    known = foreseen(came_to, sizes, ahead_bytes=numbers.randrange(1, 30), group_bytes=numbers.randrange(1, 30))
    here: set[int] = set()
    groups = list(known.groups)
    for step, number in enumerate(came_to):
        while groups and groups[0].step <= step:
            assert here.isdisjoint(groups[0].numbers)
            here.update(groups.pop(0).numbers)
        assert number in here
        if step in known.leaves:
            here.remove(number)
    assert not groups
    assert known.came_to == came_to


def test_nothing_left_is_nothing_to_reload() -> None:
    assert foreseen([], [], ahead_bytes=4, group_bytes=4).groups == []
