"""The supported families of `transformers`, built on device `meta`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    CohereForCausalLM,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralForCausalLM,
    NemotronForCausalLM,
    Olmo2ForCausalLM,
    Phi3ForCausalLM,
    PhiForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    StableLmForCausalLM,
    Starcoder2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from spillway.api.model import Lora, ModelConfig
from spillway.errors import UserError

from .any_decoder import AnyDecoder
from .bert import Bert, drop_second_bias
from .decoders import Gpt2, LlamaLike
from .huggingface import HuggingFaceChain, is_adapter
from .lora import add_adapters
from .source import ModelDirectory, match, stored_name
from .t5 import T5, share_embedding

MOST_LABELS = 100_000
"""Labels of a classifier's head, which no model here has."""
SIZES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "head_dim", "d_kv"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads"),
    "num_key_value_heads": ("num_key_value_heads",),
    "intermediate_size": ("intermediate_size", "n_inner", "d_ff"),
    "vocab_size": ("vocab_size", "type_vocab_size"),
    "max_positions": ("max_position_embeddings", "n_positions", "n_ctx", "relative_attention_num_buckets"),
}
"""Field of spec.model.config -> names in config.json that are bounded unchanged."""


@dataclass(frozen=True, slots=True)
class Family:
    model: type[PreTrainedModel]
    chain: type[HuggingFaceChain]
    prepare: Callable[[PreTrainedModel], None] = lambda model: None
    """Preparation before parameters are distinguished by name."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Name in files -> name of the parameter here, if they differ."""
    apart_when_untied: frozenset[str] = frozenset()
    """Entries of `renamed` that are useless in addition to the parameter's own name if tie_word_embeddings is false."""
    unused: str = r"$^"
    """Regular expression: names in files that the model does not have: buffers, and heads for other objectives."""
    learned_positions: bool = False
    """Whether sequences are limited to config.max_position_embeddings."""


BY_STRUCTURE: tuple[Any, ...] = (
    CohereForCausalLM, Gemma2ForCausalLM, Gemma3ForCausalLM, GemmaForCausalLM, GraniteForCausalLM,
    NemotronForCausalLM, Olmo2ForCausalLM, Phi3ForCausalLM, PhiForCausalLM, StableLmForCausalLM, Starcoder2ForCausalLM,
)  # fmt: skip
"""Decoders that are no more than any_decoder.py's structure."""
FAMILIES: dict[str, Family] = {
    "llama": Family(LlamaForCausalLM, LlamaLike, unused=r"rotary_emb\.inv_freq$"),
    "mistral": Family(MistralForCausalLM, LlamaLike, unused=r"rotary_emb\.inv_freq$"),
    "qwen2": Family(Qwen2ForCausalLM, LlamaLike, unused=r"rotary_emb\.inv_freq$"),
    "qwen3": Family(Qwen3ForCausalLM, LlamaLike, unused=r"rotary_emb\.inv_freq$"),
    **{
        model.config_class.model_type: Family(model, AnyDecoder, unused=r"rotary_emb\.inv_freq$")
        for model in BY_STRUCTURE
    },
    "gpt2": Family(GPT2LMHeadModel, Gpt2, unused=r"\.attn\.(masked_)?bias$", learned_positions=True),
    "bert": Family(
        BertForMaskedLM,
        Bert,
        drop_second_bias,
        renamed={"cls.predictions.bias": "cls.predictions.decoder.bias"},
        apart_when_untied=frozenset({"cls.predictions.bias"}),
        unused=r"^bert\.pooler\.|^cls\.seq_relationship\.|\.position_ids$|\.token_type_ids$",
        learned_positions=True,
    ),
    "t5": Family(
        T5ForConditionalGeneration,
        T5,
        share_embedding,
        renamed={"encoder.embed_tokens.weight": "shared.weight"},
        unused=r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.",
    ),
}


def family_of(model_type: object, where: str) -> Family:
    """Raises UserError for a model type that has no adapter; `where` names what asked for it."""
    family = FAMILIES.get(str(model_type))
    if family is None:
        known = ", ".join(FAMILIES)
        raise UserError(f"{where}: model_type {model_type!r} cannot be trained; use one of {known}")
    return family


def config_of(sizes: ModelConfig, sequence_length: int) -> PreTrainedConfig:
    """spec.model.config as the configuration of its family. Token 0 is the end of text (tokens.py)."""
    make = {"llama": _llama_config, "gpt2": _gpt2_config, "bert": _bert_config, "t5": _t5_config}
    return make[sizes.architecture](sizes, sequence_length)


def _llama_config(sizes: ModelConfig, sequence_length: int) -> PreTrainedConfig:
    if sizes.dropout:
        raise UserError("spec.model.config.dropout: llama of transformers, used for lora, has no dropout; set it to 0")
    return LlamaConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_key_value_heads,
        intermediate_size=sizes.intermediate_size,
        max_position_embeddings=sequence_length,
        rms_norm_eps=sizes.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": sizes.rope_theta},
        tie_word_embeddings=sizes.tie_word_embeddings,
        bos_token_id=0,
        eos_token_id=0,
    )


def _gpt2_config(sizes: ModelConfig, sequence_length: int) -> PreTrainedConfig:
    """Dropout as everywhere here: on the outputs of attention and feed-forward, and on nothing else."""
    return GPT2Config(
        vocab_size=sizes.vocab_size,
        n_positions=sizes.max_positions,
        n_embd=sizes.hidden_size,
        n_layer=sizes.num_layers,
        n_head=sizes.num_heads,
        n_inner=sizes.intermediate_size,
        resid_pdrop=sizes.dropout,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        layer_norm_epsilon=sizes.norm_eps,
        tie_word_embeddings=sizes.tie_word_embeddings,
        bos_token_id=0,
        eos_token_id=0,
    )


def _bert_config(sizes: ModelConfig, sequence_length: int) -> PreTrainedConfig:
    """One rate drops outputs of attention and feed-forward and, bert has it so, of the embedding. No padding token: its
    embedding would get no gradient, and here every token of a window is one of the text."""
    return BertConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        intermediate_size=sizes.intermediate_size,
        max_position_embeddings=sizes.max_positions,
        hidden_dropout_prob=sizes.dropout,
        attention_probs_dropout_prob=0.0,
        layer_norm_eps=sizes.norm_eps,
        tie_word_embeddings=sizes.tie_word_embeddings,
        pad_token_id=None,
    )


def _t5_config(sizes: ModelConfig, sequence_length: int) -> PreTrainedConfig:
    """`numLayers` in each of the two stacks. One rate drops everything that t5 drops, attention weights included."""
    return T5Config(
        vocab_size=sizes.vocab_size,
        d_model=sizes.hidden_size,
        d_kv=sizes.hidden_size // sizes.num_heads,
        d_ff=sizes.intermediate_size,
        num_layers=sizes.num_layers,
        num_heads=sizes.num_heads,
        dropout_rate=sizes.dropout,
        layer_norm_epsilon=sizes.norm_eps,
        pad_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=0,  # type: ignore[call-arg]  # a field of its base
    )


def config_in(directory: ModelDirectory) -> PreTrainedConfig:
    """config.json of a model directory. Code that the directory may bring with it is never run."""
    where = str(directory.path / "config.json")
    family = family_of(directory.config.get("model_type"), where)
    _check_counts(directory, where)
    _check_sizes(directory.config, where)
    try:
        return config_from(directory.config)
    except Exception as error:  # whatever the classes of transformers raise
        raise UserError(f"{where}: not the configuration of a {family.model.__name__}: {error}") from error


def _check_counts(directory: ModelDirectory, where: str) -> None:
    """Raises UserError for more layers than the files have tensors, or more labels than any head: objects are made for
    each of them before anything else is looked at."""
    layers = dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"), len(directory.tensors))
    for name, most in {**layers, "num_labels": MOST_LABELS}.items():
        count = directory.config.get(name)
        if isinstance(count, int | float) and count > most:
            raise UserError(f"{where}: {name} is {count}, and its weights allow at most {most}")


def _check_sizes(document: Mapping[str, Any], where: str) -> None:
    """Raises UserError for a size that no spec.model.config may have either: tables are made of it, and plans."""
    for size_of, names in SIZES.items():
        most = min(bound.le for bound in ModelConfig.model_fields[size_of].metadata if hasattr(bound, "le"))
        for name in names:
            size = document.get(name)
            if isinstance(size, int | float) and not 1 <= size <= most:
                raise UserError(f"{where}: {name} is {size:.15g}, allowed are 1 to {most}")


def config_from(document: Mapping[str, Any]) -> PreTrainedConfig:
    config_class: Any = FAMILIES[document["model_type"]].model.config_class
    config: PreTrainedConfig = config_class.from_dict(dict(document))
    return config


def is_known(model: object) -> bool:
    """Of a class that `chain_of` takes."""
    return type(model) in {family.model for family in FAMILIES.values()}


def known_names() -> list[str]:
    return [family.model.__name__ for family in FAMILIES.values()]


def check_model(model: nn.Module, where: str) -> None:
    """Raises UserError when a model of a known class, made by a user's function, has memory already."""
    real = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
    if real:
        raise UserError(f"{where}: {real[0]} already has memory; make the model from its configuration, not by loading")


def empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return family_of(config.model_type, "model").model(config)


def chain_of(
    model: PreTrainedModel, compute: torch.dtype, lora: Lora | None = None, directory: ModelDirectory | None = None
) -> HuggingFaceChain:
    """`model`, whose parameters are on device meta, as a Chain; its values are those of `directory`, if given."""
    family = family_of(model.config.model_type, type(model).__name__)
    family.prepare(model)
    if lora is not None:
        add_adapters(model, lora)
    tie_head = directory is None or directory.config.get("tie_word_embeddings") is not False
    chain = family.chain(model, compute, tie_head=tie_head)
    chain.max_positions = model.config.max_position_embeddings if family.learned_positions else None
    if directory is not None:
        names = {name: tuple(p.shape) for name, p in chain.named_parameters() if name not in chain.tied}
        shapes = {name: shape for name, shape in names.items() if not is_adapter(name)}
        apart = frozenset() if tie_head else family.apart_when_untied
        chain.weights = match(directory, shapes, stored_as(chain, family, directory.tensors, apart))
    return chain


def stored_as(
    chain: HuggingFaceChain, family: Family, stored: Iterable[str], apart: Collection[str] = ()
) -> dict[str, str | None]:
    """Stored name -> parameter of the chain; None for what the model has no use for (Family.unused, and `apart` beside
    the parameter's own name). A name that means nothing stays as it is."""
    stored = list(stored)
    base = family.model.base_model_prefix + "."
    parameters = {stored_name(name): name for name, _ in chain.named_parameters()}
    # save_pretrained() of the model without its head leaves the base's name out.
    lacks_base = hasattr(chain.model, base[:-1]) and not any(name.startswith(base) for name in stored)
    found: dict[str, str | None] = {}
    for name in stored:
        full = base + name if lacks_base and name not in parameters else name
        # Files of before 2019 have the names of TensorFlow.
        full = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", full))
        parameter = parameters.get(family.renamed.get(full, full))
        if full in apart and family.renamed[full] in stored:
            found[name] = None
        elif parameter is not None:
            found[name] = chain.tied.get(parameter, parameter)
        else:
            found[name] = None if re.search(family.unused, full) else full
    return found
