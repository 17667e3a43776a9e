"""The trainer at full size without numbers: what occupies memory is real, what computes or fills it does nothing.

Real: torch's CUDA allocator, streams, events and autograd threads, the operators' own CUDA code, the lanes, the ledger,
the offsets of slabs and spill file. Faked, beside what the fake device does with FAKE_CUDA_VIRTUAL (device memory is
address space, copies of more than a page do nothing, kernels never do):

    Triton's kernels    launches do nothing
    the CPU's kernels   updates, sums, norms and copies of native.py, and the first values of states, do nothing
    the host slab       address space: it may be larger than the machine's memory, and no page of it is written
    the spill file      its bytes are counted; writes and reads do nothing
    the device check    compares nothing, so it finds no difference
    masks               `transformers` looks at positions to see whether texts are packed: here none are

Values are whatever memory holds: zeros, or small integers. A process needs the fake preloaded (`harness.fake_cuda`).
"""

from __future__ import annotations

import importlib
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from spillway_trainer import assemble, device_check
from spillway_trainer.kernels import native, reference
from spillway_trainer.kernels.reference import SquareSum
from spillway_trainer.models import build
from spillway_trainer.optimizer_offload import offload
from spillway_trainer.tiers import host_slab

MAP_NORESERVE = 0x4000
"""of sys/mman.h; mmap has it from Python 3.13 on"""


def nothing(*_: Any, **__: Any) -> None:
    """What computes or fills memory elsewhere."""


class BlankSpillFile:
    """Stands in for SpillFile."""

    backend = "none"

    def __init__(self, directory: Path, nbytes: int, *, num_threads: int = 1, listed: bool = False) -> None:
        self.directory, self.nbytes = directory, nbytes

    def write_batch(self, writes: Sequence[object]) -> list[int]:
        return [0] * len(writes)

    register = read_batch = give_back = close = nothing


def address_space(nbytes: int) -> host_slab._Mapping:
    """A slab's mapping, which may be larger than the machine's memory; without huge pages, one of which a single word
    would fill."""
    if nbytes == 0:
        return host_slab._Mapping(torch.empty(0, dtype=torch.uint8), None, 0)
    mapping = mmap.mmap(-1, nbytes, flags=host_slab._PRIVATE | MAP_NORESERVE)
    return host_slab._Mapping(torch.frombuffer(mapping, dtype=torch.uint8), mapping, 0)


families = build._families


def with_nothing_packed() -> Any:
    found = families()
    importlib.import_module("transformers.masking_utils").find_packed_sequence_indices = nothing
    return found


def install() -> None:
    """In a process of its own: nothing is put back."""
    triton.runtime.JITFunction.run = nothing
    for name in ("update", "accumulate", "copy_batch"):
        setattr(native, name, nothing)
    native.square_sum = reference.square_sum_of_words = lambda *_, **__: SquareSum()
    native.available = lambda: True
    offload._initialise = nothing
    assemble.SpillFile = BlankSpillFile
    device_check.check = nothing
    build._families = with_nothing_packed
    host_slab._map = address_space
