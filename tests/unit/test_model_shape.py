"""Counts of published architectures, and the arithmetic of one block."""

from __future__ import annotations

from typing import Any

import pytest

from spillway.api import ModelConfig
from spillway.model_shape import ModelShape, model_shape

LLAMA = {"architecture": "llama"}
GPT2 = {"architecture": "gpt2", "vocabSize": 50257}


def config(**fields: Any) -> ModelConfig:
    return ModelConfig.model_validate(fields)


def shape(**fields: Any) -> ModelShape:
    return model_shape(config(**fields), "bfloat16")


PUBLISHED = {
    "llama-2-7b": (
        LLAMA | {"hiddenSize": 4096, "numLayers": 32, "numHeads": 32, "intermediateSize": 11008, "vocabSize": 32000},
        6738415616,
    ),
    "llama-2-70b": (
        LLAMA
        | {"hiddenSize": 8192, "numLayers": 80, "numHeads": 64, "numKeyValueHeads": 8, "intermediateSize": 28672,
           "vocabSize": 32000},
        68976648192,
    ),
    "llama-3-8b": (
        LLAMA
        | {"hiddenSize": 4096, "numLayers": 32, "numHeads": 32, "numKeyValueHeads": 8, "intermediateSize": 14336,
           "vocabSize": 128256},
        8030261248,
    ),
    "llama-3-70b": (
        LLAMA
        | {"hiddenSize": 8192, "numLayers": 80, "numHeads": 64, "numKeyValueHeads": 8, "intermediateSize": 28672,
           "vocabSize": 128256},
        70553706496,
    ),
    "llama-3.2-1b, tied": (
        LLAMA
        | {"hiddenSize": 2048, "numLayers": 16, "numHeads": 32, "numKeyValueHeads": 8, "intermediateSize": 8192,
           "vocabSize": 128256, "tieWordEmbeddings": True},
        1235814400,
    ),
    "gpt2": (GPT2 | {"hiddenSize": 768, "numLayers": 12, "numHeads": 12}, 124439808),
    "gpt2-xl": (GPT2 | {"hiddenSize": 1600, "numLayers": 48, "numHeads": 25}, 1557611200),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "num_parameters"), PUBLISHED.values(), ids=PUBLISHED)
def test_parameters_are_exactly_those_of_the_published_model(fields: dict[str, Any], num_parameters: int) -> None:
    assert shape(**fields).num_parameters == num_parameters


def test_a_llama_8b_block_saves_what_was_measured_on_cuda() -> None:
    """20.5 times hidden size, in bfloat16 values per token, with fused norms; grouped-query attention."""
    fields, _ = PUBLISHED["llama-3-8b"]
    block = model_shape(config(**fields), "bfloat16", "Cuda").block
    assert block.saved_bytes_per_token / (2 * 4096) == pytest.approx(20.5, abs=0.05)


def test_logits_are_counted_in_float32() -> None:
    """8,000 tokens of a vocabulary of 128,256: 4.1 GB of log-probabilities saved, twice that of temporaries."""
    fields, _ = PUBLISHED["llama-3-8b"]
    head = shape(**fields).head
    assert 8000 * head.saved_bytes_per_token > 4.1e9
    assert 8000 * head.backward_workspace_bytes == pytest.approx(8.2e9, rel=0.01)


def test_forward_flops_are_two_per_parameter_and_attention() -> None:
    fields, num_parameters = PUBLISHED["llama-2-7b"]
    made = shape(**fields)
    matrices = num_parameters - 32000 * 4096 - (2 * 32 + 1) * 4096  # neither the embedding nor the norms
    assert made.forward_flops_per_token(4096) == 2 * matrices + 32 * 2 * 4096 * 4096


def test_tied_parameters_have_an_accumulator_of_their_own() -> None:
    fields, _ = PUBLISHED["llama-3.2-1b, tied"]
    assert shape(**fields).tied_parameters == 128256 * 2048


def test_dropout_saves_a_mask_of_one_byte_on_cuda() -> None:
    fields, _ = PUBLISHED["llama-3-8b"]
    with_dropout = config(**fields, dropout="0.1")
    per_token = [
        model_shape(c, "bfloat16", "Cuda").block.saved_bytes_per_token for c in (with_dropout, config(**fields))
    ]
    assert per_token[0] - per_token[1] == 2 * 4096
