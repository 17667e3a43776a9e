"""How people see a sweep: lines of `spillway run`, rows of `top` and `status`, the report, JSON."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cases.job_documents import job as made_job
from fakes.fake_trainer import step_line
from harness.run_records import plan as made_plan
from spillway_cli.cluster.status import picture as status_picture
from spillway_cli.cluster.status import status_members
from spillway_cli.console import Format, console_on
from spillway_cli.record import sweep_view
from spillway_cli.record.attempt_ends import Attempt
from spillway_cli.record.directory import RunDirectory, exclusive
from spillway_cli.record.follower import RunFollower
from spillway_cli.record.log import EvaluationEvent, RunLog, StepEvent, read_run_log
from spillway_cli.record.progress import ProgressReporter, format_eta
from spillway_cli.record.sweep_pace import SweepPace, left_seconds
from spillway_cli.record.sweep_view import MemberLogs, MemberView, member_views, read_member_logs, steps_made
from spillway_cli.report.command import read_record, report
from spillway_cli.report.page import RunRecord, render_report
from spillway_cli.run import command as run_command
from spillway_cli.top import cluster as top_cluster
from spillway_cli.top.run import RunSource
from spillway_cli.top.view import as_json, picture

SWEEP = {
    "event": "sweep", "time": 100.0, "epoch": 1, "isa": "scalar",
    "members": [{"name": "a", "num_steps": 8}, {"name": "b", "num_steps": 8}, {"name": "c", "num_steps": 8}],
    "objective": {"metric": "EvaluationLoss", "direction": "Minimize", "halving": 4},
}  # fmt: skip
FAILURE = "NonFinite: the loss of step 3 is nan"
STOPPED = "stopped after 4 steps: evaluation loss 3.5000, best 2.2500"


def member(event: str, name: str, step: int, time: float, reason: str = "", **figures: float | None) -> dict[str, Any]:
    values = {"loss": None, "objective": None} | figures
    return {"event": f"member_{event}", "time": time, "member": name, "step": step, **values, "reason": reason}


EVENTS: list[dict[str, Any]] = [
    SWEEP,
    member("started", "a", 0, 101.0),
    member("parked", "a", 4, 104.0, loss=2.0, objective=2.25),
    {"event": "best", "time": 104.5, "member": "a", "step": 4, "objective": 2.25},
    member("started", "b", 0, 105.0),
    member("parked", "b", 4, 108.0, loss=2.0, objective=3.5),
    member("started", "c", 0, 109.0),
    member("failed", "c", 2, 111.0, FAILURE, loss=4.0),
    member("stopped", "b", 4, 112.0, STOPPED, loss=2.0, objective=3.5),
    member("started", "a", 4, 113.0, loss=2.0, objective=2.25),
]
STEPS = {"a": range(1, 7), "b": range(1, 5), "c": range(1, 3)}
BEGINS = {"a": 101.0, "b": 105.0, "c": 109.0}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """After the sixth step of the member that goes on; nobody holds the directory."""
    made = RunDirectory(tmp_path / "run")
    made.path.mkdir()
    made.plan_file.write_text(made_plan().model_dump_json())
    made.attempt(1).mkdir(parents=True)
    made.log.write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
    for name, steps in STEPS.items():
        lines = [step_line(step, BEGINS[name] + step / 2 + (10.0 if step > 4 else 0.0)) for step in steps]
        lines += [
            {"event": "evaluation", "time": 103.5, "step": 4, "loss": {"a": 2.25, "b": 3.5}[name]}
            for step in steps
            if step == 4
        ]
        if name == "a":
            lines.insert(2, {"event": "evaluation", "time": 102.0, "step": 2, "loss": 9.0})
        made.member(name).path.mkdir(parents=True)
        made.member(name).log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return made


def views(run: RunDirectory, trains: bool = True) -> tuple[MemberView, ...]:
    log = read_run_log(run.log)
    return member_views(log, read_member_logs(run, log), trains)


def text_of(shown: Any) -> str:
    console = console_on(io.StringIO())
    console.width = 400
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_member_is_as_its_last_event_and_its_own_log_say(run: RunDirectory) -> None:
    assert views(run) == (
        MemberView("a", 6, 8, 8.0 / 6, 2.25, "Running", "", is_best=True),
        MemberView("b", 4, 8, 2.0, 3.5, "Stopped", STOPPED),
        MemberView("c", 2, 8, 4.0, None, "Failed", FAILURE),
    )


def test_when_nobody_trains_it_is_nobodys_turn(run: RunDirectory) -> None:
    assert [one.state for one in views(run, trains=False)] == ["Parked", "Stopped", "Failed"]


def test_steps_of_a_sweep_are_those_of_all_who_go_on(run: RunDirectory) -> None:
    assert steps_made(views(run)) == (12, 14)


def test_a_member_that_has_not_begun_is_parked_at_its_first_step(tmp_path: Path) -> None:
    log = RunLog()
    log.add(json.dumps(SWEEP))
    assert member_views(log, {})[2] == MemberView("c", 0, 8, None, None, "Parked")


def test_a_run_that_is_no_sweep_has_no_members(tmp_path: Path) -> None:
    assert member_views(RunLog(), {"a": RunLog()}) == ()
    assert sweep_view.members_json(()) == {}


def test_the_table_marks_the_best_and_says_why_a_member_ended(run: RunDirectory) -> None:
    rows = [line.split() for line in text_of(sweep_view.members_table(views(run))).splitlines()]
    assert rows[0] == ["member", "steps", "loss", "evaluation", "state", "why"]
    assert rows[1] == ["a", "*", "6/8", "1.333", "2.25", "Running"]
    assert rows[2] == ["b", "4/8", "2", "3.5", "Stopped", *STOPPED.split()]
    assert rows[3] == ["c", "2/8", "4", "-", "Failed", *FAILURE.split()]


def test_run_says_a_line_for_every_event_of_a_member(run: RunDirectory) -> None:
    console, log = console_on(io.StringIO()), RunLog()
    with ProgressReporter(console, 8, {}) as progress:
        for line in EVENTS:
            event = log.add(json.dumps(line))
            assert event is not None
            progress.event(event, log)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "3 members take turns: a, b, c",
        "member a: step 0/8, starts",
        "member a: step 4/8, loss 2, paused",
        "best so far: a (evaluation loss 2.25)",
        "member b: step 0/8, starts",
        "member b: step 4/8, loss 2, paused",
        "member c: step 0/8, starts",
        f"member c: step 2/8, loss 4, FAILED, the others continue: {FAILURE}",
        f"member b: step 4/8, loss 2, {STOPPED}",
        "member a: step 4/8, continues",
    ]


def test_top_shows_the_members_of_a_run_and_counts_their_steps_together(run: RunDirectory) -> None:
    with exclusive(run):
        view = RunSource(run).look()
    assert view.members == views(run)
    assert (view.state, view.attempt, view.step, view.steps, view.loss) == ("Running", 1, 12, 14, 8.0 / 6)
    document = as_json(view)
    assert document["bestMember"] == "a"
    assert document["members"] == [one.as_json() for one in view.members]
    shown = text_of(picture(view, console_on(io.StringIO())))
    assert STOPPED in shown
    assert "*" in shown


LEFT_SECONDS = 2 * 0.5 * 13.0 / 6.0
"""two steps of half a second; 13 s for 12 of them so far, from the beginning of the first to the end of the last"""


def test_time_left_is_steps_at_member_pace_plus_process_overhead(run: RunDirectory) -> None:
    log = read_run_log(run.log)
    logs = read_member_logs(run, log)
    assert left_seconds(log, logs, views(run)) == pytest.approx(LEFT_SECONDS)


def test_member_pace_is_its_own_or_without_steps_the_mean_of_the_others(tmp_path: Path) -> None:
    pace, logs = SweepPace(100.0), {name: RunLog() for name in "abc"}
    for name, number, time, seconds in (("a", 1, 101.0, 1.0), ("b", 1, 104.0, 3.0)):
        line = {**step_line(number, time), "step_seconds": seconds}
        step = logs[name].add(json.dumps(line))
        assert isinstance(step, StepEvent)
        pace.take(step)
    members = [MemberView(name, step, 3, None, None, "Parked") for name, step in (("a", 1), ("b", 1), ("c", 0))]
    assert pace.left_seconds(members, logs, 0) == pytest.approx(2 * 1.0 + 2 * 3.0 + 3 * 2.0)


def test_steps_of_an_earlier_attempt_are_no_pace(run: RunDirectory) -> None:
    with run.log.open("a") as log:
        log.write(json.dumps(SWEEP | {"time": 500.0, "epoch": 2}) + "\n")
    found = read_run_log(run.log)
    assert left_seconds(found, read_member_logs(run, found), views(run)) is None


def test_top_and_the_report_say_when_a_sweep_will_end(run: RunDirectory) -> None:
    eta = format_eta(LEFT_SECONDS)
    with exclusive(run):
        assert RunSource(run).look().eta == eta
    assert RunSource(run).look().eta == ""
    assert f"eta {eta}" in render_report(read_record(run, trains=True))
    assert "12 of 14" in render_report(read_record(run, trains=False))
    assert "eta" not in render_report(read_record(run, trains=False)).partition("<b>12 of 14</b>")[2][:200]


def test_run_says_how_far_all_members_are_as_often_as_of_one_run(run: RunDirectory) -> None:
    console, follower = console_on(io.StringIO()), RunFollower(run)
    console.width = 400
    with ProgressReporter(console, 8, {}) as progress:
        for event in follower.new_events():
            progress.event(event, follower.log)
        assert list(follower.new_events()) == []
        with run.member("a").log.open("a") as log:
            log.write(json.dumps(step_line(7, 115.0)) + "\n")
        for event in follower.new_events():
            progress.event(event, follower.log)
    assert isinstance(console.file, io.StringIO)
    said = [line for line in console.file.getvalue().splitlines() if line.startswith("all members")]
    assert [line.partition("  ")[0] for line in said] == ["all members: step 12/14"], "13 is no multiple of 2"
    assert said[0].endswith(f"eta {format_eta(LEFT_SECONDS)}")


def test_members_logs_are_read_in_the_order_of_time_and_once(run: RunDirectory) -> None:
    log, logs = read_run_log(run.log), MemberLogs(run)
    found = list(logs.new_events(log))
    assert [one.time for one in found] == sorted(one.time for one in found)
    assert [type(one) for one in found].count(StepEvent) == 12
    assert [type(one) for one in found].count(EvaluationEvent) == 3
    assert list(logs.new_events(log)) == []
    run.member("a").log.write_text(json.dumps(step_line(1, 200.0)) + "\n")  # begun anew
    assert [one.time for one in logs.new_events(log)] == [200.0]


def test_steps_of_all_members_are_joined_in_the_order_of_time(run: RunDirectory) -> None:
    log = read_run_log(run.log)
    curve = sweep_view.joined(log, read_member_logs(run, log)).curve
    assert [step.metrics.step for step in curve] == list(range(1, 13))
    assert [step.time for step in curve] == sorted(step.time for step in curve)


def test_top_reads_only_what_members_appended(run: RunDirectory) -> None:
    source = RunSource(run)
    source.look()
    with run.member("a").log.open("a") as log:
        log.write(json.dumps(step_line(7, 120.0)) + "\n")
    view = source.look()
    assert (view.members[0].step, view.step) == (7, 13)


def test_the_report_has_a_curve_of_every_member_and_a_table(run: RunDirectory) -> None:
    page = render_report(read_record(run, trains=False))
    for heading in (
        "Loss of each member",
        "Evaluation of each member",
        "Members",
        "Bytes in the device tier",
        "Attempts",
    ):
        assert f"<h2>{heading}</h2>" in page
    losses = page.partition("<h2>Loss of each member</h2>")[2].partition("</section>")[0]
    assert losses.count("<polyline") == 3
    assert all(f"{name}</span>" in losses for name in "abc")
    evaluations = page.partition("<h2>Evaluation of each member</h2>")[2].partition("</section>")[0]
    assert evaluations.count("<circle") == 3
    assert "Successive halving compares these." in evaluations
    run.log.write_text(run.log.read_text().replace(', "halving": 4', ""))
    assert "Successive halving" not in render_report(read_record(run, trains=False))
    assert STOPPED in page
    assert "<span>best member</span><b>a</b>" in page
    assert "3 members" in page


def test_the_report_draws_which_device_trained_whom_in_the_newest_attempt() -> None:
    """Times of the newest attempt count from its first turn; one that has not ended lasts until the last event."""
    log = RunLog()
    for event in (
        *EVENTS,  # an attempt that was killed in a turn of a
        SWEEP | {"time": 200.0, "epoch": 2},
        member("started", "a", 4, 201.0, device=0),
        member("started", "b", 0, 202.0, device=1),
        member("parked", "b", 4, 206.0),
        member("started", "c", 0, 207.0, device=1),
        member("parked", "a", 8, 209.0),
    ):
        log.add(json.dumps(event))
    page = render_report(RunRecord("tiny", "runs/tiny", "0.1.0", made_plan(), log, [], {}, trains=True))
    drawn = page.partition("<h2>Devices</h2>")[2].partition("</section>")[0]
    titles = re.findall("<title>(.*?)</title>", drawn)
    assert titles == ["a: 0 to 8 seconds", "b: 1 to 5 seconds", "c: 6 to 8 seconds"]
    assert "device 0" in drawn and "device 1" in drawn
    assert f"busy {(8 + 4 + 2) / 16:.0%}" in drawn
    views = {view.name: view for view in member_views(log, {}, trains=True)}
    assert (views["c"].device, views["a"].device) == (1, None)
    assert sweep_view.member_cells(views["c"])[-1] == "Running on device 1"


def test_the_report_escapes_what_members_say() -> None:
    log = RunLog()
    log.add(json.dumps(SWEEP))
    log.add(json.dumps(member("failed", "a", 1, 101.0, "<script>alert(1)</script>")))
    page = render_report(RunRecord("tiny", "runs/tiny", "0.1.0", made_plan(), log, [], {}))
    assert "<script>" not in page


def test_the_report_command_says_the_members_in_json(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(run.path, None, Format.JSON) == 0
    document = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in document["members"]] == ["a", "b", "c"]
    assert document["bestMember"] == "a"


def test_the_end_of_a_sweep_is_a_table_and_a_document(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    job, ended = made_job(), [Attempt(1, 0, "Completed", "")]
    assert run_command.finish(run, job, ended, Format.JSON) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["steps"], document["stepsPlanned"], document["bestMember"]) == (12, 14, "a")
    assert (document["firstLoss"], document["finalLoss"], document["evaluationLoss"]) == (8.0, 8.0 / 6, 2.25)
    assert document["members"][1] == {
        "name": "b", "step": 4, "steps": 8, "loss": 2.0, "evaluationLoss": 3.5, "state": "Stopped", "message": STOPPED,
        "best": False, "device": None,
    }  # fmt: skip
    run_command.finish(run, job, ended, Format.TEXT)
    said = capsys.readouterr().out
    assert STOPPED in " ".join(said.split())
    assert "12 of 14" in said


def test_a_sweep_without_a_best_member_has_no_loss_rather_than_a_bad_one(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Interrupted before anything was compared: what is missing is not "not finite"."""
    run.log.write_text("".join(json.dumps(event) + "\n" for event in EVENTS if event["event"] != "best"))
    job, ended = made_job(), [Attempt(1, 75, "Preempted", "stopped on request")]
    run_command.finish(run, job, ended, Format.JSON)
    document = json.loads(capsys.readouterr().out)
    assert [document[name] for name in ("firstLoss", "finalLoss", "evaluationLoss")] == [None] * 3
    run_command.finish(run, job, ended, Format.TEXT)
    printed = capsys.readouterr().out
    assert "- -> -" in printed and "not finite" not in printed


# --- in a cluster -----------------------------------------------------------------------------------------------------


def job_object(objective: Mapping[str, object] | None = None) -> dict[str, Any]:
    members = [
        {"name": "a", "step": 6, "steps": 8, "loss": "1.333", "objective": "2.25", "state": "Running"},
        {"name": "b", "step": 4, "steps": 8, "loss": "2", "state": "Stopped", "message": "stopped\x1b[31m"},
    ]
    return {
        "metadata": {"name": "sweep", "namespace": "team-a", "creationTimestamp": "2026-11-21T10:00:00Z"},
        "spec": {"objective": objective} if objective else {},
        "status": {"state": "Running", "members": members, "bestMember": "a"},
    }


def test_members_of_a_job_are_those_of_its_status() -> None:
    assert status_members(job_object()) == (
        MemberView("a", 6, 8, 1.333, 2.25, "Running", "", is_best=True),
        MemberView("b", 4, 8, 2.0, None, "Stopped", "stopped\x1b[31m"),
    )
    assert status_members(job_object({"metric": "Loss"}))[0].evaluation_loss is None
    assert status_members({"metadata": {"name": "plain"}}) == ()


def test_status_and_top_show_the_members_of_a_job() -> None:
    now = datetime(2026, 11, 21, 10, 5, tzinfo=UTC)
    status = text_of(status_picture(job_object(), [], now))
    live = text_of(picture(top_cluster.job_view(job_object(), [], now), console_on(io.StringIO())))
    for shown in (status, live):
        assert "\x1b" not in shown
        assert ["a", "*", "6/8", "1.333", "2.25", "Running"] in [line.split() for line in shown.splitlines()]
