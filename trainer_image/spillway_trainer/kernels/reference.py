"""The native functions in plain torch: the reference for csrc in tests, and the fallback where there is no compiler.

Every arithmetic line is one binary torch operation on float32, so every result is rounded once: no lerp, no addcmul, no
`alpha=`, no fused optimizer. The square root goes through float64: torch's float32 `sqrt` is MKL's vector library, off
by one unit for 0.6 % of values, while rounding the float64 root to float32 is exact (53 >= 2 * 24 + 2 bits). What IEEE
754 leaves to the hardware is declared here: a NaN that arithmetic produces or passes on is stored as the quiet NaN
0x7FC00000 (x86 keeps one operand's payload, a GPU keeps none).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor

from spillway.update_rules import BLOCK_VALUES, UNSIGNED_MOMENTS, MomentType, UpdateRule

_CHUNK_ELEMENTS = 1 << 18
"""Values per pass of `update`: keeps its float32 temporaries at 1 MiB each instead of the size of the parameter."""

_NUM_EXPONENTS = 254
"""Number of biased exponents of finite float32 values, 1 to 254; zero and denormals share the first."""


def float32(value: float) -> float:
    """Returns `value` rounded once to float32 (to nearest, ties to even)."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


@dataclass(frozen=True, slots=True)
class UpdateScalars:
    """Scalars of one update, in fp64. The properties are the float32 values that the formulas use. A rule reads only
    those that its formula names."""

    learning_rate: float
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    weight_decay: float = 0.0
    """0 for parameters that do not decay (vectors)."""
    beta1_power: float = 0.0
    """beta1^t after this step's multiplication, by repeated fp64 product; 0 for rules without bias correction."""
    beta2_power: float = 0.0
    gradient_scale: float = 1.0
    """The clip factor; gradients are multiplied by it even if it is 1."""
    momentum: float = 0.0
    rule: UpdateRule = UpdateRule.ADAMW

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
        """The learning rate; for rules with bias correction, divided by that of exp_avg."""
        return float32(self.learning_rate / (1.0 - self.beta1_power))


def update(
    scalars: UpdateScalars,
    master: Tensor,
    moments: Sequence[Tensor],
    gradient: Tensor,
    out: Tensor | None,
    *,
    after: Sequence[Tensor] | None = None,
) -> None:
    """One update by `scalars.rule`; `moments` are those of the rule, in its order. It is in place, or of copies: then
    `after` is where the new master and moments go, which overlap none of the old ones; these stay unchanged.

    All tensors are flat and contiguous with n values: master float32; gradient float32, bfloat16 or float16; out
    bfloat16 or float16 (round to nearest even), float32 (a copy) or None. Moments, all of one type, are float32,
    bfloat16 or uint8 (`quantized`, in whole blocks from the first value on). Those that are not float32 are widened
    first and narrowed last, and the master is updated with their values before narrowing.
    """
    assert len(moments) == len(scalars.rule.moments), f"{scalars.rule} with {len(moments)} moments"
    part = _PARTS[scalars.rule]
    if after is not None:
        for new, old in zip(after, (master, *moments), strict=True):
            new.copy_(old)
        master, *moments = after
    outs = repeat(None) if out is None else torch.split(out, _CHUNK_ELEMENTS)
    elements = kept_elements(_CHUNK_ELEMENTS, moments[0].dtype)
    states = (torch.split(tensor, _CHUNK_ELEMENTS) for tensor in (gradient, master))
    kept_moments = (torch.split(moment, elements) for moment in moments)
    for part_out, given, p, *of_p in zip(outs, *states, *kept_moments, strict=False):
        kinds = scalars.rule.moments
        values = [widened(kept, kind) for kept, kind in zip(of_p, kinds, strict=True)]
        part(scalars, given.float() * float32(scalars.gradient_scale), p, *values)
        for kept, new, kind in zip(of_p, values, kinds, strict=True):
            if kept is not new:
                kept.copy_(narrowed(new, kept.dtype, kind))
        if part_out is not None:
            part_out.copy_(rounded(p, part_out.dtype))


def _adamw(s: UpdateScalars, g: Tensor, p: Tensor, m: Tensor, v: Tensor) -> None:
    """Loshchilov & Hutter 2019, algorithm 2, with decoupled decay multiplied by the learning rate."""
    decayed = p * s.decay
    _adam_step(s, g, decayed, p, m, v)


def _adam(s: UpdateScalars, g: Tensor, p: Tensor, m: Tensor, v: Tensor) -> None:
    """Kingma & Ba 2015, with weight decay as in torch.optim.Adam: L2, added to the gradient even when it is 0."""
    decay = p * float32(s.weight_decay)
    _adam_step(s, g + decay, p, p, m, v)


def _adam_step(s: UpdateScalars, g: Tensor, before: Tensor, p: Tensor, m: Tensor, v: Tensor) -> None:
    m_kept = m * float32(s.beta1)
    m_new = g * s.one_minus_beta1
    m.copy_(quiet(m_kept + m_new))
    v_kept = v * float32(s.beta2)
    v_new = (g * g) * s.one_minus_beta2
    v.copy_(quiet(v_kept + v_new))
    root = torch.sqrt(v.double()).float() / s.sqrt_bias_correction2
    denominator = root + float32(s.eps)
    step = (m / denominator) * s.step_size
    p.copy_(quiet(before - step))


def _sgd_momentum(s: UpdateScalars, g: Tensor, p: Tensor, m: Tensor) -> None:
    """torch.optim.SGD with momentum and without dampening; the buffer begins at 0, which gives the same first step."""
    decay = p * float32(s.weight_decay)
    new = g + decay
    m_kept = m * float32(s.momentum)
    m.copy_(quiet(m_kept + new))
    step = m * s.step_size
    p.copy_(quiet(p - step))


def _lion(s: UpdateScalars, g: Tensor, p: Tensor, m: Tensor) -> None:
    """Chen et al. 2023 (arXiv 2302.06675), algorithm 2: the decay is applied to the parameter first, as in AdamW."""
    decayed = p * s.decay
    m_kept = m * float32(s.beta1)
    m_new = g * s.one_minus_beta1
    step = _sign(m_kept + m_new) * s.step_size
    m_kept = m * float32(s.beta2)
    m_new = g * s.one_minus_beta2
    m.copy_(quiet(m_kept + m_new))
    p.copy_(quiet(decayed - step))


_PARTS: dict[UpdateRule, Callable[..., None]] = {
    UpdateRule.ADAMW: _adamw,
    UpdateRule.ADAM: _adam,
    UpdateRule.SGD_MOMENTUM: _sgd_momentum,
    UpdateRule.LION: _lion,
}


def _sign(values: Tensor) -> Tensor:
    """Returns 1 above 0 and -1 below; a zero or a NaN is returned as it is."""
    return torch.where(values > 0, 1.0, torch.where(values < 0, -1.0, values))


def bfloat16(values: Tensor) -> Tensor:
    """float32 -> bfloat16 by integer round-to-nearest-even; keeps denormals and makes every NaN the quiet NaN
    0x7FC0."""
    bits = quiet(values).view(torch.int32)
    rounded = bits + (((bits >> 16) & 1) + 0x7FFF)
    return (rounded >> 16).to(torch.int16).view(torch.bfloat16)


def float16(values: Tensor) -> Tensor:
    """float32 -> float16, rounded to nearest even; keeps denormals, makes every NaN the quiet NaN 0x7E00, and makes
    values that round beyond 65504 an infinity."""
    return quiet(values).to(torch.float16)


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts float32 values to the type of a parameter: float32 (unchanged), bfloat16 or float16."""
    if dtype == torch.float32:
        return values
    return float16(values) if dtype == torch.float16 else bfloat16(values)


def quiet(values: Tensor) -> Tensor:
    """Returns the values with every NaN replaced by the declared one."""
    return torch.where(torch.isnan(values), math.nan, values)


# --- moments in fewer bytes


def widened(kept: Tensor, kind: str) -> Tensor:
    """Returns the float32 values of the state `kind`: the tensor itself, or a copy; flat if it is quantized."""
    if kept.dtype == torch.uint8:
        return dequantized(kept, MAPS[kind in UNSIGNED_MOMENTS])
    return kept if kept.dtype == torch.float32 else kept.float()


def narrowed(values: Tensor, dtype: torch.dtype, kind: str) -> Tensor:
    """Converts float32 values to `dtype`, in which the state `kind` is kept: float32 (unchanged), bfloat16, or
    quantized and flat."""
    if dtype == torch.uint8:
        return quantized(values.reshape(-1), MAPS[kind in UNSIGNED_MOMENTS])
    return rounded(values, dtype)


def kept_elements(num_values: int, dtype: torch.dtype) -> int:
    """Returns the number of elements of `dtype` that hold `num_values` values of a state; in uint8 each block also has
    a scale."""
    return MomentType.INT8.bytes_of(num_values) if dtype == torch.uint8 else num_values


@dataclass(frozen=True)
class Map:
    """The number of each 8-bit code, as a fraction of its block's scale, and the code of each number."""

    values: Tensor
    """256 float32 values, ascending."""
    borders: Tensor
    """255 float32 values, ascending: a number above the n-th, and not above the next, is nearest to values[n + 1]."""
    zero: int
    """Position of 0 among the values. A code is a position minus this one, modulo 256, so that zero bytes stand for
    zeros."""

    def positions(self, codes: Tensor) -> Tensor:
        return (codes.long() + self.zero) % 256

    def codes(self, numbers: Tensor) -> Tensor:
        """Returns the codes of the nearest values; half way between two, that of the lesser one."""
        return (torch.bucketize(numbers, self.borders) - self.zero).remainder(256).to(torch.uint8)


def dynamic_map(*, signed: bool) -> Map:
    """Dynamic tree quantization (Dettmers, arXiv 1511.04561), with the values that bitsandbytes and torchao use: 0, 1,
    and in decade i of seven the middles of 2^i equal parts of 0.1 to 1 (twice as many without a sign), times 10^(i -
    6).

    Without a sign, no number above 0 becomes 0; it becomes the least value instead. Updates divide by the root of a
    second moment, and a 0 beside a first moment that is not 0 would make a step of any size (arXiv 2309.01507: the
    zero-point problem).
    """
    found = [0.0, 1.0]
    for decade in range(7):
        count = 2**decade if signed else 2 ** (decade + 1)
        for part in range(count):
            value = (0.1 + 0.9 * (part + 0.5) / count) * 10.0 ** (decade - 6)
            found += [value, -value] if signed else [value]
    values = torch.tensor(sorted(found), dtype=torch.float32)
    borders = ((values[:-1].double() + values[1:].double()) / 2).float()
    if not signed:
        borders[0] = 0.0
    return Map(values, borders, int((values == 0).nonzero()))


MAPS = (dynamic_map(signed=True), dynamic_map(signed=False))
"""The maps of first moments, and of moments without sign."""


def quantized(values: Tensor, by: Map) -> Tensor:
    """Returns n flat float32 values as uint8, in blocks of BLOCK_VALUES, the last block of the remainder. A block is
    its scale (float32, the largest magnitude in it, 4 bytes), then a byte per value: the code of value / scale, rounded
    once.

    A block of zeros has scale 0. A block that holds an infinity or a NaN has the quiet NaN as its scale, and codes 0:
    all of it reads as NaN.
    """
    n = values.numel()
    if n == 0:
        return torch.empty(0, dtype=torch.uint8)
    blocks = torch.zeros(-(-n // BLOCK_VALUES), BLOCK_VALUES)
    blocks.view(-1)[:n] = values
    scales = blocks.abs().amax(1, keepdim=True)
    finite = scales.isfinite()
    fractions = blocks / torch.where(finite & (scales > 0), scales, 1.0)
    codes = torch.where(finite, by.codes(fractions), torch.zeros((), dtype=torch.uint8))
    scales = torch.where(finite, scales, math.nan)
    return torch.cat([scales.view(torch.uint8), codes], dim=1).view(-1)[: MomentType.INT8.bytes_of(n)]


def dequantized(kept: Tensor, by: Map) -> Tensor:
    """Returns the float32 values that `quantized` bytes stand for: a code's number times its block's scale, rounded
    once."""
    if kept.numel() == 0:
        return torch.empty(0)
    whole = MomentType.INT8.bytes_of(BLOCK_VALUES)
    num_blocks = -(-kept.numel() // whole)
    blocks = torch.zeros(num_blocks * whole, dtype=torch.uint8)
    blocks[: kept.numel()] = kept
    blocks = blocks.view(num_blocks, whole)
    scales = blocks[:, :-BLOCK_VALUES].contiguous().view(torch.float32)
    values = quiet(by.values[by.positions(blocks[:, -BLOCK_VALUES:])] * scales)
    num_scale_bytes = num_blocks * (whole - BLOCK_VALUES)
    return values.view(-1)[: kept.numel() - num_scale_bytes]


def accumulate(accumulator: Tensor, gradient: Tensor, first: bool) -> None:
    """accumulator (float32) = float(gradient) if `first`, else accumulator + float(gradient), rounded once. A float16
    NaN becomes the quiet one, because the conversion of its payload is not specified."""
    if first:
        accumulator.copy_(quiet(gradient.float()) if gradient.dtype == torch.float16 else gradient)
    else:
        accumulator.copy_(quiet(accumulator + gradient.float()))


def copy_batch(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """dst = src for every (dst, src), in any order: no destination may overlap another pair."""
    for dst, src in pairs:
        dst.copy_(src)


@dataclass(frozen=True, slots=True)
class SquareSum:
    """The exact sum of the squares of float32 values: the same for every order, division and number of threads."""

    total: int = 0
    """The sum in units of 2^-298, the square of the smallest denormal float32."""
    num_non_finite: int = 0
    """The number of infinities and NaNs, which are never summed."""

    def __add__(self, other: SquareSum) -> SquareSum:
        return SquareSum(self.total + other.total, self.num_non_finite + other.num_non_finite)

    def norm(self) -> float:
        """Returns the square root of the exact sum, correctly rounded to fp64; nan if any value was not finite."""
        return math.nan if self.num_non_finite else math.ldexp(_rounded_sqrt(self.total), -149)


def _rounded_sqrt(value: int) -> float:
    """Returns the square root of an integer, correctly rounded: at least 64 bits of root and one sticky bit, then one
    rounding."""
    shift = max(0, 128 - value.bit_length())
    shift += shift & 1
    scaled = value << shift
    root = math.isqrt(scaled)
    sticky = root * root != scaled
    return math.ldexp(float(root << 1 | sticky), -1 - shift // 2)


NUM_WORDS = 19
"""Number of integers of a sum of squares on a device: 18 sums of 32-bit digits, least significant first, and the number
of non-finite values."""


def square_sum_of_words(words: Sequence[int]) -> SquareSum:
    """Converts the result of a device's kernel: `NUM_WORDS` integers below 2^63."""
    *digits, num_non_finite = words
    return SquareSum(sum(digit << (32 * index) for index, digit in enumerate(digits)), num_non_finite)


def square_sum(values: Tensor) -> SquareSum:
    """Returns the SquareSum of float32, bfloat16 or float16 values: a square is the integer mantissa^2 times a power of
    four."""
    total = num_non_finite = 0
    for part in torch.split(values.reshape(-1), _CHUNK_ELEMENTS):
        bits = part.float().view(torch.int32)
        biased = (bits >> 23) & 0xFF
        finite = biased < 255
        num_non_finite += part.numel() - int(finite.sum())
        mantissa = torch.where(biased > 0, (bits & 0x7FFFFF) | 0x800000, bits & 0x7FFFFF).long()
        squares = torch.where(finite, mantissa * mantissa, 0)
        exponent = torch.where(finite, biased.clamp(min=1) - 1, 0).long()
        # Squares have 48 bits, and int64 is exact for 2^15 of them; so a part is summed as high and low halves.
        for half, shift in ((squares & 0xFFFFFF, 0), (squares >> 24, 24)):
            sums = torch.zeros(_NUM_EXPONENTS, dtype=torch.int64).index_add_(0, exponent, half).tolist()
            total += sum(of_exponent << (2 * i + shift) for i, of_exponent in enumerate(sums))
    return SquareSum(total, num_non_finite)
