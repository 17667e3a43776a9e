"""Reads checkpoints of other programs.

Their files are pickles. Here, `torch.load` rebuilds tensors, numbers, text and containers; the few classes that
DeepSpeed adds become empty stand-ins. A file with anything else is rejected, and nothing in it is run.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import torch
from torch import Tensor

from spillway.errors import UserError

from ..optimizer.plain import Hyperparameters, UpdateCount

MASTER, EXP_AVG, EXP_AVG_SQ = KINDS = ("master", "exp_avg", "exp_avg_sq")
"""States of AdamW and Adam; the formats cannot hold others."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """The states of one foreign checkpoint. Names of parameters are the other program's."""

    path: Path
    format: str
    """Name for messages, such as "DeepSpeed ZeRO-2"."""
    shapes: Mapping[str, tuple[int, ...] | None]
    """Shapes of the trained parameters; None: the format holds flat values, whose number is checked when they are
    read."""
    num_steps: int
    """Steps of the run, including those that changed nothing."""
    num_updates: int
    """Updates counted by the optimizer, which correct the bias of its moments."""
    betas: tuple[float, float] | None
    """None: not in the files."""
    read: Callable[[str, str], Tensor]
    """(kind, name) -> float32 values in the shape of `shapes`, or flat. Raises UserError."""


class StandIn:
    """Takes the place of a DeepSpeed object: holds its fields, has no behaviour."""

    numel: int
    start: int


STAND_INS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (StandIn, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (StandIn, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (StandIn, "deepspeed.utils.tensor_fragment.fragment_address"),
]
"""All objects in a ZeRO checkpoint that torch itself does not treat as data."""


def read_torch_file(path: Path) -> Any:
    """Returns what `torch.save` wrote. Every byte is compared with its checksum; tensors stay in the file until they
    are used.

    Raises UserError if the file is missing, cut off or changed, or holds objects that are not data.
    """
    with readable(path):
        _check_archive(path)
        with torch.serialization.safe_globals(STAND_INS):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def read_torch_stream(stream: IO[bytes], path: Path) -> Any:
    """Like `read_torch_file`, but for bytes that were read from `path`."""
    with readable(path):
        _check_archive(stream)
        stream.seek(0)
        with torch.serialization.safe_globals(STAND_INS):
            return torch.load(stream, map_location="cpu", weights_only=True)


def _check_archive(file: Path | IO[bytes]) -> None:
    with zipfile.ZipFile(file) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise zipfile.BadZipFile("its entries are compressed, which torch.save never does")
        if (damaged := archive.testzip()) is not None:
            raise zipfile.BadZipFile(f"its entry {damaged} was changed after it was written")


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns any error that reading a foreign file raises into a UserError that names the file."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError as error:
        raise UserError(f"{path}: missing, so the checkpoint is incomplete; copy the whole checkpoint again") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    except zipfile.BadZipFile as error:
        raise UserError(
            f"{path}: not a complete file written by torch.save: {error}; copy the checkpoint again"
        ) from error
    except UnpicklingError as error:
        raise UserError(
            f"{path}: rejected, because it holds Python objects other than tensors and plain values, and loading them "
            f"would run their code; save the checkpoint without them: {_first_lines(str(error))}"
        ) from error
    except Exception as error:  # a hostile file may raise anything
        raise UserError(f"{path}: cannot be read: {type(error).__name__}: {_first_lines(str(error))}") from error


def _first_lines(text: str) -> str:
    return " ".join(text.split())[:200]


@contextmanager
def laid_out(path: Path, program: str) -> Iterator[None]:
    """Turns a field that is missing or of another type into a UserError: `path` was not written by `program`."""
    try:
        yield
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {_first_lines(str(error))}"
        raise UserError(
            f"{path}: not structured as {program} writes it ({what}); copy or save the checkpoint again"
        ) from error


def float32_values(value: object, what: str) -> Tensor:
    """Returns `value`. Raises UserError unless it is a dense float32 tensor: states are copied bit by bit, never
    converted."""
    if not isinstance(value, Tensor):
        raise UserError(
            f"{what}: expected a tensor, found {type(value).__name__}; save the checkpoint again with a tensor here"
        )
    if value.dtype != torch.float32 or value.layout != torch.strided:
        found = str(value.dtype).removeprefix("torch.")
        raise UserError(f"{what}: its type is {found}, but only dense float32 tensors can be imported; save it as one")
    return value.detach()


def whole_number(value: object, what: str) -> int:
    """Returns a step, which programs store as an integer, a float or a tensor of one element. Raises UserError."""
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(number, bool) or not isinstance(number, int | float) or number != int(number) or number < 0:
        raise UserError(
            f"{what}: expected a whole number of steps, found {_first_lines(repr(value))}; copy the checkpoint again"
        )
    return int(number)


def the_one(values: Mapping[str, Any], what: str) -> Any:
    """Returns the value that all have. Raises UserError that names two that differ, or if there is none."""
    if not values:
        raise UserError(f"{what}: no value found; copy the checkpoint again")
    first, *others = values.items()
    for where, value in others:
        if value != first[1]:
            raise UserError(
                f"{what}: found {first[1]} for {first[0]}, but {value} for {where}; only a checkpoint with the same "
                "value for the whole model can be imported"
            )
    return first[1]


def betas_of(groups: Sequence[Mapping[str, Any]], path: Path) -> tuple[float, float] | None:
    """Returns the betas of the optimizer's groups of parameters, which must agree; None if no group has them."""
    with laid_out(path, "torch.optim"):
        found = {f"group {i}": tuple(group["betas"]) for i, group in enumerate(groups) if "betas" in group}
        if not found:
            return None
        beta1, beta2 = the_one(found, f"{path}: betas")
        return float(beta1), float(beta2)


def powers_after(settings: Hyperparameters, num_updates: int) -> dict[str, float]:
    """Returns the optimizer's scalars after so many updates: powers by repeated fp64 products, as every update makes
    them."""
    count = UpdateCount(settings)
    for _ in range(num_updates):
        count.advance()
    return count.as_dict()
