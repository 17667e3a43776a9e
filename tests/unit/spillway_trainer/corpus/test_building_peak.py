"""What building a corpus took is known to later attempts, and never less than it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from spillway.planning.pod_resources import CORPUS_BUILD_BYTES
from spillway_trainer.corpus import building_peak
from spillway_trainer.corpus.building_peak import PEAK_FILE, peak_of_building, room_for_more_text
from spillway_trainer.corpus.tokens import SAMPLE_BYTES


def test_a_later_attempt_reads_what_the_builder_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building_peak, "peak_memory_bytes", lambda root: 700)
    assert peak_of_building(tmp_path, 50, is_new=True) == 750
    monkeypatch.setattr(building_peak, "peak_memory_bytes", lambda root: 100)
    assert peak_of_building(tmp_path, 0, is_new=False) == 750
    assert [file.name for file in tmp_path.iterdir()] == [PEAK_FILE]


@pytest.mark.parametrize("content", ["", "-5", "1e9", "²", "9" * 30, "12 34"])
def test_what_is_no_number_says_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / PEAK_FILE).write_text(content, encoding="utf-8")
    assert peak_of_building(tmp_path, 9, is_new=False) == 0


def test_nothing_is_kept_where_nothing_limits_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building_peak, "peak_memory_bytes", lambda root: 0)
    assert peak_of_building(tmp_path, 50, is_new=True) == 0
    assert list(tmp_path.iterdir()) == []


def test_unwritable_directory_costs_only_the_next_attempts_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building_peak, "peak_memory_bytes", lambda root: 700)
    assert peak_of_building(tmp_path / "gone", 0, is_new=True) == 700
    assert peak_of_building(tmp_path / "gone", 0, is_new=False) == 0


def test_a_text_that_may_grow_has_room_until_the_sample_is_full() -> None:
    assert room_for_more_text(0) == CORPUS_BUILD_BYTES
    assert room_for_more_text(SAMPLE_BYTES // 2) == CORPUS_BUILD_BYTES // 2
    assert room_for_more_text(SAMPLE_BYTES) == room_for_more_text(9 * SAMPLE_BYTES) == 0
