"""spec.model -> Chain: the one place that knows how each kind of model comes to be."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spillway.api import Location, Model, TrainingJobSpec
from spillway.errors import UserError

from .. import config
from .chain import Chain
from .transformer import Transformer

NO_CLAIMS: Mapping[str, str] = {}


def build_model(spec: TrainingJobSpec, claims: Mapping[str, str] = NO_CLAIMS) -> Chain:
    """The model of a job in its compute dtype, without memory: every parameter is on device `meta`, every buffer real.

    Whoever assembles the run decides where parameters live (chain.allocate gives all of them memory). `claims`: name ->
    directory, for a source that lies on one. Raises UserError for a model that cannot be built or trained.
    """
    chain = _chain(spec, claims)
    _check_length(chain, spec.training.sequence_length)
    return chain


def _chain(spec: TrainingJobSpec, claims: Mapping[str, str]) -> Chain:
    model, compute = spec.model, config.compute_dtype(spec)
    if model.entrypoint is not None:
        return _from_entrypoint(model, compute)
    if model.source is not None:
        return _from_source(model, model.source, compute, claims)
    if model.is_own_llama:
        with without_memory(compute):
            return Transformer(config.transformer_config(spec))
    families = _families()
    made = families.empty_model(families.config_of(model.transformer, spec.training.sequence_length))
    return families.chain_of(made, compute, model.lora)  # type: ignore[no-any-return]


def source_directory(source: Location, claims: Mapping[str, str]) -> Path:
    return config.directory_of(source, claims, "spec.model.source")


def _from_source(model: Model, source: Location, compute: torch.dtype, claims: Mapping[str, str]) -> Chain:
    from .source import open_model_directory  # noqa: PLC0415 - a plain llama needs nothing of this

    families = _families()
    directory = open_model_directory(source_directory(source, claims))
    made = families.empty_model(families.config_in(directory))
    return families.chain_of(made, compute, model.lora, directory)  # type: ignore[no-any-return]


def _from_entrypoint(model: Model, compute: torch.dtype) -> Chain:
    """Call it where new parameters take no memory, and see what it returned."""
    assert model.entrypoint is not None
    where = f"spec.model.entrypoint = {model.entrypoint}"
    function = _function(model.entrypoint, where)
    try:
        with without_memory(compute):
            made = function()
    except Exception as error:
        raise UserError(f"{where}: raised {type(error).__name__}: {error}") from error
    if isinstance(made, Chain) and model.lora is None:
        return _checked(made, where)
    if not isinstance(made, nn.Module) or isinstance(made, Chain):
        wanted = "a PreTrainedModel of transformers, for lora" if model.lora else "a Chain or a PreTrainedModel"
        raise UserError(f"{where}: returned {type(made).__name__}, needed is {wanted}")
    families = _families()
    families.check_model(made, where)
    return families.chain_of(made, compute, model.lora)  # type: ignore[no-any-return]


def _function(entrypoint: str, where: str) -> Callable[[], object]:
    module_name, colon, name = entrypoint.partition(":")
    if not colon or not module_name or not name:
        raise UserError(f"{where}: write package.module:function")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UserError(
            f"{where}: cannot import {module_name}: {type(error).__name__}: {error}; install it beside the trainer, or "
            "name its directory in PYTHONPATH"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{where}: {module_name} has no function {name}")
    return function  # type: ignore[no-any-return]


def _checked(chain: Chain, where: str) -> Chain:
    """A user's own Chain keeps the contract of this module. Raises UserError that says what it breaks."""
    real = [name for name, parameter in chain.named_parameters() if not parameter.is_meta]
    unset = [name for name, buffer in chain.named_buffers() if buffer.is_meta]
    inside = [id(p) for _, module in chain.segments for p in module.parameters()]
    if real:
        raise UserError(
            f"{where}: parameter {real[0]} has memory already; make parameters without a device of their own"
        )
    if unset:
        raise UserError(f"{where}: buffer {unset[0]} has no values; make buffers with device='cpu'")
    if sorted(inside) != sorted(id(p) for p in chain.parameters()):
        raise UserError(f"{where}: every parameter must belong to exactly one segment of the Chain")
    return chain


def _check_length(chain: Chain, sequence_length: int) -> None:
    if chain.max_positions is not None and sequence_length > chain.max_positions:
        raise UserError(
            f"spec.training.sequenceLength = {sequence_length}: the model has {chain.max_positions} learned positions; "
            "use at most so many"
        )


@contextmanager
def without_memory(dtype: torch.dtype) -> Iterator[None]:
    """New parameters are on device meta and, unless told otherwise, of type `dtype`."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(default)


def _families() -> Any:
    """The module for models of transformers, which takes a second to import. Raises UserError where it is missing."""
    try:
        from . import families  # noqa: PLC0415
    except ImportError as error:
        raise UserError(f"spec.model: needs transformers and peft ({error}); pip install 'spillway[hf]'") from error
    return families
