"""Native sum of squares = the reference's, whatever the instruction set, order, cut, threads and type."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spillway_trainer.kernels import native, reference
from spillway_trainer.kernels.reference import SquareSum

torch.set_num_threads(1)


@pytest.fixture(params=list(native.ISA_CODES))
def isa(request: pytest.FixtureRequest) -> str:
    if request.param not in native.instruction_sets():
        pytest.skip(f"{request.param}: missing on this processor, or no native library")
    return str(request.param)


def any_values(n: int, seed: int = 0) -> Tensor:
    """Every bit pattern is as likely as any other: all exponents, denormals, infinities, NaNs."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(-(2**31), 2**31, (n,), generator=generator, dtype=torch.int64).to(torch.int32).view(torch.float32)
    )


def gradients(n: int, seed: int = 0) -> Tensor:
    """As backward leaves them: scales differ from row to row, some rows are zero, a few values are far away."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, generator=generator)
    scales = 10.0 ** (-8 * torch.rand(n // 1000 + 1, generator=generator))
    scales[::7] = 0.0
    values *= scales.repeat_interleave(1000)[:n]
    values[:: n // 50 + 1] *= 1e-30
    return values


@pytest.mark.parametrize("n", [0, 1, 3, 1023, 1024, 1025, 262144, 1_000_003])
def test_any_values_have_the_sum_of_the_reference(isa: str, n: int) -> None:
    values = any_values(n, seed=n)
    assert native.square_sum(values, instruction_set=isa) == reference.square_sum(values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_have_the_sum_of_the_reference(isa: str, dtype: torch.dtype) -> None:
    values = gradients(3_000_001).to(dtype)
    assert native.square_sum(values, instruction_set=isa, num_threads=2) == reference.square_sum(values)


@pytest.mark.parametrize("n", [1, 511, 1025, 100_003])
def test_float16_has_the_sum_of_the_same_values_in_float32(isa: str, n: int) -> None:
    values = torch.randint(-(2**15), 2**15, (n,), generator=torch.Generator().manual_seed(n)).to(torch.int16)
    halves = values.view(torch.float16)
    found = native.square_sum(halves, instruction_set=isa)
    assert found == native.square_sum(halves.float(), instruction_set=isa) == reference.square_sum(halves)


@pytest.mark.parametrize("n", [1, 511, 1_000_003])
def test_bfloat16_has_the_sum_of_the_same_values_in_float32(isa: str, n: int) -> None:
    values = any_values(n, seed=n).bfloat16()
    found = native.square_sum(values, instruction_set=isa)
    assert found == native.square_sum(values.float(), instruction_set=isa) == reference.square_sum(values)


def test_a_permutation_changes_nothing(isa: str) -> None:
    values = gradients(300_000)
    shuffled = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(1))]
    assert native.square_sum(shuffled, instruction_set=isa) == native.square_sum(values, instruction_set=isa)


@pytest.mark.parametrize("chunk", [1000, 65_536, 262_145])
def test_a_cut_changes_nothing(isa: str, chunk: int) -> None:
    values = gradients(600_001)
    parts = (native.square_sum(part, instruction_set=isa) for part in torch.split(values, chunk))
    assert sum(parts, SquareSum()) == native.square_sum(values, instruction_set=isa)


@pytest.mark.parametrize("num_threads", [2, 3, 8])
def test_the_number_of_threads_changes_nothing(isa: str, num_threads: int) -> None:
    values = gradients(5_000_000)
    found = native.square_sum(values, num_threads=num_threads, instruction_set=isa)
    assert found == native.square_sum(values, instruction_set=isa)


@pytest.mark.parametrize("n", [1023, 1024, 1 << 18, 1 << 21])
def test_the_largest_mantissas_add_up_exactly(isa: str, n: int) -> None:
    largest = torch.full((n,), 2.0 - 2.0**-23)
    assert native.square_sum(largest, instruction_set=isa).total == n * (2**24 - 1) ** 2 << (2 * 126)


def test_infinities_add_nothing(isa: str) -> None:
    values = torch.full((100_000,), torch.inf)
    assert native.square_sum(values, instruction_set=isa) == SquareSum(num_non_finite=100_000)


def test_flush_to_zero_of_the_caller_changes_nothing(isa: str) -> None:
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 1e-39
    torch.set_flush_denormal(True)
    try:
        found = native.square_sum(values, instruction_set=isa, num_threads=2)
    finally:
        torch.set_flush_denormal(False)
    assert found == reference.square_sum(values)
