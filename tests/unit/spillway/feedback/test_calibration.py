"""Measured against predicted: known factors return, what tells nothing is rejected, nothing leaves the sane range."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases.job_documents import job
from spillway.errors import UserError
from spillway.feedback.calibration import (
    COMPUTE,
    CPU_UPDATE,
    LARGEST_FACTOR,
    LEAST_STEPS,
    NETWORK,
    READ,
    UPDATE,
    WARM_UP_STEPS,
    WRITE,
    Correction,
    MeasuredStep,
    Sample,
    corrected,
    corrections,
    fitted,
    loads_of,
    measured_step,
    medians,
    not_told,
    predicted_seconds,
)
from spillway.metrics import Phase, StepMetrics
from spillway.plan import MemoryPlan, Overlap
from spillway.planning.hardware import NodeSpec, local_node, resolve_node
from spillway.planning.planner import make_plan
from spillway.planning.step_time import Rates, rank_rates
from spillway.units import GIB, MIB

NODE = replace(
    local_node(2, 8 * GIB, 8 * GIB, 64 * GIB),
    device_bytes_per_second=1e10,
    dram_bytes_per_second=1e10,
    cpu_bytes_per_second=1e10,
    bfloat16_values_per_second=2.5e9,
    float32_values_per_second=5e9,
    operation_overhead_seconds=2e-5,
)
SPILLED = {"spec.memory.advanced.activations.policy": "Nvme", "spec.memory.advanced.optimizer.placement": "Host",
           "spec.memory.advanced.parameters.placement": "Resident"}  # fmt: skip
FACTORS = st.floats(0.1, 10.0)


def plan(changes: dict[str, Any] | None = None, node: NodeSpec = NODE) -> MemoryPlan:
    decided = make_plan(job(changes), node)
    assert isinstance(decided, MemoryPlan), decided
    return decided


def rates(node: NodeSpec = NODE) -> Rates:
    return rank_rates(node, 1, 1, "bfloat16")


def metrics(number: int = 1, skipped: bool = False, **figures: Any) -> StepMetrics:
    step = StepMetrics(number, 1.0, 1e-3, 1.0, 1.0, 512, step_seconds=1.0, skipped=skipped)
    return replace(step, **figures)


def as_measured(phases: Mapping[str, float], **figures: Any) -> MeasuredStep:
    values: dict[str, Any] = {"lane_seconds": {}, "moved_bytes": {}, **figures}
    return MeasuredStep(10, sum(phases.values()), phases, **values)


def factors(found: list[Correction]) -> dict[str, float]:
    return {one.resource: one.factor for one in found}


# --- a plan says what its steps ask for -------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [None, SPILLED, {"spec.memory.advanced.activations.policy": "Recompute"}])
@pytest.mark.parametrize("node", [NODE, resolve_node("h100")], ids=["cpu", "h100"])
def test_the_phases_of_a_prediction_add_up_to_its_step(changes: dict[str, Any] | None, node: NodeSpec) -> None:
    prediction = plan(changes, node).prediction
    assert sum(prediction.phase_seconds.values()) == pytest.approx(prediction.step_seconds)
    assert min(prediction.phase_seconds.values()) >= 0.0


@pytest.mark.parametrize("changes", [None, {"spec.memory.advanced.activations.policy": "Recompute"}, SPILLED])
def test_what_a_plan_asks_for_costs_at_its_nodes_rates_what_it_predicted(changes: dict[str, Any] | None) -> None:
    """Both passes of a micro-batch; of a spilled plan that lets no copy overlap, only what computes."""
    prediction = plan(changes).prediction
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        loads = loads_of(prediction.work[phase], rates())
        cores = sum(loads[name] for name in loads if name in {"compute", "H2D", "D2H", "CPU update"})
        assert cores == pytest.approx(prediction.phase_seconds[phase])


def test_predicted_seconds_repeat_the_prediction() -> None:
    prediction = plan().prediction
    assert predicted_seconds(prediction.work, rates()) == pytest.approx(prediction.step_seconds, rel=0.02)


# --- steps ------------------------------------------------------------------------------------------------------------


def test_medians_leave_out_warm_up_and_skipped_steps() -> None:
    slow = [metrics(step_seconds=99.0, phase_seconds={"forward": 99.0})] * WARM_UP_STEPS
    good = [metrics(step_seconds=s, phase_seconds={"forward": s / 2}) for s in (1.0, 2.0, 3.0, 4.0, 5.0)]
    step = measured_step([[*slow, metrics(step_seconds=77.0, skipped=True), *good]])
    assert (step.num_steps, step.step_seconds, step.phase_seconds["forward"]) == (5, 3.0, 1.5)


def test_every_attempt_warms_up() -> None:
    attempts = [[metrics(step_seconds=9.0)] * WARM_UP_STEPS + [metrics(step_seconds=2.0)] * 3] * 2
    assert measured_step(attempts).step_seconds == 2.0


def test_too_few_steps_are_rejected() -> None:
    steps = [metrics()] * (WARM_UP_STEPS + LEAST_STEPS - 1)
    with pytest.raises(UserError, match=f"{LEAST_STEPS} are required"):
        measured_step([steps])


# --- corrections ------------------------------------------------------------------------------------------------------


def test_a_run_that_took_what_was_predicted_corrects_nothing() -> None:
    prediction = plan(SPILLED).prediction
    found = corrections(prediction.work, rates(), as_measured(prediction.phase_seconds))
    assert factors(found) == pytest.approx({COMPUTE: 1.0, UPDATE: 1.0})


@given(compute=FACTORS, update=FACTORS)
def test_known_factors_come_back(compute: float, update: float) -> None:
    """A run on a node whose compute and update are slower by known factors; an update too short to tell is left out,
    and then disturbs the other a little."""
    slower = corrected(NODE, [Correction(COMPUTE, 1, 1, compute), Correction(UPDATE, 1, 1, update)])
    seconds = plan(SPILLED, slower).prediction.phase_seconds
    found = factors(corrections(plan(SPILLED).prediction.work, rates(), as_measured(seconds)))
    assert found[COMPUTE] == pytest.approx(compute, rel=1e-6 if UPDATE in found else 0.1)
    assert found.get(UPDATE, update) == pytest.approx(update)


@pytest.mark.parametrize("changes", [None, SPILLED, {"spec.memory.advanced.activations.policy": "Recompute"}])
def test_a_corrected_node_predicts_what_was_measured(changes: dict[str, Any] | None) -> None:
    prediction = plan(changes).prediction
    measured = {name: 3.0 * seconds for name, seconds in prediction.phase_seconds.items() if name != Phase.WAIT}
    found = corrections(prediction.work, rates(), as_measured(measured))
    after = plan(changes, corrected(NODE, found)).prediction
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
        assert after.phase_seconds[phase] == pytest.approx(measured[phase], rel=1e-6)


def test_correcting_twice_by_the_same_run_changes_nothing_more() -> None:
    prediction = plan(SPILLED).prediction
    step = as_measured({name: 2.0 * seconds for name, seconds in prediction.phase_seconds.items()})
    once = corrected(NODE, corrections(prediction.work, rates(), step))
    again = corrections(prediction.work, rates(once), step)
    assert all(one.factor == pytest.approx(1.0) for one in again)


def test_the_disk_is_corrected_by_the_time_its_lane_worked() -> None:
    prediction = plan(SPILLED).prediction
    lanes = {"lane_seconds": {"nvme_write": 0.5, "nvme_read": 0.25},
             "moved_bytes": {"nvme_write": 100 * MIB, "nvme_read": 100 * MIB}}  # fmt: skip
    found = corrections(prediction.work, rates(), as_measured(prediction.phase_seconds, **lanes))
    after = corrected(NODE, found)
    assert after.nvme_write_bytes_per_second == pytest.approx(200 * MIB)
    assert after.nvme_read_bytes_per_second == pytest.approx(400 * MIB)


def test_copies_have_own_rates_on_a_gpu_and_those_of_compute_on_a_cpu() -> None:
    lanes = {"lane_seconds": {"h2d": 1.0}, "moved_bytes": {"h2d": 10 * GIB}}
    on_gpu = rank_rates(resolve_node("h100"), 1, 1, "bfloat16")
    assert factors(corrections({}, on_gpu, as_measured({}, **lanes))) == pytest.approx({"h2d": 50e9 / (10 * GIB)})
    assert corrections({}, rates(), as_measured({}, **lanes)) == []


def test_few_bytes_and_short_phases_tell_nothing() -> None:
    work = plan(SPILLED).prediction.work
    lanes = {"lane_seconds": {"nvme_write": 9.0}, "moved_bytes": {"nvme_write": 1000}}
    step = MeasuredStep(10, 100.0, {"forward": 0.1, "backward": 0.1, "optimizer": 0.1}, **lanes)
    assert corrections(work, rates(), step) == []


# --- updates beside forward or backward, and states on NVMe -----------------------------------------------------------

IN_HOST = {"spec.memory.advanced.activations.policy": "Keep", "spec.memory.advanced.optimizer.placement": "Host",
           "spec.memory.advanced.parameters.placement": "Resident"}  # fmt: skip
STATES_ON_NVME = {**IN_HOST, "spec.memory.advanced.optimizer.placement": "Nvme"}
H100 = resolve_node("h100")


def beside_forward(phases: Mapping[str, float]) -> dict[str, float]:
    """The same cores, and no more of them: some of what the update takes is in forward, the rest is waited for."""
    update = phases[Phase.OPTIMIZER]
    return {
        **phases,
        Phase.FORWARD: phases[Phase.FORWARD] + 0.5 * update,
        Phase.WAIT: 0.4 * update,
        Phase.OPTIMIZER: 0.1 * update,
    }


@given(compute=st.floats(0.5, 2.0), update=st.floats(0.5, 2.0))  # no copy bounds the update
def test_known_factors_are_recovered_when_update_and_forward_share_cores(compute: float, update: float) -> None:
    slower = corrected(NODE, [Correction(COMPUTE, 1, 1, compute), Correction(UPDATE, 1, 1, update)])
    seconds = plan(IN_HOST, slower).prediction.phase_seconds
    work = plan(IN_HOST).prediction.work
    found = factors(corrections(work, rates(), as_measured(beside_forward(seconds)), "Forward"))
    assert found == pytest.approx({COMPUTE: compute, UPDATE: update})
    assert not_told(work, rates(), "Forward") == []


def test_an_update_in_every_phase_shares_its_factor_with_compute() -> None:
    prediction = plan(IN_HOST).prediction
    phases = beside_forward({name: 3.0 * seconds for name, seconds in prediction.phase_seconds.items()})
    found = factors(corrections(prediction.work, rates(), as_measured(phases), "Backward"))
    assert found == pytest.approx({COMPUTE: 3.0, UPDATE: 3.0})


@pytest.mark.parametrize(
    ("overlap", "told", "sentence"),
    [("Forward", {COMPUTE: 2.0}, "update: the update ran"), ("Backward", {}, "compute, update")],
)
def test_overlapped_update_is_not_calibrated_if_forward_waits_for_copies(
    overlap: Overlap, told: dict[str, float], sentence: str
) -> None:
    """Only backward is free of the update, of which it says nothing."""
    prediction = plan(SPILLED).prediction
    planned = loads_of(prediction.work[Phase.BACKWARD], rates())
    seconds = {name: 2.0 * taken for name, taken in prediction.phase_seconds.items()}
    seconds[Phase.BACKWARD] -= planned["CPU update"]  # stays at its rate
    found = factors(corrections(prediction.work, rates(), as_measured(beside_forward(seconds)), overlap))
    assert found == pytest.approx(told)
    (said,) = not_told(prediction.work, rates(), overlap)
    assert said.startswith(sentence)


def test_gpu_compute_keeps_its_rate_and_the_cpu_lane_calibrates_the_update() -> None:
    prediction = plan(IN_HOST, H100).prediction
    on_h100 = rank_rates(H100, 1, 1, "bfloat16")
    phases = {**prediction.phase_seconds, Phase.OPTIMIZER: 0.0}
    lanes = {"lane_seconds": {"cpu": 2.0}, "moved_bytes": {"cpu": on_h100.cpu}}
    found = corrections(prediction.work, on_h100, as_measured(phases, **lanes), "Forward")
    assert factors(found) == pytest.approx({COMPUTE: 1.0, CPU_UPDATE: 2.0})
    after = corrected(H100, found)
    assert after.cpu_bytes_per_second == pytest.approx(H100.cpu_bytes_per_second / 2)
    assert after.dram_bytes_per_second == pytest.approx(H100.dram_bytes_per_second / 2)
    assert after.device_bytes_per_second == H100.device_bytes_per_second


def test_what_a_device_apart_updates_beside_forward_is_not_told() -> None:
    prediction = plan({**IN_HOST, "spec.memory.advanced.optimizer.placement": "Interleaved"}, H100).prediction
    on_h100 = rank_rates(H100, 1, 1, "bfloat16")
    assert not_told(prediction.work, on_h100, "None") == []
    (said,) = not_told(prediction.work, on_h100, "Forward")
    assert said.startswith("device memory: ")


def with_states_on_nvme(read: float, write: float, update: float) -> MeasuredStep:
    """A gibibyte in each direction, ten by the CPU's lane; seconds."""
    moved = {"nvme_read": GIB, "nvme_write": GIB, "cpu": 10 * GIB}
    seconds = {"nvme_read": read, "nvme_write": write, "cpu": 3.0 * 10 * GIB / NODE.cpu_bytes_per_second}
    phases = {**plan(STATES_ON_NVME).prediction.phase_seconds, Phase.OPTIMIZER: update}
    return as_measured(phases, lane_seconds=seconds, moved_bytes=moved)


@pytest.mark.parametrize(("update", "together"), [(4.0, 4.0), (9.0, 6.0)], ids=["at once", "in turn"])
def test_nvme_states_correct_both_disk_rates_by_their_combined_time(update: float, together: float) -> None:
    work, step = plan(STATES_ON_NVME).prediction.work, with_states_on_nvme(3.0, 3.0, update)
    found = factors(corrections(work, rates(), step))
    expected = together / (GIB / NODE.nvme_read_bytes_per_second + GIB / NODE.nvme_write_bytes_per_second)
    assert (found[READ], found[WRITE]) == pytest.approx((expected, expected))
    assert not_told(work, rates(), "None") == []


def test_nvme_states_calibrate_the_update_by_its_cpu_lane_not_its_phase() -> None:
    """The phase also waits for the disk."""
    work = plan(STATES_ON_NVME).prediction.work
    found = factors(corrections(work, rates(), with_states_on_nvme(3.0, 3.0, 99.0)))
    assert found[UPDATE] == pytest.approx(3.0)
    again = corrected(NODE, corrections(work, rates(), with_states_on_nvme(3.0, 3.0, 99.0)))
    assert all(factor == pytest.approx(1.0) for name, factor in factors(
        corrections(work, rates(again), with_states_on_nvme(3.0, 3.0, 99.0))).items() if name != COMPUTE)  # fmt: skip


def test_a_disk_that_states_and_activations_share_is_left_as_it_was() -> None:
    work = plan({**STATES_ON_NVME, "spec.memory.advanced.activations.policy": "Nvme"}).prediction.work
    found = factors(corrections(work, rates(), with_states_on_nvme(3.0, 3.0, 4.0)))
    assert not {READ, WRITE} & found.keys()
    (said,) = not_told(work, rates(), "None")
    assert said.startswith("disk read, disk write: ")


def test_the_network_inside_and_between_nodes_is_told_apart() -> None:
    found = [Correction(NETWORK, 1.0, 4.0, 4.0)]
    inside, across = corrected(NODE, found), corrected(NODE, found, across_nodes=True)
    assert inside.interconnect_bytes_per_second == NODE.interconnect_bytes_per_second / 4
    assert inside.network_bytes_per_second == NODE.network_bytes_per_second
    assert across.network_bytes_per_second == NODE.network_bytes_per_second / 4
    assert across.interconnect_bytes_per_second == NODE.interconnect_bytes_per_second


def test_a_slower_compute_lowers_every_rate_of_compute() -> None:
    slower = corrected(NODE, [Correction(COMPUTE, 1.0, 2.0, 2.0)])
    for name in ("flops", "values"):
        for dtype in ("bfloat16", "float32"):
            rate = f"{dtype}_{name}_per_second"
            assert getattr(slower, rate) == getattr(NODE, rate) / 2
    assert slower.operation_overhead_seconds == NODE.operation_overhead_seconds * 2


@given(seconds=st.floats(0.0, 1e12))
def test_no_factor_leaves_the_sane_range(seconds: float) -> None:
    prediction = plan(SPILLED).prediction
    phases = {Phase.FORWARD: seconds, Phase.BACKWARD: seconds, Phase.OPTIMIZER: seconds}
    for one in corrections(prediction.work, rates(), as_measured(phases)):
        assert 1.0 / LARGEST_FACTOR <= one.factor <= LARGEST_FACTOR


def test_a_factor_that_was_cut_is_marked() -> None:
    prediction = plan().prediction
    phases = {name: 1000.0 * seconds for name, seconds in prediction.phase_seconds.items()}
    assert all(one.is_cut for one in corrections(prediction.work, rates(), as_measured(phases)))


def test_of_several_runs_the_one_in_the_middle_counts() -> None:
    runs = [[Correction(COMPUTE, 1, factor, factor)] for factor in (2.0, 9.0, 3.0)]
    assert factors(medians([*runs, [Correction(WRITE, 1, 5, 5.0)]])) == {COMPUTE: 3.0, WRITE: 5.0}


def test_corrections_without_a_disk_leave_it_alone() -> None:
    after = corrected(NODE, [Correction(COMPUTE, 1, 2, 2.0)])
    assert (READ, after.nvme_read_bytes_per_second) == (READ, NODE.nvme_read_bytes_per_second)
    assert after.operation_overhead_seconds == 2.0 * NODE.operation_overhead_seconds


# --- prices -----------------------------------------------------------------------------------------------------------

FLOP = {"bfloat16": 2e-12, "float32": 1e-11}
FASTEST = {"bfloat16": 6e11, "float32": 1.5e11}
VALUE = {"bfloat16": 4e-10, "float32": 1e-10}
OPERATION = 3e-5
SHAPES = [(1e9, 1e6, 20), (4e10, 3e7, 50), (9e9, 9e7, 10), (3e8, 2e6, 400), (8e10, 1e7, 900)]
"""FLOPs, values, operations"""


def samples(value: Mapping[str, float] = VALUE, operation: float = OPERATION) -> list[Sample]:
    found = []
    for compute, flop in FLOP.items():
        for flops, values, operations in SHAPES:
            seconds = flops * flop + values * value[compute] + operations * operation
            found.append(Sample(compute, {"flops": flops, "values": values, "operations": operations}, seconds))
    return found


def test_known_prices_come_back() -> None:
    prices = fitted(samples(), rates(), FASTEST)
    assert prices.flop == pytest.approx(FLOP)
    assert prices.value == pytest.approx(VALUE)
    assert prices.operation == pytest.approx(OPERATION)
    assert prices.error == pytest.approx(0.0, abs=1e-9)


def test_what_costs_nothing_gets_price_0() -> None:
    free = dict.fromkeys(VALUE, 0.0)
    assert fitted(samples(value=free), rates(), FASTEST).value == pytest.approx(free, abs=1e-12)
    assert fitted(samples(operation=0.0), rates(), FASTEST).operation == pytest.approx(0.0, abs=1e-12)


@given(noise=st.lists(st.floats(0.7, 1.4), min_size=10, max_size=10))
def test_noise_never_makes_a_price_negative(noise: list[float]) -> None:
    noisy = [replace(one, seconds=one.seconds * factor) for one, factor in zip(samples(), noise, strict=True)]
    prices = fitted(noisy, rates(), FASTEST)
    assert min(prices.flop.values()) > 0.0
    assert min(*prices.value.values(), prices.operation) >= 0.0


def test_no_flop_costs_less_than_in_the_fastest_matrix_product() -> None:
    """A small model's matrix products hide behind everything else: a fit alone would find them free."""
    free = [replace(one, seconds=one.seconds - one.amounts["flops"] * (FLOP[one.compute] - 1.0 / FASTEST[one.compute]))
            for one in samples()]  # fmt: skip
    assert fitted(free, rates(), FASTEST).flop == pytest.approx({name: 1.0 / rate for name, rate in FASTEST.items()})


def test_copies_and_updates_are_subtracted_at_their_known_rates() -> None:
    known = rates()
    with_copies = [
        replace(
            one,
            amounts={**one.amounts, "D2H": 1e9, "CPU update": 2e9, "device": 3e9},
            seconds=one.seconds + 1e9 / known.d2h + 2e9 / known.cpu + 3e9 / known.device,
        )
        for one in samples()
    ]
    assert fitted(with_copies, known, FASTEST).flop == pytest.approx(FLOP)


def test_samples_that_make_no_sense_are_rejected_with_a_sentence() -> None:
    nothing = [Sample("bfloat16", {"flops": 1e9, "D2H": 1e15}, 0.1)] * 5
    with pytest.raises(UserError, match="the machine is too busy"):
        fitted(nothing, rates(), FASTEST)
