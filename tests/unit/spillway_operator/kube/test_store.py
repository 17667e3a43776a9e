"""What the operator believes when watches, lists and its own writes tell different stories."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import spillway_operator.kube.store as store_module
from spillway_operator.decide.observed import AttemptObject, JobObject
from spillway_operator.kube.store import MOST_TOMBSTONES, Store, project_attempt, project_job

KEY = ("team", "demo")
OWNER = {
    "apiVersion": "spillway.dev/v1alpha1",
    "kind": "TrainingJob",
    "name": "demo",
    "uid": "uid-demo",
    "controller": True,
}


def job(version: int, uid: str = "uid-demo", **changes: Any) -> JobObject:
    metadata = {"name": "demo", "namespace": "team", "uid": uid, "resourceVersion": str(version)} | changes
    return project_job({"metadata": metadata, "spec": {"b": 1, "a": 2}})


def attempt(version: int, number: int = 1, **metadata: Any) -> AttemptObject:
    found = {
        "name": f"demo-{number}",
        "namespace": "team",
        "uid": f"uid-demo-{number}",
        "resourceVersion": str(version),
        "labels": {"spillway.dev/job": "demo", "spillway.dev/attempt": str(number)},
        "ownerReferences": [OWNER],
    }
    return project_attempt({"metadata": found | metadata, "spec": {}, "status": {"ready": version}})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(store_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_watch_lags_from_when_a_change_is_known_until_it_delivers_that_or_a_newer_one(clock: list[float]) -> None:
    store = Store()
    clock[0] += 500
    assert store.jobs.lag_seconds == 0.0, "an idle cluster lets nothing grow"
    store.put_job(job(5))  # the answer to a write
    clock[0] += 7
    assert store.jobs.lag_seconds == 7.0
    store.put_job(job(6))
    store.jobs.delivered(job(4))
    clock[0] += 1
    assert store.jobs.lag_seconds == 8.0, "an older version is not what it owes"
    assert store.attempts.lag_seconds == 0.0
    store.jobs.delivered(job(6))
    assert store.jobs.lag_seconds == 0.0


def test_watch_owes_nothing_of_an_object_that_is_gone(clock: list[float]) -> None:
    store = Store()
    store.put_job(job(5))
    store.put_attempt(attempt(6))
    clock[0] += 3
    store.remove_job(job(7))
    store.put_attempt(attempt(8, uid="another"))
    assert store.jobs.lag_seconds == 0.0
    store.attempts.delivered(attempt(8, uid="another"))
    assert store.attempts.lag_seconds == 0.0, "the first of that name is known to be gone"


def test_the_newest_resource_version_wins_whoever_reports_it() -> None:
    store = Store()
    assert store.put_job(job(9)) == {KEY}
    assert store.put_job(job(10)) == {KEY}
    assert store.put_job(job(9)) == set()
    assert store.jobs.get(KEY) == job(10)


def test_the_echo_of_our_own_write_is_no_news() -> None:
    store = Store()
    store.put_job(job(9))
    assert store.put_job(job(9)) == set()


def test_a_late_event_does_not_bring_back_what_is_gone() -> None:
    store = Store()
    store.put_job(job(9))
    assert store.remove_job(job(12)) == {KEY}
    assert store.put_job(job(11)) == set()
    assert store.jobs.get(KEY) is None


def test_an_old_deletion_does_not_remove_a_newer_object_of_the_same_uid() -> None:
    store = Store()
    store.put_job(job(9))
    assert store.remove_job(job(8)) == set()
    assert store.jobs.get(KEY) == job(9)


def test_the_deletion_of_a_namesake_leaves_the_present_object() -> None:
    store = Store()
    store.put_job(job(20, uid="new"))
    assert store.remove_job(job(30, uid="old")) == set()
    assert store.jobs.get(KEY) == job(20, uid="new")


def test_a_namesake_replaces_an_object_whose_deletion_was_missed() -> None:
    store = Store()
    store.put_job(job(9, uid="old"))
    assert store.put_job(job(20, uid="new")) == {KEY}
    assert store.jobs.by_uid("old") is None
    assert store.put_job(job(9, uid="old")) == set()


def test_tombstones_do_not_grow_for_ever() -> None:
    store = Store()
    for number in range(MOST_TOMBSTONES + 5):
        store.remove_job(job(number + 1, uid=f"uid-{number}"))
    assert len(store.jobs._tombstones) == MOST_TOMBSTONES


def test_an_attempt_wakes_its_training_job() -> None:
    store = Store()
    assert store.put_attempt(attempt(5)) == {KEY}
    assert store.put_attempt(attempt(6, number=2)) == {KEY}
    assert [found.name for found in store.attempts_of(KEY)] == ["demo-1", "demo-2"]
    assert store.remove_attempt(attempt(7)) == {KEY}
    assert [found.name for found in store.attempts_of(KEY)] == ["demo-2"]


def test_an_attempt_without_our_owner_reference_is_nobodys() -> None:
    found = attempt(5, ownerReferences=[])
    assert (found.owner_uid, found.owner_name) == ("", "demo")
    stranger = attempt(5, ownerReferences=[OWNER | {"kind": "CronJob", "apiVersion": "batch/v1", "name": "cron"}])
    assert (stranger.owner_uid, stranger.owner_name) == ("", "demo")


def test_a_job_whose_label_moves_wakes_both_training_jobs() -> None:
    store = Store()
    store.put_attempt(attempt(5, ownerReferences=[]))
    moved = attempt(6, ownerReferences=[], labels={"spillway.dev/job": "other"})
    assert store.put_attempt(moved) == {KEY, ("team", "other")}
    assert store.attempts_of(KEY) == ()
    assert store.attempts_of(("team", "other")) == (moved,)


@pytest.mark.parametrize("label", ["", "-1", "1e3", "٣", "9" * 40, "x"])
def test_an_attempt_label_that_is_no_number_is_attempt_zero(label: str) -> None:
    assert attempt(5, labels={"spillway.dev/attempt": label}).attempt == 0


def test_a_terminal_condition_counts_only_when_it_is_true() -> None:
    found = project_attempt(
        {
            "metadata": {"name": "demo-1", "namespace": "team", "uid": "u", "resourceVersion": "1"},
            "status": {
                "conditions": [
                    {"type": "Complete", "status": "False"},
                    {"type": "FailureTarget", "status": "True"},
                    {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"},
                ]
            },
        }
    )
    assert (found.outcome, found.reason) == ("Failed", "BackoffLimitExceeded")


def test_equal_specs_have_equal_bytes() -> None:
    assert job(1).spec == b'{"a":2,"b":1}'
