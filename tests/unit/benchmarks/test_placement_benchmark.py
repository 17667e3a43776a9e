"""benchmarks/placement.py: the simulated cluster loses no job and no byte, and a policy that is worse loses."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from statistics import mean, median
from typing import Any

import pytest

import placement as benchmark
import placement_traces as traces
import record_placement
from placement_policies import Dlrover, Requests, Spillway, best_fit, counted, least_allocated, plans_remembered
from placement_simulation import Arrival, Outcome, Policy, Truth, simulate, why_it_runs_out
from spillway.api.load import parse_job
from spillway.placement.cluster_view import ClusterView
from spillway.placement.place import Placement, place
from spillway.plan import Tier
from spillway.units import GIB, MIB

pytestmark = pytest.mark.ci

POLICIES = {
    "Spillway": Spillway,
    "static": partial(Requests, 1.5, best_fit),
    "least allocated": partial(Requests, 1.5, least_allocated),
    "DLRover": Dlrover,
}
NUM_JOBS = 24
SMALL = tuple(replace(node, allocatable_memory_bytes=5 * GIB) for node in traces.NODES[:2])
RUNS = traces.recorded_runs()
CHEAP = tuple(run for run in RUNS if run.document["spec"]["model"]["config"]["hiddenSize"] <= 384)


@pytest.fixture(autouse=True, scope="module")
def remembered() -> Iterator[None]:
    with plans_remembered():
        yield


def jobs(trace: str, seed: int = 0) -> list[Arrival]:
    return traces.arrivals(trace, seed, CHEAP, benchmark.planned, NUM_JOBS)


def played(trace: str, policy: Policy, seed: int = 0) -> Outcome:
    return simulate(jobs(trace, seed), SMALL, policy)


# --- the cluster ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trace", ["recorded", "dnnmem", traces.ADVERSARIAL])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_job_ends_once_and_no_node_is_asked_for_more_than_it_has(policy: str, trace: str) -> None:
    outcome = played(trace, POLICIES[policy]())
    for number in range(NUM_JOBS):
        own = [one for one in outcome.attempts if one.job == number]
        assert [one.attempt for one in own] == [*range(1, len(own) + 1)]
        assert [one.reason is None for one in own[:-1]] == [False] * (len(own) - 1)
        completed = bool(own) and own[-1].reason is None
        assert completed is (number not in outcome.given_up)
        assert all(one.ended_seconds <= after.began_seconds for one, after in itertools.pairwise(own))
    for node in SMALL:
        here = [one for one in outcome.attempts if one.node == node.name]
        for moment in {one.began_seconds for one in here}:
            beside = [one for one in here if one.began_seconds <= moment < one.ended_seconds]
            assert sum(one.requested_bytes for one in beside) <= node.allocatable_memory_bytes
    assert all(0 < one.used_bytes <= one.requested_bytes for one in outcome.attempts)
    assert outcome.makespan_seconds >= max(one.ended_seconds - one.began_seconds for one in outcome.attempts)


def test_the_same_seed_gives_the_same_outcome_and_another_one_another() -> None:
    first, again, other = (played("dnnmem", Spillway(), seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_what_is_remembered_is_what_the_planner_says() -> None:
    job = jobs("recorded")[0].job
    with pytest.MonkeyPatch.context() as patch:
        from spillway.planning.planner import make_plan

        patch.setattr("spillway.placement.place.known_plan", make_plan)
        plain = place(job, ClusterView(nodes=SMALL))
    found = place(job, ClusterView(nodes=SMALL))
    assert isinstance(plain, Placement)
    assert isinstance(found, Placement)
    assert found.pod == plain.pod
    assert found.plan == plain.plan.model_copy(update={"alternatives": ()}), "but for the plans that lost"


def test_attempt_runs_out_at_its_budget_or_else_at_its_pod_limit() -> None:
    own = counted(jobs("recorded")[0].job, SMALL)
    assert own is not None
    assert why_it_runs_out(own, Truth()) is None
    assert why_it_runs_out(own, Truth({Tier.DEVICE: 1.2})) == "DeviceOutOfMemory"
    careless = replace(own, holds_tiers=False)
    assert why_it_runs_out(careless, Truth({Tier.DEVICE: 1.2})) is None
    assert why_it_runs_out(careless, Truth(beside_bytes=own.memory_bytes + 1)) == "OOMKilled"


def test_a_pod_that_no_node_will_ever_have_room_for_is_given_up() -> None:
    tiny = tuple(replace(node, allocatable_memory_bytes=64 * MIB) for node in SMALL)
    outcome = simulate(jobs("recorded"), tiny, Spillway())
    assert (outcome.given_up, outcome.attempts) == (tuple(range(NUM_JOBS)), ())


# --- planted: a policy that is worse loses ----------------------------------------------------------------------------


class Forgetful(Spillway):
    """The operator, if no job ever told it anything."""

    def ended(self, *_: Any) -> None:
        return


class Blind(Forgetful):
    """The operator, if an attempt that ran out were followed by the same one, and no other job knew better."""

    def ask(self, number: int, job: Any, failed: Any, nodes: Any, now: float) -> Any:
        ask = super().ask(number, job, (), nodes, now)
        return None if len(failed) > 3 else ask


def test_small_requests_fail_first_attempts_and_large_ones_waste_and_wait() -> None:
    careful, greedy, mean_one = (
        played("recorded", Requests(factor, best_fit)) for factor in (1.5, 4.0, 0.5)
    )  # fmt: skip
    assert mean_one.first_attempt_success < careful.first_attempt_success == 1.0
    assert greedy.wasted_byte_seconds > careful.wasted_byte_seconds
    assert greedy.makespan_seconds > careful.makespan_seconds


def test_an_operator_that_forgets_repeats_its_failures() -> None:
    learned, forgotten = (
        mean(played("dnnmem", policy(), seed).first_attempt_success for seed in range(3))
        for policy in (Spillway, Forgetful)
    )
    assert forgotten < learned


def test_an_operator_without_its_ladder_completes_fewer_jobs() -> None:
    climbed, blind = (played("dnnmem", policy()) for policy in (Spillway, Blind))
    assert climbed.completed == 1.0
    assert blind.completed < 1.0


# --- traces -----------------------------------------------------------------------------------------------------------


def test_recorded_trace_has_20_or_more_real_runs_and_no_local_paths() -> None:
    found = json.loads(traces.RECORDED.read_text(encoding="utf-8"))
    written = [record_placement.document(number, job, "docs") for number, job in enumerate(record_placement.JOBS)]
    assert [run["job"] for run in found["runs"]] == written
    assert len(RUNS) >= 20
    assert re.search(r'"/|tmp|home', traces.RECORDED.read_text(encoding="utf-8")) is None
    for run in found["runs"]:
        assert parse_job(json.dumps(run["job"]), "job.json").spec.training.steps == run["num_steps"]
        assert run["pod"]["peak_bytes"] <= run["pod"]["counted_bytes"]


def test_a_careful_users_pods_leave_unused_what_is_published() -> None:
    factor = traces.user_factor(RUNS, benchmark.MANUAL_SLACK)
    slack = [1.0 - run.used_bytes / (factor * run.counted_bytes) for run in RUNS]
    assert median(slack) == pytest.approx(benchmark.MANUAL_SLACK, abs=0.01)


def test_errors_are_drawn_as_they_are_published() -> None:
    random_ = random.Random(0)
    errors = {
        trace: [abs(1.0 / traces._truth(trace, random_, RUNS[0], 1).tiers[Tier.DEVICE] - 1.0) for _ in range(4000)]
        for trace in ("xmem", "llmem", "dnnmem")
    }
    assert median(errors["xmem"]) == pytest.approx(0.0144, rel=0.1)
    assert mean(errors["llmem"]) == pytest.approx(0.030, rel=0.1)
    assert mean(errors["dnnmem"]) == pytest.approx(0.16, rel=0.1)


def test_adversarial_trace_is_bursty_wrong_by_2x_and_repeats_no_model() -> None:
    found = jobs(traces.ADVERSARIAL)
    assert len({one.seconds for one in found}) == traces.NUM_BURSTS
    assert len({one.job.spec.model.model_dump_json() for one in found}) == NUM_JOBS
    assert {one.truth.tiers[tier] for one in found for tier in (Tier.DEVICE, Tier.HOST)} == {2.0}


def test_held_out_seeds_are_twenty_that_were_never_looked_at() -> None:
    assert len(set(benchmark.HELD_OUT)) == 20
    assert not set(benchmark.HELD_OUT) & set(benchmark.TUNING)


# --- figures ----------------------------------------------------------------------------------------------------------


def shown(policy: str, makespan: float, completed: float = 1.0, seed: int = 0) -> benchmark.Played:
    return benchmark.Played("recorded", seed, policy, 1.0, completed, 1.0, makespan)


def test_the_best_rival_is_the_fastest_of_those_that_complete_every_job() -> None:
    rivals = [shown("a", 5.0), shown("b", 4.0, completed=0.99), shown("c", 6.0), shown(benchmark.OURS, 1.0)]
    assert benchmark.best_rival(rivals, ["recorded"]) == "a"


def test_the_interval_holds_the_mean_and_is_the_same_each_time() -> None:
    random_ = random.Random(0)
    values = [random_.random() for _ in range(20)]
    found = benchmark.figure(values)
    assert found.low < found.mean < found.high
    assert found == benchmark.figure(values)
    assert benchmark.figure([2.0, 2.0]) == benchmark.Figure(2.0, 2.0, 2.0)
