"""Plans for GPUs compared with what torch's CUDA allocator took: 62 shapes of 1 B to 13 B parameters on one GPU, and 28
of 1 B to 70 B on 2 to 64 (20 with strategy Fsdp, 4 with Ddp, 4 with Zero1 or Zero2), three steps each.

Needs no GPU: torch's CUDA build runs on the tests' fake device (tests/fakes/cuda), at full size, and computes nothing.
Allocator, streams, events, the operators' own CUDA code and the trainer are real; kernels and large copies do nothing,
and large memory is address space only (tests/fakes/cuda_without_numbers.py says what else is not real). So bytes and
counts are those of a device whose copies take no time; seconds mean nothing.

    PYTHONPATH=operator:trainer_image python benchmarks/gpu_plans.py --output FILE.jsonl

The file gets one line per shape; the same command continues with the missing shapes. At the end it prints the table,
with what is wrong with each shape (`misses` in cases/gpu_plans.py); the exit code is 1 if anything is wrong. --only
NAME chooses shapes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("hack", "tests")]

from cases.gpu_plans import DEVICE_MIB, SHAPES, SHARDED, misses, run_shape  # noqa: E402
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
    chosen = [shape for shape in (*SHAPES, *SHARDED) if arguments.only in shape.name]
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
