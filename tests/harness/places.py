"""Paths in this checkout."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
FIXTURES = TESTS / "fixtures"
GOLDEN = TESTS / "golden"
IMPORTABLE = {"PYTHONPATH": str(TESTS)}
"""environment of a process that runs `python -m harness.…`"""
