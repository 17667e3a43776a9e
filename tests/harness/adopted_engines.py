"""Adopts DeepSpeed engines like those of a user's own script, on two ranks, and reports what each rank finds.

python tests/harness/adopted_engines.py directory        prints one JSON object on the last line, by case
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harness import zero_runs
from harness.places import IMPORTABLE
from spillway.errors import UserError
from spillway.plan import OptimizerPlan
from spillway.units import MIB

STAGES = (1, 2, 3)
PLANS = {"resident": None, "spread": OptimizerPlan(cpu_share=0.5, streamed_share=0.3, resident_share=0.2)}
STEPS = 3


def run_all(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """Runs all cases in a separate process; returns case -> what each rank found. Called by tests."""
    environment = {**os.environ, **IMPORTABLE, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-m", "harness.adopted_engines", str(directory)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    found: dict[str, list[dict[str, Any]]] = json.loads(ended.stdout.splitlines()[-1])
    return found


def cases() -> dict[str, Callable[[int, Path], dict[str, Any]]]:
    trained = {
        f"stage {stage}, {name}": partial(trained_engine, stage=stage, plan=plan)
        for stage in STAGES
        for name, plan in PLANS.items()
    }
    return {**trained, "rejected": rejected_engines}


def model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(24, 37), nn.GELU(), nn.LayerNorm(37), nn.Linear(37, 5)).bfloat16()


def engine_of(stage: int, optimizer: Any = None, **changes: Any) -> Any:
    import deepspeed

    made = model()
    matrices = [p for p in made.parameters() if p.dim() >= 2]
    vectors = [p for p in made.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "steps_per_print": None,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 30},
        **changes,
    }
    optimizer = optimizer or partial(torch.optim.AdamW, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    return deepspeed.initialize(model=made, optimizer=optimizer(groups), config=config, dist_init_required=False)[0]


def adopted(engine: Any, plan: OptimizerPlan | None, rank: int) -> Any:
    from spillway_trainer.optimizer.plain import Hyperparameters, ResidentOptimizer
    from spillway_trainer.optimizer_offload import OptimizerOffload
    from spillway_trainer.parallel.deepspeed.adopted import adopt
    from spillway_trainer.ranks import World
    from spillway_trainer.tiers.device_ledger import DeviceLedger
    from spillway_trainer.tiers.host_slab import HostSlab
    from spillway_trainer.tiers.lanes import CpuLanes

    ledger, settings = DeviceLedger(None), Hyperparameters(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    lanes = CpuLanes(HostSlab(MIB), ledger)

    def make(pieces: list[tuple[str, nn.Parameter]]) -> Any:
        if plan is None:
            return ResidentOptimizer(pieces, {}, settings, ledger, gradient_dtype=torch.float32)
        chunked = plan.model_copy(update={"chunk_parameters": 100})
        return OptimizerOffload(pieces, {}, settings, chunked, lanes, ledger, gradient_dtype=torch.float32)

    return adopt(engine, World(rank=rank, size=2), make, ledger)


def train(engine: Any, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        for micro_batch in range(2):
            generator = torch.Generator().manual_seed(1000 * step + 10 * micro_batch + rank)
            x, y = torch.randn(4, 24, generator=generator).bfloat16(), torch.randn(4, 5, generator=generator)
            loss = (engine(x).float() - y).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def leaves_out(engine: Any, rank: int) -> bool:
    """Makes a step in which only one rank has gradients that are not finite; returns True if the engine reports an
    overflow and no rank's states change."""
    before = states_of(engine)
    for _ in range(2):
        engine.backward(engine(torch.full((4, 24), torch.inf if rank == 1 else 1.0).bfloat16()).float().sum())
        engine.step()
    return engine.optimizer.overflow and same(states_of(engine), before)


def states_of(engine: Any) -> dict[str, Tensor]:
    """All states as DeepSpeed's accessors return them, undivided. Every rank must call it."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if type(engine.optimizer) is DeepSpeedZeroOptimizer:
        engine.optimizer._lazy_init_hp_params_optimizer_state()  # otherwise done by its first step
    found = {}
    for name, parameter in engine.module.named_parameters():
        found[f"master.{name}"] = safe_get_full_fp32_param(parameter).clone()
        for kind in ("exp_avg", "exp_avg_sq"):
            found[f"{kind}.{name}"] = safe_get_full_optimizer_state(parameter, kind).clone()
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def trained_engine(rank: int, directory: Path, stage: int, plan: OptimizerPlan | None) -> dict[str, Any]:
    from deepspeed.utils import safe_set_full_fp32_param

    engine = engine_of(stage)
    sharded = adopted(engine, plan, rank)
    losses = train(engine, rank, range(STEPS))
    ours, theirs = {name: value.clone() for name, value in sharded.state()}, states_of(engine)
    engine.save_checkpoint(str(directory), tag="adopted")

    plain = engine_of(stage)
    plain.load_checkpoint(str(directory), tag="adopted")
    in_plain = states_of(plain)
    plain.save_checkpoint(str(directory), tag="plain")

    again = engine_of(stage)
    back = adopted(again, plan, rank)
    again.load_checkpoint(str(directory), tag="plain")
    in_again = {name: value.clone() for name, value in back.state()}
    left_out = leaves_out(engine, rank)
    next_losses = [train(one, rank, range(STEPS, STEPS + 2)) for one in (engine, again)]

    parameter = next(iter(engine.module.parameters()))
    value = torch.arange(24.0 * 37).view(37, 24)
    safe_set_full_fp32_param(parameter, value)

    again.load_checkpoint(str(directory), tag="plain", load_optimizer_states=False)
    rounded = {name: master.bfloat16().float() for name, master in in_plain.items() if name.startswith("master.")}
    from_weights = {name: states_of(again)[name] for name in rounded}
    return {
        "losses": losses,
        "digest": {name: repr(tensor.tolist()) for name, tensor in ours.items()},
        "accessors": same(theirs, ours),
        "plain engine reads it": same(in_plain, ours),
        "adopted engine reads a plain one": same(in_again, ours),
        "leaves out a step": left_out,
        "goes on alike": next_losses[0] == next_losses[1],
        "loads weights alone": same(from_weights, rounded),
        "set": torch.equal(states_of(engine)["master.0.weight"], value),
    }


def rejected_engines(rank: int, directory: Path) -> dict[str, Any]:
    from deepspeed.accelerator import get_accelerator

    def problem(engine: Any) -> str:
        try:
            adopted(engine, None, rank)
        except UserError as error:
            return str(error)
        return ""

    def two_decays(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        groups[1]["weight_decay"] = 0.2
        return torch.optim.AdamW(groups, lr=1e-3)

    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    in_float16 = {"bf16": {"enabled": False}, "fp16": {"enabled": True, "initial_scale_power": 8}}
    return {
        "zero_optimization.stage": problem(engine_of(0)),
        # DeepSpeed itself does not make such an engine on a CPU without matrix products in float16.
        "loss scale": problem(engine_of(2, **in_float16)) if get_accelerator().is_fp16_supported() else None,
        "gradients": problem(
            engine_of(2, zero_optimization={"stage": 2, "reduce_scatter": False}, prescale_gradients=True)
        ),
        "exchanged in": problem(engine_of(2, communication_data_type="bf16")),
        "optimizer": problem(engine_of(2, partial(torch.optim.Adam, lr=1e-3))),
        "settings": problem(engine_of(2, partial(torch.optim.AdamW, lr=1e-2, betas=(0.9, 0.999)))),
        "features": problem(
            engine_of(2, bf16={"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True})
        ),
        "optimizer's parameter groups": problem(engine_of(2, two_decays)),
        "zero_optimization": problem(
            engine_of(2, zero_optimization=offload, zero_force_ds_cpu_optimizer=False),
        ),
    }


def found_by(directory: Path, rank: int) -> Path:
    return directory / f"found-{rank}.json"


def run_rank(name: str, rank: int, directory: Path) -> None:
    import logging

    import deepspeed
    import torch.distributed as dist

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    store = dist.FileStore(str(directory / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    deepspeed.init_distributed(dist_init_required=False, auto_mpi_discovery=False, verbose=False)
    found_by(directory, rank).write_text(json.dumps(cases()[name](rank, directory)))
    os._exit(0)


def main(directory: Path) -> None:
    for module in zero_runs.imported_by({"Zero2"}):
        importlib.import_module(module)

    context, found = multiprocessing.get_context("fork"), dict[str, list[dict[str, Any]]]()
    for index, name in enumerate(cases()):
        place = directory / str(index)
        place.mkdir(parents=True)
        ranks = [context.Process(target=run_rank, args=(name, rank, place)) for rank in (0, 1)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        assert all(process.exitcode == 0 for process in ranks), f"{name}: a rank ended without a result"
        found[name] = [json.loads(found_by(place, rank).read_text()) for rank in (0, 1)]
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
