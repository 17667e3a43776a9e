"""Low-rank adapters by peft, put into a model of `transformers` before it becomes a Chain."""

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
from spillway.planning.model_shape import ATTENTION_MODULES

ADAPTER = "default"


def add_adapters(model: Any, lora: Lora) -> None:
    """Adapters, on device meta like everything else, beside each module of a PreTrainedModel that `lora` names; all
    else is frozen.

    Raises UserError when a name matches nothing, or what is no matrix product.
    """
    _check_targets(model, lora.target_modules)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft divides it by the rank, whatever its type
        lora_dropout=0.0,
        target_modules=sorted(lora.target_modules or _attention_of(model)),
        fan_in_fan_out=model.config.model_type == "gpt2",
        task_type=_task(model),
    )
    with torch.device("meta"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*meta device.*")
        inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    model.peft_config = {ADAPTER: config}


def _attention_of(model: PreTrainedModel) -> list[str]:
    return [target for target in ATTENTION_MODULES if _modules_named(model, target)]


def _modules_named(model: PreTrainedModel, target: str) -> list[nn.Module]:
    """As peft matches them: the whole last part of a name, or several."""
    return [module for name, module in model.named_modules() if f".{name}".endswith(f".{target}")]


def _check_targets(model: PreTrainedModel, targets: tuple[str, ...]) -> None:
    for target in targets:
        found = {type(module) for module in _modules_named(model, target)}
        if not found:
            products = {
                name.rsplit(".", 1)[-1] for name, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D)
            }
            raise UserError(
                f"spec.model.lora.targetModules: {type(model).__name__} has no module {target}; "
                f"it has {', '.join(sorted(products))}"
            )
        if not found <= {nn.Linear, Conv1D}:
            kinds = ", ".join(sorted(kind.__name__ for kind in found))
            raise UserError(f"spec.model.lora.targetModules: {target} is {kinds}; adapters need a matrix product")


def _task(model: PreTrainedModel) -> TaskType | None:
    tasks = {"t5": TaskType.SEQ_2_SEQ_LM, "bert": None}
    return tasks.get(model.config.model_type, TaskType.CAUSAL_LM)
