"""A TrainingJob's model under DeepSpeed: memory, engine, adoption. (Under FSDP2: fsdp.py.)

DeepSpeed joins the process group of distributed.py, so its exchanges have the same time limit and end with the same
error.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import Parameter

from spillway.errors import UserError
from spillway.extras import need
from spillway.plan import PLAN_AGAIN, MemoryPlan
from spillway.planning.workload import NUM_GATHERED_SEGMENTS, sharding_problem

from ..corpus.data import Batch
from ..models.chain import Chain, allocate, parameter_shape
from ..optimizer.plain import Hyperparameters
from ..ranks import World
from ..saved_tensors import ParameterSource
from ..segments import Ready, Residence
from ..trainer import MicroBatchOrder, Passes, Run, TimedPhase, in_order
from .deepspeed.gathered_parameters import GatheredParameters
from .deepspeed.support import check_version
from .distributed import peers
from .shards import DeviceTier, MakeOptimizer, ShardedOptimizer

STAGES = {"Zero1": 1, "Zero2": 2, "Zero3": 3}


class GatheringSource(ParameterSource, Residence, Protocol):
    """Parameters that are whole only while their module runs."""


@dataclass(frozen=True, slots=True)
class DividedModel:
    """A sharded model, ready to train."""

    engine: Any
    """deepspeed.DeepSpeedEngine, or a module, which is called instead of the model."""
    optimizer: ShardedOptimizer
    parameters: GatheringSource | None
    """The source of the parameters of Zero3 and Fsdp; None: every rank has whole parameters."""
    order: MicroBatchOrder
    ready: Ready | None = None
    """Called for every segment when its forward begins, before its parameters are used."""


def reject(plan: MemoryPlan, model: Chain, world: World) -> None:
    """Raises UserError, before memory is allocated, for what the plan's strategy cannot shard."""
    where = f"spec.parallelism.strategy = {plan.strategy}"
    if world.size == 1:
        raise UserError(f"{where}: a run with one rank has nothing to shard; use Auto or Ddp")
    if plan.parameters.streams or plan.parameters.order != "InOrder":
        raise UserError(
            f"{where}: the plan streams parameters from host memory or NVMe, or runs all micro-batches through one "
            f"layer before the next layer. This strategy can do neither; {PLAN_AGAIN}"
        )
    if plan.optimizer.overlap not in (("None", "Forward") if plan.strategy == "Fsdp" else ("None",)):
        raise UserError(
            f"{where}: the plan has spec.memory.advanced.optimizer.overlap = {plan.optimizer.overlap}, which does not "
            f"work with this strategy; {PLAN_AGAIN}"
        )
    named = dict(model.named_parameters())
    parameters = {
        segment: [parameter_shape(named[name], name in model.tied) for name in names]
        for segment, names in model.parameters_of().items()
    }
    if problem := sharding_problem(plan.strategy, plan.device, world.size, parameters):
        raise UserError(f"{where}: {problem}")


def tie(model: Chain) -> None:
    """Replaces each alias by its owner's parameter, as DeepSpeed requires; autograd then adds their gradients."""
    for alias, owner in model.tied.items():
        module, _, name = alias.rpartition(".")
        model.get_submodule(module).register_parameter(name, model.get_parameter(owner))


def divide(
    plan: MemoryPlan,
    model: Chain,
    world: World,
    settings: Hyperparameters,
    tiers: DeviceTier,
    make: MakeOptimizer,
    wire: torch.dtype,
) -> DividedModel:
    """Allocates memory for `model`, which has none yet, sharded as the plan's strategy says. Every rank calls it."""
    reject(plan, model, world)
    deepspeed, adopt = _deepspeed()
    tie(model)
    stage = STAGES[plan.strategy]
    config = engine_config(stage, plan, next(model.parameters()).dtype)
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    if stage == 3:
        largest = max(segment_bytes(module) for _, module in model.segments)
        tiers.ledger.charge("parameters", -(-nbytes // world.size) + NUM_GATHERED_SEGMENTS * largest)
        with peers("the other ranks to divide the model"):
            deepspeed.zero.Init(module=_OneByOne(model), config_dict_or_path=config)
    else:
        tiers.ledger.charge("parameters", nbytes)
        allocate(model)
    with peers("the other ranks to divide the model"):
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=base_optimizer(model, settings), config=config, dist_init_required=False
        )
    optimizer = adopt(engine, world, make, tiers.ledger, wire, plan.optimizer.num_threads, settings)
    return DividedModel(engine, optimizer, GatheredParameters(model) if stage == 3 else None, guarded(in_order))


def segment_bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


class _OneByOne(nn.Module):
    """Stands in for a model without memory while ZeRO-3 shards it. Each parameter gets its memory when DeepSpeed asks
    for it, so no rank ever holds the whole model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                self._places.setdefault(id(parameter), []).append((module, name))

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        for places in self._places.values():
            module, name = places[0]
            made = Parameter(torch.zeros_like(module.get_parameter(name), device="cpu"))
            for module, name in places:
                module.register_parameter(name, made)
            yield made


def base_optimizer(model: nn.Module, settings: Hyperparameters) -> torch.optim.AdamW:
    """Tells DeepSpeed which parameters decay: matrices. It never computes an update."""
    parameters = list(model.parameters())
    shapes = [getattr(parameter, "ds_shape", parameter.shape) for parameter in parameters]
    matrices = [p for p, shape in zip(parameters, shapes, strict=True) if len(shape) >= 2]
    vectors = [p for p, shape in zip(parameters, shapes, strict=True) if len(shape) < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], betas=(settings.beta1, settings.beta2), eps=settings.eps
    )


def engine_config(stage: int, plan: MemoryPlan, dtype: torch.dtype) -> dict[str, Any]:
    """Returns DeepSpeed's configuration. For DeepSpeed every micro-batch is a boundary, because we sum over
    micro-batches, set the learning rate and clip ourselves. Its own buckets are never used, so they are small."""
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 2, "overlap_comm": False}
    if stage == 3:
        zero |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
            "memory_efficient_linear": False,  # DeepSpeed's own product rounds before it adds the bias
        }
    return {
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": 1,
        "steps_per_print": None,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": zero,
    }


def _deepspeed() -> tuple[Any, Any]:
    """Returns DeepSpeed, and `adopt`, which uses it. Raises UserError if DeepSpeed is missing or has another
    version."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    need("deepspeed")
    import deepspeed  # noqa: PLC0415 - seconds, and only these strategies need it

    check_version(deepspeed.__version__)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)  # the import changes the level
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else compiled now, if a compiler exists
    deepspeed.init_distributed(dist_init_required=False, auto_mpi_discovery=False, verbose=False)
    from .deepspeed.adopted import adopt  # noqa: PLC0415

    return deepspeed, adopt


def guarded(order: MicroBatchOrder) -> MicroBatchOrder:
    """Returns `order`, in which hooks exchange by themselves, with failures of an exchange reported as a lost rank."""

    def run(run: Run, phase: TimedPhase, micro_batches: Mapping[int, Batch], num_tokens: int) -> Passes:
        with lost_peers():
            return (yield from order(run, phase, micro_batches, num_tokens))

    return run


@contextmanager
def lost_peers() -> Iterator[None]:
    """As distributed.peers, for code that may also fail by itself: only errors of gloo and NCCL mean that a rank was
    lost."""
    try:
        yield
    except RuntimeError as error:
        if not any(library in str(error) for library in ("gloo", "NCCL")):
            raise
        with peers("the other ranks' parameters"):
            raise
