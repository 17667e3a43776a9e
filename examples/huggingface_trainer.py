"""A script as it is written without Spillway: a Hugging Face Trainer that goes on from its last checkpoint.

    python examples/huggingface_trainer.py --output runs/trainer --steps 40

examples/script.yaml runs it in a cluster. It trains a small GPT-2 on the bytes of text files.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

LENGTH = 128


class Bytes(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """The files' bytes in rows of LENGTH."""

    def __init__(self, files: list[Path]) -> None:
        content = b"".join(file.read_bytes() for file in files)
        rows = len(content) // LENGTH
        self.rows = torch.frombuffer(bytearray(content[: rows * LENGTH]), dtype=torch.uint8).view(rows, LENGTH).long()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[row], "labels": self.rows[row]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(sysconfig.get_paths()["stdlib"])
    parser.add_argument("--text", type=Path, default=here, help="a directory of .md, .py and .txt files; Python's own")
    parser.add_argument("--output", required=True, help="for checkpoints")
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()

    files = sorted(file for file in given.text.rglob("*") if file.suffix in (".md", ".py", ".txt") and file.is_file())
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=2, n_positions=LENGTH))
    arguments = TrainingArguments(
        output_dir=given.output, max_steps=given.steps, per_device_train_batch_size=4, logging_steps=1, save_steps=5,
        save_total_limit=2, disable_tqdm=True, seed=1,
    )  # fmt: skip
    last = get_last_checkpoint(given.output) if Path(given.output).is_dir() else None
    Trainer(model=model, args=arguments, train_dataset=Bytes(files)).train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main()
