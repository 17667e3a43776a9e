"""One look at a job on a fake API server, with the real decision: requests, races, and what failure leads to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from cases.job_documents import document
from fakes.fake_api import FakeApi
from harness.operator_parts import KEY, Counts, pod, with_cluster
from harness.patience import HANG_SECONDS
from spillway.api.progress import ProgressReport
from spillway.api.status import PlanStatus
from spillway.planning.known_plans import PlanQuestion, forget_plans
from spillway_operator import plan_service
from spillway_operator import worker as worker_module
from spillway_operator.decide.observed import Desired, Observed, OperatorFacts
from spillway_operator.decide.reconcile import reconcile
from spillway_operator.exporter import OperatorExporter
from spillway_operator.kube.api_client import ApiClient
from spillway_operator.kube.apply import Applier
from spillway_operator.kube.events import EventPoster
from spillway_operator.kube.key_queue import KeyQueue
from spillway_operator.kube.store import Key, Store, project_attempt, project_job
from spillway_operator.measured import reservations as reservations_module
from spillway_operator.measured.cluster import Cluster
from spillway_operator.measured.metrics_source import MetricsSource
from spillway_operator.measured.operator_config import OperatorConfig
from spillway_operator.measured.reservations import Reservations
from spillway_operator.observe import Observer
from spillway_operator.plan_service import PlanService
from spillway_operator.progress.outbox import ProgressOutbox, Received
from spillway_operator.worker import MOST_ROUNDS, JobCallbacks, Worker

PLAN = PlanStatus.model_validate({"configMap": "x", "nodes": ["node-0"], "podMemory": "1Gi", "bytes": {"host": "1Gi"}})


@pytest.fixture(autouse=True)
def plans_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the machine takes to find one."""
    monkeypatch.setattr(worker_module, "PLAN_SECONDS", HANG_SECONDS)


class Clock:
    """Of the worker, set by hand."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


class Bench:
    """A worker with everything behind it but watches."""

    def __init__(self, api: FakeApi, client: ApiClient) -> None:
        self.api = api
        self.store = Store()
        self.queue: KeyQueue[Key] = KeyQueue()
        self.outbox = ProgressOutbox()
        self.exporter = OperatorExporter()
        self.forgotten: list[Key] = []
        self.events = EventPoster(client, self.exporter.event)
        reservations = Reservations(15.0)
        self.plans = PlanService(self.queue.add, self.exporter.plan)
        cluster = Cluster(
            client, MetricsSource(), reservations, node_reader=False, config=OperatorConfig(client, True, lambda: None)
        )
        self.worker = Worker(
            self.queue,
            Observer(client, self.store, cluster, reservations, lambda: OperatorFacts(trainer_image="trainer:1")),
            Applier(client, self.store),
            self.outbox,
            self.events,
            self.exporter,
            self.plans,
            JobCallbacks(self.forgotten.append, lambda job, ended: None),
        )

    async def look(self) -> None:
        await self.worker.look(KEY)

    def result(self, name: str) -> float:
        labels = {"result": name}
        return self.exporter.registry.get_sample_value("spillway_operator_reconciles_total", labels) or 0.0

    def attempt(self, number: int = 1, **status: Any) -> None:
        """The Job controller writes the status of an attempt's Job, and the watch reports it."""
        found = self.api.get("jobs", f"demo-{number}")
        self.store.put_attempt(project_attempt(self.api.put("jobs", found | {"status": status})))

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.api.get("trainingjobs", "demo").get("status") or {})

    def take_writes(self) -> list[str]:
        """What was written since the last call, without events."""
        taken = [f"{method} {path.rsplit('/', 2)[-1]}" for method, path in self.api.writes if "events" not in path]
        self.api.requests.clear()
        return taken


def on_a_bench(scenario: Callable[[Bench], Awaitable[None]]) -> None:
    async def run(api: FakeApi, client: ApiClient, _: Counts) -> None:
        bench = Bench(api, client)
        found = document()
        found["metadata"] = {"name": "demo"}
        bench.store.put_job(project_job(api.put("trainingjobs", found)))
        plans = asyncio.create_task(bench.plans.run())
        try:
            await scenario(bench)
        finally:
            plans.cancel()
            await asyncio.wait([plans])

    with_cluster(run)


def report(step: int, attempt: int = 1, uid: str = "uid-demo") -> Received:
    found = {"spillway": {"epoch": attempt, "step": step, "steps": 1000, "loss": 2.5}}
    return Received(ProgressReport.model_validate(found), uid, attempt, "2026-11-21T12:00:00Z")


def test_a_start_is_a_contract_a_job_and_one_status() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.look()
        assert bench.take_writes() == ["POST configmaps", "POST jobs", "PATCH status"]
        assert bench.status["state"] == "Starting"
        assert bench.result("done") == 1.0

    on_a_bench(scenario)


def test_a_second_look_writes_nothing() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.look()
        bench.take_writes()
        await bench.look()
        assert bench.take_writes() == []

    on_a_bench(scenario)


def test_running_and_complete_are_one_status_each() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.look()
        bench.take_writes()
        bench.attempt(active=1, ready=1)
        await bench.look()
        assert (bench.take_writes(), bench.status["state"]) == (["PATCH status"], "Running")
        bench.attempt(succeeded=1, conditions=[{"type": "Complete", "status": "True"}])
        await bench.look()
        assert (bench.take_writes(), bench.status["state"]) == (["PATCH status"], "Complete")

    on_a_bench(scenario)


def test_a_retry_is_a_contract_a_job_and_one_status() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.look()
        ended = {"name": "trainer", "state": {"terminated": {"exitCode": 1, "reason": "Error"}}}
        bench.api.put("pods", pod(1, phase="Failed", containerStatuses=[ended]))
        bench.attempt(failed=1, conditions=[{"type": "Failed", "status": "True"}])
        bench.take_writes()
        await bench.look()
        assert bench.take_writes() == ["POST configmaps", "POST jobs", "PATCH status"]
        assert bench.status["attempts"]["total"] == 2

    on_a_bench(scenario)


@pytest.mark.parametrize(("method", "path"), [("POST", "configmaps"), ("POST", "jobs"), ("PATCH", "trainingjobs")])
@pytest.mark.parametrize("after", [False, True], ids=["before it is done", "after it is done"])
def test_api_server_crash_at_a_write_neither_loses_nor_repeats_an_attempt(method: str, path: str, after: bool) -> None:
    async def scenario(bench: Bench) -> None:
        bench.api.fail(method, path, 504, after=after)
        await bench.look()
        assert bench.result("unavailable") == 1.0
        await bench.look()
        assert bench.result("done") == 1.0
        names = {
            plural: [name for kind, _, name in bench.api.objects if kind == plural] for plural in ("configmaps", "jobs")
        }
        assert names == {"configmaps": ["demo-1"], "jobs": ["demo-1"]}
        assert bench.status["state"] == "Starting"

    on_a_bench(scenario)


def test_a_foreign_object_with_a_childs_name_is_said_and_left_alone() -> None:
    async def scenario(bench: Bench) -> None:
        bench.api.put("configmaps", {"metadata": {"name": "demo-1"}, "data": {"a": "b"}})
        await bench.look()
        accepted = next(found for found in bench.status["conditions"] if found["type"] == "Accepted")
        assert (accepted["status"], accepted["reason"]) == ("False", "NameConflict")
        assert bench.api.get("configmaps", "demo-1")["data"] == {"a": "b"}
        assert bench.api.count("DELETE") == 0

    on_a_bench(scenario)


def test_a_rejected_child_is_said_in_the_servers_words() -> None:
    async def scenario(bench: Bench) -> None:
        bench.api.fail("POST", "jobs", 403, times=2)
        await bench.look()
        assert "planned" in json.dumps(bench.status["conditions"])
        assert ("jobs", "team", "demo-1") not in bench.api.objects

    on_a_bench(scenario)


def test_due_report_is_written_and_an_early_one_joins_the_next_write() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.look()
        bench.attempt(active=1, ready=1)
        await bench.look()
        bench.take_writes()
        bench.outbox.put(KEY, report(1), now=100.0)
        assert bench.outbox.release(100.0) == KEY
        await bench.look()
        assert (bench.take_writes(), bench.status["progress"]["step"]) == (["PATCH status"], 1)
        bench.outbox.put(KEY, report(5), now=101.0)
        await bench.look()
        assert (bench.take_writes(), bench.status["progress"]["step"]) == ([], 1)
        bench.attempt(failed=1, conditions=[{"type": "Complete", "status": "True"}])
        await bench.look()
        assert len(bench.take_writes()) == 1
        assert bench.outbox.newest(KEY) is None

    on_a_bench(scenario)


def test_a_report_of_an_attempt_that_is_over_is_not_written() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.look()
        bench.attempt(active=1, ready=1)
        await bench.look()
        bench.take_writes()
        bench.outbox.put(KEY, report(9, attempt=7), now=100.0)
        bench.outbox.release(100.0)
        await bench.look()
        assert bench.take_writes() == []
        assert bench.outbox.released(KEY) is None

    on_a_bench(scenario)


def test_a_job_that_is_gone_is_forgotten() -> None:
    async def scenario(bench: Bench) -> None:
        bench.api.remove("trainingjobs", "team", "demo")
        await bench.look()
        assert bench.forgotten == [KEY]
        assert bench.take_writes() == []

    on_a_bench(scenario)


def test_a_namesake_of_a_job_inherits_nothing() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.look()
        bench.attempt(active=1, ready=1)
        await bench.look()
        (attempt,) = bench.store.attempts_of(KEY)
        for plural, name in (("trainingjobs", "demo"), ("jobs", "demo-1"), ("configmaps", "demo-1")):
            bench.api.remove(plural, "team", name)
        bench.store.remove_attempt(attempt)
        renewed = document()
        renewed["metadata"] = {"name": "demo", "uid": "uid-of-the-namesake"}
        bench.store.put_job(project_job(bench.api.put("trainingjobs", renewed)))
        await bench.look()
        assert bench.forgotten == [KEY]
        bench.attempt(active=1, ready=1)
        bench.outbox.put(KEY, report(900), now=100.0)  # it was on its way all the time
        assert bench.outbox.release(100.0) == KEY
        await bench.look()
        assert bench.status["state"] == "Running"
        assert bench.status["progress"]["step"] == 0
        bench.outbox.put(KEY, report(3, uid="uid-of-the-namesake"), now=101.0)
        assert bench.outbox.release(101.0) == KEY
        await bench.look()
        assert bench.status["progress"]["step"] == 3
        assert bench.forgotten == [KEY]

    on_a_bench(scenario)


def test_no_new_attempt_starts_while_pods_of_a_deleted_job_live() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.look()
        bench.attempt(active=1, ready=1)
        await bench.look()
        orphan = pod(1, phase="Running")
        del orphan["metadata"]["ownerReferences"]
        bench.api.put("pods", orphan)
        (attempt,) = bench.store.attempts_of(KEY)
        bench.api.remove("jobs", "team", "demo-1")
        bench.store.remove_attempt(attempt)
        bench.take_writes()
        await bench.look()
        assert "POST jobs" not in bench.take_writes()
        bench.api.remove("pods", "team", "demo-1-0")
        await bench.look()
        assert "POST jobs" in bench.take_writes()

    on_a_bench(scenario)


def test_a_deletion_is_asked_for_once_in_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.look()
        bench.attempt(active=1, ready=1)
        await bench.look()
        deletions: list[str] = []

        async def delete(_resource: object, _namespace: str, name: str, _uid: str) -> dict[str, Any]:
            deletions.append(name)
            found = bench.api.get("jobs", name)
            found["metadata"]["deletionTimestamp"] = "2026-11-21T12:00:00Z"
            return bench.api.put("jobs", found)

        monkeypatch.setattr(bench.worker._applier._client, "delete", delete)
        found = bench.api.get("trainingjobs", "demo")
        found["spec"]["suspend"] = True
        bench.store.put_job(project_job(bench.api.put("trainingjobs", found)))
        for _look in range(2):
            await bench.look()
        assert deletions == ["demo-1"]
        assert bench.result("restless") == 0.0

    on_a_bench(scenario)


def test_a_look_ends_where_a_plan_takes_long_and_starts_the_job_once_it_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, plan_of = asyncio.Event(), plan_service._PlanProcess.answer

    async def slow(process: Any, question: PlanQuestion, seconds: float) -> Any:
        await found.wait()
        return await plan_of(process, question, seconds)

    async def scenario(bench: Bench) -> None:
        forget_plans()
        monkeypatch.setattr(worker_module, "PLAN_SECONDS", 0.0)
        monkeypatch.setattr(plan_service._PlanProcess, "answer", slow)
        await bench.look()
        assert bench.take_writes() == [], "nothing is known yet"
        assert (bench.result("done"), len(bench.queue)) == (1.0, 0)
        found.set()
        while not bench.api.writes:
            assert await bench.queue.get() == KEY
            bench.queue.done(KEY)
            await bench.look()
        assert bench.take_writes() == ["POST configmaps", "POST jobs", "PATCH status"]

    on_a_bench(scenario)


def test_while_a_plan_is_missing_the_worker_looks_at_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both need plans that are never found, and there is one worker."""

    async def never(process: Any, question: PlanQuestion, seconds: float) -> Any:
        await asyncio.Event().wait()

    async def scenario(bench: Bench) -> None:
        forget_plans()
        monkeypatch.setattr(worker_module, "PLAN_SECONDS", 0.0)
        monkeypatch.setattr(plan_service._PlanProcess, "answer", never)
        other = document({"spec.training.steps": 77})
        other["metadata"] = {"name": "other"}
        seen = project_job(bench.api.put("trainingjobs", other))
        bench.store.put_job(seen)
        bench.queue.add(KEY)
        bench.queue.add(seen.key)
        worker = asyncio.create_task(bench.worker.run())
        async with asyncio.timeout(HANG_SECONDS), bench.plans._changed:
            await bench.plans._changed.wait_for(lambda: len(bench.plans) == 2)
        worker.cancel()
        await asyncio.wait([worker])

    on_a_bench(scenario)


def test_each_decision_sees_the_reservations_of_the_previous_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs that wait for the same plan."""
    seen: dict[str, int] = {}

    def watched(observed: Observed, now: str) -> Desired:
        desired = reconcile(observed, now)
        if desired.creates:
            seen[observed.job.name] = len(observed.cluster.reservations)
        return desired

    async def scenario(bench: Bench) -> None:
        forget_plans()
        other = document()
        other["metadata"] = {"name": "other"}
        bench.store.put_job(project_job(bench.api.put("trainingjobs", other)))
        monkeypatch.setattr(worker_module, "reconcile", watched)
        monkeypatch.setattr(reservations_module, "_decided_plan", lambda _: PLAN)
        await asyncio.gather(bench.worker.look(KEY), bench.worker.look(("team", "other")))
        assert sorted(seen.values()) == [0, 1]

    on_a_bench(scenario)


def test_a_decision_that_never_rests_is_slowed_down(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = iter(range(1000))

    def restless(_observed: Observed, _now: str) -> Desired:
        return Desired(status={"state": str(next(turns))})

    async def scenario(bench: Bench) -> None:
        monkeypatch.setattr(worker_module, "reconcile", restless)
        await bench.look()
        assert len(bench.take_writes()) == MOST_ROUNDS
        assert bench.queue._failures == {KEY: (False, 1)}

    on_a_bench(scenario)


def test_a_defect_in_a_decision_stops_that_job_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_observed: Observed, _now: str) -> Desired:
        raise ZeroDivisionError

    async def scenario(bench: Bench) -> None:
        monkeypatch.setattr(worker_module, "reconcile", broken)
        await bench.look()
        assert bench.result("failed") == 1.0
        assert bench.queue._failures == {KEY: (False, 1)}

    on_a_bench(scenario)
