"""How each attempt of a run ended: Attempt, and the file that keeps it beside the attempt's log."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from spillway.errors import ExitCode, reason_of
from spillway.feedback.retries import Retry, retry_of
from spillway.json_text import json_object
from spillway.plan import MemoryPlan

from .directory import RunDirectory, write_atomic

ENDED = "ended.json"
PLAN = "plan.json"
"""of one attempt, beside its log"""


@dataclass(frozen=True, slots=True)
class Attempt:
    """How one trainer process ended."""

    epoch: int
    exit_code: int
    """as a shell reports it: 128 + number for a signal"""
    reason: str
    message: str
    """one sentence: the trainer's own, or what is known of a crash"""

    @property
    def worth_restarting(self) -> bool:
        return retry_of(self.reason) is Retry.COUNTED

    @property
    def ran_out_of_memory(self) -> bool:
        return retry_of(self.reason) is Retry.REPLANNED


@dataclass(frozen=True, slots=True)
class Rung:
    """What was planned after an attempt that ran out of memory."""

    sentence: str = ""
    """for people; empty = nothing is to be said"""
    taken: bool = False
    """the next attempt runs it"""


NO_RUNG = Rung()


def record_end(run: RunDirectory, attempt: Attempt) -> None:
    """Keep how it ended beside its log: a killed trainer cannot say it in run.jsonl."""
    content = {"exitCode": attempt.exit_code, "reason": attempt.reason, "message": attempt.message}
    write_atomic(run.attempt(attempt.epoch) / ENDED, json.dumps(content) + "\n")


def read_ended(run: RunDirectory, epoch: int) -> Attempt | None:
    """How an attempt ended; None while it trains, when its CLI was killed, or when the file is damaged."""
    content = read_json_object(run.attempt(epoch) / ENDED)
    code, reason, message = (content.get(key) for key in ("exitCode", "reason", "message"))
    if not isinstance(code, int) or not isinstance(reason, str) or not isinstance(message, str):
        return None
    return Attempt(epoch, code, reason, message)


def describe_end(directory: Path, epoch: int, returncode: int) -> Attempt:
    """Code, reason and sentence of an ended trainer; the trainer's own message counts when it matches the code."""
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
    said = f"; it last said: {last_line}" if last_line else ""
    return Attempt(epoch, exit_code, reason, f"the trainer ended with exit code {exit_code}{said}")


def signal_name(number: int) -> str:
    name = signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"
    hint = " (out of memory, if nobody sent it: see the kernel's log)" if number == signal.SIGKILL else ""
    return name + hint


def read_json_object(path: Path) -> dict[str, object]:
    """The object in a small JSON file, or an empty one when a crash left none or a part of one."""
    try:
        return json_object(path.read_bytes()) or {}
    except OSError:
        return {}


def last_log_line(path: Path, longest: int = 300) -> str:
    """The last line of a log that says something; a traceback's last line is the error."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip()[:longest] for line in reversed(lines) if line.strip()), "")


def plan_of_attempt(run: RunDirectory, epoch: int) -> MemoryPlan | None:
    """None when there is none of this version."""
    try:
        return MemoryPlan.model_validate_json((run.attempt(epoch) / PLAN).read_text(encoding="utf-8"))
    except (OSError, ValueError, ValidationError):
        return None
