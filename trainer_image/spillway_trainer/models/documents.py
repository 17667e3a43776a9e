"""Attention within documents: in rows that hold several documents, no token attends to one of another document.

With this attention, the layers of a model get a `Within` where they expect a mask, and each document is computed as if
it were alone, so nothing is quadratic in the length of a row. Without documents, it is `sdpa` of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..corpus.packing import Lengths
from ..tiers.cuda import generator

ATTENTION = "spillway_documents"
"""The name under which transformers knows this attention."""

_read: ContextVar[Lengths | None] = ContextVar("_read", default=None)


@dataclass(frozen=True, slots=True)
class Within:
    """Takes the place of a mask: tokens attend to the earlier ones of their own document, or to `window` of them if
    given."""

    lengths: Lengths
    window: int | None


@contextmanager
def reading(lengths: Lengths | None) -> Iterator[None]:
    """Inside, each mask that transformers makes is a Within, if `lengths` are given."""
    token = _read.set(lengths)
    try:
        yield
    finally:
        _read.reset(token)


def positions(lengths: Lengths, device: torch.device) -> Tensor:
    """Returns [B, T], int64: the position of each token in its document."""
    rows = [torch.cat([torch.arange(length) for length in row]) for row in lengths]
    return torch.stack(rows).to(device)


def _mask(**asked: Any) -> Tensor | Within | None:
    """Returns what the layers get as their mask."""
    lengths = _read.get()
    return sdpa_mask(**asked) if lengths is None else Within(lengths, asked.get("local_size"))


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, dropout: float = 0.0, **how: Any
) -> tuple[Tensor, None]:
    """Has the parameters of `sdpa_attention_forward` ([B, H, T, D]), and returns [B, T, H, D] like that."""
    if not isinstance(attention_mask, Within):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, **how)
    if how.get("position_bias") is not None:
        raise ValueError("a position bias reaches across documents")
    how |= {"dropout": dropout}
    return _PerDocument.apply(query, key, value, module, attention_mask, how), None


class _PerDocument(torch.autograd.Function):
    """Attends in each document separately. Saves query, key and value; backward computes attention again, document by
    document, because what torch would save for each of many short documents is too small to be moved to another
    tier."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, module: Any, within: Within, how: Any) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.call = module, within, how
        ctx.random = generator(query.device).get_state() if how["dropout"] else None
        kind = query.device.type
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        B, H, T, _ = query.shape
        dtype = ctx.autocast[1] if ctx.autocast[2] else query.dtype  # as attention itself has it
        out_BTHD = query.new_empty(B, T, H, value.shape[-1], dtype=dtype)
        for row, span in _spans(within.lengths):
            parts = query[row, :, span], key[row, :, span], value[row, :, span]
            out_BTHD[row, span] = _alone(parts, *ctx.call)
        return out_BTHD

    @staticmethod
    def backward(ctx: Any, grad_BTHD: Tensor) -> Any:
        saved, source = ctx.saved_tensors, generator(grad_BTHD.device)
        grads = [torch.empty_like(one) for one in saved]
        if ctx.random is not None:
            now = source.get_state()
            source.set_state(ctx.random)
        for row, span in _spans(ctx.call[1].lengths):
            parts = [one[row, :, span].detach().requires_grad_() for one in saved]
            with torch.enable_grad(), torch.autocast(*ctx.autocast):
                out = _alone(parts, *ctx.call)
            for whole, grad in zip(grads, torch.autograd.grad(out, parts, grad_BTHD[row, span]), strict=True):
                whole[row, :, span] = grad
        if ctx.random is not None:
            source.set_state(now)
        return *grads, None, None, None


def _spans(lengths: Lengths) -> Iterator[tuple[slice, slice]]:
    """Yields the row and the tokens of each document."""
    for row, in_row in enumerate(lengths):
        start = 0
        for length in in_row:
            yield slice(row, row + 1), slice(start, start + length)
            start += length


def _alone(parts_BHTD: Sequence[Tensor], module: Any, within: Within, how: Mapping[str, Any]) -> Tensor:
    """Returns the attention of one document (B = 1), computed from its query, key and value: [B, T, H, D]."""
    query, key, value = parts_BHTD
    T, mask = query.shape[2], None
    if within.window is not None and within.window < T:
        distance = torch.arange(T, device=query.device)[:, None] - torch.arange(T, device=query.device)
        mask = ((distance >= 0) & (distance < within.window))[None, None]
    return sdpa_attention_forward(module, query, key, value, mask, **how)[0]


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, _mask)
