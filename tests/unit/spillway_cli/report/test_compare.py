"""Runs side by side: figures, what differs in their jobs, and the steps with the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fakes.fake_trainer import attempt_lines
from harness.local_runs import job_file
from harness.run_records import plan
from spillway.errors import UserError
from spillway_cli.console import Format
from spillway_cli.report.compare import compare


def run(path: Path, num_steps: int, differs_from: int = 10**9, ranks: int = 1, **training: Any) -> Path:
    """A recorded run whose losses are other ones from a step on."""
    path.mkdir()
    job = job_file(path, path, path / "corpus", 1)
    changed = job.spec.training.model_copy(update=training)
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"training": changed})})
    (path / "job.json").write_text(job.model_dump_json())
    (path / "plan.json").write_text(plan().model_copy(update={"world_size": ranks}).model_dump_json())
    lines = attempt_lines(1, 1, num_steps)
    for line in lines:
        if line["event"] == "step" and line["step"] >= differs_from:
            line["loss"] += 1e-9
    (path / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_two_runs_are_compared_in_figures_fields_and_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run(tmp_path / "a", 6), run(tmp_path / "b", 8, differs_from=4, seed=7)]
    page = tmp_path / "page.html"
    assert compare(runs, page, Format.TEXT) == 0
    printed = capsys.readouterr().out
    assert "equal bit for bit in the first 3 steps of 6, and differ from then on" in printed
    (seeds,) = [line.split() for line in printed.splitlines() if line.startswith("training.seed")]
    assert seeds[2] == "7"
    assert "steps" in printed and "training.steps" not in printed, "fields that are the same are left out"
    text = page.read_text(encoding="utf-8")
    assert "<svg" in text and "training.seed" in text and str(runs[0]) in text


def test_how_many_ranks_trained_is_one_of_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare([run(tmp_path / "a", 6), run(tmp_path / "b", 6, ranks=3)], None, Format.TEXT) == 0
    (ranks,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("ranks")]
    assert ranks == ["ranks", "1", "rank", "3", "ranks,", "Ddp"]


def test_equal_runs_have_the_same_bits_and_differ_in_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [run(tmp_path / name, steps) for name, steps in (("a", 6), ("b", 6), ("c", 4))]
    assert compare(runs, None, Format.JSON) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["sameSteps"], told["page"]) == (4, None)
    assert [each["steps"] for each in told["runs"].values()] == [6, 6, 4]
    assert not [path for path in told["differences"] if path.startswith("training")]


@pytest.mark.parametrize(
    ("differs_from", "said"), [(1, "differ from the first step on"), (2, "the first 1 step of 6, ")]
)
def test_runs_that_differ_soon_are_said_to(
    differs_from: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [run(tmp_path / "a", 6), run(tmp_path / "b", 6, differs_from=differs_from)]
    assert compare(runs, None, Format.TEXT) == 0
    assert said in capsys.readouterr().out


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    one = run(tmp_path / "a", 2)
    with pytest.raises(UserError, match="1 run given; name 2 to 7 runs"):
        compare([one], None, Format.TEXT)
    with pytest.raises(UserError, match="none"):
        compare([one, tmp_path / "none"], None, Format.TEXT)
    (one / "job.json").write_text("{")
    with pytest.raises(UserError, match=r"job\.json: missing, damaged"):
        compare([one, one], None, Format.TEXT)
