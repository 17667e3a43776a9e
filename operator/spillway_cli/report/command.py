"""`spillway report RUN`: writes the report of a run directory, also while the run is active or after it was killed."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from spillway import __version__
from spillway.api.job_file import JobFile
from spillway.errors import UserError
from spillway.plan import MemoryPlan

from ..console import Format, print_json, result_console
from ..record.attempt_ends import plan_of_attempt, read_ended
from ..record.directory import RunDirectory, epochs_of, existing_run, is_taken, write_atomic
from ..record.log import RunLog, StepEvent, read_run_log
from ..record.member_values import NO_VALUES, Values, values_json, values_of
from ..record.plan_reality import as_json, compared
from ..record.sweep_view import joined, members_json, read_member_logs
from .page import RunRecord, render_report


def report(run_path: Path, file: Path | None, output: Format) -> int:
    """Writes RUN/report.html, or `file`."""
    run = existing_run(run_path)
    record = read_record(run, is_taken(run))
    written = write_report(record, file or run.report)
    if output is Format.JSON:
        rows = as_json(compared(record.measured, record.plan), str(run.path))
        print_json(
            {
                "report": str(written),
                "planAgainstReality": rows,
                **members_json(record.members),
                **values_json(record.values),
            }
        )
    else:
        result_console().print(f"report written to {written}")
    return 0


def write_report(record: RunRecord, path: Path) -> Path:
    """Writes the report. Raises UserError when `path` cannot be written."""
    write_page(path, render_report(record))
    return path


def write_page(path: Path, text: str) -> None:
    """Raises UserError when `path` cannot be written."""
    try:
        write_atomic(path, text)
    except OSError as error:
        raise UserError(f"{path}: cannot write the report ({error.strerror}); name another --output") from error


def read_record(run: RunDirectory, trains: bool = False) -> RunRecord:
    """Reads the run directory. `trains`: a run is active in it. Raises UserError without a plan.json of this
    version."""
    ended = {epoch: read_ended(run, epoch) for epoch in epochs_of(run.attempts)}
    log = read_run_log(run.log)
    logs = read_member_logs(run, log)
    plan, measured = measured_under(run, joined(log, logs))
    return RunRecord(
        title=plan.job,
        directory=str(run.path),
        version=__version__,
        plan=plan,
        log=log,
        measured=measured,
        ended={epoch: attempt for epoch, attempt in ended.items() if attempt is not None},
        member_logs=logs,
        values={} if log.sweep is None else read_values(run.job_file),
        trains=trains,
    )


def read_values(job_file: Path) -> Values:
    """The members' own values; empty if job.json is missing or of another version."""
    try:
        return values_of(JobFile.model_validate_json(job_file.read_text(encoding="utf-8")).spec.members)
    except (OSError, ValueError):
        return NO_VALUES


def measured_under(run: RunDirectory, log: RunLog) -> tuple[MemoryPlan, list[StepEvent]]:
    """The plan of the newest attempt that made steps, and all steps of `log` made under an equal plan: steps under
    another plan say nothing about this one."""
    steps, newest = log.curve, read_plan(run.plan_file)
    plans = {epoch: plan_of_attempt(run, epoch) or newest for epoch in {step.epoch for step in steps}}
    plan = plans[max(plans)] if plans else newest
    return plan, [step for step in steps if plans[step.epoch] == plan]


def read_plan(path: Path) -> MemoryPlan:
    """The plan in a plan.json. Raises UserError if it is missing or not of this version."""
    try:
        return MemoryPlan.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise UserError(f"{path}: not found; name the --output of a `spillway run`") from error
    except (ValidationError, ValueError) as error:
        raise UserError(
            f"{path}: damaged, or written by another version of spillway; use that version, or run the job again"
        ) from error
