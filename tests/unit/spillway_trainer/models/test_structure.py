"""Which models of `transformers` are chains, and what is said of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertLMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    LayoutLMConfig,
    LayoutLMForMaskedLM,
    LlamaConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from cases.huggingface_models import OF_STRUCTURE, SIZES, VOCABULARY, of_structure, structural_chain
from spillway.errors import UserError
from spillway_trainer.models.lora import attention_of
from spillway_trainer.models.structure import structure_of

# --- models that are no chains ----------------------------------------------------------------------------------------


class Body(nn.Module):
    def __init__(self, run: Callable[[Body, Tensor], Any], num_layers: int) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, 8), nn.LayerNorm(8)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.more = nn.Linear(8, 8)
        self.run = run

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        return self.run(self, self.embed(input_ids))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(8, 8)

    def forward(self, x: Any, more: Any = 0.0) -> Any:
        return self.product(x) + (more if isinstance(more, Tensor | float) else 0.0)


def model_of(run: Callable[[Body, Tensor], Any]) -> PreTrainedModel:
    class Model(PreTrainedModel):
        config_class = LlamaConfig
        base_model_prefix = "model"

        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            self.model, self.lm_head = Body(run, config.num_hidden_layers), nn.Linear(8, VOCABULARY)
            self.post_init()

        def _init_weights(self, module: nn.Module) -> None:
            pass

        def forward(self, input_ids: Tensor | None = None, **_: Any) -> CausalLMOutput:
            return CausalLMOutput(logits=self.lm_head(self.model(input_ids)[0]))

    return Model(LlamaConfig(**SIZES))


def whole(x: Tensor) -> BaseModelOutput:
    return BaseModelOutput(last_hidden_state=x)


def in_reverse(body: Body, x: Tensor) -> Any:
    for layer in reversed(body.layers):
        x = layer(x)
    return whole(body.norm(body.more(x)))


def with_a_layer_left_out(body: Body, x: Tensor) -> Any:
    return whole(body.norm(body.layers[0](x)))


def scaled_between(body: Body, x: Tensor) -> Any:
    for layer in body.layers:
        x = 2.0 * layer(x)
    return whole(body.norm(body.more(x)))


def scaled_after(body: Body, x: Tensor) -> Any:
    for layer in body.layers:
        x = layer(x)
    return whole(2.0 * body.norm(body.more(x)))


def changing_a_parameter(body: Body, x: Tensor) -> Any:
    with torch.no_grad():
        body.more.weight.mul_(1.0)
    for layer in body.layers:
        x = layer(x)
    return whole(body.norm(body.more(x)))


def with_a_shared_tensor(body: Body, x: Tensor) -> Any:
    first = x
    for layer in body.layers:
        x = layer(x, first)
    return whole(body.norm(body.more(x)))


def with_a_shared_cache(body: Body, x: Tensor) -> Any:
    for layer in body.layers:
        x = layer(x, body)
    return whole(body.norm(body.more(x)))


def without_a_parameter(body: Body, x: Tensor) -> Any:
    for layer in body.layers:
        x = layer(x)
    return whole(body.norm(x))


def with_a_dictionary(body: Body, x: Tensor) -> Any:
    for layer in body.layers:
        x = layer(x)
    return {0: body.norm(body.more(x))}


def failing(body: Body, x: Tensor) -> Any:
    raise RuntimeError("no kernel")


NO_CHAINS: dict[Callable[[Body, Tensor], Any], str] = {
    in_reverse: "its forward must call its 2 layers in order, each once, but calls layers: 1, 0",
    with_a_layer_left_out: "its forward must call its 2 layers in order, each once, but calls layers: 0",
    scaled_between: r"the input of model\.layers\.1 is not the output of the layer before it",
    scaled_after: (
        "in a trial run of a small copy, calling the layers one by one gave other logits than the model's forward"
    ),
    changing_a_parameter: r"its forward changes the parameter model\.more\.weight",
    with_a_shared_tensor: (
        r"model\.layers\.0 gets a second input that needs a gradient, but gradients can pass only through hidden states"
    ),
    with_a_shared_cache: r"model\.layers\.0 gets an argument of type Body, through which layers could share state",
    with_a_dictionary: "it has no submodule that contains all layers and returns last_hidden_state",
    failing: "a trial run of a small copy failed: RuntimeError: no kernel",
}


@pytest.mark.parametrize(("run", "found"), NO_CHAINS.items(), ids=[run.__name__ for run in NO_CHAINS])
def test_a_model_that_is_no_chain_is_rejected_with_what_was_found(
    run: Callable[[Body, Tensor], Any], found: str
) -> None:
    words = rf"Model: Spillway cannot run the layers of this model one by one: {found}\. Write a Python function"
    with pytest.raises(UserError, match=words):
        structure_of(model_of(run))


def test_a_parameter_that_the_forward_does_not_use_is_rejected() -> None:
    with pytest.raises(
        UserError, match=r"Model: model\.more\.\S+ does not belong to exactly one layer; .* does not use"
    ):
        structure_of(model_of(without_a_parameter))


def test_what_follows_the_last_hidden_state_is_no_part_of_the_chain() -> None:
    """layoutlm runs a pooler, whose output the head of masked tokens does not read."""
    with torch.device("meta"):
        model = LayoutLMForMaskedLM(LayoutLMConfig(**SIZES))
    with pytest.raises(UserError, match=r"layoutlm\.pooler\.\S+ does not belong to .* forward does not use"):
        structure_of(model)


def test_encoder_decoders_and_layers_that_are_used_again_are_rejected() -> None:
    with torch.device("meta"):
        albert = AlbertForMaskedLM(AlbertConfig(**SIZES))
        bart = BartForCausalLM(BartConfig(is_encoder_decoder=True))
    with pytest.raises(
        UserError,
        match=r"one nn\.ModuleList of 3 layers .*, but its lists are: albert\.\S+_layer_groups of length 1",
    ):
        structure_of(albert)
    bart.config.is_encoder_decoder = True
    with pytest.raises(UserError, match="it has an encoder and a decoder"):
        structure_of(bart)


def test_what_a_chain_would_leave_out_is_rejected() -> None:
    mixtral, opt = of_structure("mixtral"), of_structure("opt")
    mixtral.config.output_router_logits = True
    with pytest.raises(UserError, match=r"output_router_logits is true, .*; set output_router_logits to false"):
        structure_of(mixtral)
    opt.config.layerdrop = 0.1
    with pytest.raises(UserError, match=r"layerdrop is 0\.1, but skipping layers at random is not supported"):
        structure_of(opt)


def test_a_causal_model_that_reads_later_tokens_is_rejected() -> None:
    with torch.device("meta"):
        model = BertLMHeadModel(BertConfig(**SIZES))
    with pytest.raises(
        UserError, match=r"BertLMHeadModel: its logits depend on later tokens, .* set is_decoder to true"
    ):
        structure_of(model)


# --- models that are chains -------------------------------------------------------------------------------------------


def test_a_proof_draws_no_random_numbers_of_the_run() -> None:
    with torch.device("meta"):
        model = BertLMHeadModel(BertConfig(**SIZES, is_decoder=True))
    state = torch.get_rng_state()
    structure_of(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_learned_positions_limit_the_length_of_sequences() -> None:
    """opt's table begins two rows later, roberta's after its padding token."""
    limits = {name: structural_chain(name).max_positions for name in ("opt", "roberta", "distilbert", "gpt_neo")}
    assert limits == {"opt": 64, "roberta": 62, "distilbert": 64, "gpt_neo": 64}
    assert structural_chain("cohere").max_positions is None
    with torch.device("meta"):  # its positions are looked up by a gather
        model = GPTJForCausalLM(
            GPTJConfig(vocab_size=VOCABULARY, n_embd=32, n_head=4, n_layer=2, n_positions=24, rotary_dim=4)
        )
    assert structure_of(model).max_positions == 24


@pytest.mark.parametrize(("dropout", "alone"), [(0.0, True), (0.1, False)])
def test_dropout_after_the_embedding_belongs_to_its_segment(dropout: float, alone: bool) -> None:
    """A proof without dropout cannot see it: this module's output is also that of the dropout."""
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 16, "rotary_dim": 4}
    with torch.device("meta"):
        model = GPTJForCausalLM(GPTJConfig(vocab_size=VOCABULARY, embd_pdrop=dropout, **sizes))
    assert (structure_of(model).embedding is not None) == alone


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["bloom", "falcon, alibi", "gpt_neo", "gemma3_text"])
def test_a_layer_gets_masks_of_the_micro_batchs_own_shape(name: str, batch: int) -> None:
    chain = structural_chain(name)
    for length in (3, 9):
        tokens = torch.zeros(batch, length, dtype=torch.int64)
        tables = [t for t in chain.arguments("block0", tokens, tokens, 1) if isinstance(t, Tensor)]
        assert tables and all(length in table.shape for table in tables)


TARGETS = {
    "gpt_neox": "dense query_key_value",
    "gpt_neo": "k_proj out_proj q_proj v_proj",
    "opt": "k_proj out_proj q_proj v_proj",
    "falcon": "dense query_key_value",
    "bloom": "dense query_key_value",
    "phi": "dense k_proj q_proj v_proj",
    "phi3": "o_proj qkv_proj",
    "mixtral": "k_proj o_proj q_proj v_proj",
    "gpt_oss": "k_proj o_proj q_proj v_proj",
    "roberta": "attention.output.dense key query value",
    "distilbert": "k_lin out_lin q_lin v_lin",
}


@pytest.mark.parametrize("name", TARGETS)
def test_adapters_go_by_default_to_the_matrices_of_attention(name: str) -> None:
    with torch.device("meta"):
        assert " ".join(sorted(attention_of(of_structure(name)))) == TARGETS[name]
    assert name in OF_STRUCTURE
