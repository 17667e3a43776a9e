"""A plain nn.Sequential as a Chain: its children, in order, are the segments.

    tokens_BT -> child -> child ... -> last child -> logits_BTV -> loss

A segment begins at each child that has parameters. A child without parameters (an activation function, a reshape)
belongs to the segment before it, or to the first one. Modules nested in a child stay together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from spillway.errors import UserError

from .chain import Chain
from .loss import token_loss

MIN_SEGMENTS = 3
"""An embedding, a block and a head, which are the units of a plan."""


class Layers(nn.Module):
    """Consecutive children, under their own names."""

    def __init__(self, children: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, *carried: Any) -> Any:
        """Like nn.Sequential: each child gets what the one before it returned; a tuple is one argument."""
        value: Any = carried[0] if len(carried) == 1 else carried
        for child in self._modules.values():
            assert child is not None
            value = child(value)
        if isinstance(value, Tensor) or (isinstance(value, tuple) and len(value) > 1):
            return value
        last = next(reversed(self._modules))
        raise UserError(
            f"spec.model: layer {last} of the nn.Sequential returned {described(value)}, but each layer must return a "
            f"tensor or a tuple of at least two tensors; change this layer"
        )


class SequentialHead(Layers):
    """The last children, followed by the loss."""

    def __init__(self, children: Mapping[str, nn.Module], vocab_size: int) -> None:
        super().__init__(children)
        self._vocab_size = vocab_size

    def forward(self, *inputs: Any) -> Tensor:
        *carried, labels_BT, num_tokens = inputs
        logits = super().forward(*carried)
        B, T = labels_BT.shape
        if not isinstance(logits, Tensor) or logits.shape[:-1] != (B, T) or logits.shape[-1] < self._vocab_size:
            raise UserError(
                f"spec.model: the last layer of the nn.Sequential returned {described(logits)}; make it return logits "
                f"of shape [{B}, {T}, {self._vocab_size}]: for each token, one logit per entry of the nn.Embedding"
            )
        return token_loss(logits, labels_BT, num_tokens)


class SequentialChain(Chain):
    """Its parameters are named layers.<segment>.<name in the nn.Sequential>."""

    def __init__(self, model: nn.Sequential, where: str) -> None:
        """Takes over the children. Raises UserError, which begins with `where`, if they are no chain that starts at
        tokens."""
        super().__init__()
        groups = grouped(model, where)
        self._vocab_size = tokens_of(groups[0], where)
        last = SequentialHead(groups[-1], self._vocab_size)
        self.layers = nn.ModuleList([*(Layers(group) for group in groups[:-1]), last])
        self._names = [next(name for name, child in group.items() if has_parameters(child)) for group in groups]

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def segments(self) -> list[tuple[str, nn.Module]]:
        return list(zip(self._names, self.layers, strict=True))

    def arguments(self, segment: str, tokens_BT: Tensor, labels_BT: Tensor, num_tokens: int) -> tuple[object, ...]:
        return (labels_BT, num_tokens) if segment == self._names[-1] else ()


def grouped(model: nn.Sequential, where: str) -> list[dict[str, nn.Module]]:
    """Returns the children by segment. Raises UserError for too few segments, or if a child with parameters occurs
    twice."""
    children = [(name, child) for name, child in model._modules.items() if child is not None]
    groups: list[dict[str, nn.Module]] = []
    for name, child in children:
        first_of_all = not any(has_parameters(each) for group in groups for each in group.values())
        if not groups or (has_parameters(child) and not first_of_all):
            groups.append({})
        groups[-1][name] = child
    trained = [id(child) for _, child in children if has_parameters(child)]
    if len(trained) != len(set(trained)):
        raise UserError(
            f"{where}: the nn.Sequential has one layer in two places; use a separate layer in each place, or return a "
            "Chain whose property `tied` lists the shared parameters"
        )
    if len(trained) < MIN_SEGMENTS:
        raise UserError(
            f"{where}: the nn.Sequential has {len(trained)} children with parameters, but needs at least "
            f"{MIN_SEGMENTS}: an embedding, one or more blocks, and a head; make each of them a separate child, "
            f"because Spillway moves them one by one"
        )
    return groups


def tokens_of(first: Mapping[str, nn.Module], where: str) -> int:
    """Returns the number of tokens that the first segment knows."""
    found = [m.num_embeddings for child in first.values() for m in child.modules() if isinstance(m, nn.Embedding)]
    if not found:
        names = ", ".join(type(child).__name__ for child in first.values())
        raise UserError(
            f"{where}: the nn.Sequential begins with {names}, but its input is token ids of shape [batch, "
            f"sequence]; make its first layer an nn.Embedding, or a module that contains one"
        )
    return found[0]


def has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def described(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
