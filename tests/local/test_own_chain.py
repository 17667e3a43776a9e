"""Trains the Chain with its own loss from docs/models.md as a job."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness import local_runs
from harness.places import ROOT
from spillway_cli.__main__ import run_app

IMPORTS = """
import torch
import torch.nn.functional as F
from torch import nn
from spillway_trainer.models.chain import Chain


def Block(width):
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))


"""


def test_the_chain_of_the_docs_trains_under_a_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    (block,) = [one for one in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class Model(Chain)" in one]
    small = block.replace("4096", "512").replace("256", "32").replace("range(12)", "range(2)")
    (tmp_path / "own_chain.py").write_text(IMPORTS + small, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    text = local_runs.write_text(tmp_path / "text")
    model = re.search(r"    config: .*?\}\n", local_runs.JOB, re.DOTALL)
    assert model is not None
    document = local_runs.JOB.replace(model[0], "    entrypoint: own_chain:Model\n").replace("TEXT", str(text))
    (tmp_path / "job.yaml").write_text(document, encoding="utf-8")
    assert run_app(["run", str(tmp_path / "job.yaml"), "--output", str(tmp_path / "out")]) == 0
    losses = [one["loss"] for one in local_runs.events(tmp_path / "out", "step")]
    assert len(losses) == 12 and losses[-1] < losses[0]
    assert local_runs.events(tmp_path / "out", "evaluation")
