"""The Triton kernels have the bits of the reference, in Triton's interpreter: no GPU is needed.

The interpreter runs the kernels' source with numpy, whose float32 operations are rounded once. What a GPU's compiler
makes of that source is held by tests/contract/test_ptx.py, and on a GPU by tests/gpu.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from harness.places import IMPORTABLE, TESTS
from spillway_trainer.kernels import triton_kernels

CASES = TESTS / "cases" / "triton_cases.py"


@pytest.mark.ci
def test_the_interpreter_gives_the_bits_of_the_reference() -> None:
    environment = {**os.environ, **IMPORTABLE, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    ended = subprocess.run([sys.executable, CASES], env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout.strip()) == (0, "the bits of the reference"), ended.stderr


def test_wrong_tensors_are_rejected_before_anything_is_launched() -> None:
    step = triton_kernels.UpdateScalars(1e-3, 0.9, 0.95, 1e-8, 0.0, 0.9, 0.95)
    four = [torch.zeros(4) for _ in range(4)]
    with pytest.raises(ValueError, match=r"gradient is torch\.float64.*contiguous torch\.float32 or torch\.bfloat16"):
        triton_kernels.update(step, four[0], four[1:3], torch.zeros(4, dtype=torch.float64), None)
    with pytest.raises(ValueError, match=r"out is .* pass a contiguous .* of 4 elements on cpu"):
        triton_kernels.update(step, four[0], four[1:3], four[3], torch.zeros(5))
    with pytest.raises(ValueError, match=r"exp_avg is .* stride"):
        triton_kernels.update(step, four[0], (torch.zeros(8)[::2], four[2]), four[3], None)
    with pytest.raises(ValueError, match="gradient is"):
        triton_kernels.accumulate(four[0], torch.zeros(5), True)
