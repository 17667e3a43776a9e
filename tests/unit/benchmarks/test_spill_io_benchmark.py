"""Against whom spilling is measured, where rivals are missing."""

from __future__ import annotations

from pathlib import Path

import pytest

import spill_io


def test_without_any_rival_the_spill_benchmark_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill_io, "deepspeed", lambda path: {})
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(SystemExit, match=r"nothing to compare with: install fio"):
        spill_io.contestants(Path("slab"), quick=True)
