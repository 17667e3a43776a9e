"""Models from entry points, the values they begin with, and what of them is rejected."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cases.huggingface_models import VOCABULARY, small_model, spec_of
from spillway.errors import UserError
from spillway_trainer.models.build import build_model
from spillway_trainer.models.chain import Chain
from spillway_trainer.models.families import empty_model
from spillway_trainer.models.structure import StructuralChain
from spillway_trainer.models.transformer import Transformer

MODULE = """
import random
import numpy as np
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForSequenceClassification
from spillway_trainer.models.chain import Chain
from spillway_trainer.models.transformer import Transformer, TransformerConfig

number = 5

class Draws(nn.Module):
    def __init__(self):
        super().__init__()
        drawn = torch.randn(4, device="cpu"), torch.tensor(np.random.rand(4), device="cpu"), [random.random()]
        self.register_buffer("mixture", torch.cat([torch.as_tensor(one, device="cpu") for one in drawn]))

    def forward(self, x):
        return x + self.mixture.sum()

def drawing():
    return nn.Sequential(nn.Embedding(97, 8), nn.Linear(8, 8), Draws(), nn.Linear(8, 97))

def own_chain():
    return Transformer(TransformerConfig(32, 2, 4, 4, 48, 97))

def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=97, n_positions=32, n_embd=16, n_layer=2, n_head=2))

def opt():
    sizes = dict(hidden_size=16, ffn_dim=16, num_hidden_layers=1, num_attention_heads=2)
    return OPTForSequenceClassification(OPTConfig(vocab_size=97, **sizes))

def raises():
    raise ValueError("no such file")

def plain_module():
    return nn.Linear(2, 2)

def number_of():
    return 5

class Skipping(nn.Sequential):
    def forward(self, x):
        return x

def sequential_with_own_forward():
    return Skipping(*[nn.Linear(2, 2) for _ in range(3)])

def short_sequential():
    return nn.Sequential(nn.Embedding(97, 2), nn.ReLU(), nn.Linear(2, 97))

def sequential_without_tokens():
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 97))

def sequential_with_a_layer_twice():
    layer = nn.Linear(2, 2)
    return nn.Sequential(nn.Embedding(97, 2), layer, layer, nn.Linear(2, 97))

def with_memory():
    model = own_chain()
    model.head.norm.weight = nn.Parameter(torch.ones(32, device="cpu"))
    return model

def with_unset_buffer():
    model = own_chain()
    model.register_buffer("scale", torch.ones(1))
    return model

def with_parameter_outside():
    model = own_chain()
    model.extra = nn.Parameter(torch.empty(3))
    return model

def with_empty_parameter():
    model = own_chain()
    model.head.register_parameter("nothing", nn.Parameter(torch.empty(0)))
    return model

def leaves():
    print("no licence")
    raise SystemExit("no licence")

def with_block_twice():
    model = own_chain()
    model.layers[1] = model.layers[0]
    return model

def model_with_layer_twice():
    model = gpt2()
    model.transformer.h[1] = model.transformer.h[0]
    return model

def variant(**attributes):
    made = own_chain()
    made.__class__ = type("Variant", (Transformer,), {k: property(lambda _, v=v: v) for k, v in attributes.items()})
    return made

def tied_to_nothing():
    return variant(tied={"head.norm.weight": "nowhere"})

def tied_to_an_alias():
    return variant(tied={"head.norm.weight": "embed_tokens.weight", "embed_tokens.weight": "head.lm_head.weight"})

def tied_to_itself():
    return variant(tied={"head.norm.weight": "head.norm.weight"})

def tied_to_another_shape():
    return variant(tied={"head.norm.weight": "embed_tokens.weight"})

def tied_to_a_frozen_one():
    model = variant(tied={"head.lm_head.weight": "embed_tokens.weight"})
    model.embed_tokens.weight.requires_grad_(False)
    return model

def with_one_name_twice():
    model = own_chain()
    return variant(segments=[("block", module) for _, module in model.segments])
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "their_models.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("their_models", None)


def made_by(function: str, **model: Any) -> Chain:
    return build_model(spec_of(entrypoint=f"their_models:{function}", compute="bfloat16", **model))


@pytest.mark.parametrize(("function", "kind"), [("own_chain", Transformer), ("gpt2", StructuralChain)])
def test_an_entry_point_gives_a_chain_or_a_model_of_a_known_family(function: str, kind: type[Chain]) -> None:
    chain = made_by(function)
    assert isinstance(chain, kind) and chain.vocab_size == VOCABULARY
    assert all(parameter.is_meta and parameter.dtype == torch.bfloat16 for parameter in chain.parameters())
    assert not any(buffer.is_meta for buffer in chain.buffers())


REJECTED = {
    "nowhere:build": "cannot import nowhere: ModuleNotFoundError.* PYTHONPATH",
    "their_models:missing": "their_models has no function missing",
    "their_models:number": "their_models has no function number",
    "their_models:raises": "raised ValueError: no such file",
    "their_models:number_of": "returned int. Return its layers as an nn.Sequential",
    "their_models:plain_module": "returned Linear, whose forward cannot be cut into segments automatically. "
    r"Return its layers as an nn.Sequential, .* Or a Chain .*`segments` lists .* Or a model of AutoModelForCausalLM",
    "their_models:opt": r"returned OPTForSequenceClassification \(model: OPTModel, score: Linear\), whose forward",
    "their_models:sequential_with_own_forward": r"returned Skipping \(0: Linear, 1: Linear, 2: Linear\), whose",
    "their_models:short_sequential": "the nn.Sequential has 2 children with parameters, but needs at least 3",
    "their_models:sequential_without_tokens": r"the nn.Sequential begins with Linear, ReLU, .* nn\.Embedding",
    "their_models:sequential_with_a_layer_twice": "the nn.Sequential has one layer in two places",
    "their_models:with_memory": r"parameter head\.norm\.weight already has memory",
    "their_models:with_unset_buffer": "buffer scale has no values",
    "their_models:with_parameter_outside": "every parameter must .* exactly one segment .* extra belongs to 0",
    "their_models:with_block_twice": r".*layers\.0\.\S+ belongs to 2; if several segments share it, .* `tied`",
    "their_models:with_one_name_twice": "block is the name of several segments of the Chain",
    "their_models:tied_to_nothing": r".*`tied` says that .* head\.norm\.weight is nowhere, but .* no parameter nowhere",
    "their_models:tied_to_an_alias": r".* is embed_tokens\.weight, but embed_tokens\.weight is itself tied; tie",
    "their_models:tied_to_itself": r".* is head\.norm\.weight, but head\.norm\.weight is itself tied; tie",
    "their_models:tied_to_another_shape": r".* they are \[32\] torch.float32 trained and \[97, 32\] torch",
    "their_models:tied_to_a_frozen_one": ".*float32 trained and .*float32 frozen; give both parameters the same shape",
    "their_models:leaves": "raised SystemExit: no licence",
}


def test_empty_parameters_and_layers_used_twice_are_rejected() -> None:
    with pytest.raises(UserError, match=r"parameter head\.nothing has no elements"):
        made_by("with_empty_parameter")
    with pytest.raises(UserError, match=r"GPT2LMHeadModel: transformer\.h\.0\S+ does not belong to exactly one layer"):
        made_by("model_with_layer_twice")


@pytest.mark.parametrize("entrypoint", REJECTED)
def test_what_an_entry_point_may_not_give_is_rejected_with_a_sentence(entrypoint: str) -> None:
    with pytest.raises(UserError, match=rf"spec\.model\.entrypoint = {entrypoint}: {REJECTED[entrypoint]}"):
        build_model(spec_of(entrypoint=entrypoint))


def test_adapters_need_a_model_of_transformers() -> None:
    with pytest.raises(UserError, match="returned Transformer, but lora needs a model of AutoModelForCausalLM"):
        made_by("own_chain", lora={})
    assert any(".lora_A." in name for name, _ in made_by("gpt2", lora={}).named_parameters())


# --- adapters ---------------------------------------------------------------------------------------------------------


def test_adapters_go_beside_the_attentions_matrices_and_alone_are_trained() -> None:
    chain = build_model(spec_of("gpt2", compute="bfloat16", lora={"rank": 4}))
    trained = {name for name, p in chain.named_parameters() if p.requires_grad}
    targets = {name.partition(".lora_")[0].rpartition(".h.")[2].partition(".")[2] for name in trained}
    assert targets == {"attn.c_attn", "attn.c_proj"}
    for name, parameter in chain.named_parameters():
        assert parameter.dtype == (torch.float32 if name in trained else torch.bfloat16), name
    assert chain.autocast == torch.bfloat16
    assert build_model(spec_of("gpt2", lora={})).autocast is None, "nothing to cast in float32"


def test_an_adapter_changes_nothing_at_first() -> None:
    """With the same seed the model below is the same, and the second matrix of each adapter is zero."""
    plain, adapted = small_model("gpt2", scale=1.0), small_model("gpt2", scale=1.0, lora={"rank": 4})
    tokens = torch.arange(12).view(2, 6)
    assert plain(tokens, tokens, 12).item() == adapted(tokens, tokens, 12).item()


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (["q_proj"], "GPT2LMHeadModel has no module q_proj; choose from c_attn, c_fc, c_proj, lm_head"),
        (["wte"], "wte is Embedding, but adapters need linear layers"),
    ],
)
def test_a_target_that_cannot_have_an_adapter_is_rejected(targets: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        build_model(spec_of("gpt2", lora={"targetModules": targets}))


# --- values to begin with ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["gpt2", "bert", "t5"])
def test_initial_values_are_spread_as_the_familys_own(architecture: str) -> None:
    """Mean square of every parameter, within what a sample of its size may differ."""
    sizes = {"hiddenSize": 256, "intermediateSize": 512, "vocabSize": 500}
    chain = build_model(spec_of(architecture, config=sizes))
    torch.manual_seed(0)
    own = type(chain.model)(chain.config)
    theirs = dict(own.named_parameters())
    for name, value in chain.initial_values(0):
        stored = name.removeprefix("model.")
        expected = theirs[{"cls.predictions.decoder.bias": "cls.predictions.bias"}.get(stored, stored)]
        assert value.shape == expected.shape
        tolerance = 6 * (2 / value.numel()) ** 0.5
        assert value.square().mean() == pytest.approx(expected.square().mean().item(), rel=tolerance), name


def test_one_seed_is_one_model_whatever_the_segments_memory() -> None:
    chain = build_model(spec_of("t5"))
    first, second = (dict(chain.initial_values(7)) for _ in range(2))
    other = dict(chain.initial_values(8))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.shared.weight"], other["model.shared.weight"])


def test_buffers_that_are_drawn_are_those_of_the_seed() -> None:
    first = [(name, buffer.clone()) for name, buffer in made_by("drawing").named_buffers()]
    torch.randn(3)  # another process, or another attempt, has drawn other numbers before
    again = dict(made_by("drawing").named_buffers())
    assert [name for name, buffer in first if not torch.equal(buffer, again[name])] == []
    assert len(first) == 1 and first[0][1].numel() == 9


def test_buffers_are_those_of_a_model_made_with_memory() -> None:
    for architecture, lora in (("llama", {"rank": 2}), ("bert", None)):
        chain = build_model(spec_of(architecture, **({"lora": lora} if lora else {})))
        own = type(chain.model)(chain.config)
        buffers = dict(chain.model.named_buffers())
        assert buffers.keys() == dict(own.named_buffers()).keys() != set()
        assert all(torch.equal(buffers[name], buffer) for name, buffer in own.named_buffers())


def test_a_model_on_meta_takes_no_memory_however_large() -> None:
    sizes = {"hiddenSize": 8192, "numLayers": 2, "numHeads": 64, "intermediateSize": 28672, "vocabSize": 128256}
    chain = build_model(spec_of("llama", config=sizes, lora={"rank": 8}))
    assert sum(p.numel() for p in chain.parameters()) > 3e9
    assert all(parameter.is_meta for parameter in chain.parameters())
    assert isinstance(empty_model(chain.config), nn.Module)
