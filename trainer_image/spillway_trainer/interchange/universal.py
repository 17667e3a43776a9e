"""DeepSpeed's universal checkpoint, which every ZeRO stage and number of ranks loads (0.19.8).

    latest_universal                                     the tag
    TAG/zero/PARAMETER/{fp32,exp_avg,exp_avg_sq,step}.pt  whole tensors
    TAG/zero/optimizer_state.pt                          what does not belong to one parameter
    TAG/mp_rank_00_model_states.pt                       stages 1, 2: steps of the run
    TAG/zero_pp_rank_0_mp_rank_00_model_states.pt        stage 3: the same

What DeepSpeed finds in `optimizer_state.pt` replaces the configuration of the loading run; what it does not find there
stays. So only the states are written: `clip_grad`, which stages 1 and 2 would take over, and learning rate, betas and
weight decay of the groups stay the run's own. `param_groups` needs an entry for every group of the loading optimizer,
because further groups would be skipped; as many entries as there are parameters always suffice.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spillway.errors import UserError

from ..checkpoints.durable_files import DurableFiles
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

PROGRAM = "DeepSpeed's ds_to_universal"
DEEPSPEED_VERSION = "0.19.8"
"""Version of the format that is written; loaders require that a version is given."""
STATES = "zero"
_FILES = {MASTER: "fp32.pt", EXP_AVG: "exp_avg.pt", EXP_AVG_SQ: "exp_avg_sq.pt"}
_COMMON, _STEP = "optimizer_state.pt", "step.pt"
_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
LATEST = "latest_universal"


def read_universal(directory: Path) -> Foreign:
    """Reads the checkpoint of one tag. Raises UserError."""
    states = directory / STATES
    common = read_torch_file(states / _COMMON)
    folders = {path.name: path for path in sorted(states.iterdir()) if (path / _FILES[EXP_AVG]).exists()}
    with laid_out(states / _COMMON, PROGRAM):
        inner = common.get("optimizer_state_dict", {})
        groups = common.get("param_groups", [])
        betas = betas_of(groups, states / _COMMON)
    updates = {name: _step(path) for name, path in folders.items() if (path / _STEP).exists()}
    if not updates:
        with laid_out(states / _COMMON, PROGRAM):
            where = f"{states / _COMMON}: step"
            updates = {"the optimizer": whole_number(inner["state"][0]["step"], where)}

    def read(kind: str, name: str) -> Tensor:
        path = folders[name] / _FILES[kind]
        value = read_torch_file(path)
        with laid_out(path, PROGRAM):
            if isinstance(value, Mapping):
                if value.get("vocab_tensor"):
                    raise UserError(
                        f"{path}: saved without the padding rows of the vocabulary, so the shape of this tensor in "
                        "training is unknown and the checkpoint cannot be imported; use another one"
                    )
                value = value["param"]
            return float32_values(value, f"{path}: {kind}")

    return Foreign(
        path=directory,
        format="DeepSpeed universal",
        shapes=dict.fromkeys(folders),
        num_steps=_num_steps(directory),
        num_updates=the_one(updates, f"{directory}: updates counted by the optimizer"),
        betas=betas,
        read=read,
    )


def _step(folder: Path) -> int:
    return whole_number(read_torch_file(folder / _STEP), f"{folder / _STEP}")


def _num_steps(directory: Path) -> int:
    files = [directory / name for name in _MODEL_FILES if (directory / name).exists()]
    if not files:
        raise UserError(f"{directory}: contains neither {' nor '.join(_MODEL_FILES)}; copy the whole checkpoint again")
    model = read_torch_file(files[0])
    with laid_out(files[0], "DeepSpeed"):
        return whole_number(model["global_steps"], f"{files[0]}: global_steps")


def write_universal(
    directory: Path,
    files: DurableFiles,
    states: Iterator[tuple[str, str, Tensor]],
    *,
    num_parameters: int,
    num_steps: int,
    num_updates: int,
    num_samples: int,
    step: Tensor | int,
) -> None:
    """Fills the new directory of one tag. `states`: (kind, name, value), where the kinds of a name follow one
    another."""
    (directory / STATES).mkdir()
    common = {
        "ds_version": DEEPSPEED_VERSION,
        "param_groups": [{"params": []} for _ in range(num_parameters)],
        "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": [{"params": []}]},
    }
    _write(files, directory / STATES / _COMMON, common)
    for kind, name, value in states:
        folder = directory / STATES / name
        if not folder.exists():
            folder.mkdir()
            _write(files, folder / _STEP, step)
        _write(files, folder / _FILES[kind], {"param": value, "cat_dim": 0})
    model: dict[str, Any] = {
        "module": {},
        "optimizer": None,
        "lr_scheduler": None,
        "global_steps": num_steps,
        "global_samples": num_samples,
        "skipped_steps": num_steps - num_updates,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": DEEPSPEED_VERSION,
    }
    for name in _MODEL_FILES:
        _write(files, directory / name, model)


def _write(files: DurableFiles, path: Path, content: Any) -> None:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    files.write(path, [buffer.getbuffer()])
