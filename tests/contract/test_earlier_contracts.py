"""What an attempt was begun with outlives an upgrade of the operator: fixtures of real contracts, one folder a version.

The folders are frozen. A new version adds its own and goes on reading the one before.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from harness.cluster_model import NAME, UID
from harness.observations import attempt, condition, decide, observed
from harness.places import FIXTURES
from spillway.api.job_file import JOB_VERSION
from spillway.api.progress import PROGRESS_VERSION, ProgressAnswer, ProgressReport
from spillway.plan import PLAN_VERSION
from spillway_operator.decide.attempt_end import TERMINATION_VERSION, read_termination
from spillway_operator.decide.manifests import read_contract
from spillway_operator.decide.observed import Claim, ContainerEnding, Contract

FOLDER = FIXTURES / "contracts"
VERSIONS = sorted(int(path.name) for path in FOLDER.iterdir())
CLAIMS = (Claim("runs", True, ("ReadWriteMany",)),)
SPEC = {
    "spec.parallelism": {"nodes": 2, "devicesPerNode": 1, "device": "Cpu"},
    "spec.checkpoint": {"claim": "runs", "everySteps": 10},
}
"""of the fixtures' job"""


def text(version: int, name: str) -> str:
    return (FOLDER / str(version) / f"{name}.json").read_text(encoding="utf-8")


def contract(version: int, **changes: str) -> Contract:
    files = {f"{name}_json": text(version, name) for name in ("job", "plan", "decision", "attempt")}
    return Contract(attempt=1, name=f"{NAME}-1", owner_uid=UID, **(files | changes))


def running(found: Contract, generation: int = 1) -> Any:
    """An attempt that lives, begun with this contract, as an operator sees it that has just started."""
    seen = observed(SPEC, attempts=(attempt(1, active=2, ready=2),), contracts=(found,), claims=CLAIMS)
    return decide(replace(seen, job=replace(seen.job, generation=generation)))


def test_this_version_and_the_one_before_have_a_fixture() -> None:
    for version in (JOB_VERSION, PLAN_VERSION, TERMINATION_VERSION, PROGRESS_VERSION):
        assert {version - 1, version} - {0} <= set(VERSIONS)


@pytest.mark.parametrize("version", VERSIONS)
def test_running_attempt_of_an_older_operator_is_read_and_left_alone(version: int) -> None:
    files = read_contract(contract(version))
    assert files is not None
    assert (files.name, files.job.uid, files.job.num_nodes) == (f"{NAME}-1", UID, 2)
    desired = running(contract(version))
    assert (desired.creates, desired.deletes) == ((), ())
    assert desired.status is not None
    assert desired.status["attempts"]["total"] == 1
    assert desired.status["plan"]["configMap"] == f"{NAME}-1"
    assert condition(desired, "Running")["status"] == "True"
    assert condition(desired, "Accepted")["reason"] == "Valid"


@pytest.mark.parametrize("version", VERSIONS)
def test_how_an_earlier_trainer_ended_is_believed(version: int) -> None:
    said = read_termination(ContainerEnding(70, "Error", text(version, "termination"), "2026-11-22T01:00:00Z", ""))
    assert (said.reason, said.rank, said.step) == ("DeviceOutOfMemory", 1, 17)
    assert "device budget" in said.message


@pytest.mark.parametrize("version", VERSIONS)
def test_what_an_earlier_trainer_reports_is_accepted(version: int) -> None:
    report = ProgressReport.model_validate_json(text(version, "progress"))
    assert report.spillway is not None and report.spillway.checkpoint is not None
    assert (report.spillway.step, report.spillway.checkpoint.step) == (17, 10)


def newer(name: str) -> str:
    return json.dumps(json.loads(text(VERSIONS[-1], name)) | {"version": 99, "novelty": {}})


@pytest.mark.parametrize("name", ["job", "plan"])
def test_attempt_of_a_newer_operator_runs_on_and_status_names_its_version(name: str) -> None:
    """After a rollback."""
    desired = running(contract(VERSIONS[-1], **{f"{name}_json": newer(name)}), generation=2)
    assert (desired.creates, desired.deletes) == ((), ())
    assert condition(desired, "Running")["status"] == "True"
    accepted = condition(desired, "Accepted")
    assert (accepted["status"], accepted["reason"]) == ("True", "ContractNotRead")
    known = {"job": JOB_VERSION, "plan": PLAN_VERSION}[name]
    said = f"ConfigMap {NAME}-1: {name}.json has version 99, but this operator reads up to {known}"
    assert said in accepted["message"]


def test_attempt_after_one_of_a_newer_operator_gets_the_next_number() -> None:
    unread = contract(VERSIONS[-1], job_json=newer("job"))
    ended = {"attempts": {"total": 1, "ended": 1}}
    desired = decide(observed(SPEC, status=ended, contracts=(unread,), claims=CLAIMS))
    assert desired.creates[0]["metadata"]["name"] == f"{NAME}-2"


def test_report_of_a_newer_trainer_is_rejected_with_the_supported_versions() -> None:
    """The trainer goes on, says so in its log once, and its job is never taken for stalled."""
    report = json.loads(text(VERSIONS[-1], "progress"))
    report["spillway"]["version"] = 99
    with pytest.raises(ValidationError, match=r"spillway\.version\n.*should be 0 or 1"):
        ProgressReport.model_validate(report)


def test_a_trainer_understands_the_answer_of_any_operator() -> None:
    assert ProgressAnswer.model_validate_json('{"version": 99, "epoch": 3, "novelty": 1}').epoch == 3
