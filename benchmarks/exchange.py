"""Two ranks on one machine: how much of the gradient exchange is hidden behind backward, and step times against DDP's.

The contestants work like those of end_to_end.py: groups of processes that train without end and are stopped except
during their turns. Each has two ranks with one compute thread each, which exchange through gloo on the loopback: a
llama of 17 M parameters in float32, mode Disabled, 512 tokens a micro-batch, AdamW and clipping.

  behind        `spillway run`, which exchanges during backward
  after         the same with the exchange after backward, as in earlier versions
  ddp           a bare loop around torch's DistributedDataParallel, with the trainer's tensor pool
  slow behind, slow after   the first two on a link with an injected delay: after each send, the exchanging thread
                sleeps as long as the bytes take at SLOW_BYTES_PER_SECOND, and computes nothing meanwhile

  exchange_hidden   1 - exposed / whole: exposed is phase `exchange` of "behind"; whole is that of "after", in which
                    nothing is hidden
  slow_hidden       the same on the slow link
  step_vs_ddp       seconds of a step of "behind" over those of "ddp"
  step_vs_after, slow_step_vs_after    the same over "after"

Figures are medians over rounds, for the first cell (one micro-batch a rank); those of all cells are printed. On two
cores, two computing ranks leave no core for the exchange: its computation (copies, sums, the kernel's part of the
loopback) takes as long during backward as after it. So CPU seconds are printed, too. Cells, rounds and goals were
committed before the first figure was measured.

EXCHANGE_CELLS chooses cells: a comma-separated list of parts of their names.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml

import end_to_end
import paired
from end_to_end import LOOPS, ROOM, SPILLWAY, WARM_STEPS, Contestant, in_turns
from paired import Ratio, paired_ratio
from spillway_trainer.launch.launcher import free_ports

SLOW_BYTES_PER_SECOND = 100e6
"""per rank: about a 1 Gbit/s network"""
PATIENCE_SECONDS = "3600"
"""limit of one collective: long, because a contestant may be stopped in the middle of one"""


@dataclass(frozen=True, slots=True)
class Cell:
    num_micro_batches: int
    """per rank and step"""
    memory: str

    @property
    def name(self) -> str:
        return f"{self.num_micro_batches} micro-batches {self.memory}"


RESIDENT: dict[str, Any] = {"mode": "Disabled", "budget": ROOM}
OFFLOADED = {"budget": ROOM, "advanced": end_to_end.OFFLOADED}
MEMORY = {"resident": RESIDENT, "offloaded": OFFLOADED}
CELLS = [Cell(1, "resident"), Cell(4, "resident"), Cell(1, "offloaded")]
ROUNDS, QUICK_ROUNDS, STEPS_OF_ROUND = 9, 3, 5
MODEL = end_to_end.Cell("llama", 512, 1)

TESTS = Path(__file__).resolve().parents[1] / "tests"
PATCH = '''
import importlib.abc, importlib.util, sys, time

class Patched(importlib.abc.MetaPathFinder):
    """Changes the exchange once the trainer has imported it."""

    def find_spec(self, name, path, target=None):
        if name != "spillway_trainer.parallel.backward_exchange":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (load(module), change(module))
        return spec

def change(module):
    if {after}:
        sys.path.append({tests!r})
        from harness.after_backward import AfterBackward
        module.BackwardExchange = AfterBackward
    if {slow}:
        from spillway_trainer.parallel.distributed import ExchangedSum
        swap = ExchangedSum._swap
        def slowed(self, sent, received):
            swap(self, sent, received)
            time.sleep(sent[0].nbytes / {rate})  # to the other of two ranks
        ExchangedSum._swap = slowed

sys.meta_path.insert(0, Patched())
'''
"""sitecustomize.py of our trainers: `after` moves the exchange after backward, `slow` delays it"""


@dataclass(frozen=True, slots=True)
class Ring:
    """Makes contestants in `directory`."""

    directory: Path
    corpora: list[Path]
    """the corpus of the last job; all jobs have the same"""

    def ours(self, cell: Cell, name: str, *, after: bool = False, slow: bool = False) -> Contestant:
        output = self.directory / f"{cell.name} {name}".replace(" ", "-")
        output.mkdir()
        (output / "sitecustomize.py").write_text(
            PATCH.format(after=after, slow=slow, rate=SLOW_BYTES_PER_SECOND, tests=str(TESTS))
        )
        document = end_to_end.job(MODEL.model, MODEL.tokens, MEMORY[cell.memory])
        document["spec"]["training"] |= {"steps": 1000000, "globalBatchSize": 2 * cell.num_micro_batches}
        document["spec"]["parallelism"] |= {"devicesPerNode": 2, "strategy": "Ddp"}
        manifest = output / "job.yaml"
        manifest.write_text(yaml.safe_dump(document))
        environment = {"SPILLWAY_COLLECTIVE_SECONDS": PATIENCE_SECONDS, "PYTHONPATH": str(output)}
        run = output / "run"
        if self.corpora:
            shutil.copytree(self.corpora[0], run / "corpus")
        self.corpora[:] = [run / "corpus"]
        command = [*SPILLWAY, "run", str(manifest), "--ranks", "2", "--output", str(run)]
        return Contestant(with_environment(environment, command), run / "run.jsonl", output, b'"step_seconds"')

    def ddp(self, cell: Cell) -> Contestant:
        directory = self.directory / f"{cell.name} ddp".replace(" ", "-")
        directory.mkdir()
        given = {
            "loop": "ddp", "model": MODEL.model, "tokens": MODEL.tokens, "threads": 1, "dtype": "float32",
            "checkpointing": False, "pool": True, "file": str(directory / "steps"), "port": free_ports(1)[0],
            "micro_batches": cell.num_micro_batches,
        }  # fmt: skip
        return Contestant([sys.executable, str(LOOPS), json.dumps(given)], directory / "steps", directory, b"\n")


def with_environment(variables: dict[str, str], command: Sequence[str]) -> list[str]:
    return ["env", *(f"{name}={value}" for name, value in variables.items()), *command]


def contestants(ring: Ring, cell: Cell) -> dict[str, Callable[[], Contestant]]:
    return {
        "behind": lambda: ring.ours(cell, "behind"),
        "after": lambda: ring.ours(cell, "after", after=True),
        "ddp": lambda: ring.ddp(cell),
        "slow behind": lambda: ring.ours(cell, "slow-behind", slow=True),
        "slow after": lambda: ring.ours(cell, "slow-after", after=True, slow=True),
    }


def exposed(directory: Path, rounds: int) -> list[float]:
    """Returns the seconds of phase `exchange`: for each round the median of its steps."""
    lines = [json.loads(line) for line in (directory / "run" / "run.jsonl").read_text().splitlines()]
    steps = [line["phase_seconds"]["exchange"] for line in lines if line.get("event") == "step"][WARM_STEPS:]
    turns = [steps[STEPS_OF_ROUND * number : STEPS_OF_ROUND * (number + 1)] for number in range(rounds)]
    return [median(turn) for turn in turns]


def measure_cell(ring: Ring, cell: Cell, rounds: int) -> dict[str, Ratio]:
    with ExitStack() as opened:
        running = in_turns(opened, contestants(ring, cell), 1, rounds, STEPS_OF_ROUND)
    ours = {name: ring.directory / f"{cell.name} {name}".replace(" ", "-") for name in running if name != "ddp"}
    exchanged = {name: exposed(directory, rounds) for name, directory in ours.items()}
    print(f"\n{cell.name}\n{'':20}{'s/step':>9}{'CPU s':>9}{'exchange s':>12}")
    for name, one in running.items():
        seconds, cpu = median(one.seconds), median(one.cpu_seconds)
        said = f"{median(exchanged[name]):12.3f}" if name in exchanged else ""
        print(f"{name:20}{seconds:9.3f}{cpu:9.3f}{said}", flush=True)
    seconds = {name: one.seconds for name, one in running.items()}
    pairs = {
        "left": (exchanged["behind"], exchanged["after"]),
        "slow_left": (exchanged["slow behind"], exchanged["slow after"]),
        "step_vs_ddp": (seconds["behind"], seconds["ddp"]),
        "step_vs_after": (seconds["behind"], seconds["after"]),
        "slow_step_vs_after": (seconds["slow behind"], seconds["slow after"]),
    }
    # Ours over the rival's, unlike most of this project's ratios: smaller is better.
    ratios = {name: paired_ratio(rivals, mine) for name, (mine, rivals) in pairs.items()}
    for name, ratio in ratios.items():
        print(f"  {name:20}{ratio}", flush=True)
    return ratios


def measure(quick: bool) -> dict[str, float]:
    chosen = os.environ.get("EXCHANGE_CELLS", "").split(",")
    cells = [cell for cell in (CELLS[:1] if quick else CELLS) if any(part in cell.name for part in chosen)]
    with tempfile.TemporaryDirectory(dir=".") as directory:
        ring = Ring(Path(directory).resolve(), [])
        found = [measure_cell(ring, cell, QUICK_ROUNDS if quick else ROUNDS) for cell in cells]
    figures = {name: ratio.median for name, ratio in found[0].items()}
    return {
        "exchange_hidden": 1.0 - figures.pop("left"),
        "slow_hidden": 1.0 - figures.pop("slow_left"),
        **figures,
    }


if __name__ == "__main__":
    assert __doc__ is not None
    paired.main("exchange", __doc__, measure, at_most={"step_vs_ddp": 1.05}, at_least={"exchange_hidden": 0.60})
