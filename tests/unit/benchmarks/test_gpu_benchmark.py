"""benchmarks/gpu_optimizer_offload.py without a GPU: its cells, its plans at measured rates, its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gpu_optimizer_offload as benchmark
import gpu_systems
from gpu_cells import NOT_MEASURED, Results
from gpu_optimizer_offload import Cell
from spillway.plan import OptimizerPlan, Tier
from spillway.units import GIB
from spillway_trainer.tiers import cuda

pytestmark = pytest.mark.ci

RATES = {"h2d": 50e9, "d2h": 40e9, "both_ways": 72e9, "on_device": 3e12, "bfloat16_flops": 7e14}
CPU_RATES = {
    "usable_cores": 16,
    "update_bytes_per_second_8_threads": 9e10,
    "update_bytes_per_second_16_threads": 1.2e11,
}
DISK_RATES = {"disk_read": 5e9, "disk_write": 3e9}


def results(output: Path, **figures: dict[str, Any]) -> Results:
    lines = [{"cell": name.replace("_", " "), "figures": found} for name, found in figures.items()]
    (output / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Results(output)


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_systems.gpu_cells, "device", lambda: None)
    monkeypatch.setattr(gpu_systems, "is_fake", lambda: False)
    monkeypatch.setattr(gpu_systems, "usable_cores", lambda _: 16)
    monkeypatch.setattr(gpu_systems, "free_memory_bytes", lambda _: 100 * GIB)
    monkeypatch.setattr(cuda, "device_name", lambda _: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(cuda, "memory_bytes", lambda _: 79 * GIB)


def test_every_system_is_measured_at_every_size_with_clipping_and_without() -> None:
    cells = [cell for cell in benchmark.cells_of("S") if isinstance(cell, Cell)]
    assert (
        len({cell.name for cell in cells})
        == len(cells)
        == 3 * sum(len(one.clips) for one in benchmark.SYSTEMS.values())
    )
    assert {one.name for one in benchmark.first_cells()} <= {cell.name for cell in cells}
    assert gpu_systems.MAKE.keys() == benchmark.SYSTEMS.keys()
    assert gpu_systems.num_parameters_of(gpu_systems.SIZES["S"]) == 1_364_297_728
    assert gpu_systems.num_parameters_of(gpu_systems.SIZES["M"]) < 2**32


@pytest.mark.usefixtures("h100")
def test_plans_are_for_this_machine_and_its_measured_rates(tmp_path: Path) -> None:
    overhead = {"operationOverheadSeconds": 2e-5}
    known = results(tmp_path, rates=RATES, cpu_rates=CPU_RATES, disk_rates=DISK_RATES, spillway_calibrate=overhead)
    node = gpu_systems.node_of(known)
    assert node.operation_overhead_seconds == 2e-5
    assert (node.num_cores, node.host_bytes, node.is_calibrated) == (16, 96 * GIB, True)
    assert (node.link.h2d_bytes_per_second, node.link.d2h_bytes_per_second) == (50e9, 40e9)
    assert node.link.duplex_efficiency == 0.8
    assert (node.cpu_bytes_per_second, node.device_bytes_per_second) == (1.2e11, 3e12)
    assert (node.nvme_read_bytes_per_second, node.nvme_write_bytes_per_second) == (5e9, 3e9)
    assert node.bfloat16_flops_per_second == 7e14


@pytest.mark.usefixtures("h100")
@pytest.mark.parametrize("missing", ["rates", "cpu_rates", "disk_rates"])
def test_plans_are_by_the_catalog_until_all_rates_are_measured(tmp_path: Path, missing: str) -> None:
    known = {"rates": RATES, "cpu_rates": CPU_RATES, "disk_rates": DISK_RATES}
    known[missing] = dict.fromkeys(known[missing], NOT_MEASURED)
    node = gpu_systems.node_of(results(tmp_path, **known))
    assert (node.name, node.is_calibrated) == ("1x-h100-80", False)
    assert node.num_cores == 16


@pytest.mark.usefixtures("h100")
@pytest.mark.parametrize("system", gpu_systems.OURS)
def test_every_plan_of_ours_fits_an_h100_and_is_what_its_name_says(tmp_path: Path, system: str) -> None:
    node = gpu_systems.node_of(results(tmp_path, rates=RATES, cpu_rates=CPU_RATES, disk_rates=DISK_RATES))
    plan, _ = gpu_systems.plan_of(Cell(system, "S", 4), node, tmp_path)
    cap = GIB * 24 if gpu_systems.OURS[system].is_capped else node.device_bytes
    assert plan.bytes[Tier.DEVICE].total <= plan.budget[Tier.DEVICE] == cap
    assert plan.bytes[Tier.HOST].total <= 96 * GIB
    overlap = {"ours, beside forward": "Forward", "ours, beside backward": "Backward"}.get(system)
    assert plan.optimizer.overlap == (overlap or plan.optimizer.overlap)
    moved = {"ours, activations on host": "host", "ours, activations on nvme": "nvme"}.get(system)
    assert moved is None or all(answer.value == moved for answer in plan.activations.answers[1:-1])
    assert bool(plan.parameters.homes) == (system == "ours, weights streamed")


@pytest.mark.parametrize(
    ("cpu", "streamed", "resident", "wanted"),
    [(1.0, 0.0, 0.0, 28 / 1.2e11), (0.0, 1.0, 0.0, 10.125 / 36e9), (0.0, 0.0, 1.0, 28 / 3e12)],
)
def test_the_bound_is_the_slowest_of_cpu_link_and_device(
    cpu: float, streamed: float, resident: float, wanted: float
) -> None:
    plan = OptimizerPlan(cpu_share=cpu, streamed_share=streamed, resident_share=resident)
    rates = {**RATES, "cpu_update": 1.2e11}
    assert gpu_systems.bound_seconds(10**9, plan, rates) == pytest.approx(wanted * 10**9)


def test_exposed_is_what_a_step_takes_beyond_that_of_another_system(tmp_path: Path) -> None:
    def figures(seconds: float) -> dict[str, Any]:
        return {"step_seconds": seconds, "tokens_per_second": 1.0, "tokens": 8192, "reserved_bytes": GIB}

    def line(system: str, clips: bool = False, **found: Any) -> dict[str, Any]:
        return {"cell": Cell(system, "S", 4, clips).name, **found}

    lines = [
        line("bare", figures=figures(0.5)),
        line("no offload", True, figures=figures(0.75)),
        line("ours, CPU alone", figures=figures(1.0)),
        line("ours, weights streamed", figures=figures(1.5)),
        line("SuperOffload", why="ended with 3", figures={"unavailable": "no deepspeed"}),
        line("ours", why="not done after 60 s", tail=["fill"]),
    ]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    rows = benchmark.table(Results(tmp_path)).splitlines()
    found = {row[:27].rstrip() + row[35:41].rstrip(): row[41:].split() for row in rows}
    assert found["no offload   yes"][:2] == ["0.7500", "0.2500"]
    assert found["ours, weights streamed    no"][:2] == ["1.5000", "0.5000"]
    assert found["bare    no"][:5] == ["0.5000", "-", "-", "1", "-/-/1.00"]
    assert found["SuperOffload    no"] == ["no", "deepspeed"]
    assert found["ours    no"] == ["fill"]


def test_a_rehearsal_says_so_in_its_table(tmp_path: Path) -> None:
    shown = benchmark.table(results(tmp_path, machine={"device": "Fake CUDA device"}))
    assert shown.startswith(benchmark.REHEARSAL)
