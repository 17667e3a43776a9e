"""Copies between a device and registered (pinned) host memory."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from spillway.units import GIB

PINNED_BYTES = GIB
"""Host memory is registered in pieces that end at addresses that are multiples of this. A copy must lie within one
registration, so copies are cut there, too (`spans`)."""


def spans(address: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yields (first, end), relative to `address`, of the parts of `nbytes` at `address` that lie in one registration
    each."""
    first = 0
    while first < nbytes:
        end = min(nbytes, first + PINNED_BYTES - (address + first) % PINNED_BYTES)
        yield first, end
        first = end


def copy(dst: Tensor, src: Tensor) -> None:
    """dst = src, uint8 tensors of one size, on the current stream; returns before it is done."""
    host = src if dst.is_cuda else dst
    address, nbytes = host.data_ptr(), host.numel()
    if host.is_cuda or address % PINNED_BYTES + nbytes <= PINNED_BYTES:
        dst.copy_(src, non_blocking=True)
        return
    for first, end in spans(address, nbytes):
        dst[first:end].copy_(src[first:end], non_blocking=True)
