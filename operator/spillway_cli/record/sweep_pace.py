"""Estimates a sweep's remaining time from its members' steps so far. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean

from spillway.api.sweep.halving import steps_ahead

from .log import RunLog, StepEvent
from .sweep_view import MemberView, progress_of

WINDOW_STEPS = 20
"""Number of latest steps from which a member's pace is computed."""


@dataclass(slots=True)
class SweepPace:
    """The time of one attempt's steps, of all members, and of the rest of the process."""

    since: float
    """Unix time at which the attempt began; earlier steps are ignored."""
    _began: float | None = None
    """Time at which the first step began. Tokenizing happens only once, before that time, so it is not included."""
    _last: float = 0.0
    _in_steps_seconds: float = 0.0

    def take(self, step: StepEvent) -> None:
        """Adds a step; the order does not matter."""
        if step.time < self.since:
            return
        seconds = step.metrics.step_seconds
        began = step.time - seconds
        self._began = began if self._began is None else min(self._began, began)
        self._last = max(self._last, step.time)
        self._in_steps_seconds += seconds

    def left_seconds(self, members: Sequence[MemberView], logs: Mapping[str, RunLog], halving: int) -> float | None:
        """Seconds until all members have ended; None before the first step. Each member has the pace of its own latest
        steps; a member without steps has the mean pace of the others. The total is scaled by the overhead so far:
        evaluations, checkpoints, changes of turn."""
        paces = {name: _pace(own) for name, own in logs.items() if own.steps}
        if self._began is None or not self._in_steps_seconds or not paces:
            return None
        beside = (self._last - self._began) / self._in_steps_seconds  # below 1 on several devices
        usual = fmean(paces.values())
        ahead = steps_ahead(map(progress_of, members), halving)
        alone = [number * paces.get(name, usual) for name, number in ahead.items()]
        return max(beside * sum(alone), *alone, 0.0)


def _pace(log: RunLog) -> float:
    """Mean seconds of the latest steps."""
    return fmean(step.metrics.step_seconds for step in islice(reversed(log.steps.values()), WINDOW_STEPS))


def left_seconds(log: RunLog, logs: Mapping[str, RunLog], members: Sequence[MemberView]) -> float | None:
    """Like `SweepPace.left_seconds`, but from whole logs; None unless the run is a sweep."""
    if log.sweep is None:
        return None
    pace = SweepPace(log.sweep.time)
    for own in logs.values():
        for step in own.steps.values():
            pace.take(step)
    return pace.left_seconds(members, logs, log.sweep.halving)
