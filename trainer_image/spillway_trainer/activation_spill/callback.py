"""SpillingCallback: Spilling for the Trainer of `transformers`, in one line.

Trainer(model=model, ..., callbacks=[SpillingCallback("/mnt/nvme", nvme_bytes="16Gi")]).train()
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from spillway.errors import UserError

from .alone import Spilling


class SpillingCallback(TrainerCallback):
    """Spills what training saves for backward to a file in `directory`; evaluation saves nothing. The arguments are
    those of `Spilling`. Adds `spilled_gib`, the GiB written so far, to the logs; `spilling.stats()` has the other
    figures."""

    def __init__(self, directory: str | Path, **sizes: Any) -> None:
        self._directory, self._sizes = directory, sizes
        self._model: nn.Module | None = None
        self.spilling: Spilling | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any) -> None:
        """Raises UserError when the model or the directory cannot be spilled."""
        if model is None:
            raise UserError(
                "SpillingCallback: on_train_begin was called without a model; pass the callback to "
                "Trainer(callbacks=...), which calls it with the model"
            )
        self.on_train_end(args, state, control)  # which the Trainer does not call if training raises
        self.spilling, self._model = Spilling(model, self._directory, **self._sizes), model
        # Set on the object, not the class: when on_train_end removes it, the class's forward takes effect again.
        model.forward = spilled(self.spilling, model.forward)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if self.spilling is not None and logs is not None:
            logs["spilled_gib"] = round(self.spilling.stats().written_bytes / (1 << 30), 3)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.spilling is not None and self._model is not None:
            del self._model.forward
            self.spilling.close()
            self._model = None


def spilled(spilling: Spilling, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `forward` to run inside `spilling` whenever gradients are enabled, so that a backward may follow."""

    def inside(*given: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*given, **named)
        with spilling:
            return forward(*given, **named)

    return inside
