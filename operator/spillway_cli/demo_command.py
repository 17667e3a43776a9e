"""`spillway demo`: trains a small model with half of its memory, kills it, and checks that nothing was lost.

run `budget`   the packaged job within its budgets; killed with SIGKILL after a checkpoint; resumes automatically
run `plain`    the same job with memory.mode Disabled
claims         equal losses, bit-identical final state, budget kept, all tiers used; each is checked
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from rich.console import Console

from spillway.api.load import parse_job
from spillway.api.memory import Memory
from spillway.api.training_job import TrainingJob
from spillway.errors import ExitCode, UserError
from spillway.extras import need_for
from spillway.plan import Infeasible, MemoryPlan, Tier
from spillway.planning.corrections import Corrections
from spillway.units import format_bytes, format_seconds

from .console import Format, message_console, print_json, result_console, table
from .machine.local_node import probe
from .record.attempt_ends import Attempt
from .record.directory import RunDirectory, create_run_directory, exclusive
from .record.log import CheckpointEvent, Event, RunLog, StepEvent, read_run_log
from .record.progress import ProgressReporter
from .record.summary import RunSummary, summarize
from .report.command import read_record, write_report
from .run import local_run
from .run.command import say_plan
from .run.ladder import LocalLadder
from .run.local_run import LocalJob
from .run.plan import decided_for_this_machine, plan_for_this_machine

MARKER = ".spillway-demo"
"""Marks a demo's directory, which the next demo may empty."""
STEPS_AFTER_CHECKPOINT = 5
"""Steps that the kill destroys: those after the checkpoint that the run resumes from."""
MOST_THREADS = 4
"""More threads would slow down a model this small."""
CLEARLY_BELOW = 0.85
"""The final loss must be below this share of the first."""


@dataclass(frozen=True, slots=True)
class Promise:
    """A claim of the demo, and what was measured."""

    text: str
    holds: bool
    seen: str


@dataclass(frozen=True, slots=True)
class DemoRun:
    """One of the two runs, after its end."""

    directory: RunDirectory
    plan: MemoryPlan
    attempts: Sequence[Attempt]
    log: RunLog
    summary: RunSummary
    wall_seconds: float


class KillOnce(ProgressReporter):
    """Reports progress, and kills the first trainer some steps after its first checkpoint."""

    _pid = 0
    _kill_at_step: int | None = None
    _killed = False

    def attempt_started(self, epoch: int, pid: int) -> None:
        super().attempt_started(epoch, pid)
        self._pid = pid

    def event(self, event: Event, log: RunLog) -> None:
        super().event(event, log)
        if isinstance(event, CheckpointEvent) and self._kill_at_step is None:
            self._kill_at_step = event.step + STEPS_AFTER_CHECKPOINT
        if isinstance(event, StepEvent) and event.metrics.step == self._kill_at_step and not self._killed:
            self._killed = True
            self.say(f"step {event.metrics.step}: kill -9 {self._pid}")
            os.kill(self._pid, signal.SIGKILL)


def demo(path: Path, keep: bool, output: Format) -> int:
    """Runs both trainings and checks the claims; returns 0 when all hold."""
    started, console = time.monotonic(), message_console()
    job = demo_job()
    need_for(job.spec, num_ranks=1)
    directory = create_demo_directory(path)
    console.print(f"1 of 2: {job.metadata.name} within its budgets, in {directory}")
    budget_run = train(job, directory / "budget", directory / "corpus", console, kill=True)
    console.print("2 of 2: the same job with memory.mode Disabled")
    plain_run = train(without_techniques(job), directory / "plain", directory / "corpus", console, kill=False)
    claims = check(budget_run, plain_run)
    seconds = time.monotonic() - started
    if not keep:
        remove_bulk(directory)
    if output is Format.JSON:
        print_json(as_json(budget_run, plain_run, claims, seconds))
    else:
        say_verdict(result_console(), budget_run, plain_run, claims, seconds)
    return ExitCode.COMPLETED if all(claim.holds for claim in claims) else 1


def demo_job() -> TrainingJob:
    return parse_job(files("spillway_cli").joinpath("demo.yaml").read_text(encoding="utf-8"), "demo.yaml")


def without_techniques(job: TrainingJob) -> TrainingJob:
    """The same training with everything on the device."""
    memory = Memory.model_validate({"mode": "Disabled", "budget": {"host": job.spec.memory.budget.host}})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"memory": memory})})


def create_demo_directory(path: Path) -> Path:
    """Creates the directory, or empties an earlier demo's. Raises UserError when it holds anything else."""
    if path.is_dir() and any(path.iterdir()):
        if not (path / MARKER).is_file():
            raise UserError(f"--output {path}: not empty, and not from an earlier demo; name another directory")
        shutil.rmtree(path)
    directory = create_run_directory(path).path
    (directory / MARKER).touch()
    return directory


def train(job: TrainingJob, path: Path, corpus: Path, console: Console, kill: bool) -> DemoRun:
    """Trains one run. Raises UserError when it ends before its last step."""
    started = time.monotonic()
    directory = create_run_directory(path)
    resources = probe(path)
    plan = plan_for_this_machine(job, resources)
    say_plan(console, plan)

    def planned(asked: TrainingJob, corrections: Corrections) -> MemoryPlan | Infeasible:
        return decided_for_this_machine(asked, resources, corrections=corrections)

    def reject(taken: MemoryPlan) -> None:
        local_run.reject_spill_in_memory(directory.path, taken, "name one on a disk")

    reject(plan)
    local = LocalJob(job, {}, corpus, (directory.path,))
    files = local_run.local_files(directory, local, plan, min(resources.cores, MOST_THREADS), earlier=None)
    reporter = KillOnce if kill else ProgressReporter
    with exclusive(directory) as lock, reporter(console, job.spec.training.num_steps, plan.budget) as progress:
        attempts = local_run.train(LocalLadder(files, planned, reject), progress, lock, max_restarts=1)
    last = attempts[-1]
    if last.exit_code != ExitCode.COMPLETED:
        log = directory.attempt(last.epoch) / "trainer.log"
        raise DemoEnded(last, f"the demo's run in {path} ended early: {last.reason}: {last.message} (log: {log})")
    write_report(read_record(directory), directory.report)
    log_of_run = read_run_log(directory.log)
    wall_seconds = time.monotonic() - started
    return DemoRun(directory, plan, attempts, log_of_run, summarize(log_of_run, plan, log_of_run.curve), wall_seconds)


class DemoEnded(UserError):
    """A run of the demo ended before its last step; the exit code is its trainer's."""

    def __init__(self, last: Attempt, message: str) -> None:
        super().__init__(message)
        if last.exit_code in {*ExitCode}:
            self.exit_code = ExitCode(last.exit_code)


def check(budget_run: DemoRun, plain_run: DemoRun) -> list[Promise]:
    """All claims of the demo, checked."""
    return [
        *memory_claims(budget_run, plain_run),
        resume_claim(budget_run),
        loss_claim(budget_run),
        *equality_claims(budget_run, plain_run),
    ]


def memory_claims(budget_run: DemoRun, plain_run: DemoRun) -> list[Promise]:
    peaks = {use.tier: use.peak_bytes for use in budget_run.summary.tiers}
    plain_bytes = next(use.peak_bytes for use in plain_run.summary.tiers if use.tier is Tier.DEVICE)
    budget_bytes = budget_run.plan.budget[Tier.DEVICE]
    used = ", ".join(f"{tier} {format_bytes(peaks.get(tier, 0))}" for tier in Tier)
    of_plain = f"{format_bytes(budget_bytes)} of {format_bytes(plain_bytes)}, which does not count saved activations"
    return [
        Promise(
            "device budget below half of the device peak with mode Disabled", 2 * budget_bytes < plain_bytes, of_plain
        ),
        Promise(
            "device bytes never above the budget",
            peaks[Tier.DEVICE] <= budget_bytes,
            f"peak {format_bytes(peaks[Tier.DEVICE])}",
        ),
        Promise("bytes in all three tiers", all(peaks.get(tier, 0) > 0 for tier in Tier), used),
    ]


def resume_claim(run: DemoRun) -> Promise:
    resumed = [start.resumed_from_step for start in run.log.starts if start.resumed_from_step > 0]
    codes = [attempt.exit_code for attempt in run.attempts]
    lost = run.log.last_step_of_epoch.get(1, 0)
    seen = f"killed after step {lost}, resumed from step {resumed[0]}" if resumed else f"exit codes {codes}"
    return Promise(
        "killed with SIGKILL, resumed automatically", bool(resumed) and codes == [128 + signal.SIGKILL, 0], seen
    )


def loss_claim(run: DemoRun) -> Promise:
    first, final = run.log.curve[0].metrics.loss, run.log.curve[-1].metrics.loss
    return Promise("final loss clearly below the first", final < CLEARLY_BELOW * first, f"{first:.4f} -> {final:.4f}")


def equality_claims(budget_run: DemoRun, plain_run: DemoRun) -> list[Promise]:
    """Claims that both runs are equal. Losses are compared exactly, because run.jsonl keeps every bit."""
    ours, theirs = losses(budget_run.log), losses(plain_run.log)
    differing = [step for step in sorted({*ours, *theirs}) if ours.get(step) != theirs.get(step)]
    equal_losses = f"{len(ours)} steps" if not differing else f"first difference at step {differing[0]}"
    state, plain_state = final_state(budget_run.directory), final_state(plain_run.directory)
    size = format_bytes(sum(nbytes for _, nbytes, _ in state))
    return [
        Promise(
            "every step's loss bit-identical to the run with mode Disabled", bool(ours) and not differing, equal_losses
        ),
        Promise(
            "final weights and optimizer states bit-identical to those of that run",
            bool(state) and state == plain_state,
            size,
        ),
    ]


def losses(log: RunLog) -> dict[int, float]:
    return {number: step.metrics.loss for number, step in log.steps.items()}


def final_state(directory: RunDirectory) -> list[tuple[str, int, str]]:
    """(name, bytes, xxh3) of the last checkpoint's tensor files, which do not depend on the plan."""
    from spillway_trainer.checkpoints.directory import choose_resume  # noqa: PLC0415 - needs the extra [trainer]

    checkpoint = choose_resume(directory.checkpoints).checkpoint
    entries = checkpoint.manifest.files if checkpoint else ()
    return [(entry.name, entry.nbytes, entry.xxh3_128) for entry in entries]


def remove_bulk(directory: Path) -> None:
    """Deletes corpus and checkpoints; keeps logs, plans and reports."""
    for bulk in (directory / "corpus", directory / "budget" / "checkpoints", directory / "plain" / "checkpoints"):
        shutil.rmtree(bulk, ignore_errors=True)


def say_verdict(
    console: Console, budget_run: DemoRun, plain_run: DemoRun, claims: Sequence[Promise], seconds: float
) -> None:
    shown = table("", "within budgets", "plain")
    for tier in Tier:
        shown.add_row(f"{tier} budget", *(tier_budget(run, tier) for run in (budget_run, plain_run)))
        shown.add_row(f"{tier} peak", *(tier_peak(run, tier) for run in (budget_run, plain_run)))
    ours, theirs = budget_run.summary, plain_run.summary
    shown.add_row("first loss", f"{ours.first_loss:.6f}", f"{theirs.first_loss:.6f}")
    shown.add_row("final loss", f"{ours.final_loss:.6f}", f"{theirs.final_loss:.6f}")
    shown.add_row("step time", format_seconds(ours.step_seconds), format_seconds(theirs.step_seconds))
    shown.add_row("whole run", format_seconds(budget_run.wall_seconds), format_seconds(plain_run.wall_seconds))
    console.print(shown)
    console.print()
    for claim in claims:
        console.print(f"{'yes' if claim.holds else 'NO '}  {claim.text}: {claim.seen}")
    console.print(f"\n{seconds:.0f} s in total. Reports: {budget_run.directory.report} {plain_run.directory.report}")


def tier_budget(run: DemoRun, tier: Tier) -> str:
    return format_bytes(run.plan.budget[tier]) if run.plan.mode == "Auto" and run.plan.budget.get(tier) else "-"


def tier_peak(run: DemoRun, tier: Tier) -> str:
    return format_bytes(next((use.peak_bytes for use in run.summary.tiers if use.tier is tier), 0))


def as_json(budget_run: DemoRun, plain_run: DemoRun, claims: Sequence[Promise], seconds: float) -> dict[str, object]:
    return {
        "holds": all(claim.holds for claim in claims),
        "claims": [{"claim": claim.text, "holds": claim.holds, "seen": claim.seen} for claim in claims],
        "budget": {"output": str(budget_run.directory.path), **budget_run.summary.as_json()},
        "plain": {"output": str(plain_run.directory.path), **plain_run.summary.as_json()},
        "seconds": seconds,
    }
