"""Which models the command has built before it plans them, and what it makes of the answer."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from cases.job_documents import job
from spillway.errors import UserError
from spillway.model_shape import shape_of
from spillway_cli import model_inspection
from spillway_cli.model_inspection import inspected_shape

FILE = Path("job.yaml")
SOURCE = {"spec.model": {"source": {"claim": "models", "subPath": "gpt2"}}}


class Inspector:
    """Stands for the trainer's process."""

    def __init__(self, code: int = 0, stdout: str = "", stderr: str = "") -> None:
        self.answer = subprocess.CompletedProcess([], code, stdout, stderr)
        self.commands: list[list[str]] = []

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        return self.answer


def inspector(monkeypatch: pytest.MonkeyPatch, *answer: Any) -> Inspector:
    made = Inspector(*answer)
    monkeypatch.setattr(model_inspection.subprocess, "run", made.run)
    return made


def test_a_model_by_its_sizes_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = inspector(monkeypatch)
    assert inspected_shape(FILE, job(), {}) is None
    assert asked.commands == []


@pytest.mark.parametrize("changes", [SOURCE, {"spec.model": {"entrypoint": "a:b"}}, {"spec.model.lora": {}}])
def test_every_other_model_is_built_with_the_claims_of_the_run(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = shape_of(job().spec)
    asked = inspector(monkeypatch, 0, shape.to_json() + "\n")
    assert inspected_shape(FILE, job(changes), {"models": Path("/data")}) == shape
    (command,) = asked.commands
    assert command[1:] == ["-P", "-m", "spillway_trainer.inspect", "job.yaml", "--claim=models=/data"]


def test_a_refusal_of_the_trainer_is_one_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    inspector(monkeypatch, 64, "", "spec.model.source: /m is no directory\n")
    with pytest.raises(UserError, match=r"^spec\.model\.source: /m is no directory$"):
        inspected_shape(FILE, job(SOURCE), {})


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            (1, "", "Traceback ...\nKeyError: 'x'\n"),
            "job.yaml ended with code 1 and no answer: KeyError: 'x'; run",
        ),
        ((-9, "", ""), "ended with code -9 and no answer; run it"),
        ((0, "", "bye\n"), "ended with code 0 and no answer: bye; run it"),
        ((0, '{"blocks": 3}', ""), "ended with code 0 and no answer; run it"),
    ],
)
def test_an_inspection_without_an_answer_is_told_with_its_last_words(
    answer: tuple[int, str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inspector(monkeypatch, *answer)
    with pytest.raises(UserError, match=words):
        inspected_shape(FILE, job(SOURCE), {})
