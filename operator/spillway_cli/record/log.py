"""Parses run.jsonl into events, also while the trainer is still appending.

A killed trainer may leave a half-written line, and steps repeat after a resume: unreadable lines are skipped, and the
last line of a step wins.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from spillway.api.progress import MemberState
from spillway.api.training import Training
from spillway.errors import ExitCode
from spillway.metrics import StepMetrics


@dataclass(frozen=True, slots=True)
class Preparing:
    """What an attempt is doing before it trains."""

    time: float
    doing: str


@dataclass(frozen=True, slots=True)
class Start:
    """An attempt began to train."""

    time: float
    """Unix time, as in every event."""
    epoch: int
    resumed_from_step: int
    isa: str
    io_backend: str
    parameters: int
    """0 for a sweep: its members differ."""
    passed_over: tuple[str, ...] = ()
    """Problems of the newer checkpoints that were skipped at resume."""
    steps: int = 0
    """Steps to train, all attempts together; 0: unknown, as in a sweep."""
    sequences: int = 0
    """Sequences that an epoch trains on; 0: unknown."""


@dataclass(frozen=True, slots=True)
class ActivationsChosen:
    """Policies for individual saved storages were chosen."""

    time: float
    reason: str


@dataclass(frozen=True, slots=True)
class ActivationsCorrected:
    """Saved storages moved to host memory, because the spill file became smaller."""

    time: float
    step: int
    """The step after which it happened."""
    reason: str


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One optimizer step, and the attempt that made it."""

    time: float
    epoch: int
    metrics: StepMetrics


@dataclass(frozen=True, slots=True)
class EvaluationEvent:
    time: float
    step: int
    loss: float
    """Mean over the held-out tokens; NaN if not finite."""


@dataclass(frozen=True, slots=True)
class CheckpointEvent:
    time: float
    step: int
    nbytes: int
    seconds: float
    stalled_seconds: float
    """How long training stopped for it."""


@dataclass(frozen=True, slots=True)
class MissedCheckpoint:
    """A checkpoint could not be written; training continued."""

    time: float
    step: int
    problem: str


@dataclass(frozen=True, slots=True)
class End:
    """An attempt ended by itself; a killed one leaves no such event."""

    time: float
    step: int
    reason: str
    exit_code: int
    message: str


@dataclass(frozen=True, slots=True)
class SweepEvent:
    """An attempt of a sweep begins."""

    time: float
    epoch: int
    isa: str
    members: Mapping[str, int]
    """Name -> steps that it trains unless successive halving stops it, in the job's order."""
    metric: str
    """The metric by which members are compared: EvaluationLoss or Loss."""
    halving: int = 0
    """Steps of a member at the first halving round; 0 = no rounds."""


@dataclass(frozen=True, slots=True)
class MemberEvent:
    """A member's turn began or ended, or the member ended."""

    time: float
    member: str
    state: MemberState
    step: int
    loss: float | None
    objective: float | None
    reason: str
    """Why it was stopped, or failed."""
    device: int = 0
    """Device on which its turn began."""


@dataclass(slots=True)
class MemberTurn:
    """A member's turn on a device, from `begin` to `end` (Unix times). `end` is None if the turn has not ended, or if
    its process was killed."""

    member: str
    device: int
    begin: float
    end: float | None = None


@dataclass(frozen=True, slots=True)
class Best:
    """A new best member."""

    time: float
    member: str
    objective: float | None


@dataclass(frozen=True, slots=True)
class SweepStep:
    """Members made steps: not a line of run.jsonl, but a summary of the members' steps (follower.py)."""

    time: float
    metrics: StepMetrics
    """Metrics of the last step."""
    made: int
    """Steps made by all members."""
    planned: int
    """Steps that all members will have made at their end."""
    left_seconds: float | None


Event = (
    Preparing | Start | ActivationsChosen | ActivationsCorrected | StepEvent | EvaluationEvent | CheckpointEvent
    | MissedCheckpoint | SweepEvent | MemberEvent | SweepStep | Best | End
)  # fmt: skip


ORDERLY = (ExitCode.COMPLETED, ExitCode.PREEMPTED)


@dataclass(slots=True)
class RunLog:
    """The content of a run.jsonl so far."""

    starts: list[Start] = field(default_factory=list)
    choices: list[ActivationsChosen] = field(default_factory=list)
    corrections: list[ActivationsCorrected] = field(default_factory=list)
    steps: dict[int, StepEvent] = field(default_factory=dict)
    evaluations: dict[int, EvaluationEvent] = field(default_factory=dict)
    checkpoints: list[CheckpointEvent] = field(default_factory=list)
    missed_checkpoints: list[MissedCheckpoint] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    last_step_of_epoch: dict[int, int] = field(default_factory=dict)
    sweep: SweepEvent | None = None
    """The event of the newest attempt; None = not a sweep."""
    members: dict[str, MemberEvent] = field(default_factory=dict)
    """The newest event of each member."""
    turns: list[MemberTurn] = field(default_factory=list)
    best: Best | None = None

    @property
    def curve(self) -> list[StepEvent]:
        """The steps in order."""
        return [self.steps[step] for step in sorted(self.steps)]

    def steps_planned(self, training: Training) -> int:
        """Steps that a single run (no sweep) trains; 0 if it trains by epochs and no attempt has counted the sequences
        yet."""
        known = self.starts[-1].sequences if self.starts else 0
        return training.in_steps(known).num_steps if known or training.steps else 0

    @property
    def num_restarts(self) -> int:
        """Attempts that follow a failed or killed one. After an attempt that was stopped on request or completed, the
        next one is a resume, not a restart."""
        pairs = pairwise(one.time for one in self.starts)
        between = ([end for end in self.ends if first <= end.time <= second] for first, second in pairs)
        return sum(not ends or ends[-1].exit_code not in ORDERLY for ends in between)

    def add(self, line: str) -> Event | None:
        """Adds one line; returns its event, or None when the line is not a known event."""
        try:
            event = self._event(json.loads(line))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None
        match event:
            case Start():
                self.starts.append(event)
            case ActivationsChosen():
                self.choices.append(event)
            case ActivationsCorrected():
                self.corrections.append(event)
            case StepEvent():
                self.steps[event.metrics.step] = event
                self.last_step_of_epoch[event.epoch] = event.metrics.step
            case EvaluationEvent():
                self.evaluations[event.step] = event
            case CheckpointEvent():
                self.checkpoints.append(event)
            case MissedCheckpoint():
                self.missed_checkpoints.append(event)
            case SweepEvent():
                self.sweep = event
                self.starts.append(Start(event.time, event.epoch, 0, event.isa, io_backend="", parameters=0))
            case MemberEvent():
                self._take_turn(event)
                self.members[event.member] = event
            case Best():
                self.best = event
            case End():
                self.ends.append(event)
        return event

    def _take_turn(self, event: MemberEvent) -> None:
        before = self.members.get(event.member)
        if event.state is MemberState.RUNNING:
            self.turns.append(MemberTurn(event.member, event.device, event.time))
        elif before is not None and before.state is MemberState.RUNNING:
            last = next(turn for turn in reversed(self.turns) if turn.member == event.member)
            if last.end is None and (
                not self.starts or self.starts[-1].time <= last.begin
            ):  # else the turn is an earlier attempt's, which was killed
                last.end = event.time

    def _event(self, fields: dict[str, Any]) -> Event | None:
        reader = READERS.get(fields["event"])
        epoch = self.starts[-1].epoch if self.starts else 1
        return None if reader is None else reader(float(fields["time"]), epoch, fields)


MEMBER_EVENTS = {
    "member_started": MemberState.RUNNING,
    "member_parked": MemberState.PARKED,
    "member_stopped": MemberState.STOPPED,
    "member_failed": MemberState.FAILED,
    "member_completed": MemberState.COMPLETE,
}


def start(time: float, _: int, fields: dict[str, Any]) -> Start:
    """Reads a start event; those of a sweep's members have no `isa` and `io_backend`."""
    isa, io_backend = str(fields.get("isa", "")), str(fields.get("io_backend", ""))
    return Start(
        time,
        int(fields["epoch"]),
        int(fields["resumed_from_step"]),
        isa,
        io_backend,
        int(fields["parameters"]),
        tuple(map(str, fields.get("passed_over", ()))),
        int(fields.get("steps", 0)),
        int(fields.get("sequences", 0)),
    )


def sweep(time: float, _: int, fields: dict[str, Any]) -> SweepEvent:
    members = {str(one["name"]): int(one["num_steps"]) for one in fields["members"]}
    metric, halving = str(fields["objective"]["metric"]), int(fields["objective"].get("halving") or 0)
    return SweepEvent(time, int(fields["epoch"]), str(fields["isa"]), members, metric, halving)


def member_event(time: float, _: int, fields: dict[str, Any]) -> MemberEvent:
    state, loss, objective = MEMBER_EVENTS[fields["event"]], figure(fields["loss"]), figure(fields["objective"])
    member, reason, device = str(fields["member"]), str(fields["reason"]), int(fields.get("device", 0))
    return MemberEvent(time, member, state, int(fields["step"]), loss, objective, reason, device)


def end(time: float, _: int, fields: dict[str, Any]) -> End:
    return End(time, int(fields["step"]), str(fields["reason"]), int(fields["exit_code"]), str(fields["message"]))


READERS: dict[str, Callable[[float, int, dict[str, Any]], Event]] = {
    "preparing": lambda time, _, fields: Preparing(time, str(fields["doing"])),
    "start": start,
    "activations_chosen": lambda time, _, fields: ActivationsChosen(time, str(fields["reason"])),
    "activations_corrected": lambda time, _, fields: ActivationsCorrected(
        time, int(fields["step"]), str(fields["reason"])
    ),
    "step": lambda time, epoch, fields: StepEvent(time, epoch, step_metrics(fields)),
    "evaluation": lambda time, _, fields: EvaluationEvent(time, int(fields["step"]), number(fields["loss"])),
    "checkpoint": lambda time, _, fields: CheckpointEvent(
        time,
        int(fields["step"]),
        int(fields["bytes"]),
        float(fields["seconds"]),
        float(fields.get("stalled_seconds", fields["seconds"])),  # older versions stopped training for the whole write
    ),
    "checkpoint_missed": lambda time, _, fields: MissedCheckpoint(time, int(fields["step"]), str(fields["problem"])),
    "sweep": sweep,
    **dict.fromkeys(MEMBER_EVENTS, member_event),
    "best": lambda time, _, fields: Best(time, str(fields["member"]), figure(fields["objective"])),
    "end": end,
}
"""Event name -> function from (time, current attempt, fields) to an event."""


def step_metrics(fields: dict[str, Any]) -> StepMetrics:
    """The StepMetrics of a `step` line; null (not finite) becomes NaN."""
    return StepMetrics(
        step=int(fields["step"]),
        loss=number(fields["loss"]),
        learning_rate=number(fields["learning_rate"]),
        gradient_norm=number(fields["gradient_norm"]),
        clip_factor=number(fields["clip_factor"]),
        tokens=int(fields["tokens"]),
        step_seconds=float(fields["step_seconds"]),
        phase_seconds=dict(fields["phase_seconds"]),
        tier_bytes=dict(fields["tier_bytes"]),
        tier_peak_bytes=dict(fields["tier_peak_bytes"]),
        allocator_retries=int(fields.get("allocator_retries", 0)),
        moved_bytes=dict(fields["moved_bytes"]),
        lane_seconds=dict(fields.get("lane_seconds", {})),
        cpu_seconds=float(fields.get("cpu_seconds", 0.0)),
        skipped=bool(fields["skipped"]),
        loss_scale=fields.get("loss_scale"),
    )


def number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def figure(value: float | None) -> float | None:
    return None if value is None else float(value)


class Follower:
    """Reads a growing run.jsonl from where the last call stopped. The file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._inode = path, 0, 0
        self.log = RunLog()

    def was_replaced(self) -> bool:
        """Whether the file that was read so far was removed, truncated or replaced."""
        if not self._offset:
            return False
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return True
        return status.st_ino != self._inode or status.st_size < self._offset

    def new_events(self) -> Iterator[Event]:
        """Events of the complete lines appended since the last call; an incomplete line waits for the next call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            self._inode = os.fstat(file.fileno()).st_ino
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                event = self.log.add(line.decode("utf-8", errors="replace"))
                if event is not None:
                    yield event


def read_run_log(path: Path) -> RunLog:
    """The whole run.jsonl; an empty log if the file is missing."""
    follower = Follower(path)
    for _ in follower.new_events():
        pass
    return follower.log
