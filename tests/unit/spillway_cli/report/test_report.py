"""The report: valid, complete, self-contained HTML; and the charts it is made of."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.console import Console

from cases.job_documents import job
from harness.run_records import plan, run_log
from spillway_cli.record.attempt_ends import Attempt
from spillway_cli.record.log import RunLog
from spillway_cli.record.summary import summarize
from spillway_cli.report.charts import Series, line_chart, stacked_chart, thin, ticks
from spillway_cli.report.page import RunRecord, render_report
from spillway_cli.run.command import left_out, summary_table, time_of

VOID = {"meta", "link", "br", "img", "input", "hr"}
ENDED = {
    1: Attempt(1, 137, "RankCrashed", "killed by SIGKILL"),
    2: Attempt(2, 0, "Completed", ""),
}


def record(title: str = "tiny", log: RunLog | None = None, ended: dict[int, Attempt] | None = None) -> RunRecord:
    log = run_log((1, 9), (5, 40)) if log is None else log
    ended = ENDED if ended is None else ended
    return RunRecord(title, "runs/tiny", "0.1.0", plan(job=title), log, log.curve, ended)


class Page(HTMLParser):
    """Checks nesting, gathers texts and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.mistakes: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.mistakes.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_report_is_well_formed_html() -> None:
    page = Page(render_report(record()))
    assert (page.mistakes, page.open) == ([], [])


@pytest.mark.parametrize(
    "name",
    ["Loss", "Speed", "Step breakdown", "Bytes in the device tier", "Bytes in the host tier", "Bytes in the nvme tier",
     "Plan against reality", "Attempts", "Why this plan"],
)  # fmt: skip
def test_report_has_every_section(name: str) -> None:
    assert f"<h2>{name}</h2>" in render_report(record())


@pytest.mark.parametrize(
    "series",
    ["training", "evaluation", "tokens", "forward", "backward", "optimizer", "wait", "data", "other", "device peak",
     "host peak", "nvme peak"],
)  # fmt: skip
def test_report_draws_every_series(series: str) -> None:
    labels = " ".join(re.findall(r'aria-label="([^"]*)"', render_report(record())))
    assert series in labels


def test_report_refers_to_nothing_outside_itself() -> None:
    page = Page(render_report(record()))
    text = render_report(record())
    referring = [name for name, _ in page.attributes if name in {"src", "href", "srcset", "action", "data"}]
    assert referring == []
    assert not re.search(r"url\(|@import|https?://", text)
    assert "script" not in page.tags


def test_report_escapes_hostile_names() -> None:
    hostile = '<img src=x onerror="alert(1)">&amp;$title'
    ended = {1: Attempt(1, 1, "RankCrashed", "</table><script>alert(2)</script>")}
    page = Page(render_report(record(hostile, ended=ended)))
    assert "img" not in page.tags and "script" not in page.tags
    assert hostile in "".join(page.texts)


def test_report_compares_only_links_that_are_measured() -> None:
    text = render_report(record())
    assert "nvme_write per step" in text and "dram per step" not in text


def test_report_marks_where_an_attempt_resumed() -> None:
    assert "resumed at 4" in render_report(record())


def test_report_draws_budget_lines() -> None:
    assert "budget 64.0 MiB" in render_report(record())


def test_report_tells_how_each_attempt_ended() -> None:
    assert "killed by SIGKILL" in render_report(record())


def test_report_of_a_run_without_a_step_says_so() -> None:
    page = Page(render_report(record(log=RunLog(), ended={})))
    assert "The trainer has not started yet." in page.texts
    assert page.mistakes == []


def test_report_survives_a_loss_that_is_not_finite() -> None:
    log = run_log((1, 3))
    log.add('{"event": "step", "time": 1, "step": 4, "loss": null, "learning_rate": 0, "gradient_norm": null,'
            '"clip_factor": 1, "tokens": 1, "step_seconds": 1, "phase_seconds": {}, "tier_bytes": {},'
            '"tier_peak_bytes": {}, "moved_bytes": {}, "skipped": true}')  # fmt: skip
    text = render_report(record(log=log))
    assert "not finite" in text
    assert "nan" not in text.lower().replace("nanosecond", "")


def test_last_line_of_a_repeated_step_wins() -> None:
    log = run_log((1, 6), (5, 8))
    assert [log.steps[step].epoch for step in (4, 5, 6)] == [1, 2, 2]


def test_half_written_line_is_left_out() -> None:
    assert len(run_log((1, 6), torn=True).curve) == 6


def test_summary_takes_the_highest_peak_of_all_steps() -> None:
    log = run_log((1, 9))
    summary = summarize(log, plan(), log.curve)
    assert summary.tiers[2].peak_bytes == (30 << 20) + 9 * 4096


@pytest.mark.parametrize(("mode", "device", "lacks"), [
    ("Disabled", "Cpu", "saved activations"), ("Disabled", "Cuda", ""), ("Auto", "Cpu", ""),
])  # fmt: skip
def test_a_peak_that_counts_no_activations_says_so(mode: str, device: str, lacks: str) -> None:
    log, planned = run_log((1, 9)), plan(mode=mode, device=device)
    summary = summarize(log, planned, log.curve)
    assert [one.uncounted for one in summary.tiers] == [lacks, "", ""]
    record = RunRecord("tiny", "runs/tiny", "0.1.0", planned, log, log.curve, ENDED)
    assert ("without saved activations" in render_report(record)) is bool(lacks)


def test_summary_counts_restarts_not_attempts() -> None:
    assert summarize(run_log((1, 5), (4, 9)), plan(), []).num_restarts == 1


def event_line(event: str, time: float, **fields: object) -> str:
    start = {"resumed_from_step": 0, "isa": "", "io_backend": "", "parameters": 1}
    step = {
        "loss": 1.0, "learning_rate": 0, "gradient_norm": 1.0, "clip_factor": 1, "tokens": 1, "step_seconds": 1,
        "phase_seconds": {}, "tier_bytes": {}, "tier_peak_bytes": {}, "moved_bytes": {}, "skipped": False,
    }  # fmt: skip
    return json.dumps({"event": event, "time": time, **(start if event == "start" else step), **fields})


def test_summary_counts_skipped_steps_and_separates_attempts_from_gaps() -> None:
    log, finite = RunLog(), {"skipped": True, "loss_scale": 2.0}
    log.add(event_line("start", 100, epoch=1))
    log.add(event_line("step", 105, step=1, **finite))
    log.add(event_line("step", 110, step=2, **finite, loss=None))
    for time in (110, 900):  # the second is of an attempt that was stopped before it began to train
        log.add(json.dumps({"event": "end", "time": time, "reason": "Preempted", "message": ""}))
    log.add(event_line("start", 5000, epoch=2))
    log.add(event_line("step", 5007, step=3))
    found = summarize(log, plan(), log.curve)
    assert (found.num_skipped, found.num_overflowed) == (2, 1)
    assert (found.attempt_seconds, found.training_seconds) == (17.0, 4907.0)
    assert left_out(found) == "2: loss or gradients not finite (1 overflowed float16 at their loss scale)"
    assert time_of(found) == "17 s in 2 attempts, 1h21m from first to last"
    console = Console(width=200, record=True)
    console.print(summary_table(job(), replace(found, num_attempts=3), 4))
    assert "1 after failures; resumed 1 time by `spillway run`" in console.export_text()
    assert found.as_json()["skippedSteps"] == 2


def test_summary_as_json_has_null_where_there_is_no_loss() -> None:
    assert summarize(RunLog(), plan(), []).as_json()["finalLoss"] is None


def test_thinning_keeps_short_series_as_they_are() -> None:
    points = [(float(step), 1.0) for step in range(200)]
    assert thin(points) == points


def test_thinning_keeps_the_mean_and_the_last_step() -> None:
    points = [(float(step), float(step % 10)) for step in range(1, 4001)]
    thinned = thin(points)
    assert len(thinned) == 200
    assert thinned[-1][0] == 4000.0
    assert math.isclose(sum(value for _, value in thinned) / 200, 4.5)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 100, [0, 50, 100]), (0, 1, [0, 0.5, 1]), (2.2, 8.1, [4, 6, 8]), (0, 37, [0, 10, 20, 30])],
)
def test_ticks_are_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_line_breaks_where_a_value_is_missing() -> None:
    chart = line_chart("s", [Series("x", "c1", [(1, 1.0), (2, 2.0), (3, math.nan), (4, 2.0), (5, 1.0)])])
    assert chart.count("<polyline") == 2


def test_constant_series_has_a_plane_to_be_drawn_on() -> None:
    assert "nan" not in line_chart("s", [Series("x", "c1", [(1, 5.0), (2, 5.0)])], from_zero=False)


def test_stacked_areas_lie_on_one_another() -> None:
    chart = stacked_chart("s", [Series("a", "c1", [(1, 1.0), (2, 1.0)]), Series("b", "c2", [(1, 2.0), (2, 2.0)])])
    first, second = re.findall(r'<polygon class="band c." points="([^"]*)"', chart)
    assert first.split()[:2] == second.split()[:1:-1]
