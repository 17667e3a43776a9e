"""Whole jobs: `spillway run` compared with the training loops that people write, in turns of a few steps.

Every contestant is a process that trains without end: ours is `spillway run job.yaml`, the rivals are those of
end_to_end_loops.py with the same model, tokens and threads, in float32 with AdamW and clipping. All but one are stopped
(SIGSTOP). In each round every contestant takes the same number of steps, in an order that rotates. A step ends when its
line appears in run.jsonl or in the rival's file. Each round gives ratios of step time, ours over the rival's; the
figures are their medians.

  plain_vs_torch       mode Disabled over a bare torch loop, both with the trainer's tensor pool
  plain_vs_default     mode Disabled over a bare torch loop with torch's own allocator and settings
  plain_vs_trainer     mode Disabled over Hugging Face's Trainer with its own settings
  spill_step_ratio     a device budget that leaves half of the activations' peak, and almost no host memory, over mode
                       Disabled
  spill_vs_checkpoint  the same over the bare loop with gradient checkpointing (and the pool)
  offload_step_ratio   optimizer states and gradients in host memory, over mode Disabled

"peak" is the peak resident set of a step minus that of the same contestant with a tiny model.
Shapes, rounds and goals were committed before the first figure was measured.

END_TO_END_CELLS chooses cells: a comma-separated list of parts of their names.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import yaml

import paired
from paired import Ratio, paired_ratio
from processes import cpu_seconds, peak_resident_bytes
from spillway.units import MIB

SPILLWAY = [sys.executable, "-m", "spillway_cli"]
LOOPS = Path(__file__).with_name("end_to_end_loops.py")
PATIENCE_SECONDS = 300.0
"""for the steps of one contestant in one round"""
WARM_STEPS = 3
ROOM = {"device": "8Gi", "host": "8Gi", "nvme": "8Gi"}

WIDE = {"hiddenSize": 512, "numLayers": 4, "numHeads": 8, "vocabSize": 4096}
LONG = {"hiddenSize": 256, "numLayers": 4, "numHeads": 4, "vocabSize": 4096}
FEED_FORWARD = {"llama": 2.75, "gpt2": 4, "bert": 4, "t5": 4}


@dataclass(frozen=True, slots=True)
class Cell:
    family: str
    tokens: int
    threads: int

    @property
    def name(self) -> str:
        return f"{self.family} {self.tokens} tokens {self.threads} threads"

    @property
    def model(self) -> dict[str, Any]:
        sizes = dict(WIDE if self.tokens == 512 else LONG)
        sizes["intermediateSize"] = int(sizes["hiddenSize"] * FEED_FORWARD[self.family])
        if self.family == "t5":
            sizes["numLayers"] //= 2  # in each of its two stacks
        if self.family in ("gpt2", "bert"):
            sizes["maxPositions"] = self.tokens
        return {"architecture": self.family, **sizes}

    @property
    def num_steps(self) -> int:
        """The number of steps in a round."""
        return 3 if self.tokens == 512 else 1


CELLS = [Cell(family, tokens, threads) for tokens in (512, 4096) for threads in (1, 2) for family in FEED_FORWARD]
QUICK = [Cell("llama", 512, 1)]
ROUNDS, QUICK_ROUNDS = 7, 3
NO_SIZE = {"hiddenSize": 64, "numLayers": 2, "numHeads": 2, "intermediateSize": 64}
IDLE = {"half": "plain", "offloaded": "plain", "checkpointed": "torch"}
"""contestants whose idle memory equals that of another one, which is measured instead"""


def job(model: Mapping[str, Any], tokens: int, memory: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "spillway.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "end-to-end"},
        "spec": {
            "model": {"config": dict(model), "precision": {"compute": "float32"}},
            "data": {"builtin": "PythonStdlib"},
            "training": {"steps": 1, "sequenceLength": tokens, "globalBatchSize": 1, "microBatchSize": 1,
                         "optimizer": {"learningRate": "1e-4"}},
            "parallelism": {"device": "Cpu"}, "memory": dict(memory), "checkpoint": {"everySteps": 1000000},
        },
    }  # fmt: skip


class Contestant:
    """A process that is stopped except during its turns."""

    def __init__(self, command: Sequence[str], file: Path, directory: Path, is_step: bytes) -> None:
        """`file` gets a line that contains `is_step` after each step; `directory` gets what the process prints."""
        self._file, self._is_step, self._read, self.steps = file, is_step, 0, 0
        output = (directory / "printed").open("wb")
        self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        self._printed = directory / "printed"
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.peak_bytes: list[int] = []
        self._wait(WARM_STEPS)
        self._signal(signal.SIGSTOP)

    def turn(self, num_steps: int) -> None:
        pids = self._pids()
        for pid in pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        cpu, begin = sum(map(cpu_seconds, pids)), time.perf_counter()
        self._signal(signal.SIGCONT, pids)
        self._wait(self.steps + num_steps)
        seconds = time.perf_counter() - begin
        self._signal(signal.SIGSTOP, pids)
        self.seconds.append(seconds / num_steps)
        self.cpu_seconds.append((sum(map(cpu_seconds, pids)) - cpu) / num_steps)
        self.peak_bytes.append(max(map(peak_resident_bytes, pids)))

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _pids(self) -> list[int]:
        """Returns the process and its descendants: `spillway run` starts the trainer as a child."""
        parents = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
        found = [self._process.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found

    def _signal(self, number: int, pids: Sequence[int] = ()) -> None:
        """Sends a signal to `pids`, or to all of the contestant's processes. Finding them takes a while, in which a
        running contestant would train outside its turn; so callers that have them pass `pids`."""
        for pid in pids or self._pids():
            with suppress(ProcessLookupError):  # a short-lived child has ended
                os.kill(pid, number)

    def _wait(self, steps: int) -> None:
        """Waits until the file has `steps` lines of steps. Exits if the process ended or hangs."""
        until = time.monotonic() + PATIENCE_SECONDS
        while self.steps < steps:
            if self._process.poll() is not None or time.monotonic() > until:
                self.close()
                sys.exit(f"a contestant ended or hangs after {self.steps} steps:\n{self._printed.read_text()[-2000:]}")
            time.sleep(0.001)
            if self._file.exists() and self._file.stat().st_size > self._read:
                with self._file.open("rb") as file:
                    file.seek(self._read)
                    news = file.read()
                whole = news[: news.rfind(b"\n") + 1]
                self._read += len(whole)
                self.steps += sum(self._is_step in line for line in whole.splitlines(keepends=True))


@dataclass(frozen=True, slots=True)
class Ring:
    """Makes contestants in `directory`. `corpora` has the corpus of each family, which its jobs share."""

    directory: Path
    corpora: dict[str, Path]

    def ours(self, cell: Cell, name: str, memory: Mapping[str, Any], model: Mapping[str, Any]) -> Contestant:
        """Makes a contestant of `spillway run`. A first run of one step is restricted to `cell.threads` cores; the
        contestant resumes it, and a resumed run keeps the number of threads."""
        output = self.directory / f"{cell.name} {name}".replace(" ", "-")
        document = job(model, cell.tokens, memory)
        manifest = output.with_suffix(".yaml")
        if cell.family in self.corpora:
            shutil.copytree(self.corpora[cell.family], output / "corpus")
        manifest.write_text(yaml.safe_dump(document))
        command = [*SPILLWAY, "run", str(manifest), "--output", str(output)]
        cores = sorted(os.sched_getaffinity(0))[: cell.threads]
        first = subprocess.run(
            ["taskset", "-c", ",".join(map(str, cores)), *command], capture_output=True, text=True, check=False
        )
        if first.returncode != 0:
            sys.exit(f"{' '.join(command)}:\n{first.stdout[-2000:]}{first.stderr[-2000:]}")
        self.corpora.setdefault(cell.family, output / "corpus")
        document["spec"]["training"]["steps"] = 1000000
        manifest.write_text(yaml.safe_dump(document))
        return Contestant(command, output / "run.jsonl", output, b'"step_seconds"')

    def rival(self, cell: Cell, name: str, model: Mapping[str, Any], **given: Any) -> Contestant:
        directory = self.directory / f"{cell.name} {name}".replace(" ", "-")
        directory.mkdir()
        given = {
            "model": dict(model), "tokens": cell.tokens, "threads": cell.threads, "dtype": "float32",
            "checkpointing": False, "pool": True, "file": str(directory / "steps"), **given,
        }  # fmt: skip
        return Contestant([sys.executable, str(LOOPS), json.dumps(given)], directory / "steps", directory, b"\n")

    def half_of_activations(self, cell: Cell) -> str:
        """Returns the device budget that leaves room for half of the activations' peak."""
        manifest = self.directory / "planned.yaml"
        manifest.write_text(yaml.safe_dump(job(cell.model, cell.tokens, {"mode": "Disabled", "budget": ROOM})))
        command = [*SPILLWAY, "plan", str(manifest), "--node", "cpu", "-o", "json"]
        planned = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        device = planned["bytes"]["device"]
        return str(sum(device.values()) - device["activations"] // 2)


RESIDENT = {"optimizer": {"placement": "Device"}}
OFFLOADED = {"optimizer": {"placement": "Host"}, "activations": {"policy": "Keep"}}
RATIOS = {
    "plain_vs_torch": ("plain", "torch"),
    "plain_vs_default": ("plain", "torch default"),
    "plain_vs_trainer": ("plain", "trainer default"),
    "spill_step_ratio": ("half", "plain"),
    "spill_vs_checkpoint": ("half", "checkpointed"),
    "offload_step_ratio": ("offloaded", "plain"),
}


def contestants(ring: Ring, cell: Cell, half_bytes: str) -> dict[str, Callable[[Mapping[str, Any]], Contestant]]:
    half = {**ROOM, "device": half_bytes, "host": "8Mi"}  # on a CPU, host memory is the device's memory, too
    # The job seems to last for weeks, so the limit of drive writes would keep its activations off the drive.
    spilling = {"budget": half, "advanced": RESIDENT, "endurance": {"driveWritesPerDay": "1000"}}
    return {
        "plain": lambda model: ring.ours(cell, "plain", {"mode": "Disabled", "budget": ROOM}, model),
        "half": lambda model: ring.ours(cell, "half", spilling, model),
        "offloaded": lambda model: ring.ours(cell, "offloaded", {"budget": ROOM, "advanced": OFFLOADED}, model),
        "torch": lambda model: ring.rival(cell, "torch", model, loop="torch"),
        "torch default": lambda model: ring.rival(cell, "torch default", model, loop="torch", pool=False),
        "trainer default": lambda model: ring.rival(cell, "trainer default", model, loop="trainer", pool=False),
        "checkpointed": lambda model: ring.rival(cell, "checkpointed", model, loop="torch", checkpointing=True),
    }


def idle_bytes(ring: Ring, family: str) -> dict[str, int]:
    """Returns the peak of each contestant with a tiny model."""
    cell, found = Cell(family, 64, 1), dict[str, int]()
    for name, make in contestants(ring, cell, "8Gi").items():
        if name not in IDLE:
            running = make({**cell.model, **NO_SIZE})
            running.turn(2)
            running.close()
            found[name] = running.peak_bytes[0]
    return found | {name: found[same] for name, same in IDLE.items()}


def in_turns(
    opened: ExitStack, makes: Mapping[str, Callable[[], Contestant]], at_once: int, rounds: int, num_steps: int
) -> dict[str, Contestant]:
    """Makes the contestants, `at_once` at a time, runs `rounds` rounds of turns of `num_steps` steps, and returns them.
    Each round begins with another contestant. `opened` closes them."""
    starting = opened.enter_context(ThreadPoolExecutor(at_once))
    starts = {name: starting.submit(make) for name, make in makes.items()}
    for start in starts.values():
        opened.callback(lambda start=start: start.result().close())
    running = {name: start.result() for name, start in starts.items()}
    names = list(running)
    for number in range(rounds):
        for position in range(len(names)):
            running[names[(position + number) % len(names)]].turn(num_steps)
    return running


def measure_cell(ring: Ring, cell: Cell, rounds: int, idle: Mapping[str, int]) -> dict[str, Ratio]:
    made = contestants(ring, cell, ring.half_of_activations(cell))
    with ExitStack() as opened:
        makes = {name: partial(make, cell.model) for name, make in made.items()}
        running = in_turns(opened, makes, 2, rounds, cell.num_steps)
    print(f"\n{cell.name}\n{'':20}{'s/step':>9}{'CPU s':>9}{'tokens/s':>10}{'peak MiB':>10}")
    for name, one in running.items():
        seconds, cpu = median(one.seconds), median(one.cpu_seconds)
        peak = median(one.peak_bytes) - idle[name]
        print(f"{name:20}{seconds:9.3f}{cpu:9.3f}{cell.tokens / seconds:10.0f}{peak / MIB:10.0f}", flush=True)
    ratios = {
        name: paired_ratio(running[rival].seconds, running[ours].seconds) for name, (ours, rival) in RATIOS.items()
    }
    for name, ratio in ratios.items():
        print(f"  {name:20}{ratio}", flush=True)
    return ratios


def measure(quick: bool) -> dict[str, float]:
    chosen = os.environ.get("END_TO_END_CELLS", "").split(",")
    cells = [cell for cell in (QUICK if quick else CELLS) if any(part in cell.name for part in chosen)]
    found: dict[str, dict[str, Ratio]] = {}
    idle: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory(dir=".") as directory:
        ring = Ring(Path(directory).resolve(), {})
        for cell in cells:
            if cell.family not in idle:
                idle[cell.family] = idle_bytes(ring, cell.family)
            found[cell.name] = measure_cell(ring, cell, QUICK_ROUNDS if quick else ROUNDS, idle[cell.family])
    figures = {name: median(ratios[name].median for ratios in found.values()) for name in RATIOS}
    figures["plain_worst_low"] = max(ratios["plain_vs_torch"].low for ratios in found.values())
    for threads in (1, 2):
        of = [ratios["spill_step_ratio"].median for name, ratios in found.items() if f"{threads} threads" in name]
        if of:
            figures[f"spill_step_ratio_{threads}"] = median(of)
    return figures


GOALS = {
    "plain_vs_torch": 1.02, "plain_vs_default": 1.02, "plain_vs_trainer": 1.02, "plain_worst_low": 1.05,
    "spill_step_ratio_1": 1.05, "spill_step_ratio_2": 1.12, "spill_vs_checkpoint": 0.95, "offload_step_ratio": 1.10,
}  # fmt: skip


if __name__ == "__main__":
    assert __doc__ is not None
    paired.main("end_to_end", __doc__, measure, at_most=GOALS, not_quick=["spill_step_ratio_2"])
