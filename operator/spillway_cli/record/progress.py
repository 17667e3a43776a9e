"""Shows the progress of a run: one line with step, loss, speed, bytes per tier and remaining time.

On a terminal a bar is redrawn; elsewhere a plain line is printed per logging interval, without control characters.
"""

from __future__ import annotations

import math
import os
import signal
from collections import deque
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from spillway.api.progress import MemberState
from spillway.api.sweep.halving import METRIC_WORDS
from spillway.metrics import StepMetrics
from spillway.plan import Tier
from spillway.units import counted, format_bytes, format_count, format_seconds

from .attempt_ends import Attempt, Rung
from .log import (
    Best,
    CheckpointEvent,
    EvaluationEvent,
    Event,
    MemberEvent,
    MissedCheckpoint,
    Preparing,
    RunLog,
    Start,
    StepEvent,
    SweepEvent,
    SweepStep,
)
from .summary import format_loss

LINES_PER_RUN = 20
"""Without a terminal, a run prints about this many lines."""
LONGEST_SILENCE_SECONDS = 60.0
"""Without a terminal, a run prints at least one line in this time."""
ETA_WINDOW_STEPS = 20


class RemainingTime:
    """Estimates the seconds to the last step from the latest steps, including evaluations and checkpoints."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._times: deque[float] = deque(maxlen=ETA_WINDOW_STEPS + 1)

    def restart(self, time: float) -> None:
        """Begins a new attempt, so that the time without a trainer does not count."""
        self._times.clear()
        self._times.append(time)

    def after(self, step: int, time: float) -> float | None:
        """Seconds left after `step`, which ended at Unix time `time`; None before there is an estimate."""
        self._times.append(time)
        if len(self._times) < 2:
            return None
        pace = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        return max(0.0, pace) * (self._num_steps - step)


def progress_line(step: StepEvent, num_steps: int, budget: Mapping[Tier, int], eta_seconds: float | None) -> str:
    """For example: step 120/1000  loss 2.31  1.20 k tok/s  device 102/128 MiB  host 88.0 MiB  nvme 40.0 MiB
    eta 1m02s  lr 0.001  grad norm 1.52"""
    metrics = step.metrics
    return "  ".join(
        [
            f"step {metrics.step}/{num_steps}",
            f"loss {format_loss(metrics.loss)}" + left_out(metrics),
            *pace_and_bytes(metrics, budget),
            f"eta {format_eta(eta_seconds)}",
            f"lr {metrics.learning_rate:.3g}",
            f"grad norm {format_loss(metrics.gradient_norm)}",
        ]
    )


def sweep_line(step: SweepStep, budget: Mapping[Tier, int]) -> str:
    """For example: all members: step 36/120  1.20 k tok/s  device 102/128 MiB  eta 1m02s"""
    made = f"all members: step {step.made}/{step.planned}"
    return "  ".join([made, *pace_and_bytes(step.metrics, budget), f"eta {format_eta(step.left_seconds)}"])


def pace_and_bytes(metrics: StepMetrics, budget: Mapping[Tier, int]) -> list[str]:
    held = metrics.tier_peak_bytes
    tiers = (occupancy(tier, held, budget) for tier in Tier if held.get(tier))
    return [f"{format_count(metrics.tokens_per_second)} tok/s", *tiers]


def member_line(event: MemberEvent, log: RunLog) -> str:
    """For example: member a: step 20/40, loss 5.31, paused"""
    steps = 0 if log.sweep is None else log.sweep.members.get(event.member, 0)
    words = {
        MemberState.RUNNING: "continues" if event.step else "starts",
        MemberState.PARKED: "paused",
        MemberState.COMPLETE: "complete",
    }
    said = words.get(event.state) or (
        f"FAILED, the others continue: {event.reason}" if event.state is MemberState.FAILED else event.reason
    )
    loss = "" if event.loss is None or event.state is MemberState.RUNNING else f", loss {format_loss(event.loss)}"
    return f"member {event.member}: step {event.step}{f'/{steps}' if steps else ''}{loss}, {said}"


def metric_words(log: RunLog) -> str:
    return METRIC_WORDS.get("" if log.sweep is None else log.sweep.metric, "value")


def left_out(metrics: StepMetrics) -> str:
    """Why the step's update was skipped; empty if it was not."""
    if metrics.overflowed:
        return f" (skipped: gradients overflowed at loss scale {metrics.loss_scale:g})"
    return " (skipped)" if metrics.skipped else ""


def format_eta(seconds: float | None) -> str:
    """Whole seconds: 62.3 -> "1m02s"; "?" before there is an estimate."""
    if seconds is None:
        return "?"
    return format_seconds(round(seconds)) if round(seconds) else "0 s"


def occupancy(tier: Tier, held: Mapping[str, int], budget: Mapping[Tier, int]) -> str:
    """`device 102/128 MiB`: the step's peak and, for the device only, the budget."""
    used = format_bytes(held[tier])
    if tier is not Tier.DEVICE or not budget.get(tier):
        return f"{tier} {used}"
    number, unit = used.split()
    allowed_number, allowed_unit = format_bytes(budget[tier]).split()
    return (
        f"{tier} {number}/{allowed_number} {unit}"
        if unit == allowed_unit
        else f"{tier} {used}/{allowed_number} {allowed_unit}"
    )


def logging_interval(num_steps: int) -> int:
    """Steps between two plain lines: 1, 2 or 5 times a power of ten, for about LINES_PER_RUN lines in a run."""
    wanted = max(1.0, num_steps / LINES_PER_RUN)
    power = int(10 ** math.floor(math.log10(wanted)))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= wanted)


REFERENCE_ISA = "reference"


def reference_path() -> str:
    forced = os.environ.get("SPILLWAY_FORCE_ISA") == REFERENCE_ISA
    why = "is switched off (SPILLWAY_FORCE_ISA=reference)" if forced else "was not built (no C++ compiler was found)"
    return f"the native library {why}: updates run in plain torch, with the same results, but slower"


class ProgressReporter:
    """Prints the progress of a run's attempts; use it with `with`, which restores the terminal after the bar."""

    def __init__(self, console: Console, num_steps: int, budget: Mapping[Tier, int]) -> None:
        self._console, self._num_steps, self._budget = console, num_steps, dict(budget)
        self._interval = logging_interval(num_steps)
        self._last_line_time = -math.inf
        self._said_step = 0
        """Steps of all members of a sweep at the last printed line."""
        self._remaining = RemainingTime(num_steps)
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if console.is_terminal:
            self._bar = Progress(BarColumn(24), TextColumn("{task.fields[line]}"), console=console)
            self._task = self._bar.add_task("", total=None, line="starting")

    def __enter__(self) -> ProgressReporter:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, sentence: str) -> None:
        """Prints a line, above the bar if there is one."""
        self._console.print(sentence)

    def attempt_started(self, epoch: int, pid: int) -> None:
        self.say(f"attempt {epoch} in process {pid}; log: attempts/attempt-{epoch}/trainer.log")
        if self._bar is not None:
            self._bar.update(self._task, total=None, line="starting")

    def event(self, event: Event, log: RunLog) -> None:
        match event:
            case Preparing():
                self._doing(event.doing)
            case Start():
                self._num_steps = event.steps or self._num_steps
                self._interval, self._remaining = logging_interval(self._num_steps), RemainingTime(self._num_steps)
                if self._bar is not None:
                    self._bar.update(self._task, total=self._num_steps, completed=event.resumed_from_step)
                self._doing(f"training {format_count(event.parameters)} parameters")
                self._remaining.restart(event.time)
                for problem in event.passed_over:
                    self.say(f"skipped checkpoint: {problem}")
                if event.resumed_from_step:
                    self.say(f"resumed from the checkpoint of step {event.resumed_from_step}")
                if event.isa == REFERENCE_ISA:
                    self.say(reference_path())
            case StepEvent():
                self._step(event)
            case EvaluationEvent():
                self.say(f"step {event.step}: evaluation loss {format_loss(event.loss)}")
            case CheckpointEvent():
                size, seconds = format_bytes(event.nbytes), format_seconds(event.seconds)
                stalled = f"; training stopped for {format_seconds(event.stalled_seconds)}"
                behind = stalled if event.stalled_seconds < event.seconds else ""
                self.say(f"step {event.step}: checkpoint committed ({size} in {seconds}{behind})")
            case MissedCheckpoint():
                self.say(f"step {event.step}: checkpoint NOT written, training continues: {event.problem}")
            case SweepStep():
                self._sweep_step(event)
            case SweepEvent() | MemberEvent() | Best():
                self._of_sweep(event, log)

    def _of_sweep(self, event: SweepEvent | MemberEvent | Best, log: RunLog) -> None:
        """Prints a sweep's event. The bar counts the steps of all members."""
        match event:
            case SweepEvent():
                self._num_steps, self._said_step = sum(event.members.values()), 0
                if self._bar is not None:
                    self._bar.update(self._task, total=self._num_steps, completed=0, line="")
                self.say(f"{len(event.members)} members take turns: {', '.join(event.members)}")
                if event.isa == REFERENCE_ISA:
                    self.say(reference_path())
            case MemberEvent():
                self.say(member_line(event, log))
            case Best():
                value = "" if event.objective is None else f" ({metric_words(log)} {format_loss(event.objective)})"
                self.say(f"best so far: {event.member}{value}")

    def attempt_ended(self, attempt: Attempt, restarts_left: int) -> None:
        """Says how it ended, unless the run ends with it: then the command's last sentence says so."""
        if restarts_left <= 0 and not attempt.ran_out_of_memory:
            return
        self.say(f"attempt {attempt.epoch} ended: {attempt.reason}: {attempt.message}")
        if restarts_left > 0:
            left = restarts_left - 1
            self.say(
                "restarting from the newest checkpoint, or from the start if there is none; "
                f"{counted(left, 'more restart')} allowed"
            )

    def replanned(self, rung: Rung) -> None:
        self.say(rung.sentence)

    def stopping(self, signal_number: int, pid: int) -> None:
        name = signal.Signals(signal_number).name
        self.say(
            f"{name}: stopping after the current step and a checkpoint (kill -9 {pid} stops at once, without these)"
        )

    def _doing(self, doing: str) -> None:
        """Shows what is done before the first step: next to the bar, or as a line."""
        if self._bar is not None:
            self._bar.update(self._task, line=f"{doing} ...")
        else:
            self._console.print(f"{doing} ...")

    def _step(self, step: StepEvent) -> None:
        number, time = step.metrics.step, step.time
        line = progress_line(step, self._num_steps, self._budget, self._remaining.after(number, time))
        if self._bar is not None:
            self._bar.update(self._task, completed=number, line=line)
        elif (
            number % self._interval == 0
            or number in {1, self._num_steps}
            or time - self._last_line_time >= LONGEST_SILENCE_SECONDS
        ):
            self._last_line_time = time
            self._console.print(line)

    def _sweep_step(self, step: SweepStep) -> None:
        """Prints lines as often as for a single run; one event may cover several steps."""
        line = sweep_line(step, self._budget)
        if self._bar is not None:
            self._bar.update(self._task, total=step.planned, completed=step.made, line=line)
            return
        interval = logging_interval(self._num_steps)
        is_due = step.made // interval > self._said_step // interval
        if is_due or step.time - self._last_line_time >= LONGEST_SILENCE_SECONDS:
            self._last_line_time, self._said_step = step.time, step.made
            self._console.print(line)
