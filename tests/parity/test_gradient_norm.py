"""Native bins = reference bins, whatever the order, the cut, the number of threads and the type."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spillway_trainer import native, reference
from spillway_trainer.reference import Bins

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(not native.instruction_sets(), reason="no native library: nothing to compare with")


def any_values(n: int, seed: int = 0) -> Tensor:
    """Every bit pattern is as likely as any other: all exponents, denormals, infinities, NaNs."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(-(2**31), 2**31, (n,), generator=generator, dtype=torch.int64).to(torch.int32).view(torch.float32)
    )


@pytest.mark.parametrize("n", [0, 1, 3, 511, 512, 513, 262144, 1_000_003])
def test_native_bins_are_those_of_the_reference(n: int) -> None:
    values = any_values(n, seed=n)
    assert native.gradient_bins(values) == reference.gradient_bins(values)


@pytest.mark.parametrize("n", [1, 511, 1_000_003])
def test_bfloat16_bins_are_those_of_the_same_values_in_float32(n: int) -> None:
    values = any_values(n, seed=n).bfloat16()
    assert native.gradient_bins(values) == native.gradient_bins(values.float()) == reference.gradient_bins(values)


def test_a_permutation_changes_no_bin() -> None:
    values = any_values(300_000)
    shuffled = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(1))]
    assert native.gradient_bins(shuffled) == native.gradient_bins(values)


@pytest.mark.parametrize("chunk", [1000, 65_536, 262_145])
def test_a_cut_changes_no_bin(chunk: int) -> None:
    values = any_values(600_001)
    parts = (native.gradient_bins(part) for part in torch.split(values, chunk))
    assert sum(parts, Bins()) == native.gradient_bins(values)


@pytest.mark.parametrize("num_threads", [2, 3, 8])
def test_the_number_of_threads_changes_no_bin(num_threads: int) -> None:
    values = any_values(5_000_000)
    assert native.gradient_bins(values, num_threads=num_threads) == native.gradient_bins(values)


@pytest.mark.parametrize("n", [(1 << 18) - 3, (1 << 18) - 2, (1 << 18) - 1, 1 << 18, 1 << 21])
def test_sums_beyond_64_bits_stay_exact(n: int) -> None:
    """Of the largest mantissa a 64-bit sum holds 2^16, and a block is emptied after 4 x 2^16."""
    largest = torch.full((n,), 2.0 - 2.0**-23)
    assert native.gradient_bins(largest).sums[126] == n * (2**24 - 1) ** 2


def test_a_block_of_infinities_adds_nothing_to_finite_bins() -> None:
    values = torch.full((100_000,), torch.inf)
    assert native.gradient_bins(values) == Bins(num_non_finite=100_000)
