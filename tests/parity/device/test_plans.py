"""A plan that fills its GPU budget runs within it: torch's own allocator at full size, without numbers."""

from __future__ import annotations

import pytest

from cases.gpu_plans import DEVICE_MIB, SHAPES, SHARDED, Shape, misses, run_shape
from harness import fake_cuda

IN_CI = {
    "llama-1b, disabled, 1x2048",
    "llama-1b, interleaved, 1x2048, float32",
    "llama-1b, auto, 2x2048, 12 GiB",
    "llama-1b, auto, 4x2048, 2 micro-batches, free, 24 GiB",
    "llama-3b, recompute, 1x8192, 2 micro-batches",
    "llama-3b, activations on host, 2x4096",
    "llama-3b, activations on nvme, 1x4096",
    "llama-3b, beside backward, 1x2048, float16, free",
    "llama-7b, states on nvme, 1x2048, 4 micro-batches",
    "llama-8b, streamed, recompute, 1x4096, 4 micro-batches",
    "gpt2-6.7b, activations on host, 2x2048",
    "llama-13b, recompute, 2x4096",
    "llama-3b, beside forward, 1x2048, 2 micro-batches, 2 ranks",
    "llama-7b, interleaved, 2x2048, 2 ranks",
    "llama-13b, states on host, 1x4096, 8 ranks",
    "llama-70b, auto, 1x4096, 8 ranks, 80 GiB",
    "llama-1b, auto, 2x2048, 2 ranks, Ddp, 24 GiB",
    "llama-1b, auto, 2x2048, 2 ranks, Zero2, 16 GiB",
}


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, marks=pytest.mark.ci if shape.name in IN_CI else pytest.mark.full, id=shape.name)
        for shape in (*SHAPES, *SHARDED)
    ],
)
def test_a_plan_that_fills_its_gpu_budget_runs_as_planned(shape: Shape) -> None:
    found = fake_cuda.run(run_shape, shape, virtual=1, mib=DEVICE_MIB)
    assert misses(found) == []


@pytest.mark.ci
@pytest.mark.parametrize("mode", [mode for mode in fake_cuda.MODES if mode != "eager"])
def test_late_streams_make_no_plan_run_out_of_memory(mode: str) -> None:
    """Copies that are on their way out of the device hold what they copy."""
    shape = next(one for one in SHAPES if one.name == "llama-3b, activations on host, 2x4096")
    late = {"mode": mode, "seed": 3, "delay_us": 2000}
    assert misses(fake_cuda.run(run_shape, shape, virtual=1, mib=DEVICE_MIB, **late)) == []


def test_the_shapes_of_ci_are_there() -> None:
    names = {shape.name for shape in (*SHAPES, *SHARDED)}
    assert names >= IN_CI
    assert len(names) == len(SHAPES) + len(SHARDED)
