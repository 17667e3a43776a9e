"""Runs those commands of the documentation pages that this machine can run, as they are written, in a copy of the tree.

Commands that take minutes run only at greater depths (cases/page_commands.py). The README's job is cut to three steps.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from cases.page_commands import LOCAL
from harness.depth import DEPTH
from harness.page_commands import PAGES, Shell, commands_of
from harness.places import ROOT
from spillway.errors import ExitCode

COPIED = ("examples", "docs", "csrc", "Makefile", "README.md", "pyproject.toml", "uv.lock", "CMakeLists.txt")
PLANNED = (ExitCode.COMPLETED, ExitCode.FITS_WITH_SPILLING)
ACCEPTED = {command: PLANNED for command in LOCAL if " plan " in command} | {".venv/bin/spillway doctor": (0, 1)}
"""command -> accepted exit codes; doctor exits with 1 if it finds an error of this machine"""


def to_run(page: Path) -> list[str]:
    return [command for command in commands_of(page) if LOCAL.get(command, DEPTH + 1) <= DEPTH]


def copied_tree(directory: Path) -> Path:
    """Makes a copy of the tree in the state after `make env`; returns its directory."""
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, directory / name)
    job = re.findall(r"^```yaml\n(# job\.yaml.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)[
        0
    ]
    short = job.replace("/path/to/text", str(directory / "docs")).replace("steps: 200", "steps: 3")
    (directory / "job.yaml").write_text(short, encoding="utf-8")
    (directory / ".tools" / "bin").mkdir(parents=True)
    (directory / ".tools" / "bin" / "uv").touch()
    (directory / ".venv").mkdir()
    for path in Path(sys.prefix).iterdir():
        if path.name != ".in-step":
            (directory / ".venv" / path.name).symlink_to(path)
    (directory / ".venv" / ".in-step").touch()
    return directory


@pytest.mark.parametrize("page", [page for page in PAGES if to_run(page)], ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_work_as_they_are_written(page: Path, tmp_path: Path) -> None:
    tree = copied_tree(tmp_path)
    environment = {name: value for name, value in os.environ.items() if name not in ("KUBECONFIG", "XDG_STATE_HOME")}
    environment |= {"HOME": str(tree), "HF_HUB_OFFLINE": "1", "PATH": f"{tree / '.venv' / 'bin'}:{os.environ['PATH']}"}
    shell = Shell(tree, environment, accepted=ACCEPTED)
    for command in to_run(page):
        shell.run(command)
