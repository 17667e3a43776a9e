"""The trainer at full size without numbers: allocations are real, but nothing computes or fills memory.

Real: torch's CUDA allocator, streams, events and autograd threads, the operators' own CUDA code, the lanes, the ledger,
the offsets in slabs and spill file. Faked, in addition to what FAKE_CUDA_VIRTUAL makes the fake device do (device
memory is only address space, copies of more than a page do nothing, kernels compute nothing):

    Triton's kernels    launches do nothing
    the CPU's kernels   updates, sums, norms and copies of native.py, and the first values of states, do nothing
    the host slab       only address space: may be larger than the machine's memory; no page of it is written
    the spill file      its bytes are counted; writes and reads do nothing
    the device check    compares nothing, and so finds no difference
    masks               `transformers` checks positions to find packed texts; here it finds none

Values are whatever memory holds: zeros or small integers. The process must have the fake preloaded
(`harness.fake_cuda`).
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
"""from sys/mman.h; Python's mmap has it from 3.13 on"""


def nothing(*_: Any, **__: Any) -> None:
    """Replaces functions that would compute or fill memory."""


class BlankSpillFile:
    """Stands in for SpillFile."""

    backend = "none"

    def __init__(self, directory: Path, nbytes: int, *, num_threads: int = 1, listed: bool = False) -> None:
        self.directory, self.nbytes = directory, nbytes

    def write_batch(self, writes: Sequence[object]) -> list[int]:
        return [0] * len(writes)

    register = read_batch = give_back = close = nothing


def address_space(nbytes: int) -> host_slab._Mapping:
    """A slab's mapping, which may be larger than the machine's memory. It has no huge pages, because writing a single
    word would allocate a whole one."""
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
    """Installs the fakes. For processes of their own, because nothing is restored."""
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
