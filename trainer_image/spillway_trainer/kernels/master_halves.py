"""Splits a float32 master into its bfloat16 weight and 17 more bits; only these bits cross the link to the device.

    master    upper half | lower half
    weight    upper half + carry             rounded to nearest even
    rest                   lower half, carry

The weight has a carry if the lower half is above 0x8000, and none if it is below. At exactly 0x8000, half way, the
weight is the even one of two, and the lower half cannot say from which side it was rounded: an even weight has 65,537
masters, one more than 16 bits distinguish. So the carry needs a bit of its own. Zeros of both signs, denormals,
infinities and values that round to infinity need no special case. A NaN is the declared one (reference.py), 0x7FC00000
with the weight 0x7FC0, or the widened value of a weight that is a NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .reference import UpdateScalars, kept_elements

LOWER_BYTES, CARRIES_PER_BYTE = 2, 8
_CHUNK_ELEMENTS = 1 << 18
"""Values per pass of `update`, a multiple of CARRIES_PER_BYTE and of the values in a block of moments: each temporary
takes 1 MiB."""


def rest_bytes(size: int) -> int:
    """Returns the bytes of the rest of `size` masters: their lower halves, then their carries, eight per byte, the
    first in the lowest bit."""
    return LOWER_BYTES * size + -(-size // CARRIES_PER_BYTE)


def split(master: Tensor, weights: Tensor, rest: Tensor) -> None:
    """Sets `rest` to the bits of the masters that `weights`, the masters rounded to bfloat16, lack. All are flat;
    `rest` is uint8 of rest_bytes."""
    lower, carries = halves(rest, master.numel())
    bits = master.view(torch.int32)
    lower.copy_(bits)
    carried = (weights.view(torch.int16) ^ (bits >> 16)) & 1  # the weight is the upper half or the next
    octets = torch.zeros(carries.numel() * CARRIES_PER_BYTE, dtype=torch.uint8, device=rest.device)
    octets[: master.numel()] = carried
    carries.copy_((octets.view(-1, CARRIES_PER_BYTE) << _places(rest)).sum(1, dtype=torch.uint8))


def join(weights: Tensor, rest: Tensor) -> Tensor:
    """Returns the masters that `split` was given."""
    lower, carries = halves(rest, weights.numel())
    carried = ((carries.unsqueeze(1) >> _places(rest)) & 1).view(-1)[: weights.numel()]
    upper = weights.view(torch.int16).to(torch.int32) - carried
    return (upper << 16 | (lower.to(torch.int32) & 0xFFFF)).view(torch.float32)


def halves(rest: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Returns views of the lower halves (int16) and of the bytes of the carries."""
    return rest[: LOWER_BYTES * size].view(torch.int16), rest[LOWER_BYTES * size :]


def update(
    arithmetic: Callable[[UpdateScalars, Tensor, Sequence[Tensor], Tensor, Tensor], None],
    scalars: UpdateScalars,
    rest: Tensor,
    moments: Sequence[Tensor],
    gradient: Tensor,
    weights: Tensor,
) -> None:
    """reference.update, computed by `arithmetic`, of masters that never exist as a whole: `weights` and `rest` become
    those of the new masters. Masters are joined and split a part at a time."""
    lower, carries = halves(rest, weights.numel())
    parts = [torch.split(tensor, _CHUNK_ELEMENTS) for tensor in (weights, lower, gradient)]
    parts += [torch.split(moment, kept_elements(_CHUNK_ELEMENTS, moment.dtype)) for moment in moments]
    octets = torch.split(carries, _CHUNK_ELEMENTS // CARRIES_PER_BYTE)
    for of_octets, of_weights, of_lower, of_gradient, *of_moments in zip(octets, *parts, strict=True):
        beside = torch.cat([of_lower.view(torch.uint8), of_octets])
        master = join(of_weights, beside)
        arithmetic(scalars, master, of_moments, of_gradient, of_weights)
        split(master, of_weights, beside)
        lower_now, octets_now = halves(beside, master.numel())
        of_lower.copy_(lower_now)
        of_octets.copy_(octets_now)


def _places(rest: Tensor) -> Tensor:
    return torch.arange(CARRIES_PER_BYTE, dtype=torch.uint8, device=rest.device)
