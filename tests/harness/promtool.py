"""Prometheus' own checks of rules, for machines that have promtool."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from harness.built_programs import built_program

PROMTOOL = built_program("promtool", otherwise="promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool: `make cluster-up` builds it, and Debian's package prometheus has one"
)


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, check=False, timeout=120)


def unit_tested(tests: dict[str, Any], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs `promtool test rules` on a file with these tests."""
    (folder / "tests.yaml").write_text(json.dumps(tests), encoding="utf-8")
    return promtool("test", "rules", folder / "tests.yaml")
