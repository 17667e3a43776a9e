"""Dispatches kernels by device, with the same bits on each. On a CPU they run in the native library if it was built,
else in the reference. On a CUDA device they run in Triton, on the current stream, and return before they are done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import master_halves, native, pinned, reference, reference_cipher
from .reference import SquareSum, UpdateScalars

__all__ = [
    "BegunSum",
    "SquareSum",
    "UpdateScalars",
    "accumulate",
    "begin_square_sum",
    "copy",
    "copy_batch",
    "finish_square_sums",
    "new_cipher",
    "square_sum",
    "update",
    "update_split",
]

BegunSum = SquareSum | Tensor
"""A sum of squares that may still be running on a device."""


def triton_kernels() -> Any:
    from . import triton_kernels as found  # noqa: PLC0415 - a CPU needs no Triton

    return found


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
    """One update: see reference.update, which takes no `num_threads`, because torch sets its own. With `after` (out of
    place) the native library reads each state once and writes it once. On a device an update can only be in place."""
    if master.is_cuda:
        assert after is None, "what is updated ahead of the step is updated by the CPU"
        triton_kernels().update(scalars, master, moments, gradient, out)
    elif native.available():
        native.update(scalars, master, moments, gradient, out, after=after, num_threads=num_threads)
    else:
        reference.update(scalars, master, moments, gradient, out, after=after)


def update_split(
    arithmetic: Callable[..., None],
    scalars: UpdateScalars,
    rest: Tensor,
    moments: Sequence[Tensor],
    gradient: Tensor,
    weights: Tensor,
) -> None:
    """One update of masters that are split into bfloat16 `weights` and their `rest` (master_halves.py); both become
    those of the new masters. On a CPU `arithmetic` (an `update`) computes it; a device does it in one pass."""
    if rest.is_cuda:
        triton_kernels().update_split(scalars, rest, moments, gradient, weights)
    else:
        master_halves.update(arithmetic, scalars, rest, moments, gradient, weights)


def accumulate(accumulator: Tensor, gradient: Tensor, first: bool, *, num_threads: int = 1) -> None:
    """accumulator = float(gradient) if `first`, else accumulator + float(gradient), rounded once."""
    if accumulator.is_cuda:
        triton_kernels().accumulate(accumulator, gradient, first)
    elif native.available():
        native.accumulate(accumulator, gradient, first, num_threads=num_threads)
    else:
        reference.accumulate(accumulator, gradient, first)


def square_sum(values: Tensor, *, num_threads: int = 1) -> SquareSum:
    """Returns the exact sum of squares: see reference.SquareSum."""
    return finish_square_sums([begin_square_sum(values, num_threads=num_threads)])


def begin_square_sum(values: Tensor, *, num_threads: int = 1) -> BegunSum:
    """Starts `square_sum`. On a device the result is complete once the stream is, and `finish_square_sums` reads it."""
    if values.is_cuda:
        words: Tensor = triton_kernels().square_sum(values)
        return words
    if native.available():
        return native.square_sum(values, num_threads=num_threads)
    return reference.square_sum(values)


def finish_square_sums(sums: Sequence[BegunSum]) -> SquareSum:
    """Returns the total of `sums`. Those on a device must be complete; they come to the host in one small copy."""
    on_device = [words for words in sums if isinstance(words, Tensor)]
    found = sum((one for one in sums if isinstance(one, SquareSum)), SquareSum())
    if on_device:
        words = torch.cat(on_device)
        # In 32-bit halves, which no number of sums makes overflow.
        low, high = torch.stack([(words & 0xFFFFFFFF).sum(0), (words >> 32).sum(0)]).tolist()
        found += reference.square_sum_of_words([one + (two << 32) for one, two in zip(low, high, strict=True)])
    return found


def copy(dst: Tensor, src: Tensor, *, num_threads: int = 1) -> None:
    """dst = src, uint8 tensors of one size; natively a memmove without the GIL."""
    copy_batch([(dst, src)], num_threads=num_threads)


def copy_batch(pairs: Sequence[tuple[Tensor, Tensor]], *, num_threads: int = 1) -> None:
    """`copy` of every (dst, src), in any order: no destination may overlap another pair."""
    if pairs and (pairs[0][0].is_cuda or pairs[0][1].is_cuda):
        for dst, src in pairs:
            pinned.copy(dst, src)
    elif native.available():
        native.copy_batch(pairs, num_threads=num_threads)
    else:
        reference.copy_batch(pairs)


def new_cipher() -> native.Cipher | reference_cipher.ReferenceCipher:
    """Returns AES-256-XTS with a new random key."""
    return native.Cipher() if native.available() else reference_cipher.ReferenceCipher()
