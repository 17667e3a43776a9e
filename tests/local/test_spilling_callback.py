"""Spilling in an unmodified Trainer of `transformers`: the same weights, with the activations on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from spillway.errors import UserError
from spillway_trainer.activation_spill.alone import Spilling
from spillway_trainer.activation_spill.callback import SpillingCallback


class Seen(TrainerCallback):
    """Records the logs that a tracker after the spilling callback gets."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))


def trained(directory: Path, callbacks: list[Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    sizes = LlamaConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=160
    )
    rows = torch.randint(0, 64, (16, 256), generator=torch.Generator().manual_seed(2))
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    arguments = TrainingArguments(
        output_dir=str(directory), max_steps=4, per_device_train_batch_size=4, logging_steps=1, report_to=[],
        use_cpu=True, save_strategy="no", eval_strategy="steps", eval_steps=2, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        model=LlamaForCausalLM(sizes), args=arguments, train_dataset=data, eval_dataset=data[:4], callbacks=callbacks
    )
    trainer.train()
    assert trainer.model is not None and "forward" not in vars(trainer.model), "as it was"
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.ci
def test_a_trainer_of_transformers_spills_and_has_the_same_weights(tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", [])
    callback = SpillingCallback(tmp_path, nvme_bytes="256Mi", minimum_bytes=1 << 12)
    seen = Seen()
    spilled = trained(tmp_path / "spilled", [callback, seen])
    assert plain.keys() == spilled.keys()
    assert all(torch.equal(plain[name], spilled[name]) for name in plain)
    assert callback.spilling is not None
    stats = callback.spilling.stats()
    assert stats.written_bytes > 0 and stats.read_bytes > 0
    assert (stats.held_on_nvme_bytes, stats.held_in_memory_bytes) == (0, 0)
    assert len(seen.logs) > 4 and all("spilled_gib" in line for line in seen.logs)


def test_a_training_that_raised_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    callback, model = SpillingCallback(tmp_path, nvme_bytes="256Mi"), torch.nn.Linear(2, 2)
    callback.on_train_begin(None, None, None, model=model)
    first = callback.spilling
    callback.on_train_begin(None, None, None, model=model)  # without on_train_end, as after an exception
    assert first is not None and callback.spilling is not first
    with pytest.raises(UserError, match="this Spilling is closed"), first:
        pass
    callback.on_train_end(None, None, None)
    assert "forward" not in vars(model)


@pytest.mark.parametrize("size", ["16 GB", "much", "-1Gi"])
def test_a_size_that_is_no_quantity_is_named(tmp_path: Path, size: str) -> None:
    with pytest.raises(UserError, match=f"nvme_bytes = '{size}'"):
        Spilling(torch.nn.Linear(2, 2), tmp_path, nvme_bytes=size)
