"""Rows of several documents: each is computed as if it were alone."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from cases.huggingface_models import SIZES, VOCABULARY, filled, of_structure
from spillway.errors import UserError
from spillway_trainer.corpus.objective import IGNORED_LABEL
from spillway_trainer.corpus.packing import Documents
from spillway_trainer.inspect import shape_of_chain
from spillway_trainer.models import documents as packed
from spillway_trainer.models.families import chain_of
from spillway_trainer.models.huggingface import HuggingFaceChain

T = 24
LENGTHS = ((13, 1, 10), (7, 17))
EXPERTS = ("mixtral", "qwen3_moe")
FAMILIES = ("llama", "gpt2", "opt", "gpt_neox", "phi3", "cohere", "gemma3_text", "mistral", *EXPERTS)


def packing(name: str, dtype: torch.dtype = torch.float32) -> HuggingFaceChain:
    return filled(chain_of(of_structure(name), dtype, packed_length=T)).eval()  # type: ignore[return-value]


def batch(seed: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(0, VOCABULARY, (2, len(LENGTHS), T), generator=generator)
    return tokens, labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.3, IGNORED_LABEL)


def logits_of(chain: Any, tokens_BT: Tensor, *documents: Documents) -> Tensor:
    x = tokens_BT
    for name, segment in chain.segments[:-1]:
        x = segment(x, *chain.arguments(name, tokens_BT, tokens_BT, 1, *documents))
    logits: Tensor = chain.segments[-1][1].logits(x)
    return logits


def gradients(chain: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in chain.named_parameters() if p.grad is not None}
    chain.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_those_of_the_documents_one_by_one(name: str) -> None:
    """But for the order in which the tokens of several documents are added: so in float64, where experts have it."""
    chain = packing(name)
    if name not in EXPERTS:
        chain.double()
    tokens, labels = batch()
    loss = chain(tokens, labels, 7, Documents(LENGTHS))
    loss.backward()
    together, total = gradients(chain), 0.0
    for row, lengths in enumerate(LENGTHS):
        for one, its in zip(tokens[row].split(lengths), labels[row].split(lengths), strict=True):
            alone = chain(one[None], its[None], 7)
            alone.backward()
            total += alone.item()
    apart = gradients(chain)
    assert loss.item() == pytest.approx(total, rel=1e-6), "the loss is float32"
    assert together.keys() == apart.keys()
    largest = max(float(gradient.abs().max()) for gradient in apart.values())
    for parameter, gradient in apart.items():
        torch.testing.assert_close(together[parameter], gradient, rtol=2e-5, atol=2e-6 * largest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_bit_of_a_document_depends_on_the_others(name: str, dtype: torch.dtype) -> None:
    chain, documents = packing(name, dtype), Documents(LENGTHS)
    tokens, _ = batch()
    others = tokens.clone()
    others[0, 14:] = (others[0, 14:] + 1) % VOCABULARY
    others[1] = (others[1] + 1) % VOCABULARY
    with torch.no_grad():
        found, again = logits_of(chain, tokens, documents), logits_of(chain, others, documents)
    assert not torch.equal(found[0, 14:], again[0, 14:])
    if name not in EXPERTS:  # which compute the tokens of all documents together
        assert torch.equal(found[0, :14], again[0, :14])


class Plain(nn.Module):
    """What a layer of transformers has of attention."""

    num_key_value_groups, is_causal = 2, True


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_those_of_attention_to_each_document(dtype: torch.dtype, window: int | None, dropout: float) -> None:
    torch.manual_seed(3)
    shape, groups = (len(LENGTHS), 4, T, 8), (len(LENGTHS), 2, T, 8)
    given = [torch.randn(size, dtype=dtype).requires_grad_() for size in (shape, groups, groups)]
    upstream = torch.randn(shape, dtype=dtype).transpose(1, 2)
    module = Plain()
    torch.manual_seed(4)
    within = packed.Within(LENGTHS, window)
    found, _ = packed._attend(module, *given, attention_mask=within, dropout=dropout, scaling=0.3)
    ours = torch.autograd.grad(found, given, upstream)
    drawn = torch.rand(3)

    torch.manual_seed(4)
    rows = []
    for row, lengths in enumerate(LENGTHS):
        parts = [one[row : row + 1].split(lengths, dim=2) for one in given]
        outs = []
        for query, key, value in zip(*parts, strict=True):
            length = query.shape[2]
            mask = None
            if window is not None and window < length:
                every = torch.ones(length, length, dtype=torch.bool)
                mask = (every.tril() & every.triu(1 - window))[None, None]
            outs.append(sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=0.3)[0])
        rows.append(torch.cat(outs, 1))
    expected = torch.cat(rows)
    assert torch.equal(found, expected)
    for one, its in zip(ours, torch.autograd.grad(expected, given, upstream), strict=True):
        assert torch.equal(one, its)
    assert torch.equal(drawn, torch.rand(3)), "backward leaves the random numbers as they are"


def test_backward_computes_in_the_types_of_forward_under_autocast() -> None:
    """Here rotary embeddings have made query and key float32."""
    torch.manual_seed(3)
    given = [torch.randn(len(LENGTHS), 4, T, 8).requires_grad_() for _ in range(2)]
    given.append(torch.randn(len(LENGTHS), 4, T, 8, dtype=torch.bfloat16).requires_grad_())
    halved = [one.detach().bfloat16().requires_grad_() for one in given]
    module = Plain()
    module.num_key_value_groups = 1
    within = packed.Within(LENGTHS, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = packed._attend(module, *given, attention_mask=within)
    expected, _ = packed._attend(module, *halved, attention_mask=within)
    assert found.dtype == expected.dtype and torch.equal(found, expected)
    upstream = torch.randn_like(found)
    ours = torch.autograd.grad(found, given, upstream)
    theirs = torch.autograd.grad(expected, halved, upstream.to(expected.dtype))
    assert all(torch.equal(one.bfloat16(), its) for one, its in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gemma2", "its attention is `eager`"),
        ("mamba2", "its attention is `eager`"),
        ("falcon", "its own code changes attention masks, which packing replaces"),
        ("bert", "chats need a model that predicts each token from those before it"),
    ],
)
def test_a_model_that_cannot_read_packed_rows_is_rejected(name: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        chain_of(of_structure(name), torch.float32, packed_length=T)


def test_a_model_that_mixes_the_documents_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_spans", lambda lengths: iter([(slice(0, len(lengths)), slice(0, sum(lengths[0])))]))
    model = of_structure("llama")
    model.config.rms_norm_eps = 1.5e-6  # one that has not been tried yet
    with pytest.raises(UserError, match="the logits of a document depended on the others in its row"):
        chain_of(model, torch.float32, packed_length=T)


@pytest.mark.parametrize(("kind", "limit"), [("dynamic", 16), ("longrope", 8)])
def test_rotary_embeddings_of_one_document_must_not_depend_on_another(kind: str, limit: int) -> None:
    """They depend on the largest position of a batch, if it is beyond the limit."""
    model = of_structure("llama")
    model.config.max_position_embeddings = 16
    model.config.rope_parameters |= {"rope_type": kind, "factor": 2.0}
    if kind == "longrope":
        factors = {"long_factor": [2.0] * 4, "short_factor": [1.0] * 4}
        model.config.rope_parameters |= {"original_max_position_embeddings": limit, **factors}
    with pytest.raises(
        UserError, match=rf"a document of more than {limit} tokens .* at most {limit}, or set spec\.data"
    ):
        chain_of(model, torch.float32, packed_length=limit + 1)
    chain_of(model, torch.float32, packed_length=limit)


def test_queries_scaled_by_their_place_in_the_row_are_rejected() -> None:
    model = of_structure("llama4_text")
    with pytest.raises(UserError, match="the logits of a document depended on the others in its row"):
        chain_of(model, torch.float32, packed_length=T)


def test_tables_of_a_batch_end_with_it() -> None:
    chain = packing("llama")
    tokens, labels = batch()
    documents = Documents(LENGTHS)
    chain(tokens, labels, 7, documents).backward()
    assert len(chain._packed) == 1  # type: ignore[operator]
    del documents
    gc.collect()
    assert len(chain._packed) == 0  # type: ignore[operator]


def test_tables_of_all_micro_batches_of_a_step_are_planned() -> None:
    width = SIZES["hidden_size"] // SIZES["num_attention_heads"]
    cosine_and_sine = 2 * 2 * width * 4
    for count in (1, 3):
        shape = shape_of_chain(chain_of(of_structure("llama"), torch.float32, packed_length=T), 2, T, count)
        assert shape.table_bytes_per_position == count * cosine_and_sine
