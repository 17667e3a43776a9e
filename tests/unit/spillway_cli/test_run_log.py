"""run.jsonl while it grows."""

from __future__ import annotations

import json
from pathlib import Path

from fakes.fake_trainer import attempt_lines
from spillway_cli.run_log import Follower, Step


def steps(follower: Follower) -> list[int]:
    return [event.metrics.step for event in follower.new_events() if isinstance(event, Step)]


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


def test_numbers_that_no_integer_can_be_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    lines = [json.dumps(line) + "\n" for line in attempt_lines(1, 1, 2)]
    path.write_text('{"event": "start", "time": 1e999, "epoch": Infinity}\n' + "[" * 100_000 + "\n" + "".join(lines))
    assert steps(Follower(path)) == [1, 2]
