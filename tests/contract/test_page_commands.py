"""Every command of the documentation runs in a test, or says why it cannot."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from cases.page_commands import CLUSTER, CLUSTER_PAGES, ELSEWHERE, LOCAL
from harness.page_commands import PAGES, RUNBOOKS, commands_of
from harness.places import ROOT

WRITTEN = {str(page.relative_to(ROOT)): commands_of(page) for page in PAGES if page != RUNBOOKS}
"""page -> commands"""


def test_every_command_of_a_page_has_its_place_in_a_test() -> None:
    known = {*LOCAL, *CLUSTER, *ELSEWHERE}
    assert {page: new for page, found in WRITTEN.items() if (new := [one for one in found if one not in known])} == {}


def test_no_command_has_two_places_or_stands_on_no_page() -> None:
    written = {command for commands in WRITTEN.values() for command in commands}
    assert Counter([*LOCAL, *CLUSTER, *ELSEWHERE]) == Counter(written)


def test_the_test_bed_runs_every_command_that_is_the_clusters() -> None:
    assert {*CLUSTER} <= {command for page in CLUSTER_PAGES for command in WRITTEN[page]}


@pytest.mark.parametrize(
    ("text", "commands"),
    [
        ("```bash\nfirst --it\n# said\nsecond   # why\n```", ["first --it", "second"]),
        ("```\nhelm install a \\\n  --set 'b={c}'    # d\n```", ["helm install a --set 'b={c}'"]),
        ("```\n$ kubectl get tjob\nNAME   STATE\nmake   Complete\n```", ["kubectl get tjob"]),
        ("1. so\n   ```sh\n   A=1 make it\n   ```", ["A=1 make it"]),
        ("```\n kubectl apply ──> watch\n```\n```text\nmake no\n```\n```yaml\nmake: no\n```", []),
    ],
)
def test_commands_are_read_as_a_reader_would_copy_them(text: str, commands: list[str], tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(text + "\n", encoding="utf-8")
    assert commands_of(tmp_path / "page.md") == commands
