"""Measures the rates of a machine with a GPU on which the plans of gpu_systems.py are based: one cell per process.

python benchmarks/gpu_rates.py --output DIR --cell NAME
"""

from __future__ import annotations

# isort: off
from spillway_trainer import environment  # noqa: F401 - before torch is imported
# isort: on

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

import gpu_cells
from gpu_cells import is_fake, measured, say
from spillway.units import GIB, MIB
from spillway_trainer.cgroup import usable_cores
from spillway_trainer.kernels import dispatch as kernels
from spillway_trainer.kernels import native
from spillway_trainer.kernels.reference import UpdateScalars
from spillway_trainer.tiers import cuda
from spillway_trainer.tiers.host_slab import HostSlab

SEED = 7


def rates(output: Path) -> None:
    """Measures bytes per second of the link each way, both ways at once, and within the device; FLOPs per second."""
    device, nbytes = gpu_cells.device(), MIB if is_fake() else GIB
    measured(**cuda.link_rates(device, HostSlab(2 * nbytes), nbytes))
    size = 64 if is_fake() else 8192
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    product = partial(torch.matmul, left, right)
    cuda.seconds_of([product] * 3)
    measured(bfloat16_flops=2 * size**3 / positive(cuda.seconds_of([product] * 10)))


def cpu_rates(output: Path) -> None:
    """Measures AdamW and the norm of bfloat16 gradients in bytes per second, with 8 threads and all usable cores."""
    gpu_cells.device()
    count, cores = 2**16 if is_fake() else 2**27, usable_cores(Path("/"))
    states = [torch.full((count,), 0.01) for _ in range(3)]
    gradient, out = torch.full((count,), 0.01).bfloat16(), torch.zeros(count, dtype=torch.bfloat16)
    scalars = UpdateScalars(1e-4, 0.9, 0.95, 1e-8, 0.1, 0.9, 0.95)
    say(isa=native.isa() if native.available() else "torch's operations", usable_cores=cores)
    for threads in sorted({min(8, cores), cores}):
        torch.set_num_threads(threads)
        update = partial(kernels.update, scalars, states[0], states[1:], gradient, out, num_threads=threads)
        norm = partial(kernels.square_sum, gradient, num_threads=threads)
        measured(**{
            f"update_bytes_per_second_{threads}_threads": 28 * count / positive(repeated(update)),
            f"norm_bytes_per_second_{threads}_threads": 2 * count / positive(repeated(norm)),
        })  # fmt: skip


def bits(output: Path) -> None:
    device = gpu_cells.device()
    count = 2**12 if is_fake() else 2**26
    generator = torch.Generator().manual_seed(SEED)
    values = [torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32) for _ in range(4)]
    states, gradient = [one.view(torch.float32) for one in values[:3]], values[3].view(torch.float32).bfloat16()
    there = [state.to(device, copy=True) for state in states]
    out, out_there = torch.empty_like(gradient), torch.empty_like(gradient, device=device)
    scalars = UpdateScalars(1e-3, 0.9, 0.95, 1e-8, 0.1, 0.9, 0.95, gradient_scale=0.37)
    kernels.update(scalars, there[0], there[1:], gradient.to(device), out_there)
    kernels.update(scalars, states[0], states[1:], gradient, out, num_threads=usable_cores(Path("/")))
    pairs = zip([*there, out_there], [*states, out], strict=True)
    say(equal=all(torch.equal(ours.cpu().view(torch.int16), theirs.view(torch.int16)) for ours, theirs in pairs))


def disk_rates(output: Path) -> None:
    from spillway_trainer import probe  # noqa: PLC0415 - it needs more packages than the other rates

    gpu_cells.device()
    disk, backend = probe.disk(output, (32 if is_fake() else 1024) * MIB)
    say(io=backend)
    measured(**{f"disk_{way}": statistics.median(disk[f"disk {way}"]) for way in ("read", "write")})


def positive(seconds: Sequence[float]) -> float:
    """Returns the median, but at least 1 ns, because a fake device's clock may stand still."""
    return max(1e-9, statistics.median(seconds))


def repeated(work: Callable[[], object]) -> list[float]:
    work()
    found = []
    for _ in range(7):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return found


WORK: dict[str, Callable[[Path], None]] = {
    "rates": rates,
    "bits": bits,
    "cpu rates": cpu_rates,
    "disk rates": disk_rates,
}


if __name__ == "__main__":
    gpu_cells.do(WORK, __doc__)
