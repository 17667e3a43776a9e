"""Single observations for `reconcile`, and its answers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from cases.job_documents import document
from harness.cluster_model import FACTS, NAME, NAMESPACE, UID, place
from spillway.placement.cluster_view import ClusterView
from spillway_operator.decide.observed import AttemptObject, Desired, JobObject, Observed
from spillway_operator.decide.reconcile import reconcile

NOW = "2026-11-21T10:00:30Z"


def job_object(changes: dict[str, Any] | None = None, status: dict[str, Any] | None = None, **more: Any) -> JobObject:
    spec = json.dumps(document(changes)["spec"]).encode()
    written = json.dumps(status or {}).encode()
    return JobObject(UID, NAME, NAMESPACE, 1, 1, "2026-11-21T10:00:00Z", spec, written, **more)


def observed(changes: dict[str, Any] | None = None, status: dict[str, Any] | None = None, **more: Any) -> Observed:
    """An observation in which everything that can be asked for has been looked up, and nothing was found."""
    fields: dict[str, Any] = {
        "attempts": (),
        "contracts": (),
        "pods": (),
        "claims": (),
        "waiting_gangs": (),
        "queue_says": "",
    } | more
    return Observed(job=job_object(changes, status), facts=FACTS, cluster=ClusterView(), **fields)


def attempt(number: int = 1, **more: Any) -> AttemptObject:
    fields: dict[str, Any] = {"owner_uid": UID, "owner_name": NAME, "creation_time": "2026-11-21T10:00:00Z"} | more
    return AttemptObject(f"job-{number}", f"{NAME}-{number}", NAMESPACE, 1, attempt=number, **fields)


def decide(seen: Observed, now: str = NOW) -> Desired:
    return reconcile(seen, now, place)


def condition(desired: Desired, type_: str) -> dict[str, Any]:
    assert desired.status is not None
    return next(dict(found) for found in desired.status["conditions"] if found["type"] == type_)


def follow_up(seen: Observed, desired: Desired) -> Observed:
    """The same observation after the desired status was written."""
    assert desired.status is not None
    return replace(seen, job=replace(seen.job, status=json.dumps(desired.status).encode()))
