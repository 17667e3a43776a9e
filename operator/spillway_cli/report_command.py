"""`spillway report RUN`: writes the report of a run directory, also while the run goes on or after it was killed."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from spillway import __version__
from spillway.errors import UserError
from spillway.plan import MemoryPlan

from .console import Format, print_json, result_console
from .local_attempts import read_ended
from .plan_reality import as_json, compared
from .report import RunRecord, render_report
from .run_directory import RunDirectory, epochs_of, existing_run, is_taken, write_atomic
from .run_log import read_run_log
from .sweep_view import joined, member_views, members_json, read_member_logs


def report(run_path: Path, file: Path | None, output: Format) -> int:
    """Write RUN/report.html, or `file`."""
    run = existing_run(run_path)
    trains = is_taken(run)
    written = write_report(run, file or run.report, trains)
    if output is Format.JSON:
        plan, log = read_plan(run.plan_file), read_run_log(run.log)
        logs = read_member_logs(run, log)
        compared_rows = as_json(compared(joined(log, logs), plan), str(run.path))
        of_sweep = members_json(member_views(log, logs, trains))
        print_json({"report": str(written), "planAgainstReality": compared_rows, **of_sweep})
    else:
        result_console().print(f"report written to {written}")
    return 0


def write_report(run: RunDirectory, path: Path, trains: bool = False) -> Path:
    """`trains`: somebody does in the directory; what is written is then a report on the way."""
    page = render_report(read_record(run, trains))
    try:
        write_atomic(path, page)
    except OSError as error:
        raise UserError(f"{path}: cannot write the report ({error.strerror}); name another --output") from error
    return path


def read_record(run: RunDirectory, trains: bool) -> RunRecord:
    plan = read_plan(run.plan_file)
    ended = {epoch: read_ended(run, epoch) for epoch in epochs_of(run.attempts)}
    log = read_run_log(run.log)
    return RunRecord(
        title=plan.job,
        directory=str(run.path),
        version=__version__,
        plan=plan,
        log=log,
        ended={epoch: attempt for epoch, attempt in ended.items() if attempt is not None},
        member_logs=read_member_logs(run, log),
        trains=trains,
    )


def read_plan(path: Path) -> MemoryPlan:
    """Raises UserError when plan.json is missing or is not of this version."""
    try:
        return MemoryPlan.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise UserError(f"{path}: not found; name the --output of a `spillway run`") from error
    except (ValidationError, ValueError) as error:
        raise UserError(f"{path}: damaged, or not written by this version of spillway") from error
