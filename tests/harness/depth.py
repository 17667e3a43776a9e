"""How much of the suite runs: SPILLWAY_DEPTH is `quick` (`make test`, the default), `ci` (`.ci/run`) or `all`.

@pytest.mark.ci       this test runs from depth ci on
@pytest.mark.full     this test runs only at depth all
@pytest.mark.sweep    covers each value of its parameters at quick, each pair of values at ci, their product at all
sweep(*axes)          the same for a product over which a test iterates itself
some(values, 12)      twelve values of a list at quick, evenly spread; all of them from ci on
at(1, 20, 100)        a number (or anything) for each depth
examples(100)         the number of Hypothesis' examples: 100 at all, fewer at lower depths
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, TypeVar

T = TypeVar("T")


class Depth(IntEnum):
    QUICK = 1
    CI = 2
    ALL = 3


DEPTH = Depth[os.environ.get("SPILLWAY_DEPTH", "quick").upper()]
FULL = DEPTH is Depth.ALL


def at(quick: T, ci: T, everything: T) -> T:
    return {Depth.QUICK: quick, Depth.CI: ci, Depth.ALL: everything}[DEPTH]


def some(values: Iterable[T], quick: int) -> list[T]:
    """At depth quick, `quick` of the values, evenly spread; at greater depths, all of them."""
    every = list(values)
    number = at(min(quick, len(every)), len(every), len(every))
    return [every[i * len(every) // number] for i in range(number)]


def examples(number: int) -> int:
    """The number of Hypothesis' examples at this depth, for a property that gets `number` of them at depth all."""
    return at(max(5, number // 6), number // 2, number)


def sweep(*axes: Iterable[Any], quick: int = 1, ci: int = 2) -> list[tuple[Any, ...]]:
    """Cells of the product of `axes` that together contain every combination of `quick` (at depth ci: `ci`) values of
    different axes. They are in the product's order, the same in every process. At depth all, the whole product.
    """
    values = [list(axis) for axis in axes]
    cells = list(itertools.product(*(range(len(axis)) for axis in values)))
    return [tuple(axis[i] for axis, i in zip(values, cell, strict=True)) for cell in covering(cells, at(quick, ci, 0))]


def covering(cells: Sequence[tuple[int, ...]], strength: int) -> list[tuple[int, ...]]:
    """A greedy covering array of `strength`, chosen from `cells`. It contains the arrays of lower strengths, so that
    greater depths only add cells. Returns all cells if `strength` is 0 or at least their length.
    """
    if not cells or not 0 < strength < len(cells[0]):
        return list(cells)
    taken = set[tuple[int, ...]]()
    for size in range(1, strength + 1):
        columns = list(itertools.combinations(range(len(cells[0])), size))
        parts = {cell: {(chosen, *(cell[i] for i in chosen)) for chosen in columns} for cell in cells}
        missing: set[tuple[Any, ...]] = set().union(*parts.values()).difference(*(parts[cell] for cell in taken))
        while missing:
            best = max(parts, key=lambda cell: len(parts[cell] & missing))
            taken.add(best)
            missing -= parts[best]
    return [cell for cell in cells if cell in taken]
