"""spec.model -> Chain, for each kind of model."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import nn

from spillway.api.model import Location, Model
from spillway.api.training_job import TrainingJobSpec
from spillway.errors import UserError
from spillway.extras import need

from .. import running_statistics
from ..corpus.text_source import directory_of
from ..entry_point import function_of
from .chain import Chain, without_memory
from .sequential import SequentialChain
from .transformer import Transformer, TransformerConfig

KNOWN = "a model of AutoModelForCausalLM, AutoModelForMaskedLM (transformers) or a T5ForConditionalGeneration"
MOST_CHILDREN = 6
"""Most children that a message names."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
NO_CLAIMS: Mapping[str, str] = {}


def build_model(spec: TrainingJobSpec, claims: Mapping[str, str] = NO_CLAIMS) -> Chain:
    """The model of a job in its compute dtype, without memory: every parameter is on device `meta`, every buffer real.

    The code that assembles the run decides where parameters live (chain.allocate gives all of them memory). Buffers
    that the model's code draws at random come from the job's seed, so every attempt and every rank has the same.
    `claims`: name -> directory, for a source on a claim. Raises UserError for a model that cannot be built or trained.
    """
    _seed_user_code(spec.training.seed)
    chain = _chain(spec, claims)
    _check_length(chain, spec.training.sequence_length)
    if empty := [name for name, parameter in chain.named_parameters() if not parameter.numel()]:
        raise UserError(
            f"spec.model: parameter {empty[0]} has no elements, so it cannot be trained; remove the parameter"
        )
    return chain


def _seed_user_code(seed: int) -> None:
    """Seeds what an entry point may draw from: `random`, `numpy.random`, and torch's generator for CPUs, whose own seed
    differs from process to process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def _chain(spec: TrainingJobSpec, claims: Mapping[str, str]) -> Chain:
    model, compute = spec.model, DTYPES[spec.model.precision.compute]
    if model.entrypoint is not None:
        return _from_entrypoint(model, compute)
    if model.source is not None:
        packed_length = spec.training.sequence_length if spec.data.packing else 0
        return _from_source(model, model.source, compute, claims, packed_length)
    if model.is_own_llama:
        with without_memory(compute):
            return Transformer(_transformer_config(spec))
    families = _families()
    made = families.empty_model(families.config_of(model.transformer, spec.training.sequence_length), compute)
    return families.chain_of(made, compute, model.lora)  # type: ignore[no-any-return]


def _transformer_config(spec: TrainingJobSpec) -> TransformerConfig:
    sizes = spec.model.transformer
    return TransformerConfig(
        hidden_size=sizes.hidden_size,
        num_layers=sizes.num_layers,
        num_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_key_value_heads,
        intermediate_size=sizes.intermediate_size,
        vocab_size=sizes.vocab_size,
        tie_word_embeddings=sizes.tie_word_embeddings,
        dropout=sizes.dropout,
        rope_theta=sizes.rope_theta,
        norm_eps=sizes.norm_eps,
    )


def source_directory(source: Location, claims: Mapping[str, str]) -> Path:
    return directory_of(source, claims, "spec.model.source")


def _from_source(
    model: Model, source: Location, compute: torch.dtype, claims: Mapping[str, str], packed_length: int
) -> Chain:
    from .source import open_model_directory  # noqa: PLC0415 - a plain llama needs nothing of this

    families = _families()
    directory = open_model_directory(source_directory(source, claims))
    sizes = families.config_in(directory)
    try:
        return families.chain_of(families.empty_model(sizes, compute), compute, model.lora, directory, packed_length)  # type: ignore[no-any-return]
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{directory.path / 'config.json'}: no model can be built from this {type(sizes).__name__}: "
            f"{type(error).__name__}: {error}; correct config.json"
        ) from error


def _from_entrypoint(model: Model, compute: torch.dtype) -> Chain:
    """Calls the function where new parameters take no memory, and turns what it returned into a Chain."""
    assert model.entrypoint is not None
    where = f"spec.model.entrypoint = {model.entrypoint}"
    function = function_of(model.entrypoint, where)
    try:
        with without_memory(compute):
            made = function()
        if is_plain_sequential(made) and model.lora is None:
            made = SequentialChain(made, where)
        if isinstance(made, Chain) and model.lora is None:
            return _checked(made, where)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{where}: raised {type(error).__name__}: {error}") from error
    families = _families()
    if not families.is_known(made):
        raise no_chain(made, where, has_lora=model.lora is not None)
    families.check_model(made, where)
    return families.chain_of(made, compute, model.lora)  # type: ignore[no-any-return]


def is_plain_sequential(made: object) -> TypeGuard[nn.Sequential]:
    """Whether `made` is an nn.Sequential with the forward of nn.Sequential."""
    return isinstance(made, nn.Sequential) and type(made).forward is nn.Sequential.forward


def no_chain(made: object, where: str, *, has_lora: bool) -> UserError:
    """Returns an error that says what was returned, and how to declare segments."""
    found = f"{where}: returned {type(made).__name__}"
    if has_lora:
        return UserError(f"{found}, but lora needs {KNOWN}")
    if isinstance(made, nn.Module):
        children = [f"{name}: {type(child).__name__}" for name, child in made.named_children()]
        more = ", ..." if len(children) > MOST_CHILDREN else ""
        found += f" ({', '.join(children[:MOST_CHILDREN])}{more})" if children else ""
        found += ", whose forward cannot be cut into segments automatically"
    return UserError(
        f"{found}. Return its layers as an nn.Sequential, from nn.Embedding to logits: each child is a segment. Or a "
        "Chain (spillway_trainer.models.chain): `segments` lists (name, module) in forward order, each is called with "
        "what the one before it returned and with `arguments`, and the last returns the loss (docs/models.md, Entry "
        f"points). Or {KNOWN}, whose segments are found"
    )


def _checked(chain: Chain, where: str) -> Chain:
    """Checks a user's own Chain against this module's contract. Raises UserError that says what it breaks."""
    running_statistics.allocate(chain)
    real = [name for name, parameter in chain.named_parameters() if not parameter.is_meta]
    unset = [name for name, buffer in chain.named_buffers() if buffer.is_meta]
    segments = [name for name, _ in chain.segments]
    if repeated := [name for name, count in Counter(segments).items() if count > 1]:
        raise UserError(f"{where}: {repeated[0]} is the name of several segments of the Chain; give each its own name")
    if real:
        raise UserError(
            f"{where}: parameter {real[0]} already has memory; create parameters without the argument device, because "
            "Spillway allocates them"
        )
    if unset:
        raise UserError(
            f"{where}: buffer {unset[0]} has no values, because it is on device meta; create buffers with device='cpu'"
        )
    uses = Counter(id(p) for _, module in chain.segments for p in module.parameters())
    for name, parameter in chain.named_parameters():
        if (count := uses.pop(id(parameter), 0)) != 1:
            raise UserError(
                f"{where}: every parameter must belong to exactly one segment of the Chain, but {name} belongs to "
                f"{count}; if several segments share it, give each segment its own parameter, and list these "
                "parameters in the property `tied` of the Chain"
            )
    if uses:
        raise UserError(
            f"{where}: a segment has a parameter that is not a parameter of the Chain; register every segment as a "
            "submodule of the Chain"
        )
    _check_tied(chain, where)
    return chain


def _check_tied(chain: Chain, where: str) -> None:
    parameters, tied = dict(chain.named_parameters()), dict(chain.tied)
    for alias, owner in tied.items():
        said = f"{where}: the property `tied` says that parameter {alias} is {owner}"
        if unknown := [name for name in (alias, owner) if name not in parameters]:
            raise UserError(f"{said}, but the Chain has no parameter {unknown[0]}")
        if owner in tied:
            raise UserError(f"{said}, but {owner} is itself tied; tie {alias} to a parameter that is not tied")
        one, other = (
            f"{list(p.shape)} {p.dtype} {'trained' if p.requires_grad else 'frozen'}"
            for p in (parameters[alias], parameters[owner])
        )
        if one != other:
            raise UserError(
                f"{said}, but they are {one} and {other}; give both parameters the same shape and type, and train both "
                "or neither"
            )


def _check_length(chain: Chain, sequence_length: int) -> None:
    if chain.max_positions is not None and sequence_length > chain.max_positions:
        raise UserError(
            f"spec.training.sequenceLength = {sequence_length}: the model has {chain.max_positions} "
            "learned positions, one per token of a sequence; use a sequenceLength of at most this number"
        )


def _families() -> Any:
    """Imports the module for models of transformers, which takes a second. Raises UserError if the extra [hf] is
    missing."""
    need("hf")
    from . import families  # noqa: PLC0415

    return families
