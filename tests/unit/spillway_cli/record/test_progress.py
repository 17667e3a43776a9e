"""The progress line, its pace, and what is said with and without a terminal."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from fakes.fake_trainer import attempt_lines, step_line
from spillway.plan import Tier
from spillway_cli.console import console_on
from spillway_cli.record.attempt_ends import Attempt
from spillway_cli.record.log import Preparing, RunLog, Start, StepEvent
from spillway_cli.record.progress import ProgressReporter, RemainingTime, logging_interval, occupancy, progress_line

MIB = 2**20
BUDGET = {Tier.DEVICE: 128 * MIB, Tier.HOST: 512 * MIB}


def step(number: int, time: float = 0.0) -> StepEvent:
    log = RunLog()
    event = log.add(json.dumps(step_line(number, time)))
    assert isinstance(event, StepEvent)
    return event


def reported(num_steps: int, last: int, console: Console, seconds: float = 0.5) -> None:
    """Report the steps 1..last to `console`."""
    log = RunLog()
    with ProgressReporter(console, num_steps, BUDGET) as progress:
        for number in range(1, last + 1):
            event = log.add(json.dumps(step_line(number, number * seconds)))
            assert event is not None
            progress.event(event, log)


def plain() -> Console:
    return console_on(io.StringIO())


def said(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_line_has_step_loss_speed_tiers_and_time_left() -> None:
    assert progress_line(step(4), 1000, BUDGET, 62.0) == (
        "step 4/1000  loss 2  2.05 k tok/s  device 60.0/128 MiB  host 88.0 MiB  nvme 30.0 MiB  eta 1m02s"
        "  lr 0.001  grad norm 1.5"
    )


def test_line_has_no_tier_that_holds_nothing() -> None:
    one = step(4)
    one.metrics.tier_peak_bytes["nvme"] = 0
    assert "nvme" not in progress_line(one, 10, BUDGET, 1.0)


def test_line_says_when_a_step_was_skipped() -> None:
    line = json.dumps({**step_line(4, 0.0), "skipped": True, "loss": None})
    event = RunLog().add(line)
    assert isinstance(event, StepEvent)
    assert "loss not finite (skipped)" in progress_line(event, 10, BUDGET, None)


def test_line_says_when_the_loss_scale_was_too_large() -> None:
    event = RunLog().add(
        json.dumps({**step_line(4, 0.0), "skipped": True, "gradient_norm": None, "loss_scale": 65536.0})
    )
    assert isinstance(event, StepEvent)
    assert "loss 2 (skipped: gradients overflowed at loss scale 65536)" in progress_line(event, 10, BUDGET, None)


def test_occupancy_without_a_budget_is_the_bytes_alone() -> None:
    assert occupancy(Tier.DEVICE, {"device": 3 * MIB}, {}) == "device 3.00 MiB"


def test_occupancy_names_both_units_when_they_differ() -> None:
    assert occupancy(Tier.DEVICE, {"device": 512 * 1024}, BUDGET) == "device 512 KiB/128 MiB"


def test_time_left_is_the_pace_of_the_latest_steps() -> None:
    remaining = RemainingTime(100)
    for number in range(1, 51):
        remaining.after(number, float(number))
    assert remaining.after(51, 51.0) == 49.0


def test_time_left_is_unknown_after_the_first_step() -> None:
    assert RemainingTime(100).after(1, 5.0) is None


def test_time_left_forgets_the_pause_of_a_restart() -> None:
    remaining = RemainingTime(100)
    remaining.after(10, 10.0)
    remaining.restart(1000.0)
    assert remaining.after(11, 1001.0) == 89.0


@pytest.mark.parametrize(
    ("num_steps", "interval"), [(1, 1), (20, 1), (21, 2), (90, 5), (200, 10), (1000, 50), (10**6, 50000)]
)
def test_logging_interval_is_round_and_gives_about_twenty_lines(num_steps: int, interval: int) -> None:
    assert logging_interval(num_steps) == interval


def test_without_a_terminal_there_is_one_line_per_interval() -> None:
    console = plain()
    reported(100, 100, console)
    assert [line.split()[1] for line in said(console)] == ["1/100", *(f"{n}/100" for n in range(5, 101, 5))]


def test_without_a_terminal_slow_steps_are_never_silent_for_long() -> None:
    console = plain()
    reported(10_000, 5, console, seconds=61.0)
    assert len(said(console)) == 5


def test_without_a_terminal_there_is_no_control_character() -> None:
    console = plain()
    reported(10, 10, console)
    assert not [letter for line in said(console) for letter in line if not letter.isprintable()]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_there_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    reported(10, 10, console_on(terminal))
    assert "━" in terminal.getvalue()


def test_no_color_is_respected_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    reported(10, 10, console_on(terminal))
    assert "\x1b[3" not in terminal.getvalue()


def test_force_color_does_not_colour_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = plain()
    reported(10, 10, console)
    assert "\x1b" not in "".join(said(console))


def test_checkpoints_and_evaluations_are_told() -> None:
    console, log = plain(), RunLog()
    with ProgressReporter(console, 100, BUDGET) as progress:
        for line in attempt_lines(2, 3, 4):
            event = log.add(json.dumps(line))
            assert event is not None
            progress.event(event, log)
    text = "\n".join(said(console))
    assert "resumed from the checkpoint of step 2" in text
    assert "step 4: evaluation loss 2.25" in text
    assert "step 4: checkpoint committed (1.00 MiB in 10 ms)" in text


def test_what_is_done_before_the_first_step_is_told() -> None:
    console, log = plain(), RunLog()
    with ProgressReporter(console, 100, BUDGET) as progress:
        for doing in ("corpus: encoding, 0 B of 9.00 MiB", "corpus: encoding, 4.00 MiB of 9.00 MiB"):
            event = log.add(json.dumps({"event": "preparing", "time": 1.0, "doing": doing}))
            assert event is not None
            progress.event(event, log)
    assert said(console) == ["corpus: encoding, 0 B of 9.00 MiB ...", "corpus: encoding, 4.00 MiB of 9.00 MiB ..."]


def test_on_a_terminal_the_bar_says_what_is_done_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    with ProgressReporter(console_on(terminal), 100, BUDGET) as progress:
        progress.event(Preparing(1.0, "loading the model"), RunLog())
    assert "loading the model ..." in terminal.getvalue()


def test_restart_is_told_with_what_is_left() -> None:
    console = plain()
    with ProgressReporter(console, 100, BUDGET) as progress:
        progress.attempt_ended(Attempt(1, 137, "RankCrashed", "killed by SIGKILL"), 2)
    assert said(console) == [
        "attempt 1 ended: RankCrashed: killed by SIGKILL",
        "restarting from the newest checkpoint, or from the start if there is none; 1 more restart allowed",
    ]


def test_the_end_of_the_last_attempt_is_left_to_the_last_sentence() -> None:
    console = plain()
    with ProgressReporter(console, 100, BUDGET) as progress:
        progress.attempt_ended(Attempt(1, 64, "UserError", "no text"), 0)
    assert said(console) == []


def test_square_brackets_are_no_markup() -> None:
    console = plain()
    with ProgressReporter(console, 100, BUDGET) as progress:
        progress.say("[red]name[/red]")
    assert said(console) == ["[red]name[/red]"]


@pytest.mark.parametrize(
    ("isa", "forced", "why"),
    [("reference", "", "no C++ compiler"), ("reference", "reference", "switched off"), ("avx2", "avx2", "")],
)
def test_reference_path_is_reported_only_without_the_native_library(
    isa: str, forced: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPILLWAY_FORCE_ISA", forced)
    console = plain()
    with ProgressReporter(console, 10, BUDGET) as progress:
        progress.event(Start(0.0, 1, 0, isa, "none", 1), RunLog())
    text = " ".join(said(console))
    assert ("plain torch" in text) is bool(why)
    assert why in text
