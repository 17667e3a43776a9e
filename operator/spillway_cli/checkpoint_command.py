"""`spillway ckpt ls | verify | export`: what a run has saved, whether it is intact, its weights for other programs.

The run is the --output of a `spillway run`, or the directory of a cluster's job on its checkpoint claim.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from spillway.errors import CheckpointCorrupt, ExitCode, UserError
from spillway.units import format_bytes
from spillway_trainer import checkpoint_directory
from spillway_trainer.checkpoint_directory import CheckpointSummary

from .console import Format, print_json, result_console, table
from .local_run import read_job_file
from .run_directory import existing_run


class ExportDtype(StrEnum):
    """Type of the exported weights; checkpoints hold float32."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


@dataclass(frozen=True, slots=True)
class Saved:
    """Where a run's checkpoints and its tokenizer lie."""

    checkpoints: Path
    tokenizer: Path


def saved_by(path: Path) -> Saved:
    """Raises UserError when `path` is neither a run directory nor one of checkpoints."""
    if any(path.glob("epoch-*.json")):
        return Saved(path.resolve(), path.resolve() / "corpus" / "tokenizer.json")
    run = existing_run(path)
    job = read_job_file(run.job_file)
    # The corpus may lie outside the run.
    return Saved(run.checkpoints, (run.corpus if job is None else Path(job.corpus_directory)) / "tokenizer.json")


def ls(run_path: Path, output: Format) -> int:
    """Every committed checkpoint, newest first; nothing is hashed."""
    found = checkpoint_directory.list_checkpoints(saved_by(run_path).checkpoints)
    if output is Format.JSON:
        print_json({"checkpoints": [as_json(one) for one in found]})
        return ExitCode.COMPLETED
    shown = table("checkpoint", "step", "attempt", "size", "committed (UTC)", "resumable")
    for one in found:
        committed = f"{datetime.fromtimestamp(one.modified_seconds, UTC):%Y-%m-%d %H:%M:%S}"
        resumable = one.problem or ("yes" if one.in_lineage else "no: superseded by a later attempt")
        shown.add_row(one.name, str(one.step), str(one.epoch), format_bytes(one.nbytes), committed, resumable)
    result_console().print(shown if found else "no checkpoints yet")
    return ExitCode.COMPLETED


def verify(run_path: Path, output: Format) -> int:
    """Read every byte of every checkpoint; CheckpointCorrupt (74) when one differs from what was written."""
    checkpoints = saved_by(run_path).checkpoints
    problems = checkpoint_directory.verify(checkpoints)
    names = [one.name for one in checkpoint_directory.list_checkpoints(checkpoints)]
    if output is Format.JSON:
        print_json({"checkpoints": names, "problems": [str(problem) for problem in problems]})
    elif problems:
        for problem in problems:
            result_console().print(str(problem))
    else:
        result_console().print(f"{len(names)} checkpoint{'' if len(names) == 1 else 's'}, every byte as written")
    return ExitCode.CHECKPOINT_CORRUPT if problems else ExitCode.COMPLETED


def export(run_path: Path, to: Path, step: int | None, dtype: ExportDtype, output: Format) -> int:
    """Weights of one checkpoint (default: the newest good one) as a Hugging Face directory."""
    from spillway_trainer import export as exporter  # noqa: PLC0415 - imports torch

    saved = saved_by(run_path)
    checkpoint = chosen(saved.checkpoints, step)
    files = exporter.export(checkpoint, to, tokenizer=saved.tokenizer, dtype=dtype.value)
    if output is Format.JSON:
        print_json({"checkpoint": checkpoint.name, "directory": str(to.resolve()), "dtype": dtype})
    else:
        result_console().print(f"{checkpoint.name} exported to {to}: {', '.join(files)} in {dtype}, config, tokenizer")
    return ExitCode.COMPLETED


def chosen(checkpoints: Path, step: int | None) -> Path:
    """The newest checkpoint that verifies, or the one of `step`. Raises UserError when there is none."""
    if step is None:
        newest = checkpoint_directory.choose_resume(checkpoints).checkpoint
        if newest is None:
            raise UserError(f"{checkpoints}: no checkpoint yet; train at least spec.checkpoint.everySteps steps")
        return newest.path
    kept = [one for one in checkpoint_directory.list_checkpoints(checkpoints) if one.in_lineage]
    named = [one for one in kept if one.step == step]
    if not named:
        steps = ", ".join(str(one.step) for one in kept) or "none"
        raise UserError(f"--step {step}: no checkpoint of that step; there is {steps}")
    if named[0].problem:
        raise CheckpointCorrupt(f"{named[0].name}: {named[0].problem}; export another --step")
    return checkpoints / named[0].name


def as_json(one: CheckpointSummary) -> dict[str, object]:
    return {
        "name": one.name,
        "step": one.step,
        "epoch": one.epoch,
        "parent": one.parent,
        "bytes": one.nbytes,
        "tensors": one.num_tensors,
        "committed": one.modified_seconds,
        "inLineage": one.in_lineage,
        "problem": one.problem,
    }
