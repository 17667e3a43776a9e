"""A chain made of a model of `transformers` computes what that model's own forward and backward compute, and what it
computes does not depend on where anything lives.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    RemBertConfig,
    RemBertForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

from cases.huggingface_models import (
    OF_STRUCTURE,
    SIZES,
    VOCABULARY,
    batch_for,
    filled,
    of_structure,
    small_model,
    spec_of,
)
from harness import local_runs
from harness.depth import FULL
from spillway.api.job_file import JobFile
from spillway.plan import ActivationPlan, OptimizerPlan, ParameterPlan, Policy, Tier
from spillway_trainer import config
from spillway_trainer.assemble import assemble, fill
from spillway_trainer.corpus.data import Batch
from spillway_trainer.corpus.objective import TrainingObjective, prefix_length
from spillway_trainer.interchange import export
from spillway_trainer.models.build import build_model
from spillway_trainer.models.huggingface import HuggingFaceChain
from spillway_trainer.models.source import PREFIX
from spillway_trainer.trainer import Passes

SOURCES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True)),
    "llama, scaled positions": lambda: LlamaForCausalLM(
        LlamaConfig(
            **SIZES, tie_word_embeddings=True, rope_parameters={
                "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8,
            },
        )
    ),
    "mistral, windows": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5)),
    "qwen2, some windows": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=2)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)),
}  # fmt: skip
SOURCES |= {name: partial(of_structure, name) for name in OF_STRUCTURE}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


# --- the same loss and gradients as the model's own forward -----------------------------------------------------------


def own_model(chain: HuggingFaceChain) -> PreTrainedModel:
    """The model as `transformers` alone makes it, with the chain's values."""
    made = type(chain.model)(chain.config)
    values = {name.removeprefix(PREFIX): p.detach().clone() for name, p in chain.named_parameters()}
    _, unexpected = made.load_state_dict(values, strict=False)
    made.tie_weights()
    assert not unexpected
    return made.eval()


def own_loss(model: nn.Module, objective: TrainingObjective, tokens: Tensor, labels: Tensor, count: int) -> Tensor:
    """By the model's own forward. Its causal loss takes labels that are shifted already, and what to divide by; the
    other two take the mean over the labels, which is their sum divided by their number."""
    if objective is TrainingObjective.CAUSAL:
        return model(input_ids=tokens, labels=labels, shift_labels=labels, num_items_in_batch=count).loss
    if objective is TrainingObjective.MASKED:
        return model(input_ids=tokens, labels=labels).loss
    P = prefix_length(tokens.shape[1])
    return model(input_ids=tokens[:, :P], labels=labels[:, P:].contiguous()).loss


def nearly_equal(expected: Tensor, found: Tensor) -> bool:
    return bool((expected - found).abs().max() <= 1e-5 * expected.abs().max())


def gradients_of(chain: HuggingFaceChain) -> dict[str, Tensor]:
    """By the names of `transformers`. Uses of a tied parameter are summed in the order of backward, as autograd does
    for one parameter; the optimizer sums them in declared order, which for the three uses of t5 rounds differently."""
    sums: dict[str, Tensor] = {}
    for name, parameter in reversed(list(chain.named_parameters())):
        owner = chain.tied.get(name, name).removeprefix(PREFIX)
        if parameter.grad is not None:
            sums[owner] = sums[owner] + parameter.grad if owner in sums else parameter.grad
    return sums


def compare_with_own_forward(chain: HuggingFaceChain, theirs: nn.Module, rename: Callable[[str], str] = str) -> None:
    tokens, labels, count = batch_for(chain.objective)
    loss, own = chain.eval()(tokens, labels, count), own_loss(theirs, chain.objective, tokens, labels, count)
    loss.backward()
    own.backward()
    assert loss.item() == own.item()
    ours = {rename(name): gradient for name, gradient in gradients_of(chain).items()}
    expected = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    assert ours.keys() == expected.keys()
    # Products of tensors with other strides may round differently in the last bits, which depends on the CPU.
    assert [name for name, gradient in expected.items() if not nearly_equal(gradient, ours[name])] == []


def first_name(name: str) -> str:
    """Of a parameter that bert and its like call by two."""
    return name.replace(".decoder.bias", ".bias")


@pytest.mark.parametrize("architecture", ["gpt2", "bert", "t5"])
def test_a_family_has_the_loss_and_gradients_of_its_own_forward(architecture: str) -> None:
    chain = small_model(architecture)
    compare_with_own_forward(chain, own_model(chain), first_name)


@pytest.mark.parametrize("source", SOURCES)
def test_model_from_a_directory_matches_its_own_loss_and_gradients(source: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    theirs = SOURCES[source]().eval()
    theirs.save_pretrained(tmp_path)
    chain = filled(build_model(spec_of(source={"path": str(tmp_path)})), scale=1.0)
    compare_with_own_forward(chain, theirs, first_name)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bert", "t5"])
def test_adapters_have_the_loss_and_gradients_that_peft_gives_them(architecture: str) -> None:
    chain = small_model(architecture, lora={"rank": 4, "alpha": "16"})
    for name, parameter in chain.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter)  # zero at the start, so that A would have no gradient
    theirs = get_peft_model(type(chain.model)(chain.config), chain.model.peft_config["default"]).eval()
    values = {f"base_model.model.{n.removeprefix(PREFIX)}": p.detach().clone() for n, p in chain.named_parameters()}
    assert theirs.load_state_dict(values, strict=False).unexpected_keys == []
    theirs.base_model.model.tie_weights()
    compare_with_own_forward(chain, theirs, lambda name: f"base_model.model.{name}")


def logits(model: nn.Module, objective: TrainingObjective, tokens: Tensor) -> Tensor:
    P = prefix_length(tokens.shape[1])
    inputs = {"input_ids": tokens}
    if objective is TrainingObjective.PREFIX:
        inputs = {"input_ids": tokens[:, :P], "decoder_input_ids": tokens[:, P:]}
    with torch.no_grad():
        return model(**inputs).logits


UNTIED: dict[str, Callable[[], PreTrainedModel]] = {
    "rembert": lambda: RemBertForMaskedLM(RemBertConfig(**SIZES, input_embedding_size=16, output_embedding_size=24)),
    "bert": lambda: BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48,
            max_position_embeddings=32, tie_word_embeddings=False,
        )
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=1, n_head=4, tie_word_embeddings=False)
    ),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, decoder_start_token_id=0,
            tie_word_embeddings=False,
        )
    ),
}  # fmt: skip


def export_to(directory: Path, chain: HuggingFaceChain) -> None:
    described = json.loads(json.dumps(chain.description))
    parameters = {name: p.detach() for name, p in chain.named_parameters() if name not in chain.tied}
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    pieces = export.huggingface_pieces(described["config"])
    weights = export._weight_file("model.safetensors", shapes, parameters.items, pieces)
    directory.mkdir()
    save_file({n: v.clone() for n, v in zip(weights.shapes, weights.values(), strict=True)}, directory / weights.name)
    (directory / "config.json").write_text(json.dumps(export._config(described, "float32")))


@pytest.mark.parametrize("architecture", UNTIED)
def test_exported_untied_model_loads_in_transformers_and_in_spillway(architecture: str, tmp_path: Path) -> None:
    """Every value moved, as by training; nothing is missing, nothing too much, and the logits are equal."""
    theirs = UNTIED[architecture]()
    values = {name: torch.randn(p.shape) for name, p in theirs.named_parameters()}
    if architecture == "t5":  # whose class ties whatever it is told; its checkpoints do not
        theirs.lm_head.weight = nn.Parameter(torch.randn(VOCABULARY, 32))
        values["lm_head.weight"] = theirs.lm_head.weight.detach()
    first, second = tmp_path / "first", tmp_path / "second"
    theirs.save_pretrained(first)
    save_file(values, first / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((first / "config.json").read_text())
    (first / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    chain = filled(build_model(spec_of(source={"path": str(first)})), scale=1.0).eval()

    export_to(second, chain)
    loaded, report = type(theirs).from_pretrained(second, output_loading_info=True)
    assert not any(report.values()), report
    tokens, _, _ = batch_for(chain.objective)
    assert torch.equal(logits(loaded.eval(), chain.objective, tokens), logits(chain.model, chain.objective, tokens))
    again = filled(build_model(spec_of(source={"path": str(second)})), scale=1.0)
    assert all(torch.equal(again.get_parameter(name), value) for name, value in chain.named_parameters())


@pytest.mark.parametrize("source", SOURCES)
def test_exported_model_is_stored_as_transformers_stores_it(source: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    torch.manual_seed(3)
    theirs = SOURCES[source]()
    theirs.save_pretrained(first)
    chain = filled(build_model(spec_of(source={"path": str(first)})), scale=2.0).eval()
    export_to(second, chain)
    shapes = [
        {name: value.shape for name, value in load_file(directory / "model.safetensors").items()}
        for directory in (first, second)
    ]
    assert shapes[0] == shapes[1]
    loaded, report = type(theirs).from_pretrained(second, output_loading_info=True)
    assert not any(report.values()), report
    tokens, _, _ = batch_for(chain.objective)
    assert torch.equal(logits(loaded.eval(), chain.objective, tokens), logits(chain.model, chain.objective, tokens))


# --- the same bits wherever things live -------------------------------------------------------------------------------

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"architecture": "gpt2", "config": {"dropout": "0.1"}},
    "bert": {"architecture": "bert", "config": {"dropout": "0.1"}},
    "t5": {"architecture": "t5", "config": {"dropout": "0.1"}},
    "llama, adapters": {"architecture": "llama", "lora": {"rank": 4}},
    "t5, adapters": {"architecture": "t5", "lora": {"rank": 4}},
    "gemma2": {"family": "gemma2"},
    "opt": {"family": "opt"},
    "falcon, alibi": {"family": "falcon, alibi"},
    "mixtral": {"family": "mixtral"},
    "distilbert": {"family": "distilbert"},
    "phi3, adapters": {"family": "phi3", "lora": {"rank": 4}},
}
MICRO_BATCHES = 2


@dataclass
class Outcome:
    losses: list[float] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def differences(self, other: Outcome) -> list[str]:
        assert self.tensors.keys() == other.tensors.keys()
        changed = [name for name, tensor in self.tensors.items() if not torch.equal(tensor, other.tensors[name])]
        return changed + ["loss"] * (self.losses != other.losses)


def losses_of(passes: Passes) -> list[float]:
    """With nobody who goes on in between."""
    while True:
        try:
            next(passes)
        except StopIteration as ended:
            return list(ended.value)


def resident(num_segments: int, answer: Policy) -> dict[str, Any]:
    """Every block under one answer, the optimizer spread over both processors."""
    answers = (Policy.KEEP, *[answer] * (num_segments - 2), Policy.KEEP)
    return {
        "activations": ActivationPlan(answers=answers, minimum_bytes=256, window_bytes=1 << 20, num_io_threads=1),
        "optimizer": OptimizerPlan(cpu_share=0.5, streamed_share=0.3, resident_share=0.2, chunk_parameters=1009),
    }


def streamed(num_segments: int, home: Tier, order: str) -> dict[str, Any]:
    """Every parameter through two slots, activations and boundaries in host memory."""
    return resident(num_segments, Policy.HOST) | {
        "parameters": ParameterPlan(homes=(home,) * num_segments, order=order, boundaries=Policy.HOST),
        "optimizer": OptimizerPlan(cpu_share=1.0, streamed_share=0.0, resident_share=0.0, chunk_parameters=1009),
    }


PLANS: dict[str, Callable[[int], dict[str, Any]]] = {
    "kept": partial(resident, answer=Policy.KEEP),
    "recomputed": partial(resident, answer=Policy.RECOMPUTE),
    "host": partial(resident, answer=Policy.HOST),
    "nvme": partial(resident, answer=Policy.NVME),
    "parameters from host memory": partial(streamed, home=Tier.HOST, order="InOrder"),
    "parameters from NVMe, segment by segment": partial(streamed, home=Tier.NVME, order="WeightStationary"),
}


def train(
    model: dict[str, Any],
    make_plan: Callable[[int], dict[str, Any]] | None,
    directory: Path,
    compute: str = "bfloat16",
) -> Outcome:
    """Two steps by the real assembly; without a plan in mode Disabled. `family` in `model`: from such a directory."""
    if "family" in model:
        torch.manual_seed(3)
        of_structure(model.pop("family")).save_pretrained(directory / "source")
        model["source"] = {"path": str(directory / "source")}
    spec, here = spec_of(compute=compute, **model), str(directory)
    job = JobFile(
        name="small", uid="u", epoch=1, spec=spec, output_directory=here, corpus_directory=here,
        checkpoint_directory=here, spill_directory=here, termination_message_path=here, compute_threads=1,
    )  # fmt: skip
    chain = build_model(spec)
    num_segments = len(chain.segments)
    plan = local_runs.disabled_plan(num_segments - 2)
    if make_plan is not None:
        plan = local_runs.spread_plan(num_segments - 2).model_copy(update=make_plan(num_segments))
    assembly, outcome = assemble(job, plan, chain), Outcome()
    scale = config.loss_scale(spec)
    run: Any = SimpleNamespace(model=chain, position=assembly.position, techniques=assembly, loss_scale=scale)
    try:
        fill(assembly, seed=2)
        for step in range(2):
            assembly.position.step = step
            drawn = (batch_for(chain.objective, seed=10 * step + number) for number in range(MICRO_BATCHES))
            batches = {number: Batch(*batch) for number, batch in enumerate(drawn)}
            num_tokens = sum(batch.num_unmasked for batch in batches.values())
            outcome.losses += losses_of(assembly.order(run, lambda _: nullcontext(), batches, num_tokens))
            assert math.isfinite(assembly.optimizer.norm())
            assembly.optimizer.step(1e-2, 1.0 / scale.value)
            assembly.optimizer.flush()
            assembly.end_step()
        outcome.tensors = {name: value.clone() for name, value in assembly.optimizer.state()}
    finally:
        assembly.tiers.close()
    return outcome


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return {name: train(dict(model), None, tmp_path_factory.mktemp("plain")) for name, model in MODELS.items()}


@pytest.mark.sweep
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", MODELS)
def test_no_plan_changes_a_bit(model: str, plan: str, plain: dict[str, Outcome], tmp_path: Path) -> None:
    assert train(dict(MODELS[model]), PLANS[plan], tmp_path).differences(plain[model]) == []


FLOAT16_PLANS = PLANS if FULL else {name: PLANS[name] for name in list(PLANS)[-1:]}
"""under SPILLWAY_DEPTH=all all"""


@pytest.mark.parametrize("model", [name for name in MODELS if name != "gemma2"])  # its values overflow float16
def test_every_family_trains_in_float16_and_no_plan_changes_a_bit(model: str, tmp_path: Path) -> None:
    """Adapters as well, whose own gradients are float32 and carry the loss scale all the same."""
    plain = train(dict(MODELS[model]), None, tmp_path, "float16")
    for make_plan in FLOAT16_PLANS.values():
        assert train(dict(MODELS[model]), make_plan, tmp_path, "float16").differences(plain) == []


def test_the_runs_learn_something_each_of_its_own(plain: dict[str, Outcome]) -> None:
    """Else one passing test would say nothing about the others."""
    assert len({tuple(outcome.losses) for outcome in plain.values()}) == len(plain)
    for name, outcome in plain.items():
        moved = [state for state in outcome.tensors if state.startswith("exp_avg.") and outcome.tensors[state].any()]
        assert moved, name
