"""Runs measurements on a machine with a GPU as cells: each has a process, a time limit and a line in the results.

A script of cells calls `begin` before it imports anything that the machine may lack, then `run` with its cells. Common
options:

    --output DIR    results.jsonl gets one line per cell, logs/ what each cell printed. The same command continues:
                    first with the cells that have no line, then with those that failed or could not begin
    --wheels DIR    wheels of packages that this Python lacks; they are unpacked into the output, nothing is installed
    --minutes N     the run ends after N minutes, even in the middle of a cell (default 9)
    --only TEXT     only cells whose names contain TEXT; may be repeated

On a fake device (tests/fakes/cuda) operators compute real numbers, but no result has a rate or seconds.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FAKE = "Fake CUDA device"
NOT_MEASURED = "not measured: the device is a fake"
CELL_SECONDS = 60.0
"""limit of a cell that names no other, including the start of its process"""
LEAST_PACKAGES = ("torch", "triton", "pydantic")
PACKAGES = (*LEAST_PACKAGES, "yaml", "numpy", "safetensors", "tokenizers", "xxhash", "prometheus_client")
"""packages that whole attempts need"""
FAKE_PATIENCE = 10
"""the factor on all limits for a fake device, which is as slow as the CPU that it runs on"""
FURTHER_PACKAGES = ("typer", "rich", "pynvml", "transformers", "peft", "pytest")
"""packages that are only looked for, not imported, because importing them takes long"""
TAIL_LINES = 15
SAID = "figures: "

Figures = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Cell:
    name: str
    command: tuple[str, ...]
    """arguments of Python"""
    needs: tuple[str, ...] = ()
    """modules that must be importable"""
    seconds: float = CELL_SECONDS


MACHINE = Cell("machine", (__file__,))
"""always runs first: it finds the device and which modules are missing"""


def parser(doc: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--output", type=Path, required=True, metavar="DIR")
    made.add_argument("--wheels", type=Path, metavar="DIR", help="wheels of what this Python lacks")
    made.add_argument("--minutes", type=float, default=9.0, help="the whole ends then (default 9)")
    made.add_argument("--only", action="append", default=[], metavar="TEXT", help="cells with this in their names")
    made.add_argument("--cell", help=argparse.SUPPRESS)
    return made


def do(work: Mapping[str, Callable[[Path], None]], doc: str | None) -> None:
    """Runs the work that --cell names, in the process of that cell."""
    given = parser(doc).parse_args()
    work[given.cell](given.output)


def begin(output: Path, wheels: Path | None) -> None:
    """Puts on the path of the cells' processes what they import: the wheels, the project, and a copy of the trainer, so
    that the native library can lie beside it without a change of the checkout."""
    packages = output.absolute() / "packages"
    for wheel in sorted(wheels.glob("*.whl")) if wheels else ():
        with zipfile.ZipFile(wheel) as opened:
            opened.extractall(packages)
    trainer = ROOT / "trainer_image" / "spillway_trainer"
    without = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(trainer, packages / trainer.name, ignore=without, dirs_exist_ok=True)
    (output / "logs").mkdir(parents=True, exist_ok=True)
    folders = [packages, *(ROOT / name for name in ("operator", "benchmarks", "hack", "tests"))]
    os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def run(cells: Sequence[Cell], given: argparse.Namespace) -> int:
    """Runs all cells that are not done yet. Returns how many are not done at the end."""
    end = time.monotonic() + given.minutes * 60
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # and kills the running cell
    results = Results(given.output)
    found = results.add(MACHINE, in_own_process(MACHINE, given.output, MACHINE.seconds))
    if "device" not in found:
        line = results.lines[MACHINE.name]
        sys.exit(f"no CUDA device that torch could use: {line.get('why')}: {' '.join(line.get('tail', [])[-1:])}")
    missing, patience = found["missing"], FAKE_PATIENCE if found["device"] == FAKE else 1
    wanted = [cell for cell in cells if not given.only or any(text in cell.name for text in given.only)]
    wanted = [cell for cell in wanted if not results.is_done(cell.name)]
    for cell in sorted(wanted, key=lambda cell: cell.name in results.lines):
        lacking = [f"{name} ({missing[name]})" for name in cell.needs if name in missing]
        left = end - time.monotonic()
        if lacking:
            results.add(cell, {"missing": f"cannot be imported: {', '.join(lacking)}; bring wheels (--wheels)"})
        elif left <= 0:
            print(f"{cell.name}: not begun, the time is over", flush=True)
        else:
            results.add(cell, in_own_process(cell, given.output, min(patience * cell.seconds, left)))
    not_done = [cell.name for cell in wanted if not results.is_done(cell.name)]
    print(f"{len(wanted) - len(not_done)} cells done; not done: {', '.join(not_done) or 'none'}", flush=True)
    return len(not_done)


class Results:
    """The last line of each cell."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self._path = output / "results.jsonl"
        text = self._path.read_text() if self._path.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # drops a last line that a kill cut off
        if whole != text:
            self._path.write_text(whole)
        self.lines: dict[str, dict[str, Any]] = {line["cell"]: line for line in map(json.loads, whole.splitlines())}

    def is_done(self, name: str) -> bool:
        return not {"why", "missing"} & self.lines.get(name, {"missing": ""}).keys()

    def figures(self, name: str) -> dict[str, Any]:
        """Returns the figures of cell `name`; an empty dict if it has none."""
        return dict(self.lines.get(name, {}).get("figures", {}))

    def add(self, cell: Cell, found: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the line of `cell`. Returns its figures, or all of `found` if it has no figures."""
        self.lines[cell.name] = line = {"cell": cell.name, "at": time.strftime("%H:%M:%S"), **found}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
        return dict(found.get("figures", found))


def in_own_process(cell: Cell, output: Path, limit_seconds: float) -> dict[str, Any]:
    """Runs `cell`. Returns its figures, its seconds, and the reason if it failed."""
    log = output / "logs" / f"{re.sub('[^A-Za-z0-9]+', '-', cell.name)}.log"
    begin = time.monotonic()
    with log.open("w") as opened:
        process = subprocess.Popen(
            [sys.executable, *cell.command], cwd=ROOT, stdout=opened, stderr=opened, process_group=0
        )
        try:
            ended = f"ended with {process.wait(limit_seconds)}"
        except subprocess.TimeoutExpired:
            ended = f"not done after {limit_seconds:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    lines = log.read_text(errors="replace").splitlines()
    figures: dict[str, Any] = {}
    for line in lines:
        if line.startswith(SAID):
            figures |= json.loads(line.removeprefix(SAID))
    found: dict[str, Any] = {"seconds": round(time.monotonic() - begin, 1)}
    if figures:
        found["figures"] = figures
    if process.returncode != 0:
        found |= {"why": ended, "tail": [line for line in lines if not line.startswith(SAID)][-TAIL_LINES:]}
    return found


# --- in a cell's process ----------------------------------------------------------------------------------------------


def say(**facts: Any) -> None:
    """Prints facts for the results. They are kept even if the process fails later."""
    print(SAID + json.dumps(facts), flush=True)


def measured(**figures: float) -> None:
    """Like `say`, for rates and seconds; a fake device has none, and a note takes their place."""
    say(**(dict.fromkeys(figures, NOT_MEASURED) if is_fake() else figures))


def device() -> Any:
    """Returns the device. On a fake one, first installs operators that compute real numbers."""
    importlib.import_module("spillway_trainer.environment")
    if is_fake():
        importlib.import_module("fakes.cuda_kernels").install()
    return importlib.import_module("torch").device("cuda", 0)


@cache
def is_fake() -> bool:
    return bool(importlib.import_module("torch").cuda.get_device_name(0) == FAKE)


def machine() -> None:
    """Reports device, tools and versions of this machine, and which packages are missing."""
    missing, versions = {}, {}
    for name in FURTHER_PACKAGES:
        if importlib.util.find_spec(name) is None:
            missing[name] = "not found"
    for name in PACKAGES:
        try:
            versions[name] = str(getattr(importlib.import_module(name), "__version__", "there"))
        except Exception as error:
            missing[name] = f"{type(error).__name__}: {error}"
    tools = {tool: shutil.which(tool) is not None for tool in ("cmake", "c++", "nvcc", "compute-sanitizer")}
    say(python=platform.python_version(), versions=versions, missing=missing, tools=tools)
    torch = importlib.import_module("torch")
    properties = torch.cuda.get_device_properties(0)
    say(device=properties.name, memory_bytes=properties.total_memory, cuda=torch.version.cuda, cores=os.cpu_count())


if __name__ == "__main__":
    machine()
