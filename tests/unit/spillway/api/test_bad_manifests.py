"""Every hand-made bad manifest is rejected in a sentence that names the field, what was found, and what is allowed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from cases.bad_manifests import (
    CHANGES,
    CLUSTER,
    GOOD,
    Mistake,
    all_mistakes,
    as_kubectl_sends_it,
    manifest,
    mistakes,
    rejection_in_cluster,
)
from spillway.api.load import parse_job
from spillway.errors import ExitCode, FieldProblem, InvalidJob
from spillway_cli.__main__ import main
from spillway_cli.cluster.submit import reject_what_no_cluster_does
from spillway_operator.decide.acceptance import Rejection, accept
from spillway_operator.decide.observed import JobObject

FEWEST = 300
OF_ONE_MANIFEST = [mistake for mistake in all_mistakes() if mistake.topic not in (CHANGES, CLUSTER)]


def problems(mistake: Mistake) -> tuple[FieldProblem, ...]:
    """What `spillway submit` rejects; `plan` and `run` say the same of what they reject, too."""
    try:
        reject_what_no_cluster_does(parse_job(mistake.text, "job.yaml"), "job.yaml")
    except InvalidJob as error:
        return error.problems
    return ()


def test_there_are_three_hundred_of_them_and_no_two_are_the_same() -> None:
    found = all_mistakes()
    assert len(found) >= FEWEST
    assert len({(mistake.text, mistake.suspended, *mistake.claims) for mistake in found}) == len(found)


def test_the_good_job_is_good() -> None:
    parse_job(manifest({}), "good.yaml")
    accepted = accept(JobObject("uid", "good", "default", 1, 1, "", json.dumps(GOOD["spec"]).encode(), b"{}"))
    assert not isinstance(accepted, Rejection)


@pytest.mark.parametrize("mistake", OF_ONE_MANIFEST, ids=str)
def test_a_bad_manifest_is_rejected_with_path_value_and_what_is_allowed(mistake: Mistake) -> None:
    if not mistake.allowed:
        pytest.skip("the API server alone looks for it")
    said = list(map(str, problems(mistake)))
    assert any(all(word in sentence for word in mistake.words) for sentence in said), said


@pytest.mark.parametrize("mistake", mistakes(CLUSTER), ids=str)
def test_what_the_cluster_lacks_is_named_in_a_condition(mistake: Mistake) -> None:
    said = rejection_in_cluster(mistake, as_kubectl_sends_it(mistake.text)["spec"])
    assert all(word in said for word in mistake.words), said


def test_the_operator_says_the_same_as_the_command() -> None:
    for mistake in OF_ONE_MANIFEST:
        if mistake.by_condition:
            spec = json.dumps(as_kubectl_sends_it(mistake.text)["spec"]).encode()
            rejected = accept(JobObject("uid", "good", "default", 1, 1, "", spec, b"{}"))
            assert isinstance(rejected, Rejection), mistake
            by_command = [str(problem).rpartition(" (line ")[0] or str(problem) for problem in problems(mistake)]
            assert list(map(str, rejected.problems)) == by_command


@pytest.mark.parametrize("topic", ["numbers", "quantities", "choices", "unknown_fields", "one_of", "agreement"])
def test_plan_says_it_and_ends_with_code_64(
    topic: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake = mistakes(topic)[0]
    file = tmp_path / "job.yaml"
    file.write_text(mistake.text, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["spillway", "plan", str(file)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == ExitCode.USER_ERROR
    said = " ".join(capsys.readouterr().err.split())
    assert all(word in said for word in mistake.words), said


def test_a_manifest_of_the_table_is_what_a_user_would_write() -> None:
    assert yaml.safe_load(manifest({"spec.training.steps": "7"}))["spec"]["training"]["steps"] == 7
    assert "steps" not in yaml.safe_load(manifest({"spec.training.steps": ""}))["spec"]["training"]
