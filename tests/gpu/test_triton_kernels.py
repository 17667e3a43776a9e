"""On a GPU the Triton kernels have the bits of the reference and of the native kernels."""

from __future__ import annotations

import pytest
import torch

from cases import triton_cases
from cases.triton_cases import GRADIENT_TYPES, MOMENT_TYPES, OUT_TYPES, SIZES, any_values, bits, scalars, trained_values
from spillway.update_rules import UpdateRule
from spillway_trainer.kernels import dispatch as kernels
from spillway_trainer.kernels import triton_kernels

LARGE = 32 * 2**20 + 5


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("moment_type", MOMENT_TYPES)
@pytest.mark.parametrize("out_type", OUT_TYPES)
@pytest.mark.parametrize("gradient_type", GRADIENT_TYPES)
@pytest.mark.parametrize("rule", UpdateRule)
def test_ten_steps_have_the_bits_of_the_reference(
    device: str,
    rule: UpdateRule,
    gradient_type: torch.dtype,
    out_type: torch.dtype | None,
    moment_type: torch.dtype,
    offset: int,
) -> None:
    for n in (*SIZES, 1_000_003):
        triton_cases.check_update(device, rule, n, gradient_type, out_type, offset, 10, moment_type)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("moment_type", MOMENT_TYPES)
@pytest.mark.parametrize("rule", UpdateRule)
def test_masters_in_halves_have_the_bits_of_whole_ones(
    device: str, rule: UpdateRule, moment_type: torch.dtype, offset: int
) -> None:
    for n in (*SIZES, 1_000_003):
        triton_cases.check_update_split(device, rule, n, offset, moment_type)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("gradient_type", GRADIENT_TYPES)
def test_accumulated_gradients_have_the_bits_of_the_reference(
    device: str, gradient_type: torch.dtype, offset: int
) -> None:
    for n in (*SIZES, 1_000_003):
        triton_cases.check_accumulate(device, n, gradient_type, offset)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", GRADIENT_TYPES)
def test_sums_of_squares_are_exact(device: str, dtype: torch.dtype, offset: int) -> None:
    for n in (*SIZES, 1_000_003):
        triton_cases.check_square_sum(device, n, dtype, offset)


def test_every_bfloat16_and_float16_is_rounded_to_nearest_even(device: str) -> None:
    triton_cases.check_rounding(device)


@pytest.mark.parametrize("values", [any_values, trained_values])
def test_a_large_update_has_the_bits_of_the_kernel_that_the_cpu_runs(device: str, values: object) -> None:
    host = [values(LARGE, seed) for seed in (1, 2, 3)]
    on_device = [tensor.to(device) for tensor in host]
    gradient = values(LARGE, 4).bfloat16()
    out, out_on_device = torch.zeros(LARGE, dtype=torch.bfloat16), torch.zeros(LARGE, dtype=torch.bfloat16).to(device)
    kernels.update(scalars(1), host[0], host[1:], gradient, out, num_threads=8)
    triton_kernels.update(scalars(1), on_device[0], on_device[1:], gradient.to(device), out_on_device)
    for ours, theirs in zip((*on_device, out_on_device), (*host, out), strict=True):
        assert torch.equal(bits(ours), bits(theirs))


def test_indices_beyond_32_bits_are_reached(device: str) -> None:
    n = 2**31 + 4099
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("less than 16 GiB of the device are free")
    accumulator = torch.full((n,), 1.0, device=device)
    gradient = torch.full((n,), 0.5, dtype=torch.bfloat16, device=device)
    triton_kernels.accumulate(accumulator, gradient, False)
    assert bool((accumulator == 1.5).all())


def test_the_kernel_runs_on_the_current_stream(device: str) -> None:
    accumulator = torch.zeros(1_000_000, device=device)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        accumulator.fill_(1.0)
        triton_kernels.accumulate(accumulator, torch.ones_like(accumulator), False)
    stream.synchronize()
    assert bool((accumulator == 2.0).all())
