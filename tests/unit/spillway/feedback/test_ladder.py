"""Memory ran out: the next attempt has the fastest plan that the lower bounds allow, and none that failed already."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.job_documents import job
from harness.depth import at
from spillway.feedback.ladder import (
    MARGINS,
    MOST_MEMORY_TRIES,
    MemoryFailure,
    change,
    corrections_after,
    next_failure_may_be_last,
    relaxed,
    repeats,
    smaller_micro_batches,
    tries_are_used_up,
    worth_relaxing,
)
from spillway.feedback.retries import OOM_KILLED
from spillway.placement.cluster_view import ClusterView, NodeView
from spillway.placement.place import Placement, Unplaceable, place
from spillway.plan import Infeasible, MemoryPlan, Tier, TierBytes
from spillway.planning.candidates import best, timed
from spillway.planning.corrections import NO_CORRECTIONS, Corrections
from spillway.planning.hardware import local_node
from spillway.planning.planner import Overrides, ask, make_plan
from spillway.planning.search import Search
from spillway.units import GIB, MIB

DEVICE, HOST, NVME = "DeviceOutOfMemory", "HostOutOfMemory", "SpillVolumeFull"
REASON_OF = {Tier.DEVICE: DEVICE, Tier.HOST: HOST, Tier.NVME: NVME}
NODE = local_node(2, 512 * MIB, GIB, 8 * GIB)
SPILLED = {"spec.memory.advanced.activations.policy": "Nvme", "spec.memory.advanced.optimizer.placement": "Host"}


def planned(changes: dict[str, Any] | None = None, corrections: Corrections = NO_CORRECTIONS) -> MemoryPlan:
    found = make_plan(job(changes), NODE, Overrides(corrections=corrections))
    assert isinstance(found, MemoryPlan), found
    return found


def failed(plan: MemoryPlan, reason: str = DEVICE, attempt: int = 1, pod: int = GIB) -> MemoryFailure:
    return MemoryFailure(attempt, reason, plan, pod)


def within(plan: MemoryPlan, **limits: int) -> MemoryPlan:
    return plan.model_copy(update={"budget": {**plan.budget, **{Tier(tier): size for tier, size in limits.items()}}})


def cluster(memory: int = 4 * GIB, corrections: Corrections = NO_CORRECTIONS) -> ClusterView:
    view = NodeView("node-a", {}, (), 8.0, memory, 100 * GIB, {})
    return ClusterView((view,), corrections=corrections)


# --- lower bounds -----------------------------------------------------------------------------------------------------


def test_nothing_is_corrected_before_memory_ran_out() -> None:
    assert corrections_after(()) == NO_CORRECTIONS
    assert planned() == planned(corrections=NO_CORRECTIONS)


def test_each_failure_of_a_tier_adds_a_larger_margin_to_its_largest_bound() -> None:
    plan = planned()
    bytes_ = plan.bytes[Tier.DEVICE].predicted
    failures, factors = [], []
    for attempt, times in enumerate((1.1, 2.0, 1.5), 1):
        failures.append(failed(within(plan, device=int(times * bytes_)), attempt=attempt))
        factors.append(corrections_after(failures).device)
    bounds = (1.1, 2.0, 2.0)
    assert factors == pytest.approx([bound * (1 + more) for bound, more in zip(bounds, MARGINS, strict=True)], rel=1e-3)


@pytest.mark.parametrize(
    ("reason", "corrected"), [(DEVICE, "device"), (HOST, "host"), (NVME, "nvme"), (OOM_KILLED, "pod")]
)
def test_each_reason_corrects_what_ran_out_and_nothing_else(reason: str, corrected: str) -> None:
    found = corrections_after([failed(planned(SPILLED), reason)])
    factors = {kind: getattr(found, kind) for kind in ("device", "host", "nvme", "pod")}
    assert factors.pop(corrected) > 1.0
    assert set(factors.values()) == {1.0}
    assert (found.nvme_most_bytes is not None) is (reason == NVME)
    assert "attempt 1 ran out at" in found.reasons[0]


def test_host_memory_that_no_plan_uses_ran_out_beside_the_plan() -> None:
    plan = planned()
    assert not plan.bytes[Tier.HOST].total
    assert corrections_after([failed(plan, HOST)]).pod > 1.0


# --- what is planned then ---------------------------------------------------------------------------------------------


@settings(max_examples=at(2, 4, 40), deadline=None)
@given(st.integers(24, 400), st.floats(1.0, 4.0), st.floats(1.0, 4.0))
def test_the_plan_is_the_fastest_of_all_candidates_whose_counted_bytes_fit(
    device: int, more_device: float, more_host: float
) -> None:
    corrections = Corrections(device=more_device, host=more_host)
    overrides = Overrides(device_bytes=device * MIB, host_bytes=300 * MIB, corrections=corrections)
    found = make_plan(job(), NODE, overrides)
    budget = ask(job(), NODE, overrides).budget
    question = replace(ask(job(), NODE, overrides), budget=corrections.searched(budget))
    fitting = [one for one in Search(question).all_candidates() if _fits(one.bytes, corrections, budget)]
    if not fitting:
        assert isinstance(found, Infeasible)
        assert found.budget == budget
        assert found.missing_bytes
        assert corrections.change_nothing or found.nearest.startswith("not searched for, ")
        return
    assert isinstance(found, MemoryPlan)
    expected = best([timed(question, one) for one in fitting])
    assert found.prediction.step_seconds == pytest.approx(expected.seconds)
    for tier in Tier:
        held = found.bytes[tier]
        assert corrections.of(tier) * held.predicted <= held.total + 1
        assert held.total <= found.budget[tier] == budget[tier]


def _fits(held: dict[Tier, TierBytes], corrections: Corrections, budget: dict[Tier, int]) -> bool:
    return all(held[tier].total <= int(budget[tier] / corrections.of(tier)) for tier in Tier)


@settings(max_examples=at(2, 4, 40), deadline=None)
@given(st.integers(20, 200), st.sampled_from([DEVICE, HOST, NVME, OOM_KILLED]), st.booleans())
def test_no_plan_follows_that_one_which_failed_dominates(device: int, reason: str, spills: bool) -> None:
    """Brute force beside the arithmetic: as many bytes of what ran out, and no more room, is a repetition."""
    changes = {**(SPILLED if spills else {}), "spec.memory.budget.device": f"{device}Mi"}
    asked, failures = job(changes), list[MemoryFailure]()
    for attempt in range(1, MOST_MEMORY_TRIES + 2):
        found = place(asked, cluster(corrections=corrections_after(failures)))
        if isinstance(found, Unplaceable):
            return
        for failure in failures:
            assert not _dominated(failure, found)
        assert not repeats(failures, found.plan, found.pod.memory_bytes)
        failures.append(failed(found.plan, reason, attempt, found.pod.memory_bytes))


@pytest.mark.parametrize(
    ("reasons", "used_up", "may_be_last"),
    [
        ([DEVICE] * 2, False, False), ([DEVICE] * 3, False, True), ([DEVICE] * 4, True, True),
        ([DEVICE, HOST, DEVICE, HOST, HOST], False, True), ([DEVICE, DEVICE, HOST, HOST], False, False),
        ([DEVICE] * 3 + [HOST], False, True), ([DEVICE, DEVICE, HOST, HOST, NVME, NVME, OOM_KILLED], True, True),
    ],
)  # fmt: skip
def test_tries_are_counted_by_the_kind_of_memory_that_ran_out_and_in_all(
    reasons: list[str], used_up: bool, may_be_last: bool
) -> None:
    assert tries_are_used_up(reasons) is used_up
    assert next_failure_may_be_last(reasons) is may_be_last


def test_failures_whose_reasons_are_not_known_any_more_count_in_all() -> None:
    assert tries_are_used_up([DEVICE], num_failures=7)
    assert not tries_are_used_up([DEVICE], num_failures=6)
    assert next_failure_may_be_last([DEVICE], num_failures=6)


def test_a_prediction_that_is_wrong_by_two_of_device_and_host_is_met() -> None:
    """benchmarks/placement.py, the adversarial trace: one tier's failures say nothing of the other's."""
    failures = list[MemoryFailure]()
    while not failures or not tries_are_used_up([failure.reason for failure in failures]):
        found = place(job(SPILLED), cluster(64 * GIB, corrections_after(failures)))
        assert isinstance(found, Placement), found
        plan = found.plan
        if 2 * plan.bytes[Tier.DEVICE].predicted > plan.budget[Tier.DEVICE]:
            failures.append(failed(plan, DEVICE, len(failures) + 1, found.pod.memory_bytes))
        elif 2 * plan.bytes[Tier.HOST].predicted > plan.slab_bytes(Tier.HOST):
            failures.append(failed(plan, HOST, len(failures) + 1, found.pod.memory_bytes))
        else:
            assert {failure.reason for failure in failures} == {DEVICE, HOST}
            return
    pytest.fail("the ladder has not enough rungs")


def _dominated(failure: MemoryFailure, found: Placement) -> bool:
    tier = failure.tier
    before, after = failure.plan, found.plan
    if tier is None:
        more = [sum(plan.bytes[each].predicted for each in (Tier.DEVICE, Tier.HOST)) for plan in (before, after)]
        return more[1] >= more[0] and found.pod.memory_bytes <= failure.pod_memory_bytes
    room = [plan.budget[tier] if tier is Tier.DEVICE else plan.slab_bytes(tier) for plan in (before, after)]
    return after.bytes[tier].predicted >= before.bytes[tier].predicted > 0 and room[1] <= room[0]


@pytest.mark.parametrize("times", [1.3, 3.0])
@pytest.mark.parametrize("budget", [{}, {"spec.memory.budget.device": "120Mi"}], ids=["free", "device-budget"])
def test_prediction_off_by_up_to_3x_is_met_within_three_retries(times: float, budget: dict[str, Any]) -> None:
    failures = list[MemoryFailure]()
    for attempt in range(1, MOST_MEMORY_TRIES + 2):
        found = place(job(budget), cluster(corrections=corrections_after(failures)))
        assert isinstance(found, Placement), found
        plan = found.plan
        if times * plan.bytes[Tier.DEVICE].predicted <= plan.budget[Tier.DEVICE]:
            assert 1 < attempt <= MOST_MEMORY_TRIES + 1
            return
        failures.append(failed(plan, DEVICE, attempt, found.pod.memory_bytes))
    pytest.fail("the ladder has not enough rungs")


@pytest.mark.parametrize("times", [1.2, 3.0])
def test_pod_that_needs_up_to_3x_its_count_gets_it_within_three_retries(times: float) -> None:
    failures = list[MemoryFailure]()
    for attempt in range(1, MOST_MEMORY_TRIES + 2):
        found = place(job(), cluster(64 * GIB, corrections_after(failures)))
        assert isinstance(found, Placement), found
        if times * (found.pod.memory_bytes - found.plan.unplanned_bytes) <= found.pod.memory_bytes:
            assert attempt > 1
            return
        failures.append(failed(found.plan, OOM_KILLED, attempt, found.pod.memory_bytes))
    pytest.fail("the ladder has not enough rungs")


def test_where_the_node_has_room_the_fast_plan_stays_and_its_pod_grows() -> None:
    before = place(job(), cluster())
    assert isinstance(before, Placement)
    failure = failed(before.plan, DEVICE, 1, before.pod.memory_bytes)
    after = place(job(), cluster(corrections=corrections_after([failure])))
    assert isinstance(after, Placement)
    assert (after.plan.optimizer, after.plan.activations) == (before.plan.optimizer, before.plan.activations)
    assert after.plan.budget[Tier.DEVICE] > (1 + MARGINS[0]) * before.plan.budget[Tier.DEVICE]
    assert after.pod.memory_bytes >= before.pod.memory_bytes
    assert after.plan.bytes[Tier.DEVICE].predicted == before.plan.bytes[Tier.DEVICE].predicted
    assert change(before.plan, after.plan).startswith("the same placement with more memory, device ")


def test_where_a_budget_ends_bytes_leave_the_device() -> None:
    changes = {"spec.memory.budget.device": "64Mi"}
    before = place(job(changes), cluster())
    assert isinstance(before, Placement)
    after = place(job(changes), cluster(corrections=corrections_after([failed(before.plan)])))
    assert isinstance(after, Placement)
    assert after.plan.bytes[Tier.DEVICE].predicted < before.plan.bytes[Tier.DEVICE].predicted
    assert after.plan.bytes[Tier.DEVICE].total <= 64 * MIB


def test_full_volume_reduces_spilling_whatever_space_the_node_reports() -> None:
    before = planned({"spec.memory.advanced.activations.policy": "Nvme"})
    corrections = corrections_after([failed(before, NVME)])
    assert corrections.nvme_most_bytes is not None
    after = make_plan(job(), NODE, Overrides(corrections=corrections, host_bytes=0, device_bytes=30 * MIB))
    assert before.bytes[Tier.NVME].total > 0
    if isinstance(after, MemoryPlan):
        assert after.bytes[Tier.NVME].total <= before.bytes[Tier.NVME].predicted / (1 + MARGINS[0])
    forced = make_plan(
        job({"spec.memory.advanced.activations.policy": "Nvme"}), NODE, Overrides(corrections=corrections)
    )
    assert isinstance(forced, Infeasible), "all of it on NVMe, as the spec asks, is what failed"


def test_a_smaller_micro_batch_is_the_last_rung_and_only_after_a_failure() -> None:
    forced = {
        "spec.memory.advanced.activations.policy": "Keep", "spec.memory.advanced.optimizer.placement": "Device",
        "spec.memory.advanced.parameters.placement": "Resident", "spec.memory.advanced.optimizer.overlap": "None",
    }  # fmt: skip
    before = planned(forced)
    limit = before.bytes[Tier.DEVICE].total
    changes = {**forced, "spec.memory.budget.device": str(limit)}
    tight = place(job(changes), cluster())
    assert isinstance(tight, Placement)
    corrections = corrections_after([failed(tight.plan)])
    assert isinstance(place(job(changes), cluster(corrections=replace(corrections, after_failure=False))), Unplaceable)
    after = place(job(changes), cluster(corrections=corrections))
    assert isinstance(after, Placement)
    assert after.plan.micro_batch_size < tight.plan.micro_batch_size
    size, number = after.plan.micro_batch_size, after.plan.num_micro_batches
    assert size * number == job().spec.training.global_batch_size
    assert "(changes only rounding)" in change(tight.plan, after.plan)


def test_micro_batches_shrink_at_least_by_half_and_divide_the_batch() -> None:
    asked = job({"spec.training.globalBatchSize": 36, "spec.training.microBatchSize": 18})
    assert [one.spec.training.micro_batch_size for one in smaller_micro_batches(asked, 1)] == [9, 4, 2, 1]
    assert [one.spec.training.micro_batch_size for one in smaller_micro_batches(asked, 4)] == [9, 3, 1]


def test_modes_that_do_not_choose_plans_are_not_corrected() -> None:
    corrections = Corrections(device=2.0, host=2.0, nvme=2.0)
    advised = {"spec.memory.mode": "Advise"}
    assert planned(advised, corrections).bytes == planned(advised).bytes


# --- down again -------------------------------------------------------------------------------------------------------


def test_a_long_attempt_with_much_room_is_followed_by_what_was_seen_of_it() -> None:
    before = planned()
    failure = failed(within(before, device=int(1.1 * before.bytes[Tier.DEVICE].predicted)))
    careful = corrections_after([failure, replace(failure, attempt=2)])
    last = planned(corrections=careful)
    counted = last.bytes[Tier.DEVICE]
    peaks = {Tier.DEVICE: int(0.7 * counted.total)}
    seen = relaxed([failure, replace(failure, attempt=2)], last, peaks, 3600.0)
    assert 1.1 < seen.device < careful.device
    assert seen.device >= peaks[Tier.DEVICE] / counted.predicted
    both = [failure, replace(failure, attempt=2)]
    assert relaxed(both, last, peaks, 600.0) == careful, "too short"
    assert relaxed(both, last, {Tier.DEVICE: int(0.8 * counted.total)}, 3600.0) == careful, "too little room"
    assert relaxed(both, last, {}, 3600.0) == careful, "not seen"
    killed = [*both, failed(last, OOM_KILLED, 3)]
    assert relaxed(killed, last, peaks, 3600.0) == corrections_after(killed), "nobody saw what no plan counts"


def test_a_plan_is_not_changed_for_a_small_gain() -> None:
    plan = planned()
    seconds = plan.prediction.step_seconds
    faster = [
        plan.model_copy(update={"prediction": plan.prediction.model_copy(update={"step_seconds": share * seconds})})
        for share in (0.89, 0.91)
    ]
    assert [worth_relaxing(plan, one) for one in faster] == [True, False]


# --- repetitions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", [DEVICE, HOST, NVME, OOM_KILLED])
def test_the_same_plan_within_the_same_limits_repeats_its_failure(reason: str) -> None:
    plan = planned(SPILLED)
    failure = failed(plan, reason)
    assert repeats([failure], plan, failure.pod_memory_bytes)
    assert not repeats([], plan, failure.pod_memory_bytes)


def test_more_room_is_no_repetition_but_for_a_full_volume() -> None:
    plan = planned(SPILLED)
    roomy = within(plan, device=2 * plan.budget[Tier.DEVICE])
    assert not repeats([failed(plan, DEVICE)], roomy, GIB)
    assert not repeats([failed(plan, OOM_KILLED)], plan, 2 * GIB)
    assert repeats([failed(plan, NVME)], within(plan, nvme=2 * plan.budget[Tier.NVME]), 2 * GIB)
