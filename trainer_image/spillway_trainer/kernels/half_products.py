"""Products of bfloat16 and float16 matrices on CPUs that have no instructions for them.

torch computes them there in plain loops, 3 to 100 times as slowly as in float32. Here, blocks of the operands are
converted to float32 and multiplied in float32, and each sum is rounded once. All placements of a job call the same
operations, so all of them have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

EDGE, DEPTH = 512, 2048
"""Rows and columns of a block of the result, and how many products of a sum are computed from one pair of blocks. A
block takes at most 9 MiB in float32, and its conversion a few percent of the time of its products."""

Kernel = Callable[..., Any]


def fix_products(threads: int) -> None:
    """Fixes what the rounding of products depends on. To be called before the first one."""
    torch.set_num_threads(threads)
    install()


@cache
def install() -> None:
    """Replaces torch's products of the types that this CPU cannot multiply, for the rest of the process."""
    for name, replacement in REPLACEMENTS.items() if without_instructions() else ():
        original = torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed
        kernel = partial(_call, without_instructions(), original, replacement)
        _library().impl(name, kernel, "CPU", with_keyset=True)  # type: ignore[no-untyped-call]


@cache
def without_instructions() -> set[torch.dtype]:
    bfloat16, float16 = torch.ops.mkldnn._is_mkldnn_bf16_supported(), torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return {dtype for dtype, has in ((torch.bfloat16, bfloat16), (torch.float16, float16)) if not has}


@cache
def _library() -> torch.library.Library:
    return torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]


def _call(
    missing: set[torch.dtype], original: Kernel, replacement: Kernel, keys: Any, *given: Any, **named: Any
) -> Any:
    """Leaves other types to torch; `replacement` leaves to it what is empty, and what it rejects."""
    if given[0].dtype not in missing:
        return original(keys, *given, **named)
    return replacement(partial(original, keys), *given, **named)


def _product(dims: int, original: Kernel, left: Tensor, right: Tensor, **named: Tensor) -> Any:
    """`mm` and `bmm`: [B, M, K] x [B, K, N] -> [B, M, N], or without B. `named`: `out`, if it is given."""
    shape, out = _shape(dims, left, right), named.get("out")
    if shape is None or (out is not None and (out.shape, out.dtype) != (shape, left.dtype)):
        return original(left, right, **named)
    result = left.new_empty(shape) if out is None else out
    _multiply(None, _batch(left), _batch(right), _batch(result), 0, 1)
    return result


def _added_product(
    dims: int, original: Kernel, added: Tensor, left: Tensor, right: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Any:
    """`addmm` and `baddbmm`: beta * added + alpha * (left x right)."""
    shape = _shape(dims, left, right, added)
    if shape is None:
        return original(added, left, right, beta=beta, alpha=alpha)
    result = left.new_empty(shape)
    _multiply(_batch(added.expand(shape)), _batch(left), _batch(right), _batch(result), beta, alpha)
    return result


def _shape(dims: int, left: Tensor, right: Tensor, *added: Tensor) -> torch.Size | None:
    """Shape of the product, or None if it is empty, or an error."""
    if left.dim() != dims or right.dim() != dims or any(other.dtype != left.dtype for other in (right, *added)):
        return None
    fits = left.shape[:-2] == right.shape[:-2] and left.shape[-1] == right.shape[-2]
    return torch.Size((*left.shape[:-1], right.shape[-1])) if fits and left.numel() and right.numel() else None


def _batch(matrix: Tensor) -> Tensor:
    return matrix if matrix.dim() == 3 else matrix[None]


def _multiply(added: Tensor | None, left: Tensor, right: Tensor, result: Tensor, beta: Any, alpha: Any) -> None:
    """result [B, M, N] = beta * added + alpha * (left x right), in blocks; each sum is rounded once."""
    num, rows, depth = left.shape
    columns = right.shape[2]
    m, n, k = min(rows, EDGE), min(columns, EDGE), min(depth, DEPTH)
    together = EDGE * DEPTH // max(m * k, k * n, m * n)
    for b, i, j in product(range(0, num, together), range(0, rows, EDGE), range(0, columns, EDGE)):
        block = slice(b, b + together), slice(i, i + EDGE), slice(j, j + EDGE)
        sums = torch.empty(result[block].shape) if added is None else added[block].float()
        for at in range(0, depth, DEPTH):
            factors = left[block[0], block[1], at : at + DEPTH], right[block[0], at : at + DEPTH, block[2]]
            sums.baddbmm_(*(factor.float() for factor in factors), beta=1 if at else beta, alpha=alpha)
        result[block].copy_(sums)


def _attention_backward(
    original: Kernel, *given: Any, attn_mask: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, ...]:
    """Backward of attention. Its copies in float32 take at most 8 MiB for the mask, and for the rest no more than all
    heads in the given type (they are made for a quarter of the heads), which other operations of a layer need anyway.
    Forward is not slow."""
    grad_BHQD, query_BHQD, key_BhKD, value_BhKD, out_BHQD, logsumexp_BHQ, dropout, is_causal = given
    batch, num_heads, num_keys, _ = key_BhKD.shape
    queries_each = query_BHQD.shape[1] // num_heads
    quarter = max(1, batch * num_heads // 4)
    samples, heads = max(1, quarter // num_heads), min(quarter, num_heads)
    length = query_BHQD.shape[2]
    block = length if attn_mask is None or is_causal else max(1, EDGE * DEPTH // num_keys)
    # Laid out as torch does: [B, length, heads, D] in memory.
    gradients = tuple(torch.empty_like(x.transpose(1, 2)).transpose(1, 2) for x in (query_BHQD, key_BhKD, value_BhKD))
    for b, h in product(range(0, batch, samples), range(0, num_heads, heads)):
        keys = slice(b, b + samples), slice(h, h + heads)
        key, value = key_BhKD[keys].float(), value_BhKD[keys].float()
        sums = torch.zeros_like(key), torch.zeros_like(value)
        for at in range(0, length, block):
            rows = keys[0], slice(h * queries_each, (h + heads) * queries_each), slice(at, at + block)
            mask = None if attn_mask is None else _rows_of(attn_mask, rows).float()
            grad, query, out = (x[rows].float() for x in (grad_BHQD, query_BHQD, out_BHQD))
            logsumexp = logsumexp_BHQ[rows]
            parts = original(grad, query, key, value, out, logsumexp, dropout, is_causal, attn_mask=mask, scale=scale)
            gradients[0][rows].copy_(parts[0])
            for total, part in zip(sums, parts[1:], strict=True):
                total.add_(part)
        for gradient, total in zip(gradients[1:], sums, strict=True):
            gradient[keys].copy_(total)
    return gradients


def _rows_of(mask: Tensor, rows: tuple[slice, ...]) -> Tensor:
    """`mask`: [Q, K] or [B, H, Q, K], where a dimension of size 1 stands for all."""
    sizes = mask.shape[:-1]
    return mask[tuple(at if size > 1 else slice(None) for at, size in zip(rows[-len(sizes) :], sizes, strict=True))]


REPLACEMENTS: dict[str, Kernel] = {
    "mm": partial(_product, 2),
    "mm.out": partial(_product, 2),
    "bmm": partial(_product, 3),
    "bmm.out": partial(_product, 3),
    "addmm": partial(_added_product, 2),
    "baddbmm": partial(_added_product, 3),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}
