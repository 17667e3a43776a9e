"""Which models the command has built before it plans them, and what it makes of the answer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cases.job_documents import job
from spillway.errors import UserError
from spillway.planning.model_shape import shape_of
from spillway_cli import console
from spillway_cli.run import model_inspection
from spillway_cli.run.model_inspection import inspected_shape

FILE = Path("job.yaml")
SOURCE = {"spec.model": {"source": {"claim": "models", "subPath": "gpt2"}}}


class FakeTimer:
    """Of threading; whoever waited long enough calls its function."""

    daemon = starts = cancelled = False

    def __init__(self, seconds: float, function: Any, arguments: Any) -> None:
        self.seconds, self.function, self.arguments = seconds, function, arguments

    def start(self) -> None:
        self.starts = True

    def cancel(self) -> None:
        self.cancelled = True


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


@pytest.mark.parametrize("is_terminal", [True, False])
def test_an_inspection_that_takes_a_second_says_so_on_a_terminal(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timers: list[FakeTimer] = []

    def look(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        (timer,) = timers
        assert (timer.seconds, timer.starts, timer.cancelled) == (1.0, is_terminal, False)
        if timer.starts:
            timer.function(*timer.arguments)
        return subprocess.CompletedProcess(command, 0, shape_of(job().spec).to_json(), "")

    monkeypatch.setattr(console.threading, "Timer", lambda *given: timers.append(FakeTimer(*given)) or timers[-1])
    monkeypatch.setattr(model_inspection.subprocess, "run", look)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    inspected_shape(FILE, job(SOURCE), {})
    said = "building the model without allocating it, to find its sizes ...\n"
    assert capsys.readouterr().err == (said if is_terminal else "")
    assert timers[0].cancelled


def test_a_rejection_of_the_trainer_is_one_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    inspector(monkeypatch, 64, "", "spec.model.source: /m is not a directory\n")
    with pytest.raises(UserError, match=r"^spec\.model\.source: /m is not a directory$"):
        inspected_shape(FILE, job(SOURCE), {})


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            (1, "", "Traceback ...\nKeyError: 'x'\n"),
            "job.yaml exited with code 1 and no result: KeyError: 'x'; run",
        ),
        ((-9, "", ""), "exited with code -9 and no result; run that command"),
        ((0, "", "bye\n"), "exited with code 0 and no result: bye; run that command"),
        ((0, '{"blocks": 3}', ""), "exited with code 0 and no result; run that command"),
    ],
)
def test_an_inspection_without_an_answer_is_told_with_its_last_words(
    answer: tuple[int, str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inspector(monkeypatch, *answer)
    with pytest.raises(UserError, match=words):
        inspected_shape(FILE, job(SOURCE), {})
