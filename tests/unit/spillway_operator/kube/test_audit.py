"""Complete lists against what the watches said: ghosts, missed changes, and a watch that is dead."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from fakes.fake_api import FakeApi
from harness.operator_parts import KEY, Counts, child, put_job, training_job, with_cluster
from spillway_operator.exporter import OperatorExporter
from spillway_operator.kube.api_client import ApiClient, Unavailable
from spillway_operator.kube.audit import GRACE_SECONDS, SOON_SECONDS, Audit
from spillway_operator.kube.store import Key, Store, project_attempt, project_job
from spillway_operator.kube.watched import watched_kinds


class Bench:
    """`meanwhile` happens while the audit waits for the watch."""

    def __init__(self, client: ApiClient, namespaces: tuple[str, ...] = ("",)) -> None:
        self.store = Store()
        self.keys: list[Key] = []
        self.slept: list[float] = []
        self.meanwhile: Callable[[], object] = lambda: None
        kinds = watched_kinds(self.store)
        self.audit = Audit(client, kinds, namespaces, self.keys.append, OperatorExporter(), self.sleep, lambda: 50.0)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.meanwhile()

    @property
    def corrections(self) -> tuple[int, int]:
        """missed changes, ghosts"""
        value = self.audit.exporter.registry.get_sample_value
        name = "spillway_operator_watch_corrections_total"
        missed, ghosts = (value(name, {"kind": kind}) or 0.0 for kind in ("missed", "ghost"))
        return int(missed), int(ghosts)


def on_a_bench(scenario: Callable[[FakeApi, Bench], Awaitable[None]], namespaces: tuple[str, ...] = ("",)) -> None:
    async def run(api: FakeApi, client: ApiClient, _: Counts) -> None:
        await scenario(api, Bench(client, namespaces))

    with_cluster(run)


def test_the_first_list_fills_the_store_and_wakes_every_job() -> None:
    async def scenario(api: FakeApi, bench: Bench) -> None:
        put_job(api)
        put_job(api, "other")
        api.put("jobs", child("Job", 1))
        api.put("jobs", {"metadata": {"name": "not-ours"}})
        await bench.audit.first()
        assert (len(bench.store.jobs), len(bench.store.attempts)) == (2, 1)
        assert set(bench.keys) == {KEY, ("team", "other")}
        assert bench.corrections == (0, 0)
        assert bench.audit.last_time == 50.0

    on_a_bench(scenario)


def test_when_the_watch_said_everything_nothing_happens() -> None:
    async def scenario(api: FakeApi, bench: Bench) -> None:
        bench.store.put_job(put_job(api))
        await bench.audit.check()
        assert (bench.slept, bench.keys, bench.corrections) == ([], [], (0, 0))

    on_a_bench(scenario)


def test_a_watch_that_is_only_late_is_not_blamed() -> None:
    async def scenario(api: FakeApi, bench: Bench) -> None:
        seen = put_job(api)
        bench.meanwhile = lambda: bench.store.put_job(seen)
        await bench.audit.check()
        assert bench.slept == [GRACE_SECONDS]
        assert bench.corrections == (0, 0)
        assert not bench.audit.corrections_in_a_row

    on_a_bench(scenario)


def test_a_change_that_the_watch_missed_is_put_right() -> None:
    async def scenario(api: FakeApi, bench: Bench) -> None:
        bench.store.put_job(put_job(api))
        newer = project_job(api.put("trainingjobs", training_job(suspend=True)))
        await bench.audit.check()
        assert bench.store.jobs.get(KEY) == newer
        assert bench.keys == [KEY]
        assert bench.corrections == (1, 0)

    on_a_bench(scenario)


def test_a_ghost_is_removed_and_its_job_looked_at() -> None:
    async def scenario(api: FakeApi, bench: Bench) -> None:
        bench.store.put_job(put_job(api))
        bench.store.put_attempt(project_attempt(api.put("jobs", child("Job", 1))))
        api.remove("jobs", "team", "demo-1")
        await bench.audit.check()
        assert bench.store.attempts_of(KEY) == ()
        assert bench.keys == [KEY]
        assert bench.corrections == (0, 1)

    on_a_bench(scenario)


def test_what_was_created_after_the_list_is_no_ghost() -> None:
    async def scenario(api: FakeApi, bench: Bench) -> None:
        late = training_job("late")
        late["metadata"] |= {"namespace": "team", "uid": "u", "resourceVersion": "99999999"}
        bench.store.put_job(project_job(late))
        await bench.audit.check()
        assert len(bench.store.jobs) == 1

    on_a_bench(scenario)


def test_only_the_namespaces_that_are_served_are_compared() -> None:
    async def scenario(api: FakeApi, bench: Bench) -> None:
        bench.store.put_job(put_job(api))
        found = training_job("elsewhere")
        found["metadata"]["namespace"] = "other"
        bench.store.put_job(project_job(api.put("trainingjobs", found)))
        await bench.audit.check()
        assert bench.corrections == (0, 0)

    on_a_bench(scenario, namespaces=("team",))


def test_two_corrections_in_a_row_mark_the_watch_dead_until_a_clean_list() -> None:
    async def scenario(api: FakeApi, bench: Bench) -> None:
        for _change in range(2):
            assert not bench.audit.watch_is_dead
            put_job(api)
            await bench.audit.check()
        assert bench.audit.watch_is_dead
        await bench.audit.check()
        assert not bench.audit.watch_is_dead

    on_a_bench(scenario)


def test_list_comes_sooner_after_a_correction_even_if_one_fails_meanwhile() -> None:
    async def scenario(api: FakeApi, bench: Bench) -> None:
        put_job(api)
        turns = 0

        async def sleep(seconds: float) -> None:
            nonlocal turns
            bench.slept.append(seconds)
            turns += seconds != GRACE_SECONDS
            if turns == 2:
                api.fail("GET", "trainingjobs", 500)
            if turns == 4:
                raise asyncio.CancelledError

        bench.audit.sleep = sleep
        with pytest.raises(asyncio.CancelledError):
            await bench.audit.run(180.0)
        assert bench.slept == [180.0, GRACE_SECONDS, SOON_SECONDS, SOON_SECONDS, 180.0]

    on_a_bench(scenario)


def test_a_list_that_fails_leaves_the_store_as_it_is() -> None:
    async def scenario(api: FakeApi, bench: Bench) -> None:
        bench.store.put_job(put_job(api))
        api.fail("GET", "jobs", 500)
        with pytest.raises(Unavailable):
            await bench.audit.check()
        assert len(bench.store.jobs) == 1

    on_a_bench(scenario)
