"""How each attempt of a run ended: Attempt, and its file next to the attempt's log."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from spillway.errors import ExitCode, reason_of
from spillway.feedback.retries import Retry, retry_of
from spillway.json_text import json_object
from spillway.plan import MemoryPlan
from spillway_trainer.launch.ending import signal_name

from .directory import RunDirectory, write_atomic

ENDED = "ended.json"
PLAN = "plan.json"
"""An attempt's plan, stored next to its log."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """How one trainer process ended."""

    epoch: int
    exit_code: int
    """As a shell reports it: 128 + number for a signal."""
    reason: str
    message: str
    """One sentence: the trainer's own, or a description of the crash."""

    @property
    def worth_restarting(self) -> bool:
        return retry_of(self.reason) is Retry.COUNTED

    @property
    def ran_out_of_memory(self) -> bool:
        return retry_of(self.reason) is Retry.REPLANNED


@dataclass(frozen=True, slots=True)
class Rung:
    """Result of replanning after an attempt that ran out of memory."""

    sentence: str = ""
    """For people; empty = nothing to report."""
    taken: bool = False
    """Whether the next attempt uses the new plan."""


NO_RUNG = Rung()


def record_end(run: RunDirectory, attempt: Attempt) -> None:
    """Stores how the attempt ended next to its log: a killed trainer cannot write it to run.jsonl."""
    content = {"exitCode": attempt.exit_code, "reason": attempt.reason, "message": attempt.message}
    write_atomic(run.attempt(attempt.epoch) / ENDED, json.dumps(content) + "\n")


def read_ended(run: RunDirectory, epoch: int) -> Attempt | None:
    """How an attempt ended; None while it trains, if its `spillway run` was killed, or if the file is damaged."""
    content = read_json_object(run.attempt(epoch) / ENDED)
    code, reason, message = (content.get(key) for key in ("exitCode", "reason", "message"))
    if not isinstance(code, int) or not isinstance(reason, str) or not isinstance(message, str):
        return None
    return Attempt(epoch, code, reason, message)


def describe_end(directory: Path, epoch: int, returncode: int) -> Attempt:
    """Code, reason and sentence for an ended trainer; its own message is used only if it has the same exit code."""
    exit_code = 128 - returncode if returncode < 0 else returncode
    reason = reason_of(exit_code)
    termination = read_json_object(directory / "termination.json")
    if termination.get("exitCode") == exit_code and termination.get("message"):
        return Attempt(epoch, exit_code, reason, str(termination["message"]))
    if returncode < 0:
        return Attempt(epoch, exit_code, reason, f"killed by {signal_name(-returncode)}")
    if exit_code == ExitCode.COMPLETED:
        return Attempt(epoch, exit_code, reason, "")
    last_line = last_log_line(directory / "trainer.log")
    said = f"; last log line: {last_line}" if last_line else ""
    return Attempt(epoch, exit_code, reason, f"the trainer exited with code {exit_code}{said}")


def read_json_object(path: Path) -> dict[str, object]:
    """The object in a small JSON file; empty if the file is missing or incomplete after a crash."""
    try:
        return json_object(path.read_bytes()) or {}
    except OSError:
        return {}


def last_log_line(path: Path, longest: int = 300) -> str:
    """The last non-empty line of a log; a traceback's last line is the error."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip()[:longest] for line in reversed(lines) if line.strip()), "")


def plan_of_attempt(run: RunDirectory, epoch: int) -> MemoryPlan | None:
    """The attempt's plan; None if it is missing or of another version."""
    try:
        return MemoryPlan.model_validate_json((run.attempt(epoch) / PLAN).read_text(encoding="utf-8"))
    except (OSError, ValueError, ValidationError):
        return None
