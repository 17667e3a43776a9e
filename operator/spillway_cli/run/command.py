"""`spillway run JOB --output DIR`: plans the job for this machine, trains it, restarts it after crashes, reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from spillway.api.load import load_job
from spillway.api.training_job import TrainingJob
from spillway.errors import ExitCode, SpillwayError, UserError
from spillway.extras import need_for
from spillway.placement.device_choice import on_device
from spillway.plan import Infeasible, MemoryPlan, Tier
from spillway.planning.corrections import Corrections
from spillway.planning.model_shape import ModelShape
from spillway.units import counted, format_bytes, format_count, format_seconds
from spillway_trainer.cgroup import usable_cores
from spillway_trainer.fetch import fetch_all
from spillway_trainer.tiers.volumes import reject_memory

from ..console import Format, message_console, print_json, result_console, table
from ..machine.gpus import find_gpus
from ..machine.local_node import probe
from ..machine.node_profile import Profiles, own_profile
from ..record.attempt_ends import Attempt
from ..record.directory import RunDirectory, create_run_directory, exclusive
from ..record.log import RunLog, read_run_log
from ..record.member_values import values_json, values_of, values_sentence, values_table
from ..record.progress import ProgressReporter
from ..record.summary import RunSummary, format_loss, summarize
from ..record.sweep_view import MemberView, best_of, joined, members_json, members_table, steps_made
from ..report.command import read_record, write_report
from ..report.page import RunRecord
from . import local_run
from .ladder import LocalLadder, earlier_failures, first_plan, trained_with
from .local_run import LocalJob
from .model_inspection import inspected_shape
from .plan import BudgetOverrides, decided_for_this_machine, local_devices, with_budget


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The command line of `spillway run`."""

    job: Path
    output: Path
    claims: Sequence[str]
    budget: BudgetOverrides
    spill: Sequence[Path]
    """Directories of the NVMe tier; empty = `output`."""
    metrics_port: int | None
    max_restarts: int | None
    """None = lifecycle.maxRestarts."""
    format: Format
    num_ranks: int = 1
    node: Path | None = None
    """Profile of this machine; None = the one that `spillway calibrate` wrote."""


def run(options: RunOptions) -> int:
    """Trains; returns the exit code of the last attempt. Rejects wrong input before writing anything."""
    source = str(options.job)
    job = with_budget(load_job(options.job), options.budget)
    claims = local_run.parse_claims(options.claims)
    local_run.reject_wrong_fields(job, claims, source)
    first, *_ = local_devices(job.spec, find_gpus(), options.num_ranks, trained_with(RunDirectory(options.output)))
    need_for(on_device(job, first[0]).spec, options.num_ranks)
    local_run.reject_taken_port(options.metrics_port)
    console = message_console()
    unused = local_run.unused_fields(job.spec, options.num_ranks)
    if unused:
        console.print(f"not used locally: {', '.join(unused)}")
    fetch_all(job.spec, claims, console.print)
    shape = inspected_shape(options.job, job, claims)
    own = partial(own_profile, usable_cores(Path("/")), given=options.node)
    own(first[0])  # rejects an unusable profile before anything is written
    is_new = not options.output.exists()
    directory = create_run_directory(options.output)
    try:
        return run_in(directory, options, job, claims, shape, own)
    except SpillwayError:
        if is_new:
            with suppress(OSError):  # keep a directory that is not empty
                directory.path.rmdir()
        raise


def run_in(
    directory: RunDirectory,
    options: RunOptions,
    job: TrainingJob,
    claims: Mapping[str, Path],
    shape: ModelShape | None,
    own: Profiles,
) -> int:
    console = message_console()
    spill = spill_directories(options.spill) or (directory.path,)
    local = LocalJob(job, claims, directory.corpus, spill, options.metrics_port, options.num_ranks)
    with exclusive(directory) as lock:
        earlier = local_run.read_job_file(directory.job_file)
        for changed in local_run.reject_another_run(directory, job, earlier):
            console.print(f"changed for the remaining steps: {changed}")
        if not job.spec.members:
            local_run.reject_lost_checkpoints(directory)
        if local_run.is_complete(directory, job):
            log = read_run_log(directory.log)
            steps, end = log.steps_planned(job.spec.training), log.ends[-1]
            trained = f"trained to step {steps}" if end.step == steps else end.message
            done = "every member has ended" if job.spec.members else trained
            console.print(f"{directory.path}: already complete, {done}")
            return finish(directory, job, [], options.format)
        resources = probe(spill[0], further=spill[1:])
        num_ranks, before = options.num_ranks, trained_with(directory)

        def planned(asked: TrainingJob, corrections: Corrections) -> MemoryPlan | Infeasible:
            return decided_for_this_machine(asked, resources, num_ranks, shape, own, corrections, before)

        failures = earlier_failures(directory, job, num_ranks)
        plan = first_plan(job, num_ranks, failures, planned)
        say_plan(console, plan)
        if any((values := values_of(job.spec.members)).values()):
            console.print(values_table(values))
        console.print(own(plan.device).sentence)

        def reject(taken: MemoryPlan) -> None:
            if not options.spill:
                local_run.reject_spill_in_memory(directory.path, taken, "name one on a disk, or give --spill a disk's")

        reject(plan)
        files = local_run.local_files(directory, local, plan, resources.cores, earlier)
        max_restarts = job.spec.lifecycle.max_restarts if options.max_restarts is None else options.max_restarts
        with ProgressReporter(console, job.spec.training.num_steps, plan.budget) as progress:
            ladder = LocalLadder(files, planned, reject, list(failures))
            attempts = local_run.train(ladder, progress, lock, max_restarts)
        return finish(directory, job, attempts, options.format)


def spill_directories(given: Sequence[Path]) -> tuple[Path, ...]:
    """The --spill directories. Raises UserError for one that is missing, in memory, repeated or not writable."""
    for directory in given:
        reject_missing(directory)
    found = tuple(create_run_directory(each, "--spill").path for each in given)
    for directory in found:
        if found.count(directory) > 1:
            raise UserError(f"--spill {directory}: given twice; name each volume's directory once")
        reject_memory(directory, f"--spill {directory}")
    return found


def reject_missing(directory: Path) -> None:
    """Rejects a missing directory: creating it after a typo could spill to the wrong disk."""
    try:
        directory.stat()
    except FileNotFoundError as error:
        raise UserError(
            f"--spill {directory}: no such directory; correct it, or create it on the right disk (mkdir -p)"
        ) from error
    except OSError:
        return  # reported when it is first written to


def say_plan(console: Console, plan: MemoryPlan) -> None:
    """Prints planned bytes, the reasons and the predicted step time."""
    num, what = (plan.member_devices, "devices") if plan.members else (plan.world_size, "ranks")
    each = f", bytes of each of {num} {what}" if num > 1 else ""
    shown = table("tier", "planned", "budget", title=f"plan for {plan.job}, memory mode {plan.mode}{each}")
    for tier in Tier:
        if tier in plan.bytes:
            budget = plan.budget.get(tier)
            shown.add_row(tier.value, format_bytes(plan.bytes[tier].total), "-" if not budget else format_bytes(budget))
    console.print(shown)
    for reason in plan.reasons:
        console.print(f"  {reason}")
    mark = "" if plan.prediction.calibrated else " (uncalibrated: run `spillway calibrate`)"
    here = "GPU" if plan.device == "Cuda" else "CPU"
    console.print(f"predicted {plan.prediction.step} a step on this {here}{mark}, bound by {plan.prediction.bound_by}")


def finish(directory: RunDirectory, job: TrainingJob, attempts: Sequence[Attempt], output: Format) -> int:
    """Writes the report, prints the summary, returns the exit code. No attempt means that the run was complete."""
    exit_code = attempts[-1].exit_code if attempts else ExitCode.COMPLETED
    record = read_record(directory)
    members, logs = record.members, record.member_logs
    summary = of_the_best(summarize(joined(record.log, logs), record.plan, record.measured), members, logs)
    report = report_if_possible(record, directory.report)
    planned = steps_made(members)[1] if members else record.log.steps_planned(job.spec.training)
    if output is Format.JSON:
        print_json(
            {
                **as_json(directory, job, attempts, summary, report, planned),
                **sweep_json(members),
                **values_json(record.values),
            }
        )
    else:
        if members:
            result_console().print(members_table(members))
        if (best := best_of(members)) is not None and (own := values_sentence(record.values, best.name)):
            result_console().print(f"best: {best.name}, {own}", markup=False)
        result_console().print(summary_table(job, summary, planned))
        if report is not None:
            result_console().print(f"report: {report}")
    if attempts and exit_code == ExitCode.COMPLETED and job.spec.training.early_stopping:
        message_console().print(attempts[-1].message)
    if attempts and exit_code != ExitCode.COMPLETED:
        message_console().print(closing_sentence(attempts[-1], summary.num_steps, directory))
    return exit_code


def of_the_best(summary: RunSummary, members: Sequence[MemberView], logs: Mapping[str, RunLog]) -> RunSummary:
    """A sweep's summary with the losses of its best member; any other summary unchanged."""
    if not members:
        return summary
    best = best_of(members)
    curve = [] if best is None else logs[best.name].curve
    return replace(
        summary,
        first_loss=curve[0].metrics.loss if curve else None,
        final_loss=curve[-1].metrics.loss if curve else None,
        evaluation_loss=None if best is None else best.evaluation_loss,
        lowest_evaluation=None,
    )


def sweep_json(members: Sequence[MemberView]) -> dict[str, object]:
    return {"stepsPlanned": steps_made(members)[1], **members_json(members)} if members else {}


def report_if_possible(record: RunRecord, path: Path) -> Path | None:
    """Writes the report. A failure is printed, but must not hide how the run ended."""
    try:
        return write_report(record, path)
    except UserError as error:
        message_console().print(str(error))
        return None


def closing_sentence(last: Attempt, num_steps: int, directory: RunDirectory) -> str:
    """Why the run ended, and what to do."""
    log = directory.attempt(last.epoch) / "trainer.log"
    message = last.message.rstrip(".")
    if last.exit_code == ExitCode.PREEMPTED and not num_steps:
        return "stopped before the first step; run the same command to start again"
    if last.exit_code == ExitCode.PREEMPTED:
        return f"stopped after step {num_steps}; run the same command to resume from the last checkpoint"
    if last.worth_restarting:
        return f"giving up: {last.reason}: {message}. Log: {log}; run the same command to try again."
    return f"ended: {last.reason}: {message}. Log: {log}."


def summary_table(job: TrainingJob, summary: RunSummary, steps_planned: int) -> object:
    """The summary as a table. `steps_planned`: of all members of a sweep together; 0: unknown."""
    shown = table("", job.metadata.name)
    shown.add_row("steps", f"{summary.num_steps} of {steps_planned or 'an unknown number'}")
    if summary.world_size > 1:
        shown.add_row("ranks", f"{summary.ranks}; peaks are those of rank 0")
    if summary.num_steps == 0:
        return shown  # without a step there are no other figures
    shown.add_row("loss, first -> final", f"{format_loss(summary.first_loss)} -> {format_loss(summary.final_loss)}")
    if summary.evaluation_loss is not None:
        shown.add_row("evaluation loss", format_loss(summary.evaluation_loss) + lowest(summary))
    shown.add_row("speed", f"{format_count(summary.tokens_per_second)} tok/s")
    predicted = summary.prediction.step + ("" if summary.prediction.calibrated else ", uncalibrated")
    shown.add_row("step", f"{format_seconds(summary.step_seconds)} (predicted {predicted})")
    for use in summary.tiers:
        if use.planned_bytes or use.peak_bytes:
            budget = f", budget {format_bytes(use.budget_bytes)}" if use.budget_bytes else ""
            planned = f"planned {format_bytes(use.planned_bytes)}{budget}"
            uncounted = f" without {use.uncounted}" if use.uncounted else ""
            shown.add_row(f"{use.tier} peak", f"{format_bytes(use.peak_bytes)}{uncounted} ({planned})")
    if summary.num_allocator_retries:
        shown.add_row("allocator retries", f"{summary.num_allocator_retries}: the device was short of memory")
    resumed = f" after failures; resumed {counted(summary.num_resumes, 'time')} by `spillway run`"
    shown.add_row("restarts", f"{summary.num_restarts}{resumed if summary.num_resumes else ''}")
    if summary.num_skipped:
        shown.add_row("skipped steps", left_out(summary))
    shown.add_row("time", time_of(summary))
    return shown


def lowest(summary: RunSummary) -> str:
    """For example: , 2.31 at step 300; empty if the last evaluation was the lowest."""
    step, loss = summary.lowest_evaluation or (0, summary.evaluation_loss)
    return "" if loss == summary.evaluation_loss else f", lowest {format_loss(loss)} at step {step}"


def left_out(summary: RunSummary) -> str:
    """For example: 3: loss or gradients not finite (2 overflowed float16 at their loss scale)."""
    overflowed = f" ({summary.num_overflowed} overflowed float16 at their loss scale)" if summary.num_overflowed else ""
    return f"{summary.num_skipped}: loss or gradients not finite{overflowed}"


def time_of(summary: RunSummary) -> str:
    """Seconds of all attempts, including earlier invocations; and, if there were several, from first to last."""
    seconds = format_seconds(summary.attempt_seconds)
    if summary.num_attempts < 2:
        return seconds
    return (
        f"{seconds} in {summary.num_attempts} attempts, {format_seconds(summary.training_seconds)} from first to last"
    )


def as_json(
    directory: RunDirectory,
    job: TrainingJob,
    attempts: Sequence[Attempt],
    summary: RunSummary,
    report: Path | None,
    steps_planned: int,
) -> dict[str, object]:
    """The document of `-o json` (docs/cli.md)."""
    last = attempts[-1] if attempts else None
    return {
        "job": job.metadata.name,
        "output": str(directory.path),
        "exitCode": int(last.exit_code) if last else 0,
        "reason": last.reason if last else ExitCode.COMPLETED.reason,
        "message": last.message if last else "already complete",
        "stepsPlanned": steps_planned or None,
        **summary.as_json(),
        "attempts": [
            {"epoch": one.epoch, "exitCode": int(one.exit_code), "reason": one.reason, "message": one.message}
            for one in attempts
        ],
        "report": None if report is None else str(report),
    }
