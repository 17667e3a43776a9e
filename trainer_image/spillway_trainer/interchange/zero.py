"""DeepSpeed's own checkpoints, of ZeRO stage 1, 2 or 3 and any number of data-parallel ranks.

    zero_pp_rank_R_mp_rank_00_optim_states.pt   of rank R: its part of every flat group of masters and moments
    mp_rank_00_model_states.pt                  stages 1, 2: names and shapes in the order of the flat groups
    zero_pp_rank_0_mp_rank_00_model_states.pt   stage 3: the same

Stages 1 and 2 lay a group's parameters end to end and cut the whole into as many parts as there are ranks; stage 3 cuts
every parameter, padded to a multiple of the ranks, and lays a rank's pieces end to end.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spillway.errors import UserError

from .foreign import (
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    Foreign,
    betas_of,
    float32_values,
    laid_out,
    read_torch_file,
    the_one,
    whole_number,
)

PROGRAM = "DeepSpeed"
OPTIMIZER_FILES = "*zero_pp_rank_*_optim_states.pt"

_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_UNSUPPORTED = {"layer_*": "pipeline or expert parallelism", "expp_rank_*": "expert parallelism"}
_WEIGHTS_STAGE = 3


@dataclass(frozen=True, slots=True)
class RankGroup:
    """One rank's part of one flat group."""

    states: Mapping[str, Tensor]
    """Flat float32 tensors by kind, all of one length."""
    num_updates: int


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """Where a parameter lies in the flat groups."""

    group: int
    start: int
    """In stages 1 and 2, offset in the whole group; in stage 3, offset in every rank's part."""
    shape: tuple[int, ...]


def read_zero(directory: Path) -> Foreign:
    """Reads the checkpoint of one tag. Raises UserError."""
    for pattern, what in _UNSUPPORTED.items():
        if any(directory.glob(pattern)):
            raise UserError(
                f"{directory}: written with {what}; convert the checkpoint with DeepSpeed's ds_to_universal first"
            )
    files = _optimizer_files(directory)
    ranks = [read_torch_file(file) for file in files]
    with laid_out(files[0], PROGRAM):
        stage = int(ranks[0]["optimizer_state_dict"]["zero_stage"])
    model_file = directory / _model_file_name(stage)
    model = read_torch_file(model_file)
    groups = [_groups_of(rank, stage, file) for rank, file in zip(ranks, files, strict=True)]
    _check_partition_count(ranks[0], files[0], len(files))
    with laid_out(model_file, PROGRAM):
        num_steps, order = whole_number(model["global_steps"], f"{model_file}: global_steps"), model["param_shapes"]
        shapes = [{str(name): tuple(shape) for name, shape in group.items()} for group in order]
        if any(len(of_rank) != len(shapes) for of_rank in groups):
            raise ValueError(f"shapes of {len(shapes)} parameter groups, optimizer states of {len(groups[0])}")
    updates = {
        f"group {i} in {file.name}": group.num_updates
        for file, of_rank in zip(files, groups, strict=True)
        for i, group in enumerate(of_rank)
    }
    num_updates: int = the_one(updates, f"{directory}: updates counted by the optimizer")
    places = _places(shapes, groups, stage, ranks[0], directory)
    return Foreign(
        path=directory,
        format=f"DeepSpeed ZeRO-{stage}",
        shapes={name: place.shape for name, place in places.items()},
        num_steps=num_steps,
        num_updates=num_updates,
        betas=betas_of(_optimizer_state(ranks[0], stage, files[0]).get("param_groups", []), files[0]),
        read=_reader(places, groups, stage),
    )


def _optimizer_files(directory: Path) -> list[Path]:
    """Returns the files by rank. Raises UserError if one is missing, or if the run was model-parallel."""
    found: dict[int, Path] = {}
    for path in sorted(directory.glob(OPTIMIZER_FILES)):
        match = _OPTIMIZER_FILE.fullmatch(path.name)
        if match is None:
            continue
        rank, model_rank = int(match[1]), int(match[2])
        if model_rank:
            raise UserError(
                f"{path}: written by a model-parallel run; convert the checkpoint with DeepSpeed's ds_to_universal "
                "first"
            )
        if rank in found:
            raise UserError(
                f"{path}: {found[rank].name} also holds the states of rank {rank}; remove whichever of the two "
                "files belongs to another checkpoint"
            )
        found[rank] = path
    missing = sorted(set(range(max(found, default=0) + 1)) - set(found))
    if missing:
        raise UserError(
            f"{directory}: no file with the optimizer states of rank {missing[0]}; copy the files of all ranks"
        )
    return [found[rank] for rank in sorted(found)]


def _model_file_name(stage: int) -> str:
    return f"{'zero_pp_rank_0_' if stage == _WEIGHTS_STAGE else ''}mp_rank_00_model_states.pt"


def _check_partition_count(rank: Mapping[str, Any], path: Path, num_files: int) -> None:
    with laid_out(path, PROGRAM):
        count = rank["optimizer_state_dict"]["partition_count"]
        counts = set(count) if isinstance(count, list | tuple) else {count}
        if rank["optimizer_state_dict"].get("ds_zero_partition_groups"):
            raise UserError(
                f"{path}: written with expert parallelism; convert the checkpoint with DeepSpeed's ds_to_universal "
                "first"
            )
    if counts != {num_files}:
        wanted = ", ".join(str(one) for one in sorted(counts))
        raise UserError(
            f"{path.parent}: has the optimizer states of {num_files} ranks, but the run had {wanted} ranks; copy "
            f"the files of all ranks"
        )


def _optimizer_state(rank: Mapping[str, Any], stage: int, path: Path) -> Mapping[str, Any]:
    """Returns the state of the optimizer inside ZeRO's: "state" by number, and "param_groups", which an elastic
    checkpoint lacks because its state is a list."""
    with laid_out(path, PROGRAM):
        key = "optimizer_state_dict" if stage == _WEIGHTS_STAGE else "base_optimizer_state"
        inner = rank["optimizer_state_dict"][key]
        if isinstance(inner, list):
            step = rank["optimizer_state_dict"].get("base_optimizer_state_step")
            extra = {} if step is None else {"step": step}
            return {"state": {i: {**extra, **group} for i, group in enumerate(inner)}}
        return {"state": inner["state"], "param_groups": inner["param_groups"]}


def _groups_of(rank: Mapping[str, Any], stage: int, path: Path) -> list[RankGroup]:
    with laid_out(path, PROGRAM):
        found = int(rank["optimizer_state_dict"]["zero_stage"])
        if found != stage:
            raise UserError(
                f"{path}: was written with ZeRO stage {found}, but the files of other ranks with stage {stage}, so the "
                "directory mixes two checkpoints; remove the files of one checkpoint"
            )
        key = "fp32_flat_groups" if stage == _WEIGHTS_STAGE else "single_partition_of_fp32_groups"
        masters, inner = rank["optimizer_state_dict"][key], _optimizer_state(rank, stage, path)
        if not inner["state"]:
            raise UserError(
                f"{path}: contains no optimizer moments, because DeepSpeed kept them on NVMe or trained no step; save "
                "the checkpoint after a step, without NVMe offload"
            )
        return [_rank_group(i, master, inner, stage, path) for i, master in enumerate(masters)]


def _rank_group(index: int, master: object, inner: Mapping[str, Any], stage: int, path: Path) -> RankGroup:
    """Moments of stages 1 and 2 may end with padding that the masters were saved without; it is cut off."""
    groups = inner.get("param_groups", [])
    by_group = stage != _WEIGHTS_STAGE and groups
    state = inner["state"][groups[index]["params"][0] if by_group else index]
    where = f"{path}: group {index}"
    kinds = {name for name, value in state.items() if isinstance(value, Tensor) and value.dim()}
    if kinds != {EXP_AVG, EXP_AVG_SQ}:
        raise UserError(
            f"{where} holds {', '.join(sorted(kinds)) or 'no states'}, but only the states of Adam and AdamW (exp_avg, "
            "exp_avg_sq) can be imported"
        )
    step = state["step"] if "step" in state else groups[index]["step"]
    values = {MASTER: master, EXP_AVG: state[EXP_AVG], EXP_AVG_SQ: state[EXP_AVG_SQ]}
    states = {kind: float32_values(value, f"{where}: {kind}").view(-1) for kind, value in values.items()}
    length = states[MASTER].numel()
    for kind, value in states.items():
        if value.numel() < length:
            raise UserError(
                f"{where}: has {value.numel()} values of {kind} for {length} master weights; copy the checkpoint again"
            )
    cut = {kind: value[:length] for kind, value in states.items()}
    return RankGroup(cut, whole_number(step, f"{where}: step"))


def _places(
    shapes: Sequence[Mapping[str, tuple[int, ...]]],
    groups: Sequence[Sequence[RankGroup]],
    stage: int,
    rank: Mapping[str, Any],
    directory: Path,
) -> dict[str, GroupPlace]:
    """Returns where each parameter lies. Raises UserError unless the shapes use up the flat values, except for padding
    at the end."""
    places: dict[str, GroupPlace] = {}
    paddings = rank["optimizer_state_dict"].get("param_alignment_paddings")
    for index, group in enumerate(shapes):
        start = 0
        for position, (name, shape) in enumerate(group.items()):
            if name in places:
                raise UserError(
                    f"{directory}: parameter {name} is listed in two parameter groups; save the checkpoint with each "
                    "parameter in one group"
                )
            places[name] = GroupPlace(index, start, shape)
            start += _extent(math.prod(shape), stage, len(groups))
            if paddings is not None and stage != _WEIGHTS_STAGE:
                with laid_out(directory, PROGRAM):
                    start += int(paddings[index][position])
        lengths = [of_rank[index].states[MASTER].numel() for of_rank in groups]
        available = min(lengths) if stage == _WEIGHTS_STAGE else sum(lengths)
        # Stages 1 and 2 once padded to a multiple of twice the number of ranks, and saved the padding.
        if start > available or available - start >= 2 * len(groups):
            raise UserError(
                f"{directory}: the saved parameter group {index} has {available} values, but the shapes of its "
                f"parameters add up to {start}; copy the checkpoint again"
            )
    return places


def _extent(num_values: int, stage: int, num_ranks: int) -> int:
    """Returns the number of values from a parameter to the next: in the whole group, or in a rank's part."""
    return math.ceil(num_values / num_ranks) if stage == _WEIGHTS_STAGE else num_values


def _reader(
    places: Mapping[str, GroupPlace], groups: Sequence[Sequence[RankGroup]], stage: int
) -> Callable[[str, str], Tensor]:
    def read(kind: str, name: str) -> Tensor:
        place = places[name]
        parts, num_values = [of_rank[place.group].states[kind] for of_rank in groups], math.prod(place.shape)
        if stage == _WEIGHTS_STAGE:
            extent = _extent(num_values, stage, len(groups))
            values = torch.cat([part[place.start : place.start + extent] for part in parts])[:num_values]
        else:
            values = gathered(parts, place.start, num_values)
        return values.view(place.shape)

    return read


def gathered(parts: Sequence[Tensor], start: int, count: int) -> Tensor:
    """Returns `count` values from `start` of the parts laid end to end; copies nothing else."""
    pieces, begin = [], 0
    for part in parts:
        low, high = max(start, begin), min(start + count, begin + part.numel())
        if low < high:
            pieces.append(part[low - begin : high - begin])
        begin += part.numel()
    return torch.cat(pieces) if pieces else torch.empty(0)
