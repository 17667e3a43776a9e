"""Tests that need a CUDA device. Without one they are skipped, and the last lines of the run say so."""

from __future__ import annotations

import os

import pytest
import torch

NO_DEVICE = "no CUDA device"


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    if not os.environ.get("CUDA_VISIBLE_DEVICES"):  # hidden from all other tests
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if not torch.cuda.is_available():
        pytest.skip(NO_DEVICE)
    return "cuda"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if NO_DEVICE in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"tests/gpu: {len(skipped)} tests did not run: {NO_DEVICE}")
