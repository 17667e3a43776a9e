"""The documentation points at what exists, and its examples work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spillway.api import parse_job
from spillway.hardware import resolve_node
from spillway.plan import MemoryPlan
from spillway.planner import make_plan

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_file_of_the_architecture_table_exists() -> None:
    rows = [row for row in (ROOT / "docs/architecture.md").read_text().splitlines() if row.startswith("|")]
    missing = []
    for row in rows:
        *_, files, _end = row.split("|")
        folder = ROOT
        for name in re.findall(r"`([\w./*-]+\.(?:py|toml)|[\w./-]+/)`", files):
            path = ROOT / name if "/" in name and (ROOT / name.split("/")[0]).exists() else folder / name
            folder = path.parent
            if not list(path.parent.glob(path.name or ".")):
                missing.append(name)
    assert missing == []


def test_the_readmes_job_is_valid_and_fits_its_budgets() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert isinstance(make_plan(parse_job(block, "README.md"), resolve_node("cpu")), MemoryPlan)
