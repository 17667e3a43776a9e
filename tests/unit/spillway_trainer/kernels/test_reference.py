"""The reference functions against arithmetic that does not use torch: numpy float32, integers, decimal."""

from __future__ import annotations

import decimal
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.depth import examples
from spillway_trainer.kernels import reference
from spillway_trainer.kernels.reference import SquareSum, UpdateScalars

torch.set_num_threads(1)


def finite_values(n: int, seed: int) -> torch.Tensor:
    """Any finite float32: every exponent, denormals, both signs."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 0x7F800000, (n,), generator=generator, dtype=torch.int64)
    sign = torch.randint(0, 2, (n,), generator=generator, dtype=torch.int64) << 31
    return (bits | sign).to(torch.int32).view(torch.float32)


def test_adamw_is_the_declared_formula_with_each_operation_rounded_once() -> None:
    n = 20_000
    p, m, g = (finite_values(n, seed) for seed in (1, 2, 3))
    v = finite_values(n, 4).abs()
    s = UpdateScalars(3e-4, 0.9, 0.95, 1e-8, 0.1, 0.9**3, 0.95**3, gradient_scale=0.37)
    f = np.float32
    with np.errstate(all="ignore"):
        scaled = g.numpy() * f(0.37)
        m_wanted = m.numpy() * f(0.9) + f(1 - 0.9) * scaled
        v_wanted = v.numpy() * f(0.95) + f(1 - 0.95) * (scaled * scaled)
        root = np.sqrt(v_wanted) / f(math.sqrt(1 - 0.95**3)) + f(1e-8)
        p_wanted = p.numpy() * f(1 - 3e-4 * 0.1) - f(3e-4 / (1 - 0.9**3)) * (m_wanted / root)
    reference.update(s, p, (m, v), g, None)
    for found, wanted in ((p, p_wanted), (m, m_wanted), (v, v_wanted)):
        number = ~np.isnan(wanted)
        assert wanted.dtype == np.float32
        assert np.array_equal(found.numpy().view(np.int32)[number], wanted.view(np.int32)[number])


def test_adamw_stores_one_quiet_nan() -> None:
    p, m, v = torch.ones(4), torch.zeros(4), torch.zeros(4)
    strange = torch.tensor([0x7F800001, -1, 0x7FFFFFFF, -0x400000], dtype=torch.int32).view(torch.float32)
    out = torch.zeros(4, dtype=torch.bfloat16)
    reference.update(UpdateScalars(1e-3, 0.9, 0.95, 1e-8, 0.0, 0.9, 0.95), p, (m, v), strange, out)
    assert [t.view(torch.int32).tolist() for t in (p, m, v)] == [[0x7FC00000] * 4] * 3
    assert out.view(torch.int16).tolist() == [0x7FC0] * 4


@given(st.floats(width=32, allow_nan=False))
def test_bfloat16_rounds_to_nearest_even(value: float) -> None:
    found = reference.bfloat16(torch.tensor([value]))
    assert found.view(torch.int16).item() == torch.tensor([value]).bfloat16().view(torch.int16).item()


def test_first_accumulation_is_a_plain_upcast() -> None:
    accumulator = torch.full((3,), torch.nan)
    reference.accumulate(accumulator, torch.tensor([1.5, -0.0, 3e38], dtype=torch.bfloat16), True)
    assert torch.equal(accumulator, torch.tensor([1.5, -0.0, 3e38], dtype=torch.bfloat16).float())


def exact_sum_of_squares(values: torch.Tensor) -> Fraction:
    return sum((Fraction(value) ** 2 for value in values.tolist()), Fraction(0))


@pytest.mark.parametrize("seed", range(5))
def test_norm_is_the_correctly_rounded_root_of_the_exact_sum(seed: int) -> None:
    values = finite_values(400, seed)
    total = exact_sum_of_squares(values)
    with decimal.localcontext(prec=400, Emax=10**6, Emin=-(10**6)):
        root = (decimal.Decimal(total.numerator) / decimal.Decimal(total.denominator)).sqrt()
    assert reference.square_sum(values).norm() == float(root)


@given(st.integers(min_value=0, max_value=2**400))
@settings(max_examples=examples(300))
def test_root_of_an_integer_is_the_nearest_float(value: int) -> None:
    with decimal.localcontext(prec=200):
        root = float(decimal.Decimal(value).sqrt())
    assert reference._rounded_sqrt(value) == root


def test_root_just_beside_a_tie_rounds_to_its_own_side() -> None:
    tie = (2**53 + 1) << 64  # halfway between two floats
    assert reference._rounded_sqrt(tie * tie) == float(2**53) * 2.0**64
    assert reference._rounded_sqrt(tie * tie + 1) == float(2**53 + 2) * 2.0**64


def test_sum_of_squares_is_exact_from_smallest_to_largest_float32() -> None:
    values = torch.tensor([1.0, -1.0, 1.5, 2.0, 1e-45, -1e-45, 0.0, 3.4028234663852886e38])
    units = [2**298, 2**298, 9 * 2**296, 2**300, 1, 1, 0, (2**24 - 1) ** 2 << (2 * 253)]
    assert reference.square_sum(values) == SquareSum(sum(units))


def test_sums_of_the_parts_add_up_to_that_of_the_whole() -> None:
    values = finite_values(10_000, 5)
    parts = [reference.square_sum(part) for part in torch.split(values, 999)]
    assert sum(parts, SquareSum()) == reference.square_sum(values)


def test_non_finite_values_are_counted_and_make_the_norm_nan() -> None:
    found = reference.square_sum(torch.tensor([1.0, torch.inf, -torch.inf, torch.nan]))
    assert found.num_non_finite == 3
    assert math.isnan(found.norm())


def test_norm_of_nothing_is_zero() -> None:
    assert SquareSum().norm() == 0.0
