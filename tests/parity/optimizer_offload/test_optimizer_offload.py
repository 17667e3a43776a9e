"""optimizer_offload on = off, bit for bit: every split, chunk size, thread count and kind of lanes, against the plain
optimizer on the reference arithmetic."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from cases.optimizer_cases import (
    GROUPS,
    HOST_BYTES,
    LANES,
    NUM_STEPS,
    SETTINGS,
    UNTIL_MIDDLE,
    Case,
    Outcome,
    drive,
    odd_chunk,
    offload,
    oracle,
    outcome,
    resident,
    split,
)
from fakes.lazy_lanes import LazyLanes
from fakes.tracing import TracingLanes
from harness.depth import sweep
from spillway.plan import OptimizerPlan, Overlap
from spillway.update_rules import MomentType, UpdateRule
from spillway_trainer.kernels import dispatch as kernels
from spillway_trainer.kernels.reference import UpdateScalars
from spillway_trainer.optimizer_offload import OptimizerOffload
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.lanes import CpuLanes, Lane, Lanes

torch.set_num_threads(1)

SPLITS = [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0.5, 0.5, 0), (0.3, 0.3, 0.4), (0.61, 0.17, 0.22)]
CHUNKS = (1009, 4096, 1 << 20)
DTYPES = (torch.bfloat16, torch.float32)
MODES: tuple[tuple[int, Overlap], ...] = ((1, "None"), (2, "None"), (1, "Forward"))
"""threads, overlap"""


def memory() -> tuple[HostSlab, DeviceLedger]:
    return HostSlab(HOST_BYTES), DeviceLedger(None)


def run(case: Case, plan: OptimizerPlan, lanes: Lanes, ledger: DeviceLedger, *, in_place: bool = False) -> Outcome:
    parameters = case.parameters()
    optimizer = offload(parameters, case, plan, lanes, ledger, in_place=in_place)
    return outcome(optimizer, parameters, drive(optimizer, case))


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lanes_name", LANES)
@pytest.mark.parametrize("shares", SPLITS, ids=str)
def test_every_split_leaves_the_bits_of_the_plain_optimizer(
    shares: tuple[float, float, float], lanes_name: str, dtype: torch.dtype
) -> None:
    """Over 5 steps with a skipped one: parameters, masters, moments and norms; 72 combinations each."""
    for num_micro_batches, clipping, tied, chunk, (num_threads, overlap) in sweep(
        (1, 4), (None, 1.0), (False, True), CHUNKS, MODES, quick=2, ci=3
    ):
        case = Case(dtype, num_micro_batches, clipping, tied)
        host, ledger = memory()
        lanes = LANES[lanes_name](host, ledger)
        result = run(case, split(*shares, chunk, num_threads, overlap), lanes, ledger)
        lanes.close()
        assert result.difference(oracle(case)) == [], (case, chunk, num_threads, overlap)
        assert not isinstance(lanes, TracingLanes) or lanes.schedule().races == (), (case, chunk)


@pytest.mark.sweep
@pytest.mark.parametrize("overlap", ["None", "Forward", "Backward"])
@pytest.mark.parametrize("lanes_name", LANES)
def test_in_place_update_is_bit_identical_and_uploads_nothing(lanes_name: str, overlap: Overlap) -> None:
    """Also not what backward has updated, which the CPU copies when it counts."""
    for shares, dtype, chunk, tied in sweep((SPLITS[0], SPLITS[3], SPLITS[5]), DTYPES, CHUNKS, (False, True)):
        case = Case(dtype, num_micro_batches=2, tied=tied)
        host, ledger = memory()
        lanes = LANES[lanes_name](host, ledger)
        plan = split(*shares, chunk, overlap=overlap, speculative_parameters=5000 if overlap == "Backward" else 0)
        result = run(case, plan, lanes, ledger, in_place=True)
        lanes.close()
        assert result.difference(oracle(case)) == [], (shares, dtype, chunk, tied)
        assert not isinstance(lanes, TracingLanes) or lanes.schedule().races == (), (shares, dtype, chunk, tied)
        if shares == SPLITS[0]:
            assert Lane.H2D not in lanes.moved_bytes(), (dtype, chunk, tied)
        assert not any("uploads" in label for label in host.by_label())


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("moments", MomentType)
@pytest.mark.parametrize("rule", UpdateRule)
def test_every_rule_leaves_the_bits_of_the_plain_optimizer(
    rule: UpdateRule, moments: MomentType, dtype: torch.dtype
) -> None:
    """With every split, with and without groups; tied parameters, an empty one, one without gradient in most steps."""
    for index, (shares, lanes_name) in enumerate(itertools.product(SPLITS, LANES)):
        groups, speculates = GROUPS if index % 2 else (), index % 4 >= 2
        clipping = None if speculates else 1.0  # so that what was updated in backward counts
        case = Case(dtype, 2, clipping, tied=True, rule=rule, groups=groups, moments=moments)
        host, ledger = memory()
        lanes = LANES[lanes_name](host, ledger)
        plan = split(*shares, odd_chunk(moments), num_threads=2)
        if speculates:
            plan = split(*shares, odd_chunk(moments), overlap="Backward", speculative_parameters=20_000)
        result = run(case, plan, lanes, ledger)
        lanes.close()
        assert result.difference(oracle(case)) == [], (shares, lanes_name)
        assert not isinstance(lanes, TracingLanes) or lanes.schedule().races == (), shares


@pytest.mark.parametrize("moments", MomentType)
@pytest.mark.parametrize("rule", UpdateRule)
def test_what_one_plan_saved_another_continues_by_every_rule(rule: UpdateRule, moments: MomentType) -> None:
    case = Case(torch.bfloat16, 2, 1.0, tied=True, rule=rule, groups=GROUPS, moments=moments)
    for before, after in ((SPLITS[5], SPLITS[0]), (SPLITS[2], SPLITS[4])):
        continues(case, before, after)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(SPLITS, 2)), ids=str)
def test_what_one_plan_saved_another_continues_bitwise(
    before: tuple[float, float, float], after: tuple[float, float, float], dtype: torch.dtype
) -> None:
    continues(Case(dtype, num_micro_batches=2, clipping=1.0, tied=True), before, after)


def continues(case: Case, before: tuple[float, float, float], after: tuple[float, float, float]) -> None:
    host, ledger = memory()
    first_parameters = case.parameters()
    plan = split(
        *before, odd_chunk(case.moments), overlap="Forward"
    )  # the last update is in flight when its states are asked for
    first = offload(first_parameters, case, plan, LazyLanes(host, ledger), ledger)
    norms = drive(first, case, 0, UNTIL_MIDDLE)
    saved, scalars = dict(first.state()), first.scalars()

    parameters = dataclasses.replace(case, seed=7).parameters()  # other weights: all must come from the checkpoint
    host, ledger = memory()
    second = offload(parameters, case, split(*after, 4096, overlap="Forward"), LazyLanes(host, ledger), ledger)
    for name, value in saved.items():
        second.load(name, value)
    second.load_scalars(scalars)
    result = outcome(second, parameters, norms + drive(second, case, UNTIL_MIDDLE, NUM_STEPS))
    assert result.difference(oracle(case)) == []


def test_plain_optimizer_continues_what_an_offloaded_one_saved() -> None:
    case = Case(torch.bfloat16, clipping=1.0, tied=True)
    host, ledger = memory()
    first = offload(case.parameters(), case, split(0.3, 0.3, 0.4, 1009), LazyLanes(host, ledger), ledger)
    norms = drive(first, case, 0, UNTIL_MIDDLE)
    parameters = case.parameters()
    second = resident(parameters, case)
    for name, value in first.state():
        second.load(name, value)
    second.load_scalars(first.scalars())
    result = outcome(second, parameters, norms + drive(second, case, UNTIL_MIDDLE, NUM_STEPS))
    assert result.difference(oracle(case)) == []


def test_skip_leaves_states_and_parameters_unchanged() -> None:
    case = Case(torch.bfloat16, tied=True)
    host, ledger = memory()
    parameters = case.parameters()
    optimizer = offload(parameters, case, split(0.3, 0.3, 0.4, 1009), LazyLanes(host, ledger), ledger)
    before = outcome(optimizer, parameters, [])
    for name, gradient in case.gradients(0, 0):
        optimizer.take(name, gradient)
    optimizer.skip()
    assert outcome(optimizer, parameters, []).difference(before) == []


def test_default_kernels_of_both_sides_agree_with_the_reference() -> None:
    case = Case(torch.bfloat16, num_micro_batches=4, clipping=1.0, tied=True)
    host, ledger = memory()
    parameters, lanes = case.parameters(), LazyLanes(host, ledger)
    plan = split(0.3, 0.3, 0.4, 1009, num_threads=2)
    optimizer = OptimizerOffload(parameters, case.aliases, SETTINGS, plan, lanes, ledger)
    assert outcome(optimizer, parameters, drive(optimizer, case)).difference(oracle(case)) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masters_that_will_be_loaded_are_not_made_from_unset_parameters(dtype: torch.dtype) -> None:
    case = Case(dtype)
    parameters = case.parameters()
    for _, parameter in parameters:
        parameter.data.fill_(torch.nan)
    host, ledger = memory()
    lanes, plan = LazyLanes(host, ledger), split(0.5, 0.5, 0, 1009)
    optimizer = OptimizerOffload(parameters, {}, SETTINGS, plan, lanes, ledger, loads_masters=True)
    on_cpu = [placed for placed in optimizer._placed if placed.chunk.path.updates_on_cpu]
    assert all(not placed.held_states.master.any() for placed in on_cpu)


def test_wrong_arithmetic_on_one_side_shows() -> None:
    """The matrix can fail: one path with another epsilon differs."""
    case = Case(torch.bfloat16)
    host, ledger = memory()
    parameters, lanes = case.parameters(), LazyLanes(host, ledger)

    def other_epsilon(scalars: UpdateScalars, *tensors: object) -> None:
        kernels.update(dataclasses.replace(scalars, eps=1e-6), *tensors)  # type: ignore[arg-type]

    optimizer = OptimizerOffload(
        parameters, {}, SETTINGS, split(0.5, 0.5, 0, 1009), lanes, ledger, device_update=other_epsilon
    )
    assert outcome(optimizer, parameters, drive(optimizer, case)).difference(oracle(case)) != []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shares", SPLITS, ids=str)
def test_step_without_norm_waits_for_the_gradients(shares: tuple[float, float, float], dtype: torch.dtype) -> None:
    case = Case(dtype, num_micro_batches=2, tied=True)
    host, ledger = memory()
    results = []
    for make in (resident, lambda p, c: offload(p, c, split(*shares, 1009), LazyLanes(host, ledger), ledger)):
        parameters = case.parameters()
        optimizer = make(parameters, case)
        for micro_batch in range(2):
            for name, gradient in case.gradients(0, micro_batch):
                optimizer.take(name, gradient)
        optimizer.step(1e-2, 1.0)
        results.append(outcome(optimizer, parameters, []))
    assert results[1].difference(results[0]) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_cpu_never_touches_the_memory_of_the_device(dtype: torch.dtype) -> None:
    case, touched = Case(dtype), set()
    host, ledger = memory()
    parameters = case.parameters()

    def recording(
        scalars: UpdateScalars, master: Tensor, moments: Sequence[Tensor], gradient: Tensor, out: Tensor | None
    ) -> None:
        assert out is not None
        touched.update(tensor.untyped_storage().data_ptr() for tensor in (master, *moments, gradient, out))
        kernels.update(scalars, master, moments, gradient, out)

    lanes, plan = LazyLanes(host, ledger), split(0.5, 0.3, 0.2, 1009)
    optimizer = OptimizerOffload(parameters, {}, SETTINGS, plan, lanes, ledger, cpu_update=recording)
    drive(optimizer, case)
    assert touched == {host.allocate(1, "probe").untyped_storage().data_ptr()}


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lanes_name", ["cpu", "lazy"])
@pytest.mark.parametrize("shares", SPLITS, ids=str)
def test_every_forward_reads_what_the_last_update_wrote(
    shares: tuple[float, float, float], lanes_name: str, dtype: torch.dtype
) -> None:
    case = Case(dtype, num_micro_batches=2, clipping=1.0, tied=True)
    host, ledger = memory()
    lanes = LANES[lanes_name](host, ledger)
    plan = split(*shares, 257, overlap="Forward")
    seen: list[list[Tensor]] = []
    for make in (resident, lambda p, c: offload(p, c, plan, lanes, ledger)):
        parameters, read = case.parameters(), list[Tensor]()
        values = dict(parameters)
        drive(make(parameters, case), case, read=lambda name, v=values, r=read: r.append(v[name].detach().clone()))
        seen.append(read)
    lanes.close()
    assert len(seen[0]) == NUM_STEPS * 2 * len(case.uses)
    assert all(torch.equal(ours, plain) for ours, plain in zip(*seen, strict=True))


def test_a_segment_waits_for_its_own_parameters_and_what_is_updated_with_them() -> None:
    case = Case(torch.bfloat16, tied=True)
    host, ledger = memory()
    parameters, lanes = case.parameters(), LazyLanes(host, ledger)  # lazily, what nobody waits for does not happen
    optimizer = offload(parameters, case, split(1, 0, 0, 1 << 20, overlap="Forward"), lanes, ledger)
    before = {name: parameter.detach().clone() for name, parameter in parameters}
    for name, gradient in case.gradients(0, 0):
        optimizer.take(name, gradient)
    optimizer.step(1e-2, 1.0 if optimizer.norm() else 0.0)
    optimizer.wait(["up", "head"])
    assert {name for name, parameter in parameters if not torch.equal(parameter, before[name])} == {
        "up", "head", "embedding", "norm",
    }  # fmt: skip


def test_failed_update_raises_in_the_forward_that_needs_it_and_in_flush() -> None:
    case = Case(torch.bfloat16)
    host, ledger = memory()
    lanes = CpuLanes(host, ledger)

    def failing(*_: object) -> None:
        raise ArithmeticError("planted")

    plan = split(1, 0, 0, 1009, overlap="Forward")
    broken = OptimizerOffload(case.parameters(), {}, SETTINGS, plan, lanes, ledger, cpu_update=failing)
    for name, gradient in case.gradients(0, 0):
        broken.take(name, gradient)
    broken.step(1e-3, 1.0)
    with pytest.raises(ArithmeticError, match="planted"):
        broken.wait(["norm"])
    with pytest.raises(ArithmeticError, match="planted"):
        broken.flush()
    lanes.close()
