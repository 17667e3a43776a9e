"""The native functions in plain torch: the oracle of csrc, and the fallback where there is no compiler.

Every arithmetic line is one binary torch operation on float32, so every result is rounded once: no lerp, no addcmul, no
`alpha=`, no fused optimizer. The square root goes through float64: torch's float32 `sqrt` is MKL's vector library, off
by one unit for 0.6 % of values, while rounding the float64 root to float32 is exact (53 >= 2 * 24 + 2 bits). What IEEE
754 leaves to the hardware is declared here: a NaN that arithmetic produces or passes on is stored as the quiet NaN
0x7FC00000 (x86 keeps one operand's payload, a GPU keeps none).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 18
"""Values per pass of `adamw`: keeps its float32 temporaries at 1 MiB each instead of the size of the parameter."""

_NUM_EXPONENTS = 254
"""of finite float32 values: biased 1 to 254; zero and denormals share the first"""


def float32(value: float) -> float:
    """`value` rounded once to float32 (to nearest, ties to even)."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


@dataclass(frozen=True, slots=True)
class UpdateScalars:
    """Scalars of one AdamW step, in fp64; the properties are the float32 values that the formula uses."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    """0 for parameters that do not decay (vectors)"""
    beta1_power: float
    """beta1^t after this step's multiplication, by repeated fp64 product"""
    beta2_power: float
    gradient_scale: float = 1.0
    """clip factor; multiplied even when 1"""

    @property
    def decay(self) -> float:
        return float32(1.0 - self.learning_rate * self.weight_decay)

    @property
    def one_minus_beta1(self) -> float:
        return float32(1.0 - self.beta1)

    @property
    def one_minus_beta2(self) -> float:
        return float32(1.0 - self.beta2)

    @property
    def sqrt_bias_correction2(self) -> float:
        return float32(math.sqrt(1.0 - self.beta2_power))

    @property
    def step_size(self) -> float:
        return float32(self.learning_rate / (1.0 - self.beta1_power))


def adamw(
    scalars: UpdateScalars, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, gradient: Tensor, out: Tensor | None
) -> None:
    """One AdamW step in place (Loshchilov & Hutter 2019, algorithm 2, decoupled decay times learning rate).

    All tensors are flat and contiguous with n values: master, exp_avg and exp_avg_sq float32, gradient float32 or
    bfloat16, out bfloat16 (round to nearest even), float32 (a copy) or None.
    """
    outs = repeat(None) if out is None else torch.split(out, _CHUNK_ELEMENTS)
    parts = (torch.split(tensor, _CHUNK_ELEMENTS) for tensor in (master, exp_avg, exp_avg_sq, gradient))
    for p, m, v, g, part_out in zip(*parts, outs, strict=False):
        _adamw_part(scalars, p, m, v, g, part_out)


def _adamw_part(s: UpdateScalars, p: Tensor, m: Tensor, v: Tensor, gradient: Tensor, out: Tensor | None) -> None:
    g = gradient.float() * float32(s.gradient_scale)
    decayed = p * s.decay
    m_kept = m * float32(s.beta1)
    m_new = g * s.one_minus_beta1
    m.copy_(_quiet(m_kept + m_new))
    v_kept = v * float32(s.beta2)
    v_new = (g * g) * s.one_minus_beta2
    v.copy_(_quiet(v_kept + v_new))
    root = torch.sqrt(v.double()).float() / s.sqrt_bias_correction2
    denominator = root + float32(s.eps)
    update = (m / denominator) * s.step_size
    p.copy_(_quiet(decayed - update))
    if out is not None:
        out.copy_(p if out.dtype == torch.float32 else bfloat16(p))


def bfloat16(values: Tensor) -> Tensor:
    """float32 -> bfloat16 by integer round-to-nearest-even: keeps denormals, makes every NaN the quiet NaN 0x7FC0."""
    bits = _quiet(values).view(torch.int32)
    rounded = bits + (((bits >> 16) & 1) + 0x7FFF)
    return (rounded >> 16).to(torch.int16).view(torch.bfloat16)


def _quiet(values: Tensor) -> Tensor:
    return torch.where(torch.isnan(values), math.nan, values)


def accumulate(accumulator: Tensor, gradient: Tensor, first: bool) -> None:
    """accumulator (float32) = float(gradient) if `first`, else accumulator + float(gradient), rounded once."""
    if first:
        accumulator.copy_(gradient)
    else:
        accumulator.copy_(_quiet(accumulator + gradient.float()))


def copy_batch(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """dst = src for every (dst, src), in any order: no destination may overlap another pair."""
    for dst, src in pairs:
        dst.copy_(src)


@dataclass(frozen=True, slots=True)
class SquareSum:
    """The exact sum of the squares of float32 values: the same for every order, cut and number of threads."""

    total: int = 0
    """in units of 2^-298, the square of the smallest denormal float32"""
    num_non_finite: int = 0
    """infinities and NaNs, counted and never summed"""

    def __add__(self, other: SquareSum) -> SquareSum:
        return SquareSum(self.total + other.total, self.num_non_finite + other.num_non_finite)

    def norm(self) -> float:
        """Square root of the exact sum, correctly rounded to fp64; nan when any value was not finite."""
        return math.nan if self.num_non_finite else math.ldexp(_rounded_sqrt(self.total), -149)


def _rounded_sqrt(value: int) -> float:
    """Square root of an integer, correctly rounded: at least 64 bits of root and one sticky bit, then one rounding."""
    shift = max(0, 128 - value.bit_length())
    shift += shift & 1
    scaled = value << shift
    root = math.isqrt(scaled)
    sticky = root * root != scaled
    return math.ldexp(float(root << 1 | sticky), -1 - shift // 2)


def square_sum(values: Tensor) -> SquareSum:
    """SquareSum of a float32 or bfloat16 tensor: a value's square is the integer mantissa^2 times a power of four."""
    total = num_non_finite = 0
    for part in torch.split(values.reshape(-1), _CHUNK_ELEMENTS):
        bits = part.float().view(torch.int32)
        biased = (bits >> 23) & 0xFF
        finite = biased < 255
        num_non_finite += part.numel() - int(finite.sum())
        mantissa = torch.where(biased > 0, (bits & 0x7FFFFF) | 0x800000, bits & 0x7FFFFF).long()
        squares = torch.where(finite, mantissa * mantissa, 0)
        exponent = torch.where(finite, biased.clamp(min=1) - 1, 0).long()
        # 48-bit squares: int64 stays exact for 2^15 of them, so a part is summed as high and low halves.
        for half, shift in ((squares & 0xFFFFFF, 0), (squares >> 24, 24)):
            sums = torch.zeros(_NUM_EXPONENTS, dtype=torch.int64).index_add_(0, exponent, half).tolist()
            total += sum(of_exponent << (2 * i + shift) for i, of_exponent in enumerate(sums))
    return SquareSum(total, num_non_finite)
