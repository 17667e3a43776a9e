"""Products without instructions for them: values whose sums float32 holds exactly have one right answer in any order;
attention is compared with torch's own in float32."""

import os
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from spillway_trainer.kernels import half_products
from spillway_trainer.kernels.half_products import DEPTH, EDGE, REPLACEMENTS

CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
TYPES = (torch.bfloat16, torch.float16)
SHAPES = {  # [B, M, K, N]
    "one value": (1, 1, 1, 1),
    "one block": (1, 5, 7, 3),
    "more rows and columns than a block": (1, EDGE + 3, 5, EDGE + 1),
    "longer sums than a block": (1, 3, 2 * DEPTH + 1, 2),
    "many small matrices": (EDGE * DEPTH // 64 + 3, 8, 8, 8),
}


def replaced(name: str) -> Any:
    return partial(REPLACEMENTS[name], partial(torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed, CPU))


def small(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exactly(left: Tensor, right: Tensor) -> Tensor:
    return left.double() @ right.double()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_each_sum_is_rounded_once(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    batch, rows, depth, columns = shape
    left, right = small(batch, rows, depth, dtype=dtype), small(batch, columns, depth, dtype=dtype, seed=1).mT
    added = small(columns, dtype=dtype, seed=2)
    product = exactly(left, right)
    assert torch.equal(replaced("bmm")(left, right), product.to(dtype))
    assert torch.equal(replaced("mm")(left[0], right[0]), product[0].to(dtype))
    sums = (3 * added.double() + 2 * product).to(dtype)
    assert torch.equal(replaced("baddbmm")(added, left, right, beta=3, alpha=2), sums)
    assert torch.equal(replaced("addmm")(added, left[0], right[0], beta=3, alpha=2), sums[0])
    out = torch.full((columns, rows), torch.nan, dtype=dtype).mT
    assert replaced("mm.out")(left[0], right[0], out=out) is out
    assert torch.equal(out, product[0].to(dtype))
    ignored = torch.full_like(added, torch.nan)
    assert torch.equal(replaced("addmm")(ignored, left[0], right[0], beta=0), product[0].to(dtype))


def test_what_torch_rejects_is_its_own_error() -> None:
    for name, given in {
        "mm": (small(2, 3), small(4, 2)),
        "bmm": (small(2, 3), small(3, 2)),
        "addmm": (small(2), small(2, 3), small(3, 2).float()),
    }.items():
        with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|must be a 3D tensor|same dtype"):
            replaced(name)(*given)
    assert torch.equal(replaced("mm")(small(2, 0), small(0, 3)), torch.zeros(2, 3).bfloat16())


MASKS = {"no mask": None, "of all": (1, 1), "of each sample": (3, 1), "of each head": (3, 8), "a matrix": ()}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("kv_heads", [8, 2, 1])
@pytest.mark.parametrize("blocks", [1, 3])
def test_attention_has_the_gradients_of_float32(
    kv_heads: int, mask: tuple[int, ...] | None, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries, keys, width = 12, 20, 16
    monkeypatch.setattr(half_products, "EDGE", queries // blocks)
    monkeypatch.setattr(half_products, "DEPTH", keys)
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    query, key, value = (drawn(3, n, h, width).transpose(1, 2) for n, h in ((queries, 8), *[(keys, kv_heads)] * 2))
    allowed = None if mask is None else torch.where(drawn(*mask, queries, keys) > -1, 0.0, -torch.inf)
    whole = [x.float().requires_grad_() for x in (query, key, value)]
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    options = {"is_causal": mask is None}
    out, logsumexp = forward(query, key, value, attn_mask=allowed, **options)
    expected = scaled_dot_product_attention(*whole, attn_mask=allowed, enable_gqa=True, **options)
    grad = torch.ones_like(out)
    gradients = replaced("_scaled_dot_product_flash_attention_for_cpu_backward")(
        grad, query, key, value, out, logsumexp, 0.0, mask is None, attn_mask=allowed
    )
    for gradient, exact in zip(gradients, torch.autograd.grad(expected, whole, grad.float()), strict=True):
        torch.testing.assert_close(gradient.float(), exact, rtol=0.02, atol=0.02)
        assert gradient.transpose(1, 2).is_contiguous()


def test_only_missing_instructions_are_replaced() -> None:
    """ONEDNN_MAX_CPU_ISA hides instructions from torch. Its kernels for other types remain."""
    code = (
        "import torch; from spillway_trainer.kernels import half_products as h; h.install();"
        "torch.manual_seed(0); a = torch.randn(65, 33); b = torch.randn(33, 9);"
        "print(torch.equal((a.bfloat16() @ b.bfloat16()), (a.bfloat16().float() @ b.bfloat16().float()).bfloat16()),"
        "torch.equal(a @ b, torch.ops.aten.mm.out(a, b, out=torch.empty(65, 9))))"
    )
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "True"], found.stderr
    assert not found.stderr
