"""Reads what a run appended to its run.jsonl, and a sweep to those of its members, since the last call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .directory import RunDirectory
from .log import Event, Follower, RunLog, StepEvent, SweepEvent, SweepStep
from .sweep_pace import SweepPace
from .sweep_view import MemberLogs, member_views, steps_made


@dataclass(slots=True)
class RunFollower:
    """Reads the logs from their beginning; each call reads what is new."""

    run: RunDirectory
    _follower: Follower = field(init=False)
    _members: MemberLogs = field(init=False)
    _pace: SweepPace = field(init=False)

    def __post_init__(self) -> None:
        self._follower, self._members, self._pace = Follower(self.run.log), MemberLogs(self.run), SweepPace(0.0)

    @property
    def log(self) -> RunLog:
        """The run's own log."""
        return self._follower.log

    def new_events(self) -> Iterator[Event]:
        """Every new event of run.jsonl; the members' new steps as one SweepStep."""
        for event in self._follower.new_events():
            if isinstance(event, SweepEvent):
                self._pace = SweepPace(event.time)
            yield event
        sweep = self.log.sweep
        steps = [event for event in self._members.new_events(self.log) if isinstance(event, StepEvent)]
        for step in steps:
            self._pace.take(step)
        if sweep is not None and steps:
            members = member_views(self.log, self._members.logs, trains=True)
            made, planned = steps_made(members)
            left = self._pace.left_seconds(members, self._members.logs, sweep.halving)
            yield SweepStep(steps[-1].time, steps[-1].metrics, made, planned, left)
