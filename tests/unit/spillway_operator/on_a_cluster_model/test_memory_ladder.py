"""The operator after memory ran out: another plan, three times at most, in the status, and never twice after a crash.

On the model of a cluster with the operator's real shell (cluster_model.py).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness import cluster_model
from harness.cluster_model import Fault, World, fail, rounds, running, writes
from spillway.feedback.ladder import MOST_MEMORY_TRIES, corrections_after
from spillway.placement.place import Unplaceable
from spillway.plan import MemoryPlan, Tier
from spillway.units import parse_quantity
from spillway_operator.decide import planning

DEVICE, HOST, VOLUME = 70, 76, 72


def plans(world: World) -> list[MemoryPlan]:
    """Of the attempts' ConfigMaps, oldest first."""
    found = sorted(
        world.server.all("configmaps"), key=lambda each: int(each["metadata"]["labels"]["spillway.dev/attempt"])
    )
    return [MemoryPlan.model_validate_json(each["data"]["plan.json"]) for each in found]


def escalations(world: World) -> list[dict[str, Any]]:
    return list(world.status.get("escalations", []))


def out_of_memory(world: World, code: int = DEVICE) -> None:
    fail(world, code, rounds_after=6)


def killed(world: World) -> None:
    world.end_pod(world.pods(world.attempts()[-1])[0], 137, "", "OOMKilled")
    rounds(world, 6)


def test_attempt_that_ran_out_of_memory_is_followed_by_another_plan() -> None:
    world = running(max_restarts=0)
    out_of_memory(world)
    before, after = plans(world)
    assert world.status["state"] == "Running"
    assert after.bytes[Tier.DEVICE].total >= 1.25 * before.budget[Tier.DEVICE]
    (one,) = escalations(world)
    assert (one["attempt"], one["reason"]) == (1, "DeviceOutOfMemory")
    assert one["change"].startswith("the same placement with more memory, device ")
    counted = world.status["attempts"]
    assert (counted["restarts"], counted["memoryErrors"], counted["total"]) == (0, 1, 2)
    assert "multiplied by 1.31: attempt 1 ran out at" in world.status["plan"]["summary"]


def test_a_killed_pod_is_followed_by_a_larger_one() -> None:
    world = running()
    had = parse_quantity(world.status["plan"]["podMemory"])
    killed(world)
    before, after = plans(world)
    assert (before.unplanned_bytes, after.bytes) == (0, before.bytes)
    assert after.unplanned_bytes >= had // 4
    assert parse_quantity(world.status["plan"]["podMemory"]) >= had * 5 // 4
    limit = world.attempts()[-1]["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"]
    assert parse_quantity(limit) == parse_quantity(world.status["plan"]["podMemory"])


def test_three_other_plans_are_tried_and_no_fourth() -> None:
    world = running(max_restarts=0)
    for _ in range(MOST_MEMORY_TRIES):
        out_of_memory(world)
        assert world.status["state"] == "Running"
        world.advance(600)
    out_of_memory(world)
    failed = world.condition("Failed")
    assert (failed["status"], failed["reason"]) == ("True", "DeviceOutOfMemory")
    assert failed["message"].endswith("; 3 other plans ran out of memory, too (see status.escalations)")
    found = escalations(world)
    assert [one["attempt"] for one in found] == [1, 2, 3, 4]
    assert [bool(one.get("change")) for one in found] == [True, True, True, False]
    ratios = [plan.budget[Tier.DEVICE] / plan.bytes[Tier.DEVICE].predicted for plan in plans(world)]
    assert ratios == sorted(set(ratios)), "each try has more room for what is predicted"


def test_three_tries_are_of_one_kind_of_memory_and_six_of_all() -> None:
    world = running(max_restarts=0)
    for ran_out in (out_of_memory, out_of_memory, killed, killed, out_of_memory, killed):
        ran_out(world)
        assert world.status["state"] == "Running"
        world.advance(600)
    killed(world)
    failed = world.condition("Failed")
    assert (failed["status"], failed["reason"]) == ("True", "OOMKilled")
    tried = "; 6 other plans ran out of memory, too (see status.escalations); raise spec.pod.resources.memory"
    assert failed["message"].endswith(tried)
    assert world.status["attempts"]["memoryErrors"] == 7


def test_tries_of_the_ladder_are_counted_apart_from_restarts() -> None:
    world = running(max_restarts=1)
    out_of_memory(world)
    fail(world, 1, rounds_after=6)
    assert world.status["state"] == "Running"
    killed(world)
    assert world.status["state"] == "Running"
    counted = world.status["attempts"]
    assert (counted["restarts"], counted["memoryErrors"], counted["total"]) == (1, 2, 4)


def test_an_attempt_after_a_crash_keeps_the_plan_of_the_ladder() -> None:
    world = running(max_restarts=9)
    out_of_memory(world)
    fail(world, 1, rounds_after=6)
    first, second, third = plans(world)
    assert second.bytes == third.bytes != first.bytes
    assert len(escalations(world)) == 1


def test_mode_advise_says_what_auto_would_do_and_changes_nothing() -> None:
    world = running(memory={"mode": "Advise"})
    out_of_memory(world)
    assert world.condition("Failed")["reason"] == "DeviceOutOfMemory"
    assert world.status["attempts"]["total"] == 1
    (one,) = escalations(world)
    assert one["change"].startswith("mode Auto would replan: ")
    assert one["change"].endswith("per step")


def test_mode_disabled_ends_with_the_trainers_own_sentence() -> None:
    world = running(memory={"mode": "Disabled", "budget": {"host": "1Gi"}})
    out_of_memory(world)
    failed = world.condition("Failed")
    assert (failed["reason"], world.status["attempts"]["total"]) == ("DeviceOutOfMemory", 1)
    assert "the reason" in failed["message"]
    assert failed["message"].endswith("; no other plan is tried, because memory.mode is Disabled")


def test_where_no_other_plan_fits_the_job_fails_with_both_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    world = running()
    monkeypatch.setattr(cluster_model, "place", lambda job, cluster: Unplaceable("DoesNotFit", "device lacks 1 B"))
    out_of_memory(world)
    failed = world.condition("Failed")
    assert failed["reason"] == "DeviceOutOfMemory"
    assert "attempt 1 ended: " in failed["message"]
    assert "no further attempt follows: device lacks 1 B" in failed["message"]


def test_without_the_contract_nobody_knows_what_was_not_enough() -> None:
    world = running()
    (contract,) = world.server.all("configmaps")
    world.server.take("configmaps", contract["metadata"]["name"])
    out_of_memory(world)
    failed = world.condition("Failed")
    assert failed["reason"] == "DeviceOutOfMemory"
    assert failed["message"].endswith(
        "ConfigMap demo-1, which has this attempt's plan, is missing or of another version"
    )
    assert world.status["attempts"]["total"] == 1


def test_a_plan_that_would_run_out_again_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    world = running()
    monkeypatch.setattr(planning, "repeats", lambda failures, *_: failures[0].attempt == 1)
    out_of_memory(world)
    assert world.condition("Failed")["message"].endswith(
        "no further attempt follows: the next plan would run out again: it needs at least as much device memory as "
        "attempt 1; raise spec.memory.budget.device, or use a node with more device memory"
    )


@pytest.mark.parametrize("writes_before", [0, 1, 2, 3])
@pytest.mark.parametrize("landed", [True, False])
def test_a_crash_after_any_write_leaves_one_escalation_and_one_other_plan(writes_before: int, landed: bool) -> None:
    world = running()
    world.end_pod(world.pods(world.attempts()[-1])[0], 137, "", "OOMKilled")
    world.control()
    world.operator.deliver_all()
    world.look(Fault(writes_before, landed, dies=True))
    rounds(world, 6)
    assert world.status["state"] == "Running"
    (one,) = escalations(world)
    assert one["attempt"] == 1 and one["change"]
    assert (world.status["attempts"]["total"], world.status["attempts"]["memoryErrors"]) == (2, 1)
    assert len(plans(world)) == 2


def seen_by_relaxed(world: World, monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[Tier, int], float]]:
    """Peaks and seconds that the next decision about a cheaper plan is made from."""
    found: list[tuple[dict[Tier, int], float]] = []

    def relaxed(failures: Any, last: MemoryPlan, peaks: dict[Tier, int], seconds: float) -> Any:
        found.append((peaks, seconds))
        return corrections_after(failures)

    monkeypatch.setattr(planning, "relaxed", relaxed)
    fail(world, 1, rounds_after=6)
    return found


def test_an_attempt_trains_while_its_pods_run_not_while_it_waits_for_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    world = running(max_restarts=9)
    world.end_pod(world.pods(world.attempts()[-1])[0], 137, "", "OOMKilled")
    for _ in range(6):  # no kubelet: the second attempt's pods wait
        world.operator.deliver_all()
        world.look()
        world.control()
        world.advance(1200)
    assert world.status["attempts"]["total"] == 2
    rounds(world, 6)
    ((_, seconds),) = seen_by_relaxed(world, monkeypatch)
    assert seconds < 60
    world.advance(2400)
    ((_, seconds),) = seen_by_relaxed(world, monkeypatch)
    assert 2400 <= seconds < 2460


def test_peaks_of_an_earlier_attempt_are_not_credited_to_a_silent_one(monkeypatch: pytest.MonkeyPatch) -> None:
    world = running(max_restarts=9)
    world.report(5)
    rounds(world)
    out_of_memory(world)
    ((peaks, _),) = seen_by_relaxed(world, monkeypatch)
    assert peaks == {}
    world.report(7, attempt=3)
    rounds(world)
    ((peaks, _),) = seen_by_relaxed(world, monkeypatch)
    assert peaks == {Tier.DEVICE: 1}


def test_a_cheaper_plan_is_not_tried_where_its_failure_would_end_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    world = running(max_restarts=9)
    for _ in range(MOST_MEMORY_TRIES - 1):
        out_of_memory(world)
        world.advance(600)
        rounds(world)
    assert len(seen_by_relaxed(world, monkeypatch)) == 1
    out_of_memory(world)
    world.advance(600)
    rounds(world)
    assert seen_by_relaxed(world, monkeypatch) == []
    assert world.status["state"] == "Running"


@pytest.mark.parametrize("part", ["bytes", "budget"])
def test_a_contract_whose_plan_lacks_tiers_ends_the_job_and_wedges_nothing(part: str) -> None:
    world = running()
    (contract,) = world.server.all("configmaps")
    plan = json.loads(contract["data"]["plan.json"])
    contract["data"]["plan.json"] = json.dumps(plan | {part: {}})
    world.server.put("configmaps", contract)
    out_of_memory(world)
    assert world.condition("Failed")["reason"] == "DeviceOutOfMemory"


def test_profiles_hear_of_each_end_once() -> None:
    world = running()
    out_of_memory(world)
    world.advance(600)
    killed(world)
    assert [(one.attempt, one.reason) for one in world.operator.ran_out] == [(1, "DeviceOutOfMemory"), (2, "OOMKilled")]


def test_another_plan_costs_no_more_requests_than_a_restart() -> None:
    costs = []
    for code in (1, DEVICE):
        world = running(max_restarts=9)
        before = len(writes(world))
        fail(world, code, rounds_after=6)
        assert world.status["state"] == "Running"
        costs.append(writes(world)[before:])
    assert costs[0] == costs[1]


def test_what_was_decided_is_in_the_contract() -> None:
    world = running()
    out_of_memory(world)
    newest = max(world.server.all("configmaps"), key=lambda found: found["metadata"]["name"])
    assert json.loads(newest["data"]["attempt.json"])["escalations"] == escalations(world)
