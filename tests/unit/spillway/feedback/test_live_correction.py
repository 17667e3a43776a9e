"""What a live correction decides, and that it never moves more than the plan reserved, nor moves anything twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases.job_documents import job
from spillway.api.progress import SpillVolume
from spillway.errors import InvalidJob
from spillway.feedback.live_correction import LEAST_BYTES, LEAST_DEFICIT, MARGIN, lowered
from spillway.feedback.pod_evidence import may_be_seen
from spillway.feedback.profiles import profile_update
from spillway.plan import Infeasible, MemoryPlan, Tier
from spillway.planning.corrections import Corrections
from spillway.planning.hardware import local_node
from spillway.planning.planner import Overrides, ask, make_plan
from spillway.planning.pod_resources import PLANNED_MARGIN, tier_memory_bytes
from spillway.planning.search import Search
from spillway.units import GIB, MIB

KUBELET_EVICTS_BELOW = 0.10
"""its default: nodefs.available"""
NODE = local_node(2, 4 * GIB, 4 * GIB, 64 * GIB)
ON_NVME = {"spec.memory.advanced.activations.policy": "Nvme"}


def volume(**changes: int) -> SpillVolume:
    """Of which neighbours took 180 MiB: 60 MiB are wanted free, and 20 MiB are."""
    own = {
        "size": 400 * MIB, "free_at_start": 200 * MIB, "free": 20 * MIB,
        "num_ranks": 2, "activations": 48 * MIB, "host_room": 48 * MIB,
    }  # fmt: skip
    return SpillVolume.model_validate(own | changes)


def after(before: SpillVolume, left: int) -> SpillVolume:
    """Once all ranks have given back what they may no longer take."""
    moved = before.activations - left
    changes = {
        "activations": left,
        "host_room": before.host_room - moved,
        "free": min(before.size, before.free + moved * before.num_ranks),
    }
    return before.model_copy(update=changes)


def test_each_rank_gives_back_its_part_of_what_others_took_of_the_margin() -> None:
    assert lowered(volume()) == 28 * MIB


def test_the_margin_is_kept_before_the_kubelet_evicts() -> None:
    assert MARGIN - LEAST_DEFICIT > KUBELET_EVICTS_BELOW
    assert lowered(volume(free=int((MARGIN - LEAST_DEFICIT) * 400 * MIB))) is not None


@pytest.mark.parametrize(
    ("why", "changes"),
    [
        ("there is room", {"free": 60 * MIB}),
        ("hardly anything is missing", {"free": 57 * MIB}),
        ("the spill files fill a volume of their own", {"free_at_start": 2 * MIB, "free": 2 * MIB}),
        ("and its journal grows", {"free_at_start": 3 * MIB, "free": 0}),
        ("host memory has no room", {"host_room": 0}),
        ("nor for anything worth a correction", {"host_room": LEAST_BYTES - 4096}),
        ("no activations are left there", {"activations": 0}),
        ("more is free than there is", {"free": 401 * MIB}),
        ("or was", {"free_at_start": 401 * MIB}),
        ("nobody knows the size", {"size": 0, "free": 0, "free_at_start": 0}),
    ],
)
def test_nothing_is_corrected_where(why: str, changes: dict[str, int]) -> None:
    assert lowered(volume(**changes)) is None, why


def test_no_more_is_wanted_free_than_was_at_the_start() -> None:
    assert lowered(volume(free_at_start=30 * MIB)) == 43 * MIB
    assert lowered(volume(free_at_start=60 * MIB)) == lowered(volume(free_at_start=400 * MIB)) == 28 * MIB


def test_what_host_memory_has_no_room_for_stays() -> None:
    assert lowered(volume(host_room=5 * MIB + 100)) == 43 * MIB


SIZES = st.one_of(st.integers(0, 2**60), st.integers(0, 2048).map(lambda count: count * MIB))
VOLUMES = st.builds(
    SpillVolume, size=SIZES, free_at_start=SIZES, free=SIZES, num_ranks=st.integers(1, 2**18), activations=SIZES,
    host_room=SIZES,
)  # fmt: skip
POSSIBLE = st.builds(
    lambda size, at_start, left, num_ranks, activations, room: SpillVolume(
        size=size * MIB, free_at_start=int(size * at_start) * MIB, free=int(size * min(MARGIN, at_start) * left) * MIB,
        num_ranks=num_ranks, activations=activations * 4096, host_room=room * 4096,
    ),
    st.integers(64, 2**20), st.floats(0.05, 1), st.floats(0, 1), st.integers(1, 64), st.integers(0, 2**20),
    st.integers(0, 2**20),
)  # fmt: skip
"""of which others took nothing, or all"""


@given(VOLUMES)
def test_no_report_moves_more_than_host_memory_holds_or_activations_take(said: SpillVolume) -> None:
    left = lowered(said)
    assert left is None or LEAST_BYTES <= said.activations - left <= min(said.host_room, said.activations)


@given(POSSIBLE)
def test_what_was_corrected_is_not_corrected_again(said: SpillVolume) -> None:
    left = lowered(said)
    assert left is None or lowered(after(said, left)) is None


@given(POSSIBLE, st.floats(0, 1))
def test_corrections_end_even_if_the_file_frees_less_than_asked(said: SpillVolume, part: float) -> None:
    for _ in range(64):
        left = lowered(said)
        if left is None:
            return
        freed = int((said.activations - left) * said.num_ranks * max(part, 0.25))
        said = after(said, left).model_copy(update={"free": min(said.size, said.free + freed)})
    raise AssertionError(said)


# --- the plan that makes room for it ----------------------------------------------------------------------------------


def plan(changes: dict[str, Any], overrides: Overrides | None = None) -> MemoryPlan:
    decided = make_plan(job(changes), NODE, overrides or Overrides())
    assert isinstance(decided, MemoryPlan), decided
    return decided


def reserved(size: str, **more: object) -> dict[str, Any]:
    return ON_NVME | {"spec.memory.advanced.activations.hostReserve": size} | more


def test_the_reserve_is_a_ranks_part_and_no_more_than_its_activations() -> None:
    activations = plan(ON_NVME).bytes[Tier.NVME].activations
    two = {"spec.parallelism": {"devicesPerNode": 2}}
    small, large = plan(reserved("6Mi")), plan(reserved("3Gi"))
    assert small.bytes[Tier.HOST].reserve == 6 * MIB < activations == large.bytes[Tier.HOST].reserve
    assert plan(reserved("6Mi") | two).bytes[Tier.HOST].reserve == 3 * MIB
    host = plan(ON_NVME).bytes[Tier.HOST]
    assert small.bytes[Tier.HOST].total == host.total + 6 * MIB
    assert small.bytes[Tier.HOST].predicted == host.predicted


def test_pod_request_covers_every_plan_a_live_correction_can_lead_to() -> None:
    before, after_ = plan(ON_NVME), plan(reserved("64Mi"))
    more = after_.slab_bytes(Tier.HOST) - before.slab_bytes(Tier.HOST)
    assert more >= after_.bytes[Tier.HOST].reserve > 0
    held = [tier_memory_bytes(one, 1) for one in (before, after_)]
    assert held[1] - held[0] == pytest.approx(more * (1 + PLANNED_MARGIN), abs=1)


def test_a_job_without_the_field_has_the_plan_it_had() -> None:
    for changes in ({}, ON_NVME):
        text, reserve = plan(changes).model_dump_json(), reserved("0") if changes else {}
        assert "reserve" not in text and "hostReserve" not in job(changes).model_dump_json()
        assert plan(changes | reserve).model_dump_json() == text


def test_what_puts_nothing_on_nvme_has_no_reserve() -> None:
    assert plan({"spec.memory.advanced.activations.hostReserve": "1Gi"}).bytes[Tier.HOST].reserve == 0


def test_a_reserve_that_finds_no_room_is_said_to_be_missing() -> None:
    tight = {"spec.memory.budget": {"host": "40Mi"}, "spec.memory.advanced.optimizer.placement": "Device"}
    found = make_plan(job(reserved("40Mi") | tight), NODE)
    assert isinstance(plan(ON_NVME | tight), MemoryPlan)
    assert isinstance(found, Infeasible)
    assert found.missing_bytes[Tier.HOST] > 0


@pytest.mark.parametrize("host", ["60Mi", "80Mi", "100Mi", "120Mi", "160Mi", "400Mi"])
@pytest.mark.parametrize("policy", ["Auto", "Nvme"])
def test_states_and_activations_make_room_for_the_reserve(host: str, policy: str) -> None:
    node = replace(NODE, bfloat16_flops_per_second=1e10)  # too slow to recompute anything
    changes = {
        "spec.memory.advanced.activations": {"policy": policy, "hostReserve": "24Mi"},
        "spec.memory.budget": {"device": "90Mi", "host": host, "nvme": "4Gi"},
    }
    found = make_plan(job(changes), node)
    if isinstance(found, MemoryPlan):
        spilled = found.bytes[Tier.NVME].activations
        may_move = found.parameters.order == "InOrder"  # else nothing chooses by storage
        assert found.bytes[Tier.HOST].reserve == min(24 * MIB * may_move, spilled)
        assert found.bytes[Tier.HOST].total <= found.budget[Tier.HOST]
    else:
        assert policy == "Nvme" or host == "60Mi", found


def test_activations_are_divided_so_that_the_reserve_has_room() -> None:
    changes = {
        "spec.model.config.numLayers": 8,
        "spec.memory.advanced.activations.hostReserve": "30Mi",
        "spec.memory.budget": {"host": "200Mi"},
    }
    question = ask(job(changes), NODE)
    in_order = (one for one in Search(question).all_candidates() if one.streaming.order == "InOrder")
    divided = [one for one in in_order if one.blocks.host and one.blocks.nvme]
    for one in divided:
        assert one.bytes[Tier.HOST].reserve == min(30 * MIB, one.bytes[Tier.NVME].activations)
        room = question.budget[Tier.HOST] - one.bytes[Tier.HOST].total
        assert room >= 0 or Tier.HOST in one.missing
    assert any(not one.missing for one in divided)


def test_observed_errors_scale_the_prediction_but_not_the_reserve() -> None:
    found = plan(reserved("64Mi"), Overrides(corrections=Corrections(host=1.5)))
    host = found.bytes[Tier.HOST]
    assert host.correction == -(-host.predicted // 2)
    assert host.total == host.predicted + host.correction + host.reserve


def test_activations_that_moved_are_no_error_of_the_prediction() -> None:
    spec, found = job(reserved("64Mi")).spec, plan(reserved("64Mi"))
    host = found.bytes[Tier.HOST]
    for moved in (0, host.reserve // 2, host.reserve):
        profile = profile_update(None, spec, found, {"host": host.predicted + moved}, "tiny-1", "2026-11-23T10:00:00Z")
        assert profile is not None and profile.peaks.host is not None
        assert profile.peaks.host.max == profile.peaks.host.planned == host.predicted
    beyond = host.predicted + host.reserve + 4096
    profile = profile_update(None, spec, found, {"host": beyond}, "tiny-1", "2026-11-23T10:00:00Z")
    assert profile is not None and profile.peaks.host is not None
    assert profile.peaks.host.max == host.predicted + 4096


def test_peaks_of_a_job_with_a_reserve_are_not_used_as_evidence() -> None:
    assert may_be_seen(job(ON_NVME).spec)
    assert not may_be_seen(job(reserved("64Mi")).spec)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {
                "spec.memory": {
                    "mode": "Disabled",
                    "budget": {"host": "1Gi"},
                    "advanced": {"activations": {"hostReserve": "1Mi"}},
                }
            },
            "mode Disabled keeps all activations on the device, so none can move to host memory; leave it out",
        ),
        (
            {"spec.memory.advanced.activations": {"policy": "Host", "hostReserve": "1Mi"}},
            "only activations that are spilled to NVMe can move to this memory, and policy Host spills none to NVMe; "
            "leave it out, or use policy Nvme",
        ),
        (
            {"spec.memory": {"budget": {"host": "1Mi"}, "advanced": {"activations": {"hostReserve": "2Mi"}}}},
            "must be at most budget.host (1Mi), because it is part of that budget",
        ),
        (
            {"spec.memory.advanced.activations.hostReserve": "1Mi", "spec.members": [{"name": "a"}, {"name": "b"}]},
            "activations of a sweep do not move while its members run, so this memory would not be used; leave it out",
        ),
    ],
)
def test_a_reserve_of_no_use_is_rejected(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidJob) as caught:
        job(changes)
    (found,) = caught.value.problems
    assert found.path == "spec.memory.advanced.activations.hostReserve"
    assert found.problem.startswith(problem)
