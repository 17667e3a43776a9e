"""SweepRecorder: events of a sweep's members, in run.jsonl, on /metrics and to the operator.

Each member has a Recorder and a run.jsonl of its own (steps, evaluations, checkpoints); `sink` joins it to the sweep's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from spillway.api.pod import Objective
from spillway.api.progress import LONGEST_REASON, MemberProgress, MemberState
from spillway.api.sweep.halving import Contender, Stop, Value
from spillway.metrics import StepMetrics

from ..ending import shortened
from ..kernels import native
from ..reporting.recorder import Recorder, Sink


class SweepSink(Protocol):
    """Shows a sweep elsewhere: /metrics, the operator. Never makes a step wait."""

    def step(self, step: StepMetrics) -> None: ...

    def sweep(self, members: tuple[MemberProgress, ...], best: str) -> None: ...

    def member_checkpoint(self, member: str, step: int) -> None: ...


class SweepRecorder(Recorder):
    """Appends to the sweep's run.jsonl and keeps a row for every member, which it shows to the sinks.

    Events besides those of Recorder: sweep, member_started and member_parked (the ends of a turn), member_stopped,
    member_failed, member_completed, best.
    """

    def __init__(self, path: Path | None, members: Sequence[Contender], objective: Objective) -> None:
        super().__init__(path)
        self._objective = objective
        self._rows = {one.name: MemberProgress(name=one.name, num_steps=one.num_steps) for one in members}
        self._best = ""
        self._sweep_sinks: tuple[SweepSink, ...] = ()

    @property
    def members(self) -> tuple[MemberProgress, ...]:
        """The progress of each member, in the order of the list."""
        return tuple(self._rows.values())

    def show_sweep(self, *sinks: SweepSink) -> None:
        """Shows every change of a member, and every step of any, to `sinks` from now on."""
        self._sweep_sinks = sinks
        self._tell()

    def known(self, values: Iterable[Value]) -> None:
        """Takes what members reported in earlier attempts, in order: their rows show it until they report again."""
        for one in values:
            if one.member in self._rows:
                self._change(one.member, {"step": one.step, "objective": finite(one.value)})

    def sink(self, member: str) -> Sink:
        """The sink to which the member's own Recorder shows its steps, evaluations and checkpoints."""
        return _MemberSink(self, member)

    def sweep(self, epoch: int) -> None:
        """Records that the attempt `epoch` begins: its members, and the objective that compares them."""
        members = [{"name": one.name, "num_steps": one.num_steps} for one in self.members]
        objective = self._objective.model_dump(mode="json", by_alias=True)
        self._write("sweep", {"epoch": epoch, "isa": native.isa(), "members": members, "objective": objective})

    def member_started(self, member: str, step: int, device: int = 0) -> None:
        """Records that the member's turn begins after `step`, on this device of the sweep."""
        self._enter(member, MemberState.RUNNING, step, device=device)

    def member_parked(self, member: str, step: int) -> None:
        """Records that the member's turn ended: it waits for the next one, or at a round for the other members."""
        self._enter(member, MemberState.PARKED, step)

    def member_stopped(self, stop: Stop) -> None:
        self._enter(stop.member, MemberState.STOPPED, stop.step, stop.reason)

    def member_failed(self, member: str, step: int, reason: str) -> None:
        """Records that the member ended without ending the others. `reason`: one sentence, with its exit code's
        name."""
        self._enter(member, MemberState.FAILED, step, reason)

    def member_completed(self, member: str, step: int) -> None:
        self._enter(member, MemberState.COMPLETE, step)

    def best(self, member: str) -> None:
        """Records the best member so far, if it is another one than before."""
        if member == self._best:
            return
        self._best = member
        row = self._rows[member]
        self._write("best", {"member": member, "step": row.step, "objective": row.objective})
        self._tell()

    def member_step(self, member: str, step: StepMetrics) -> None:
        changes: dict[str, object] = {"step": step.step, "loss": finite(step.loss)}
        if self._objective.metric == "Loss":
            changes["objective"] = finite(step.loss)
        self._change(member, changes)
        for sink in self._sweep_sinks:
            sink.step(step)

    def member_evaluation(self, member: str, loss: float) -> None:
        if self._objective.metric == "EvaluationLoss":
            self._change(member, {"objective": finite(loss)})

    def member_checkpoint(self, member: str, step: int) -> None:
        for sink in self._sweep_sinks:
            sink.member_checkpoint(member, step)

    def _enter(self, member: str, state: MemberState, step: int, reason: str = "", device: int | None = None) -> None:
        row = self._rows[member]
        fields = {"member": member, "step": step, "loss": row.loss, "objective": row.objective, "reason": reason}
        self._write(_EVENTS[state], fields if device is None else {**fields, "device": device})
        short = shortened(" ".join(reason.split()), LONGEST_REASON)
        self._change(member, {"state": state, "step": step, "reason": short})

    def _change(self, member: str, changes: dict[str, object]) -> None:
        self._rows[member] = self._rows[member].model_copy(update=changes)
        self._tell()

    def _tell(self) -> None:
        for sink in self._sweep_sinks:
            sink.sweep(self.members, self._best)


_EVENTS = {
    MemberState.RUNNING: "member_started",
    MemberState.PARKED: "member_parked",
    MemberState.STOPPED: "member_stopped",
    MemberState.FAILED: "member_failed",
    MemberState.COMPLETE: "member_completed",
}


@dataclass(frozen=True, slots=True)
class _MemberSink:
    """One member's Recorder -> the sweep's."""

    recorder: SweepRecorder
    member: str

    def step(self, step: StepMetrics) -> None:
        self.recorder.member_step(self.member, step)

    def evaluation(self, loss: float) -> None:
        self.recorder.member_evaluation(self.member, loss)

    def checkpoint(self, step: int) -> None:
        self.recorder.member_checkpoint(self.member, step)


LARGEST_LOSS = 1e30
"""The largest loss that a report shows."""


def finite(value: float) -> float | None:
    return value if math.isfinite(value) and abs(value) <= LARGEST_LOSS else None
