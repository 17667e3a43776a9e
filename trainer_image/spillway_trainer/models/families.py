"""Text models of `transformers`, built on device `meta`: t5, and every other model whose structure is a chain."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    BertConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from spillway.api.model import Lora, ModelConfig
from spillway.errors import UserError

from .chain import without_memory
from .documents import ATTENTION
from .huggingface import HuggingFaceChain, is_adapter
from .lora import add_adapters
from .source import Merge, ModelDirectory, match, stored_name
from .structure import ENCODER_AND_DECODER, MASKED, StructuralChain, no_chain, second_names, structure_of
from .t5 import T5, share_embedding

MOST_LABELS = 100_000
"""Most labels of a classifier's head, which no model here has."""
SIZES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "head_dim", "d_kv"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads"),
    "num_key_value_heads": ("num_key_value_heads",),
    "intermediate_size": ("intermediate_size", "n_inner", "d_ff"),
    "vocab_size": ("vocab_size", "type_vocab_size"),
    "max_positions": ("max_position_embeddings", "n_positions", "n_ctx", "relative_attention_num_buckets"),
}
"""Field of spec.model.config -> names in config.json that have the same bounds."""


UNUSED = re.compile(
    r"\.inv_freq$|\.(attn|attention)\.(masked_)?bias$|\.position_ids$|\.token_type_ids$"
    r"|(^|\.)pooler\.|^cls\.seq_relationship\."
    r"|^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\."
)
"""Names in weight files of tensors that no model here uses: buffers, and heads for other objectives."""


def class_of(model_type: object, where: str) -> type[PreTrainedModel]:
    """Returns the class of a model type. Raises UserError if it is no text model of transformers; `where` names what
    asked for it."""
    names = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MASKED, "t5": "T5ForConditionalGeneration"}
    if str(model_type) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.keys() - names.keys():
        raise no_chain(str(model_type), ENCODER_AND_DECODER)
    if str(model_type) not in names:
        raise UserError(
            f"{where}: model_type {model_type!r} is not a text model of transformers {transformers.__version__} with a "
            f"head that predicts tokens; use another model, or declare a Chain in an entry point (docs/models.md, "
            f"Entry points)"
        )
    found: type[PreTrainedModel] = getattr(transformers, names[str(model_type)])
    return found


def config_of(sizes: ModelConfig, sequence_length: int) -> PreTrainedConfig:
    """Returns spec.model.config as the configuration of its family. Token 0 is the end of text (tokens.py)."""
    make = {"llama": _llama_config, "gpt2": _gpt2_config, "bert": _bert_config, "t5": _t5_config}
    return make[sizes.architecture](sizes, sequence_length)


def _llama_config(sizes: ModelConfig, sequence_length: int) -> PreTrainedConfig:
    if sizes.dropout:
        raise UserError(
            "spec.model.config.dropout: with spec.model.lora, llama is LlamaForCausalLM of transformers, which has no "
            "dropout; set dropout to 0"
        )
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
    """Dropout is as in all models here: on the outputs of attention and feed-forward, and on nothing else."""
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
    """One rate drops outputs of attention and feed-forward and, as in bert, of the embedding. There is no padding
    token: its embedding would get no gradient, and here every token of a window is one of the text."""
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
    """`numLayers` is the number of layers in each of the two stacks. One rate drops everything that t5 drops, including
    attention weights."""
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
    """Returns config.json of a model directory. Code in the directory is never run."""
    where = str(directory.path / "config.json")
    model = class_of(directory.config.get("model_type"), where)
    _check_class(directory.config, model, where)
    if directory.config.get("quantization_config") is not None:
        raise UserError(
            f"{where}: quantization_config is set, but Spillway does not train quantized weights; use the model before "
            "its quantization, or remove the field if the weights are not quantized"
        )
    _check_counts(directory, where)
    _check_sizes(directory.config, where)
    try:
        return config_from(directory.config)
    except Exception as error:  # whatever the classes of transformers raise
        raise UserError(
            f"{where}: not a valid configuration of {model.__name__}: {error}; correct config.json"
        ) from error


def _check_class(document: Mapping[str, Any], model: type[PreTrainedModel], where: str) -> None:
    """Raises UserError for a directory of another class than the one that is trained, because it would learn something
    else."""
    if document.get("is_encoder_decoder") and not issubclass(model, T5ForConditionalGeneration):
        raise no_chain(str(document["model_type"]), ENCODER_AND_DECODER)
    named = document.get("architectures")
    for name in named if isinstance(named, list) else ():
        if name != model.__name__ and name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            raise UserError(
                f"{where}: architectures names {name}, but models of type {document['model_type']} are trained as "
                f"{model.__name__}; build a {name} in an entry point that declares a Chain (docs/models.md, Entry "
                f"points), or set architectures to {model.__name__}"
            )


def _check_counts(directory: ModelDirectory, where: str) -> None:
    """Raises UserError for more layers than the files have tensors, or for more labels than any head has: objects are
    made for each of them before anything else is checked."""
    layers = dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"), len(directory.tensors))
    for name, most in {**layers, "num_labels": MOST_LABELS}.items():
        count = directory.config.get(name)
        if isinstance(count, int | float) and count > most:
            raise UserError(f"{where}: {name} is {count}, but this model may have at most {most}; lower {name}")


def _check_sizes(document: Mapping[str, Any], where: str) -> None:
    """Raises UserError for a size that spec.model.config may not have either: tables and plans are made of it."""
    for size_of, names in SIZES.items():
        most = min(bound.le for bound in ModelConfig.model_fields[size_of].metadata if hasattr(bound, "le"))
        for name in names:
            size, least = document.get(name), int(name != "type_vocab_size")  # some families have no token types
            if isinstance(size, int | float) and not least <= size <= most:
                raise UserError(f"{where}: {name} is {size:.15g}; set it to a value from {least} to {most}")


def config_from(document: Mapping[str, Any]) -> PreTrainedConfig:
    config_class: Any = class_of(document["model_type"], "model").config_class
    config: PreTrainedConfig = config_class.from_dict(config_class._decode_special_floats(dict(document)))
    return config


def is_known(model: object) -> bool:
    """Whether `model` is of a class that `chain_of` takes, and that its configuration names."""
    return isinstance(model, PreTrainedModel) and type(model) is class_of(model.config.model_type, "model")


def check_model(model: PreTrainedModel, where: str) -> None:
    """Raises UserError if a model that a user's function made has memory already, or has other modules than its class
    makes from its configuration: those are the modules that are checked for being a chain."""
    real = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
    if real:
        raise UserError(
            f"{where}: parameter {real[0]} already has memory; create the model from its configuration, without "
            "loading weights (for pretrained weights use spec.model.source)"
        )
    made = str(empty_model(model.config)).splitlines()
    if other := [line.strip() for line, own in zip(str(model).splitlines(), made, strict=False) if line != own]:
        raise UserError(
            f"{where}: the modules of {type(model).__name__} differ from those that its configuration makes, first in "
            f"`{other[0]}`; return the model unchanged, or declare a Chain (docs/models.md, Entry points)"
        )


def empty_model(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Returns a model on device meta. Buffers get the type that `from_pretrained` gives them for `dtype`."""
    with without_memory(dtype):
        return class_of(config.model_type, "model")(config)


def chain_of(
    model: PreTrainedModel,
    compute: torch.dtype,
    lora: Lora | None = None,
    directory: ModelDirectory | None = None,
    packed_length: int = 0,
) -> HuggingFaceChain:
    """Returns `model`, whose parameters are on device meta, as a Chain. Its values are those of `directory`, if given.
    `packed_length`: tokens of a row that holds several documents; 0 if each row holds one."""
    tie_head = directory is None or directory.config.get("tie_word_embeddings") is not False
    make: Any = T5
    renamed = {"encoder.embed_tokens.weight": "shared.weight"}
    apart: Collection[str] = ()
    if isinstance(model, T5ForConditionalGeneration):
        share_embedding(model)
    else:
        structure = structure_of(model, packed_length)
        if packed_length:
            model.config._attn_implementation = ATTENTION
        make = partial(StructuralChain, structure)
        renamed = {name: second_names(model)[name] for name in structure.unused}
        apart = () if tie_head else structure.unused
        for name in structure.unused:
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner).register_parameter(leaf, None)
    if lora is not None:
        add_adapters(model, lora)
    chain: HuggingFaceChain = make(model, compute, tie_head=tie_head)
    if directory is not None:
        _check_buffers(directory, model)
        names = {name: tuple(p.shape) for name, p in chain.named_parameters() if name not in chain.tied}
        shapes = {name: shape for name, shape in names.items() if not is_adapter(name)}
        chain.weights = match(directory, shapes, *stored_as(chain, directory.tensors, renamed, apart))
    return chain


def _check_buffers(directory: ModelDirectory, model: PreTrainedModel) -> None:
    """Raises UserError for values in the files that are not parameters but buffers, such as the biases of routers: they
    are neither loaded nor exported."""
    buffers = {name for name, _ in model.named_buffers()} & {
        name for name in directory.tensors if not UNUSED.search(name)
    }
    if buffers:
        raise UserError(
            f"{directory.path}: holds values of {len(buffers)} buffers of {type(model).__name__}, first "
            f"{min(buffers)}, which Spillway neither loads nor exports; load them in an entry point that declares a "
            "Chain (docs/models.md, Entry points)"
        )


def stored_as(
    chain: HuggingFaceChain, stored: Iterable[str], renamed: Mapping[str, str], apart: Collection[str]
) -> tuple[dict[str, str | None], dict[str, Merge]]:
    """Returns stored name -> parameter of the chain; None for what the model does not use (UNUSED, and names in `apart`
    if the parameter's own name is stored, too). An unknown name stays as it is. `renamed`: second name -> name of a
    parameter.

    Also returns parameter -> how its value is made from several stored ones: experts, as `transformers` merges them.
    """
    stored = sorted(stored, key=dot_natural_key)
    conversions = get_model_conversion_mapping(chain.model)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    parameters = {stored_name(name): name for name, _ in chain.named_parameters()}
    known = dict.fromkeys([*parameters, *renamed], True)
    found: dict[str, str | None] = {}
    patterns: dict[str, dict[str, str]] = {}
    for name in stored:
        full, pattern = rename_source_key(name, renamings, converters, chain.model.base_model_prefix, known)
        parameter = parameters.get(renamed.get(full, full))
        if full in apart and renamed[full] in stored:
            found[name] = None
        elif parameter is not None:
            found[name] = chain.tied.get(parameter, parameter)
            if pattern is not None and name != full:
                if len(by_pattern[pattern].target_patterns) > 1:
                    raise UserError(
                        f"{type(chain.model).__name__}: the weight files store several parameters in one tensor "
                        f"({name}), which Spillway does not split; load them in an entry point that declares a Chain "
                        "(docs/models.md, Entry points)"
                    )
                patterns.setdefault(parameter, {})[name] = pattern
        else:
            found[name] = None if UNUSED.search(full) else full
    return found, {name: partial(_merged, stored_name(name), by_pattern, of) for name, of in patterns.items()}


def _merged(
    parameter: str, converters: Mapping[str, WeightConverter], patterns: Mapping[str, str], values: Mapping[str, Tensor]
) -> Tensor:
    """Returns the value of `parameter`, merged from stored ones. `patterns`: stored name -> the pattern of its
    converter."""
    converter: Any = copy.deepcopy(converters[next(iter(patterns.values()))])
    for name, pattern in patterns.items():
        converter.add_tensor(parameter, name, pattern, values[name])
    merged: Tensor = converter.convert(parameter)[parameter]
    return merged


def stored_pieces(model: PreTrainedModel, name: str, value: Tensor) -> dict[str, Tensor]:
    """Returns what save_pretrained() writes for a parameter: one tensor under its name in files, or several."""
    pieces: dict[str, Tensor] = revert_weight_conversion(model, {name: value})
    return pieces
