"""benchmarks/gpu_optimizer_offload.py without a GPU: cells have processes of their own, resume, say what they are."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

import gpu_optimizer_offload as benchmark
from gpu_optimizer_offload import Cell, Setting
from spillway.plan import OptimizerPlan

pytestmark = pytest.mark.ci

SETTING = Setting("tiny", "cpu", steps=1, warm_ups=0)
RATES = {"cpu_update": 120e9, "h2d": 50e9, "d2h": 40e9, "both_ways": 80e9, "on_device": 3e12}


def test_rehearsal_runs_its_cells_resumes_and_says_it_measures_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [Cell("bare", 1), Cell("ours", 1, True), Cell("bitsandbytes paged 8 bit", 1)]
    benchmark.run_all(SETTING, tmp_path, 60.0, cells[:1])
    before = (tmp_path / "results.jsonl").read_text()
    benchmark.run_all(SETTING, tmp_path, 600.0, cells)
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert json.dumps(lines[0]) + "\n" == before, "a cell that is there is not run again"
    assert [line["cell"] for line in lines] == [cell.name for cell in cells]
    assert lines[1]["figures"]["tokens_per_second"] > 0, lines[1]
    assert lines[2]["why"] == "needs a CUDA device"
    text = (tmp_path / "table.txt").read_text()
    assert text.startswith(benchmark.REHEARSAL)
    assert "needs a CUDA device" in text
    assert text in capsys.readouterr().out


def test_a_cell_that_failed_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell("ours", 1)
    monkeypatch.setattr(benchmark, "in_own_process", lambda setting, cell: {"why": "failed: cable", "failed": True})
    benchmark.run_all(SETTING, tmp_path, 60.0, [cell])
    assert "failed: cable" in (tmp_path / "table.txt").read_text()
    figures = {"step_seconds": 2.0, "tokens_per_second": 16.0}
    monkeypatch.setattr(benchmark, "in_own_process", lambda setting, cell: {"figures": figures})
    benchmark.run_all(SETTING, tmp_path, 60.0, [cell])
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 1


def test_no_cell_begins_when_the_time_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark.run_all(SETTING, tmp_path, -1.0, [Cell("bare", 1)])
    assert "bare 1 free: not begun, the time is over" in capsys.readouterr().out


def test_every_system_is_measured_at_every_size_with_clipping_and_without() -> None:
    cells = benchmark.cells_of(Setting("S", "cuda", 10, 4))
    assert len(set(cells)) == len(cells) == 2 + 3 * (2 * len(benchmark.SYSTEMS) - 1)
    assert benchmark.num_parameters_of(benchmark.SIZES["S"]) == 1_364_297_728
    assert benchmark.num_parameters_of(benchmark.SIZES["M"]) < 2**32


@pytest.mark.parametrize(
    ("cpu", "streamed", "resident", "wanted"),
    [(1.0, 0.0, 0.0, 30 / 120e9), (0.0, 1.0, 0.0, 10.125 / 40e9), (0.0, 0.0, 1.0, 28 / 3e12)],
)
def test_the_bound_is_the_slowest_of_cpu_link_and_device(
    cpu: float, streamed: float, resident: float, wanted: float
) -> None:
    plan = OptimizerPlan(cpu_share=cpu, streamed_share=streamed, resident_share=resident)
    assert benchmark.bound_seconds(10**9, plan, RATES) == pytest.approx(wanted * 10**9)


def test_the_rehearsals_bits_are_those_of_the_reference() -> None:
    assert benchmark.same_bits(SETTING)


def test_exposed_is_what_a_step_takes_beyond_forward_and_backward() -> None:
    def line(cell: Cell, seconds: float) -> dict[str, object]:
        figures = {"step_seconds": seconds, "tokens_per_second": 1.0}
        return {"cell": cell.name, "of": asdict(cell), "figures": figures}

    text = benchmark.table([line(Cell("bare", 2), 0.5), line(Cell("no offload", 2, True), 0.75)], SETTING)
    row = next(row for row in text.splitlines() if row.startswith("no offload"))
    assert row.split()[2:6] == ["64", "yes", "0.7500", "0.2500"]
