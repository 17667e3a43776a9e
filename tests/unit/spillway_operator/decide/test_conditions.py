"""Conditions: the table and its page, how a list changes, and what people and generic tools read from it."""

from __future__ import annotations

import re

import pytest

from harness.places import ROOT
from spillway.api.status import Condition
from spillway.errors import RANK_CRASHED, ExitCode
from spillway.feedback import retries
from spillway.feedback.retries import RETRIES
from spillway_operator.decide import conditions as c
from spillway_operator.decide.conditions import Finding, clean, false, merge, notes, state, true, unknown

PAGE = ROOT / "docs" / "conditions.md"
EARLIER, NOW = "2026-11-21T10:00:00Z", "2026-11-21T11:00:00Z"


def merged(*findings: Finding, old: tuple[Condition, ...] = (), generation: int = 1) -> tuple[Condition, ...]:
    return merge(old, findings, generation, NOW)


def one(conditions: tuple[Condition, ...], type_: str) -> Condition:
    found = c.find(conditions, type_)
    assert found is not None
    return found


def status_of(meaning: str) -> tuple[str, str]:
    for status in ("False", "Unknown"):
        if meaning.startswith(f"{status}: "):
            return status, meaning.removeprefix(f"{status}: ")
    return "True", meaning


def test_the_page_lists_every_type_and_reason_and_no_other() -> None:
    sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[2:]
    found = {}
    for section in sections:
        items = re.findall(r"^- `(\w+)` \((True|False|Unknown)\): (.*(?:\n  .*)*)$", section, flags=re.MULTILINE)
        found[section.split("\n", 1)[0]] = {
            reason: (status, meaning.replace("\n  ", " ")) for reason, status, meaning in items
        }
    assert found == {
        type_: {reason: status_of(meaning) for reason, meaning in reasons.items()}
        for type_, reasons in c.REASONS.items()
    }


def test_every_reason_is_one_word_that_the_api_allows() -> None:
    for type_, reasons in c.REASONS.items():
        for reason in (type_, *reasons):
            assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9]{0,61}[A-Za-z0-9])?", reason)


def test_every_way_to_end_has_a_reason_of_failed() -> None:
    codes = {code.reason for code in ExitCode} - {"Completed", "FitsWithSpilling", "DoesNotFit"}
    assert codes | set(RETRIES) | {RANK_CRASHED} <= set(c.CAUSES) <= set(c.REASONS[c.FAILED])


def test_a_reason_that_no_page_lists_cannot_be_used() -> None:
    with pytest.raises(AssertionError, match="not documented"):
        true(c.RUNNING, "Flying")


def test_the_transition_time_moves_with_the_status_only() -> None:
    old = (Condition(type=c.RUNNING, status="False", reason="Starting", last_transition_time=EARLIER),)
    assert one(merged(false(c.RUNNING, "Queued"), old=old), c.RUNNING).last_transition_time == EARLIER
    assert one(merged(true(c.RUNNING, "Running"), old=old), c.RUNNING).last_transition_time == NOW


def test_what_was_not_looked_at_stays() -> None:
    old = merged(true(c.PLANNED, "Planned", "on node-7"))
    assert one(merged(true(c.RUNNING, "Running"), old=old), c.PLANNED) == one(old, c.PLANNED)


def test_merging_what_is_there_changes_nothing() -> None:
    old = merged(true(c.PLANNED, "Planned"), false(c.RUNNING, "Starting"), unknown(c.SCHEDULED, "Waiting"))
    assert merge(old, (), 1, "2026-11-22T00:00:00Z") == old


def test_every_condition_is_about_the_newest_generation() -> None:
    old = merged(true(c.PLANNED, "Planned"))
    assert {found.observed_generation for found in merged(old=old, generation=7)} == {7}


def test_conditions_of_another_version_are_dropped() -> None:
    old = (
        Condition(type="Novel", status="True", reason="New"),
        Condition(type=c.RUNNING, status="True", reason="Novel"),
    )
    assert {found.type for found in merged(old=old)} == {c.READY, c.RECONCILING, c.STALLED}


def test_the_list_is_in_the_order_of_the_page() -> None:
    found = merged(true(c.RUNNING, "Running"), true(c.ACCEPTED, "Valid"), true(c.PLANNED, "Planned"))
    order = list(c.REASONS)
    assert [order.index(condition.type) for condition in found] == sorted(
        order.index(condition.type) for condition in found
    )


@pytest.mark.parametrize(
    ("findings", "ready", "reconciling", "stalled"),
    [
        ((), "False", "True", "False"),
        ((true(c.ACCEPTED, "Valid"), false(c.RUNNING, "Starting")), "False", "True", "False"),
        ((true(c.RUNNING, "Running"),), "True", "False", "False"),
        ((true(c.RUNNING, "Running"), false(c.SUSPENDED, c.STOPPING)), "False", "True", "False"),
        ((true(c.RUNNING, retries.NO_PROGRESS),), "False", "True", "False"),
        ((true(c.COMPLETE, "Completed"), false(c.RUNNING, "Ended")), "True", "False", "False"),
        ((true(c.SUSPENDED, c.SUSPENDED_BY_USER),), "True", "False", "False"),
        ((true(c.FAILED, RANK_CRASHED, "why"),), "False", "False", "True"),
        ((false(c.ACCEPTED, c.INVALID_SPEC, "why"),), "False", "False", "True"),
        ((false(c.ACCEPTED, c.NAME_CONFLICT, "why"),), "False", "True", "False"),
    ],
)
def test_generic_tools_read_kstatus(findings: tuple[Finding, ...], ready: str, reconciling: str, stalled: str) -> None:
    found = merged(*findings)
    assert [one(found, type_).status for type_ in (c.READY, c.RECONCILING, c.STALLED)] == [ready, reconciling, stalled]


@pytest.mark.parametrize(
    ("findings", "shown"),
    [
        ((), "Planning"),
        ((false(c.ACCEPTED, c.UNSUPPORTED),), "Rejected"),
        ((true(c.ACCEPTED, "Valid"), false(c.PLANNED, "NoNode")), "Pending"),
        ((true(c.ACCEPTED, "Valid"), false(c.SCHEDULED, "Rejected")), "Pending"),
        ((true(c.ACCEPTED, "Valid"), true(c.PLANNED, "Planned"), false(c.RUNNING, "Starting")), "Starting"),
        ((true(c.ACCEPTED, "Valid"), true(c.PLANNED, "Planned"), false(c.RUNNING, "Queued")), "Queued"),
        ((true(c.ACCEPTED, "Valid"), true(c.PLANNED, "Planned"), true(c.RUNNING, "Running")), "Running"),
        ((true(c.ACCEPTED, "Valid"), true(c.PLANNED, "Planned"), false(c.RUNNING, c.RESTARTING)), "Restarting"),
        ((true(c.ACCEPTED, "Valid"), true(c.SUSPENDED, c.SUSPENDED_BY_USER)), "Suspended"),
        ((true(c.COMPLETE, "Completed"), true(c.ACCEPTED, "Valid")), "Complete"),
        ((true(c.FAILED, RANK_CRASHED), true(c.RUNNING, "Running")), "Failed"),
    ],
)
def test_one_word_for_people(findings: tuple[Finding, ...], shown: str) -> None:
    assert state(merged(*findings)) == shown


def test_an_event_is_made_of_what_changed_and_is_news() -> None:
    old = merged(true(c.ACCEPTED, "Valid"), false(c.RUNNING, "Starting"))
    new = merged(true(c.PLANNED, "Planned", "on node-7"), true(c.RUNNING, "Running"), old=old)
    assert [(note.type, note.reason, note.action, note.note) for note in notes(old, new)] == [
        ("Normal", "Planned", "Plan", "on node-7"),
        ("Normal", "Running", "Run", "Running is True"),
    ]
    assert notes(new, new) == ()


def test_bad_news_is_a_warning() -> None:
    (note,) = notes((), merged(true(c.FAILED, RANK_CRASHED, "ValueError: bad")))
    assert (note.type, note.reason, note.note) == ("Warning", RANK_CRASHED, "ValueError: bad")
    (note,) = notes((), merged(false(c.SCHEDULED, "Unschedulable", "0/3 nodes are available")))
    assert note.type == "Warning"


def test_messages_are_one_printable_line_of_bounded_length() -> None:
    assert clean("a\x00b\n\x1b[31mred\u202e  c") == "a b [31mred c"
    assert len(clean("x" * 10_000)) == 1024
    assert len(clean("\n" * 100_000 + "x")) == 0
