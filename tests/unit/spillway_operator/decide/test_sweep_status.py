"""Members of a sweep in a TrainingJob's status: from reports, bounded, an event for each one that ended early."""

from __future__ import annotations

from typing import Any

import pytest

from harness.observations import NOW, attempt, condition, decide, follow_up, observed
from spillway.api.field_types import MAX_MEMBERS
from spillway.api.progress import ProgressReport
from spillway.api.status import MemberStatus
from spillway_operator.decide.observed import Observed
from spillway_operator.decide.progress_status import (
    MOST_MEMBER_NOTES,
    ReportedStatus,
    at_rest,
    member_notes,
    with_report,
)

NOTHING = ReportedStatus(None, None, None)
MEMBERS = [{"name": "a"}, {"name": "b", "training": {"steps": 50}}, {"name": "c"}]
RUNNING_STATUS = {"attempts": {"total": 1}, "plan": {"configMap": "tiny-1"}}


def row(name: str, step: int = 10, state: str = "Running", **more: object) -> dict[str, object]:
    return {"name": name, "step": step, "numSteps": 100, "state": state} | more


def report(*members: dict[str, object], best: str = "", epoch: int = 1, **more: object) -> ProgressReport:
    own = {"epoch": epoch, "step": 30, "steps": 250, "members": members, "bestMember": best} | more
    return ProgressReport.model_validate({"spillway": own})


def seen(said: ProgressReport, status: dict[str, Any] | None = None, **more: Any) -> Observed:
    """A running sweep, a report of which has just come."""
    fields: dict[str, Any] = {"attempts": (attempt(ready=1, active=1),), "progress": said, "progress_time": NOW}
    return observed({"spec.members": MEMBERS}, status=status or RUNNING_STATUS, **(fields | more))


def test_a_report_of_members_becomes_their_status_and_names_the_best() -> None:
    said = report(
        row("a", loss=5.54912, objective=5.25), row("b", 20, "Stopped", reason="stopped after 20 steps"), best="a"
    )
    found = with_report(NOTHING, said, 1, 100, NOW, ("a", "b"))
    assert found.members == (
        MemberStatus(name="a", step=10, steps=100, loss="5.549", objective="5.25", state="Running"),
        MemberStatus(name="b", step=20, steps=100, state="Stopped", message="stopped after 20 steps"),
    )
    assert found.best_member == "a"


def test_progress_of_a_sweep_is_that_of_all_members() -> None:
    found = with_report(NOTHING, report(row("a")), 1, 100, NOW, ("a",)).progress
    assert found is not None
    assert (found.step, found.steps, found.display) == (30, 250, "12%")


def test_a_member_that_the_spec_does_not_name_is_left_out() -> None:
    said = report(row("a"), row("x"), best="x")
    found = with_report(NOTHING, said, 1, 100, NOW, ("a", "b"))
    assert [one.name for one in found.members] == ["a"]
    assert found.best_member == ""


def test_a_job_without_members_gets_none_and_keeps_its_own_number_of_steps() -> None:
    found = with_report(NOTHING, report(row("a"), best="a"), 1, 100, NOW)
    assert (found.members, found.best_member) == ((), "")
    assert found.progress is not None and found.progress.steps == 100


def test_a_report_without_members_keeps_those_that_are_known() -> None:
    before = with_report(NOTHING, report(row("a"), best="a"), 1, 100, NOW, ("a",))
    after = with_report(before, report(), 1, 100, NOW, ("a",))
    assert (after.members, after.best_member) == (before.members, "a")


def test_another_attempts_report_changes_no_member() -> None:
    assert with_report(NOTHING, report(row("a"), epoch=2), 1, 100, NOW, ("a",)) == NOTHING


def test_what_a_terminal_would_obey_is_no_part_of_a_message() -> None:
    found = with_report(NOTHING, report(row("a", reason="bad\x1b[31m\nnews")), 1, 100, NOW, ("a",))
    assert found.members[0].message == "bad [31m news"


def status_row(name: str, state: str, message: str = "") -> MemberStatus:
    return MemberStatus(name=name, state=state, message=message)


def test_a_member_that_fails_or_is_stopped_is_one_event() -> None:
    before = (status_row("a", "Running"), status_row("b", "Parked"), status_row("c", "Stopped"))
    after = (
        status_row("a", "Stopped", "stopped after 20 steps: loss 2, best 1"),
        status_row("b", "Failed", "NonFinite: step 3"),
        status_row("c", "Stopped"),
        status_row("d", "Complete"),
    )
    found = [(note.type, note.reason, note.note) for note in member_notes(before, after)]
    assert found == [
        ("Warning", "MemberFailed", "member b: NonFinite: step 3"),
        ("Normal", "MemberStopped", "member a: stopped after 20 steps: loss 2, best 1"),
    ]
    assert member_notes(after, after) == ()


def test_many_members_ending_at_once_make_few_events_with_failures_first() -> None:
    after = tuple(status_row(f"m{index:02d}", "Failed" if index > 60 else "Stopped") for index in range(MAX_MEMBERS))
    found = member_notes((), after)
    assert len(found) == MOST_MEMBER_NOTES + 1
    assert [note.reason for note in found[:4]] == ["MemberFailed"] * 3 + ["MemberStopped"]
    assert found[-1].note.startswith(f"{MAX_MEMBERS - MOST_MEMBER_NOTES} more members failed or stopped: m05, m06")
    assert found[-1].type == "Normal"


def test_the_event_about_many_members_warns_if_one_of_them_failed() -> None:
    failed = tuple(status_row(f"m{index}", "Failed") for index in range(MOST_MEMBER_NOTES + 1))
    last = member_notes((), failed)[-1]
    assert (last.type, last.reason, last.note) == (
        "Warning", "MembersEnded", f"1 more member failed or stopped: m{MOST_MEMBER_NOTES}"
    )  # fmt: skip


def test_when_an_attempt_has_ended_nobodys_turn_it_is() -> None:
    states = ("Running", "Parked", "Stopped", "Complete", "Failed")
    found = at_rest(tuple(status_row(f"m{index}", state) for index, state in enumerate(states)))
    assert [one.state for one in found] == ["Parked", "Parked", "Stopped", "Complete", "Failed"]


# --- in the decision --------------------------------------------------------------------------------------------------


def test_members_and_the_best_reach_the_status_in_one_write_per_report() -> None:
    said = report(row("a", objective=2.0), row("b", 5, "Parked"), best="a")
    desired = decide(seen(said))
    assert desired.status is not None
    assert [one["name"] for one in desired.status["members"]] == ["a", "b"]
    assert desired.status["bestMember"] == "a"
    again = decide(follow_up(seen(said), desired))
    assert again.status is None, "the same report says nothing new"


def test_a_failing_member_is_an_event_and_changes_no_condition() -> None:
    before = decide(seen(report(row("a"), row("b"))))
    well = seen(report(row("a"), row("b")), status=before.status)
    failed = seen(report(row("a"), row("b", 12, "Failed", reason="NonFinite: step 13"), step=31), status=before.status)
    desired = decide(failed)
    assert desired.status is not None and before.status is not None
    assert desired.status["conditions"] == before.status["conditions"]
    assert [(note.reason, note.note) for note in desired.events] == [("MemberFailed", "member b: NonFinite: step 13")]
    assert decide(well).events == ()
    assert decide(follow_up(failed, desired)).events == ()


def test_sweep_is_complete_when_its_pod_succeeds_even_if_a_member_failed() -> None:
    said = report(
        row("a", 100, "Complete"), row("b", 12, "Failed"), row("c", 20, "Stopped"), best="a", step=132, steps=132
    )
    ended = attempt(succeeded=1, outcome="Complete", outcome_time=NOW)
    desired = decide(seen(said, attempts=(ended,)))
    assert condition(desired, "Complete")["status"] == "True"
    assert condition(desired, "Complete")["message"] == "132 steps in 1 attempt; the best of 3 members is a"
    assert desired.status is not None
    assert (desired.status["progress"]["step"], desired.status["progress"]["display"]) == (132, "100%")
    assert [one["state"] for one in desired.status["members"]] == ["Complete", "Failed", "Stopped"]


def test_before_a_report_a_sweep_has_the_steps_of_all_its_members() -> None:
    ended = attempt(succeeded=1, outcome="Complete", outcome_time=NOW)
    desired = decide(seen(report(), attempts=(ended,), progress=None))
    assert condition(desired, "Complete")["message"] == "250 steps in 1 attempt"


@pytest.mark.parametrize("steps", ["", "-5", "7", -7, 1.5, True, None])
def test_a_members_steps_that_are_no_number_are_the_jobs_own(steps: object) -> None:
    members = [{"name": "a", "training": {"steps": steps}}]
    ended = attempt(succeeded=1, outcome="Complete", outcome_time=NOW)
    found = observed({"spec.members": members}, status=RUNNING_STATUS, attempts=(ended,))
    assert condition(decide(found), "Complete")["message"] == "100 steps in 1 attempt"
