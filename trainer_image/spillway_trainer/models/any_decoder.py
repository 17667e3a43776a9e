"""Decoders of `transformers` by their structure: whatever computes before a list of equal layers, the layers, the rest.

    before  the model's own forward, as far as its first layer
    layer   called as the model's own forward calls it: what it hands over beside the hidden states is recorded once
    after   the modules that the forward calls after its last layer, then the forward of the model with its head

tests/parity/models/test_huggingface.py compares loss and gradients of each family that is listed in families.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from spillway.errors import UserError

from .chain import token_loss
from .huggingface import HuggingFaceChain, numbered

TRACED_TOKENS = 4


class _Reached(Exception):
    """The first layer was called, with these hidden states."""

    def __init__(self, x_BTD: Tensor) -> None:
        super().__init__()
        self.x_BTD = x_BTD


class _Stand(nn.Module):
    """Stands for a module."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, *values: Any, **named: Any) -> Any:
        return self.answer(*values, **named)


@contextmanager
def _replaced(owner: nn.Module, name: str, stand: nn.Module) -> Iterator[None]:
    known = owner._modules[name]
    owner._modules[name] = stand
    try:
        yield
    finally:
        owner._modules[name] = known


def _stop(x_BTD: Tensor, *_: Any, **__: Any) -> None:
    raise _Reached(x_BTD)


class Before(nn.Module):
    """Tokens to the hidden states that the first layer gets."""

    def __init__(self, parts: list[nn.Module], base: nn.Module, owner: nn.Module, name: str) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self._run = (base, owner, name)  # a tuple, so that the whole model is not a part of this one

    def forward(self, tokens_BT: Tensor) -> Tensor:
        base, owner, name = self._run
        try:
            with _replaced(owner, name, nn.ModuleList([_Stand(_stop)])):
                base(input_ids=tokens_BT, use_cache=False)
        except _Reached as reached:
            return reached.x_BTD
        raise AssertionError("a forward calls its first layer")


class Layer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.named: Any = None
        """Structure of what the layer is called with, and its values that are no tensors."""

    def forward(self, x_BTD: Tensor, *tensors: Tensor) -> Tensor:
        values, spec = self.named
        given = iter(tensors)
        leaves = [next(given) if value is Tensor else value for value in values]
        found = self.layer(x_BTD, **tree_unflatten(leaves, spec))
        return found[0] if isinstance(found, tuple) else found  # type: ignore[no-any-return]


class After(nn.Module):
    """Final norm, output projection and loss: the logits live and die inside one segment."""

    def __init__(self, parts: list[nn.Module], head: nn.Module, model: Any) -> None:
        super().__init__()
        self.parts, self.head = nn.ModuleList(parts), head
        self._run = (model,)

    def forward(self, x_BTD: Tensor, labels_BT: Tensor, num_tokens: int) -> Tensor:
        (model,) = self._run
        for part in self.parts:
            x_BTD = part(x_BTD)
        told = SimpleNamespace(
            last_hidden_state=x_BTD, past_key_values=None, hidden_states=None, attentions=None, router_logits=None
        )
        with _replaced(model, model.base_model_prefix, _Stand(lambda *_, **__: told)):
            logits = model(inputs_embeds=x_BTD, use_cache=False).logits
        return token_loss(logits.float(), labels_BT, num_tokens)


class AnyDecoder(HuggingFaceChain):
    """A decoder with one list of layers that are called one after the other, each with the result of the one before."""

    def make_segments(self) -> list[tuple[str, nn.Module]]:
        base = self.model.base_model
        owner, name = _list_of_layers(self.model)
        layers = owner._modules[name]
        before, after = _parts(self.model)
        modules = dict(base.named_modules())
        self._layers = [Layer(layer) for layer in layers]  # type: ignore[union-attr]
        return [
            ("embedding", Before([modules[path] for path in before], base, owner, name)),
            *numbered("block", self._layers),
            ("head", After([modules[path] for path in after], self.model.get_output_embeddings(), self.model)),
        ]

    def arguments(self, segment: str, tokens_BT: Tensor, labels_BT: Tensor, num_tokens: int) -> tuple[object, ...]:
        if segment == "embedding":
            return ()
        if segment == "head":
            return labels_BT, num_tokens
        return self.tables(tokens_BT)[int(segment.removeprefix("block"))]  # type: ignore[no-any-return]

    def make_tables(self, tokens_BT: Tensor) -> tuple[Any, ...]:
        """For each layer the tensors that it is called with: masks, positions."""
        hidden = torch.zeros(
            (*tokens_BT.shape, self.config.hidden_size), dtype=self.hidden_dtype, device=tokens_BT.device
        )
        tensors = []
        for layer, (values, named) in zip(self._layers, _traced(self.model, hidden)[1], strict=True):
            if values:
                raise UserError(f"{type(self.model).__name__}: hands more than hidden states to its layers by position")
            leaves, spec = tree_flatten(named)
            layer.named = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
            tensors.append(tuple(leaf for leaf in leaves if isinstance(leaf, Tensor)))
        return tuple(tensors)


def _list_of_layers(model: Any) -> tuple[nn.Module, str]:
    """The module that holds the only list of all layers, and its name there."""
    found = [
        (owner, name)
        for owner in model.base_model.modules()
        for name, child in owner.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == model.config.num_hidden_layers
    ]
    if len(found) != 1:
        raise UserError(
            f"{type(model).__name__}: has {len(found)} lists of {model.config.num_hidden_layers} layers, needed is "
            "one; declare a Chain in an entry point"
        )
    return found[0]


def _parts(model: Any) -> tuple[list[str], list[str]]:
    """Names, below the base model, of modules that a forward calls before its layers, and after."""
    hidden = torch.zeros(1, TRACED_TOKENS, model.config.hidden_size)
    calls, _ = _traced(model, hidden)
    first, last = calls.index(""), len(calls) - calls[::-1].index("")
    return list(dict.fromkeys(calls[:first])), list(dict.fromkeys(calls[last:]))


def _traced(model: Any, hidden_BTD: Tensor) -> tuple[list[str], list[tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Runs the base model's forward without its layers and without parameters: the names of the modules that it calls,
    "" for a layer; and what each layer is called with beside the hidden states."""
    calls: list[str] = []
    layers: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    owner, name = _list_of_layers(model)
    parts = {
        path: module
        for path, module in model.base_model.named_modules()
        if path and not any(True for _ in module.children()) and f".{name}." not in f".{path}"
    }
    forwards = {path: part.forward for path, part in parts.items()}

    def stand(path: str, part: nn.Module) -> Callable[..., Any]:
        weighs = any(True for _ in part.parameters())

        def forward(value: Tensor, *values: Any, **named: Any) -> Any:
            calls.append(path)
            if weighs:
                return value if value.is_floating_point() else hidden_BTD
            return forwards[path](value, *values, **named)

        return forward

    def layer(x_BTD: Tensor, *values: Any, **named: Any) -> Tensor:
        calls.append("")
        layers.append((values, named))
        return x_BTD

    tokens_BT = torch.zeros(hidden_BTD.shape[:2], dtype=torch.int64, device=hidden_BTD.device)
    stands = nn.ModuleList(_Stand(layer) for _ in range(model.config.num_hidden_layers))
    try:
        for path, part in parts.items():
            part.forward = stand(path, part)
        with torch.no_grad(), _replaced(owner, name, stands):
            model.base_model(input_ids=tokens_BT, use_cache=False)
    finally:
        for path, part in parts.items():
            part.forward = forwards[path]
    return calls, layers
