"""The native functions as the trainer calls them: the library where it is, else the reference. The same bits."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from . import native, reference
from .reference import SquareSum, UpdateScalars
from .spill_file import SpillFile

__all__ = ["SpillFile", "SquareSum", "UpdateScalars", "accumulate", "copy", "copy_batch", "square_sum", "update"]


def update(
    scalars: UpdateScalars,
    master: Tensor,
    moments: Sequence[Tensor],
    gradient: Tensor,
    out: Tensor | None,
    *,
    after: Sequence[Tensor] | None = None,
    num_threads: int = 1,
) -> None:
    """One update: see reference.update, which ignores `num_threads`: torch has its own. `after`, out of place: natively
    each state is read once and written once."""
    if native.available():
        native.update(scalars, master, moments, gradient, out, after=after, num_threads=num_threads)
    else:
        reference.update(scalars, master, moments, gradient, out, after=after)


def accumulate(accumulator: Tensor, gradient: Tensor, first: bool, *, num_threads: int = 1) -> None:
    """accumulator = float(gradient) if `first`, else accumulator + float(gradient), rounded once."""
    if native.available():
        native.accumulate(accumulator, gradient, first, num_threads=num_threads)
    else:
        reference.accumulate(accumulator, gradient, first)


def square_sum(values: Tensor, *, num_threads: int = 1) -> SquareSum:
    """The exact sum of squares: see reference.SquareSum."""
    if native.available():
        return native.square_sum(values, num_threads=num_threads)
    return reference.square_sum(values)


def copy(dst: Tensor, src: Tensor, *, num_threads: int = 1) -> None:
    """dst = src, uint8 tensors of one size; natively a memmove outside the GIL."""
    copy_batch([(dst, src)], num_threads=num_threads)


def copy_batch(pairs: Sequence[tuple[Tensor, Tensor]], *, num_threads: int = 1) -> None:
    """`copy` of every (dst, src), in any order: no destination may overlap another pair."""
    if native.available():
        native.copy_batch(pairs, num_threads=num_threads)
    else:
        reference.copy_batch(pairs)
