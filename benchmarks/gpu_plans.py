"""Plans for one GPU beside what torch's own CUDA allocator took: 62 shapes of 1 B to 13 B parameters, three steps each.

No GPU: torch's CUDA build runs on the fake device of the tests (tests/fakes/cuda), at full size and without numbers.
Allocator, streams, events, the operators' own CUDA code and the trainer are real; kernels and large copies do nothing,
and large memory is address space (tests/fakes/cuda_without_numbers.py says what else is not real). So bytes and counts
are those of a device whose copies take no time; seconds say nothing.

    PYTHONPATH=operator:trainer_image python benchmarks/gpu_plans.py --output FILE.jsonl

A line a shape; the same command goes on with those that are missing. The table is printed at the end, and what of a
shape is not as it must be (cases/gpu_plans.py, `misses`); exit code 1 where there is any. --only NAME: some shapes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("hack", "tests")]

from cases.gpu_plans import DEVICE_MIB, SHAPES, misses, run_shape  # noqa: E402
from harness import fake_cuda  # noqa: E402
from spillway.units import GIB  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description="Plans for one GPU beside what torch's allocator took.")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines, one a shape")
    parser.add_argument("--only", default="", help="shapes whose name has this in it")
    arguments = parser.parse_args()
    output: Path = arguments.output
    found = (
        {line["shape"]: line for line in map(json.loads, output.read_text().splitlines())} if output.exists() else {}
    )
    chosen = [shape for shape in SHAPES if arguments.only in shape.name]
    for shape in chosen:
        if shape.name not in found:
            found[shape.name] = fake_cuda.run(run_shape, shape, virtual=1, mib=DEVICE_MIB)
            with output.open("a") as file:
                print(json.dumps(found[shape.name]), file=file)
    lines = [found[shape.name] for shape in chosen]
    print("\n".join(table(lines)))
    return int(any(map(misses, lines)))


def table(lines: Iterable[dict[str, Any]]) -> Iterable[str]:
    names = "shape", "budget", "allocated", "planned / seen", "reserved", "planned / seen", "retries", "syncs", "misses"
    yield f"| {' | '.join(names)} |"
    yield "|---" * len(names) + "|"
    for line in lines:
        budget, allocated, reserved = (line[name] / GIB for name in ("budget", "allocated", "reserved"))
        ratios = [f"{line[f'predicted{name.title()}'] / max(1, line[name]):.3f}" for name in ("allocated", "reserved")]
        cells = [line["shape"], f"{budget:.2f}", f"{allocated:.2f}", ratios[0], f"{reserved:.2f}", ratios[1]]
        cells += [str(line["retries"]), str(line.get("synchronisations", "-")), ", ".join(misses(line)) or "none"]
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    raise SystemExit(main())
