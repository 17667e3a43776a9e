"""What members have of their own, in plans, reports, at the end of a run and in a cluster's status."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cases.job_documents import document, member
from harness.places import ROOT
from spillway.api.job_file import JobFile
from spillway.api.load import load_job
from spillway_cli.cluster.status import picture as status_picture
from spillway_cli.cluster.submit import manifest
from spillway_cli.console import console_on
from spillway_cli.plan_command import plan
from spillway_cli.record.directory import RunDirectory
from spillway_cli.record.member_values import (
    fields_of,
    value_cells,
    values_in,
    values_json,
    values_of,
    values_sentence,
    values_table,
)
from spillway_cli.report.command import read_values
from spillway_cli.report.page import members_section
from spillway_cli.run.plan import BudgetOverrides

EXAMPLE = ROOT / "examples" / "search.yaml"
LISTED = values_of([
    member("slow", {"training.optimizer.learningRate": "1e-4", "training.optimizer.betas": '["0.9", "0.99"]'}),
    member("wide", {"model.config.hiddenSize": "128", "training.seed": "7"}),
    member("same", {}),
])  # fmt: skip


def rows_of(shown: Any) -> list[list[str]]:
    console = console_on(io.StringIO())
    console.width = 400
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    return [line.split() for line in console.file.getvalue().splitlines()]


def test_a_row_for_each_member_and_a_column_for_each_field_in_which_one_differs() -> None:
    rows = rows_of(values_table({name: own for name, own in LISTED.items() if name != "slow"}))
    assert rows == [["member", "hiddenSize", "seed"], ["wide", "128", "7"], ["same", "-", "-"]]
    assert value_cells(LISTED["slow"], fields_of(LISTED)) == ["1e-4", '["0.9", "0.99"]', "-", "-"]


def test_fields_that_end_in_the_same_name_have_their_whole_path() -> None:
    values = {"a": {"training.seed": 1, "data.evaluation.seed": 2, "training.steps": 3}}
    assert list(fields_of(values).values()) == ["training.seed", "data.evaluation.seed", "steps"]
    assert values_sentence(values, "a") == "training.seed 1, data.evaluation.seed 2, steps 3"
    assert values_sentence(values, "b") == ""


def test_plan_shows_the_trials_with_the_values_that_were_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(EXAMPLE, "cpu", BudgetOverrides(), None, "text") == 3
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["member", "learningRate", "weightDecay", "warmupSteps"] in rows
    assert ["trial-00", "0.0044605", "0.01", "4"] in rows


def test_a_report_has_the_values_next_to_the_figures_and_escapes_them(tmp_path: Path) -> None:
    assert "<th>learningRate</th>" in members_section((), LISTED)
    run, job = RunDirectory(tmp_path), load_job(EXAMPLE)
    assert read_values(run.job_file) == {}
    directories = dict.fromkeys(
        ("output_directory", "corpus_directory", "checkpoint_directory", "spill_directory", "termination_message_path"),
        str(tmp_path),
    )
    file = JobFile(name="search", uid="u", epoch=1, spec=job.spec, compute_threads=1, **directories)
    run.job_file.write_text(file.model_dump_json())
    assert read_values(run.job_file) == values_of(job.spec.members)
    assert values_json(read_values(run.job_file))["memberValues"] == values_of(job.spec.members)
    assert values_json({"a": {}}) == {}


def test_status_shows_the_values_of_a_search_and_of_a_list() -> None:
    spec = json.loads(json.dumps(document()["spec"]))
    spec["search"] = {"algorithm": "Grid", "parameters": [{"path": "training.seed", "values": [5, 6]}]}
    found = {"metadata": {"name": "s", "namespace": "team"}, "spec": spec, "status": {"state": "Running"}}
    rows = rows_of(status_picture(found, [], datetime(2026, 11, 21, tzinfo=UTC)))
    assert ["trial-00", "5"] in rows
    assert values_in({"members": [{"name": "a", "training": {"seed": 3}}, {"name": "b"}]}) == {
        "a": {"training.seed": 3}, "b": {},
    }  # fmt: skip


def test_submit_sends_the_search_as_it_is_written_and_no_members() -> None:
    sent = manifest(load_job(EXAMPLE), "team")["spec"]
    assert "members" not in sent
    assert sent["search"]["parameters"][1] == {"path": "training.schedule.warmupSteps", "min": "0", "max": "10"}
