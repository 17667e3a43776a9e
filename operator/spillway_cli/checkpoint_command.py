"""`spillway ckpt ls | verify | export`: lists, verifies and exports the checkpoints of a run.

RUN is the --output of `spillway run`, the directory of a cluster job on its checkpoint claim, or a directory of
checkpoints. For a sweep, `ls` and `verify` cover every member, and `export` takes the best one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from spillway.api.sweep.halving import METRIC_WORDS
from spillway.api.sweep.members import DIRECTORY as MEMBERS_DIRECTORY
from spillway.api.sweep.members import member_directory, named_specs
from spillway.api.training_job import TrainingJobSpec
from spillway.errors import CheckpointCorrupt, ExitCode, UserError
from spillway.extras import need
from spillway.units import format_bytes
from spillway_trainer.checkpoints import directory as checkpoint_directory
from spillway_trainer.checkpoints.directory import CheckpointSummary
from spillway_trainer.checkpoints.manifest import open_checkpoint

from .console import Format, message_console, print_json, result_console, table
from .record.directory import RunDirectory, existing_run
from .record.log import read_run_log
from .record.summary import format_loss
from .run.local_run import read_job_file


class ExportDtype(StrEnum):
    """The exported weights' type; checkpoints hold float32."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class ExportForm(StrEnum):
    """What `ckpt export --as` writes: only weights, or states that another training program can load."""

    HUGGINGFACE = "huggingface"
    UNIVERSAL = "universal"
    DCP = "dcp"


class LoadingOptimizer(StrEnum):
    """What will load the states: torch.optim stores its step as a tensor, DeepSpeed's Adam as a number."""

    TORCH = "torch"
    DEEPSPEED = "deepspeed"


@dataclass(frozen=True, slots=True)
class SavedRun:
    """Where the checkpoints of a run, or of one member of a sweep, are."""

    member: str
    """Empty unless the run is a sweep."""
    checkpoints: Path
    places: Sequence[Path]
    """The tokenizer is in a corpus* directory of one of these, or near the checkpoints."""
    spec: TrainingJobSpec | None
    """Spec of the run or member; None for a bare directory of checkpoints."""

    def named(self, name: object) -> str:
        return f"{self.member}/{name}" if self.member else str(name)


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The command line of `spillway ckpt export`."""

    run: Path
    to: Path
    step: int | None
    best: bool
    """Whether to export the checkpoint with the lowest evaluation loss instead of that of `step`."""
    form: ExportForm
    dtype: ExportDtype | None
    """None: bfloat16 for weights; states are always float32."""
    optimizer: LoadingOptimizer | None
    """None: torch."""
    output: Format
    member: str | None = None
    """Member of a sweep; None: the best."""
    merge: bool = False
    """Whether adapters are merged into the weights of their model."""
    base: Path | None = None
    """Directory that training started from; None: where it was during the run."""


def saved_by(path: Path, member: str | None = None) -> list[SavedRun]:
    """Returns one entry for a run; for a sweep one for each member that has started, or only `member`.

    Raises UserError when `path` is neither a run directory nor one of checkpoints, or has no such member."""
    is_bare = any(path.glob("epoch-*.json")) or any(path.glob(f"{MEMBERS_DIRECTORY}/*/epoch-*.json"))
    run = RunDirectory(path.resolve()) if is_bare else existing_run(path)
    checkpoints, job = (run.path, None) if is_bare else (run.checkpoints, read_job_file(run.job_file))
    places = [] if job is None else [Path(job.corpus_directory).parent]  # which may lie outside the run
    begun = sorted(one.name for one in (checkpoints / MEMBERS_DIRECTORY).glob("*") if one.is_dir())
    specs = {} if job is None else named_specs(job.spec)
    if member is not None and member not in begun:
        there = (
            f"use {', '.join(begun)}"
            if begun
            else "the run is not a sweep, or no member has started; leave --member out"
        )
        raise UserError(f"--member {member}: {path} has no checkpoints of this member; {there}")
    return [
        SavedRun(name, Path(member_directory(checkpoints, name)) if name else checkpoints, places, specs.get(name))
        for name in begun or [""]
        if member in (None, name)
    ]


def to_export(options: ExportOptions) -> tuple[SavedRun, str]:
    """What to export, and for a sweep which member and why. Raises UserError when --member is needed."""
    found = saved_by(options.run, options.member)
    if options.member is not None:
        return found[0], f"member {options.member}: "
    if not found[0].member:
        return found[0], ""
    log = read_run_log(RunDirectory(options.run).log)
    if log.best is None or log.sweep is None:
        names = ", ".join(one.member for one in found)
        raise UserError(f"{options.run}: the best member is not known; give --member, one of {names}")
    name, metric = log.best.member, METRIC_WORDS[log.sweep.metric]
    value = format_loss(log.members.get(name, log.best).objective)
    evaluated = sum(one.objective is not None for one in log.members.values())
    rank = f"the best of {evaluated}{'' if evaluated == len(log.sweep.members) else ' evaluated so far'}"
    return saved_by(options.run, name)[0], f"member {name}, {rank} by {metric} {value}: "


def ls(run_path: Path, output: Format, member: str | None = None) -> int:
    """Lists committed checkpoints, newest first, without hashing them."""
    saved = saved_by(run_path, member)
    found = [(each, *one) for each in saved for one in with_best(each.checkpoints)]
    if output is Format.JSON:
        documents = [{"member": each.member or None, **as_json(one), "best": best} for each, one, best in found]
        print_json({"checkpoints": documents})
        return ExitCode.COMPLETED
    shown = table("checkpoint", "step", "attempt", "size", "committed (UTC)", "learning rate", "resumable")
    for each, one, is_best in found:
        committed = f"{datetime.fromtimestamp(one.modified_seconds, UTC):%Y-%m-%d %H:%M:%S}"
        resumable = "yes" if one.in_lineage else "no: superseded by a later attempt"
        resumable = "no: damaged" if one.problem else resumable
        rate, size = one.schedule, format_bytes(one.nbytes)
        of_job = f"{rate['name']} {rate['peak']:g}, {rate['num_steps']} steps" if rate else "-"
        name = each.named(one.name) + " (best)" * is_best
        shown.add_row(name, str(one.step), str(one.epoch), size, committed, of_job, resumable)
    result_console().print(shown if found else "no checkpoints yet")
    for each, one, _ in found:
        if one.problem:
            result_console().print(f"{each.named(one.name)}: {one.problem}", markup=False)
    return ExitCode.COMPLETED


def with_best(checkpoints: Path) -> list[tuple[CheckpointSummary, bool]]:
    """All checkpoints, newest first, each with whether it has the lowest evaluation loss (jobs with checkpoint.keepBest
    or training.earlyStopping)."""
    found = checkpoint_directory.list_checkpoints(checkpoints)
    best_step = next((one.best_step for one in found if one.in_lineage and not one.problem), 0)
    return [(one, one.in_lineage and one.step == best_step > 0) for one in found]


def verify(run_path: Path, output: Format, member: str | None = None) -> int:
    """Checks every byte of every checkpoint; returns 74 (CheckpointCorrupt) when one differs from what was written.
    Raises UserError when there is no checkpoint."""
    problems, names = list[str](), list[str]()
    for each in saved_by(run_path, member):
        problems += [each.named(problem) for problem in checkpoint_directory.verify(each.checkpoints)]
        names += [each.named(one.name) for one in checkpoint_directory.list_checkpoints(each.checkpoints)]
    if not names and not problems:
        raise UserError(f"{run_path}: no checkpoint to verify: none was committed, or all were deleted")
    if output is Format.JSON:
        print_json({"checkpoints": names, "problems": problems})
    elif problems:
        for problem in problems:
            result_console().print(problem)
    else:
        result_console().print(f"{len(names)} checkpoint{'' if len(names) == 1 else 's'} verified, no byte differs")
    return ExitCode.CHECKPOINT_CORRUPT if problems else ExitCode.COMPLETED


def export(options: ExportOptions) -> int:
    """Exports one checkpoint (default: the newest intact one). Raises UserError for another form's options."""
    is_weights = options.form is ExportForm.HUGGINGFACE
    if options.optimizer is not None and options.form is not ExportForm.UNIVERSAL:
        raise UserError(f"--optimizer {options.optimizer}: only applies to --as universal; leave --optimizer out")
    if (options.merge or options.base is not None) and not is_weights:
        raise UserError("--merge and --base: only apply to weights; leave them out, or use --as huggingface")
    if options.best and options.step is not None:
        raise UserError(f"--best and --step {options.step}: both choose a checkpoint; give only one of the two")
    need("trainer")
    if options.dtype is not None and not is_weights:
        raise UserError(f"--dtype {options.dtype}: --as {options.form} always writes float32 states; leave --dtype out")
    saved, why = to_export(options)
    step = step_of_best(saved.checkpoints) if options.best else options.step
    checkpoint, passed_over = chosen(saved.checkpoints, step)
    document, said = (export_weights if is_weights else export_states)(options, saved, checkpoint)
    where = {"checkpoint": checkpoint.name, "directory": str(options.to.resolve()), "member": saved.member or None}
    for problem in passed_over:
        message_console().print(f"skipped checkpoint: {problem}")
    if options.output is Format.JSON:
        print_json({**where, "passedOver": passed_over, **document})
    else:
        result_console().print(f"{why}{checkpoint.name} exported to {options.to}: {said}")
    return ExitCode.COMPLETED


def export_weights(options: ExportOptions, saved: SavedRun, checkpoint: Path) -> tuple[dict[str, object], str]:
    """Exports weights as a Hugging Face directory; returns the result for JSON and for people."""
    from spillway_trainer.interchange import export as exporter  # noqa: PLC0415 - imports torch

    dtype = options.dtype or ExportDtype.BFLOAT16
    tokenizer = checkpoint_directory.tokenizer_of(open_checkpoint(checkpoint), saved.places)
    files = exporter.export(
        checkpoint, options.to, tokenizer=tokenizer, dtype=dtype.value, merge=options.merge,
        base=options.base,
    )  # fmt: skip
    return {"dtype": dtype}, f"{', '.join(files)} in {dtype}, config, tokenizer"


def export_states(options: ExportOptions, saved: SavedRun, checkpoint: Path) -> tuple[dict[str, object], str]:
    """Exports master weights, moments and step for DeepSpeed or torch; returns the same as `export_weights`."""
    from spillway_trainer.interchange import exporting  # noqa: PLC0415 - imports torch

    beta1, beta2 = (saved.spec and saved.spec.training.optimizer.betas) or (0.0, 0.0)
    written = exporting.export_states(
        checkpoint,
        options.to,
        "dcp" if options.form is ExportForm.DCP else "universal",
        betas=None if saved.spec is None else (beta1, beta2),
        step_kind="number" if options.optimizer is LoadingOptimizer.DEEPSPEED else "tensor",
    )
    counts = {"step": written.num_steps, "updates": written.num_updates, "parameters": written.num_parameters}
    said = f"states of {written.num_parameters} parameters after {written.num_updates} updates"
    return {"form": options.form, **counts}, said


def step_of_best(checkpoints: Path) -> int:
    """The step of the best checkpoint. Raises UserError if no checkpoint is known to be the best."""
    best = next((one.step for one, is_best in with_best(checkpoints) if is_best), None)
    if best is None:
        raise UserError(
            f"--best: {checkpoints} has no checkpoint with the lowest evaluation loss (only jobs with "
            "checkpoint.keepBest keep it); give --step, or leave --best out"
        )
    return best


def chosen(checkpoints: Path, step: int | None) -> tuple[Path, list[str]]:
    """The checkpoint of `step` or, if it is None, the newest intact one and the problems of newer ones. Raises
    UserError if there is none."""
    if step is None:
        newest = checkpoint_directory.choose_resume(checkpoints)
        if newest.checkpoint is None:
            raise UserError(
                f"{checkpoints}: no checkpoint yet; one is written every spec.checkpoint.everySteps steps, and when "
                "training ends or is stopped"
            )
        return newest.checkpoint.path, [str(problem) for problem in newest.passed_over]
    kept = [one for one in checkpoint_directory.list_checkpoints(checkpoints) if one.in_lineage]
    named = [one for one in kept if one.step == step]
    if not named:
        steps = ", ".join(str(one.step) for one in kept) or "none"
        raise UserError(f"--step {step}: no checkpoint of that step; available steps: {steps}")
    if named[0].problem:
        raise CheckpointCorrupt(f"{named[0].name}: {named[0].problem}; export another --step")
    return checkpoints / named[0].name, []


def as_json(one: CheckpointSummary) -> dict[str, object]:
    return {
        "name": one.name,
        "step": one.step,
        "epoch": one.epoch,
        "parent": one.parent,
        "bytes": one.nbytes,
        "tensors": one.num_tensors,
        "committed": one.modified_seconds,
        "schedule": dict(one.schedule) or None,
        "inLineage": one.in_lineage,
        "problem": one.problem,
    }
