"""Plan against reality: rows, ratios, and the sentence that names the furthest."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.run_records import MIB, plan, run_log
from spillway.plan import MemoryPlan, Prediction
from spillway_cli.__main__ import run_app
from spillway_cli.record.log import RunLog
from spillway_cli.record.plan_reality import Comparison, as_json, compared, largest_deviation, sentence

PHASES = {"forward": 0.1, "backward": 0.2, "wait": 0.04, "exchange": 0.0, "optimizer": 0.1}


def predicted(**changes: Any) -> MemoryPlan:
    """A plan that says just what fake_trainer's steps take, but for `changes` in its phases."""
    before: Prediction = plan().prediction
    prediction = before.model_copy(
        update={"step_seconds": 0.5, "phase_seconds": {**PHASES, **changes}, "calibrated": True}
    )
    return plan(prediction=prediction)


def rows_of(found: MemoryPlan) -> dict[str, Comparison]:
    return {row.name: row for row in compared(run_log((1, 20)).curve, found)}


def test_every_tier_phase_and_counted_link_has_a_row() -> None:
    rows = rows_of(predicted())
    assert [*rows] == ["device", "host", "nvme", "step", "data", "forward", "backward", "wait", "optimizer",
                       "cores", "d2h", "h2d", "nvme_read", "nvme_write"]  # fmt: skip


def test_cpu_time_and_lane_bytes_are_reported_even_without_predictions() -> None:
    log = RunLog()
    for step in run_log((1, 9)).curve:
        metrics = replace(step.metrics, moved_bytes={"cpu": 3 * MIB}, cpu_seconds=0.5 + step.metrics.step)
        log.steps[metrics.step] = replace(step, metrics=metrics)
    rows = compared(log.curve, predicted())
    found = {row.name: (row.planned, row.seen) for row in rows if row.kind in ("cores", "link")}
    assert found == {"cores": (None, 5.5), "cpu": (None, 3 * MIB)}
    assert as_json(rows, "x")["cores"] == {"predictedCpuSeconds": None, "measuredCpuSeconds": 5.5, "ratio": None}


def test_ratio_is_seen_over_planned() -> None:
    rows = rows_of(predicted(backward=0.05))
    assert rows["backward"].ratio == pytest.approx(4.0)
    assert rows["host"].ratio == pytest.approx(88 / 80)
    assert rows["data"].planned is None and rows["data"].ratio is None


def test_uncalibrated_seconds_are_marked_with_no_digit_too_many() -> None:
    found = predicted(backward=0.01234)
    found = found.model_copy(update={"prediction": found.prediction.model_copy(update={"calibrated": False})})
    rows = compared(run_log((1, 20)).curve, found)
    shown = {row.name: row.prediction for row in rows}
    assert shown["backward"] == "12 ms (uncalibrated)"
    assert shown["device"] == "58.0 MiB"
    assert "16 times the predicted 12 ms (uncalibrated);" in sentence(rows, "runs/demo")
    assert as_json(rows, "x")["step"]["calibrated"] is False  # type: ignore[index]


def test_exchange_has_a_row_where_ranks_exchange() -> None:
    log = RunLog()
    for step in run_log((1, 9)).curve:
        metrics = replace(step.metrics, phase_seconds={**step.metrics.phase_seconds, "exchange": 0.03})
        log.steps[metrics.step] = replace(step, metrics=metrics)
    rows = {row.name: row for row in compared(log.curve, predicted(exchange=0.01))}
    assert rows["exchange"].ratio == pytest.approx(3.0)


def test_the_sentence_names_the_furthest_and_the_remedy() -> None:
    said = sentence([*rows_of(predicted(backward=0.05)).values()], "runs/demo")
    assert "phase backward took 200 ms, 4 times the predicted 50 ms" in said
    assert "`spillway calibrate --from runs/demo`" in said


def test_a_tier_that_is_furthest_is_not_sent_to_calibration() -> None:
    rows = [Comparison("step", "step", 1.0, 1.0), Comparison("tier", "host", 10 * MIB, 30 * MIB)]
    said = sentence(rows, "runs/demo")
    assert "host tier held 30.0 MiB, 3 times the planned 10.0 MiB" in said
    assert "--from" not in said


def test_within_a_quarter_nothing_is_named() -> None:
    rows = [Comparison("step", "step", 1.0, 1.2), Comparison("phase", "forward", 1.0, 0.81)]
    assert largest_deviation(rows) is None
    assert sentence(rows, "x") == "Every tier and phase is within 25% of the plan."


def test_a_phase_of_no_weight_is_not_named() -> None:
    rows = [Comparison("step", "step", 1.0, 1.1), Comparison("phase", "optimizer", 0.001, 0.04)]
    assert largest_deviation(rows) is None


def test_a_run_without_steps_has_no_rows() -> None:
    assert compared([], predicted()) == []
    assert as_json([], "x") == {
        "tiers": {},
        "step": {},
        "phases": {},
        "cores": {},
        "links": {},
        "sentence": "No step is trained yet.",
    }


def test_a_plan_of_an_earlier_version_has_measured_phases_only() -> None:
    rows = {row.name: row for row in compared(run_log((1, 9)).curve, plan())}
    assert rows["forward"].planned is None and rows["forward"].seen == 0.1
    assert rows["step"].ratio == pytest.approx(1.25)


def test_report_json_holds_plan_against_reality(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = run_log((1, 9))
    (tmp_path / "plan.json").write_text(predicted(backward=0.05).model_dump_json())
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines_of(log)))
    assert run_app(["report", str(tmp_path), "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)["planAgainstReality"]
    assert document["phases"]["backward"] == {"predictedSeconds": 0.05, "measuredSeconds": 0.2, "ratio": 4.0}
    assert document["tiers"]["host"]["ratio"] == pytest.approx(88 / 80)
    assert "calibrate --from" in document["sentence"]
    assert "calibrate --from" in (tmp_path / "report.html").read_text()


def lines_of(log: RunLog) -> list[dict[str, Any]]:
    from fakes.fake_trainer import attempt_lines

    return attempt_lines(1, 1, len(log.curve))
