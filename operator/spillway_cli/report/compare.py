"""`spillway compare RUN RUN ...`: compares the jobs and results of runs, and says whether they are equal bit for
bit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spillway import __version__
from spillway.api.job_file import JobFile
from spillway.api.pod import leaves
from spillway.errors import UserError
from spillway.units import counted, format_bytes, format_seconds

from ..console import Format, print_json, result_console, table
from ..record.directory import existing_run, is_taken
from ..record.summary import RunSummary, format_loss, summarize
from .command import read_record, write_page
from .page import MEMBER_COLOURS, RunRecord, curves_of, document, html_table, section

MOST_RUNS = len(MEMBER_COLOURS)
NOT_SET = "-"


@dataclass(frozen=True, slots=True)
class Compared:
    """One of the compared runs."""

    name: str
    """Its directory, as given."""
    record: RunRecord
    summary: RunSummary
    told: Mapping[str, str]
    """Values of its spec by path, such as training.optimizer.learningRate."""


def compare(paths: Sequence[Path], file: Path | None, output: Format) -> int:
    """Prints the comparison, and writes it with its curves to `file`. Raises UserError for a path that is not a run,
    for a sweep, and for fewer than two or more than MOST_RUNS runs."""
    if not 2 <= len(paths) <= MOST_RUNS:
        raise UserError(f"command line: {counted(len(paths), 'run')} given; name 2 to {MOST_RUNS} runs")
    runs = [_read(path) for path in paths]
    same = sentence(runs)
    if file is not None:
        write_page(file, _page(runs, same))
    if output is Format.JSON:
        print_json(
            {
                "runs": {run.name: run.summary.as_json() for run in runs},
                "differences": {path: {run.name: run.told.get(path) for run in runs} for path, _ in differences(runs)},
                "sameSteps": num_same(runs),
                "page": None if file is None else str(file),
            }
        )
        return 0
    console = result_console()
    for title, rows in (("figures", figures(runs)), ("what differs in the jobs", differences(runs))):
        if rows:
            shown = table(title, *(run.name for run in runs))
            for name, values in rows:
                shown.add_row(name, *values)
            console.print(shown)
    console.print(same if file is None else f"{same}\ncurves: {file}")
    return 0


def _read(path: Path) -> Compared:
    run = existing_run(path)
    record = read_record(run, is_taken(run))
    if record.log.sweep is not None:
        raise UserError(f"{path}: is a sweep; to compare its members, use: spillway report {path}")
    try:
        spec = JobFile.model_validate_json(run.job_file.read_text(encoding="utf-8")).spec
    except (OSError, ValueError) as error:
        raise UserError(
            f"{run.job_file}: missing, damaged, or written by another version of spillway; use that version, or run "
            "the job again"
        ) from error
    told = {path: str(value) for path, value in leaves(spec.model_dump(mode="json", by_alias=True, exclude_none=True))}
    return Compared(str(path), record, summarize(record.log, record.plan, record.measured), told)


def differences(runs: Sequence[Compared]) -> list[tuple[str, list[str]]]:
    """Fields of the spec in which the runs differ, with each run's value."""
    paths = dict.fromkeys(path for run in runs for path in run.told)
    rows = [(path, [run.told.get(path, NOT_SET) for run in runs]) for path in paths]
    return [(path, values) for path, values in rows if len(set(values)) > 1]


def figures(runs: Sequence[Compared]) -> list[tuple[str, list[str]]]:
    """Rows of the table, one figure each; those that no run has are left out."""

    def perplexity(summary: RunSummary) -> str:
        loss = summary.evaluation_loss
        return NOT_SET if loss is None or not loss < math.log(1e9) else f"{math.exp(loss):.4g}"

    every = [run.summary for run in runs]
    rows = [
        ("ranks", [one.ranks for one in every]),
        ("steps", [str(one.num_steps) for one in every]),
        ("loss, final", [format_loss(one.final_loss) for one in every]),
        ("loss, evaluation", [format_loss(one.evaluation_loss) for one in every]),
        ("perplexity, evaluation", [perplexity(one) for one in every]),
        ("tokens/s", [f"{one.tokens_per_second:.4g}" if one.num_steps else NOT_SET for one in every]),
        ("step", [format_seconds(one.step_seconds) if one.num_steps else NOT_SET for one in every]),
        ("time", [format_seconds(one.attempt_seconds) for one in every]),
        ("restarts", [str(one.num_restarts) for one in every]),
    ]
    for tier in dict.fromkeys(use.tier for one in every for use in one.tiers):
        peaks = [next((use.peak_bytes for use in one.tiers if use.tier is tier), 0) for one in every]
        rows.append((f"peak, {tier.value}", [format_bytes(peak) for peak in peaks]))
    return [(name, values) for name, values in rows if set(values) != {NOT_SET}]


def num_same(runs: Sequence[Compared]) -> int:
    """Number of steps, from the first on, whose loss and gradient norm are equal bit for bit in all runs."""
    curves = [
        {step.metrics.step: (step.metrics.loss, step.metrics.gradient_norm) for step in run.record.log.curve}
        for run in runs
    ]
    count = 0
    for step in sorted(curves[0]):
        if any(repr(curve.get(step)) != repr(curves[0][step]) for curve in curves):
            break
        count += 1
    return count


def sentence(runs: Sequence[Compared]) -> str:
    shortest, same = min(run.summary.num_steps for run in runs), num_same(runs)
    if not shortest:
        return "no step is trained yet"
    if same == shortest:
        return f"loss and gradient norm are equal bit for bit in all {same} steps that every run has"
    if not same:
        return "loss and gradient norm differ from the first step on"
    steps = counted(same, "step")
    return f"loss and gradient norm are equal bit for bit in the first {steps} of {shortest}, and differ from then on"


def _page(runs: Sequence[Compared], same: str) -> str:
    charts = curves_of(
        [(run.name, run.record.log) for run in runs],
        ("Loss", "Mean over the tokens of each step."),
        ("Evaluation", "On evaluation data."),
    )
    headings = ["", *(run.name for run in runs)]
    tables = [
        section(title, note, html_table(headings, [[name, *values] for name, values in rows], 1))
        for title, note, rows in (
            ("Figures", same, figures(runs)), ("Jobs", "Fields that differ.", differences(runs)),
        )
        if rows
    ]  # fmt: skip
    title = " and ".join(run.record.title for run in runs)
    footer = f"spillway {__version__}; hover over a chart for values"
    return document(title, f"{len(runs)} runs compared", footer, "", charts, tables)
