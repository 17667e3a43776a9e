"""Reported peaks become MemoryProfiles: few writes, and none that says nothing new."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cases.job_documents import job
from fakes.fake_api import FakeApi, Object
from harness.operator_parts import KEY, Counts, child, owned, with_cluster
from spillway.api.job_file import JobFile
from spillway.api.progress import ProgressReport
from spillway.api.status import Escalation
from spillway.plan import MemoryPlan
from spillway.planning.hardware import local_node
from spillway.planning.planner import make_plan
from spillway_operator.decide.observed import JobObject
from spillway_operator.kube.api_client import ApiClient
from spillway_operator.measured import memory_profiles
from spillway_operator.measured.memory_profiles import PROFILE_SECONDS, MemoryProfiles
from spillway_operator.progress.outbox import Received

GIB = 1 << 30
START = 1_800_000_000.0
"""Unix seconds when the clock of a bench was 0"""


@cache
def plan_json() -> str:
    plan = make_plan(job(), local_node(2, 4 * GIB, 4 * GIB, 64 * GIB))
    assert isinstance(plan, MemoryPlan)
    return plan.model_dump_json()


def contract(number: int = 1) -> Object:
    made = job()
    job_file = JobFile(
        name="demo",
        uid="uid-demo",
        epoch=number,
        spec=made.spec,
        output_directory="/work",
        corpus_directory="/work",
        checkpoint_directory="/work",
        spill_directory="/spill",
        termination_message_path="/dev/termination-log",
        compute_threads=1,
    )
    data = {
        "job.json": job_file.model_dump_json(),
        "plan.json": plan_json(),
        "decision.json": json.dumps({"configMap": f"demo-{number}", "image": "trainer:1"}),
    }
    return child("ConfigMap", number, data=data)


def report(device: int, attempt: int = 1, uid: str = "uid-demo", pod: dict[str, Any] | None = None) -> Received:
    spillway: dict[str, Any] = {"epoch": attempt, "step": 1, "steps": 9, "peak": {"device": device}, "pod": pod or {}}
    return Received(ProgressReport.model_validate({"spillway": spillway}), uid, attempt, "2026-11-21T12:00:00Z")


class Bench:
    def __init__(self, api: FakeApi, client: ApiClient) -> None:
        self.api = api
        self._client = client
        self.seconds = 100.0
        self.told: list[str] = []
        self.profiles = self.operator()

    def operator(self) -> MemoryProfiles:
        """One that has only begun, with the clocks of the others."""
        return MemoryProfiles(self._client, self.told.append, lambda: self.seconds, lambda: START + self.seconds)

    async def reported(
        self, device: int, attempt: int = 1, uid: str = "uid-demo", pod: dict[str, Any] | None = None
    ) -> None:
        self.profiles.reported(KEY, report(device, attempt, uid, pod))
        await self.profiles.write()

    @property
    def found(self) -> list[Object]:
        return [
            {**found["spec"], **found["status"]}
            for (plural, _, _), found in self.api.objects.items()
            if plural == "memoryprofiles"
        ]


def on_a_bench(scenario: Callable[[Bench], Awaitable[None]]) -> None:
    async def run(api: FakeApi, client: ApiClient, _: Counts) -> None:
        api.put("configmaps", contract(1))
        api.put("configmaps", contract(2))
        await scenario(Bench(api, client))

    with_cluster(run)


def test_a_first_peak_makes_the_profile_and_a_repeated_one_asks_nothing() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.reported(300 << 20)
        (profile,) = bench.found
        assert (profile["attempt"], profile["count"]) == ("demo-1", 1)
        assert bench.told == [KEY[0]]
        bench.api.requests.clear()
        await bench.reported(300 << 20)
        assert bench.api.requests == []
        assert bench.told == [KEY[0]]

    on_a_bench(scenario)


def test_of_too_many_profiles_those_observed_longest_ago_are_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_profiles, "MOST_PROFILES", 3)

    async def scenario(bench: Bench) -> None:
        for day in (4, 2, 1, 3):
            metadata = {"name": f"of-day-{day}", "namespace": KEY[0], "uid": f"uid-{day}"}
            times = {"observedTime": f"2026-11-0{day}T00:00:00Z"}
            bench.api.put("memoryprofiles", {"metadata": metadata, "spec": {}, "status": times})
        bench.api.put("memoryprofiles", {"metadata": {"name": "of-day-1", "namespace": "elsewhere"}, "spec": {}})
        await bench.reported(300 << 20)
        left = {
            name for plural, namespace, name in bench.api.objects if (plural, namespace) == ("memoryprofiles", KEY[0])
        }
        assert len(left) == 3 and {"of-day-3", "of-day-4"} < left
        assert ("memoryprofiles", "elsewhere", "of-day-1") in bench.api.objects

    on_a_bench(scenario)


def test_profile_is_written_at_most_every_half_minute_and_loses_nothing() -> None:
    async def scenario(bench: Bench) -> None:
        for peak in range(300, 310):
            await bench.reported(peak << 20)
        assert bench.api.count("PATCH", "/status") == 1
        bench.seconds += PROFILE_SECONDS
        await bench.profiles.write()
        assert bench.api.count("PATCH", "/status") == 2
        assert bench.found[0]["peaks"]["device"]["max"] == "309Mi"
        assert not bench.profiles._waiting

    on_a_bench(scenario)


def test_attempts_of_the_same_plan_share_a_profile() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.reported(300 << 20)
        bench.seconds += PROFILE_SECONDS
        await bench.reported(280 << 20, attempt=2)
        (profile,) = bench.found
        assert profile["count"] == 2
        assert profile["peaks"]["device"]["max"] == "300Mi"
        assert profile["peaks"]["device"]["last"] == "280Mi"

    on_a_bench(scenario)


def test_a_failure_is_forgotten_and_a_missing_contract_too() -> None:
    async def scenario(bench: Bench) -> None:
        bench.api.fail("PATCH", "memoryprofiles", 403)
        await bench.reported(300 << 20)
        bench.api.remove("configmaps", "team", "demo-2")
        await bench.reported(300 << 20, attempt=2)
        assert bench.found == []
        assert not bench.profiles._waiting

    on_a_bench(scenario)


@pytest.mark.parametrize(
    ("part", "content"),
    [
        ("plan", {"bytes": {}}),
        ("plan", {"bytes": {"device": {"parameters": -5}}}),
        ("job", {"spec": {"model": {"source": {"path": "/x"}}}}),
        ("job", {"spec": 7}),
    ],
)
def test_a_contract_that_somebody_wrote_anew_ends_nothing(part: str, content: dict[str, Any]) -> None:
    async def scenario(bench: Bench) -> None:
        tampered = contract(1)
        data = tampered["data"]
        data[f"{part}.json"] = json.dumps(json.loads(data[f"{part}.json"]) | content)
        bench.api.put("configmaps", tampered)
        await bench.reported(300 << 20)
        assert not bench.profiles._waiting
        await bench.reported(300 << 20, attempt=2)
        assert len(bench.found) == 1

    on_a_bench(scenario)


def test_a_defect_keeps_one_profile_from_being_written_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    async def scenario(bench: Bench) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(memory_profiles, "profile_update", broken)
            await bench.reported(300 << 20)
        assert not bench.profiles._waiting
        await bench.reported(301 << 20)
        assert len(bench.found) == 1

    on_a_bench(scenario)


@pytest.mark.parametrize("references", [[], owned(uid="uid-of-another")])
def test_peaks_are_never_measured_against_the_contract_of_another_job(references: list[Object]) -> None:
    async def scenario(bench: Bench) -> None:
        theirs = contract(1)
        theirs["metadata"]["ownerReferences"] = references
        bench.api.put("configmaps", theirs)
        await bench.reported(300 << 20)
        assert bench.found == []

    on_a_bench(scenario)


def test_namesake_with_the_same_peaks_is_compared_with_its_own_contract() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.reported(300 << 20)
        assert len(bench.found) == 1
        bench.seconds += PROFILE_SECONDS
        bench.api.requests.clear()
        await bench.reported(300 << 20, uid="uid-of-the-namesake")
        assert bench.api.count("GET", "configmaps/demo-1") == 1
        assert bench.api.count("PATCH", "/status") == 0

    on_a_bench(scenario)


def test_what_was_written_is_remembered_only_while_it_matters() -> None:
    async def scenario(bench: Bench) -> None:
        bench.profiles._written = {("team", f"profile-{number}"): bench.seconds for number in range(1000)}
        bench.seconds += PROFILE_SECONDS
        await bench.reported(300 << 20)
        assert len(bench.profiles._written) == 1
        bench.profiles.forget(KEY)
        assert not bench.profiles._seen
        assert not bench.profiles._contracts

    on_a_bench(scenario)


def test_a_whole_runs_pod_is_kept_and_its_growing_page_cache_asks_nothing() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.reported(300 << 20)
        bench.seconds += PROFILE_SECONDS
        bench.api.requests.clear()
        for held in (500, 600, 700):
            await bench.reported(300 << 20, pod={"peak": held << 20, "isWhole": False})
        assert bench.api.requests == []
        await bench.reported(300 << 20, pod={"peak": 700 << 20, "isWhole": True})
        assert bench.found[0]["pod"]["recent"] == ["700Mi"]
        bench.seconds += PROFILE_SECONDS
        bench.api.requests.clear()
        await bench.reported(300 << 20, pod={"peak": 705 << 20, "isWhole": True})
        assert bench.api.requests == []
        await bench.reported(300 << 20, pod={"peak": 720 << 20, "isWhole": True})
        assert (bench.found[0]["pod"]["recent"], bench.found[0]["pod"]["count"]) == (["720Mi"], 1)

    on_a_bench(scenario)


def test_contract_without_a_recorded_image_teaches_nothing_about_pods() -> None:
    async def scenario(bench: Bench) -> None:
        old = contract(1)
        old["data"]["decision.json"] = json.dumps({"configMap": "demo-1"})
        bench.api.put("configmaps", old)
        await bench.reported(300 << 20, pod={"peak": 700 << 20, "isWhole": True})
        assert "pod" not in bench.found[0] and bench.found[0]["peaks"]["device"]["max"] == "300Mi"

    on_a_bench(scenario)


def test_a_pod_is_measured_against_the_limit_that_was_decided_for_it() -> None:
    async def scenario(bench: Bench) -> None:
        decided = contract(1)
        decided["data"]["decision.json"] = json.dumps({"podMemory": "800Mi", "image": "trainer:1"})
        bench.api.put("configmaps", decided)
        await bench.reported(300 << 20, pod={"peak": 795 << 20, "isWhole": True})
        assert "pod" not in bench.found[0], "page cache took what there was"
        job = SimpleNamespace(key=KEY, uid="uid-demo")
        bench.seconds += PROFILE_SECONDS
        bench.profiles.ran_out(cast(JobObject, job), [Escalation(attempt=1, reason="OOMKilled")])
        await bench.profiles.write()
        bound = bench.found[0]["lowerBounds"]["pod"]
        assert bound["held"] == "800Mi" and bound["planned"] != "800Mi"

    on_a_bench(scenario)


def test_what_was_not_enough_becomes_a_lower_bound_of_the_plans_profile() -> None:
    async def scenario(bench: Bench) -> None:
        job = SimpleNamespace(key=KEY, uid="uid-demo")
        bench.profiles.ran_out(cast(JobObject, job), [Escalation(attempt=1, reason="DeviceOutOfMemory")])
        await bench.profiles.write()
        await bench.profiles.write()
        assert bench.api.count("PATCH", "/status") == 1
        (profile,) = bench.found
        assert profile["count"] == 0 and profile["modelFingerprint"]
        assert set(profile["lowerBounds"]) == {"device"}
        bench.seconds += PROFILE_SECONDS
        await bench.reported(300 << 20, attempt=2)
        (profile,) = bench.found
        assert profile["lowerBounds"]["device"] and profile["peaks"]["device"]["last"] == "300Mi"

    on_a_bench(scenario)


def test_a_lower_bound_waits_for_its_profiles_turn() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.reported(300 << 20)
        job = SimpleNamespace(key=KEY, uid="uid-demo")
        bench.profiles.ran_out(cast(JobObject, job), [Escalation(attempt=2, reason="OOMKilled")])
        await bench.profiles.write()
        assert bench.api.count("PATCH", "/status") == 1
        bench.seconds += PROFILE_SECONDS
        await bench.profiles.write()
        assert bench.api.count("PATCH", "/status") == 2
        assert set(bench.found[0]["lowerBounds"]) == {"pod"}
        assert not bench.profiles._ended

    on_a_bench(scenario)


def others(bench: Bench, count: int) -> list[tuple[str, str]]:
    """More jobs of the model, each with a contract of its own."""
    keys = [(KEY[0], f"other-{number}") for number in range(count)]
    for namespace, name in keys:
        found = contract()
        found["data"]["plan.json"] = json.dumps(json.loads(found["data"]["plan.json"]) | {"job": name})
        found["metadata"] |= {"name": f"{name}-1", "ownerReferences": owned(name=name, uid=f"uid-{name}")}
        bench.api.put("configmaps", found)
        peak = (300 << 20) + int(name.rpartition("-")[2])
        bench.profiles.reported((namespace, name), report(peak, uid=f"uid-{name}"))
    return keys


def test_what_all_jobs_of_a_profile_say_goes_into_one_write() -> None:
    async def scenario(bench: Bench) -> None:
        others(bench, 40)
        await bench.reported(400 << 20)
        assert bench.api.count("PATCH", "/status") == 1
        (profile,) = bench.found
        assert profile["count"] == 41
        assert profile["peaks"]["device"]["max"] == "400Mi"
        assert not bench.profiles._waiting

    on_a_bench(scenario)


def test_what_waits_for_its_profiles_turn_asks_nothing_again() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.reported(300 << 20)
        others(bench, 40)
        await bench.profiles.write()
        bench.api.requests.clear()
        await bench.profiles.write()
        assert bench.api.requests == []
        bench.seconds += PROFILE_SECONDS
        await bench.profiles.write()
        assert [bench.api.count(method) for method in ("GET", "PATCH")] == [1, 1]
        assert bench.found[0]["count"] == 41

    on_a_bench(scenario)


def test_an_operator_that_follows_another_one_waits_for_the_profiles_turn() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.reported(300 << 20)
        bench.profiles = bench.operator()
        bench.seconds += 10.0
        await bench.reported(400 << 20)
        bench.seconds += PROFILE_SECONDS - 10.0
        await bench.profiles.write()
        assert bench.api.count("PATCH", "/status") == 1, "the time of the first write is known to the second"
        bench.seconds += 1.0
        await bench.profiles.write()
        assert bench.api.count("PATCH", "/status") == 2
        assert bench.found[0]["peaks"]["device"]["max"] == "400Mi"

    on_a_bench(scenario)


def test_a_profile_that_was_written_in_the_future_waits_for_nothing() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.reported(300 << 20)
        bench.profiles = bench.operator()
        bench.seconds -= 60.0
        await bench.reported(400 << 20)
        assert bench.api.count("PATCH", "/status") == 2

    on_a_bench(scenario)


def test_jobs_whose_contracts_say_the_same_hold_one_contract() -> None:
    async def scenario(bench: Bench) -> None:
        keys = others(bench, 3)
        await bench.profiles.write()
        assert len({id(bench.profiles._contracts[key].contract()) for key in keys}) == 1
        assert len(bench.profiles._held) == 1

    on_a_bench(scenario)


def test_a_contract_that_is_no_longer_held_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.reported(300 << 20)
        before = bench.api.count("GET", "configmaps/demo-1")
        bench.profiles._held.clear()
        bench.seconds += PROFILE_SECONDS
        await bench.reported(400 << 20)
        assert bench.api.count("GET", "configmaps/demo-1") == before + 1
        assert bench.found[-1]["peaks"]["device"]["max"] == "400Mi"
        monkeypatch.setattr(memory_profiles, "MOST_CONTRACTS", 2)
        (held,) = bench.profiles._held.values()
        contracts = [bench.profiles._hold(replace(held, profile=f"profile-{number}")) for number in range(4)]
        assert list(bench.profiles._held.values()) == contracts[2:]

    on_a_bench(scenario)


def test_a_defect_in_what_one_job_says_keeps_no_other_from_its_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = memory_profiles.profile_update

    def broken(existing: Any, spec: Any, plan: Any, peaks: Any, attempt: str, *others: Any) -> Any:
        if attempt == "other-1-1":
            raise ZeroDivisionError
        return sound(existing, spec, plan, peaks, attempt, *others)

    async def scenario(bench: Bench) -> None:
        others(bench, 3)
        monkeypatch.setattr(memory_profiles, "profile_update", broken)
        await bench.profiles.write()
        assert bench.found[0]["count"] == 2
        assert not bench.profiles._waiting

    on_a_bench(scenario)


def test_a_write_that_may_have_landed_counts_for_the_profiles_turn() -> None:
    async def scenario(bench: Bench) -> None:
        bench.api.fail("PATCH", "memoryprofiles", 504)
        await bench.reported(300 << 20)
        await bench.reported(301 << 20)
        assert bench.api.count("PATCH") == 1
        bench.seconds += PROFILE_SECONDS
        await bench.profiles.write()
        assert bench.found[0]["peaks"]["device"]["max"] == "301Mi"

    on_a_bench(scenario)
