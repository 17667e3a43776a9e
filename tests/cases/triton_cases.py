"""Checks that the Triton kernels have the same bits as reference.py for all values, sizes and alignments.

On a GPU, the tests of tests/gpu call these checks. As a program under TRITON_INTERPRET=1, this module runs all of them
in Triton's interpreter, on the CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from harness.depth import sweep
from spillway.update_rules import UpdateRule
from spillway_trainer.kernels import dispatch as kernels
from spillway_trainer.kernels import master_halves, reference, triton_kernels
from spillway_trainer.kernels.reference import UpdateScalars

SIZES = [1, 3, triton_kernels.BLOCK - 1, triton_kernels.BLOCK, triton_kernels.BLOCK + 1, 20_003]
GRADIENT_TYPES = [torch.float32, torch.bfloat16, torch.float16]
OUT_TYPES = [torch.float32, torch.bfloat16, torch.float16, None]
MOMENT_TYPES = [torch.float32, torch.bfloat16, torch.uint8]


def scalars(step: int, weight_decay: float = 0.1, rule: UpdateRule = UpdateRule.ADAMW) -> UpdateScalars:
    powers = {"beta1_power": 0.9**step, "beta2_power": 0.95**step} if rule.corrects_bias else {}
    return UpdateScalars(3e-4, 0.9, 0.95, 1e-8, weight_decay, gradient_scale=0.37, momentum=0.8, rule=rule, **powers)


def any_values(n: int, seed: int) -> Tensor:
    """Values of which every bit pattern is equally likely: all exponents, denormals, infinities, NaNs with every
    payload."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (n,), generator=generator, dtype=torch.int64)
    return bits.to(torch.int32).view(torch.float32)


def trained_values(n: int, seed: int) -> Tensor:
    """Values as training leaves them, among them denormals, exact ties of bfloat16, zeros of both signs and a NaN."""
    values = torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 0.02
    values[1::7] *= 1e-38
    ties = values[2::7].view(torch.int32)
    values[2::7] = (ties & -0x10000 | 0x8000).view(torch.float32)
    values[3::7] = 0.0
    values[4::70] = -0.0
    values[-1] = torch.nan
    return values


def moments_of(rule: UpdateRule, n: int, kind: torch.dtype, values: Callable[[int, int], Tensor]) -> list[Tensor]:
    made = [values(n, seed) for seed, _ in enumerate(rule.moments, start=2)]
    return [reference.narrowed(one, kind, name) for name, one in zip(rule.moments, made, strict=True)]


def bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])


def at_offset(tensor: Tensor, offset: int, device: str) -> Tensor:
    """A copy on `device` that begins `offset` elements into its memory; with offset 1, it is aligned only to an
    element."""
    memory = torch.empty(tensor.numel() + offset, dtype=tensor.dtype, device=device)
    memory[offset:] = tensor.to(device)
    return memory[offset:]


def check_update(
    device: str,
    rule: UpdateRule,
    n: int,
    gradient_type: torch.dtype,
    out_type: torch.dtype | None,
    offset: int,
    num_steps: int,
    moment_type: torch.dtype = torch.float32,
) -> None:
    """Makes `num_steps` steps from values of both kinds; checks every bit of every state and of the last `out`."""
    for values in (any_values, trained_values):
        wanted = [values(n, 1), *moments_of(rule, n, moment_type, values)]
        found = [at_offset(state, offset, device) for state in wanted]
        out = None if out_type is None else torch.zeros(n, dtype=out_type)
        found_out = None if out is None else at_offset(out, offset, device)
        for step in range(1, num_steps + 1):
            gradient = values(n, 10 + step).to(gradient_type)
            step_scalars, on_device = scalars(step, rule=rule), at_offset(gradient, offset, device)
            triton_kernels.update(step_scalars, found[0], found[1:], on_device, found_out)
            reference.update(step_scalars, wanted[0], wanted[1:], gradient, out)
        how = (rule, n, gradient_type, out_type, moment_type, values.__name__)
        for name, ours, reference_one in zip(rule.state_kinds, found, wanted, strict=True):
            assert torch.equal(bits(ours), bits(reference_one)), (name, *how)
        if out is not None and found_out is not None:
            assert torch.equal(bits(found_out), bits(out)), ("out", *how)


def check_update_split(device: str, rule: UpdateRule, n: int, offset: int, moment_type: torch.dtype) -> None:
    """Compares two steps with split masters to two steps with whole ones: moments, weights, and the joined masters."""
    for values in (any_values, trained_values):
        wanted = [reference.quiet(values(n, 1)), *moments_of(rule, n, moment_type, values)]
        weights = reference.bfloat16(wanted[0])
        rest = torch.empty(master_halves.rest_bytes(n), dtype=torch.uint8)
        master_halves.split(wanted[0], weights, rest)
        moments = [at_offset(state, offset, device) for state in wanted[1:]]
        found_weights, found_rest = at_offset(weights, offset, device), rest.to(device)
        for step in range(1, 3):
            gradient, step_scalars = values(n, 10 + step), scalars(step, rule=rule)
            on_device = at_offset(gradient, offset, device)
            triton_kernels.update_split(step_scalars, found_rest, moments, on_device, found_weights)
            reference.update(step_scalars, wanted[0], wanted[1:], gradient, weights)
        joined = master_halves.join(found_weights.cpu(), found_rest.cpu())
        pairs = zip([joined, *moments, found_weights], [*wanted, weights], strict=True)
        assert all(torch.equal(bits(ours), bits(theirs)) for ours, theirs in pairs), (rule, n, moment_type)


def check_accumulate(device: str, n: int, gradient_type: torch.dtype, offset: int) -> None:
    """Accumulates a first gradient and two more, and checks every bit of the sum."""
    for values in (any_values, trained_values):
        found, wanted = at_offset(torch.full((n,), torch.nan), offset, device), torch.empty(n)
        for step in range(3):
            gradient = values(n, 20 + step).to(gradient_type)
            triton_kernels.accumulate(found, at_offset(gradient, offset, device), step == 0)
            reference.accumulate(wanted, gradient, step == 0)
        assert torch.equal(bits(found), bits(wanted)), (n, gradient_type, values.__name__)


def check_square_sum(device: str, n: int, dtype: torch.dtype, offset: int) -> None:
    """Checks that sums of squares are exact, and that infinities and NaNs are counted; also for values of a single
    exponent, whose digits all add up in one word."""
    alike = torch.full((n,), 1.9999999)
    for values in (any_values(n, 30), trained_values(n, 31), alike, alike * 2.0**127, alike * 2.0**-130, alike * 0):
        found = kernels.finish_square_sums([triton_kernels.square_sum(at_offset(values.to(dtype), offset, device))])
        wanted = reference.square_sum(values.to(dtype))
        assert found == wanted, (n, dtype, found, wanted)


def check_square_sum_in_parts(device: str) -> None:
    """Checks a sum of more values than one row of words can hold."""
    values, longest = trained_values(10_000, 32), triton_kernels.LONGEST_SUM
    triton_kernels.LONGEST_SUM = 4096
    try:
        words = triton_kernels.square_sum(values.to(device))
    finally:
        triton_kernels.LONGEST_SUM = longest
    assert words.shape[0] == 3
    assert kernels.finish_square_sums([words]) == reference.square_sum(values)


def around_ties(dtype: torch.dtype) -> Tensor:
    """float32 values: every value of `dtype` and, between neighbours, values just below, at and just above the half."""
    if dtype == torch.bfloat16:
        upper = torch.arange(-32768, 32768, dtype=torch.int32) << 16
        return torch.cat([upper | lower for lower in (0, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view(torch.float32)
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.float16)
    finite = every[every.isfinite()].double()
    spacing = torch.maximum(2.0 ** (torch.frexp(finite)[1] - 11), torch.tensor(2.0**-24))
    between = torch.cat([finite + spacing * part for part in (0.0, 0.49999, 0.5, 0.50001, -0.5, -0.25)]).float()
    strange = torch.tensor([torch.inf, -torch.inf, torch.nan, 65519.996, 65520.0, -65520.0, 65536.0, 3e38, -1e-45])
    return torch.cat([between, strange])


def check_rounding(device: str) -> None:
    """Checks every rounding in `out` of a step that does not change the master, because decay and gradient are zero."""
    for dtype in (torch.bfloat16, torch.float16):
        values = around_ties(dtype)
        zeros = torch.zeros_like(values)
        out = torch.empty_like(values, dtype=dtype, device=device)
        states = [tensor.clone().to(device) for tensor in (values, zeros, zeros)]
        triton_kernels.update(scalars(1, weight_decay=0.0), states[0], states[1:], zeros.to(device), out)
        assert torch.equal(bits(out), bits(reference.rounded(values, dtype))), dtype


def check_everything(device: str) -> None:
    updates = sweep(UpdateRule, SIZES, GRADIENT_TYPES, OUT_TYPES, MOMENT_TYPES)
    for rule, n, gradient_type, out_type, moment_type in updates:
        check_update(device, rule, n, gradient_type, out_type, n % 2, 2, moment_type)
    for rule, n, moment_type in sweep(UpdateRule, SIZES, MOMENT_TYPES):
        check_update_split(device, rule, n, n % 2, moment_type)
    for n, gradient_type in itertools.product(SIZES, GRADIENT_TYPES):
        check_accumulate(device, n, gradient_type, offset=n % 2)
        check_square_sum(device, n, gradient_type, offset=n % 2)
    assert not triton_kernels.square_sum(torch.empty(0, device=device)).any()
    check_square_sum_in_parts(device)
    check_rounding(device)


if __name__ == "__main__":
    check_everything("cpu")
    print("the bits of the reference")
