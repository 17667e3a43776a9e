"""What pods were seen to take lowers the request of the next: for the same model, plan, ranks and workload alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases.job_documents import job
from spillway.api.profiles import LowerBound, LowerBounds, MemoryProfile, ObservedPod
from spillway.api.training_job import TrainingJob
from spillway.feedback.ladder import MemoryFailure
from spillway.feedback.pod_evidence import (
    POD_MARGIN,
    PodEvidence,
    PodPeak,
    evidence_of,
    may_be_seen,
    with_peak,
    workload,
)
from spillway.feedback.profiles import (
    memory_fingerprint,
    model_fingerprint,
    observed_corrections,
    observed_pods,
    profile_after_failure,
    profile_update,
)
from spillway.feedback.retries import OOM_KILLED
from spillway.placement.cluster_view import ClusterView, NodeView
from spillway.placement.place import Placement, place
from spillway.plan import Tier
from spillway.planning.corrections import Corrections
from spillway.planning.pod_resources import pod_resources
from spillway.units import GIB, MIB

NOW = "2026-11-23T04:00:00Z"
MOST_WASTE = 0.08
"""of a request, by a run that takes what the one before it took"""
SPEC = job().spec
IMAGE = "trainer:1"


def cluster(**known: Any) -> ClusterView:
    return ClusterView((NodeView("node-a", {}, (), 8.0, 16 * GIB, 100 * GIB, {}),), trainer_image=IMAGE, **known)


def placed(changes: dict[str, Any] | None = None, **known: Any) -> Placement:
    found = place(job(changes), cluster(**known))
    assert isinstance(found, Placement), found
    return found


PLAIN = placed()
COUNTED = PLAIN.pod.memory_bytes
OWN = workload(SPEC, PLAIN.plan, IMAGE)


def whole(peak: float, limit: float = 4.0) -> PodPeak:
    """In multiples of what is counted."""
    return PodPeak(int(peak * COUNTED), COUNTED, int(limit * COUNTED), is_whole=True, workload=OWN)


def after(*runs: PodPeak, changes: dict[str, Any] | None = None, existing: MemoryProfile | None = None) -> Any:
    """The profile after attempts <job>-1, each of a job of its own, reported so."""
    made = PLAIN if changes is None else placed(changes)
    for number, run in enumerate(runs):
        peaks = {"device": made.plan.bytes[Tier.DEVICE].predicted}
        found = profile_update(existing, job(changes).spec, made.plan, peaks, f"run{number}-1", NOW, run)
        existing = found or existing
    assert existing is not None
    return existing


def second(*profiles: MemoryProfile, changes: dict[str, Any] | None = None, **known: Any) -> Placement:
    """The next job where these profiles of its model are known, as the operator puts them together."""
    fingerprint = model_fingerprint(job(changes).spec, "Cpu")
    corrections = {fingerprint: observed_corrections(profiles)}
    peaks = {profiles[0].fingerprint: {"device": MIB}}
    return placed(
        changes, model_corrections=corrections, observed_pods=observed_pods(profiles), observed_peaks=peaks, **known
    )


# --- the request ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.4, 0.7, 0.95, 1.0, 1.6, 3.0])
def test_after_one_run_the_next_pod_requests_what_it_took_and_a_margin(share: float) -> None:
    found = second(after(whole(share)))
    request, peak = found.pod.memory_bytes, share * COUNTED
    assert 0 < (request - peak) / request <= MOST_WASTE
    assert found.plan.bytes == PLAIN.plan.bytes
    assert found.plan.unplanned_bytes == max(0, request - COUNTED)
    assert any("because in one run under this plan a pod used" in reason for reason in found.plan.reasons)
    assert found.observed is not None
    assert (found.observed.runs, found.observed.pod_memory) == (1, int(peak))


def test_a_plan_seen_without_memory_for_a_copy_of_its_states_is_taken_again() -> None:
    """After an out-of-memory failure attempts have none: what their pods took is known of them alone."""
    often = {"spec.checkpoint.everySteps": 5, "spec.training.steps": 10}
    with_copy = placed(often)
    assert with_copy.plan.snapshot_bytes > 0
    spec, plan = job(often).spec, with_copy.plan.model_copy(update={"snapshot_bytes": 0})
    peak = PodPeak(COUNTED // 2, COUNTED, 4 * COUNTED, is_whole=True, workload=workload(spec, plan, IMAGE))
    profile = profile_update(None, spec, plan, {"device": MIB}, "run-1", NOW, peak)
    assert profile is not None
    found = second(profile, changes=often)
    assert found.plan.snapshot_bytes == 0
    assert found.observed is not None and found.observed.runs == 1
    assert any(
        "the request is based on earlier pods, which had no memory for a copy" in reason
        for reason in found.plan.reasons
    )


def test_without_evidence_the_request_is_what_is_counted() -> None:
    assert placed(observed_pods={"another": PodEvidence(OWN, MIB, MIB, COUNTED, 9)}) == PLAIN
    assert PLAIN.pod == pod_resources(SPEC, PLAIN.plan, 1)


def test_what_was_seen_and_a_margin_are_requested() -> None:
    found = second(after(whole(0.5)))
    assert found.pod.memory_bytes == pytest.approx((1 + POD_MARGIN) * 0.5 * COUNTED, abs=MIB)
    assert found.observed is not None and f"this plus {POD_MARGIN:.0%}" in found.observed.message


def test_runs_that_differ_get_what_the_highest_recent_one_took() -> None:
    seen = observed_pods([after(*[whole(0.4)] * 3, whole(0.8), *[whole(0.4)] * 12)])
    (evidence,) = seen.values()
    assert evidence.request_bytes(COUNTED) >= 0.8 * COUNTED


def test_a_high_peak_of_long_ago_is_forgotten() -> None:
    (evidence,) = observed_pods([after(whole(0.8), *[whole(0.4)] * 16)]).values()
    assert evidence.request_bytes(COUNTED) < 0.45 * COUNTED
    assert evidence.num_runs == 17


@given(st.lists(st.integers(1, 8 * GIB), min_size=1, max_size=20), st.integers(64 * MIB, 4 * GIB))
def test_request_covers_recent_peaks_and_stays_near_the_counted_bytes(peaks: list[int], counted: int) -> None:
    known: ObservedPod | None = None
    for number, peak in enumerate(peaks):
        told = PodPeak(peak, counted, 16 * GIB, is_whole=True, workload=OWN)
        known = with_peak(known, SPEC, told, f"job-{number}") or known
    assert known is not None
    profile = MemoryProfile(fingerprint="0" * 16, pod=known)
    evidence = evidence_of(profile)
    assert evidence is not None
    request = evidence.request_bytes(counted)
    assert int(0.25 * counted) <= request < 4 * counted + MIB
    assert request >= min(max(peaks[-16:]), 4 * counted)


# --- what is believed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "told",
    [
        replace(whole(0.5), is_whole=False),
        whole(0.99, limit=1.0),
        whole(2.0, limit=1.0),
        replace(whole(0.5), peak_bytes=0),
        replace(whole(0.5), counted_bytes=0),
    ],
    ids=["part-of-a-run", "page-cache", "another-cgroup", "nothing", "nothing-counted"],
)
def test_a_peak_that_says_nothing_of_the_pod_is_not_kept(told: PodPeak) -> None:
    assert with_peak(None, SPEC, told, "demo-1") is None


@pytest.mark.parametrize(
    "changes",
    [
        {"spec.parallelism": {"nodes": 2, "device": "Cpu"}},
        {"spec.memory.mode": "Advise"},
        {"spec.memory.mode": "Disabled", "spec.memory.budget.host": "1Gi"},
    ],
)
def test_where_one_pod_does_not_speak_for_the_next_nothing_is_kept_or_used(changes: dict[str, Any]) -> None:
    other = job(changes).spec
    assert not may_be_seen(other)
    assert with_peak(None, other, whole(0.5), "demo-1") is None
    plain = placed(changes)
    key, own = memory_fingerprint(other, plain.plan), workload(other, plain.plan, IMAGE)
    assert placed(changes, observed_pods={key: PodEvidence(own, 300 * MIB, 300 * MIB, COUNTED, 9)}) == plain


@pytest.mark.parametrize(
    "changes",
    [
        {"spec.data": {"text": {"path": "/data"}}},
        {"spec.pod.image": "another"},
        {"spec.pod.env": [{"name": "A", "value": "b"}]},
        {"spec.pod": {"labels": {"a": "b"}}},
        {"spec.training.steps": 2},
        {"spec.pod.resources.cpu": "3"},
        {"spec.data.evaluation": {"everySteps": 1}},
    ],
)
def test_another_workload_under_the_same_plan_gets_what_is_counted(changes: dict[str, Any]) -> None:
    found = second(after(whole(0.5)), changes=changes)
    assert found.pod.memory_bytes == placed(changes).pod.memory_bytes
    assert found.observed is not None and found.observed.runs == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"spec.training.seed": 7},
        {"spec.training.optimizer.learningRate": 0.01},
        {"spec.checkpoint.claim": "other"},
        {"spec.lifecycle.maxRestarts": 9},
    ],
)
def test_what_moves_no_byte_of_a_pod_is_no_other_workload(changes: dict[str, Any]) -> None:
    found = second(after(whole(0.5)), changes=changes)
    assert found.observed is not None and found.observed.runs == 1


def test_job_without_an_image_gets_the_counted_bytes_after_an_upgrade() -> None:
    profile = after(whole(0.5))
    seen = {"observed_pods": observed_pods([profile]), "observed_peaks": {profile.fingerprint: {"device": MIB}}}
    upgraded = place(job(), replace(cluster(**seen), trainer_image="trainer:2"))
    assert isinstance(upgraded, Placement) and upgraded.pod.memory_bytes == COUNTED
    named = place(job({"spec.pod.image": IMAGE}), replace(cluster(**seen), trainer_image="trainer:2"))
    assert isinstance(named, Placement) and named.pod.memory_bytes < COUNTED


def test_a_node_whose_cores_give_more_threads_is_another_workload() -> None:
    more = PLAIN.plan.optimizer.model_copy(update={"num_threads": 1 + PLAIN.plan.optimizer.num_threads})
    assert workload(SPEC, PLAIN.plan.model_copy(update={"optimizer": more}), IMAGE) != OWN


def test_bytes_counted_beyond_the_observed_ones_are_added_to_the_request() -> None:
    (evidence,) = observed_pods([after(whole(0.5))]).values()
    more = evidence.request_bytes(COUNTED + 100 * MIB) - evidence.request_bytes(COUNTED)
    assert more == 100 * MIB
    assert evidence.request_bytes(COUNTED - 100 * MIB) == evidence.request_bytes(COUNTED)


def test_of_runs_that_were_counted_differently_the_least_counts() -> None:
    known = with_peak(None, SPEC, whole(0.5), "demo-1")
    known = with_peak(known, SPEC, replace(whole(0.5), counted_bytes=COUNTED + GIB), "other-1")
    assert known is not None and (known.count, known.counted) == (2, COUNTED)


def test_another_plan_of_the_model_gets_what_is_counted() -> None:
    changes = {"spec.memory.advanced.activations.policy": "Recompute"}
    assert second(after(whole(0.5)), changes=changes).pod == placed(changes).pod


def test_reports_of_one_attempt_count_once_and_only_rise() -> None:
    known = with_peak(None, SPEC, whole(0.5), "demo-1")
    assert known is not None
    assert with_peak(known, SPEC, whole(0.4), "demo-1") is None
    higher = with_peak(known, SPEC, whole(0.6), "demo-1")
    assert higher is not None
    assert (higher.count, higher.attempts, higher.recent) == (1, ("demo-1",), (int(0.6 * COUNTED),))
    other = with_peak(higher, SPEC, whole(0.55), "other-1")
    assert other is not None and (other.count, len(other.recent)) == (2, 2)


def test_a_run_of_another_workload_begins_anew() -> None:
    known = with_peak(None, SPEC, whole(0.5), "demo-1")
    moved = with_peak(known, SPEC, replace(whole(0.7), workload="0" * 16), "demo-2")
    assert moved is not None
    assert (moved.count, moved.attempts) == (1, ("demo-2",))


def test_a_profile_that_somebody_filled_with_nonsense_lowers_nothing() -> None:
    for recent in ((), (0,), (0, 0)):
        pod = ObservedPod(workload=OWN, counted=COUNTED, recent=recent, p95=5)
        assert evidence_of(MemoryProfile(fingerprint="0" * 16, pod=pod)) is None
    tiny = ObservedPod(workload=OWN, counted=0, recent=(1,), p95=0)
    (evidence,) = observed_pods([MemoryProfile(fingerprint="0" * 16, pod=tiny)]).values()
    assert evidence.request_bytes(COUNTED) >= 0.25 * COUNTED


def test_a_profile_of_before_has_no_evidence() -> None:
    profile = profile_update(None, SPEC, PLAIN.plan, {"device": MIB}, "demo-1", NOW)
    assert profile is not None and profile.pod is None
    assert observed_pods([profile]) == {}
    assert after(whole(0.5), existing=profile).pod.count == 1


def test_what_is_written_is_read_again() -> None:
    profile = after(whole(0.5), whole(0.6))
    assert MemoryProfile.model_validate(profile.model_dump(mode="json", exclude_none=True)) == profile


# --- beside memory that ran out ---------------------------------------------------------------------------------------


def ran_out(limit: int, asked: TrainingJob | None = None, existing: MemoryProfile | None = None) -> Any:
    failure = MemoryFailure(1, OOM_KILLED, PLAIN.plan, limit, max(0, COUNTED - limit))
    return profile_after_failure(existing, (asked or job()).spec, failure, NOW)


@pytest.mark.parametrize("limit", [0.6, 1.0])
def test_a_pod_that_ran_out_is_a_lower_bound_until_one_took_more(limit: float) -> None:
    bound = ran_out(int(limit * COUNTED))
    below = after(whole(0.5), existing=bound)
    assert second(below).pod.memory_bytes >= COUNTED
    above = after(whole(0.5), whole(1.3), existing=bound)
    request = second(above).pod.memory_bytes
    assert 1.3 * COUNTED <= request <= 1.3 * COUNTED / (1 - MOST_WASTE)


def test_pod_that_ran_out_below_its_count_enlarges_no_other_plan() -> None:
    bound = ran_out(int(0.6 * COUNTED))
    assert (bound.lower_bounds.pod.planned, bound.lower_bounds.pod.held) == (COUNTED, int(0.6 * COUNTED))
    assert observed_corrections([bound]).pod == 1.0
    assert ran_out(int(0.5 * COUNTED), existing=bound) is None, "less was no news"
    assert ran_out(int(0.7 * COUNTED), existing=bound) is not None


@pytest.mark.parametrize("kind", ["device", "host"])
def test_nothing_is_lowered_while_a_tier_ran_out_higher_than_any_peak(kind: str) -> None:
    bounds = LowerBounds(**{kind: LowerBound(planned=100, held=150)})  # type: ignore[arg-type]
    profile = after(whole(0.5)).model_copy(update={"lower_bounds": bounds})
    assert observed_pods([profile]) == {}


def test_a_job_that_ran_out_itself_is_not_lowered() -> None:
    profile = after(whole(0.5))
    key = {profile.fingerprint: observed_pods([profile])[profile.fingerprint]}
    own = Corrections(device=1.3, after_failure=True)
    found = placed(observed_pods=key, corrections=own)
    assert found == placed(corrections=own)


def test_second_job_is_sized_right_at_once_when_the_prior_is_off_by_2x() -> None:
    """Killed at what is counted and at 1.25 and 1.875 times that; the fourth attempt gets more and takes 2."""
    profile: MemoryProfile | None = None
    for limit in (1.0, 1.25, 1.875):
        failure = MemoryFailure(
            1, OOM_KILLED, PLAIN.plan.model_copy(update={"unplanned_bytes": int((limit - 1.0) * COUNTED)}),
            int(limit * COUNTED),
        )  # fmt: skip
        profile = profile_after_failure(profile, SPEC, failure, NOW) or profile
    profile = after(whole(2.0), existing=profile)
    request = second(profile).pod.memory_bytes
    assert 0 <= (request - 2.0 * COUNTED) / request <= MOST_WASTE


# --- tiers against the pod --------------------------------------------------------------------------------------------


def test_no_rank_held_more_in_memory_than_its_pod() -> None:
    planned = PLAIN.plan.bytes[Tier.DEVICE].predicted
    pod = PodPeak(2 * planned, COUNTED, COUNTED, is_whole=False, workload=OWN)
    found = profile_update(None, SPEC, PLAIN.plan, {"device": 3 * planned}, "demo-1", NOW, pod)
    assert found is not None and found.peaks.device is not None
    assert (found.peaks.device.max, found.clamped) == (2 * planned, True)
    for other in (None, replace(pod, limit_bytes=planned), replace(pod, peak_bytes=0)):
        believed = profile_update(None, SPEC, PLAIN.plan, {"device": 3 * planned}, "demo-1", NOW, other)
        assert believed is not None and believed.peaks.device is not None
        assert believed.peaks.device.max == 3 * planned
