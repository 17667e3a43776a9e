"""Which devices other jobs hold, and for how long, as the operator's store knows it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from fakes.fake_api import FakeApi
from harness.operator_parts import child, labels, owned, put_job
from spillway.placement.cluster_view import HeldDevices
from spillway_operator.decide.observed import JobObject
from spillway_operator.kube.store import Store, project_attempt
from spillway_operator.measured.held_devices import Holders

CUDA: dict[str, Any] = {"parallelism": {"device": "Cuda", "nodes": 2, "devicesPerNode": 4}}
PLAN = {"node": "8x-h100-80", "nodes": ["node-h"], "stepSeconds": "2"}
TRAINING = {"steps": 1000, "globalBatchSize": 8, "sequenceLength": 128}


def stored(status: dict[str, Any], attempt: dict[str, Any] | None = None, **spec: Any) -> tuple[Store, JobObject]:
    """`other` has an attempt, and `demo` is to be placed."""
    api, store = FakeApi(), Store()
    store.put_job(put_job(api, "other", status, training=TRAINING, **{**CUDA, **spec}))
    asking = put_job(api, "demo", training=TRAINING, **CUDA)
    store.put_job(asking)
    for name in ("other", "demo"):
        found = child("Job", 1, **(attempt or {}))
        found["metadata"] |= {
            "name": f"{name}-1",
            "labels": labels(1, name),
            "ownerReferences": owned(name=name, uid=f"uid-{name}"),
        }
        store.put_attempt(project_attempt(api.put("jobs", found)))
    return store, asking


@pytest.mark.parametrize(
    ("progress", "seconds"),
    [
        ({}, 2000.0),
        ({"step": 400, "steps": 1000}, 1200.0),
        ({"step": 400, "steps": 1000, "tokensPerSecond": "1024"}, 600.0),
        ({"step": 1000, "steps": 1000}, 0.0),
        ({"step": "of another version"}, 2000.0),
    ],
)
def test_a_job_holds_its_devices_for_the_steps_that_are_left(progress: dict[str, Any], seconds: float) -> None:
    store, asking = stored({"plan": PLAN, "progress": progress})
    assert Holders(store).besides(asking) == (HeldDevices("8x-h100-80", ("node-h",), "nvidia.com/gpu", 8, seconds),)


def test_nothing_is_known_of_a_job_whose_plan_is_not_told() -> None:
    store, asking = stored({})
    assert Holders(store).besides(asking) == (HeldDevices("", (), "nvidia.com/gpu", 8, None),)


@pytest.mark.parametrize(
    "attempt",
    [
        {"status": {"conditions": [{"type": "Complete", "status": "True"}]}},
        {"spec": {"suspend": True}},
    ],
    ids=["has ended", "waits in a queue"],
)
def test_an_attempt_that_runs_nothing_holds_nothing(attempt: dict[str, Any]) -> None:
    store, asking = stored({"plan": PLAN}, attempt)
    assert Holders(store).besides(asking) == ()


def test_jobs_on_cpus_hold_no_devices() -> None:
    store, asking = stored({"plan": PLAN}, parallelism={"nodes": 1})
    assert Holders(store).besides(asking) == ()


@pytest.mark.parametrize(("device", "holds"), [("Cuda", True), ("Cpu", False)])
def test_a_job_of_device_auto_holds_what_its_plan_is_made_for(device: str, holds: bool) -> None:
    store, asking = stored({"plan": PLAN | {"device": device}}, parallelism={"nodes": 1})
    assert bool(Holders(store).besides(asking)) is holds


def test_what_a_job_holds_is_read_once_for_each_of_its_states() -> None:
    store, asking = stored({"plan": PLAN})
    holders = Holders(store)
    (before,), (again,) = holders.besides(asking), holders.besides(asking)
    assert again is before
    (other,) = (one for one in store.jobs if one.name == "other")
    status = json.dumps({"plan": PLAN, "progress": {"step": 900, "steps": 1000}}).encode()
    store.put_job(replace(other, status=status, resource_version=other.resource_version + 100))
    (after,) = holders.besides(asking)
    assert (before.seconds_left, after.seconds_left) == (2000.0, 200.0)
