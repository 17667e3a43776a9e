"""`spillway ckpt import CHECKPOINT --job JOB --output DIR`: turns another program's states into a resumable run.

The run is built in a temporary directory next to DIR and renamed at the end, so that an interrupted import leaves no
partial run, which would train from the seed.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from spillway.api.job_file import JobFile
from spillway.api.load import load_job
from spillway.api.training_job import TrainingJob
from spillway.errors import ExitCode, UserError
from spillway.extras import need_for
from spillway_trainer.checkpoints.durable_files import DurableFiles
from spillway_trainer.fetch import fetch_all

from .console import Format, message_console, print_json, result_console
from .machine.local_node import probe
from .machine.node_profile import own_profile
from .record.directory import RunDirectory, is_text, write_atomic
from .run import local_run
from .run.local_run import LocalJob, local_files
from .run.model_inspection import inspected_shape
from .run.plan import BudgetOverrides, plan_for_this_machine, with_budget

EPOCH = 1


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """The command line of `spillway ckpt import`."""

    source: Path
    job: Path
    output: Path
    claims: Sequence[str]
    budget: BudgetOverrides
    format: Format
    num_ranks: int = 1
    """Ranks of the later runs: a run never changes its threads per rank."""


def import_checkpoint(options: ImportOptions) -> int:
    """Imports the checkpoint. Rejects what `spillway run` would; a failed import leaves nothing behind."""
    source = str(options.job)
    job = with_budget(load_job(options.job), options.budget)
    claims = local_run.parse_claims(options.claims)
    local_run.reject_wrong_fields(job, claims, source)
    need_for(job.spec, options.num_ranks)
    if not is_text(options.output):
        raise UserError(f"--output {options.output}: the path is not valid UTF-8; name another directory")
    if options.output.exists():
        raise UserError(f"--output {options.output}: already exists; name a new directory")
    fetch_all(job.spec, claims, message_console().print)
    output = options.output.resolve()
    files, temporary = DurableFiles(), output.with_name(f"{output.name}.{secrets.token_hex(4)}.tmp")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with files.temporary_directory(temporary):
            document = import_in(RunDirectory(temporary), RunDirectory(output), options, job, claims)
            files.sync_directory(temporary)
            files.rename(temporary, output)
        files.sync_directory(output.parent)
    except OSError as error:
        raise UserError(
            f"--output {options.output}: the import failed: {error.strerror or error}; name another --output"
        ) from error
    say_result(document, options)
    return ExitCode.COMPLETED


def import_in(
    made: RunDirectory, final: RunDirectory, options: ImportOptions, job: TrainingJob, claims: Mapping[str, Path]
) -> dict[str, object]:
    """Fills `made`, later renamed to `final`, as a run's first attempt would; returns the document of `-o json`."""
    from spillway_trainer.interchange import importing  # noqa: PLC0415 - imports torch

    console = message_console()
    foreign = importing.open_foreign(options.source)
    shape = inspected_shape(options.job, job, claims)
    resources = probe(made.path)
    profiles = partial(own_profile, resources.cores)
    plan = plan_for_this_machine(job, resources, options.num_ranks, shape, profiles)
    local = LocalJob(job, claims, made.corpus, (made.path,), num_ranks=options.num_ranks)
    local_files(made, local, plan, resources.cores, None).write(EPOCH)
    job_file = local_run.read_job_file(made.job_file)
    assert job_file is not None, "just written"
    imported = importing.import_into(job_file, foreign, console.print)
    write_atomic(made.job_file, renamed(job_file, made, final).model_dump_json(indent=2) + os.linesep)
    state = imported.checkpoint.manifest.state
    return {
        "run": str(final.path),
        "checkpoint": str(imported.checkpoint),
        "format": foreign.format,
        "step": state.step,
        "updates": foreign.num_updates,
        "parameters": imported.num_parameters,
    }


def renamed(job: JobFile, made: RunDirectory, final: RunDirectory) -> JobFile:
    """The same job with the run's final paths."""
    return job.model_copy(
        update={
            "output_directory": str(final.path),
            "corpus_directory": str(final.corpus),
            "checkpoint_directory": str(final.checkpoints),
            "spill_directory": str(final.path),
            "termination_message_path": str(final.attempt(EPOCH) / "termination.json"),
        }
    )


def say_result(document: Mapping[str, object], options: ImportOptions) -> None:
    if options.format is Format.JSON:
        print_json(document)
        return
    result_console().print(
        f"{document['checkpoint']} in {options.output}: states of {document['parameters']} parameters after "
        f"{document['updates']} updates, from {document['format']}; continue with: spillway run {options.job} --output "
        f"{options.output}{f' --ranks {options.num_ranks}' if options.num_ranks > 1 else ''}"
    )
