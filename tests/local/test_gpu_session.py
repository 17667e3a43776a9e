"""hack/gpu_session.py from end to end on a fake CUDA device: it runs unattended, and invents no figures."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gpu_session
from cases import device_attempts
from gpu_cells import NOT_MEASURED, PACKAGES, Results
from gpu_optimizer_offload import REHEARSAL
from harness import fake_cuda
from harness.native_builds import CACHE
from harness.places import ROOT

UV, PIP = ROOT / ".tools" / "bin" / "uv", ROOT / ".tools" / "bin" / "pip"
TORCH = "torch==2.11.0"
CARRIED = ("pydantic", "pydantic_core", "annotated_types", "typing_inspection")
THERE = (
    *("numpy", "pyyaml", "safetensors", "tokenizers", "xxhash", "prometheus-client"),
    *("transformers", "peft", "typer", "rich", "nvidia-ml-py", "pytest"),
)
"""packages that a machine with a GPU usually has in addition to torch"""
RATES = ("rates", "update rates bfloat16", "update rates float32", "cpu rates", "disk rates")


def session(output: Path, *options: str, python: str = sys.executable, packages: Path | None = None) -> int:
    """Runs the script; returns its exit code. Its output becomes the test's output."""
    preloading = fake_cuda.preloading(fake_cuda.library(packages))
    environment = {**fake_cuda.environment(), **preloading, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    command = [python, str(ROOT / "hack" / "gpu_session.py"), "--output", str(output), "--minutes", "240", *options]
    return subprocess.run(command, env=environment, check=False).returncode


def not_done(output: Path) -> dict[str, Any]:
    results = Results(output)
    return {name: line for name, line in results.lines.items() if not results.is_done(name)}


def assert_rehearsed(output: Path) -> None:
    """Asserts that every cell is done, that all comparisons are equal, and that nothing is measured."""
    results = Results(output)
    assert not_done(output) == {}
    assert results.lines.keys() == {"machine", *(cell.name for cell in gpu_session.cells(output))}
    assert {*device_attempts.MODELS} < {*gpu_session.MODELS, *gpu_session.OTHER_MODELS}
    for model in (*gpu_session.MODELS, *gpu_session.OTHER_MODELS):
        assert results.figures(f"parity {model}") == dict.fromkeys(device_attempts.TECHNIQUES, "equal")
    assert results.figures("killed and resumed")["resumed"] == "equal"
    assert results.figures("spillway run")["device"] == "Cuda"
    assert results.figures("bits") == {"equal": True}
    assert NOT_MEASURED in results.figures("rates").values()
    for name in RATES:
        assert not [value for value in results.figures(name).values() if isinstance(value, float)], name
    assert results.figures("S 4 ours, CPU alone")["step_seconds"] == NOT_MEASURED
    assert (output / "table.txt").read_text().startswith(REHEARSAL)
    assert len([*(output / "traces").glob("*.json.gz")]) == len(
        [name for name in results.lines if name.startswith("S ")]
    )


@pytest.mark.ci
def test_a_short_session_runs_on_a_fake_device_and_goes_on(tmp_path: Path) -> None:
    assert session(tmp_path, "--only", "device check float32") == 0
    assert session(tmp_path, "--only", "device check float32", "--only", "S 4 ours, CPU alone") == 0
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [line["cell"] for line in lines] == ["machine", "device check float32", "machine", "S 4 ours, CPU alone"]
    checked, step = lines[1]["figures"], lines[3]["figures"]
    assert checked["AdamW"] == checked["Lion"] == "equal"
    assert step["step_seconds"] == NOT_MEASURED
    assert step["optimizer"]["cpu_share"] == 1.0
    assert step["reserved_bytes"] >= step["allocated_bytes"] > 0


@pytest.mark.full
def test_a_whole_session_runs_on_a_fake_device(tmp_path: Path) -> None:
    assert session(tmp_path) == 0, not_done(tmp_path)
    assert_rehearsed(tmp_path)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., tuple[str, Path, Path]]]:
    """A function that makes a machine with torch 2.11, the named packages and nothing else; it returns (Python, its
    packages, wheels)."""
    CACHE.mkdir(parents=True, exist_ok=True)
    folders: list[Path] = []

    def fetched(*command: str | Path) -> None:
        ended = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
        if ended.returncode != 0:
            pytest.skip(f"{command[0]}: {ended.stderr.strip().splitlines()[-1]}")

    def made(*packages: str) -> tuple[str, Path, Path]:
        if not UV.exists():
            pytest.skip(f"{UV} is not there: make env")
        folder = tmp_path_factory.mktemp("machine")
        folders.append(folder)
        python = folder / "venv" / "bin" / "python"
        fetched(UV, "venv", "--quiet", "--python", sys.executable, folder / "venv")
        fetched(UV, "pip", "install", "--quiet", "--python", python, TORCH, *packages)
        versions = [f"{name}=={importlib.metadata.version(name)}" for name in CARRIED]
        fetched(PIP, "download", "--quiet", "--no-deps", "--dest", folder / "wheels", *versions)
        return str(python), next((folder / "venv").glob("lib/*/site-packages")), folder / "wheels"

    yield made
    for folder in folders:
        shutil.rmtree(folder)


@pytest.mark.full
def test_a_whole_session_runs_with_torch_2_11_and_four_wheels(
    tmp_path: Path, machine: Callable[..., tuple[str, Path, Path]]
) -> None:
    python, packages, wheels = machine(*THERE)
    assert session(tmp_path, "--wheels", str(wheels), python=python, packages=packages) == 0, not_done(tmp_path)
    assert_rehearsed(tmp_path)
    found = Results(tmp_path).figures("machine")["versions"]
    assert found["torch"].startswith("2.11.0")


@pytest.mark.full
def test_what_a_machine_lacks_is_said_and_the_rest_is_done(
    tmp_path: Path, machine: Callable[..., tuple[str, Path, Path]]
) -> None:
    python, packages, wheels = machine()
    assert session(tmp_path, "--wheels", str(wheels), python=python, packages=packages) == 1
    done = Results(tmp_path).lines.keys() - not_done(tmp_path).keys()
    needs_more = {cell.name for cell in gpu_session.cells(tmp_path) if {*PACKAGES[3:], "pytest"} & {*cell.needs}}
    assert not_done(tmp_path).keys() == needs_more
    assert {"native library", "device check int8", "rates", "bits", "cpu rates"} < done
    assert all("yaml" in line["missing"] or "pytest" in line["missing"] for line in not_done(tmp_path).values())
