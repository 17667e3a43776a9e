"""The loss in chunks has the bits of torch's cross entropy over all logits at once: its value and every gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cases.huggingface_models import filled, spec_of
from harness.allocator_peak import allocated_peak
from spillway.planning.model_shape import LOSS_CHUNK_BYTES, loss_chunk_rows
from spillway_trainer.corpus.objective import IGNORED_LABEL
from spillway_trainer.models import loss as losses
from spillway_trainer.models import t5, transformer
from spillway_trainer.models.build import build_model
from spillway_trainer.models.loss import CrossEntropy, plain_token_loss, token_loss
from spillway_trainer.segments import Position, wrap_segments

BATCH, LENGTH, WIDTH, VOCABULARY = 2, 37, 24, 301
LOSS_SCALE = 1024.0
Loss = Callable[[Tensor, Tensor, int], Tensor]
HEADS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, VOCABULARY, bias=False),
    "bias": lambda: nn.Linear(WIDTH, VOCABULARY),
    "soft-capped": lambda: nn.Sequential(nn.Linear(WIDTH, VOCABULARY), nn.Tanh()),
    "softmax": lambda: nn.Sequential(nn.Linear(WIDTH, VOCABULARY), nn.Softmax(-1)),
}
"""The last two need what they returned in backward."""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def batch(length: int = LENGTH, vocabulary: int = VOCABULARY) -> tuple[Tensor, Tensor]:
    """Tokens, and labels of which some are masked."""
    tokens = torch.randint(0, vocabulary, (BATCH, length))
    return tokens, torch.where(torch.rand(BATCH, length) < 0.2, IGNORED_LABEL, tokens)


def in_chunks(num_rows: int) -> Loss:
    def run(logits_BTV: Tensor, labels_BT: Tensor, num_tokens: int) -> Tensor:
        return CrossEntropy.apply(logits_BTV.flatten(0, 1), labels_BT.flatten(), num_rows) / num_tokens

    return run


def bits(head: nn.Module, loss: Loss, dtype: torch.dtype, labels: Tensor) -> list[Tensor]:
    """The loss, and its gradients of the head's input and parameters."""
    torch.manual_seed(1)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype, requires_grad=True)
    parameters = list(head.to(dtype).parameters())
    value = loss(head(x), labels, 59)
    return [value.detach(), *torch.autograd.grad(value * LOSS_SCALE, [x, *parameters])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head", HEADS)
def test_any_number_of_rows_gives_the_bits_of_torchs_own_cross_entropy(head: str, dtype: torch.dtype) -> None:
    made, (_, labels) = HEADS[head](), batch()
    expected = bits(made, plain_token_loss, dtype, labels)
    assert expected[1].count_nonzero() > 0
    for num_rows in (1, 4, 20, 73, 74, 1000):
        found = bits(made, in_chunks(num_rows), dtype, labels)
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True)), num_rows


def test_a_batch_without_labels_has_no_loss_and_no_gradient() -> None:
    labels = torch.full((BATCH, LENGTH), IGNORED_LABEL)
    assert not any(value.any() for value in bits(HEADS["bias"](), in_chunks(8), torch.float32, labels))


def test_the_gradient_takes_the_place_of_the_logits_of_a_product() -> None:
    logits = nn.Linear(WIDTH, VOCABULARY)(torch.randn(BATCH * LENGTH, WIDTH))
    before = logits.detach().clone()
    (gradient,) = torch.autograd.grad(CrossEntropy.apply(logits, batch()[1].flatten(), 8), [logits])
    assert gradient.data_ptr() == logits.data_ptr()
    assert not torch.equal(logits, before)


def test_a_second_backward_is_rejected_where_the_gradient_took_that_place() -> None:
    logits = nn.Linear(WIDTH, VOCABULARY)(torch.randn(BATCH, LENGTH, WIDTH))
    value = in_chunks(8)(logits, batch()[1], 1)
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_what_is_looked_at_in_float32_is_a_few_chunks(tmp_path: Path) -> None:
    """Also in evaluation; the logits themselves, and the gradients of a small input and matrix, come on top."""
    vocabulary, length = 8192, 1024
    head, (_, labels) = nn.Linear(4, vocabulary, dtype=torch.bfloat16), batch(length, vocabulary)
    x = torch.randn(BATCH, length, 4, dtype=torch.bfloat16)
    assert loss_chunk_rows(vocabulary) * 4 * vocabulary == LOSS_CHUNK_BYTES
    logits_bytes = BATCH * length * vocabulary * 2
    trained = allocated_peak(lambda: token_loss(head(x), labels, 1).backward(), tmp_path)
    assert logits_bytes < trained < logits_bytes + 3.2 * LOSS_CHUNK_BYTES
    with torch.no_grad():
        evaluated = allocated_peak(lambda: token_loss(head(x), labels, 1).item(), tmp_path)
    assert logits_bytes < evaluated < logits_bytes + 2.2 * LOSS_CHUNK_BYTES


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bert", "t5"])
@pytest.mark.parametrize("lora", [{}, {"lora": {"rank": 2}}], ids=["trained", "adapters"])
def test_a_model_has_the_same_bits_with_its_loss_in_chunks(
    architecture: str, lora: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for num_rows in (1 << 20, 4):
        monkeypatch.setattr(losses, "loss_chunk_rows", lambda _, num_rows=num_rows: num_rows)
        chain = filled(build_model(spec_of(architecture, "bfloat16", **lora)))
        wrap_segments(chain.segments, Position(seed=0), None, autocast=chain.autocast)
        torch.manual_seed(2)
        tokens, labels = batch(16, chain.vocab_size)
        if architecture == "t5":
            labels = tokens
        value = chain(tokens, labels, 17)
        value.backward()
        found.append([value.detach(), *(p.grad for p in chain.parameters() if p.grad is not None)])
    assert len(found[0]) > 1
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert transformer.token_loss is t5.token_loss is token_loss
