"""A real but small problem: predict the next byte of Python source from the eight bytes before it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch import Tensor


class NextByte(torch.nn.Module):
    """A model in which each block of the embedding has rows of frequent and of rare bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(256, 16)
        self.hidden = torch.nn.Linear(128, 64)
        self.norm = torch.nn.LayerNorm(64)
        self.head = torch.nn.Linear(64, 256)

    def forward(self, context: Tensor) -> Tensor:
        return self.head(self.norm(torch.relu(self.hidden(self.embedding(context).flatten(1)))))  # type: ignore[no-any-return]


def losses_of(model: NextByte, num_steps: int) -> Iterator[float]:
    """Yields the loss of each step, with its gradients in `model`. The caller updates the model before it asks for the
    next."""
    with open(os.__file__, "rb") as source:
        text = torch.frombuffer(bytearray(source.read()), dtype=torch.uint8).long()
    for _ in range(num_steps):
        at = torch.randint(8, len(text), (64,))
        context = text[at[:, None] + torch.arange(-8, 0)]
        loss = torch.nn.functional.cross_entropy(model(context), text[at])
        model.zero_grad()
        loss.backward()
        yield float(loss.detach())
