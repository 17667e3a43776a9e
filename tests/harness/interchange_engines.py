"""Two ranks of DeepSpeed (ZeRO 1, 2, 3) and of FSDP2 on a CPU: each continues from its own checkpoint and from ours.

`python interchange_engines.py DIRECTORY`, once for each rank (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set);
rank 0 writes DIRECTORY/results.json: {case: {claim: holds}}. One pair of processes for all cases, because importing
DeepSpeed is slow.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
from torch import Tensor, nn

STEPS_BEFORE, STEPS_AFTER = 3, 3
BETAS = (0.9, 0.95)
KINDS = ("master", "exp_avg", "exp_avg_sq")


class Mlp(nn.Module):
    """A model with sizes that no number of ranks divides, a bias per layer, and one frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(7, 13), nn.Linear(13, 5)
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(inputs))) * self.frozen
        return out


def new_optimizer(model: nn.Module) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, betas=BETAS)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, 7, generator=generator), torch.randn(4, 5, generator=generator)


# ---- DeepSpeed ----


def new_engine(stage: int, universal: bool = False) -> Any:
    import deepspeed

    model = Mlp()
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if universal:
        settings["checkpoint"] = {"load_universal": True}
    return deepspeed.initialize(model=model, optimizer=new_optimizer(model), config=settings)[0]


def train_engine(engine: Any, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        inputs, labels = (value.bfloat16() for value in batch(step))
        loss = ((engine(inputs) - labels) ** 2).float().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def same_as_saved(engines: list[Any], directory: Path) -> bool:
    """Whether two engines save the same states, apart from the padding to the number of ranks."""
    from spillway_trainer.interchange.importing import open_foreign

    for number, engine in enumerate(engines):
        engine.save_checkpoint(str(directory / f"after-{number}"), tag="t")
    dist.barrier()
    first, second = (open_foreign(directory / f"after-{number}") for number in range(2))
    every = [(kind, name) for name in first.shapes for kind in KINDS]
    states = ([foreign.read(*one) for one in every] for foreign in (first, second))
    return bool(first.num_updates == second.num_updates) and same(*states)


def engine_case(directory: Path, stage: int) -> dict[str, bool]:
    engine = new_engine(stage)
    train_engine(engine, 0, STEPS_BEFORE)
    engine.save_checkpoint(str(directory / "own"), tag="t")
    dist.barrier()
    claims: dict[str, bool] = {}
    if dist.get_rank() == 0:
        claims = converted(directory, directory / "own" / "t")
    dist.barrier()
    own = new_engine(stage)
    own.load_checkpoint(str(directory / "own"), tag="t")
    ours = new_engine(stage, universal=True)
    ours.load_checkpoint(str(directory / "ours"))
    claims["steps"] = ours.global_steps == STEPS_BEFORE
    if stage == 3:
        # DeepSpeed lets all sub-groups of ZeRO-3 share one step tensor, also if it loads its own converter's files.
        shared = ours.optimizer.optimizer.state.values()
        claims["one_step_tensor_for_all"] = len({id(state["step"]) for state in shared}) == 1
        for state in shared:
            state["step"] = state["step"].clone()
    expected = train_engine(own, STEPS_BEFORE, STEPS_AFTER)
    claims["next_losses"] = train_engine(ours, STEPS_BEFORE, STEPS_AFTER) == expected
    claims["states_after"] = same_as_saved([own, ours], directory)
    return claims


def converted(directory: Path, tag: Path) -> dict[str, bool]:
    """Converts DeepSpeed's checkpoint `tag` to ours, and ours to a universal one; compares the result with DeepSpeed's
    own conversion of the same checkpoint."""
    from deepspeed.checkpoint import ds_to_universal

    from spillway_trainer.interchange.importing import open_foreign

    foreign = open_foreign(tag)
    rewritten = export(directory, foreign, "universal")
    options = argparse.Namespace(
        input_folder=str(tag), output_folder=str(directory / "theirs"), num_extract_workers=1, num_merge_workers=1,
        keep_temp_folder=False, strict=True, inject_missing_state=True,
    )  # fmt: skip
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        sys.stdout, terminal = nowhere, sys.stdout
        try:
            ds_to_universal.main(options)
        finally:
            sys.stdout = terminal
    read_back, theirs = open_foreign(directory / "ours"), open_foreign(directory / "theirs")
    names = {"first.weight", "first.bias", "second.weight", "second.bias"}
    return {
        "trained_names": set(foreign.shapes) == set(theirs.shapes) == set(read_back.shapes) == names,
        "updates": foreign.num_updates == theirs.num_updates == read_back.num_updates == rewritten == STEPS_BEFORE,
        "betas": foreign.betas == theirs.betas == BETAS and read_back.betas is None,
        "their_converter_agrees": all(
            same([foreign.read(kind, name).view(-1)], [theirs.read(kind, name).view(-1)])
            and same([foreign.read(kind, name)], [read_back.read(kind, name)])
            for name in names
            for kind in KINDS
        ),
    }


# ---- FSDP2 ----


def new_shards() -> tuple[nn.Module, torch.optim.AdamW]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Mlp()
    model.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
    sharded = fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return sharded, new_optimizer(sharded)


def train_shards(model: nn.Module, optimizer: torch.optim.AdamW, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        inputs, labels = batch(step)
        loss = ((model(inputs) - labels) ** 2).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def shard_case(directory: Path, flatten: bool) -> dict[str, bool]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, optimizer = new_shards()
    train_shards(model, optimizer, 0, STEPS_BEFORE)
    states, moments = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": states, "optimizer": moments}, checkpoint_id=str(directory / "own"))  # type: ignore[attr-defined]
    dist.barrier()
    claims: dict[str, bool] = {}
    whole = {name: p.full_tensor().detach() for name, p in model.named_parameters()}  # type: ignore[operator]
    if dist.get_rank() == 0:
        from spillway_trainer.interchange.importing import open_foreign

        foreign = open_foreign(directory / "own")
        claims["masters"] = all(same([foreign.read("master", name)], [whole[name]]) for name in foreign.shapes)
        claims["betas"] = foreign.betas == BETAS
        claims["updates"] = export(directory, foreign, "dcp") == STEPS_BEFORE
        claims["read_back"] = open_foreign(directory / "ours").num_updates == STEPS_BEFORE
    dist.barrier()
    loaded, loaded_optimizer = new_shards()
    states, moments = get_state_dict(loaded, loaded_optimizer, options=options)
    dcp.load(  # type: ignore[attr-defined]
        {"model": states, "optimizer": moments},
        checkpoint_id=str(directory / "ours"),
        planner=DefaultLoadPlanner(allow_partial_load=True),
    )
    set_state_dict(loaded, loaded_optimizer, model_state_dict=states, optim_state_dict=moments, options=options)
    expected = train_shards(model, optimizer, STEPS_BEFORE, STEPS_AFTER)
    claims["next_losses"] = train_shards(loaded, loaded_optimizer, STEPS_BEFORE, STEPS_AFTER) == expected
    ends = [[p.full_tensor() for p in one.parameters()] for one in (model, loaded)]  # type: ignore[operator]
    claims["parameters_after"] = same(*ends)
    return claims


# ---- both ----


def export(directory: Path, foreign: Any, form: Any) -> int:
    """Writes foreign states as a checkpoint of ours, and exports that to DIRECTORY/ours; returns its number of
    updates."""
    from cases.checkpoint_cases import training_state
    from spillway_trainer.checkpoints.directory import Epoch
    from spillway_trainer.checkpoints.tensors import save
    from spillway_trainer.interchange.exporting import export_states
    from spillway_trainer.interchange.foreign import powers_after
    from spillway_trainer.optimizer.plain import Hyperparameters

    scalars = powers_after(Hyperparameters(beta1=BETAS[0], beta2=BETAS[1]), foreign.num_updates)
    state = training_state(foreign.num_steps, scalars=scalars, model={"class": "tests.Mlp"})

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in foreign.shapes:
            for kind in KINDS:
                yield f"{kind}.{name}", foreign.read(kind, name)

    checkpoint = save(Epoch.start(directory / "checkpoints", 1), state, tensors())
    return export_states(checkpoint.path, directory / "ours", form, betas=BETAS).num_updates


def same(these: list[Tensor], those: list[Tensor]) -> bool:
    pairs = zip(these, those, strict=True)
    return all(a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs)


def everywhere(claims: dict[str, bool]) -> dict[str, bool]:
    """The claims of all ranks; a claim holds if it holds on every rank that made it."""
    gathered: list[dict[str, bool]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, claims)
    return {claim: all(of_rank.get(claim, True) for of_rank in gathered) for one in gathered for claim in one}


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else compiled now, for half a minute
    deepspeed.init_distributed(dist_backend="gloo")
    cases: dict[str, Callable[[Path], dict[str, bool]]] = {
        **{f"zero-{stage}": lambda path, stage=stage: engine_case(path, stage) for stage in (1, 2, 3)},  # type: ignore[misc]
        "fsdp2": lambda path: shard_case(path, flatten=False),
        "fsdp2-flat": lambda path: shard_case(path, flatten=True),
    }
    results = {}
    for name, case in cases.items():
        (directory / name).mkdir(exist_ok=True)
        results[name] = everywhere(case(directory / name))
    if dist.get_rank() == 0:
        (directory / "results.json").write_text(json.dumps(results, indent=2))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
