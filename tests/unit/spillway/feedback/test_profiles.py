"""What was measured becomes figures to plan with: nodes as they are given, peaks only as far as they are plausible."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases.job_documents import job
from spillway.api.pod import Member
from spillway.api.profiles import MemoryProfile, NodeProfileSpec
from spillway.feedback.ladder import MemoryFailure
from spillway.feedback.profiles import (
    evidence,
    measured,
    memory_fingerprint,
    model_fingerprint,
    observed_corrections,
    observed_peaks,
    profile_after_failure,
    profile_name,
    profile_update,
    ratio,
)
from spillway.feedback.recent_peaks import plausible, quantile
from spillway.plan import MemberPlan, MemoryPlan, Tier
from spillway.planning.corrections import NO_CORRECTIONS, Corrections
from spillway.planning.hardware import NodeSpec, local_node, resolve_node
from spillway.planning.planner import Overrides, make_plan
from spillway.units import GIB, MIB

NODE = local_node(4, 8 * GIB, 8 * GIB, 64 * GIB)
NOW, LATER = "2026-11-21T14:00:00Z", "2026-11-21T15:00:00Z"
SPILLED = {"spec.memory.advanced.activations.policy": "Nvme", "spec.memory.advanced.optimizer.placement": "Host"}


def plan(changes: dict[str, Any] | None = None, node: NodeSpec = NODE) -> MemoryPlan:
    decided = make_plan(job(changes), node)
    assert isinstance(decided, MemoryPlan), decided
    return decided


def fingerprint(changes: dict[str, Any] | None = None, node: NodeSpec = NODE) -> str:
    return memory_fingerprint(job(changes).spec, plan(changes, node))


@cache
def unchanged() -> str:
    return fingerprint()


# --- nodes ------------------------------------------------------------------------------------------------------------


def profile(**figures: Any) -> NodeProfileSpec:
    return NodeProfileSpec.model_validate({"deviceKind": "Cpu", **figures})


def test_what_a_profile_leaves_out_stays_as_it_is() -> None:
    found = measured(profile(hostMemory="2Gi"), NODE)
    changed = {field.name for field in fields(NodeSpec) if getattr(found, field.name) != getattr(NODE, field.name)}
    assert changed == {"host_bytes"}, "capacities alone are no measured rates, and no other name"
    assert found.host_bytes == 2 * GIB


def test_every_figure_of_a_profile_reaches_the_node() -> None:
    figures: dict[str, Any] = {
        "numDevices": 3, "deviceMemory": "5Gi", "bfloat16FlopsPerSecond": "7e12", "float32FlopsPerSecond": "8e12",
        "deviceBytesPerSecond": "9e11", "interconnectBytesPerSecond": "1.1e9", "networkBytesPerSecond": "1.2e9",
        "numCores": 13, "hostMemory": "14Gi", "dramBytesPerSecond": "1.5e9", "cpuBytesPerSecond": "1.6e9",
        "nvmeCapacity": "17Gi", "nvmeReadBytesPerSecond": "1.8e9", "nvmeWriteBytesPerSecond": "1.9e9",
        "bfloat16ValuesPerSecond": "2.5e9", "float32ValuesPerSecond": "2.6e9", "operationOverheadSeconds": "3e-5",
        "link": {"h2dBytesPerSecond": "2.1e9", "d2hBytesPerSecond": "2.2e9", "duplexEfficiency": "0.3",
                 "devicesPerRootPort": 4},
    }  # fmt: skip
    found = measured(profile(**figures), resolve_node("cpu"))
    assert found == NodeSpec(
        name="cpu-measured", device_kind="Cpu", num_devices=3, device_bytes=5 * GIB, bfloat16_flops_per_second=7e12,
        float32_flops_per_second=8e12, device_bytes_per_second=9e11, link=found.link,
        interconnect_bytes_per_second=1.1e9, network_bytes_per_second=1.2e9, num_cores=13, host_bytes=14 * GIB,
        dram_bytes_per_second=1.5e9, cpu_bytes_per_second=1.6e9, nvme_bytes=17 * GIB,
        nvme_read_bytes_per_second=1.8e9, nvme_write_bytes_per_second=1.9e9,
        nvme_rated_bytes=found.nvme_rated_bytes, bfloat16_values_per_second=2.5e9,
        float32_values_per_second=2.6e9, operation_overhead_seconds=3e-5,
    )  # fmt: skip
    link = found.link
    assert (link.h2d_bytes_per_second, link.d2h_bytes_per_second) == (2.1e9, 2.2e9)
    assert (link.duplex_efficiency, link.devices_per_root_port) == (0.3, 4)


def test_a_profile_has_a_field_for_every_figure_of_a_node() -> None:
    """But for what a drive is rated for, and what a core encrypts: nobody measures these."""
    renamed = {"device_bytes": "device_memory", "host_bytes": "host_memory", "nvme_bytes": "nvme_capacity"}
    unmeasured = {"name", "nvme_rated_bytes", "cipher_bytes_per_second"}
    figures = {renamed.get(field.name, field.name) for field in fields(NodeSpec)} - unmeasured
    assert figures == set(NodeProfileSpec.model_fields) - {"source", "measured_time"}


def test_rates_are_rounded_so_that_nodes_measured_alike_are_alike() -> None:
    one, other = (measured(profile(dramBytesPerSecond=rate), NODE) for rate in ("50123456789", "49987654321"))
    assert one == other


# --- fingerprints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"spec.model.config.numLayers": 5},
        {"spec.model.config.dropout": "0.1"},
        {"spec.model.precision.compute": "float32"},
        {"spec.training.sequenceLength": 128},
        {"spec.training.microBatchSize": 2},
        {"spec.parallelism": {"nodes": 2, "strategy": "Ddp"}},
        {"spec.memory.advanced.optimizer.placement": "Host"},
        {"spec.memory.advanced.activations.policy": "Recompute"},
        {"spec.memory.mode": "Disabled", "spec.memory.budget.host": "1Gi"},
    ],
)
def test_what_the_bytes_depend_on_changes_the_fingerprint(changes: dict[str, Any]) -> None:
    assert fingerprint(changes) != unchanged()


@pytest.mark.parametrize(
    "changes",
    [
        {"metadata.name": "another"},
        {"spec.training.steps": 7},
        {"spec.training.seed": 7},
        {"spec.training.optimizer.learningRate": "1e-5"},
        {"spec.lifecycle.maxRestarts": 7},
        {"spec.memory.budget.device": "7Gi"},
        {"spec.data": {"text": {"path": "/data"}}},
    ],
)
def test_what_they_do_not_depend_on_does_not(changes: dict[str, Any]) -> None:
    assert fingerprint(changes) == unchanged()


def test_faster_hardware_keeps_the_fingerprint_and_another_device_does_not() -> None:
    assert fingerprint(node=local_node(2, 8 * GIB, 8 * GIB, 64 * GIB)) == unchanged()
    assert fingerprint(node=resolve_node("1xh100")) != unchanged()


def test_micro_batch_count_changes_only_weight_stationary_fingerprints() -> None:
    for order, counts in (("WeightStationary", True), ("InOrder", False)):
        made = plan()
        made = made.model_copy(update={"parameters": made.parameters.model_copy(update={"order": order})})
        more = made.model_copy(update={"num_micro_batches": 2 * made.num_micro_batches})
        assert (memory_fingerprint(job().spec, made) != memory_fingerprint(job().spec, more)) is counts


def test_sweep_has_memory_and_model_fingerprints_of_its_own() -> None:
    solo = plan()
    member = MemberPlan(name="a", plan=solo, parked_bytes=5, num_steps=7)
    swept = solo.model_copy(update={"members": (member, member)})
    assert memory_fingerprint(job().spec, swept) != memory_fingerprint(job().spec, solo)
    spec = job().spec.model_copy(update={"members": (Member(name="a"), Member(name="b"))})
    assert model_fingerprint(spec, "Cpu") != model_fingerprint(job().spec, "Cpu")


def test_a_profile_is_named_after_model_and_fingerprint() -> None:
    name = profile_name(job().spec, plan())
    assert name == f"llama-5.05m-{fingerprint()}"
    assert len(name) < 63


# --- peaks ------------------------------------------------------------------------------------------------------------


SPEC, PLAN = job(SPILLED).spec, plan(SPILLED)


def update(
    existing: MemoryProfile | None, peaks: dict[str, int], attempt: str = "demo-1", now: str = NOW
) -> MemoryProfile | None:
    return profile_update(existing, SPEC, PLAN, peaks, attempt, now)


def updated(existing: MemoryProfile | None, peaks: dict[str, int], attempt: str = "demo-1") -> MemoryProfile:
    found = update(existing, peaks, attempt)
    assert found is not None
    return found


PLANNED = {tier.value: plan(SPILLED).bytes[tier].total for tier in Tier}


def test_the_first_report_makes_the_profile() -> None:
    found = updated(None, PLANNED)
    assert found.fingerprint == fingerprint(SPILLED)
    assert found.model == "llama, 5.05 M parameters, bfloat16"
    assert observed_peaks(found) == PLANNED
    assert (found.count, found.attempt, found.observed_time, found.clamped) == (1, "demo-1", NOW, False)


def test_higher_peak_of_an_attempt_is_kept_and_a_lower_one_ignored() -> None:
    first = updated(None, PLANNED)
    higher = updated(first, {**PLANNED, "device": PLANNED["device"] + MIB})
    assert observed_peaks(higher)["device"] == PLANNED["device"] + MIB
    assert higher.count == 1
    assert update(higher, {**PLANNED, "device": PLANNED["device"] - MIB}) is None
    assert update(higher, {}) is None


def test_the_same_report_is_written_once() -> None:
    assert update(updated(None, PLANNED), PLANNED, now=LATER) is None


def test_another_attempt_counts_and_its_peak_is_the_last_one() -> None:
    second = updated(updated(None, PLANNED), {**PLANNED, "device": PLANNED["device"] - MIB}, "demo-2")
    assert (second.count, second.attempt) == (2, "demo-2")
    assert second.peaks.device is not None
    assert (second.peaks.device.max, second.peaks.device.last) == (PLANNED["device"], PLANNED["device"] - MIB)


def test_alternating_jobs_count_once_each_and_repeats_write_nothing() -> None:
    known = updated(updated(None, PLANNED, "a-1"), PLANNED, "b-1")
    assert (known.count, known.last_attempts) == (2, ("a-1", "b-1"))
    for attempt in ("a-1", "b-1", "a-1"):  # also from an operator that has just started
        assert update(known, PLANNED, attempt) is None
    third = updated(known, PLANNED, "a-2")
    assert (third.count, third.attempt, third.last_attempts) == (3, "a-2", ("b-1", "a-2"))


def test_higher_peak_of_a_counted_attempt_raises_max_but_not_the_count() -> None:
    known = updated(updated(None, PLANNED, "a-1"), PLANNED, "b-1")
    higher = updated(known, {"device": PLANNED["device"] + MIB}, "a-1")
    assert higher.peaks.device is not None
    assert (higher.peaks.device.max, higher.peaks.device.last) == (PLANNED["device"] + MIB, PLANNED["device"])
    assert (higher.count, higher.attempt) == (2, "b-1")


def test_a_profile_without_the_list_of_attempts_goes_on_from_its_last_one() -> None:
    old = updated(None, PLANNED).model_copy(update={"last_attempts": ()})
    assert update(old, PLANNED) is None
    assert updated(old, PLANNED, "demo-2").count == 2


def test_a_profile_remembers_so_many_jobs_and_no_more() -> None:
    known = updated(None, PLANNED, "job-0-1")
    for number in range(1, 70):
        known = updated(known, PLANNED, f"job-{number}-1")
    assert (known.count, len(known.last_attempts)) == (70, 64)
    assert MemoryProfile.model_validate(known.model_dump(mode="json", exclude_none=True)) == known


@pytest.mark.parametrize(("factor", "believed"), [(0.01, 0.25), (0.25, 0.25), (1.0, 1.0), (4.0, 4.0), (100.0, 4.0)])
def test_a_figure_far_from_its_prediction_is_cut_and_marked(factor: float, believed: float) -> None:
    found = updated(None, {"host": int(factor * PLANNED["host"])})
    assert observed_peaks(found)["host"] == pytest.approx(believed * PLANNED["host"], abs=1)
    assert found.clamped == (factor != believed)


def test_a_mark_stays() -> None:
    marked = updated(None, {"host": 10**15})
    assert updated(marked, PLANNED, "demo-2").clamped


def test_a_tier_without_a_report_is_left_as_it_is() -> None:
    first = updated(None, PLANNED)
    assert observed_peaks(updated(first, {"host": PLANNED["host"]}, "demo-2")) == PLANNED
    assert update(None, {}) is None
    assert update(None, {"device": 0, "host": 0, "nvme": 0}) is None


def test_bytes_in_a_tier_that_the_plan_does_not_use_are_not_believed() -> None:
    assert profile_update(None, job().spec, plan(), {"nvme": 5}, "demo-1", NOW) is None


@given(planned=st.integers(1, 2**50), reported=st.integers(0, 2**60))
def test_what_is_believed_is_in_the_plausible_range(planned: int, reported: int) -> None:
    believed = plausible(planned, reported)
    assert int(0.25 * planned) <= believed <= int(4.0 * planned)
    assert believed == reported or not 0.25 * planned <= reported <= 4.0 * planned


@given(st.lists(st.tuples(st.integers(0, 2**40), st.sampled_from(["demo-1", "demo-2"])), max_size=8))
def test_the_largest_peak_never_falls_and_attempts_only_rise(reports: list[tuple[int, str]]) -> None:
    known: MemoryProfile | None = None
    largest = count = 0
    for peak, attempt in reports:
        known = update(known, {"device": peak}, attempt) or known
        if known is not None:
            assert observed_peaks(known)["device"] >= largest
            assert known.count >= count
            largest, count = observed_peaks(known)["device"], known.count


def test_a_profile_is_what_its_crd_allows() -> None:
    document = updated(None, PLANNED).model_dump(mode="json", exclude_none=True)
    assert MemoryProfile.model_validate(document) == updated(None, PLANNED)
    assert document["peaks"]["device"]["max"] == str(PLANNED["device"])
    assert len(document["plan"]) <= 512


def test_the_evidence_says_observed_and_planned() -> None:
    found = evidence("llama-x", plan(SPILLED), {"device": 50 * MIB})
    assert found.message.startswith("observed peaks: device 50.0 MiB of ")
    assert found.peak is not None
    assert (found.profile, found.peak.device, found.peak.host) == ("llama-x", 50 * MIB, None)


# --- what ran out, and what the next job makes of it ------------------------------------------------------------------

RESIDENT = plan()
DEVICE_BYTES = RESIDENT.bytes[Tier.DEVICE].predicted


def failure(
    reason: str = "DeviceOutOfMemory", times: float = 1.05, changes: dict[str, Any] | None = None
) -> MemoryFailure:
    made = plan(changes) if changes else RESIDENT
    limit = int(times * made.bytes[Tier.DEVICE].predicted)
    return MemoryFailure(1, reason, made.model_copy(update={"budget": {**made.budget, Tier.DEVICE: limit}}), GIB)


def after(*failures: MemoryFailure, existing: MemoryProfile | None = None) -> MemoryProfile:
    for one in failures:
        existing = profile_after_failure(existing, job().spec, one, NOW) or existing
    assert existing is not None
    return existing


def test_a_profile_remembers_the_largest_lower_bound_of_each_kind() -> None:
    found = after(failure(times=1.05), failure(times=1.6), failure(times=1.3), failure("OOMKilled"))
    bounds = found.lower_bounds
    assert bounds.device is not None and ratio(bounds.device) == pytest.approx(1.6, rel=1e-3)
    assert bounds.pod is not None and bounds.pod.held == GIB
    assert (bounds.host, bounds.nvme) == (None, None)
    assert profile_after_failure(found, job().spec, failure(times=1.3), LATER) is None, "says nothing new"


def test_a_bound_is_plausible_or_cut_and_marked() -> None:
    found = after(failure(times=40.0))
    assert found.clamped
    assert found.lower_bounds.device is not None and ratio(found.lower_bounds.device) == 4.0


def test_plan_predicted_to_exceed_its_limit_yields_no_evidence() -> None:
    """Mode Advise and Disabled carry out what the spec says: running out was predicted."""
    assert profile_after_failure(None, job().spec, failure(times=0.5), NOW) is None
    assert profile_after_failure(None, job().spec, failure(times=1.0), NOW) is not None


def test_a_second_job_of_the_model_starts_where_the_first_one_ran_out() -> None:
    found = after(failure(times=1.2))
    corrections = observed_corrections([found])
    assert corrections.device == pytest.approx(1.2 * 1.25, rel=1e-3)
    assert (corrections.host, corrections.nvme, corrections.pod) == (1.0, 1.0, 1.0)
    assert not corrections.after_failure, "no smaller micro-batch for a job that did not fail"
    assert "ran out at 1.20" in corrections.reasons[0]


def test_observed_peak_replaces_the_bound_with_a_small_margin() -> None:
    ran_out = after(failure(times=1.2))
    peaks = {"device": int(1.8 * DEVICE_BYTES)}
    seen = profile_update(ran_out, job().spec, plan(), peaks, "demo-2", LATER)
    assert seen is not None
    assert observed_corrections([seen]).device == pytest.approx(1.8 * 1.03, rel=1e-3)
    under_another_plan = after(failure(times=1.2, changes=SPILLED))
    assert observed_corrections([seen, under_another_plan]).device == pytest.approx(1.8 * 1.03, rel=1e-3)


def test_peaks_below_the_prediction_make_no_plan_smaller() -> None:
    seen = profile_update(None, job().spec, plan(), {"device": int(0.8 * DEVICE_BYTES)}, "demo-1", NOW)
    assert seen is not None
    assert observed_corrections([seen]) == NO_CORRECTIONS
    assert observed_corrections([]) == NO_CORRECTIONS


def test_peaks_are_compared_with_the_prediction_not_the_corrected_total() -> None:
    corrected = make_plan(job(), NODE, Overrides(corrections=Corrections(device=2.0)))
    assert isinstance(corrected, MemoryPlan)
    assert corrected.bytes[Tier.DEVICE].total == 2 * DEVICE_BYTES
    seen = profile_update(None, job().spec, corrected, {"device": int(1.9 * DEVICE_BYTES)}, "demo-1", NOW)
    assert seen is not None and seen.peaks.device is not None
    assert seen.peaks.device.planned == DEVICE_BYTES
    assert seen.fingerprint == memory_fingerprint(job().spec, plan()), "the same plan, with more room"


def test_one_model_is_known_under_every_plan_and_another_one_is_not() -> None:
    one = model_fingerprint(job().spec, "Cpu")
    same = [SPILLED, {"spec.training.microBatchSize": 2}, {"spec.memory.budget.device": "64Mi"}]
    others = [{"spec.model.config.numLayers": 5}, {"spec.training.sequenceLength": 128}, {"spec.parallelism.nodes": 2}]
    assert {model_fingerprint(job(changes).spec, "Cpu") for changes in same} == {one}
    assert one not in {model_fingerprint(job(changes).spec, "Cpu") for changes in others}
    assert one != model_fingerprint(job().spec, "Cuda")


@pytest.mark.parametrize(
    ("recent", "half", "most"), [((5,), 5, 5), ((9, 1, 1, 1, 1), 1, 9), ((9,) + (1,) * 15, 1, 1), ((1, 1, 1, 9), 1, 9)]
)
def test_quantiles_forget_what_is_long_ago(recent: tuple[int, ...], half: int, most: int) -> None:
    assert (quantile(recent, 0.5), quantile(recent, 0.95)) == (half, most)


def test_the_peaks_of_the_last_attempts_are_kept_one_for_each() -> None:
    found: MemoryProfile | None = None
    spec, made = job().spec, plan()
    for number in range(1, 21):
        for rising in (number, number + 1):
            peaks = {"device": DEVICE_BYTES - MIB + rising}
            found = profile_update(found, spec, made, peaks, f"demo-{number}", NOW) or found
    assert found is not None and found.peaks.device is not None
    base = DEVICE_BYTES - MIB
    assert [peak - base for peak in found.peaks.device.recent] == list(range(6, 22))
    assert found.peaks.device.p95 == found.peaks.device.recent[-1]
