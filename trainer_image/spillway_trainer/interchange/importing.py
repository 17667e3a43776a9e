"""Imports a foreign checkpoint as the first checkpoint of a run.

What the foreign files do not contain comes from the job: tokens and their order, the seed, the schedule. The position
in the data is that of a run that has trained as many steps of this job.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spillway.api.job_file import JobFile
from spillway.errors import UserError

from .. import config, run_job
from ..checkpoints import tensors as checkpoint
from ..checkpoints.directory import Epoch
from ..checkpoints.manifest import StoredCheckpoint, TrainingState
from ..corpus.tokens import Corpus, prepare_corpus
from ..models.build import build_model
from ..models.chain import Chain
from ..optimizer.plain import Hyperparameters, in_dtype
from .distributed import METADATA, PROGRAM, read_distributed
from .foreign import KINDS, Foreign, powers_after
from .naming import class_names, matched
from .universal import LATEST, STATES, read_universal
from .zero import OPTIMIZER_FILES, read_zero

_LATEST = "latest"


@dataclass(frozen=True, slots=True)
class Imported:
    """The result of an import, for the command to report."""

    checkpoint: StoredCheckpoint
    foreign: Foreign
    num_parameters: int


def open_foreign(path: Path) -> Foreign:
    """Opens the checkpoint in `path`, whichever program wrote it; of several tags, the one that `latest` names.

    Raises UserError if its format is not known, or if it is damaged.
    """
    if not path.is_dir():
        raise UserError(f"{path}: no such directory; name the directory of a checkpoint")
    directory = _tag(path)
    if (directory / METADATA).is_file():
        return read_distributed(directory)
    if (directory / STATES).is_dir():
        return read_universal(directory)
    if any(directory.glob(OPTIMIZER_FILES)):
        return read_zero(directory)
    raise UserError(
        f"{directory}: no checkpoint with optimizer states in a known format; name a directory that contains "
        f"{METADATA} ({PROGRAM}), {STATES}/ (DeepSpeed universal) or {OPTIMIZER_FILES} (DeepSpeed ZeRO)"
    )


def _tag(path: Path) -> Path:
    for latest in (path / LATEST, path / _LATEST):
        if latest.is_file():
            tag = latest.read_text(encoding="utf-8", errors="replace").strip()
            if Path(tag).name != tag or not (path / tag).is_dir():
                raise UserError(
                    f"{latest}: names the directory {tag!r}, but no directory of this name is next to this file; copy "
                    "the whole checkpoint again"
                )
            return path / tag
    return path


def import_into(job: JobFile, foreign: Foreign, say: Callable[[str], None]) -> Imported:
    """Commit the first checkpoint of `job`, whose checkpoint directory must not exist. Builds the corpus.

    Raises UserError before anything is written if names, shapes or betas are not the job's.
    """
    _check_rule(job)
    _check_steps(job, foreign)
    model = build_model(job.spec, job.claims)
    settings = config.hyperparameters(job.spec, model)
    _check_betas(foreign, (settings.beta1, settings.beta2))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and name not in model.tied}
    shapes = {name: tuple(parameter.shape) for name, parameter in trained.items()}
    names = matched(foreign, shapes, class_names(model.description))
    recipe = run_job.tokenizer_recipe(job, model.objective)
    text, *held_out = run_job.sources_of(job)
    corpus = prepare_corpus(text, Path(job.corpus_directory), model.vocab_size, say, recipe, *held_out)
    state = _training_state(job, foreign, model, corpus, settings)
    say(f"copying the states of {len(shapes)} parameters from {foreign.format}")
    epoch = Epoch.start(Path(job.checkpoint_directory), job.epoch)
    values = _values(foreign, names, shapes)
    tensors = ((name, _kept(value, name.partition(".")[0], settings)) for name, value in values)
    return Imported(checkpoint.save(epoch, state, tensors), foreign, len(shapes))


def _kept(value: Tensor, kind: str, settings: Hyperparameters) -> Tensor:
    """Returns `value` as the run keeps it: rounded or quantized if moments have fewer bytes."""
    return in_dtype(value, settings.state_dtype(kind), kind)


def _check_rule(job: JobFile) -> None:
    rule = job.spec.training.optimizer.rule
    if rule.state_kinds != KINDS:
        raise UserError(
            f"spec.training.optimizer.name = {rule}: this optimizer keeps the states {', '.join(rule.state_kinds)}, "
            f"but only {', '.join(KINDS)} can be imported; use AdamW or Adam"
        )


def _check_steps(job: JobFile, foreign: Foreign) -> None:
    if foreign.num_steps < foreign.num_updates:
        raise UserError(
            f"{foreign.path}: the checkpoint counts {foreign.num_steps} training steps, but more optimizer updates "
            f"({foreign.num_updates}), so its files belong to two checkpoints; copy one of them as a whole"
        )
    steps = job.spec.training.num_steps
    if foreign.num_steps >= steps:
        raise UserError(
            f"{foreign.path}: the checkpoint has already trained {foreign.num_steps} steps, but the job has only "
            f"{steps} in total; raise spec.training.steps or spec.training.epochs"
        )


def _check_betas(foreign: Foreign, betas: tuple[float, float]) -> None:
    """Raises UserError for other betas, because moments are corrected by powers of the betas that made them."""
    if foreign.betas is not None and foreign.betas != betas:
        raise UserError(
            f"{foreign.path}: the checkpoint's moments were computed with betas {foreign.betas}, but spec.training."
            f"optimizer.betas are {betas}; set this field to the betas of the checkpoint"
        )


def _training_state(
    job: JobFile, foreign: Foreign, model: Chain, corpus: Corpus, settings: Hyperparameters
) -> TrainingState:
    batches, training = run_job.make_batches(job, corpus, model.objective), job.spec.training
    job = run_job.in_steps(job, batches)
    _check_steps(job, foreign)
    return TrainingState(
        step=foreign.num_steps,
        seed=training.seed,
        samples_consumed=foreign.num_steps * training.global_batch_size,
        sequence_length=training.sequence_length,
        scalars=powers_after(settings, foreign.num_updates),
        schedule=dataclasses.asdict(config.learning_rate(job.spec)),
        random_state=checkpoint.random_state(torch.Generator()),
        data_xxh3=batches.fingerprint,
        tokenizer_xxh3=corpus.index.tokenizer_xxh3,
        model=model.description,
        special_tokens=corpus.special_tokens,
        rule=training.optimizer.name,
        moments=training.optimizer.moments,
    )


def _values(
    foreign: Foreign, names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor]]:
    for name, shape in shapes.items():
        for kind in KINDS:
            value = foreign.read(kind, names[name])
            flat = value.dim() == 1 and foreign.shapes[names[name]] is None
            if tuple(value.shape) != shape and not (flat and value.numel() == math.prod(shape)):
                raise UserError(
                    f"{foreign.path}: {kind} of parameter {names[name]} has shape {tuple(value.shape)} in the "
                    f"checkpoint, but {shape} in the job; correct spec.model, or name another checkpoint"
                )
            yield f"{kind}.{name}", value.reshape(shape)
