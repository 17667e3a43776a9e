"""Covering arrays, and that a greater depth runs all that a lesser one does."""

from __future__ import annotations

import itertools

import pytest

from harness import depth
from harness.depth import Depth, covering

SIZES = (4, 3, 2, 5)
CELLS = list(itertools.product(*map(range, SIZES)))


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_every_choice_of_values_is_in_some_cell(strength: int) -> None:
    found = covering(CELLS, strength)
    assert len(found) < len(CELLS)
    for columns in itertools.combinations(range(len(SIZES)), strength):
        wanted = set(itertools.product(*(range(SIZES[column]) for column in columns)))
        assert {tuple(cell[column] for column in columns) for cell in found} == wanted


def test_a_greater_strength_adds_to_a_lesser_one() -> None:
    found = [set(covering(CELLS, strength)) for strength in (1, 2, 3)]
    assert found[0] < found[1] < found[2]
    assert covering(CELLS, 0) == covering(CELLS, len(SIZES)) == CELLS


def test_a_single_axis_is_never_thinned() -> None:
    assert covering([(0,), (1,), (2,)], 1) == [(0,), (1,), (2,)]


def test_products_and_lists_grow_with_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    for each in Depth:
        monkeypatch.setattr(depth, "DEPTH", each)
        sizes.append((len(depth.sweep("ab", range(3), range(4))), len(depth.some(range(20), 6)), depth.examples(60)))
    assert sizes[0] < sizes[1] < sizes[2]
    assert sizes[0] == (4, 6, 10)
    assert sizes[2] == (24, 20, 60)
