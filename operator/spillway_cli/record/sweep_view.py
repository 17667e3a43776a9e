"""The members of a sweep as commands show them. Pure except for reading the logs (MemberLogs).

run.jsonl                events of members, the best    -> MemberView -> a table, a line, or JSON
members/NAME/run.jsonl   steps and evaluations of each
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.table import Table

from spillway.api.progress import MemberProgress, MemberState, steps_of

from ..console import printable, table
from .directory import RunDirectory
from .log import EvaluationEvent, Event, Follower, RunLog, StepEvent
from .summary import finite, format_loss

BEST_MARK = "*"
UNKNOWN = "-"


@dataclass(frozen=True, slots=True)
class MemberView:
    """One member at one moment."""

    name: str
    step: int
    steps: int
    """Steps that it trains unless successive halving stops it; 0 = not known."""
    loss: float | None
    """Loss of its last step."""
    evaluation_loss: float | None
    state: str
    message: str = ""
    """Why it was stopped, or failed."""
    is_best: bool = False
    device: int | None = None
    """Device on which it trains now, if the sweep uses several."""

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "step": self.step,
            "steps": self.steps or None,
            "loss": finite(self.loss),
            "evaluationLoss": finite(self.evaluation_loss),
            "state": self.state,
            "message": self.message or None,
            "best": self.is_best,
            "device": self.device,
        }


def member_views(log: RunLog, logs: Mapping[str, RunLog], trains: bool = False) -> tuple[MemberView, ...]:
    """All members, from the sweep's log and their own, in the job's order. Unless the run `trains`, none is Running."""
    if log.sweep is None:
        return ()
    best = "" if log.best is None else log.best.member
    return tuple(
        member_view(name, steps, log, logs.get(name, RunLog()), name == best, trains)
        for name, steps in log.sweep.members.items()
    )


def member_view(name: str, steps: int, log: RunLog, own: RunLog, is_best: bool, trains: bool) -> MemberView:
    event = log.members.get(name)
    state = MemberState.PARKED if event is None else event.state
    if state is MemberState.RUNNING and not trains:
        state = MemberState.PARKED
    last = own.steps[max(own.steps)].metrics if own.steps else None
    evaluated = own.evaluations[max(own.evaluations)].loss if own.evaluations else None
    return MemberView(
        name=name,
        step=max(0 if event is None else event.step, 0 if last is None else last.step),
        steps=steps,
        loss=None if last is None else last.loss,
        evaluation_loss=evaluated,
        state=state.value,
        message="" if event is None else event.reason,
        is_best=is_best,
        device=event.device if event is not None and state is MemberState.RUNNING and several_devices(log) else None,
    )


def several_devices(log: RunLog) -> bool:
    return any(turn.device for turn in log.turns)


def steps_made(members: Sequence[MemberView]) -> tuple[int, int]:
    """Steps that all members have made, and will have made at their end (spillway.api.progress.steps_of)."""
    return steps_of(map(progress_of, members))


def progress_of(member: MemberView) -> MemberProgress:
    """The member's progress as an operator's report has it."""
    return MemberProgress(name=member.name, step=member.step, num_steps=member.steps, state=MemberState(member.state))


def best_of(members: Sequence[MemberView]) -> MemberView | None:
    return next((one for one in members if one.is_best), None)


def members_table(members: Sequence[MemberView]) -> Table:
    """One row per member, the best one marked; the last column says why it was stopped or failed."""
    with_messages = any(one.message for one in members)
    made = table("member", "", "steps", "loss", "evaluation", "state", *(["why"] if with_messages else []))
    for one in members:
        made.add_row(*member_cells(one), *([printable(one.message)] if with_messages else []))
    return made


def member_cells(one: MemberView) -> list[str]:
    """Name, mark of the best, steps, loss, evaluation, state."""
    return [
        printable(one.name),
        BEST_MARK if one.is_best else "",
        f"{one.step}/{one.steps}" if one.steps else str(one.step),
        UNKNOWN if one.loss is None else format_loss(one.loss),
        UNKNOWN if one.evaluation_loss is None else format_loss(one.evaluation_loss),
        printable(one.state) if one.device is None else f"{printable(one.state)} on device {one.device}",
    ]


def members_json(members: Sequence[MemberView]) -> dict[str, object]:
    """`members` and `bestMember` of a JSON document; empty unless the run is a sweep."""
    if not members:
        return {}
    best = best_of(members)
    return {"members": [one.as_json() for one in members], "bestMember": None if best is None else best.name}


def joined(log: RunLog, logs: Mapping[str, RunLog]) -> RunLog:
    """The steps of all members in the order of time, numbered consecutively: for figures of the whole process.
    Evaluations are left out. Returns `log` unchanged unless the run is a sweep."""
    if log.sweep is None:
        return log
    steps = sorted((step for own in logs.values() for step in own.steps.values()), key=lambda step: step.time)
    return RunLog(
        starts=log.starts,
        steps={
            number: dataclasses.replace(step, metrics=dataclasses.replace(step.metrics, step=number))
            for number, step in enumerate(steps, start=1)
        },
        checkpoints=[one for own in logs.values() for one in own.checkpoints],
        ends=log.ends,
        sweep=log.sweep,
    )


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class MemberLogs:
    """The members' own run.jsonl files, each read from where the last call stopped."""

    run: RunDirectory
    _followers: dict[str, Follower] = field(default_factory=dict)

    def new_events(self, log: RunLog) -> Iterator[Event]:
        """Steps and evaluations that the members of `log` appended since the last call, in the order of time."""
        names = () if log.sweep is None else log.sweep.members
        found = [event for name in names for event in self._follower(name).new_events()]
        yield from sorted(
            (one for one in found if isinstance(one, StepEvent | EvaluationEvent)), key=lambda one: one.time
        )

    @property
    def logs(self) -> dict[str, RunLog]:
        return {name: follower.log for name, follower in self._followers.items()}

    def _follower(self, name: str) -> Follower:
        known = self._followers.get(name)
        if known is None or known.was_replaced():
            known = self._followers[name] = Follower(self.run.member(name).log)
        return known


def read_member_logs(run: RunDirectory, log: RunLog) -> dict[str, RunLog]:
    """The members' whole logs; empty unless the run is a sweep."""
    members = MemberLogs(run)
    for _ in members.new_events(log):
        pass
    return members.logs
