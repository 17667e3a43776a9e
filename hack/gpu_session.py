"""What to run first on a machine with a GPU: checks results, then measures speed. Unattended; no network, no
installation.

    python hack/gpu_session.py --output DIR [--wheels WHEELS] [--minutes 9] [--only TEXT]

Every cell is a process of its own with a limit of 60 s. DIR/results.jsonl gets a line after each cell, even if the cell
failed or could not begin; the same command continues where it stopped (options: benchmarks/gpu_cells.py).

    machine, rates           what the machine has; rates of the links and of a matrix product
    native library           is built into DIR if the machine has cmake and a compiler
    device check MOMENTS     every update rule and every type against the CPU's bits, through the lanes
    parity MODEL             attempts with every technique have the bits of one without any, on the same device
    killed and resumed       a killed trainer process and the one that resumes it have the bits of an undisturbed one
    spillway COMMAND         run, with a job file that names no device; and calibrate
    sanitizer TOOL           compute-sanitizer over an attempt of three steps
    kernels WHAT             a part of tests/gpu, by pytest
    update rates, cpu rates  AdamW, sums and norms on the device and on the CPU
    disk rates               of DIR's disk, through the trainer's I/O engine
    S ...                    the cells of FIRST in benchmarks/gpu_optimizer_offload.py: table.txt, traces/
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import gpu_cells  # noqa: E402
import gpu_optimizer_offload as benchmark  # noqa: E402
from gpu_cells import LEAST_PACKAGES, PACKAGES, Cell  # noqa: E402

MOMENTS = ("float32", "bfloat16", "int8")
MODELS = ("llama", "llama in float32", "llama in float16", "llama with int8 moments")
OTHER_MODELS = ("gpt2", "bert", "t5", "adapters")
"""models that transformers and peft build"""


def cells(output: Path) -> list[Cell]:
    def cell(script: str, name: str, *needs: str) -> Cell:
        command = (str(Path(__file__).with_name(script)), "--output", str(output), "--cell", name)
        return Cell(name, command, needs)

    def check(name: str, *further: str) -> Cell:
        return cell("gpu_checks.py", name, *LEAST_PACKAGES, *further)

    def attempt(name: str, *further: str) -> Cell:
        return cell("gpu_attempts.py", name, *PACKAGES, *further)

    return [
        benchmark.RATES.run_as(output),
        check("native library"),
        *(check(f"device check {moments}") for moments in MOMENTS),
        *(attempt(f"parity {model}") for model in MODELS),
        *(attempt(f"parity {model}", "transformers", "peft") for model in OTHER_MODELS),
        attempt("killed and resumed"),
        *(attempt(f"spillway {command}", "typer", "rich", "pynvml") for command in ("run", "calibrate")),
        *(attempt(f"sanitizer {tool}") for tool in ("memcheck", "racecheck")),
        *(check(f"kernels {what}", "pytest") for what in ("sums", "updates", "halves", "large")),
        *(check(f"update rates {gradient}") for gradient in ("bfloat16", "float32")),
        *(one.run_as(output) for one in (benchmark.BITS, *benchmark.OTHER_RATES, *benchmark.first_cells())),
    ]


def main() -> None:
    given = gpu_cells.parser(__doc__).parse_args()
    sys.exit(benchmark.run(cells(given.output), given) > 0)


if __name__ == "__main__":
    main()
