"""`spillway report RUN`: writes the report of a run directory, also while the run goes on or after it was killed."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

from pydantic import ValidationError

from spillway.errors import UserError
from spillway.plan import MemoryPlan

from .console import Format, print_json, result_console
from .local_attempts import read_ended
from .plan_reality import as_json, compared
from .report import RunRecord, render_report
from .run_directory import RunDirectory, epochs_of, existing_run, write_atomic
from .run_log import read_run_log


def report(run_path: Path, file: Path | None, output: Format) -> int:
    """Write RUN/report.html, or `file`."""
    run = existing_run(run_path)
    written = write_report(run, file or run.report)
    if output is Format.JSON:
        plan, log = read_plan(run.plan_file), read_run_log(run.log)
        print_json({"report": str(written), "planAgainstReality": as_json(compared(log, plan), str(run.path))})
    else:
        result_console().print(f"report written to {written}")
    return 0


def write_report(run: RunDirectory, path: Path) -> Path:
    page = render_report(read_record(run))
    try:
        write_atomic(path, page)
    except OSError as error:
        raise UserError(f"{path}: cannot write the report ({error.strerror}); name another --output") from error
    return path


def read_record(run: RunDirectory) -> RunRecord:
    plan = read_plan(run.plan_file)
    ended = {epoch: read_ended(run, epoch) for epoch in epochs_of(run.attempts)}
    return RunRecord(
        title=plan.job,
        directory=str(run.path),
        version=version("spillway"),
        plan=plan,
        log=read_run_log(run.log),
        ended={epoch: attempt for epoch, attempt in ended.items() if attempt is not None},
    )


def read_plan(path: Path) -> MemoryPlan:
    """Raises UserError when plan.json is missing or is not of this version."""
    try:
        return MemoryPlan.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise UserError(f"{path}: not found; name the --output of a `spillway run`") from error
    except (ValidationError, ValueError) as error:
        raise UserError(f"{path}: damaged, or not written by this version of spillway") from error
