"""Checks the features of DeepSpeed that we depend on, before the first step.

An engine with unsupported settings would train wrongly without an error, or fail in the middle of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from spillway.errors import UserError

from ...optimizer.plain import Hyperparameters

FIRST_VERSION, TOO_NEW_VERSION = (0, 19, 8), (0, 20)
"""Earlier versions lack names that adopted.py uses; later ones are untested."""

Engine = Any
"""deepspeed.DeepSpeedEngine, which has no types."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the support matrix."""

    field: str
    """Its name in DeepSpeed's configuration."""
    found: Callable[[Engine], str]
    """Returns the unsupported setting of an engine; empty if there is none."""
    instead: str


def check_version(version: str) -> None:
    """Raises UserError for a version of DeepSpeed for which the adapter was not made."""
    numbers = tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".")[:3] if part.isdecimal())
    if not FIRST_VERSION <= numbers < TOO_NEW_VERSION:
        raise UserError(
            f"DeepSpeed {version}: strategies Zero1, Zero2 and Zero3 work only with DeepSpeed "
            f"{_dotted(FIRST_VERSION)} or later, below {_dotted(TOO_NEW_VERSION)}; install a version in this range, or "
            "set spec.parallelism.strategy: Ddp"
        )


def check_engine(engine: Engine) -> None:
    """Raises UserError that lists every row of SUPPORT that the engine violates."""
    import deepspeed  # noqa: PLC0415 - seconds

    check_version(deepspeed.__version__)
    wrong = [f"  {rule.field}: {said}; {rule.instead}" for rule in SUPPORT if (said := rule.found(engine))]
    if wrong:
        raise UserError(
            "adopt(): Spillway does not support these settings of the DeepSpeed engine:\n" + "\n".join(wrong)
        )


def check_settings(engine: Engine, settings: Hyperparameters) -> None:
    """Raises UserError if the engine's AdamW, which checkpoints are written from and read into, has other settings."""
    groups = engine.basic_optimizer.param_groups
    theirs = (*groups[0]["betas"], groups[0]["eps"])
    decays = sorted({group["weight_decay"] for group in groups} - {0.0})
    ours = (settings.beta1, settings.beta2, settings.eps)
    if theirs != ours or decays not in ([], [settings.weight_decay]):
        raise UserError(
            f"adopt(): this DeepSpeed engine's AdamW has (beta1, beta2, eps) {theirs} and weight_decay {decays}, but "
            f"adopt() was given {ours} and {settings.weight_decay}; use the same values for the engine and for adopt()"
        )


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _stage(engine: Engine) -> str:
    stage = int(engine.zero_optimization_stage())
    return "" if stage in (1, 2, 3) else f"{stage}"


def _dtypes(engine: Engine) -> str:
    dtypes = {parameter.dtype for parameter in engine.module.parameters()}
    wrong = dtypes - {torch.bfloat16, torch.float32} if len(dtypes) == 1 else dtypes
    return ", ".join(sorted(map(str, wrong)))


def _without_values(engine: Engine) -> str:
    """Checks ZeRO-3's parts, because the parameters themselves are empty there."""
    named = engine.module.named_parameters()
    found = [name for name, parameter in named if getattr(parameter, "ds_tensor", parameter).is_meta]
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"{found[0]}{more} on the meta device" if found else ""


def _loss_scale(engine: Engine) -> str:
    """Finds loss scaling: a section fp16, whatever the parameters' type, or a script's own scaler."""
    own = getattr(engine.optimizer, "custom_loss_scaler", False)
    return "fp16.enabled" if engine.fp16_enabled() else "a custom loss scale" if own else ""


def _gradients(engine: Engine) -> str:
    """Finds changes that DeepSpeed would make to gradients in their exchange, which Spillway now does."""
    asked = {
        "prescale_gradients": not engine.postscale_gradients(),
        "gradient_predivide_factor": engine.gradient_predivide_factor() != 1.0,
        "communication_data_type": engine._config.communication_data_type is not None,
    }
    return ", ".join(name for name, used in asked.items() if used)


def _optimizer(engine: Engine) -> str:
    kind = type(engine.basic_optimizer)
    return "" if kind is torch.optim.AdamW else f"{kind.__module__}.{kind.__qualname__}"


def _groups(engine: Engine) -> str:
    groups = engine.basic_optimizer.param_groups
    settings = {(tuple(group["betas"]), group["eps"]) for group in groups}
    decays = {group["weight_decay"] for group in groups} - {0.0}
    special = any(group.get("amsgrad") or group.get("maximize") for group in groups)
    return "settings that differ, amsgrad or maximize" if len(settings) > 1 or len(decays) > 1 or special else ""


def _offload(engine: Engine) -> str:
    found = {"offload_optimizer": engine.zero_offload_optimizer(), "offload_param": engine.zero_offload_param()}
    return ", ".join(name for name, config in found.items() if config is not None and config.device != "none")


def _parallel(engine: Engine) -> str:
    sizes = {"model": engine.mp_world_size, "sequence": engine.sequence_parallel_size}
    return ", ".join(f"{kind} parallel, {size} ranks" for kind, size in sizes.items() if size > 1)


def _special(engine: Engine) -> str:
    stage3 = {
        "zenflow": engine.zenflow,
        "super_offload": engine.super_offload(),
        "zero_hpz_partition_size": engine.zero_hpz_partition_size() > 1,
        "zero_quantized_weights": engine.zero_quantized_weights(),
        "zero_quantized_gradients": engine.zero_quantized_gradients(),
        "elastic_checkpoint": engine.zero_elastic_checkpoint(),
        "mixture of experts": engine.has_moe_layers,
        "torch_autocast": engine.torch_autocast_enabled(),
        "bf16_master_weights_and_grads": engine._config.bfloat16_config.bf16_master_weights_and_grads,
        "compile": engine.is_compiled or engine.is_deepcompile_enabled(),
    }
    return ", ".join(name for name, used in stage3.items() if used)


SUPPORT = (
    Rule("zero_optimization.stage", _stage, "use 1, 2 or 3"),
    Rule(
        "fp16, bf16",
        _dtypes,
        "give all parameters one type, bfloat16 or float32; float16 is not possible, because it needs loss scaling",
    ),
    Rule("model", _without_values, "give its parameters values before deepspeed.initialize"),
    Rule("loss scale", _loss_scale, "leave it out and use bf16, because an adopted engine does not scale the loss"),
    Rule(
        "gradients",
        _gradients,
        "leave it out, because Spillway itself sums gradients, in float32 or in the type given to adopt",
    ),
    Rule("optimizer", _optimizer, "give deepspeed.initialize a torch.optim.AdamW with adopt's settings"),
    Rule(
        "optimizer's parameter groups", _groups, "groups may differ only in weight_decay, which must be one value or 0"
    ),
    Rule("zero_optimization", _offload, "leave it out, because Spillway's plan decides where states are"),
    Rule("parallelism", _parallel, "use data parallelism only"),
    Rule("features", _special, "leave it out"),
)
