"""GitOps tools read a TrainingJob: Argo CD by docs/argocd-health.lua, Flux and Helm by kstatus; both in every state.

The Lua runs as in Argo CD: Lua 5.1 with nothing but the base and table functions. `kstatus` below is the part of
sigs.k8s.io/cli-utils/pkg/kstatus that concerns an object of a kind that it does not know.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from lupa import lua51

from harness.places import ROOT
from spillway.errors import RANK_CRASHED
from spillway_operator.decide import conditions as c
from spillway_operator.decide.conditions import Finding, Truth, merge

SCRIPT = (ROOT / "docs" / "argocd-health.lua").read_text(encoding="utf-8")
NOT_IN_ARGO_CD = ("string", "io", "os", "math", "debug", "package", "coroutine", "require", "python")
NOW = "2026-11-22T00:00:00Z"

Object = dict[str, Any]
Health = Callable[[Object], tuple[str, str]]


def interpreter(script: str = SCRIPT) -> Health:
    lua = lua51.LuaRuntime(register_eval=False, unpack_returned_tuples=True)
    run = lua.eval("function(text) return assert(loadstring(text)) end")(script)
    for name in NOT_IN_ARGO_CD:
        lua.globals()[name] = None

    def health(job: Object) -> tuple[str, str]:
        lua.globals().obj = lua.table_from(job, recursive=True)
        found = run()
        return str(found.status), str(found.message)

    return health


@pytest.fixture(scope="module")
def health() -> Health:
    return interpreter()


def kstatus(job: Object) -> str:
    if "deletionTimestamp" in job["metadata"]:
        return "Terminating"
    status = job.get("status", {})
    if status.get("observedGeneration", job["metadata"]["generation"]) != job["metadata"]["generation"]:
        return "InProgress"
    held = {condition["type"]: condition["status"] for condition in status.get("conditions", [])}
    if held.get(c.RECONCILING) == "True":
        return "InProgress"
    if held.get(c.STALLED) == "True":
        return "Failed"
    return "Current" if held.get(c.READY, "True") == "True" else "InProgress"


def job_with(*findings: Finding, suspend: bool = False) -> Object:
    found = [held.model_dump(by_alias=True, exclude_none=True) for held in merge((), findings, 3, NOW)]
    return {
        "metadata": {"name": "demo", "generation": 3},
        "spec": {"suspend": suspend, "training": {"steps": 40}},
        "status": {"observedGeneration": 3, "conditions": found},
    }


def documented(type_: str) -> list[Finding]:
    """Each reason of a type with the status that it comes with."""
    found = []
    for reason, meaning in c.REASONS[type_].items():
        word, colon, _ = meaning.partition(":")
        status: Truth = "False" if colon and word == "False" else "Unknown" if colon and word == "Unknown" else "True"
        found.append(Finding(type_, status, reason, f"why {type_} is {reason}"))
    return found


def states() -> Iterator[tuple[Finding, ...]]:
    """Every combination of the conditions that decide, more than the operator can produce."""
    failed = [finding for finding in documented(c.FAILED) if finding.reason in ("NotFailed", RANK_CRASHED)]
    types = (c.ACCEPTED, c.PLANNED, c.QUOTA_RESERVED, c.RUNNING, c.SUSPENDED, c.COMPLETE)
    few = {c.PLANNED: ("Planned", "NoNode"), c.QUOTA_RESERVED: ("Waiting", "Admitted")}
    choices = [[f for f in documented(type_) if f.reason in few.get(type_, (f.reason,))] for type_ in types]
    yield from itertools.product(*choices, failed)


def expected(findings: tuple[Finding, ...]) -> str:
    """From the conditions' own meaning, not from the summary that the script reads."""
    held = {finding.type: finding for finding in findings}
    rejected = held[c.ACCEPTED].reason in (c.INVALID_SPEC, c.UNSUPPORTED)
    if held[c.FAILED].status == "True" or (rejected and held[c.COMPLETE].status != "True"):
        return "Degraded"
    if held[c.COMPLETE].status == "True":
        return "Healthy"
    if held[c.SUSPENDED].status == "True":
        return "Suspended"
    trains = held[c.RUNNING].reason == "Running" and held[c.SUSPENDED].reason != c.STOPPING
    return "Healthy" if trains else "Progressing"


def test_argo_cd_knows_the_health_of_a_job_in_every_state(health: Health) -> None:
    seen = set()
    for findings in states():
        word, message = health(job_with(*findings))
        assert word == expected(findings), findings
        assert message, findings
        seen.add(word)
    assert seen == {"Healthy", "Progressing", "Degraded", "Suspended"}


def test_flux_and_helm_read_the_same_from_kstatus(health: Health) -> None:
    same = {"Healthy": "Current", "Suspended": "Current", "Progressing": "InProgress", "Degraded": "Failed"}
    for findings in states():
        held = {finding.type: finding for finding in findings}
        if held[c.COMPLETE].status == "True" and held[c.ACCEPTED].reason in (c.INVALID_SPEC, c.UNSUPPORTED):
            continue  # no spec is looked at after the end
        job = job_with(*findings)
        assert kstatus(job) == same[health(job)[0]], findings


@pytest.mark.parametrize(
    ("findings", "suspend", "said"),
    [
        ((c.true(c.FAILED, RANK_CRASHED, "ValueError: bad"),), False, f"Failed: {RANK_CRASHED}: ValueError: bad"),
        ((c.false(c.ACCEPTED, c.INVALID_SPEC, "spec.x = 1"),), False, "Stalled: Rejected: spec.x = 1"),
        ((c.true(c.ACCEPTED, "Valid"), c.false(c.PLANNED, "NoNode", "no room")), False, "Planned: NoNode: no room"),
        ((c.false(c.RUNNING, "ContainerWaiting", "no image"),), False, "Running: ContainerWaiting: no image"),
        ((c.true(c.RUNNING, "Running"), c.false(c.SUSPENDED, c.STOPPING)), True, "Suspended: Stopping"),
        ((c.true(c.RUNNING, "Running"),), False, "step 7 of 40"),
    ],
)
def test_the_message_is_the_one_that_matters(
    health: Health, findings: tuple[Finding, ...], suspend: bool, said: str
) -> None:
    job = job_with(*findings, suspend=suspend)
    job["status"]["progress"] = {"step": 7, "steps": 40}
    assert health(job)[1] == said


def test_what_the_operator_has_not_looked_at_is_never_healthy(health: Health) -> None:
    new = {"metadata": {"generation": 1}, "spec": {"suspend": False}}
    assert health(new) == ("Progressing", "the operator has not looked at it yet")
    edited = job_with(c.true(c.RUNNING, "Running"))
    edited["metadata"]["generation"] = 4
    assert health(edited)[0] == "Progressing"
    assert kstatus(edited) == "InProgress"
    deleted = job_with(c.true(c.COMPLETE, "Completed"))
    deleted["metadata"]["deletionTimestamp"] = NOW
    assert health(deleted)[0] == "Progressing"


def test_a_wave_can_wait_for_the_end_of_training() -> None:
    script, changes = re.subn("local wait_for_the_end = false", "local wait_for_the_end = true", SCRIPT)
    assert changes == 1
    waits = interpreter(script)
    assert waits(job_with(c.true(c.RUNNING, "Running")))[0] == "Progressing"
    assert waits(job_with(c.true(c.COMPLETE, "Completed")))[0] == "Healthy"
