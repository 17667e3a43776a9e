"""`spillway plan`: what it prints, its exit codes, and that it is light."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cases.job_documents import EXAMPLE_JOBS, LLAMA_70B, text
from harness.depth import some
from spillway.plan import Infeasible, MemoryPlan
from spillway.planning.explain import TOO_MANY_WRITES
from spillway.units import MIB, format_bytes
from spillway_cli.__main__ import run_app
from spillway_cli.plan_command import show


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(text(), encoding="utf-8")
    return path


def run(file: Path, node: str = "cpu", **options: str) -> int:
    """`spillway plan` as from a shell."""
    flags = [word for name, value in options.items() for word in (f"--{name}", value)]
    return run_app(["plan", str(file), "--node", node, *flags])


def test_exit_0_when_it_fits_on_the_device(manifest: Path) -> None:
    assert run(manifest) == 0


def test_exit_3_when_it_fits_with_spilling(manifest: Path) -> None:
    assert run(manifest, device="100Mi") == 3


def test_exit_4_when_it_does_not_fit(manifest: Path) -> None:
    assert run(manifest, device="20Mi") == 4


def test_the_table_holds_parts_budget_and_headroom(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(manifest, device="100Mi")
    printed = capsys.readouterr().out
    for words in (
        "parameters",
        "optimizer states",
        "workspace",
        "total",
        "100 MiB",
        "headroom",
        "bound by",
        "NVMe writes",
    ):
        assert words in printed


def test_the_processes_around_the_plan_are_shown(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(manifest, device="100Mi", format="json")
    made = MemoryPlan.model_validate_json(capsys.readouterr().out)
    run(manifest, device="100Mi")
    printed = capsys.readouterr().out
    assert made.process_bytes > 512 * MIB
    assert f"the machine needs {format_bytes(made.machine_bytes)} of memory: " in printed
    assert f" {format_bytes(made.process_bytes)} for the processes" in " ".join(printed.split())


def test_a_gpu_plan_shows_what_its_allocator_takes(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(manifest, "1xh100")
    assert re.search(r"^allocator +[0-9]+ MiB +-", capsys.readouterr().out, re.MULTILINE)
    run(manifest)
    assert "allocator" not in capsys.readouterr().out


def test_what_does_not_fit_comes_with_figures_and_the_nearest_that_fits(
    manifest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(manifest, device="20Mi")
    printed = capsys.readouterr().out
    assert "missing" in printed
    assert "fits with: spec.memory.budget.device: " in printed


def test_a_plan_that_only_writes_too_much_is_said_so() -> None:
    console = Console(width=200, record=True)
    show(console, Infeasible(job="a", node="b", missing_bytes={}, budget={}, nearest="more"), "")
    (line,) = console.export_text().split("\n\nfits with: more\n")[0].splitlines()
    assert line == f"a does not fit on b. Reason: {TOO_MANY_WRITES}."


def test_text_without_a_terminal_is_plain(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(manifest, device="100Mi")
    assert "\x1b" not in capsys.readouterr().out


def test_no_line_ends_in_spaces(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(manifest, "cpu")
    assert not [line for line in capsys.readouterr().out.splitlines() if line != line.rstrip()]


def test_json_is_the_plan_itself(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(manifest, device="100Mi", format="json")
    assert MemoryPlan.model_validate_json(capsys.readouterr().out).job == "tiny"


def test_json_of_what_does_not_fit(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(manifest, device="20Mi", format="json")
    assert Infeasible.model_validate_json(capsys.readouterr().out).missing_bytes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "24GB"}, "--device: '24GB' is not a valid quantity"),
        ({"host": "64m"}, "--host: '64m': m is a fraction of a byte"),
        ({"node": "h10"}, "did you mean h100"),
    ],
)
def test_a_wrong_flag_is_exit_64_with_a_sentence(
    manifest: Path, capsys: pytest.CaptureFixture[str], options: dict[str, Any], words: str
) -> None:
    assert run(manifest, **options) == 64
    assert words in capsys.readouterr().err


def test_plan_for_a_node_tells_what_a_local_run_alone_can_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the other way round: what runs on a cluster's GPUs is planned for them without a word."""
    file = tmp_path / "job.yaml"
    file.write_text(text({"spec.scheduling": {"gang": "Required"}, "spec.parallelism.nodes": 2}), encoding="utf-8")
    assert run(file, "8xh100") in (0, 3)
    said = capsys.readouterr().err
    assert "planned, but a cluster would reject it: spec.scheduling.gang = Required" in said
    file.write_text(text({"spec.parallelism.device": "Cuda"}), encoding="utf-8")
    assert run(file, "h100") in (0, 3)
    assert "a cluster would reject" not in capsys.readouterr().err


def test_a_wrong_manifest_is_exit_64_with_every_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text({"kind": "Job", "spec.training.steps": 0}), encoding="utf-8")
    assert run(path) == 64
    printed = capsys.readouterr().err
    assert "kind = 'Job': must be TrainingJob" in printed
    assert "spec.training.steps = 0: at least 1" in printed


def test_a_missing_file_is_exit_64(tmp_path: Path) -> None:
    assert run(tmp_path / "none.yaml") == 64


@pytest.mark.parametrize("example", some(EXAMPLE_JOBS, 4), ids=lambda path: path.name)
def test_every_example_fits_where_its_comment_says(example: Path) -> None:
    node = {"llama-70b": "8xh100", "gpu": "4xa100-40"}.get(example.stem, "cpu")
    assert run(example, node) in (0, 3)


def test_a_70b_plan_needs_no_torch(tmp_path: Path) -> None:
    """In a fresh interpreter, so that no other test's imports count."""
    path = tmp_path / "job.yaml"
    path.write_text(text(LLAMA_70B), encoding="utf-8")
    program = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from spillway_cli.plan_command import BudgetOverrides, plan\n"
        "code = plan(Path(sys.argv[1]), '8xh100', BudgetOverrides(), None, 'json')\n"
        "heavy = sorted({'torch', 'numpy', 'ctypes', 'asyncio'} & set(sys.modules))\n"
        "print(json.dumps([code, heavy]), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    code, heavy = json.loads(done.stderr)
    assert code == 3
    assert {"torch", "numpy"} & set(heavy) == set()
