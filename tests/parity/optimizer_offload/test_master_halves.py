"""A streamed master moves without the half that the device has, and comes out with every bit: split and join, updates,
states in and out, bytes on the links and in memory."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from cases.optimizer_cases import (
    HOST_BYTES,
    LANES,
    SHAPES,
    Case,
    Named,
    drive,
    offload,
    oracle,
    outcome,
    resident,
    split,
)
from fakes.lazy_lanes import LazyLanes
from harness.depth import FULL
from spillway.update_rules import REST_BITS, MomentType, UpdateRule
from spillway_trainer.kernels import dispatch as kernels
from spillway_trainer.kernels import master_halves, reference
from spillway_trainer.kernels.reference import UpdateScalars
from spillway_trainer.optimizer_offload import OptimizerOffload
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.lanes import Lane

torch.set_num_threads(1)

STREAMED = split(0, 1, 0, 1024)
LOWER = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


def master_of(patterns: Tensor) -> Tensor:
    """The floats of these bit patterns; a NaN is the declared one, as a kernel or a load stores it."""
    return reference.quiet(patterns.to(torch.int32).view(torch.float32))


def rest_of(master: Tensor, weights: Tensor) -> Tensor:
    rest = torch.full((master_halves.rest_bytes(master.numel()),), 0xFF, dtype=torch.uint8)
    master_halves.split(master, weights, rest)
    return rest


def patterns() -> Iterator[Tensor]:
    """Every upper half with the lower halves around a tie; `SPILLWAY_DEPTH=all`: all 2^32."""
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int64) << 16
    step = 1 if FULL else 4099
    for lower in {*LOWER, *range(0, 2**16, step)}:
        yield upper | lower


def test_every_master_is_joined_from_its_weight_and_its_rest() -> None:
    """Denormals, zeros of both signs, infinities, what rounds to them, exact ties of both parities."""
    for one in patterns():
        master = master_of(one)
        weights = reference.bfloat16(master)
        assert torch.equal(bits(master_halves.join(weights, rest_of(master, weights))), bits(master))


def test_weight_never_updated_equals_its_master_even_for_nan_payloads() -> None:
    weights = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    nothing = torch.zeros(master_halves.rest_bytes(weights.numel()), dtype=torch.uint8)
    upper = weights.view(torch.int16).to(torch.int32) << 16
    assert torch.equal(bits(master_halves.join(weights, nothing)), upper)


def test_lower_half_alone_does_not_tell_which_way_a_tie_was_rounded() -> None:
    """Why a rest has a bit more: these two masters have one weight and one lower half."""
    two = master_of(torch.tensor([0x3F818000, 0x3F828000]))
    weights = reference.bfloat16(two)
    assert weights[0] == weights[1]
    lower, carries = master_halves.halves(rest_of(two, weights), 2)
    assert lower[0] == lower[1] and int(carries[0]) == 0b01


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1 << 18, (1 << 18) + 5])
def test_any_size_has_whole_bytes_of_carries(size: int) -> None:
    master = master_of(torch.randint(-(2**31), 2**31, (size,), generator=torch.Generator().manual_seed(size)))
    weights = reference.bfloat16(master)
    rest = rest_of(master, weights)
    assert rest.numel() == -(-size * REST_BITS // 8)
    assert torch.equal(bits(master_halves.join(weights, rest)), bits(master))


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", UpdateRule)
def test_an_update_of_masters_in_halves_is_that_of_whole_ones(rule: UpdateRule, moments: torch.dtype) -> None:
    """Of any bit patterns, in several parts."""
    size, generator = (1 << 18) + 1003, torch.Generator().manual_seed(3)

    def any_values() -> Tensor:
        return master_of(torch.randint(-(2**31), 2**31, (size,), generator=generator))

    powers = {"beta1_power": 0.9, "beta2_power": 0.95} if rule.corrects_bias else {}
    scalars = UpdateScalars(1e-2, 0.9, 0.95, 1e-8, 0.1, gradient_scale=0.37, momentum=0.8, rule=rule, **powers)
    master, gradient = any_values(), any_values()
    of_whole = [any_values().to(moments) for _ in rule.moments]
    of_split = [moment.clone() for moment in of_whole]
    weights = reference.bfloat16(master)
    rest, beside = rest_of(master, weights), weights.clone()
    for _ in range(2):
        reference.update(scalars, master, of_whole, gradient, weights)
        kernels.update_split(kernels.update, scalars, rest, of_split, gradient, beside)
    assert torch.equal(beside.view(torch.int16), weights.view(torch.int16))
    assert torch.equal(bits(master_halves.join(beside, rest)), bits(master))
    for ours, theirs in zip(of_split, of_whole, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


# --- in the optimizer


def made(case: Case, plan: object = STREAMED, **how: object) -> tuple[OptimizerOffload, Named, LazyLanes]:
    parameters, ledger = case.parameters(), DeviceLedger(None)
    lanes = LazyLanes(HostSlab(HOST_BYTES), ledger)
    return offload(parameters, case, plan, lanes, ledger, **how), parameters, lanes  # type: ignore[arg-type]


def strange(shape: tuple[int, ...], seed: int) -> Tensor:
    """Masters of any bits, ties and NaNs with payloads among them."""
    values = torch.randint(-(2**31), 2**31, shape, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    values.view(-1)[::3] = values.view(-1)[::3] & -0x10000 | 0x8000
    return values.view(torch.float32)


@pytest.mark.parametrize("rule", UpdateRule)
def test_masters_of_any_bits_load_update_and_save_like_the_plain_optimizer(rule: UpdateRule) -> None:
    """Also those of a parameter without a gradient, which are only carried; a step is skipped."""
    case, found = Case(torch.bfloat16, tied=True, rule=rule), []
    of_resident = case.parameters()
    for optimizer, parameters in ((resident(of_resident, case), of_resident), made(case)[:2]):
        for seed, name in enumerate(SHAPES):
            optimizer.load(f"master.{name}", strange(SHAPES[name], seed))
        loaded = dict(optimizer.state())
        norms = drive(optimizer, case, 0, 4)
        result = outcome(optimizer, parameters, norms)
        result.states |= {f"loaded {name}": value for name, value in loaded.items()}
        found.append(result)
    for kind in ("parameters", "states"):
        ours, theirs = getattr(found[1], kind), getattr(found[0], kind)
        assert ours.keys() == theirs.keys()
        assert [n for n in ours if not torch.equal(ours[n].view(torch.uint8), theirs[n].view(torch.uint8))] == []


@pytest.mark.parametrize("lanes_name", LANES)
def test_whole_and_split_masters_leave_the_same_bits(lanes_name: str) -> None:
    case = Case(torch.bfloat16, num_micro_batches=2, clipping=1.0, tied=True)
    for splits, shares in itertools.product((False, True), ((0, 1, 0), (0.5, 0.3, 0.2))):
        parameters, ledger = case.parameters(), DeviceLedger(None)
        lanes = LANES[lanes_name](HostSlab(HOST_BYTES), ledger)
        plan = split(*shares, 1024, overlap="Forward")
        optimizer = OptimizerOffload(
            parameters, case.aliases, case.settings, plan, lanes, ledger, device_update=reference.update, splits=splits
        )
        assert outcome(optimizer, parameters, drive(optimizer, case)).difference(oracle(case)) == []
        lanes.close()


@pytest.mark.parametrize("moments", MomentType)
@pytest.mark.parametrize("rule", UpdateRule)
@pytest.mark.parametrize(
    ("dtype", "in_place"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)], ids=str
)
def test_what_crosses_the_links_and_lies_in_host_memory(
    dtype: torch.dtype, in_place: bool, rule: UpdateRule, moments: MomentType
) -> None:
    """17 bits of a bfloat16 master each way, and there; float16 is no half of a float32, and in place there is no
    link: 32."""
    case = Case(dtype, rule=rule, moments=moments)
    optimizer, _, lanes = made(case, in_place=in_place)
    sizes = [
        min(1024, n - at) for shape in SHAPES.values() if (n := torch.Size(shape).numel()) for at in range(0, n, 1024)
    ]
    of_master = [-(-size * REST_BITS // 8) if dtype == torch.bfloat16 and not in_place else 4 * size for size in sizes]
    rows = [
        [master, *[moments.bytes_of(size)] * len(rule.moments)] for master, size in zip(of_master, sizes, strict=True)
    ]
    each_way = sum(-(-row // 64) * 64 for chunk in rows for row in chunk)
    before = lanes.moved_bytes()
    assert optimizer.held_bytes()["host"] == each_way
    for name, gradient in Case(dtype).gradients(1, 0):
        optimizer.take(name, gradient)
    optimizer.step(1e-3, 1.0)
    optimizer.flush()
    moved = {lane: lanes.moved_bytes()[lane] - before.get(lane, 0) for lane in (Lane.H2D, Lane.D2H)}
    assert moved == {Lane.H2D: each_way, Lane.D2H: each_way}


def test_a_rest_that_goes_wrong_shows() -> None:
    """The matrix can fail: a carry that is lost changes masters."""
    case = dataclasses.replace(Case(torch.bfloat16), seed=1)
    optimizer, parameters, _ = made(case)
    step: Callable[..., None] = master_halves.split

    def losing(master: Tensor, weights: Tensor, rest: Tensor) -> None:
        step(master, weights, rest)
        master_halves.halves(rest, master.numel())[1].zero_()

    master_halves.split = losing
    try:
        result = outcome(optimizer, parameters, drive(optimizer, case))
    finally:
        master_halves.split = step
    assert result.difference(oracle(case)) != []
