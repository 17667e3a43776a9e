"""`spillway ckpt ls | verify | export`: what a run has saved, whether it is intact, weights and states for others.

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
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class ExportForm(StrEnum):
    """What `ckpt export --as` writes: weights alone, or states that a training run of another program loads."""

    HUGGINGFACE = "huggingface"
    UNIVERSAL = "universal"
    DCP = "dcp"


class LoadingOptimizer(StrEnum):
    """Who will load: torch.optim keeps its step as a tensor, DeepSpeed's FusedAdam and DeepSpeedCPUAdam as a number."""

    TORCH = "torch"
    DEEPSPEED = "deepspeed"


@dataclass(frozen=True, slots=True)
class Saved:
    """Where a run's checkpoints and its tokenizer lie."""

    checkpoints: Path
    tokenizer: Path
    betas: tuple[float, float] | None = None
    """of the job, where its job.json lies beside the checkpoints"""


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The command line of `spillway ckpt export`."""

    run: Path
    to: Path
    step: int | None
    form: ExportForm
    dtype: ExportDtype | None
    """None: bfloat16 where weights are exported; states are float32 always"""
    optimizer: LoadingOptimizer | None
    """None: torch"""
    output: Format


def saved_by(path: Path) -> Saved:
    """Raises UserError when `path` is neither a run directory nor one of checkpoints."""
    if any(path.glob("epoch-*.json")):
        return Saved(path.resolve(), path.resolve() / "corpus" / "tokenizer.json")
    run = existing_run(path)
    job = read_job_file(run.job_file)
    if job is None:
        return Saved(run.checkpoints, run.corpus / "tokenizer.json")
    beta1, beta2 = job.spec.training.optimizer.betas or (0.0, 0.0)
    # The corpus may lie outside the run.
    return Saved(run.checkpoints, Path(job.corpus_directory) / "tokenizer.json", (beta1, beta2))


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


def export(options: ExportOptions) -> int:
    """One checkpoint (default: the newest good one) for other programs. Raises UserError for another form's options."""
    if options.optimizer is not None and options.form is not ExportForm.UNIVERSAL:
        raise UserError(f"--optimizer {options.optimizer}: only --as universal depends on it; leave it out")
    if options.form is ExportForm.HUGGINGFACE:
        return export_weights(options)
    if options.dtype is not None:
        raise UserError(f"--dtype {options.dtype}: --as {options.form} keeps states as they are, float32; leave it out")
    return export_states(options)


def export_weights(options: ExportOptions) -> int:
    """Weights as a Hugging Face directory."""
    from spillway_trainer import export as exporter  # noqa: PLC0415 - imports torch

    saved, to, dtype = saved_by(options.run), options.to, options.dtype or ExportDtype.BFLOAT16
    checkpoint = chosen(saved.checkpoints, options.step)
    files = exporter.export(checkpoint, to, tokenizer=saved.tokenizer, dtype=dtype.value)
    if options.output is Format.JSON:
        print_json({"checkpoint": checkpoint.name, "directory": str(to.resolve()), "dtype": dtype})
    else:
        result_console().print(f"{checkpoint.name} exported to {to}: {', '.join(files)} in {dtype}, config, tokenizer")
    return ExitCode.COMPLETED


def export_states(options: ExportOptions) -> int:
    """Masters, moments and step as a directory that DeepSpeed or torch trains on from."""
    from spillway_trainer.interchange import exporting  # noqa: PLC0415 - imports torch

    saved, to = saved_by(options.run), options.to
    checkpoint = chosen(saved.checkpoints, options.step)
    as_number = options.optimizer is LoadingOptimizer.DEEPSPEED
    written = exporting.export_states(
        checkpoint,
        to,
        "dcp" if options.form is ExportForm.DCP else "universal",
        betas=saved.betas,
        step_kind="number" if as_number else "tensor",
    )
    if options.output is Format.JSON:
        print_json(
            {
                "checkpoint": checkpoint.name,
                "directory": str(to.resolve()),
                "form": options.form,
                "step": written.num_steps,
                "updates": written.num_updates,
                "parameters": written.num_parameters,
            }
        )
    else:
        result_console().print(
            f"{checkpoint.name} exported to {to}: states of {written.num_parameters} parameters after "
            f"{written.num_updates} updates"
        )
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
