"""Reads a run directory for `spillway top`: new lines of run.jsonl, the plan, the lock, the attempts' ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Generic, TypeVar

from spillway.api.job_file import JobFile
from spillway.errors import ExitCode
from spillway.metrics import StepMetrics
from spillway.plan import MemoryPlan, Tier

from ..record.attempt_ends import Attempt, read_ended
from ..record.directory import RunDirectory, epochs_of, is_taken
from ..record.log import Follower, RunLog, Start, StepEvent, SweepEvent
from ..record.progress import RemainingTime, format_eta
from ..record.sweep_pace import SweepPace
from ..record.sweep_view import MemberLogs, best_of, member_views, steps_made
from ..report.command import read_plan
from ..run.local_run import read_job_file
from .view import LiveRates, RunView, TierView

WINDOW_STEPS = 20
Content = TypeVar("Content")
LINKS = ("h2d", "d2h", "nvme_read", "nvme_write")


@dataclass(frozen=True, slots=True)
class Life:
    """The state of the run's processes."""

    is_taken: bool
    """Whether its lock is held, by `spillway run` or by a trainer that outlived it."""
    epoch: int
    """Number of the last attempt; 0 = none was ever started."""
    ended: Attempt | None
    """How that attempt ended; None while it trains, or if its end was not recorded."""
    has_begun: bool
    """Whether that attempt has loaded model, data and checkpoint, and trains."""


def life_of(run: RunDirectory, log: RunLog) -> Life:
    taken = is_taken(run)  # asked first, so that a run that ends meanwhile has recorded its end for the next lines
    epoch = max(epochs_of(run.attempts), default=0)
    ended = read_ended(run, epoch) if epoch else None
    begun = any(start.epoch == epoch for start in log.starts)
    if ended is None and begun and log.ends and log.ends[-1].time >= log.starts[-1].time:
        last = log.ends[-1]  # only the trainer recorded it: its `spillway run` had died
        ended = Attempt(epoch, last.exit_code, last.reason, last.message)
    return Life(taken, epoch, ended, begun)


def state_of(life: Life, last_step: int) -> tuple[str, str]:
    """The state in one word, and a sentence if that is not enough."""
    return state_under_way(life) if life.is_taken else state_at_rest(life, last_step)


def state_under_way(life: Life) -> tuple[str, str]:
    if not life.epoch:
        return "Starting", "the first attempt is being prepared"
    if life.ended is not None:
        return "Restarting", f"attempt {life.epoch} ended: {life.ended.reason}: {life.ended.message.rstrip('.')}"
    return ("Running", "") if life.has_begun else ("Starting", f"attempt {life.epoch} has not trained yet")


def state_at_rest(life: Life, last_step: int) -> tuple[str, str]:
    ended, same = life.ended, "run the same `spillway run` to resume from the last checkpoint"
    if not life.epoch:
        return "NotStarted", "no attempt was ever started here: start one with `spillway run JOB --output DIR`"
    if ended is None:
        where = f"after step {last_step}" if last_step else "before its first step"
        return "Killed", f"attempt {life.epoch} was killed {where}, as was its `spillway run`; {same}, if there is one"
    message = ended.message.rstrip(".")
    if ended.exit_code == ExitCode.COMPLETED:
        return "Complete", ""
    if ended.exit_code == ExitCode.PREEMPTED:
        return "Stopped", f"{message or 'stopped on request'}; {same}"
    log = f"log: attempts/attempt-{life.epoch}/trainer.log"
    return "Failed", f"attempt {life.epoch} ended: {ended.reason}: {message}; {log}"


def rates_of(steps: Collection[StepMetrics]) -> LiveRates | None:
    """Mean rates of some steps; None without steps."""
    seconds = sum(step.step_seconds for step in steps)
    if not seconds:
        return None
    count = len(steps)
    phases: dict[str, float] = {}
    for step in steps:
        for phase, value in step.phase_seconds.items():
            phases[phase] = phases.get(phase, 0.0) + value / count
    phases["other"] = max(0.0, seconds / count - sum(phases.values()))
    links = {link: sum(step.moved_bytes.get(link, 0) for step in steps) / seconds for link in LINKS}
    return LiveRates(mean_of(count), {link: rate for link, rate in links.items() if rate}, phases)


def mean_of(num_steps: int) -> str:
    return "the last step" if num_steps == 1 else f"a step (mean of the last {num_steps})"


def tiers_of(plan: MemoryPlan | None, last: StepMetrics | None, peaks: Mapping[str, int]) -> tuple[TierView, ...]:
    return tuple(
        TierView(
            tier,
            plan.bytes[tier].total if plan is not None and tier in plan.bytes else None,
            plan.budget.get(tier) or None if plan is not None else None,
            peaks.get(tier.value),
            None if last is None else last.tier_bytes.get(tier.value),
        )
        for tier in Tier
    )


class Unchanged(Generic[Content]):
    """A cached small file that is written atomically: read again only after it was replaced."""

    def __init__(self, reader: Callable[[Path], Content]) -> None:
        self._reader = reader
        self._known: tuple[int, int] | None = None
        self._content: Content | None = None

    def read(self, path: Path) -> Content | None:
        """The content; None if the file is missing."""
        try:
            status = path.stat()
        except FileNotFoundError:
            self._known, self._content = None, None
            return None
        if (status.st_ino, status.st_mtime_ns) != self._known:
            self._content = self._reader(path)
            self._known = status.st_ino, status.st_mtime_ns
        return self._content


@dataclass(slots=True)
class RunSource:
    """Reads one run directory repeatedly; each look reads what was appended since the last."""

    run: RunDirectory
    _follower: Follower = field(init=False)
    _members: MemberLogs = field(init=False)
    _remaining: RemainingTime = field(init=False)
    _eta_seconds: float | None = field(init=False)
    _pace: SweepPace = field(init=False)
    """The pace of a sweep."""
    _recent: deque[StepMetrics] = field(init=False)
    """The latest steps of the newest attempt."""
    _last: StepMetrics | None = field(init=False)
    _peaks: dict[str, int] = field(init=False)
    _steps: int = 0
    _job: Unchanged[JobFile | None] = field(default_factory=lambda: Unchanged(read_job_file))
    _plan: Unchanged[MemoryPlan] = field(default_factory=lambda: Unchanged(read_plan))

    def __post_init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._follower, self._remaining, self._eta_seconds = Follower(self.run.log), RemainingTime(self._steps), None
        self._members, self._pace = MemberLogs(self.run), SweepPace(0.0)
        self._recent, self._last, self._peaks = deque(maxlen=WINDOW_STEPS), None, {}

    def look(self) -> RunView:
        """The current state. Raises UserError when job.json or plan.json are of another version."""
        job, plan = self._job.read(self.run.job_file), self._plan.read(self.run.plan_file)
        if self._follower.was_replaced():
            self._begin()
        self._take_in()
        steps = self._steps if job is None else self._follower.log.steps_planned(job.spec.training)
        if steps != self._steps:
            self._steps = steps
            self._begin()
            self._take_in()
        log = self._follower.log
        life = life_of(self.run, log)
        if not life.is_taken:
            self._take_in()  # events between the last read and the end
        last, steps = self._last, self._steps
        step, loss = (0, None) if last is None else (last.step, last.loss)
        members = member_views(log, self._members.logs, trains=life.is_taken)
        eta_seconds = self._eta_seconds
        if log.sweep is not None:
            step, steps = steps_made(members)
            loss = loss if (best := best_of(members)) is None else best.loss
            eta_seconds = self._pace.left_seconds(members, self._members.logs, log.sweep.halving)
        state, sentence = state_of(life, step)
        ranks = f"{plan.ranks}; bytes and rates are those of rank 0" if plan is not None and plan.world_size > 1 else ""
        unknown = [] if job is not None else ["number of steps: no job.json yet"]
        unknown += [] if plan is not None else ["planned bytes: no plan.json yet"]
        return RunView(
            name=self.run.path.name if job is None else job.name,
            namespace="",
            state=state,
            attempt=life.epoch,
            step=step,
            steps=steps,
            loss=loss,
            tokens_per_second=None if last is None else last.tokens_per_second,
            eta=format_eta(eta_seconds) if state == "Running" and eta_seconds is not None else "",
            restarts=log.num_restarts,
            tiers=tiers_of(plan, last, self._peaks),
            rates=rates_of(self._recent),
            members=members,
            sentences=tuple(filter(None, (ranks, sentence))),
            unknown=tuple(unknown),
            is_over=not life.is_taken,
        )

    def _take_in(self) -> None:
        for event in chain(self._follower.new_events(), self._members.new_events(self._follower.log)):
            if isinstance(event, Start | SweepEvent):
                self._recent.clear()
                self._peaks.clear()  # the new attempt may have another plan
            if isinstance(event, Start):
                self._remaining.restart(event.time)
            elif isinstance(event, SweepEvent):
                self._pace = SweepPace(event.time)
            elif isinstance(event, StepEvent):
                self._pace.take(event)
                self._last = event.metrics
                self._recent.append(event.metrics)
                self._eta_seconds = self._remaining.after(event.metrics.step, event.time)
                if event.time >= self._pace.since:
                    for tier, peak in event.metrics.tier_peak_bytes.items():
                        self._peaks[tier] = max(peak, self._peaks.get(tier, 0))
