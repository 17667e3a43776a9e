"""Cells of a session on a machine with a GPU: a line after each, whatever becomes of it, and the next call goes on."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zipfile
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gpu_cells
from gpu_cells import Cell
from harness.patience import wait_until

HANG = "signal.pause()"
DEVICE = {"device": "a GPU", "missing": {"tokenizers": "No module named 'tokenizers'"}}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Time passes for cells that hang, as much as they are given, once they have said something."""
    now = [0.0]

    class Process(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, stdout: Any, **more: Any) -> None:
            super().__init__(*arguments, stdout=stdout, **more)
            self.log = Path(stdout.name)

        def wait(self, timeout: float | None = None) -> int:
            assert isinstance(self.args, list)
            if timeout is None or HANG not in self.args[-1]:
                return super().wait()
            wait_until(lambda: gpu_cells.SAID in self.log.read_text())
            now[0] += timeout
            raise subprocess.TimeoutExpired(self.args, timeout)

    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(gpu_cells, "MACHINE", saying("machine", **DEVICE))
    shim = SimpleNamespace(Popen=Process, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(gpu_cells, "subprocess", shim)
    monkeypatch.setattr(gpu_cells, "time", SimpleNamespace(monotonic=lambda: now[0], strftime=time.strftime))


def cell(name: str, code: str, **more: Any) -> Cell:
    return Cell(
        name, ("-c", f"import json, os, signal, sys; sys.path.append({gpu_cells.__file__!r}[:-13]); {code}"), **more
    )


def saying(name: str, **figures: Any) -> Cell:
    return cell(name, f"from gpu_cells import say; say(**{figures!r})")


def run(output: Path, *cells: Cell, minutes: float = 10.0, only: tuple[str, ...] = ()) -> int:
    return gpu_cells.run(cells, Namespace(output=output, minutes=minutes, only=only))


def lines(output: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]
    return [line for line in found if line["cell"] != "machine"]


def test_a_line_follows_every_cell_whatever_becomes_of_it(tmp_path: Path) -> None:
    hangs = cell("hangs", f"from gpu_cells import say; say(half=1); {HANG}")
    fails = cell("fails", "print('the cable'); sys.exit(3)")
    lacks = saying("lacks", x=1)
    lacks = Cell(lacks.name, lacks.command, ("tokenizers",))
    assert run(tmp_path, hangs, fails, lacks, saying("works", rate=2.0, equal=True)) == 3
    found = {line["cell"]: line for line in lines(tmp_path)}
    assert (found["hangs"]["why"], found["hangs"]["figures"]) == ("not done after 60 s", {"half": 1})
    assert (found["fails"]["why"], found["fails"]["tail"]) == ("ended with 3", ["the cable"])
    assert "cannot be imported: tokenizers (No module named 'tokenizers'); bring wheels" in found["lacks"]["missing"]
    assert found["works"]["figures"] == {"rate": 2.0, "equal": True}


def test_the_next_call_goes_on_and_comes_to_failed_cells_last(tmp_path: Path) -> None:
    assert run(tmp_path, cell("first", "sys.exit(1)"), saying("second")) == 1
    assert run(tmp_path, saying("first"), saying("second"), saying("third")) == 0
    assert [line["cell"] for line in lines(tmp_path)] == ["first", "second", "third", "first"]
    assert run(tmp_path, saying("first"), saying("second"), saying("third")) == 0
    assert len(lines(tmp_path)) == 4


def test_a_line_that_a_kill_cut_off_is_none(tmp_path: Path) -> None:
    run(tmp_path, saying("first"), saying("second"))
    text = (tmp_path / "results.jsonl").read_text()
    (tmp_path / "results.jsonl").write_text(text[:-5])
    assert run(tmp_path, saying("first"), saying("second")) == 0
    assert [line["cell"] for line in lines(tmp_path)] == ["first", "second"]


def test_the_end_of_the_session_cuts_a_cell_and_lets_none_begin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, cell("long", f"from gpu_cells import say; say(); {HANG}"), saying("late"), minutes=0.5) == 2
    (line,) = lines(tmp_path)
    assert (line["cell"], line["why"]) == ("long", "not done after 30 s")
    assert "late: not begun, the time is over" in capsys.readouterr().out


def test_what_a_cell_started_ends_with_it(tmp_path: Path) -> None:
    run(tmp_path, cell("parent", f"child = os.fork() or {HANG}; from gpu_cells import say; say(child=child); {HANG}"))
    (line,) = lines(tmp_path)
    status = Path(f"/proc/{line['figures']['child']}/status")
    wait_until(lambda: not status.exists() or "State:\tZ" in status.read_text())  # SIGKILL is sent, not yet acted on


def test_only_cells_with_a_text_in_their_names_are_run(tmp_path: Path) -> None:
    run(tmp_path, saying("parity llama"), saying("parity bert"), saying("rates"), only=("bert", "rat"))
    assert [line["cell"] for line in lines(tmp_path)] == ["parity bert", "rates"]


def test_without_a_device_the_session_says_so_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_cells, "MACHINE", cell("machine", "sys.exit('no driver')"))
    with pytest.raises(SystemExit, match="no CUDA device that torch could use: ended with 1: no driver"):
        run(tmp_path, saying("rates"))


def test_carried_wheels_are_found_before_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    with zipfile.ZipFile(tmp_path / "carried-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried/__init__.py", "WHERE = __file__")
    gpu_cells.begin(tmp_path / "out", tmp_path)
    code = "import carried, gpu_cells, spillway.plan; print(carried.WHERE)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.startswith(str(tmp_path / "out" / "packages"))
    assert not [*(tmp_path / "out" / "packages" / "spillway_trainer").glob("*.so")]


def test_a_fake_device_has_no_rates(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for is_fake, shown in ((True, gpu_cells.NOT_MEASURED), (False, 5e9)):
        monkeypatch.setattr(gpu_cells, "is_fake", lambda is_fake=is_fake: is_fake)
        gpu_cells.measured(h2d=5e9)
        assert json.loads(capsys.readouterr().out.removeprefix(gpu_cells.SAID)) == {"h2d": shown}
