"""Counts of published architectures, and the arithmetic of one block."""

from __future__ import annotations

from typing import Any

import pytest

from spillway.api.model import Lora, ModelConfig
from spillway.planning.model_shape import LOSS_CHUNK_BYTES, MicroBatch, ModelShape, model_shape

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
    "bert-base-uncased, masked language model": (
        {"architecture": "bert", "hiddenSize": 768, "numLayers": 12, "numHeads": 12, "intermediateSize": 3072,
         "vocabSize": 30522, "maxPositions": 512},
        109514298,
    ),
    "t5-small": (
        {"architecture": "t5", "hiddenSize": 512, "numLayers": 6, "numHeads": 8, "intermediateSize": 2048,
         "vocabSize": 32128},
        60506624,
    ),
    "t5-base": (
        {"architecture": "t5", "hiddenSize": 768, "numLayers": 12, "numHeads": 12, "intermediateSize": 3072,
         "vocabSize": 32128},
        222903552,
    ),
    "gpt2-xl": (GPT2 | {"hiddenSize": 1600, "numLayers": 48, "numHeads": 25}, 1557611200),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "num_parameters"), PUBLISHED.values(), ids=PUBLISHED)
def test_parameters_are_exactly_those_of_the_published_model(fields: dict[str, Any], num_parameters: int) -> None:
    assert shape(**fields).num_parameters == num_parameters


def test_a_llama_8b_block_saves_what_was_measured_on_cuda() -> None:
    """20.5 times hidden size, in bfloat16 values per token, with fused norms; grouped-query attention."""
    fields, _ = PUBLISHED["llama-3-8b"]
    block = model_shape(config(**fields), "bfloat16", "Cuda").blocks[0]
    assert block.saved_bytes_per_token / (2 * 4096) == pytest.approx(20.5, abs=0.05)


@pytest.mark.parametrize(("compute", "logits"), [("bfloat16", 2.05e9), ("float32", 4.1e9)])
def test_many_logits_are_counted_in_the_compute_type_and_three_chunks_of_them_in_float32(
    compute: str, logits: float
) -> None:
    """8,000 tokens of a vocabulary of 128,256."""
    sizes = config(**LLAMA, hiddenSize=256, numLayers=1, numHeads=4, intermediateSize=688, vocabSize=128256)
    head = model_shape(sizes, compute, batch=MicroBatch(1, 8000)).head
    assert 8000 * head.saved_bytes_per_token == pytest.approx(logits, rel=0.02)
    assert 8000 * head.backward_workspace_bytes == pytest.approx(3 * LOSS_CHUNK_BYTES, rel=0.03)


def test_logits_of_one_chunk_are_counted_in_float32() -> None:
    sizes = config(**LLAMA, hiddenSize=256, numLayers=1, numHeads=4, intermediateSize=688, vocabSize=4096)
    few, many = (model_shape(sizes, "bfloat16", batch=MicroBatch(1, length)).head for length in (512, 513))
    assert few.backward_workspace_bytes == 2 * 4 * 4096
    assert few.saved_bytes_per_token - many.saved_bytes_per_token == 2 * 4096


def test_forward_flops_are_two_per_parameter_and_attention() -> None:
    fields, num_parameters = PUBLISHED["llama-2-7b"]
    made = shape(**fields)
    matrices = num_parameters - 32000 * 4096 - (2 * 32 + 1) * 4096  # neither the embedding nor the norms
    assert made.forward_flops_per_token(4096) == 2 * matrices + 32 * 2 * 4096 * 4096


def test_tied_parameters_have_an_accumulator_of_their_own() -> None:
    fields, _ = PUBLISHED["llama-3.2-1b, tied"]
    made = shape(**fields)
    assert made.num_accumulated - made.num_trained == made.head.num_aliased == 128256 * 2048
    assert made.tied == ((17, 0),)


def test_dropout_saves_a_mask_of_one_byte_on_cuda() -> None:
    fields, _ = PUBLISHED["llama-3-8b"]
    with_dropout = config(**fields, dropout="0.1")
    per_token = [
        model_shape(c, "bfloat16", "Cuda").blocks[0].saved_bytes_per_token for c in (with_dropout, config(**fields))
    ]
    assert per_token[0] - per_token[1] == 2 * 4096


def test_adapters_alone_are_trained() -> None:
    fields, num_parameters = PUBLISHED["llama-2-7b"]
    adapted = model_shape(
        config(**fields), "bfloat16", lora=Lora.model_validate({"targetModules": ["q_proj", "v_proj"]})
    )
    assert adapted.num_trained == 32 * 2 * 2 * 16 * 4096
    assert adapted.num_parameters - adapted.num_trained == num_parameters
    assert adapted.parameter_bytes == 2 * num_parameters + 4 * adapted.num_trained
    assert adapted.trained_bytes == 4


def test_frozen_matrices_have_no_gradient_of_their_own_in_backward() -> None:
    """2 FLOPs a parameter and token instead of 4."""
    fields, _ = PUBLISHED["llama-2-7b"]
    full, adapted = model_shape(config(**fields), "bfloat16"), model_shape(config(**fields), "bfloat16", lora=Lora())
    assert full.backward_flops_per_token(1) == pytest.approx(2 * full.forward_flops_per_token(1))
    assert adapted.backward_flops_per_token(1) == pytest.approx(full.forward_flops_per_token(1), rel=0.02)


def test_segments_are_equal_when_their_figures_are() -> None:
    fields, _ = PUBLISHED["t5-small"]
    blocks = shape(**fields).blocks
    assert [block.name for block in blocks] == [f"{half}{n}" for half in ("encoder", "decoder") for n in range(6)]
    assert len(set(blocks)) == 5  # first, inner and last of the encoder; first and inner of the decoder
