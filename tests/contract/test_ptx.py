"""What Triton's compiler makes for a GPU keeps the declared arithmetic: every operation rounded once. No GPU is needed.

The kernels are compiled for sm_80 and sm_90 to PTX and machine code, with the options of every launch; the PTX is
searched for what would change a bit: fused multiply-add, flushed denormals, approximate division and root.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from spillway.update_rules import UpdateRule
from spillway_trainer.kernels import triton_kernels

FORBIDDEN = re.compile(r"fma|\.ftz|approx|div\.full|\b(?:add|sub|mul)\.f32")
"""the last: without .rn the assembler may contract a product and a sum on its own"""
SCALARS = (
    *("gradient_scale", "decay", "weight_decay", "momentum", "beta1", "one_minus_beta1", "beta2", "one_minus_beta2"),
    *("sqrt_bias_correction2", "eps", "step_size"),
)
OPERATIONS = {
    UpdateRule.ADAMW: {"mul": 8, "add": 3, "sub": 1, "sqrt": 1, "div": 2},
    UpdateRule.ADAM: {"mul": 8, "add": 4, "sub": 1, "sqrt": 1, "div": 2},
    UpdateRule.SGD_MOMENTUM: {"mul": 4, "add": 2, "sub": 1, "sqrt": 0, "div": 0},
    UpdateRule.LION: {"mul": 7, "add": 2, "sub": 1, "sqrt": 0, "div": 0},
}
"""of one value"""
TYPES = {"float32": "*fp32", "bfloat16": "*u16", "float16": "*fp16"}
MOMENTS = {**TYPES, "int8": "*u8"}


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(kernel: object, signature: dict[str, str], constants: dict[str, object], **how: object) -> dict[str, str]:
    """`how`: architecture, aligned (pointers and length are multiples of 16, as in nearly every launch), options."""
    options = {**triton_kernels.OPTIONS, **how.get("options", {})}
    attributes = {}
    if how["aligned"]:
        names = list(signature)
        attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in names if signature[name][0] in "*i"}
    signature = signature | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return dict(triton.compile(source, target=GPUTarget("cuda", how["architecture"], 32), options=options).asm)


def operations(ptx: str) -> Counter[str]:
    return Counter(re.findall(r"^\s*(?:@\S+\s+)?([a-z][\w.:]*)", ptx, flags=re.MULTILINE))


def forbidden_in(ptx: str) -> list[str]:
    return sorted(name for name in operations(ptx) if FORBIDDEN.search(name))


OTHERS = set(UpdateRule) - {UpdateRule.ADAMW}
LAUNCHES = [
    *itertools.product([UpdateRule.ADAMW], [80, 90], ["float32"], TYPES, [*TYPES, "none"], [True, False]),
    *itertools.product(OTHERS, [80], ["float32"], TYPES, ["bfloat16"], [True, False]),
    *itertools.product(UpdateRule, [80, 90], ["bfloat16"], ["bfloat16"], ["bfloat16"], [True, False]),
    *itertools.product(UpdateRule, [80], ["int8"], ["bfloat16"], ["bfloat16"], [True, False]),
]
"""rule, architecture, moments, gradient, out, aligned; what `out` and architecture change is the same code for every
rule"""


@pytest.mark.sweep
@pytest.mark.parametrize(("rule", "architecture", "moments", "gradient", "out", "aligned"), sorted(LAUNCHES))
def test_an_update_rounds_every_operation_once(
    rule: UpdateRule, architecture: int, moments: str, gradient: str, out: str, aligned: bool
) -> None:
    arrays = {"master": "*fp32", "moment1": MOMENTS[moments], "moment2": MOMENTS[moments]}
    arrays |= {"gradient": TYPES[gradient], "out": TYPES.get(out, "*fp32")}
    arrays |= {"carries": "*fp32", "maps": "*fp32"}
    signature = {**arrays, "n": "i64", **dict.fromkeys(SCALARS, "fp32")}
    constants = {"RULE": rule.value, "HAS_OUT": out != "none", "IS_SPLIT": False, "BLOCK": triton_kernels.BLOCK}
    made = compiled(triton_kernels.update_kernel, signature, constants, architecture=architecture, aligned=aligned)
    assert forbidden_in(made["ptx"]) == []
    found = operations(made["ptx"])
    per_thread = triton_kernels.BLOCK // (32 * triton_kernels.OPTIONS["num_warps"])
    arithmetic = {name: found[f"{name}.rn.f32"] for name in ("mul", "add", "sub", "sqrt", "div")}
    quantizing = len(rule.moments) * (moments == "int8")  # a product with the scale, a quotient by the new one
    more = {"mul": quantizing, "div": quantizing}
    assert arithmetic == {name: (n + more.get(name, 0)) * per_thread for name, n in OPERATIONS[rule].items()}
    assert len(made["cubin"]) > 0, "the assembler took it"
    if aligned:
        assert found["ld.global.v4.b32"] > 0, "sixteen bytes an access"


@pytest.mark.sweep
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("rule", UpdateRule)
def test_an_update_of_a_master_in_halves_rounds_every_operation_once(
    rule: UpdateRule, architecture: int, moments: str, aligned: bool
) -> None:
    """And joins and splits it without arithmetic of its own; a rest begins on a line, its carries wherever."""
    arrays = {"master": "*u16", "moment1": TYPES[moments], "moment2": TYPES[moments]}
    arrays |= {"gradient": "*fp32", "out": "*u16", "carries": "*u8", "maps": "*fp32"}
    signature = {**arrays, "n": "i64", **dict.fromkeys(SCALARS, "fp32")}
    constants = {"RULE": rule.value, "HAS_OUT": True, "IS_SPLIT": True, "BLOCK": triton_kernels.BLOCK}
    made = compiled(triton_kernels.update_kernel, signature, constants, architecture=architecture, aligned=aligned)
    assert forbidden_in(made["ptx"]) == []
    found = operations(made["ptx"])
    per_thread = triton_kernels.BLOCK // (32 * triton_kernels.OPTIONS["num_warps"])
    arithmetic = {name: found[f"{name}.rn.f32"] for name in ("mul", "add", "sub", "sqrt", "div")}
    assert arithmetic == {name: n * per_thread for name, n in OPERATIONS[rule].items()}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("gradient", TYPES)
@pytest.mark.parametrize("architecture", [80, 90])
def test_accumulate_rounds_every_operation_once(architecture: int, gradient: str, first: bool) -> None:
    signature = {"accumulator": "*fp32", "gradient": TYPES[gradient], "n": "i64"}
    constants = {"FIRST": first, "BLOCK": triton_kernels.BLOCK}
    made = compiled(triton_kernels.accumulate_kernel, signature, constants, architecture=architecture, aligned=True)
    assert forbidden_in(made["ptx"]) == []
    assert ("add.rn.f32" in operations(made["ptx"])) is not first


@pytest.mark.parametrize("values", TYPES.values())
@pytest.mark.parametrize("architecture", [80, 90])
def test_sums_of_squares_are_integers(architecture: int, values: str) -> None:
    signature = {"values": values, "words": "*i64", "n": "i64"}
    constants = {"BLOCK": triton_kernels.BLOCK}
    made = compiled(triton_kernels.square_sum_kernel, signature, constants, architecture=architecture, aligned=True)
    assert {name for name in operations(made["ptx"]) if ".f32" in name or ".f64" in name} <= {"cvt.f32.f16"}
    assert any(name.startswith("atom.") and name.endswith(".add.u64") for name in operations(made["ptx"]))


@triton.jit
def carelessly(x, y, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at)
    tl.store(y + at, tl.sqrt(value) / (value * value + 3.0))


def test_a_careless_kernel_would_be_found() -> None:
    how = {"architecture": 80, "aligned": True, "options": {"enable_fp_fusion": True}}
    made = compiled(carelessly, {"x": "*fp32", "y": "*fp32"}, {"BLOCK": 128}, **how)
    found = " ".join(forbidden_in(made["ptx"]))
    assert all(name in found for name in ("fma", "sqrt.approx", "div.full"))
