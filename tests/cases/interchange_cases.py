"""Foreign checkpoints for tests, written without the programs that define their layout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SHAPES = {"a.weight": (7, 5), "a.bias": (3,), "b.weight": (4, 4), "scale": ()}
GROUPS = (("a.weight", "b.weight"), ("a.bias", "scale"))
KINDS = ("master", "exp_avg", "exp_avg_sq")
BETAS = (0.9, 0.95)


def awkward(shape: tuple[int, ...], seed: int) -> Tensor:
    """Random bit patterns, which can be NaNs with payloads, denormals, infinities and both zeros."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31 - 1, shape, generator=generator, dtype=torch.int64)
    return bits.to(torch.int32).view(torch.float32)


def states() -> dict[tuple[str, str], Tensor]:
    """(kind, name) -> value."""
    keys = [(kind, name) for kind in KINDS for name in SHAPES]
    return {(kind, name): awkward(SHAPES[name], seed) for seed, (kind, name) in enumerate(keys)}


def bits(tensor: Tensor) -> list[int]:
    found: list[int] = tensor.reshape(-1).view(torch.int32).tolist()
    return found


def write_zero(
    directory: Path, stage: int, num_ranks: int, values: Mapping[tuple[str, str], Tensor], num_updates: int = 3
) -> None:
    """Writes a checkpoint as DeepSpeed's engine does for ZeRO `stage` on `num_ranks` ranks, with two groups of
    parameters."""
    directory.mkdir(parents=True)
    cut = cut_parameters if stage == 3 else cut_group
    flat = {kind: [cut([values[kind, name] for name in group], num_ranks) for group in GROUPS] for kind in KINDS}
    prefix = "zero_pp_rank_0_" if stage == 3 else ""
    torch.save(model_states(num_updates), directory / f"{prefix}mp_rank_00_model_states.pt")
    for rank in range(num_ranks):
        parts = {kind: [group[rank] for group in flat[kind]] for kind in KINDS}
        content = rank_states(stage, num_ranks, parts, num_updates)
        path = directory / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": content, "ds_version": "0.19.8"}, path)


def cut_group(tensors: Sequence[Tensor], num_ranks: int) -> list[Tensor]:
    """Stages 1 and 2: joins the tensors, and cuts them for the ranks as if padded to a multiple of twice the ranks; the
    last parts are saved without padding."""
    whole = torch.cat([tensor.reshape(-1) for tensor in tensors])
    size = 2 * math.ceil(whole.numel() / (2 * num_ranks))
    return [whole[rank * size : (rank + 1) * size].clone() for rank in range(num_ranks)]


def cut_parameters(tensors: Sequence[Tensor], num_ranks: int) -> list[Tensor]:
    """Stage 3: pads and cuts every parameter by itself."""
    pieces: list[list[Tensor]] = [[] for _ in range(num_ranks)]
    for tensor in tensors:
        size = math.ceil(tensor.numel() / num_ranks)
        padded = torch.cat([tensor.reshape(-1), torch.zeros(size * num_ranks - tensor.numel())])
        for rank in range(num_ranks):
            pieces[rank].append(padded[rank * size : (rank + 1) * size])
    return [torch.cat(of_rank) for of_rank in pieces]


def model_states(num_updates: int) -> dict[str, Any]:
    return {
        "module": {},
        "param_shapes": [{name: torch.Size(SHAPES[name]) for name in group} for group in GROUPS],
        "global_steps": num_updates,
    }


def rank_states(stage: int, num_ranks: int, parts: Mapping[str, list[Tensor]], num_updates: int) -> dict[str, Any]:
    inner = {
        "state": {
            group: {
                "step": torch.tensor(float(num_updates)),
                # DeepSpeed saves moments with their padding, but masters without it.
                "exp_avg": torch.cat([parts["exp_avg"][group], torch.zeros(0 if stage == 3 else 2)]),
                "exp_avg_sq": torch.cat([parts["exp_avg_sq"][group], torch.zeros(0 if stage == 3 else 2)]),
            }
            for group in range(len(GROUPS))
        },
        "param_groups": [{"params": [group], "lr": 0.01, "betas": BETAS} for group in range(len(GROUPS))],
    }
    masters = [part.clone() for part in parts["master"]]
    if stage == 3:
        count: dict[str, Any] = {"partition_count": num_ranks}
        return {"zero_stage": stage, **count, "optimizer_state_dict": inner, "fp32_flat_groups": masters}
    return {
        "zero_stage": stage,
        "partition_count": [num_ranks] * len(GROUPS),
        "base_optimizer_state": inner,
        "single_partition_of_fp32_groups": masters,
        "param_alignment_paddings": [[0] * len(group) for group in GROUPS],
    }
