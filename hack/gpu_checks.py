"""The cells of gpu_session.py that need only torch, Triton and pydantic: checks and rates of the kernels.

python hack/gpu_checks.py --output DIR --cell NAME
"""

from __future__ import annotations

# isort: off
from spillway_trainer import environment  # noqa: F401 - before torch is imported
# isort: on

import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import gpu_cells
from gpu_cells import is_fake, measured, say
from spillway.update_rules import MomentType, UpdateRule
from spillway_trainer import device_check
from spillway_trainer.kernels import dispatch as trainer_kernels
from spillway_trainer.kernels import native
from spillway_trainer.kernels.reference import UpdateScalars
from spillway_trainer.optimizer.plain import Hyperparameters
from spillway_trainer.tiers import cuda
from spillway_trainer.tiers.cuda_lanes import CudaLanes
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab

KERNELS = {
    "sums": "sums_of_squares or accumulated or rounded",
    "updates": "ten_steps and gradient_type1 and out_type1 and moment_type0",
    "halves": "halves and moment_type0",
    "large": "large or beyond or stream",
}
"""the tests of each cell, as pytest's -k"""
TYPES = ("float32", "bfloat16", "float16")


def build_native(output: Path) -> None:
    """Builds the native library beside the copy of the trainer that cells import."""
    if shutil.which("cmake") is None or shutil.which("c++") is None:
        say(built=False, why="no cmake or no C++ compiler: on the CPU torch's operations take the kernels' place")
        return
    build = output / "native"
    for command in (["cmake", "-S", gpu_cells.ROOT, "-B", build], ["cmake", "--build", build, "--parallel"]):
        subprocess.run(command, check=True)
    shutil.copy(build / native.LIBRARY_NAME, output / "packages" / "spillway_trainer" / native.LIBRARY_NAME)
    say(built=True)


def every_kernel(output: Path, moments: MomentType) -> None:
    """Makes the device check that runs make before their first step, for every update rule and type."""
    device = gpu_cells.device()
    lanes = CudaLanes(HostSlab(device_check.HOST_BYTES), DeviceLedger(None), cuda.CudaStreams(device))
    for rule in UpdateRule:
        began, settings = time.perf_counter(), Hyperparameters(rule=rule, momentum=0.8, moments=moments)
        device_check.check(lanes, device, settings, [getattr(torch, one) for one in TYPES])
        say(**{str(rule): "equal"})
        measured(**{f"{rule}, compiled and checked, seconds": time.perf_counter() - began})
    lanes.close()


def kernels(output: Path, what: str) -> None:
    device = gpu_cells.device()
    import pytest  # noqa: PLC0415 - not every machine has it

    command = ["-p", "no:cacheprovider", "--confcutdir", "tests/gpu", "-k", KERNELS[what], "tests/gpu"]
    if is_fake():
        command.append("--collect-only")
        say(run=False, why=f"{device} is a fake, which runs no kernel of Triton: the tests are only collected")
    sys.exit(pytest.main(command))


def update_rates(output: Path, gradient_type: str) -> None:
    """Measures in turns our update with a bfloat16 parameter out, torch's fused AdamW in float32, and a copy of as many
    bytes as our update moves; and our sum and norm."""
    device = gpu_cells.device()
    scalars = UpdateScalars(1e-4, 0.9, 0.95, 1e-8, 0.1, 0.9, 0.95, gradient_scale=0.5)
    for count in (2**10,) if is_fake() else (2**20, 2**24, 2**28):
        states = [torch.randn(count, device=device) * 0.02, *torch.zeros(2, count, device=device)]
        values = torch.randn(count, device=device) * 1e-3
        gradient, out = values.to(getattr(torch, gradient_type)), states[0].bfloat16()
        theirs = torch.nn.Parameter(states[0].clone())
        theirs.grad = values
        optimizer = torch.optim.AdamW([theirs], lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        nbytes = {"update": count * (24 + gradient.element_size() + 2), "sum": count * (8 + gradient.element_size())}
        nbytes["norm"] = count * gradient.element_size()
        source = torch.empty(nbytes["update"] // 2, dtype=torch.uint8, device=device)
        target, accumulator = torch.empty_like(source), torch.zeros(count, device=device)
        seconds = alternated(
            {
                "update": partial(trainer_kernels.update, scalars, states[0], states[1:], gradient, out),
                "torch": optimizer.step,
                "copy": partial(target.copy_, source),
                "sum": partial(trainer_kernels.accumulate, accumulator, gradient, False),
                "norm": partial(trainer_kernels.begin_square_sum, gradient),
            }
        )
        found = {f"{name}_bytes_per_second": moved / seconds[name] for name, moved in nbytes.items()}
        found["copy_bytes_per_second"] = nbytes["update"] / seconds["copy"]
        found["times_as_fast_as_torch_fused"] = seconds["torch"] / seconds["update"]
        measured(**{f"{name} {count}": value for name, value in found.items()})
        del states, values, gradient, out, theirs, optimizer, source, target, accumulator


def alternated(work: dict[str, Callable[[], object]], num_rounds: int = 30) -> dict[str, float]:
    """Runs all functions in turns, and returns the median seconds of each by device events. The first three rounds warm
    up and do not count."""
    events: dict[str, list[Any]] = {name: [] for name in work}
    for round_number in range(num_rounds + 3):
        for name, function in work.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            if round_number >= 3:
                events[name].append((begin, end))
    torch.cuda.synchronize()
    return {
        name: max(1e-9, statistics.median(begin.elapsed_time(end) / 1e3 for begin, end in pairs))
        for name, pairs in events.items()
    }


WORK: dict[str, Callable[[Path], None]] = {
    "native library": build_native,
    **{f"device check {moments}": partial(every_kernel, moments=moments) for moments in MomentType},
    **{f"kernels {what}": partial(kernels, what=what) for what in KERNELS},
    **{f"update rates {name}": partial(update_rates, gradient_type=name) for name in TYPES[:2]},
}


if __name__ == "__main__":
    gpu_cells.do(WORK, __doc__)
