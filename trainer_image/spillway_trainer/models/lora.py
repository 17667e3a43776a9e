"""Low-rank adapters by peft, added to a model of `transformers` before it becomes a Chain."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from peft import LoraConfig, TaskType, inject_adapter_in_model
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from spillway.api.model import Lora
from spillway.errors import UserError

from .structure import is_masked

ADAPTER = "default"
PRODUCTS = (nn.Linear, Conv1D)


def add_adapters(model: Any, lora: Lora) -> None:
    """Adds adapters, on device meta like everything else, to each module of a PreTrainedModel that `lora` names, and
    freezes everything else.

    Raises UserError if a name matches nothing, or a module that is no matrix product.
    """
    targets = lora.target_modules or attention_of(model)
    _check_targets(model, targets)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft divides it by the rank, whatever its type
        lora_dropout=0.0,
        target_modules=sorted(targets),
        fan_in_fan_out=any(type(module) is Conv1D for name in targets for module in _modules_named(model, name)),
        task_type=_task(model),
    )
    with torch.device("meta"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*meta device.*")
        inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    model.peft_config = {ADAPTER: config}


def attention_of(model: PreTrainedModel) -> tuple[str, ...]:
    """Returns the names of the matrix products inside modules whose class is an attention. Each name is as short as it
    can be without matching another module.

    Raises UserError if there are none.
    """
    modules = dict(model.named_modules())
    attentions = [f"{name}." for name, module in modules.items() if "Attention" in type(module).__name__]
    products = {
        name
        for name, module in modules.items()
        if isinstance(module, PRODUCTS) and any(name.startswith(attention) for attention in attentions)
    }
    if not products:
        raise UserError(
            f"spec.model.lora: {type(model).__name__} has no linear layers in its attention modules, where adapters go "
            "by default; name the modules to adapt in spec.model.lora.targetModules"
        )
    targets: dict[str, None] = {}
    for name in sorted(products):
        parts = name.split(".")
        suffixes = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        short = (s for s in suffixes if all(other in products for other in modules if f".{other}".endswith(f".{s}")))
        targets[next(short)] = None
    return tuple(targets)


def _modules_named(model: PreTrainedModel, target: str) -> list[nn.Module]:
    """Returns the modules that peft matches: those whose name ends with the whole parts of `target`."""
    return [module for name, module in model.named_modules() if f".{name}".endswith(f".{target}")]


def _check_targets(model: PreTrainedModel, targets: tuple[str, ...]) -> None:
    for target in targets:
        found = _modules_named(model, target)
        if not found:
            products = {name.rsplit(".", 1)[-1] for name, m in model.named_modules() if isinstance(m, PRODUCTS)}
            raise UserError(
                f"spec.model.lora.targetModules: {type(model).__name__} has no module {target}; "
                f"choose from {', '.join(sorted(products))}"
            )
        if not all(isinstance(module, PRODUCTS) for module in found):
            kinds = ", ".join(sorted({type(module).__name__ for module in found}))
            raise UserError(
                f"spec.model.lora.targetModules: {target} is {kinds}, but adapters need linear layers; remove it"
            )


def _task(model: PreTrainedModel) -> TaskType | None:
    if model.config.is_encoder_decoder:
        return TaskType.SEQ_2_SEQ_LM
    return None if is_masked(model) else TaskType.CAUSAL_LM
