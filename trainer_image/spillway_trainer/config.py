"""Converts fields of the manifest to the trainer's own settings: one function for each part of the trainer, without
defaults of their own."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch

from spillway.api.job_file import JobFile
from spillway.api.training import LossScale as LossScaleFields
from spillway.api.training_job import TrainingJobSpec
from spillway.errors import UserError
from spillway.parameter_groups import Group, groups_by_name
from spillway.plan import PLAN_AGAIN, MemoryPlan, Policy, Tier

from .models.build import DTYPES
from .models.chain import Chain
from .optimizer.loss_scale import LossScaler, ScaleRule
from .optimizer.plain import Hyperparameters
from .optimizer.schedule import LearningRate
from .ranks import World
from .trainer import LoopSettings


def gradient_wire(spec: TrainingJobSpec) -> torch.dtype:
    """Returns the type in which gradients travel between ranks."""
    return DTYPES[spec.model.precision.gradient_reduce]


def hyperparameters(spec: TrainingJobSpec, model: Chain) -> Hyperparameters:
    """Returns the optimizer's settings. Raises UserError for a group that no trained parameter of `model` belongs
    to."""
    optimizer = spec.training.optimizer
    groups = [Group(group.match, group.learning_rate_factor, group.weight_decay) for group in optimizer.groups]
    trained = [name for name, p in model.named_parameters() if p.requires_grad and name not in model.tied]
    beta1, beta2 = optimizer.betas or (0.0, 0.0)
    return Hyperparameters(
        beta1=beta1,
        beta2=beta2,
        eps=optimizer.eps or 0.0,
        weight_decay=optimizer.weight_decay or 0.0,
        momentum=optimizer.momentum or 0.0,
        rule=optimizer.rule,
        moments=optimizer.moment_type,
        groups=groups_by_name(groups, trained, model.tied),
    )


def loss_scale(spec: TrainingJobSpec) -> LossScaler:
    """Returns a scaler that scales the loss only if gradients are float16."""
    if spec.model.precision.compute != "float16":
        return LossScaler()
    fields = spec.training.loss_scale or LossScaleFields()
    return LossScaler(ScaleRule(float(fields.initial), fields.growth_interval, float(fields.minimum)))


def learning_rate(spec: TrainingJobSpec) -> LearningRate:
    schedule, steps = spec.training.schedule, spec.training.num_steps
    return LearningRate(
        name=schedule.name,
        peak=spec.training.optimizer.learning_rate,
        num_steps=steps,
        warmup_steps=schedule.warmup_steps if not schedule.warmup_ratio else math.ceil(schedule.warmup_ratio * steps),
        final_fraction=schedule.final_fraction,
    )


def check_world(job: JobFile, world: World) -> None:
    """Raises UserError unless this process is one of as many ranks as job.json asks for."""
    if world.size != job.world_size:
        raise UserError(
            f"job.json asks for {job.world_size} ranks ({job.num_nodes} nodes x {job.ranks_per_node}), but the "
            f"environment variable WORLD_SIZE is {world.size}; start the ranks with python -m spillway_trainer.launch"
        )


def check_plan(job: JobFile, plan: MemoryPlan, num_segments: int) -> None:
    """Raises UserError if `plan` was made for another job, for a model without exactly `num_segments` segments, or by
    another planner, or if it cannot be executed yet."""
    spec = job.spec
    size, number, ranks = plan.micro_batch_size, plan.num_micro_batches, plan.world_size
    activations = plan.activations
    tiers = [tier.value for tier in Tier if tier not in plan.bytes or tier not in plan.budget]
    nvme = Policy.NVME in {*activations.uses, plan.parameters.boundaries} or Tier.NVME in plan.parameters.homes
    wrong = {
        f"activation policies of {len(activations.answers)} segments": len(activations.answers)
        not in (0, num_segments),
        f"places for the parameters of {len(plan.parameters.homes)} segments": len(plan.parameters.homes)
        not in (0, num_segments),
        f"{number} micro-batches of {size} per step on each of {ranks} ranks": size * number * ranks
        != spec.training.global_batch_size,
        f"{plan.world_size} ranks": plan.world_size != job.world_size,
        f"no bytes or budget of {', '.join(tiers)}": bool(tiers),
        "activations or parameters on NVMe, but no bytes on NVMe": nvme
        and not tiers
        and not plan.bytes[Tier.NVME].total,
    }
    if found := [what for what, is_wrong in wrong.items() if is_wrong]:
        raise UserError(
            f"the plan of {plan.job} has {'; '.join(found)}, but the job has {num_segments} segments (groups of "
            f"layers), a global batch of {spec.training.global_batch_size} sequences and {job.world_size} ranks; "
            f"{PLAN_AGAIN}"
        )
    if plan.device == "Cuda" and plan.strategy == "Zero3":
        raise UserError(f"the plan of {plan.job} has strategy Zero3 on Cuda devices, where that is Fsdp; {PLAN_AGAIN}")


def loop_settings(spec: TrainingJobSpec, plan: MemoryPlan, further_evaluations: Collection[int] = ()) -> LoopSettings:
    evaluation, stopping = spec.data.evaluation, spec.training.early_stopping
    return LoopSettings(
        num_steps=spec.training.num_steps,
        micro_batch_size=plan.micro_batch_size,
        num_micro_batches=plan.num_micro_batches,
        gradient_clipping=spec.training.gradient_clipping or None,
        skip_non_finite=spec.training.non_finite == "SkipStep",
        checkpoint_every=spec.checkpoint.every_steps,
        evaluate_every=evaluation.every_steps if evaluation else 0,
        further_evaluations=further_evaluations,
        patience=spec.training.patience,
        min_delta=0.0 if stopping is None else stopping.min_delta,
        keeps_best=spec.checkpoint.keep_best,
    )
