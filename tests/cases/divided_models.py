"""Entry points for tests of divided models: chains for text with parameters and gradients that are hard to divide."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases.user_models import HIDDEN, Branching, FeedForward, TwiceReentrant, UsersChain

TOKENS = 300


class ChainOfText(UsersChain):
    """A chain with a vocabulary that has every byte; its output projection is tied to its embedding."""

    vocab_size = TOKENS

    def __init__(self, make_block: Callable[[], nn.Module]) -> None:
        super().__init__(make_block)
        self.embedding = nn.Embedding(TOKENS, HIDDEN)
        self.head.output = nn.Linear(HIDDEN, TOKENS)

    @property
    def tied(self) -> dict[str, str]:
        return {"head.output.weight": "embedding.weight"}


class Odd(FeedForward):
    """Has parameters with fewer rows than ranks, one that is not trained, and one that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one_row = nn.Parameter(torch.empty(1, HIDDEN))
        self.one_value = nn.Parameter(torch.empty(1))
        self.frozen = nn.Parameter(torch.empty(5, HIDDEN), requires_grad=False)
        self.unused = nn.Parameter(torch.empty(2, 3))

    def forward(self, x_BTD: Tensor, tokens_BT: Tensor) -> Tensor:
        mixed_BTD = F.linear(F.linear(x_BTD, self.frozen), self.frozen.T)
        return super().forward(x_BTD, tokens_BT) + torch.tanh(mixed_BTD + self.one_row) * self.one_value


class Overflowing(FeedForward):
    """Its outputs are not finite once its first update is done."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = nn.Parameter(torch.empty(HIDDEN))

    def forward(self, x_BTD: Tensor, tokens_BT: Tensor) -> Tensor:
        never_updated = bool((self.clock == 1.0).all())
        return super().forward(x_BTD, tokens_BT) * self.clock * (1.0 if never_updated else float("inf"))


class _Multiplied(torch.autograd.Function):
    """Passes its input through unchanged, and multiplies its gradient by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class Exploding(FeedForward):
    """In its second training forward, on rank 1 only, the loss is finite, but gradients are not."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.num_forwards = factor, 0

    def forward(self, x_BTD: Tensor, tokens_BT: Tensor) -> Tensor:
        self.num_forwards += torch.is_grad_enabled()
        explodes = self.num_forwards == 2 and os.environ.get("RANK") == "1"
        output: Tensor = _Multiplied.apply(super().forward(x_BTD, tokens_BT), self.factor if explodes else 1.0)
        return output


def odd() -> ChainOfText:
    return ChainOfText(Odd)


def branching() -> ChainOfText:
    return ChainOfText(Branching)


def overflowing() -> ChainOfText:
    return ChainOfText(Overflowing)


def infinite() -> ChainOfText:
    return ChainOfText(partial(Exploding, float("inf")))


def undefined() -> ChainOfText:
    return ChainOfText(partial(Exploding, float("nan")))


def reentrant() -> ChainOfText:
    return ChainOfText(TwiceReentrant)
