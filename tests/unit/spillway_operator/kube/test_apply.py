"""What becomes of a decision when the API server has its own opinion."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fakes.fake_api import FakeApi
from harness.operator_parts import KEY, Counts, child, owned, put_job, with_cluster
from spillway_operator.decide.observed import Deletion
from spillway_operator.kube.api_client import ApiClient, Conflict, Unavailable
from spillway_operator.kube.apply import DONE, Applier
from spillway_operator.kube.store import Store, project_attempt, project_job

CONTRACT = {"job.json": "{}", "plan.json": "{}", "decision.json": "{}", "attempt.json": "{}"}
MARKED = {"uid": "uid-demo-1", "deletionTimestamp": "2026-11-21T12:00:00Z"}
CHILDREN = (child("ConfigMap", data=CONTRACT), child("Service"), child("Job", spec={}))


def started(api: FakeApi, client: ApiClient) -> tuple[Store, Applier]:
    store = Store()
    store.put_job(put_job(api))
    return store, Applier(client, store)


def test_children_are_created_in_order_and_the_job_enters_the_store() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        store, applier = started(api, client)
        job = store.jobs.get(KEY)
        assert job is not None
        assert await applier.create(job, CHILDREN) == DONE
        assert [path.rsplit("/")[-1] for _, path in api.writes] == ["configmaps", "services", "jobs"]
        assert [attempt.name for attempt in store.attempts_of(KEY)] == ["demo-1"]

    with_cluster(scenario)


def test_a_child_that_exists_and_is_ours_is_left_alone() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        store, applier = started(api, client)
        job = store.jobs.get(KEY)
        assert job is not None
        await applier.create(job, CHILDREN)
        assert await applier.create(job, CHILDREN) == DONE
        assert api.count("POST") == 6
        assert api.count("DELETE") == api.count("PATCH") == api.count("PUT") == 0

    with_cluster(scenario)


def test_a_lost_answer_is_found_again() -> None:
    """The write happened, the operator was told otherwise: the next try finds its own work."""

    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        store, applier = started(api, client)
        job = store.jobs.get(KEY)
        assert job is not None
        api.fail("POST", "jobs", 504, after=True)
        with pytest.raises(Unavailable):
            await applier.create(job, CHILDREN)
        assert store.attempts_of(KEY) == ()
        assert await applier.create(job, CHILDREN) == DONE
        assert len(store.attempts_of(KEY)) == 1

    with_cluster(scenario)


@pytest.mark.parametrize("references", [[], owned(uid="uid-of-another"), [owned()[0] | {"controller": False}]])
def test_a_foreign_namesake_is_a_conflict_and_stops_the_rest(references: list[dict[str, Any]]) -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        store, applier = started(api, client)
        job = store.jobs.get(KEY)
        assert job is not None
        api.put("services", {"metadata": {"name": "demo-1", "ownerReferences": references}})
        assert (await applier.create(job, CHILDREN)).conflict == "Service demo-1"
        assert ("jobs", "team", "demo-1") not in api.objects

    with_cluster(scenario)


def test_a_contract_of_ours_with_another_decision_must_be_read_first() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        store, applier = started(api, client)
        job = store.jobs.get(KEY)
        assert job is not None
        api.put("configmaps", child("ConfigMap", data=CONTRACT | {"plan.json": '{"other": 1}'}))
        applied = await applier.create(job, CHILDREN)
        assert applied.superseded
        assert ("jobs", "team", "demo-1") not in api.objects

    with_cluster(scenario)


def test_a_rejection_is_the_servers_sentence() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        store, applier = started(api, client)
        job = store.jobs.get(KEY)
        assert job is not None
        api.fail("POST", "jobs", 403)
        assert (await applier.create(job, CHILDREN)).rejection == "Job demo-1: planned"

    with_cluster(scenario)


def test_a_deletion_names_the_uid_and_waits_for_the_pods() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        store, applier = started(api, client)
        job = store.jobs.get(KEY)
        assert job is not None
        api.put("jobs", child("Job"))
        await applier.delete(job, (Deletion("Job", "demo-1", "uid-of-another"), Deletion("Job", "gone", "uid")))
        assert ("jobs", "team", "demo-1") in api.objects
        await applier.delete(job, (Deletion("Job", "demo-1", "uid-demo-1"),))
        assert ("jobs", "team", "demo-1") not in api.objects
        assert api.bodies[-1]["propagationPolicy"] == "Foreground"

    with_cluster(scenario)


def test_an_old_contract_and_service_are_deleted_if_they_are_the_jobs_own() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        store, applier = started(api, client)
        job = store.jobs.get(KEY)
        assert job is not None
        uid = api.put("configmaps", child("ConfigMap"))["metadata"]["uid"]
        foreign = child("Service", 2)
        foreign["metadata"]["ownerReferences"] = owned("another")
        for service in (child("Service"), foreign):
            api.put("services", service)
        old = (Deletion("ConfigMap", "demo-1", uid), *(Deletion("Service", f"demo-{n}", "") for n in (1, 2, 3)))
        await applier.delete(job, old)
        assert {key for key in api.objects if key[0] in ("configmaps", "services")} == {("services", "team", "demo-2")}

    with_cluster(scenario)


def test_deleted_job_is_known_to_be_deleting_before_the_watch_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        store, applier = started(api, client)
        job = store.jobs.get(KEY)
        assert job is not None
        store.put_attempt(project_attempt(api.put("jobs", child("Job"))))

        async def marked(*_: object) -> dict[str, Any]:
            return api.put("jobs", child("Job") | {"metadata": child("Job")["metadata"] | MARKED})

        monkeypatch.setattr(client, "delete", marked)
        await applier.delete(job, (Deletion("Job", "demo-1", "uid-demo-1"),))
        assert [found.deleting for found in store.attempts_of(KEY)] == [True]

    with_cluster(scenario)


@pytest.mark.parametrize("before", ["gone already", "replaced", "there"])
def test_a_job_that_a_deletion_finds_gone_leaves_the_store(before: str) -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        store, applier = started(api, client)
        job = store.jobs.get(KEY)
        assert job is not None
        store.put_attempt(project_attempt(api.put("jobs", child("Job"))))
        if before != "there":
            api.remove("jobs", "team", "demo-1")
        if before == "replaced":
            api.put("jobs", {"metadata": {"name": "demo-1", "uid": "uid-of-another"}})
        await applier.delete(job, (Deletion("Job", "demo-1", "uid-demo-1"),))
        assert store.attempts_of(KEY) == ()

    with_cluster(scenario)


def test_a_training_job_is_deleted_as_it_was_decided_on_or_not_at_all() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        store, applier = started(api, client)
        job = store.jobs.get(KEY)
        assert job is not None
        api.put("trainingjobs", {"metadata": {"name": "demo", "generation": 2}, "spec": {}})  # edited meanwhile
        with pytest.raises(Conflict):
            await applier.delete(job, (Deletion("TrainingJob", "demo", job.uid, job.resource_version),))
        with pytest.raises(Conflict):
            await applier.delete(job, (Deletion("TrainingJob", "demo", "uid-of-another"),))
        assert "deletionTimestamp" not in api.get("trainingjobs", "demo")["metadata"]
        found = project_job(api.get("trainingjobs", "demo"))
        await applier.delete(found, (Deletion("TrainingJob", "demo", found.uid, found.resource_version),))
        assert api.bodies[-1]["propagationPolicy"] == "Foreground"
        assert store.jobs.get(KEY) is None

    with_cluster(scenario)


def test_a_training_job_that_is_gone_already_is_forgotten() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        store, applier = started(api, client)
        job = store.jobs.get(KEY)
        assert job is not None
        api.remove("trainingjobs", "team", "demo")
        await applier.delete(job, (Deletion("TrainingJob", "demo", job.uid, job.resource_version),))
        assert store.jobs.get(KEY) is None

    with_cluster(scenario)


def test_a_field_that_an_older_crd_lacks_is_left_out_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        store, applier = started(api, client)
        api.undeclared = ["attempts.ended", "attempts.restarts"]
        for step in range(3):
            job = store.jobs.get(KEY)
            assert job is not None
            sent = {"state": str(step), "attempts": {"total": 1, "ended": 1, "restarts": 0}}
            assert await applier.write_status(job, sent)
            assert api.get("trainingjobs", "demo")["status"] == {"state": str(step), "attempts": {"total": 1}}
            known = store.jobs.get(KEY)
            assert known is not None
            assert not await applier.write_status(known, sent), "nothing is written for ever"
        assert api.count("PATCH") == 3 + 2, "each field is rejected once"
        said = [record.getMessage() for record in caplog.records if "has no" in record.getMessage()]
        assert said == [
            "the CRD of TrainingJob has no field status.attempts.ended, status.attempts.restarts; install the CRDs "
            "of the operator's version"
        ]

    with_cluster(scenario)


def test_a_status_is_written_once_and_its_answer_enters_the_store() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        store, applier = started(api, client)
        job = store.jobs.get(KEY)
        assert job is not None
        assert await applier.write_status(job, {"state": "Running"})
        known = store.jobs.get(KEY)
        assert known is not None
        assert known.resource_version > job.resource_version
        assert json.loads(known.status) == {"state": "Running"}
        assert not await applier.write_status(known, {"state": "Running"})
        assert api.count("PATCH") == 1
        assert api.bodies[-1]["metadata"]["uid"] == job.uid
        assert "managedFields" not in api.bodies[-1]["metadata"]

    with_cluster(scenario)


def test_a_status_that_the_server_completes_is_not_written_for_ever() -> None:
    """Defaults of a schema make the stored status differ from the one that was sent."""

    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        store, applier = started(api, client)
        api.status_defaults = {"restarts": 0}
        for _look in range(3):
            job = store.jobs.get(KEY)
            assert job is not None
            await applier.write_status(job, {"state": "Running"})
        assert api.count("PATCH") == 1
        assert await applier.write_status(job, {"state": "Complete"})

    with_cluster(scenario)


def test_the_status_of_a_job_that_is_gone_or_replaced_is_dropped() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        store, applier = started(api, client)
        job = store.jobs.get(KEY)
        assert job is not None
        api.get("trainingjobs", "demo")["metadata"]["uid"] = "uid-of-another"
        assert not await applier.write_status(job, {"state": "Running"})
        api.remove("trainingjobs", "team", "demo")
        assert not await applier.write_status(job, {"state": "Running"})

    with_cluster(scenario)
