"""Memory techniques on one GPU: ours and other systems, each in a fresh process. Can be resumed; uses no network.

    python benchmarks/gpu_optimizer_offload.py --output DIR [--wheels WHEELS] [--minutes 9] [--model S]

Run hack/gpu_session.py first, with the same DIR: it builds the native library there and runs the cells of FIRST.
DIR/results.jsonl gets a line per cell (system, sequences a step, clipping), DIR/table.txt is written at the end, and
DIR/traces has one step of each as torch.profiler sees it. The same command continues (options: gpu_cells.py).

Every system trains the same plain llama in bfloat16 (1, 4 and 8 sequences of 2048 tokens a step, every block recomputed
in backward, deterministic kernels) with AdamW on float32 masters, under the same cap of device memory, unless the table
says otherwise. `bare` is forward and backward alone, with gradients dropped; `no offload` has all states on the device,
without the cap. Our plans are made for this machine: for its memory, its cores, and the rates that the first cells
measured. For a system that cannot be imported, or that fails, the table has the reason instead of figures.

    step      median seconds of 10 steps (fewer if they are long) after 3 that do not count; the host waits for the
              device once, after all of them
    exposed   step minus the step of the system in column `beyond`, with the same number of tokens: the technique's cost
    bound     lower bound of the update's seconds, at the measured rates, for our plan's shares
    GiB       of device memory: planned, the most that tensors held, the most that torch's allocator reserved
    bits      AdamW over 2^26 values by the device's kernel and by the CPU's, compared bit by bit

The systems themselves are in gpu_systems.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gpu_cells
from gpu_cells import LEAST_PACKAGES, PACKAGES, Results

REHEARSAL = "REHEARSAL on a fake device with a tiny model: the script's plumbing, no measurement"
CELL_SECONDS = {"S": gpu_cells.CELL_SECONDS, "M": 180.0}
LINE_LENGTH = 180
MICRO_BATCHES = (1, 4, 8)
"""sequences a step"""


@dataclass(frozen=True, slots=True)
class System:
    beyond: str = "bare"
    """the system whose step is subtracted"""
    note: str = ""
    clips: tuple[bool, ...] = (False, True)


SYSTEMS = {
    "bare": System("", "no update", (False,)),
    "no offload": System(note="no cap"),
    "ours": System(),
    "ours, CPU alone": System(),
    "ours, interleaved": System(),
    "ours, beside forward": System(),
    "ours, beside backward": System(),
    "ours, all resident": System("", "no cap, nothing recomputed", (False,)),
    "ours, activations on host": System("ours, all resident", "no cap", (False,)),
    "ours, activations on nvme": System("ours, all resident", "no cap", (False,)),
    "ours, weights streamed": System("ours, CPU alone", "", (False,)),
    "DeepSpeed ZeRO-2 offload": System(),
    "DeepSpeed ZeRO-3 offload": System(),
    "TwinFlow 0.8": System(),
    "SuperOffload": System(),
    "FSDP2 CPU offload": System(note="float32 parameters"),
    "torchao CPU offload": System(note="float32 parameters, autocast"),
    "bitsandbytes paged 8 bit": System(note="other numerics"),
    "ours again": System(note="drift"),
}
FIRST = [(name, 4) for name in SYSTEMS if name.startswith(("bare", "no", "ours,")) and "nvme" not in name]
FIRST += [("ours, all resident", 1), ("ours, activations on nvme", 1)]
"""(system, sequences a step) of the cells, without clipping, that a first session needs. Activations on nvme are there
with 1 sequence only, because a disk takes long for those of 8k tokens (4 sequences)."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One system at one size, measured by one process."""

    system: str
    size: str
    micro_batch: int
    clips: bool = False

    @property
    def name(self) -> str:
        return f"{self.size} {self.micro_batch} {'clip ' * self.clips}{self.system}"

    def run_as(self, output: Path) -> gpu_cells.Cell:
        command = ("gpu_systems.py", "--output", str(output), "--cell", json.dumps(asdict(self)))
        return gpu_cells.Cell(self.name, in_this_folder(*command), PACKAGES, CELL_SECONDS[self.size])


@dataclass(frozen=True, slots=True)
class Rate:
    """A cell of gpu_rates.py."""

    name: str
    needs: tuple[str, ...] = LEAST_PACKAGES

    def run_as(self, output: Path) -> gpu_cells.Cell:
        command = ("gpu_rates.py", "--output", str(output), "--cell", self.name)
        return gpu_cells.Cell(self.name, in_this_folder(*command), self.needs)


def in_this_folder(script: str, *arguments: str) -> tuple[str, ...]:
    return (str(Path(__file__).with_name(script)), *arguments)


RATES, BITS = Rate("rates"), Rate("bits")
OTHER_RATES = (Rate("cpu rates"), Rate("disk rates", PACKAGES))
"""the rates that, with RATES, the plans of our systems are based on"""


def cells_of(size: str) -> list[Cell | Rate]:
    """Returns all cells of `size`; those that the others are compared with come first."""
    found: list[Cell | Rate] = [RATES, *OTHER_RATES, BITS]
    for micro_batch in MICRO_BATCHES:
        for name, system in SYSTEMS.items():
            found += [Cell(name, size, micro_batch, clips) for clips in system.clips]
    return found


def first_cells() -> list[Cell]:
    return [Cell(system, "S", micro_batch) for system, micro_batch in FIRST]


# --- the table --------------------------------------------------------------------------------------------------------


def table(results: Results) -> str:
    """Returns the table of what is known so far, one row per cell."""
    rows = [
        f"{name}: {json.dumps(results.figures(name))}"
        for name in ("machine", "rates", *(one.name for one in OTHER_RATES), "bits")
    ]
    if results.figures("machine").get("device") == gpu_cells.FAKE:
        rows = [REHEARSAL, "", *rows]
    rows += ["", f"{'system':<27}{'tokens':>8}{'clip':>6}{'step':>9}{'exposed':>9}{'bound':>9}{'tok/s':>8}{'GiB':>17}"
             f"  {'beyond':<20}note"]  # fmt: skip
    rows += [
        row
        for size in CELL_SECONDS
        for cell in cells_of(size)
        if isinstance(cell, Cell)
        for row in rows_of(cell, results)
    ]
    return "\n".join(rows) + "\n"


def rows_of(cell: Cell, results: Results) -> Iterator[str]:
    line = results.lines.get(cell.name)
    if line is None:
        return
    system = SYSTEMS[cell.system]
    figures, without = line.get("figures", {}), results.figures(Cell(system.beyond, cell.size, cell.micro_batch).name)
    head = f"{cell.system:<27}{figures.get('tokens', '?'):>8}{'yes' if cell.clips else 'no':>6}"
    if "step_seconds" not in figures:
        yield f"{head}  {line.get('missing') or reason_of(line)}"[:LINE_LENGTH]
        return
    step, base = figures["step_seconds"], without.get("step_seconds")
    exposed = step - base if isinstance(step, float) and isinstance(base, float) else None
    numbers = [shown(step, 9, 4), shown(exposed, 9, 4), shown(figures.get("bound_seconds"), 9, 4)]
    numbers.append(shown(figures["tokens_per_second"], 8, 0))
    gib = "/".join(gib_of(figures.get(f"{which}_bytes")) for which in ("planned", "allocated", "reserved"))
    beyond = "-" if exposed is None else system.beyond
    yield f"{head}{''.join(numbers)}{gib:>17}  {beyond:<20}{system.note}".rstrip()


def reason_of(line: Mapping[str, Any]) -> str:
    """Returns why a system has no figures: in its own words, or by the last line that it printed."""
    return str(line.get("figures", {}).get("unavailable") or [line.get("why", "?"), *line.get("tail", [])][-1])


def shown(value: object, width: int, digits: int) -> str:
    return f"{value:>{width}.{digits}f}" if isinstance(value, float) else f"{'-':>{width}}"


def gib_of(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 2**30:.2f}"


def run(cells: Sequence[gpu_cells.Cell], given: argparse.Namespace) -> int:
    """Runs `cells` and writes the table. Returns the number of cells that are not done."""
    gpu_cells.begin(given.output, given.wheels)
    not_done = gpu_cells.run(cells, given)
    found = table(Results(given.output))
    (given.output / "table.txt").write_text(found)
    print(found, flush=True)
    return not_done


def main() -> None:
    parser = gpu_cells.parser(__doc__)
    parser.add_argument("--model", choices=[*CELL_SECONDS], default="S")
    given = parser.parse_args()
    sys.exit(run([cell.run_as(given.output) for cell in cells_of(given.model)], given) > 0)


if __name__ == "__main__":
    main()
