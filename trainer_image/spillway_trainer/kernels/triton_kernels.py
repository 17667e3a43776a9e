"""Triton kernels of reference.py's updates and sums: the same order of operations, so the same bits.

Deviations of a GPU's compiler are switched off, and tests/contract/test_ptx.py checks the generated code: no fused
multiply-add (OPTIONS), no approximate division or root (`div_rn`, `sqrt_rn`), no flush of denormals. bfloat16 is
converted by integer operations in both directions, because the architectures' own conversions differ for NaNs. float16
is converted by the device, which keeps its denormals, rounds to nearest even and makes values beyond its range an
infinity; its NaNs become the declared one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from spillway.update_rules import BLOCK_VALUES, MASTER, UNSIGNED_MOMENTS, UpdateRule

from .master_halves import halves, rest_bytes
from .reference import MAPS, NUM_WORDS, UpdateScalars, float32, kept_elements

OPTIONS = {"enable_fp_fusion": False, "num_warps": 4}
"""Options of every launch."""
BLOCK = 1024
"""Values per program: eight per thread, which is two 16-byte accesses of each float32 array."""
TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types of gradients and of updated parameters."""
QUANTIZED = tl.constexpr(BLOCK_VALUES)
"""Values of a block of a quantized moment, which follow the 4 bytes of its scale."""
LONGEST_SUM = 2**28
"""The most values per row of sums: each adds less than 2^34 to a word of 63 bits."""
DRIVER = Path(__file__).with_name(f"triton-{triton.__version__}.so")
"""Triton's own library, which Triton compiles when a device is first used. The image has no compiler, so it contains
the library."""
if DRIVER.exists():
    triton.knobs.build.impl = lambda *_: str(DRIVER)
    triton.knobs.nvidia.libcuda_path = str(DRIVER.parent)  # otherwise it asks ldconfig for the library to link


@triton.jit
def _quiet(value):
    """Replaces every NaN by 0x7FC00000."""
    bits = value.to(tl.uint32, bitcast=True)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _load(pointer, at, mask):
    """Loads float32 values; bfloat16 arrays are passed as uint16 and are the upper halves of float32 values."""
    value = tl.load(pointer + at, mask=mask, other=0)
    if pointer.dtype.element_ty == tl.uint16:
        value = (value.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    if pointer.dtype.element_ty == tl.float16:
        value = _quiet(value.to(tl.float32))
    return value


@triton.jit
def _store(pointer, at, value, mask):
    """Stores a value whose NaNs are quiet; to bfloat16 and float16 by round-to-nearest-even."""
    if pointer.dtype.element_ty == tl.uint16:
        bits = value.to(tl.uint32, bitcast=True)
        value = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)
    if pointer.dtype.element_ty == tl.float16:
        is_nan = (value.to(tl.uint32, bitcast=True) & 0x7FFFFFFF) > 0x7F800000
        half = value.to(tl.float16).to(tl.uint16, bitcast=True)
        value = tl.where(is_nan, 0x7E00, half).to(tl.uint16).to(tl.float16, bitcast=True)
    tl.store(pointer + at, value, mask=mask)


@triton.jit
def _load_moment(pointer, maps, at, mask):
    """Loads float32 values of a moment; for uint8, as reference.dequantized, with `maps` from _maps."""
    if pointer.dtype.element_ty == tl.uint8:
        block = pointer + (at // QUANTIZED) * (QUANTIZED + 4)
        scale = tl.load(block, mask=mask, other=0).to(tl.uint32)
        for index in tl.static_range(1, 4):
            scale |= tl.load(block + index, mask=mask, other=0).to(tl.uint32) << (8 * index)
        code = tl.load(block + 4 + at % QUANTIZED, mask=mask, other=0).to(tl.int32)
        value = _quiet(tl.load(maps + code) * scale.to(tl.float32, bitcast=True))
    else:
        value = _load(pointer, at, mask)
    return value


@triton.jit
def _store_moment(pointer, maps, at, value, mask, n, BLOCK: tl.constexpr):
    """Stores a moment; for uint8, as reference.quantized."""
    if pointer.dtype.element_ty == tl.uint8:
        magnitude = tl.where(mask, value.to(tl.uint32, bitcast=True) & 0x7FFFFFFF, 0).to(tl.int32)
        most = tl.max(tl.reshape(magnitude, (BLOCK // QUANTIZED, QUANTIZED)), axis=1)
        wide = tl.reshape(tl.broadcast_to(most[:, None], (BLOCK // QUANTIZED, QUANTIZED)), (BLOCK,))
        is_finite = wide < 0x7F800000
        divisor = tl.where(is_finite & (wide > 0), wide, 0x3F800000)  # 1 if the scale is 0 or not finite
        fraction = tl.div_rn(value, divisor.to(tl.float32, bitcast=True))
        position = tl.zeros((BLOCK,), tl.int32)  # the number of borders below the fraction
        for index in tl.static_range(8):
            border = tl.load(maps + 256 + position + (127 >> index))
            position += tl.where(border < fraction, 128 >> index, 0)
        code = tl.where(is_finite, position - tl.load(maps + 511).to(tl.int32), 0) & 0xFF
        tl.store(pointer + (at // QUANTIZED) * (QUANTIZED + 4) + 4 + at % QUANTIZED, code.to(tl.uint8), mask=mask)
        block = tl.program_id(0).to(tl.int64) * (BLOCK // QUANTIZED) + tl.arange(0, BLOCK // QUANTIZED)
        scale = tl.where(most < 0x7F800000, most, 0x7FC00000)
        for index in tl.static_range(4):
            octet = ((scale >> (8 * index)) & 0xFF).to(tl.uint8)
            tl.store(pointer + block * (QUANTIZED + 4) + index, octet, mask=block * QUANTIZED < n)
    else:
        _store(pointer, at, value, mask)


@triton.jit
def _join(weights, lower, carries, at, mask):
    """Joins masters from their bfloat16 weights and the bits that these lack: master_halves.join."""
    weight = tl.load(weights + at, mask=mask, other=0).to(tl.uint32)
    octet = tl.load(carries + (at >> 3), mask=mask, other=0).to(tl.uint32)
    carry = (octet >> (at & 7).to(tl.uint32)) & 1
    low = tl.load(lower + at, mask=mask, other=0).to(tl.uint32)
    return (((weight - carry) << 16) | low).to(tl.float32, bitcast=True)


@triton.jit
def _split(lower, carries, at, value, mask, n, BLOCK: tl.constexpr):
    """Stores the bits of a value that its bfloat16 weight lacks, eight carries per byte: master_halves.split. NaNs must
    be quiet."""
    bits = value.to(tl.uint32, bitcast=True)
    tl.store(lower + at, (bits & 0xFFFF).to(tl.uint16), mask=mask)
    carry = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) - (bits >> 16)
    carry = tl.where(mask, carry, 0) << (at & 7).to(tl.uint32)
    octets = tl.sum(tl.reshape(carry, (BLOCK // 8, 8)), axis=1).to(tl.uint8)
    at_octet = tl.program_id(0).to(tl.int64) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    tl.store(carries + at_octet, octets, mask=at_octet * 8 < n)


@triton.jit
def _sign(value):
    """Returns 1 above 0 and -1 below; a zero or a NaN is returned as it is."""
    return tl.where(value > 0, 1.0, tl.where(value < 0, -1.0, value))


@triton.jit
def update_kernel(  # noqa: PLR0913, PLR0917
    master,
    moment1,
    moment2,
    gradient,
    out,
    carries,
    maps,
    n,
    gradient_scale,
    decay,
    weight_decay,
    momentum,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    sqrt_bias_correction2,
    eps,
    step_size,
    RULE: tl.constexpr,
    HAS_OUT: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One update in place, as csrc/include/spillway.h defines it at spillway_rule, line by line. If IS_SPLIT, `master`
    holds the lower halves of masters whose weights are in `out`. `maps` is used for uint8 moments only."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    g = gradient_scale * _load(gradient, at, mask)
    p = _join(out, master, carries, at, mask) if IS_SPLIT else _load(master, at, mask)
    m = _load_moment(moment1, maps, at, mask)
    if RULE == "SgdMomentum":
        g = g + weight_decay * p
        m = _quiet(momentum * m + g)
        p = _quiet(p - step_size * m)
    elif RULE == "Lion":
        step = step_size * _sign(beta1 * m + one_minus_beta1 * g)
        p = _quiet(decay * p - step)
        m = _quiet(beta2 * m + one_minus_beta2 * g)
    else:
        if RULE == "Adam":
            g = g + weight_decay * p
        else:
            p = decay * p
        m = _quiet(beta1 * m + one_minus_beta1 * g)
        v = _quiet(beta2 * _load_moment(moment2, maps + 512, at, mask) + one_minus_beta2 * (g * g))
        denominator = tl.div_rn(tl.sqrt_rn(v), sqrt_bias_correction2) + eps
        p = _quiet(p - step_size * tl.div_rn(m, denominator))
        _store_moment(moment2, maps + 512, at, v, mask, n, BLOCK)
    _store_moment(moment1, maps, at, m, mask, n, BLOCK)
    if IS_SPLIT:
        _split(master, carries, at, p, mask, n, BLOCK)
    else:
        _store(master, at, p, mask)
    if HAS_OUT:
        _store(out, at, p, mask)


@triton.jit
def accumulate_kernel(accumulator, gradient, n, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """accumulator = gradient if FIRST, else accumulator + gradient."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    g = _load(gradient, at, mask)
    if not FIRST:
        g = _quiet(_load(accumulator, at, mask) + g)
    _store(accumulator, at, g, mask)


@triton.jit
def square_sum_kernel(values, words, n, BLOCK: tl.constexpr):
    """Adds the digits of the exact squares of finite values to `words`; the last word counts the other values. All
    arithmetic is on integers."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    bits = _load(values, at, mask).to(tl.uint32, bitcast=True).to(tl.int64)
    biased = (bits >> 23) & 0xFF
    fraction = bits & 0x7FFFFF
    mantissa = tl.where(biased > 0, fraction | 0x800000, fraction)
    mantissa = tl.where(mask & (biased < 255), mantissa, 0)
    shift = 2 * (tl.maximum(tl.minimum(biased, 254), 1) - 1)  # exponent of the square, below 508
    digit = shift >> 5
    square = mantissa * mantissa  # below 2^48
    lower = (square & 0xFFFFFFFF) << (shift & 31)
    upper = (square >> 32) << (shift & 31)
    first = lower & 0xFFFFFFFF
    second = (lower >> 32) + (upper & 0xFFFFFFFF)
    third = upper >> 32
    is_there = mantissa > 0
    lowest = tl.min(tl.where(is_there, digit, 18))
    highest = tl.max(tl.where(is_there, digit, -3)) + 2
    for index in range(lowest, highest + 1):
        part = tl.where(digit == index, first, 0)
        part += tl.where(digit + 1 == index, second, 0)
        part += tl.where(digit + 2 == index, third, 0)
        tl.atomic_add(words + index, tl.sum(part))
    num_others = tl.sum((mask & (biased == 255)).to(tl.int64))
    if num_others > 0:
        tl.atomic_add(words + 18, num_others)


def square_sum(values: Tensor) -> Tensor:
    """Returns rows of NUM_WORDS integers on the device of `values`, a flat tensor of one of TYPES, on its current
    stream. reference.square_sum_of_words reads them once they are complete. Integers are added, so the order does not
    matter."""
    _check("values", values, values.numel(), values.device, *TYPES)
    parts = torch.split(values, LONGEST_SUM)
    words = torch.zeros(len(parts), NUM_WORDS, dtype=torch.int64, device=values.device)
    for part, row in zip(parts, words, strict=True):
        if n := part.numel():
            square_sum_kernel[(triton.cdiv(n, BLOCK),)](_words(part), row, n, BLOCK=BLOCK, **OPTIONS)
    return words


def update(
    scalars: UpdateScalars, master: Tensor, moments: Sequence[Tensor], gradient: Tensor, out: Tensor | None
) -> None:
    """reference.update on the device of `master`, on its current stream; returns before it is done."""
    n = master.numel()
    _check(MASTER, master, n, master.device, torch.float32)
    if out is not None:
        _check("out", out, n, master.device, *TYPES)
    _launch(scalars, master, moments, gradient, out, None)


def update_split(
    scalars: UpdateScalars, rest: Tensor, moments: Sequence[Tensor], gradient: Tensor, weights: Tensor
) -> None:
    """master_halves.update on the device of `weights`, on its current stream; returns before it is done."""
    n = weights.numel()
    _check("weights", weights, n, weights.device, torch.bfloat16)
    _check("rest", rest, rest_bytes(n), weights.device, torch.uint8)
    lower, carries = halves(rest, n)
    _launch(scalars, lower.view(torch.uint16), moments, gradient, weights, carries)


def _launch(
    scalars: UpdateScalars,
    master: Tensor,
    moments: Sequence[Tensor],
    gradient: Tensor,
    out: Tensor | None,
    carries: Tensor | None,
) -> None:
    """Launches `update_kernel`. `carries`: those of masters whose lower halves are in `master`; None: `master` is
    whole."""
    n, moment_type = master.numel(), moments[0].dtype
    elements = kept_elements(n, moment_type)
    _check(scalars.rule.moments[0], moments[0], elements, master.device, torch.float32, torch.bfloat16, torch.uint8)
    for name, tensor in zip(scalars.rule.moments, moments, strict=True):
        _check(name, tensor, elements, master.device, moment_type)
    _check("gradient", gradient, n, master.device, *TYPES)
    if n == 0:
        return
    update_kernel[(triton.cdiv(n, BLOCK),)](
        master,
        _words(moments[0]),
        _words(moments[-1]),
        _words(gradient),
        master if out is None else _words(out),
        master if carries is None else carries,
        _maps(scalars.rule, master.device) if moment_type == torch.uint8 else master,
        n,
        float32(scalars.gradient_scale),
        scalars.decay,
        float32(scalars.weight_decay),
        float32(scalars.momentum),
        float32(scalars.beta1),
        scalars.one_minus_beta1,
        float32(scalars.beta2),
        scalars.one_minus_beta2,
        scalars.sqrt_bias_correction2,
        float32(scalars.eps),
        scalars.step_size,
        RULE=scalars.rule.value,
        HAS_OUT=out is not None,
        IS_SPLIT=carries is not None,
        BLOCK=BLOCK,
        **OPTIONS,
    )


@cache
def _maps(rule: UpdateRule, device: torch.device) -> Tensor:
    """Returns 512 numbers per moment: the values of the codes in order, 255 borders, and the position of 0."""
    by = [MAPS[kind in UNSIGNED_MOMENTS] for kind in rule.moments]
    parts = [part for one in by for part in (one.values.roll(-one.zero), one.borders, torch.tensor([float(one.zero)]))]
    found = torch.cat(parts).to(device)
    found[0].item()  # waits for the copy, so that every stream may use it from now on
    return found


def accumulate(accumulator: Tensor, gradient: Tensor, first: bool) -> None:
    """reference.accumulate on the device of `accumulator`, on its current stream; returns before it is done."""
    n = accumulator.numel()
    _check("accumulator", accumulator, n, accumulator.device, torch.float32)
    _check("gradient", gradient, n, accumulator.device, *TYPES)
    if n == 0:
        return
    accumulate_kernel[(triton.cdiv(n, BLOCK),)](accumulator, _words(gradient), n, FIRST=first, BLOCK=BLOCK, **OPTIONS)


def _words(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor


def _check(name: str, tensor: Tensor, num_elements: int, device: torch.device, *dtypes: torch.dtype) -> None:
    same_place = tensor.device == device and tensor.is_contiguous()
    if tensor.dtype not in dtypes or tensor.numel() != num_elements or not same_place:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} and stride {tensor.stride()} on {tensor.device}; "
            f"pass a contiguous {wanted} tensor of {num_elements} elements on {device}"
        )
