"""Reported peaks become MemoryProfiles: few writes, and none that says nothing new."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fake_api import FakeApi, Object
from job_documents import job
from operator_parts import KEY, Counts, child, owned, with_cluster

from spillway.hardware import local_node
from spillway.job import JobFile
from spillway.plan import MemoryPlan
from spillway.planner import make_plan
from spillway.progress import ProgressReport
from spillway_operator import memory_profiles
from spillway_operator.api_client import ApiClient
from spillway_operator.memory_profiles import PROFILE_SECONDS, MemoryProfiles
from spillway_operator.progress_outbox import Received

GIB = 1 << 30


def contract(number: int = 1) -> Object:
    made = job()
    plan = make_plan(made, local_node(2, 4 * GIB, 4 * GIB, 64 * GIB))
    assert isinstance(plan, MemoryPlan)
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
    data = {"job.json": job_file.model_dump_json(), "plan.json": plan.model_dump_json()}
    return child("ConfigMap", number, data=data)


def report(device: int, attempt: int = 1, uid: str = "uid-demo") -> Received:
    spillway: dict[str, Any] = {"epoch": attempt, "step": 1, "steps": 9, "peak": {"device": device}}
    return Received(ProgressReport.model_validate({"spillway": spillway}), uid, attempt, "2026-11-21T12:00:00Z")


class Bench:
    def __init__(self, api: FakeApi, client: ApiClient) -> None:
        self.api = api
        self.seconds = 100.0
        self.profiles = MemoryProfiles(client, lambda: self.seconds)

    async def reported(self, device: int, attempt: int = 1, uid: str = "uid-demo") -> None:
        self.profiles.reported(KEY, report(device, attempt, uid))
        for key in list(self.profiles._waiting):
            await self.profiles.write(key)

    @property
    def found(self) -> list[Object]:
        return [found["spec"] for (plural, _, _), found in self.api.objects.items() if plural == "memoryprofiles"]


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
        bench.api.requests.clear()
        await bench.reported(300 << 20)
        assert bench.api.requests == []

    on_a_bench(scenario)


def test_a_profile_is_written_at_most_once_in_half_a_minute_and_loses_nothing() -> None:
    async def scenario(bench: Bench) -> None:
        for peak in range(300, 310):
            await bench.reported(peak << 20)
        assert bench.api.count("PATCH") == 1
        bench.seconds += PROFILE_SECONDS
        await bench.profiles.write(KEY)
        assert bench.api.count("PATCH") == 2
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


def test_a_namesake_with_the_same_peaks_is_measured_against_its_own_contract() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.reported(300 << 20)
        assert len(bench.found) == 1
        bench.seconds += PROFILE_SECONDS
        bench.api.requests.clear()
        await bench.reported(300 << 20, uid="uid-of-the-namesake")
        assert bench.api.count("GET", "configmaps/demo-1") == 1
        assert bench.api.count("PATCH") == 0

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
