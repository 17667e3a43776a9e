"""The log of a sweep: an event for each turn and end of a member, and a row of each for /metrics and the operator."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pydantic import ValidationError

from spillway.api.field_types import MAX_MEMBERS
from spillway.api.pod import Objective
from spillway.api.progress import LONGEST_REASON, MemberProgress, MemberState, TrainingProgress, steps_of
from spillway.api.sweep.halving import Contender, Stop, Value
from spillway.metrics import StepMetrics
from spillway_trainer.kernels import native
from spillway_trainer.reporting.recorder import Recorder
from spillway_trainer.sweep.recorder import SweepRecorder

MEMBERS = (Contender("a", 10), Contender("b", 20))


@dataclass
class Told:
    """A sink that remembers."""

    rows: tuple[MemberProgress, ...] = ()
    best: str = ""
    steps: list[int] = field(default_factory=list)
    checkpoints: list[tuple[str, int]] = field(default_factory=list)

    def step(self, step: StepMetrics) -> None:
        self.steps.append(step.step)

    def sweep(self, members: tuple[MemberProgress, ...], best: str) -> None:
        self.rows, self.best = members, best

    def member_checkpoint(self, member: str, step: int) -> None:
        self.checkpoints.append((member, step))


def recorder(path: Path | None = None, metric: str = "EvaluationLoss") -> tuple[SweepRecorder, Told]:
    made, told = SweepRecorder(path, MEMBERS, Objective.model_validate({"metric": metric})), Told()
    made.show_sweep(told)
    return made, told


def step(number: int, loss: float = 2.5) -> StepMetrics:
    return StepMetrics(number, loss, 1e-3, 1.0, 1.0, tokens=100, step_seconds=0.5)


def lines(path: Path) -> list[dict[str, object]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(line.pop("time") for line in found)
    return found


def test_every_turn_and_every_end_is_an_event(tmp_path: Path) -> None:
    sweep, _ = recorder(tmp_path / "run.jsonl")
    sweep.sweep(epoch=2)
    sweep.member_started("a", 0, 1)
    sweep.sink("a").step(step(5, loss=2.5))
    sweep.sink("a").evaluation(2.25)
    sweep.member_parked("a", 5)
    sweep.member_failed("a", 5, "NonFinite: step 6")
    sweep.member_completed("b", 20)
    sweep.member_stopped(Stop("b", 20, "stopped after 20 steps"))
    nothing, figures = {"loss": None, "objective": None}, {"loss": 2.5, "objective": 2.25}
    assert lines(tmp_path / "run.jsonl") == [
        {
            "event": "sweep",
            "epoch": 2,
            "isa": native.isa(),
            "members": [{"name": "a", "num_steps": 10}, {"name": "b", "num_steps": 20}],
            "objective": {"metric": "EvaluationLoss", "direction": "Minimize", "halving": None},
        },
        {"event": "member_started", "member": "a", "step": 0, **nothing, "reason": "", "device": 1},
        {"event": "member_parked", "member": "a", "step": 5, **figures, "reason": ""},
        {"event": "member_failed", "member": "a", "step": 5, **figures, "reason": "NonFinite: step 6"},
        {"event": "member_completed", "member": "b", "step": 20, **nothing, "reason": ""},
        {"event": "member_stopped", "member": "b", "step": 20, **nothing, "reason": "stopped after 20 steps"},
    ]


def test_the_best_is_written_when_it_is_another_one(tmp_path: Path) -> None:
    sweep, told = recorder(tmp_path / "run.jsonl")
    sweep.sink("b").step(step(3))
    sweep.sink("b").evaluation(1.5)
    for best in ("b", "b", "a"):
        sweep.best(best)
    assert lines(tmp_path / "run.jsonl") == [
        {"event": "best", "member": "b", "step": 3, "objective": 1.5},
        {"event": "best", "member": "a", "step": 0, "objective": None},
    ]
    assert told.best == "a"


def test_a_members_own_recorder_fills_its_row(tmp_path: Path) -> None:
    sweep, told = recorder()
    own = Recorder(tmp_path / "run.jsonl")
    own.show(sweep.sink("b"))
    own.step(step(7, loss=3.5))
    own.evaluation(7, 3.25, 100, 0.1)
    own.checkpoint(7, 10, 0.1, 0.1)
    assert told.rows == (
        MemberProgress(name="a", num_steps=10),
        MemberProgress(name="b", step=7, num_steps=20, loss=3.5, objective=3.25),
    )
    assert (told.steps, told.checkpoints) == ([7], [("b", 7)])


@pytest.mark.parametrize(("metric", "objective"), [("Loss", 3.5), ("EvaluationLoss", 3.25)])
def test_the_objective_is_the_metric_that_the_job_names(metric: str, objective: float) -> None:
    sweep, told = recorder(metric=metric)
    sweep.sink("a").step(step(1, loss=3.5))
    assert told.rows[0].objective == (objective if metric == "Loss" else None)
    sweep.sink("a").evaluation(3.25)
    assert told.rows[0].objective == objective


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e31])
def test_a_figure_that_no_report_may_say_is_none(bad: float) -> None:
    sweep, told = recorder()
    sweep.sink("a").step(step(1, loss=bad))
    sweep.sink("a").evaluation(bad)
    assert (told.rows[0].loss, told.rows[0].objective) == (None, None)


def test_states_follow_the_events_and_a_reason_is_one_short_line() -> None:
    sweep, told = recorder()
    sweep.member_started("a", 4)
    assert (told.rows[0].state, told.rows[0].step) == (MemberState.RUNNING, 4)
    sweep.member_failed("a", 5, "two\nlines " + "x" * 1000)
    assert told.rows[0].state is MemberState.FAILED
    assert told.rows[0].reason.startswith("two lines xxx")
    assert len(told.rows[0].reason) == LONGEST_REASON
    sweep.member_started("a", 5)
    assert told.rows[0].reason == ""


def test_values_of_earlier_attempts_are_in_the_rows_before_anybody_trains() -> None:
    sweep, told = recorder()
    sweep.known([Value("a", 5, 3.0), Value("a", 10, 2.0), Value("gone", 1, 1.0)])
    assert [(one.name, one.step, one.objective) for one in told.rows] == [("a", 10, 2.0), ("b", 0, None)]


def test_sweep_steps_are_those_made_plus_those_left_for_running_members() -> None:
    rows = (
        MemberProgress(name="a", step=4, num_steps=10, state=MemberState.RUNNING),
        MemberProgress(name="b", step=2, num_steps=10, state=MemberState.STOPPED),
        MemberProgress(name="c", step=3, num_steps=10, state=MemberState.FAILED),
        MemberProgress(name="d", step=10, num_steps=10, state=MemberState.COMPLETE),
    )
    assert steps_of(rows) == (19, 25)
    assert steps_of(()) == (0, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"members": [{"name": "a"}, {"name": "a"}]},
        {"members": [{"name": "A"}]},
        {"members": [{"name": "a" * 64}]},
        {"members": [{"name": "a\n"}]},
        {"members": [{"name": "a", "step": -1}]},
        {"members": [{"name": "a", "step": 10**13}]},
        {"members": [{"name": "a", "loss": 1e31}]},
        {"members": [{"name": "a", "objective": math.nan}]},
        {"members": [{"name": "a", "state": "Dancing"}]},
        {"members": [{"name": "a", "reason": "x" * 257}]},
        {"members": [{"name": f"m{index}"} for index in range(MAX_MEMBERS + 1)]},
        {"members": [{"name": "a"}], "bestMember": "b"},
        {"bestMember": "b"},
    ],
)
def test_a_report_of_members_that_cannot_be_is_rejected(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        TrainingProgress.model_validate({"epoch": 1, "step": 1, "steps": 2} | wrong)
