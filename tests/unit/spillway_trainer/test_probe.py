"""The probe's parts that need no quiet machine: room on the disk, what it spills, what its cells ask for."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from spillway.errors import SpillVolumeFull
from spillway.plan import MemoryPlan
from spillway.planning.hardware import local_node
from spillway.planning.planner import make_plan
from spillway.units import GIB, MIB
from spillway_trainer import probe


def test_a_full_disk_is_rejected_before_a_byte_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=100, f_frsize=MIB))
    with pytest.raises(SpillVolumeFull, match=r"100 MiB free, but the probe writes 64.0 MiB"):
        probe.disk(tmp_path, 64 * MIB)
    assert list(tmp_path.iterdir()) == []


def test_the_disk_is_written_and_read_through_our_engine_and_left_empty(tmp_path: Path) -> None:
    figures, backend = probe.disk(tmp_path, 32 * MIB)
    assert {name: len(values) for name, values in figures.items()} == {"disk write": 2, "disk read": 2}
    assert min(rate for values in figures.values() for rate in values) > 0.0
    assert backend.endswith(("O_DIRECT", "buffered"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("cell", probe.CELLS, ids=str)
def test_every_cell_fits_and_its_plan_says_what_a_step_asks_for(cell: probe.Cell) -> None:
    plan = make_plan(cell.job(), local_node(2, 4 * GIB, 4 * GIB, GIB))
    assert isinstance(plan, MemoryPlan)
    assert plan.prediction.work["forward"]["flops"] > 0.0
    assert plan.spills is (cell.optimizer == "Host")


def test_cells_tell_both_types_and_every_price_apart() -> None:
    for cells in (probe.CELLS, probe.QUICK_CELLS):
        assert {cell.compute for cell in cells} == {"bfloat16", "float32"}
        assert {cell.optimizer for cell in cells} == {"Device", "Host"}


def test_random_tokens_are_what_a_step_wants() -> None:
    cell = probe.CELLS[0]
    tokens = probe.RandomTokens(cell)
    batch = tokens.batch(range(cell.micro_batch_size))
    assert batch.tokens_BT.shape == (cell.micro_batch_size, cell.sequence_length)
    assert int(batch.tokens_BT.max()) < cell.vocab_size
    assert tokens.num_unmasked(range(4 * cell.micro_batch_size)) == 4 * batch.num_unmasked


def test_on_a_cpu_no_gradient_comes_down_and_no_updated_parameter_goes_up(tmp_path: Path) -> None:
    """Its device's memory is the host's: gradients are added where they are, and the update writes the parameter."""
    cell = probe.Cell(64, 2, 512, 64, 1, optimizer="Host", num_micro_batches=1)
    [told] = probe.training([cell], tmp_path, 1, num_rounds=probe.WARM_UP_STEPS + 1)
    moved = told["steps"][-1]["moved_bytes"]
    assert moved.get("h2d", 0) == moved.get("d2h", 0) == 0
    assert moved["cpu"] > 0
    assert told["steps"][-1]["cpu_seconds"] > 0.0
