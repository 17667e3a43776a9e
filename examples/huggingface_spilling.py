"""Fine-tunes a model of `transformers` with its activations on disk: the two lines that matter are marked.

    python examples/huggingface_spilling.py gpt2 book.txt --spill /mnt/nvme --steps 100

The model may be a name or a directory that `transformers` can load; the text is any file. Loss and weights have the
same bits as without the marked lines.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from spillway_trainer.activation_spill import Spilling

GIB = 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--spill", default=".", metavar="DIRECTORY", help="on the volume to spill to")
    parser.add_argument("--nvme-gib", type=float, default=8.0, help="of that volume at most")
    parser.add_argument("--keep-gib", type=float, default=0.5, help="of activations may stay in memory")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=4)
    given = parser.parse_args()

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(given.model).train()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    with open(given.text, encoding="utf-8") as file:
        tokens = torch.tensor(tokenizer(file.read()).input_ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
    size = given.batch_size * given.sequence_length

    spilling = Spilling(  # 1
        model, given.spill, nvme_bytes=int(given.nvme_gib * GIB), device_bytes=int(given.keep_gib * GIB)
    )
    for step in range(given.steps):
        start = step * size % max(1, tokens.numel() - size)
        batch = tokens[start : start + size].view(given.batch_size, given.sequence_length)
        with spilling:  # 2
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}  loss {loss.item():.6f}", flush=True)
    del loss
    written = spilling.lanes.moved_bytes().get("nvme_write", 0)
    print(f"{written / 2**20:.1f} MiB were on disk for a while")
    spilling.close()


if __name__ == "__main__":
    main()
