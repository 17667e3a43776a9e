"""Rules of the house that no other tool checks."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import spillway
from harness.places import ROOT
from spillway.extras import EXTRAS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_operator_folder_is_no_package() -> None:
    """With an `__init__.py` it would shadow the standard library's `operator` and the interpreter would not start."""
    assert not (ROOT / "operator" / "__init__.py").exists()


def test_no_test_lives_under_the_operator_folder() -> None:
    """pytest would register the folder itself as the module `operator`."""
    assert not [*(ROOT / "operator").rglob("test_*.py"), *(ROOT / "operator").rglob("conftest.py")]


def test_cuda_streams_and_events_live_in_lanes_only() -> None:
    sources = [path for path in (ROOT / "trainer_image").rglob("*.py") if path.parent.name != "tiers"]
    assert not [path for path in sources if "torch.cuda" in path.read_text(encoding="utf-8")]


def test_one_file_knows_torch_distributed() -> None:
    sources = [path for path in (ROOT / "trainer_image").rglob("*.py") if path.name != "distributed.py"]
    assert not [path for path in sources if "torch.distributed" in path.read_text(encoding="utf-8")]


def test_step_loop_and_models_never_see_the_plan() -> None:
    """They must run any plan without looking at it: assemble.py alone branches on it."""
    for name in ("trainer.py", "models/transformer.py", "segments.py"):
        text = (ROOT / "trainer_image" / "spillway_trainer" / name).read_text(encoding="utf-8")
        assert "spillway.plan" not in text, name


def written_files() -> list[Path]:
    """What people write, and other people run."""
    folders = ("operator", "trainer_image", "charts", "crds", "docs", "examples", "hack", "benchmarks", "tests")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*")] + list(ROOT.glob("*"))
    kinds = (".py", ".md", ".toml", ".lock", ".yaml", ".tpl", ".txt", ".html", ".json", "")
    return [path for path in found if path.suffix in kinds and path.is_file() and path != Path(__file__)]


def test_the_distribution_has_a_name_of_its_own_everywhere() -> None:
    """`spillway` on the package index is another project: a hint with it would install a stranger's code."""
    strangers = re.compile(r"pip install (?:-\S+ )*['\"]?spillway(?![\w-])|\bspillway\[(?:trainer|operator|hf|deeps)")
    texts = {path: path.read_text(encoding="utf-8", errors="replace") for path in written_files()}
    assert {str(path): hit[0] for path, text in texts.items() if (hit := strangers.search(text))} == {}
    assert PROJECT["name"] == spillway.DISTRIBUTION
    assert spillway.__version__ == PROJECT["version"] == version(spillway.DISTRIBUTION)
    extras = re.compile(rf"(?:{spillway.DISTRIBUTION}|\.|\.whl)\[([a-z,]+)\]'|install_command\(['\"]([a-z,]+)['\"]\)")
    named = {name for text in texts.values() for hit in extras.finditer(text) for name in (hit[1] or hit[2]).split(",")}
    assert named <= PROJECT["optional-dependencies"].keys()
    assert "trainer" in named
    assert EXTRAS.keys() == PROJECT["optional-dependencies"].keys()
