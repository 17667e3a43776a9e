"""Small models of `transformers` for tests, built as the trainer builds them and filled with values."""

from __future__ import annotations

from typing import Any

import torch
import yaml
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from spillway.api.training_job import TrainingJob, TrainingJobSpec
from spillway_trainer.corpus.objective import IGNORED_LABEL, TrainingObjective, prefix_length
from spillway_trainer.models.build import DTYPES, build_model
from spillway_trainer.models.chain import Chain, allocate
from spillway_trainer.models.families import chain_of, class_of

VOCABULARY, LENGTH, BATCH = 97, 16, 2
SPEC = """
apiVersion: spillway.dev/v1alpha1
kind: TrainingJob
metadata: {name: small}
spec:
  model:
    config: {architecture: llama, hiddenSize: 32, numLayers: 2, numHeads: 4, intermediateSize: 48, vocabSize: 97}
    precision: {compute: float32}
  data: {builtin: PythonStdlib}
  training: {steps: 2, sequenceLength: 16, globalBatchSize: 4, microBatchSize: 2}
"""


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64,
}  # fmt: skip
MOE = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
OF_STRUCTURE: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("gpt_neox", "opt", "bloom", "cohere", "olmo2", "phi", "phi3", "starcoder2", "granite")},
    **{name: {} for name in ("stablelm", "nemotron", "roberta", "electra")},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 5},
    "gemma3_text": {"head_dim": 8, "sliding_window": 5, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]], "window_size": 5},
    "falcon": {"alibi": False},
    "falcon, alibi": {"alibi": True, "new_decoder_architecture": True, "num_kv_heads": 2},
    "distilbert": {"dim": 32, "hidden_dim": 48},
    "mixtral": {"num_local_experts": 4, "sliding_window": 5},
    "qwen2_moe": {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 24, "mlp_only_layers": [1]},
    "qwen3_moe": {**MOE, "num_experts": 4, "head_dim": 16},
    "mamba2": {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "deberta-v2": {"type_vocab_size": 0},
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 3, "attention_heads": 4},
    "llama4_text": {
        "head_dim": 8,
        "num_local_experts": 2,
        "intermediate_size_mlp": 48,
        "layer_types": ["full_attention"] * 3,
        "no_rope_layers": [0] * 3,
        "attn_temperature_tuning": True,
        "pad_token_id": None,
    },
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8, "sliding_window": 5},
}
"""Structure -> fields of its configuration in addition to SIZES."""
TOKENS = {"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0}


def of_structure(name: str) -> PreTrainedModel:
    family = name.partition(",")[0]
    own = OF_STRUCTURE.get(name, {})
    tokens = TOKENS | ({"pad_token_id": 1} if family == "roberta" else {})
    return class_of(family, "test")(AutoConfig.for_model(family, **SIZES | tokens | own))


def spec_of(architecture: str = "llama", compute: str = "float32", **model: Any) -> TrainingJobSpec:
    """A job's spec. `model` replaces or adds fields of spec.model (None removes one); its `config` does so for the
    sizes."""
    document = yaml.safe_load(SPEC)
    fields = document["spec"]["model"]
    fields["config"] |= {"architecture": architecture, **(model.pop("config", None) or {})}
    fields["precision"]["compute"] = compute
    if model.keys() & {"source", "entrypoint"}:
        del fields["config"]
    fields |= model
    return TrainingJob.model_validate(document).spec


def filled(chain: Chain, seed: int = 1, scale: float = 3.0) -> Chain:
    """Gives a chain memory and values. Matrices are `scale` times their initial values, so that a wrong bit changes
    results."""
    allocate(chain)
    for name, value in chain.initial_values(seed):
        chain.get_parameter(name).data.copy_(value * scale if value.dim() > 1 else value)
    chain.tie()
    return chain


def structural_chain(name: str, compute: str = "float32") -> Chain:
    """The chain of one of OF_STRUCTURE, without memory."""
    with torch.device("meta"):
        model = of_structure(name)
    return chain_of(model, DTYPES[compute])


def small_model(architecture: str = "llama", compute: str = "float32", scale: float = 3.0, **model: Any) -> Chain:
    return filled(build_model(spec_of(architecture, compute, **model)), scale=scale)


def batch_for(
    objective: TrainingObjective, seed: int = 5, batch: int = BATCH, length: int = LENGTH
) -> tuple[Tensor, Tensor, int]:
    """Tokens, labels and the number of labels that count; some labels are ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(0, VOCABULARY, (2, batch, length), generator=generator)
    left_out = torch.rand(labels.shape, generator=generator) < (0.8 if objective is TrainingObjective.MASKED else 0.2)
    if objective is TrainingObjective.PREFIX:
        left_out[:, : prefix_length(length)] = True
        labels = tokens.clone()
    labels = labels.masked_fill(left_out, IGNORED_LABEL)
    return tokens.clone(), labels, int((labels != IGNORED_LABEL).sum())
