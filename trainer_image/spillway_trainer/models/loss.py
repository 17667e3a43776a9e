"""The loss of every head: the cross entropy of its logits, never widened to float32 as a whole.

    logits (compute type) -> rows of one chunk in float32 -> log-probabilities -> that of each label -> sum
    backward              -> the same rows again -> their gradient in float32 -> rounded, over the logits

Only operations on single rows are chunked, and torch sums over all rows at once, so loss and gradient have the bits of
`plain_token_loss`, whatever the size of a chunk. Memory holds the logits in the compute type and a few chunks, instead
of three times the logits in float32 (docs/adr/0031).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from spillway.planning.model_shape import loss_chunk_rows

from ..corpus.objective import IGNORED_LABEL

VIEWS = ("ViewBackward0", "UnsafeViewBackward0")
PRODUCTS = ("MmBackward0", "AddmmBackward0")
"""Operations whose backward does not read what they returned."""
_SUM = 2
"""torch's number for the reduction `sum`."""


def plain_token_loss(logits_BTV: Tensor, labels_BT: Tensor, num_tokens: int) -> Tensor:
    """The reference, with torch's own cross entropy. Holds all logits in float32, and twice more in backward."""
    logits_NV, labels_N = logits_BTV.flatten(0, 1).float(), labels_BT.flatten()
    return F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORED_LABEL, reduction="sum") / num_tokens


def token_loss(logits_BTV: Tensor, labels_BT: Tensor, num_tokens: int) -> Tensor:
    """Returns the sum of the cross entropy over unmasked labels, divided by `num_tokens`: a float32 scalar."""
    logits_NV = logits_BTV.flatten(0, 1)
    num_rows = loss_chunk_rows(logits_NV.shape[1])
    if num_rows >= logits_NV.shape[0]:
        return plain_token_loss(logits_BTV, labels_BT, num_tokens)
    return CrossEntropy.apply(logits_NV, labels_BT.flatten(), num_rows) / num_tokens  # type: ignore[no-any-return]


class CrossEntropy(torch.autograd.Function):
    """The sum of the cross entropy over all rows with a label, computed `num_rows` rows at a time."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, num_rows: int) -> Tensor:
        ctx.num_rows, ctx.in_place = num_rows, _is_product(logits_NV)
        ctx.save_for_backward(logits_NV, labels_N)
        indices_N1 = labels_N.clamp(min=0)[:, None]
        found = [
            _log_probabilities(logits_RV).gather(1, indices_R1)
            for logits_RV, indices_R1 in zip(
                torch.split(logits_NV, num_rows), torch.split(indices_N1, num_rows), strict=True
            )
        ]
        masked_N = torch.where(labels_N == IGNORED_LABEL, IGNORED_LABEL, 0)
        return F.nll_loss(torch.cat(found), masked_N, ignore_index=IGNORED_LABEL, reduction="sum")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        """The gradient overwrites the logits, if nothing else needs them."""
        logits_NV, labels_N = ctx.saved_tensors
        gradient_NV = logits_NV.detach() if ctx.in_place else torch.empty_like(logits_NV)
        for start in range(0, labels_N.shape[0], ctx.num_rows):
            rows = slice(start, start + ctx.num_rows)
            _write_gradient(gradient_NV[rows], logits_NV[rows], labels_N[rows], upstream)
        return gradient_NV, None, None


def _log_probabilities(logits_RV: Tensor) -> Tensor:
    return F.log_softmax(logits_RV.float(), 1)


def _write_gradient(gradient_RV: Tensor, logits_RV: Tensor, labels_R: Tensor, upstream: Tensor) -> None:
    """Computes what autograd does for `plain_token_loss`."""
    logs_RV = _log_probabilities(logits_RV)
    # The last argument is only read for means.
    of_logs_RV = torch.ops.aten.nll_loss_backward(upstream, logs_RV, labels_R, None, _SUM, IGNORED_LABEL, upstream)
    gradient_RV.copy_(torch.ops.aten._log_softmax_backward_data(of_logs_RV, logs_RV, 1, torch.float32))


def _is_product(tensor: Tensor) -> bool:
    """Whether a matrix product returned `tensor`, perhaps through views."""
    node = tensor.grad_fn
    while node is not None and node.name() in VIEWS:
        node = node.next_functions[0][0]
    return node is not None and node.name() in PRODUCTS
