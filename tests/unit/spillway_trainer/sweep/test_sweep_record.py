"""What a sweep knows of its members: the union of what its attempts wrote, of one metric; damage and full disks."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest

from fakes.failing_files import full_at
from spillway.api.sweep.halving import Value
from spillway_trainer.checkpoints.sealed_json import seal
from spillway_trainer.sweep import record as sweep_record
from spillway_trainer.sweep.record import MemberFailure, SweepNotWritten, SweepRecord

FAILED = MemberFailure(3, 71, "step 3: loss nan")


def written(directory: Path, epoch: int, metric: str = "Loss", **values: float) -> SweepRecord:
    """Values of step 10 by member."""
    made = SweepRecord(directory, epoch, metric, {(name, 10): value for name, value in values.items()})
    made.write()
    return made


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = SweepRecord(tmp_path / "new" / "checkpoints", 1, "Loss", {("a", 5): 0.1, ("b", 5): 1 / 3}, {"c": FAILED})
    record.write()
    found = SweepRecord.read(record.directory, 2, "Loss")
    assert (found.values, found.failures, found.epoch) == (record.values, record.failures, 2)


@pytest.mark.parametrize("value", [math.inf, -math.inf, 5e-324, 1e308])
def test_a_value_keeps_every_bit(tmp_path: Path, value: float) -> None:
    written(tmp_path, 1, a=value)
    assert SweepRecord.read(tmp_path, 2, "Loss").values == {("a", 10): value}


def test_a_value_that_is_no_number_stays_none(tmp_path: Path) -> None:
    written(tmp_path, 1, a=math.nan)
    assert math.isnan(SweepRecord.read(tmp_path, 2, "Loss").values["a", 10])


def test_values_of_another_metric_are_nobodys_and_come_back_with_it(tmp_path: Path) -> None:
    written(tmp_path, 1, "Loss", a=1.0)
    record = SweepRecord.read(tmp_path, 2, "EvaluationLoss")
    assert record.values == {}
    record.values["b", 10] = 2.0
    record.write()
    assert SweepRecord.read(tmp_path, 3, "EvaluationLoss").values == {("b", 10): 2.0}
    assert SweepRecord.read(tmp_path, 3, "Loss").values == {("a", 10): 1.0}


def test_who_failed_has_failed_whatever_the_metric(tmp_path: Path) -> None:
    SweepRecord(tmp_path, 1, "Loss", {}, {"c": FAILED}).write()
    assert SweepRecord.read(tmp_path, 2, "EvaluationLoss").failures == {"c": FAILED}


def test_reader_merges_all_attempts_and_the_newest_wins_for_each_value(tmp_path: Path) -> None:
    for epoch in (10, 9, 2):  # as numbers, not as text
        written(tmp_path, epoch, a=float(epoch), **{f"m{epoch}": 1.0})
    found = SweepRecord.read(tmp_path, 11, "Loss").values
    assert found == {("a", 10): 10.0, ("m10", 10): 1.0, ("m9", 10): 1.0, ("m2", 10): 1.0}


def test_values_of_requested_members_are_ordered_by_member_and_step(tmp_path: Path) -> None:
    record = SweepRecord(tmp_path, 1, "Loss", {("b", 20): 4.0, ("b", 3): 3.0, ("a", 100): 2.0, ("c", 1): 1.0})
    assert record.of(["a", "b"]) == [Value("a", 100, 2.0), Value("b", 3, 3.0), Value("b", 20, 4.0)]


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "another version"])
def test_a_damaged_record_is_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    written(tmp_path, 1, a=1.0)
    written(tmp_path, 2, b=2.0)
    path = tmp_path / "sweep-1.json"
    content = path.read_bytes()
    path.write_bytes(
        {
            "cut": content[:-1],
            "flipped": content.replace(b"1.0", b"1.5"),
            "empty": b"",
            "another version": seal({"version": 1, "values": [["a", 10, "1.0"]], "failures": {}}),
        }[damage]
    )
    assert SweepRecord.read(tmp_path, 3, "Loss").values == {("b", 10): 2.0}
    assert "sweep-1.json: ignored" in capsys.readouterr().out


def test_a_disk_without_room_is_a_sentence_and_the_record_before_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = written(tmp_path, 1, a=1.0)
    for operation in range(3):
        monkeypatch.setattr(sweep_record, "DurableFiles", partial(full_at, operation))
        record.values["a", 20] = 2.0
        with pytest.raises(
            SweepNotWritten, match=r"sweep-1\.json: cannot store the values that members reported: No space"
        ):
            record.write()
        assert SweepRecord.read(tmp_path, 2, "Loss").values == {("a", 10): 1.0}
