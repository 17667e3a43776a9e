"""accumulate and copy: native = reference; and which of the two a process uses."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from spillway_trainer.kernels import dispatch as kernels
from spillway_trainer.kernels import native, reference

torch.set_num_threads(1)
needs_library = pytest.mark.skipif(not native.instruction_sets(), reason="no native library: nothing to compare with")


@pytest.fixture(params=list(native.ISA_CODES))
def isa(request: pytest.FixtureRequest) -> str:
    if request.param not in native.instruction_sets():
        pytest.skip(f"{request.param}: missing on this processor, or no native library")
    return str(request.param)


def any_values(n: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(-(2**31), 2**31, (n,), generator=generator, dtype=torch.int64).to(torch.int32).view(torch.float32)
    )


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("gradient_type", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("n", [1, 31, 200_003])
def test_accumulate_has_the_bits_of_the_reference(isa: str, n: int, gradient_type: torch.dtype, first: bool) -> None:
    found, wanted = any_values(n + 1, 1)[1:], any_values(n + 1, 1)[1:]
    gradient = any_values(n + 1, 2)[1:].to(gradient_type)
    native.accumulate(found, gradient, first, num_threads=2, instruction_set=isa)
    reference.accumulate(wanted, gradient, first)
    assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))


@needs_library
def test_copy_batch_moves_every_pair_at_any_alignment() -> None:
    source = torch.randint(0, 256, (20 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    target = torch.zeros_like(source)
    cuts = [0, 1, 4097, 9 << 20, (9 << 20) + 3, len(source)]
    pairs = [(target[a:b], source[a:b]) for a, b in itertools.pairwise(cuts)]
    native.copy_batch(pairs, num_threads=3)
    assert torch.equal(target, source)


@needs_library
@pytest.mark.parametrize("shift", [1, -1])
def test_copy_of_overlapping_memory_is_a_memmove(shift: int) -> None:
    buffer = torch.randint(0, 256, (12 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    wanted = buffer.clone()
    src, dst = (slice(0, -1), slice(1, None)) if shift > 0 else (slice(1, None), slice(0, -1))
    wanted[dst] = wanted[src].clone()
    native.copy_batch([(buffer[dst], buffer[src])], num_threads=4)
    assert torch.equal(buffer, wanted)


@needs_library
def test_wrong_tensors_are_rejected_before_anything_is_written() -> None:
    accumulator = torch.zeros(4)
    with pytest.raises(ValueError, match=r"gradient is torch\.float64.*contiguous torch\.float32 or torch\.bfloat16"):
        native.accumulate(accumulator, torch.ones(4, dtype=torch.float64), False)
    with pytest.raises(ValueError, match="4 elements"):
        native.accumulate(accumulator, torch.ones(5), False)
    with pytest.raises(ValueError, match="contiguous"):
        native.accumulate(accumulator, torch.ones(8)[::2], False)
    assert torch.equal(accumulator, torch.zeros(4))


PROBE = """
import torch
from spillway_trainer.kernels import dispatch as kernels, native
acc = torch.zeros(3)
kernels.accumulate(acc, torch.ones(3), False)
print(native.isa(), native.available(), acc.sum().item(), kernels.square_sum(acc).norm() == 3**0.5)
"""


def probe(forced: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, native.FORCE_ISA: forced}
    return subprocess.run([sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, check=False)


def test_forcing_the_reference_leaves_the_library_unused() -> None:
    assert probe("reference").stdout.split() == ["reference", "False", "3.0", "True"]


@needs_library
def test_forcing_scalar_uses_scalar() -> None:
    assert probe("scalar").stdout.split() == ["scalar", "True", "3.0", "True"]


def test_forcing_an_unknown_instruction_set_names_those_there_are() -> None:
    found = probe("avx1024")
    assert found.returncode != 0
    assert "SPILLWAY_FORCE_ISA=avx1024: this instruction set is not available on this machine; set" in found.stderr
    assert "variable to one of reference" in found.stderr


@needs_library
def test_kernels_work_in_a_forked_child_after_the_parent_used_threads() -> None:
    values = torch.randn(4_000_000, generator=torch.Generator().manual_seed(0))
    wanted = native.square_sum(values, num_threads=4)
    child = os.fork()
    if child == 0:
        os._exit(0 if native.square_sum(values, num_threads=4) == wanted else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_kernels_copy_moves_bytes() -> None:
    source, target = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    kernels.copy(target, source)
    assert torch.equal(target, source)
