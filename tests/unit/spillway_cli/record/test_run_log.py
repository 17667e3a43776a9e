"""run.jsonl while it grows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fakes.fake_trainer import attempt_lines, start_line, step_line
from spillway_cli.record.log import Follower, RunLog, StepEvent


def steps(follower: Follower) -> list[int]:
    return [event.metrics.step for event in follower.new_events() if isinstance(event, StepEvent)]


def test_follower_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    path, follower = tmp_path / "run.jsonl", Follower(tmp_path / "run.jsonl")
    text = "".join(json.dumps(line) + "\n" for line in attempt_lines(1, 1, 3))
    path.write_text(text[:-30])
    assert steps(follower) == [1, 2]
    path.write_text(text)
    assert steps(follower) == [3]


def test_follower_of_a_file_that_is_not_there_yet_sees_nothing(tmp_path: Path) -> None:
    assert steps(Follower(tmp_path / "run.jsonl")) == []


def test_line_that_was_closed_off_half_written_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    lines = [json.dumps(line) + "\n" for line in attempt_lines(1, 1, 3)]
    path.write_text(lines[0] + lines[1] + lines[2][:40] + "\n" + lines[3])
    assert steps(Follower(path)) == [1, 3]


@pytest.mark.parametrize(
    ("ends", "restarts"),
    [([75, 75], 0), ([75, 137], 1), ([None, 75], 1), ([None, None], 2), ([0, 64], 1)],
    ids=["stopped twice", "stopped, crashed", "killed, stopped", "killed twice", "extended, failed"],
)
def test_only_what_follows_a_failure_or_a_kill_is_a_restart(ends: list[int | None], restarts: int) -> None:
    log = RunLog()
    for epoch, code in enumerate([*ends, 0], 1):
        log.add(json.dumps(start_line(epoch, epoch - 1, 10.0 * epoch)))
        log.add(json.dumps(step_line(epoch, 10.0 * epoch + 1)))
        if code is not None:
            end = {"event": "end", "time": 10.0 * epoch + 2, "step": epoch, "reason": "", "message": ""}
            log.add(json.dumps(end | {"exit_code": code}))
    assert log.num_restarts == restarts


def test_numbers_that_no_integer_can_be_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    lines = [json.dumps(line) + "\n" for line in attempt_lines(1, 1, 2)]
    path.write_text('{"event": "start", "time": 1e999, "epoch": Infinity}\n' + "[" * 100_000 + "\n" + "".join(lines))
    assert steps(Follower(path)) == [1, 2]
