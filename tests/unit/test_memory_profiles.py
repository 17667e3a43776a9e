"""Reported peaks become MemoryProfiles: few writes, and none that says nothing new."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fake_api import FakeApi, Object
from job_documents import job
from operator_parts import KEY, Counts, child, with_cluster

from spillway.hardware import local_node
from spillway.job import JobFile
from spillway.plan import MemoryPlan
from spillway.planner import make_plan
from spillway.progress import ProgressReport
from spillway_operator.api_client import ApiClient
from spillway_operator.memory_profiles import PROFILE_SECONDS, MemoryProfiles

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


def report(device: int, attempt: int = 1) -> ProgressReport:
    spillway: dict[str, Any] = {"epoch": attempt, "step": 1, "steps": 9, "peak": {"device": device}}
    return ProgressReport.model_validate({"spillway": spillway})


class Bench:
    def __init__(self, api: FakeApi, client: ApiClient) -> None:
        self.api = api
        self.seconds = 100.0
        self.profiles = MemoryProfiles(client, lambda: self.seconds)

    async def reported(self, device: int, attempt: int = 1) -> None:
        self.profiles.reported(KEY, attempt, report(device, attempt))
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
