"""The rivals of end_to_end.py and exchange.py: a process that trains until it is killed and writes a line to a file
after each step.

    python end_to_end_loops.py '{"loop": "torch", "model": {...}, "tokens": 512, "threads": 1, "pool": true, ...}'

loop     `torch`: a bare loop of forward, backward, clip_grad_norm_ and fused AdamW. `trainer`: Hugging Face's Trainer
         with the same optimizer. `ddp`: the bare loop with DistributedDataParallel and `micro_batches` a step, on two
         ranks (this process starts the other one), which meet at `port`. `deepspeed`: DeepSpeed's engine with the
         configuration in `engine`.
pool     whether torch's tensors come from Spillway's pool, with its environment; if not, torch's defaults apply.
checkpointing   whether to call `gradient_checkpointing_enable()`
"""

# ruff: noqa: E402 - what torch reads at import is set first
from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

GIVEN: dict[str, Any] = json.loads(sys.argv[1])
if GIVEN["pool"]:
    from spillway_trainer import environment  # noqa: F401 - before torch is imported
import torch
import transformers
from torch import Tensor
from torch.utils.data import Dataset

import rivals
from spillway.api.model import ModelConfig
from spillway_trainer.kernels import native
from spillway_trainer.models import families


def batches(tokens: int, vocabulary: int) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    while True:
        yield sample(generator, tokens, vocabulary)


def sample(generator: torch.Generator, tokens: int, vocabulary: int) -> dict[str, Tensor]:
    """Draws one sequence. As in the trainer, t5 reads one half of the tokens and predicts the other."""
    ids = torch.randint(1, vocabulary, (1, tokens), generator=generator)
    if GIVEN["model"]["architecture"] == "t5":
        return {"input_ids": ids[:, : tokens // 2], "labels": ids[:, tokens // 2 :]}
    return {"input_ids": ids, "labels": ids}


def made() -> transformers.PreTrainedModel:
    sizes = ModelConfig.model_validate(GIVEN["model"])
    config = families.config_of(sizes, GIVEN["tokens"])
    config.use_cache = False
    torch.manual_seed(1)
    model = families.class_of(config.model_type, "model")(config).to(getattr(torch, GIVEN["dtype"]))
    if GIVEN["checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def bare(model: Any, tell: Callable[[], None], each: Callable[[dict[str, Tensor]], None] | None = None) -> None:
    """Trains without end. `each` replaces the plain forward and backward of a batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for batch in batches(GIVEN["tokens"], model.config.vocab_size):
        if each is None:
            model(**batch).loss.backward()
        else:
            each(batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tell()


def ddp(model: Any, tell: Callable[[], None]) -> None:
    rank, last = GIVEN.get("rank", 0), GIVEN["micro_batches"] - 1
    if rank == 0:
        subprocess.Popen([sys.executable, __file__, json.dumps({**GIVEN, "rank": 1, "file": os.devnull})])
    torch.distributed.init_process_group(
        "gloo", f"tcp://127.0.0.1:{GIVEN['port']}", rank=rank, world_size=2, timeout=timedelta(hours=1)
    )
    wrapped = torch.nn.parallel.DistributedDataParallel(model)

    def each(batch: dict[str, Tensor]) -> None:
        for number in range(last + 1):
            with nullcontext() if number == last else wrapped.no_sync():
                (wrapped(**batch).loss / (last + 1)).backward()

    bare(model, tell, each)


class Samples(Dataset[dict[str, Tensor]]):
    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        found = sample(torch.Generator().manual_seed(index), GIVEN["tokens"], self.vocabulary)
        return {name: tensor[0] for name, tensor in found.items()}


def hugging_face(model: Any, tell: Callable[[], None]) -> None:
    class Tell(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            tell()

    arguments = transformers.TrainingArguments(
        output_dir=str(Path(GIVEN["file"]).parent), max_steps=1 << 20, per_device_train_batch_size=1, use_cpu=True,
        logging_strategy="no", save_strategy="no", optim="adamw_torch_fused", report_to=[], disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=Samples(model.config.vocab_size), callbacks=[Tell()])
    trainer.train()


def engine(model: Any, tell: Callable[[], None]) -> None:
    rivals.deepspeed()
    import deepspeed  # noqa: PLC0415

    deepspeed.init_distributed("gloo")
    made_engine, *_ = deepspeed.initialize(model=model, config=GIVEN["engine"])
    for batch in batches(GIVEN["tokens"], model.config.vocab_size):
        made_engine.backward(made_engine(**batch).loss)
        made_engine.step()
        tell()


def main() -> None:
    torch.set_num_threads(GIVEN["threads"])
    if GIVEN["pool"]:
        native.return_freed_memory()
    file = os.open(GIVEN["file"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell() -> None:
        os.write(file, b"\n")
        if GIVEN["pool"]:
            native.mark_tensor_pool()

    {"torch": bare, "ddp": ddp, "trainer": hugging_face, "deepspeed": engine}[GIVEN["loop"]](made(), tell)


if __name__ == "__main__":
    main()
