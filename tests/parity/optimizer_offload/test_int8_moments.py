"""Moments in 8 bits: the map that others use, the rules of its codes, and real training as good as with float32 ones.

That updates have the bits of the reference by every instruction set is test_update_rules.py; that placements, chunks,
overlap and resume change none of them is the matrix of each, which runs with every kind of moments.
"""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from cases.next_byte import NextByte, losses_of
from cases.optimizer_cases import HOST_BYTES, Case, drive, offload, oracle, outcome, resident, split
from fakes.lazy_lanes import LazyLanes
from spillway.errors import UserError
from spillway.update_rules import BLOCK_VALUES, UNSIGNED_MOMENTS, MomentType, UpdateRule
from spillway_trainer.kernels import dispatch as kernels
from spillway_trainer.kernels import native
from spillway_trainer.kernels.reference import MAPS, Map, UpdateScalars, dequantized, kept_elements, quantized, widened
from spillway_trainer.parallel.distributed import Peers
from spillway_trainer.parallel.shards import ShardedOptimizer
from spillway_trainer.ranks import World
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab

torch.set_num_threads(1)

SIGNED, UNSIGNED = MAPS
KINDS = {"signed": SIGNED, "unsigned": UNSIGNED}
SIZES = (0, 1, 2, 255, 256, 257, 1000)


def scale_of(kept: Tensor, block: int = 0) -> float:
    begin = block * MomentType.INT8.bytes_of(BLOCK_VALUES)
    return float(kept[begin : begin + 4].clone().view(torch.float32))


def published(*, signed: bool) -> list[float]:
    """bitsandbytes.functional.create_dynamic_map(signed), of which torchao.optim has a copy, step by step."""
    found: list[float] = []
    for i in range(7):
        items = 2**i + 1 if signed else 2 ** (i + 1) + 1
        boundaries = torch.linspace(0.1, 1, items, dtype=torch.float32)
        means = (boundaries[:-1] + boundaries[1:]) / 2.0
        found += ((10 ** (-6 + i)) * means).tolist()
        if signed:
            found += (-(10 ** (-6 + i)) * means).tolist()
    return sorted([*found, 0.0, 1.0])


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_those_that_bitsandbytes_and_torchao_use(kind: str) -> None:
    """To three units of float32, by which their steps in float32 are off."""
    ours, theirs = KINDS[kind].values, torch.tensor(published(signed=kind == "signed"))
    assert len(ours) == len(theirs) == 256
    assert bool(((ours - theirs).abs() <= 3 * 2.0**-24 * theirs.abs()).all())
    assert ours[-1] == 1.0
    assert ours[KINDS[kind].zero] == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_library_looks_up_is_the_code_of_the_reference(kind: str) -> None:
    """At every border, its neighbours on both sides, at zeros of both signs, the least numbers, and 100,000 others."""
    found = KINDS[kind]
    near = found.borders.view(torch.int32)
    generator = torch.Generator().manual_seed(1)
    some = 10.0 ** (-10.0 * torch.rand(100_000, generator=generator))
    least = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 2.0**-24, -(2.0**-24), 1.0, -1.0])
    numbers = torch.cat([(near + by).view(torch.float32) for by in (-1, 0, 1)] + [some, -some, least])
    numbers = numbers[numbers.abs() <= 1.0]
    bits = numbers.view(torch.int32).long() & 0xFFFFFFFF
    magnitude, minus = bits & 0x7FFFFFFF, bits >> 31
    t = torch.where(magnitude >= native.LEAST_BUCKET, magnitude - native.LEAST_BUCKET + 0x10000, magnitude.clamp(max=1))
    entries = native.nearest_codes(found)[(t >> 16) + minus * native.NUM_BUCKETS].long()
    codes = (entries + ((t & 0xFFFF) ^ (minus * 0xFFFF)) >> 16) & 0xFF
    assert torch.equal(codes, found.codes(numbers).long())


@pytest.mark.parametrize("rule", UpdateRule)
def test_what_an_update_is_given_keeps_the_tables_that_it_points_to(rule: UpdateRule) -> None:
    """Of two lanes that make their first update at once, one has tables that the cache forgets."""
    native._tables.cache_clear()
    native._maps_struct.cache_clear()
    given = native._maps_struct(rule)
    maps = [MAPS[kind in UNSIGNED_MOMENTS] for kind in rule.moments]
    tables = [weakref.ref(table) for one in maps for table in native._tables(one)]
    native._tables.cache_clear()
    native._maps_struct.cache_clear()
    assert all(table() is not None for table in tables)
    del given
    assert all(table() is None for table in tables)


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_gets_the_nearest_value_and_in_the_middle_the_lesser(kind: str) -> None:
    found, generator = KINDS[kind], torch.Generator().manual_seed(2)
    numbers = torch.rand(5_000, generator=generator) ** 4
    numbers = numbers[numbers > 1e-6]  # where it is decided what becomes 0: below
    numbers = torch.cat([numbers, -numbers]) if kind == "signed" else numbers
    distances = (numbers[:, None].double() - found.values.double()).abs()
    off = (numbers.double() - found.values[found.positions(found.codes(numbers))].double()).abs() - distances.amin(1)
    assert float(off.max()) <= 2.0**-25, "a border is rounded to float32"
    middle = (found.values[200] + found.values[201]) / 2
    assert found.positions(found.codes(middle[None])).item() == 200


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_a_block_has_a_scale_and_a_byte_a_value_and_zeros_are_bytes_of_0(kind: str, size: int) -> None:
    zeros = quantized(torch.zeros(size), KINDS[kind])
    assert zeros.numel() == size + 4 * -(-size // 256) == kept_elements(size, torch.uint8)
    assert not zeros.any()
    values = torch.rand(size, generator=torch.Generator().manual_seed(size))
    kept = quantized(values, KINDS[kind])
    wide = dequantized(kept, KINDS[kind])
    assert wide.shape == values.shape
    for block, part in enumerate(torch.split(values, BLOCK_VALUES) if size else ()):
        largest = float(part.max())
        assert scale_of(kept, block) == largest
        assert wide[block * BLOCK_VALUES + int(part.argmax())] == largest, "the largest is exact"
    assert torch.equal(dequantized(zeros, KINDS[kind]), torch.zeros(size))


def test_quantizing_block_aligned_chunks_equals_quantizing_the_whole() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(3)) * torch.logspace(-30, 30, 1000)
    whole = quantized(values, SIGNED)
    parts = [quantized(values[begin:end], SIGNED) for begin, end in ((0, 256), (256, 768), (768, 1000))]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_non_finite_value_turns_only_its_own_block_into_nan(bad: float) -> None:
    values = torch.ones(600)
    values[300] = bad
    kept = quantized(values, SIGNED)
    assert kept[260:264].tolist() == [0, 0, 0xC0, 0x7F], "the quiet NaN"
    assert not kept[264:520].any()
    assert dequantized(kept, SIGNED).isnan().nonzero().view(-1).tolist() == list(range(256, 512))


def test_a_second_moment_above_0_never_becomes_0() -> None:
    """A first moment that is none would be divided by eps alone."""
    values = torch.tensor([1.0, 1e-30, 0.0, 1e-7])
    wide = widened(quantized(values, UNSIGNED), "exp_avg_sq")
    assert wide.tolist() == [1.0, float(UNSIGNED.values[1]), 0.0, float(UNSIGNED.values[1])]
    assert widened(quantized(values, SIGNED), "exp_avg").tolist() == [1.0, 0.0, 0.0, 0.0]


def test_what_rounding_would_hold_is_what_is_rejected() -> None:
    """Of both maps some number below 1 shrinks at the bound, half of the finest step of the one with a sign; with a
    quarter of that loss none would. (The 1 is the scale, which is exact.)"""

    def stays(found: Map, kept: float) -> bool:
        numbers = found.values[(found.values > 0.5) & (found.values < 1.0)]
        codes = found.codes(numbers)
        return bool((found.codes(numbers * kept) == codes).all())

    most = MomentType.INT8.most_kept
    for found in KINDS.values():
        assert not stays(found, most)
        assert stays(found, 1.0 - (1.0 - most) / 4)


@pytest.mark.parametrize("chunk", [256, 512, 1 << 20])
@pytest.mark.parametrize("rule", UpdateRule)
def test_the_size_of_a_chunk_changes_no_bit(rule: UpdateRule, chunk: int) -> None:
    case = Case(torch.bfloat16, 2, 1.0, tied=True, rule=rule, moments=MomentType.INT8)
    host, ledger = HostSlab(HOST_BYTES), DeviceLedger(None)
    parameters = case.parameters()
    plan = split(0.4, 0.3, 0.3, chunk, num_threads=2, overlap="Forward")
    optimizer = offload(parameters, case, plan, LazyLanes(host, ledger), ledger)
    assert outcome(optimizer, parameters, drive(optimizer, case)).difference(oracle(case)) == []


def test_a_chunk_that_would_begin_inside_of_a_block_is_rejected() -> None:
    case, ledger = Case(torch.bfloat16, moments=MomentType.INT8), DeviceLedger(None)
    with pytest.raises(UserError, match=r"chunks of 1009 values.*must be multiples of 256"):
        offload(case.parameters(), case, split(1, 0, 0, 1009), LazyLanes(HostSlab(HOST_BYTES), ledger), ledger)


def test_what_divides_parameters_elsewhere_is_rejected() -> None:
    case = Case(torch.bfloat16, moments=MomentType.INT8)
    own = resident(case.parameters(), case)
    with pytest.raises(UserError, match=r"int8: .* share a scale.*use Ddp, or moments: bfloat16"):
        ShardedOptimizer(own, None, Peers(World()), {}, case.settings)  # type: ignore[arg-type]


def loss_of_1000_steps(rule: UpdateRule, moment_type: torch.dtype, rate: float) -> tuple[float, float]:
    """The first, and the mean of the last hundred, on real text."""
    torch.manual_seed(0)
    model = NextByte()
    sizes = [kept_elements(parameter.numel(), moment_type) for parameter in model.parameters()]
    moments = [[torch.zeros(size, dtype=moment_type) for _ in rule.moments] for size in sizes]
    powers, losses = [1.0, 1.0], []
    for loss in losses_of(model, 1000):
        losses.append(loss)
        powers = [powers[0] * 0.9, powers[1] * 0.95]
        named = dict(zip(("beta1_power", "beta2_power"), powers, strict=True)) if rule.corrects_bias else {}
        scalars = UpdateScalars(rate, 0.9, 0.95, 1e-8, 0.1, rule=rule, **named)
        for parameter, kept in zip(model.parameters(), moments, strict=True):
            assert parameter.grad is not None
            kernels.update(scalars, parameter.detach().flatten(), kept, parameter.grad.flatten(), None)
    return losses[0], sum(losses[-100:]) / 100


@pytest.mark.parametrize(("rule", "rate"), [(UpdateRule.ADAMW, 3e-3), (UpdateRule.LION, 3e-4)])
def test_a_real_text_is_learned_as_well_as_with_float32_moments(rule: UpdateRule, rate: float) -> None:
    """After 1,000 steps the loss is within 0.04 of float32's. Measured over three seeds: AdamW -0.002 to +0.013, Lion
    -0.003 to +0.001; AdamW with the published rounding, which makes 0 of small second moments, +0.011 to +0.073."""
    first, wide = loss_of_1000_steps(rule, torch.float32, rate)
    _, narrow = loss_of_1000_steps(rule, torch.uint8, rate)
    print(f"{rule}: loss {first:.3f} -> float32 {wide:.4f}, int8 {narrow:.4f}")
    assert wide < 0.45 * first, "the problem is real: it is being learned"
    assert abs(narrow - wide) < 0.04
