"""Exports a checkpoint with optimizer states for DeepSpeed or torch."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from spillway.errors import UserError
from spillway.update_rules import MASTER

from ..checkpoints.durable_files import DurableFiles
from ..checkpoints.manifest import StoredCheckpoint
from ..checkpoints.tensors import read
from ..kernels.reference import widened
from ..optimizer.plain import Hyperparameters
from .distributed import write_distributed
from .export import verified
from .foreign import KINDS, powers_after
from .naming import class_names
from .universal import LATEST, write_universal

ExportFormat = Literal["universal", "dcp"]
StepKind = Literal["tensor", "number"]


@dataclass(frozen=True, slots=True)
class ExportedStates:
    """What was written, for the command to report."""

    num_parameters: int
    num_steps: int
    num_updates: int


def export_states(
    checkpoint_path: Path,
    output: Path,
    form: ExportFormat,
    *,
    betas: tuple[float, float] | None = None,
    step_kind: StepKind = "tensor",
) -> ExportedStates:
    """Write masters, moments and step of one checkpoint into the new directory `output`; no bit changes.

    `betas`: the job's, if they are known. `step_kind`: how the loading optimizer keeps its step. Raises
    CheckpointCorrupt if a byte of the checkpoint has changed, and UserError if `output` exists, or for what the format
    cannot express.
    """
    if output.exists():
        raise UserError(f"{output}: already exists; name a new directory")
    checkpoint = verified(checkpoint_path)
    state = checkpoint.manifest.state
    names = _parameters(checkpoint)
    num_updates = int(state.scalars["num_updates"])
    _check_powers(checkpoint, num_updates, betas)
    naming = class_names(state.model)
    states = ((kind, other, value) for kind, name, value in _values(checkpoint) for other in naming(name))
    files, temporary = DurableFiles(), output.with_name(f"{output.name}.{secrets.token_hex(4)}.tmp")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with files.temporary_directory(temporary):
            if form == "dcp":
                write_distributed(temporary, states, _aliases(checkpoint, names), num_updates)
            else:
                tag = f"step-{state.step}"
                (temporary / tag).mkdir()
                write_universal(
                    temporary / tag,
                    files,
                    states,
                    num_parameters=len(names),
                    num_steps=state.step,
                    num_updates=num_updates,
                    num_samples=state.samples_consumed,
                    step=torch.tensor(float(num_updates)) if step_kind == "tensor" else num_updates,
                )
                files.write(temporary / LATEST, [memoryview(tag.encode())])
            for directory in (*(path for path in temporary.rglob("*") if path.is_dir()), temporary):
                files.sync_directory(directory)
            files.rename(temporary, output)
        files.sync_directory(output.parent)
    except OSError as error:
        raise UserError(f"{output}: not exported: {error.strerror or error}") from error
    return ExportedStates(len(names), state.step, num_updates)


def _parameters(checkpoint: StoredCheckpoint) -> list[str]:
    """Returns the names of all parameters. Raises UserError for states of an update rule that these formats cannot
    hold."""
    kinds: dict[str, set[str]] = {}
    for full_name in checkpoint.manifest.tensors:
        kind, _, name = full_name.partition(".")
        kinds.setdefault(name, set()).add(kind)
    for name, found in kinds.items():
        if found != set(KINDS):
            raise UserError(
                f"{checkpoint}: parameter {name} has the states {', '.join(sorted(found))}; this export format can "
                f"hold only those of AdamW and Adam ({', '.join(KINDS)}); export only the weights with --as huggingface"
            )
    return list(kinds)


def _check_powers(checkpoint: StoredCheckpoint, num_updates: int, betas: tuple[float, float] | None) -> None:
    """Raises UserError if the betas have changed: a step count implies the bias correction only if every update had the
    same betas."""
    scalars = checkpoint.manifest.state.scalars
    if betas is None:
        return
    expected = powers_after(Hyperparameters(beta1=betas[0], beta2=betas[1]), num_updates)
    differing = [name for name, value in expected.items() if scalars.get(name) != value]
    if differing:
        raise UserError(
            f"{checkpoint}: {differing[0]} is {scalars.get(differing[0])}, but would be {expected[differing[0]]} after "
            f"{num_updates} updates with betas {betas}: the betas were changed during the run, which this format "
            f"cannot express; export only the weights with --as huggingface"
        )


def _values(checkpoint: StoredCheckpoint) -> Iterator[tuple[str, str, Tensor]]:
    """Yields (kind, name, value), file by file. Moments are widened to float32, which changes no value, and get their
    parameter's shape."""
    tensors = checkpoint.manifest.tensors
    for full_name, value in read(checkpoint, tensors):
        kind, _, name = full_name.partition(".")
        yield kind, name, widened(value, kind).view(tensors[f"{MASTER}.{name}"].shape)


def _aliases(checkpoint: StoredCheckpoint, names: Sequence[str]) -> Mapping[str, str]:
    """Returns additional names in a model's state_dict() for tied parameters: alias -> owner."""
    model = checkpoint.manifest.state.model
    naming = class_names(model)
    if "config" in model and "lora" not in model:
        from ..models import families  # noqa: PLC0415 - imports transformers

        tied = families.chain_of(families.empty_model(families.config_from(model["config"])), torch.float32).tied
    elif model.get("tie_word_embeddings"):
        tied = {"head.lm_head.weight": "embed_tokens.weight"}
    else:
        return {}
    known = set(names)
    return {naming(alias)[0]: naming(owner)[0] for alias, owner in tied.items() if owner in known}
