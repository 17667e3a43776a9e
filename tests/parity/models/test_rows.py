"""A document padded to a row has the loss and the gradients that it has alone: no bit depends on the padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cases.huggingface_models import VOCABULARY, small_model
from spillway_trainer.corpus.objective import IGNORED_LABEL

LENGTHS = (5, 16)
"""Of the documents in a batch: one is padded to the other."""


@pytest.mark.parametrize(
    ("architecture", "model"),
    [("llama", {}), ("gpt2", {}), ("llama", {"lora": {"rank": 2}})],
    ids=["llama", "gpt2", "adapters"],
)
def test_padding_changes_neither_loss_nor_gradients(architecture: str, model: dict[str, object]) -> None:
    generator = torch.Generator().manual_seed(3)
    documents = [torch.randint(0, VOCABULARY, (length + 1,), generator=generator) for length in LENGTHS]
    found: list[list[Tensor]] = []
    for padding in (0, VOCABULARY - 1):
        chain = small_model(architecture, **model)
        tokens = torch.full((len(LENGTHS), max(LENGTHS)), padding)
        labels = torch.full_like(tokens, IGNORED_LABEL)
        for row, document in enumerate(documents):
            tokens[row, : LENGTHS[row]], labels[row, : LENGTHS[row]] = document[:-1], document[1:]
        loss = chain(tokens, labels, sum(LENGTHS))
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in chain.parameters() if p.grad is not None)])
    assert len(found[0]) > 1
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
