"""Several documents in one row: which documents share a row, and where each of them lies. Torch-free.

Rows hold `room` tokens. Documents are placed from the longest to the shortest, each in the row with the least room that
still holds it (best fit decreasing), so the result is a function of their lengths alone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]
Lengths = tuple[tuple[int, ...], ...]
"""For each row, the number of tokens of each of its documents."""


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Documents:
    """The documents of a batch. Equal only to itself, so that what is computed from it can be kept as long as it
    lives."""

    lengths: Lengths
    """In order; padding counts as a document, so that a row's lengths add up to the sequence length."""


def packed_rows(lengths: Array, room: int) -> tuple[Array, Array]:
    """Returns the documents row by row, and for each row how many of them are in it and in the rows before it.

    `lengths`: each from 1 to `room`.
    """
    row_of, used = np.empty(len(lengths), np.int64), 0
    sizes = lengths.tolist()
    rooms: list[int] = []
    """The different amounts of room that rows have left, ascending."""
    rows: dict[int, list[int]] = {}
    for document in np.argsort(-lengths, kind="stable").tolist():
        at = bisect_left(rooms, sizes[document])
        if at < len(rooms):
            left = rooms[at]
            row = rows[left].pop()
            if not rows[left]:
                del rooms[at]
        else:
            left, row, used = room, used, used + 1
        row_of[document] = row
        if left := left - sizes[document]:
            if not rows.setdefault(left, []):
                insort(rooms, left)
            rows[left].append(row)
    return np.argsort(row_of, kind="stable"), np.cumsum(np.bincount(row_of, minlength=used))
