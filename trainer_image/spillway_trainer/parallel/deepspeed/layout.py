"""Computes which values of each parameter DeepSpeed assigns to which rank. Pure.

Zero1, Zero2   the parameters of a group lie end to end, and the whole is cut into equal parts: a parameter belongs to
               one rank, or to several neighbouring ranks
Zero3          every parameter is cut into equal parts, the last one shorter
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class ShardPiece:
    """One rank's part of one flattened parameter: values [offset, offset + size). Size 0: the rank has none."""

    offset: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.size


Layout = Mapping[str, Sequence[ShardPiece]]
"""Parameter -> one piece per rank; together they make up the parameter."""


def cut_group(
    places: Mapping[str, tuple[int, int]], partition_size: int, world_size: int
) -> dict[str, list[ShardPiece]]:
    """Cuts a group. `places`: parameter -> (offset in its group, number of values); each rank has `partition_size`
    values of the group."""

    def piece(start: int, size: int, rank: int) -> ShardPiece:
        first = min(max(rank * partition_size, start), start + size)
        last = max(min((rank + 1) * partition_size, start + size), first)
        return ShardPiece(first - start, last - first)

    return {name: [piece(start, size, rank) for rank in range(world_size)] for name, (start, size) in places.items()}


def cut_evenly(num_values: int, world_size: int) -> list[ShardPiece]:
    """Cuts one parameter into parts of ceil(n / ranks) values; the last part may be shorter, and later ranks may have
    none."""
    part = -(-num_values // world_size)
    starts = [min(rank * part, num_values) for rank in range(world_size + 1)]
    return [ShardPiece(start, end - start) for start, end in pairwise(starts)]
