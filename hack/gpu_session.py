"""What to do with a few minutes on a machine with a GPU: parity first, then rates. Every result is written at once.

    PYTHONPATH=operator:trainer_image python hack/gpu_session.py --output DIR [--minutes 8]

Needs Python >= 3.11, torch >= 2.11 with CUDA, Triton, pytest and hypothesis; no network and no installation: carry the
checkout and nothing else. Where cmake and a C++ compiler are there, the native library is built into the checkout, for
the comparison with the CPU's kernels.

benchmarks/gpu_optimizer_offload.py, whole training steps beside other systems, comes after this.

DIR/results.jsonl gets one line a cell (what, its figures or its error, seconds since the beginning), DIR/tests.txt
pytest's output. Run again with the same DIR, it goes on with the cells that are missing. Rates count bytes that must
cross the memory once; `fraction_of_copy` is that rate over the one of a device-to-device copy, measured beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import triton

from spillway_trainer import native, triton_kernels
from spillway_trainer.reference import UpdateScalars

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ROOT / "trainer_image" / "spillway_trainer" / native.LIBRARY_NAME

Figures = dict[str, object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--minutes", type=float, default=8.0, help="no cell begins later than this (default 8)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: this is what to do where there is one; tests/gpu skips itself where there is none")
    options.output.mkdir(parents=True, exist_ok=True)
    session = Session(options.output / "results.jsonl", options.minutes * 60)
    session.cell("native library", build_native)
    session.cell("machine", machine)
    session.cell("parity", lambda: parity(options.output / "tests.txt"))
    for num_parameters in (2**20, 2**24, 2**28):
        for gradient in ("bfloat16", "float32"):
            session.cell(f"adamw {num_parameters} {gradient}", lambda n=num_parameters, g=gradient: adamw_rates(n, g))
    session.cell("accumulate", accumulate_rate)
    session.cell("cpu adamw", cpu_adamw_rate)
    sys.exit(session.num_failed > 0)


class Session:
    """Runs cells in turn and appends one line for each to a file; skips those that are in it and went well."""

    def __init__(self, path: Path, limit_seconds: float) -> None:
        self._path, self._limit_seconds, self._begin = path, limit_seconds, time.monotonic()
        lines = path.read_text().splitlines() if path.exists() else []
        self._done = {line["cell"] for line in map(json.loads, lines) if "error" not in line}
        self.num_failed = 0

    def cell(self, name: str, work: Callable[[], Figures]) -> None:
        at_seconds = round(time.monotonic() - self._begin, 1)
        if name in self._done:
            return
        if at_seconds > self._limit_seconds:
            print(f"{name}: not begun, {at_seconds:.0f} s are over", flush=True)
            return
        line: dict[str, object] = {"cell": name, "at_seconds": at_seconds}
        try:
            line |= {"figures": work()}
        except Exception as error:
            traceback.print_exc()
            line |= {"error": f"{type(error).__name__}: {error}"}
            self.num_failed += 1
        print(json.dumps(line), flush=True)
        with self._path.open("a") as results:
            results.write(json.dumps(line) + "\n")


def build_native() -> Figures:
    """Beside the package, where `native.load_library` finds it."""
    if shutil.which("cmake") is None or shutil.which("c++") is None:
        return {"built": False, "why": "no cmake or no C++ compiler: tests compare with the reference"}
    build = ROOT / "build" / "gpu-session"
    for command in (["cmake", "-S", ROOT, "-B", build], ["cmake", "--build", build, "--parallel"]):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    shutil.copy(build / LIBRARY.name, LIBRARY)
    return {"built": True}


def machine() -> Figures:
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "memory_bytes": properties.total_memory,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cpus": len(os.sched_getaffinity(0)),
    }


def parity(log: Path) -> Figures:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/gpu", "tests/contract/test_ptx.py"]
    with log.open("w") as output:
        ended = subprocess.run(command, cwd=ROOT, stdout=output, stderr=output, check=False)
    last = log.read_text().splitlines()[-1:]
    if ended.returncode != 0:
        raise RuntimeError(f"pytest ended with {ended.returncode}: {' '.join(last)} (all of it in {log.name})")
    return {"pytest": " ".join(last)}


def adamw_rates(num_parameters: int, gradient_type: str) -> Figures:
    """Ours with a bfloat16 parameter out, torch's fused AdamW in float32, and a copy of as many bytes, in turns."""
    scalars = UpdateScalars(1e-4, 0.9, 0.95, 1e-8, 0.1, 0.9, 0.95, gradient_scale=0.5)
    states = [torch.randn(num_parameters, device="cuda") * 0.02, *torch.zeros(2, num_parameters, device="cuda")]
    values = torch.randn(num_parameters, device="cuda") * 1e-3
    gradient, out = values.to(getattr(torch, gradient_type)), states[0].bfloat16()
    theirs = torch.nn.Parameter(states[0].clone())
    theirs.grad = values
    optimizer = torch.optim.AdamW([theirs], lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    nbytes = num_parameters * (24 + gradient.element_size() + out.element_size())
    source = torch.empty(nbytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = alternated(
        {
            "ours": lambda: triton_kernels.update(scalars, states[0], states[1:], gradient, out),
            "torch": optimizer.step,
            "copy": lambda: target.copy_(source),
        }
    )
    return {
        "bytes_per_second": nbytes / seconds["ours"],
        "microseconds": seconds["ours"] * 1e6,
        "times_as_fast_as_torch_fused": seconds["torch"] / seconds["ours"],
        "copy_bytes_per_second": nbytes / seconds["copy"],
        "fraction_of_copy": seconds["copy"] / seconds["ours"],
    }


def accumulate_rate() -> Figures:
    n = 2**28
    accumulator, gradient = torch.zeros(n, device="cuda"), torch.randn(n, device="cuda").bfloat16()
    source = torch.empty(5 * n, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = alternated(
        {
            "ours": lambda: triton_kernels.accumulate(accumulator, gradient, False),
            "copy": lambda: target.copy_(source),
        }
    )
    return {"bytes_per_second": 10 * n / seconds["ours"], "fraction_of_copy": seconds["copy"] / seconds["ours"]}


def alternated(work: dict[str, Callable[[], object]], num_rounds: int = 30) -> dict[str, float]:
    """Median seconds of each by device events, in turns after three rounds of warming up."""
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in work}
    for round_number in range(num_rounds + 3):
        for name, function in work.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            if round_number >= 3:
                events[name].append((begin, end))
    torch.cuda.synchronize()
    times = {name: sorted(begin.elapsed_time(end) / 1e3 for begin, end in pairs) for name, pairs in events.items()}
    return {name: values[len(values) // 2] for name, values in times.items()}


def cpu_adamw_rate() -> Figures:
    """The host of this GPU: what the planner's CPU share rests on."""
    if not native.available():
        return {"isa": "reference"}
    n, num_threads = 2**27, len(os.sched_getaffinity(0))
    scalars = UpdateScalars(1e-4, 0.9, 0.95, 1e-8, 0.1, 0.9, 0.95)
    states = [torch.randn(n) * 0.02, torch.zeros(n), torch.zeros(n)]
    gradient, out = torch.randn(n).bfloat16(), torch.zeros(n, dtype=torch.bfloat16)
    rates: Figures = {"isa": native.isa()}
    for threads in sorted({1, num_threads // 2, num_threads} - {0}):
        seconds = []
        for _ in range(8):
            begin = time.perf_counter()
            native.update(scalars, states[0], states[1:], gradient, out, num_threads=threads)
            seconds.append(time.perf_counter() - begin)
        rates[f"bytes_per_second_{threads}_threads"] = 28 * n / sorted(seconds[1:])[3]
    begin = time.perf_counter()
    native.square_sum(gradient, num_threads=num_threads)
    rates["norm_values_per_second"] = n / (time.perf_counter() - begin)
    return rates


if __name__ == "__main__":
    main()
