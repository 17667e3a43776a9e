"""run.jsonl: whole lines of strict JSON, whatever happened before."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from spillway.errors import UserError
from spillway.metrics import StepMetrics
from spillway.plan import Tier
from spillway_cli.record.log import RunLog
from spillway_trainer.reporting.recorder import Recorder


def step(loss: float = 2.5) -> StepMetrics:
    return StepMetrics(
        step=1, loss=loss, learning_rate=1e-3, gradient_norm=1.0, clip_factor=1.0, tokens=100, step_seconds=0.5
    )


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line, parse_constant=lambda name: name) for line in path.read_text().splitlines()]


def test_a_loss_survives_the_file_bit_for_bit(tmp_path: Path) -> None:
    loss = 0.1 + 0.2
    Recorder(tmp_path / "run.jsonl").step(step(loss))
    assert lines(tmp_path / "run.jsonl")[0]["loss"] == loss


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    Recorder(tmp_path / "run.jsonl").step(step(math.nan))
    assert lines(tmp_path / "run.jsonl")[0]["loss"] is None


def test_what_was_chosen_for_single_storages_is_told_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    Recorder(path).activations_chosen("2 storages to NVMe", 0.25, 2.0, {Tier.NVME: 4096})
    (line,) = lines(path)
    assert line.pop("time")
    assert line == {
        "event": "activations_chosen", "reason": "2 storages to NVMe", "stall_seconds": 0.25, "pass_seconds": 2.0,
        "tier_bytes": {"nvme": 4096},
    }  # fmt: skip
    log = RunLog()
    log.add(path.read_text())
    assert [choice.reason for choice in log.choices] == ["2 storages to NVMe"]


def test_a_live_correction_is_told_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    Recorder(path).activations_corrected(40, "correction at step 40", 12, 52, 28)
    (line,) = lines(path)
    assert line.pop("time")
    assert line == {
        "event": "activations_corrected", "step": 40, "reason": "correction at step 40", "activations": 12,
        "host_bytes": 52, "spill_file_bytes": 28,
    }  # fmt: skip
    log = RunLog()
    log.add(path.read_text())
    assert [(correction.step, correction.reason) for correction in log.corrections] == [(40, "correction at step 40")]


def test_tokens_per_second_are_recorded(tmp_path: Path) -> None:
    Recorder(tmp_path / "run.jsonl").step(step())
    assert lines(tmp_path / "run.jsonl")[0]["tokens_per_second"] == 200.0


def test_a_half_written_line_is_closed_off_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"event": "step", "lo')
    Recorder(path).end(3, "Completed", 0, "done")
    assert json.loads(path.read_text().splitlines()[1])["event"] == "end"


def test_whole_lines_are_continued_without_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    Recorder(path).end(3, "Preempted", 75, "stopped")
    Recorder(path).end(9, "Completed", 0, "done")
    assert [line["step"] for line in lines(path)] == [3, 9]


def test_a_log_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent/run\.jsonl: cannot be written: No such file"):
        Recorder(tmp_path / "absent" / "run.jsonl")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_a_sentence() -> None:
    with pytest.raises(UserError, match="No space left"):
        Recorder(Path("/dev/full")).end(1, "Completed", 0, "done")
