"""Determines how a pod ended from the ends of its ranks. Pure.

The first rank that failed of its own accord is the cause. As long as there is such a rank, three kinds are passed over:
a rank that only noticed that a peer was gone ("follower": true in its termination message), one that torch ended
because it waited for a peer in NCCL, and one that the launcher stopped.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from spillway.errors import ExitCode, reason_of
from spillway.json_text import json_object

from ..ending import LONGEST_TERMINATION, TERMINATION_VERSION

LONGEST_LAST_LINE = 300


@dataclass(frozen=True, slots=True)
class RankEnd:
    """One rank's end."""

    rank: int
    status: int
    """As waitpid returned it."""
    message: bytes = b""
    """Its termination message; empty if it left none."""
    stopped: bool = False
    """Whether the launcher stopped it, because another rank had ended and this one had not."""
    asked: bool = False
    """Whether the launcher had been asked to stop, and had passed that on."""
    last_line: str = ""
    """Last line of its output."""
    waited_in_nccl: bool = False
    """Whether torch's NCCL group reported something in its output, and CUDA no error."""
    is_script: bool = False
    """Whether it is a script, which ends as it likes when it is asked to stop: done or not, it is run again."""

    @property
    def signal_number(self) -> int:
        """The signal that killed it; 0 if it exited."""
        return os.WTERMSIG(self.status) if os.WIFSIGNALED(self.status) else 0

    @property
    def stopped_early(self) -> bool:
        """Whether it died of the request to stop: it could not handle the request (yet, or any more), and saved
        nothing. Also true for a script that exited after the request; it may have saved."""
        return self.asked and (self.signal_number == signal.SIGTERM or (self.is_script and not self.signal_number))

    @property
    def exit_code(self) -> int:
        """As a shell reports it, 128 + number for a signal; that of a preemption if it was stopped early."""
        if self.stopped_early:
            return ExitCode.PREEMPTED
        return 128 + self.signal_number if self.signal_number else os.WEXITSTATUS(self.status)

    @property
    def follows(self) -> bool:
        """Whether it failed only because another rank had."""
        return self.stopped or self._was_waiting or self._said().get("follower") is True

    @property
    def _was_waiting(self) -> bool:
        """Whether torch's watchdog ended it, because an exchange through NCCL failed or took too long."""
        return self.signal_number == signal.SIGABRT and self.waited_in_nccl and not self._said()

    def termination(self) -> bytes:
        """Returns the rank's own JSON if it is about this end, else what is known about the crash."""
        said = self._said()
        if said.get("exitCode") == self.exit_code and len(self.message) <= LONGEST_TERMINATION:
            return self.message
        known = {
            "v": TERMINATION_VERSION,
            "reason": reason_of(self.exit_code),
            "exitCode": self.exit_code,
            "rank": self.rank,
            "message": self._sentence(),
        }
        if self.follows:
            known["follower"] = True
        return json.dumps(known).encode() + b"\n"

    def _sentence(self) -> str:
        if self.stopped_early:
            return f"rank {self.rank} was stopped by SIGTERM{'' if self.is_script else ' before it could save'}"
        if self.stopped:
            return f"rank {self.rank} was stopped because another rank had ended"
        if self._was_waiting:
            return (
                f"another rank ended, or exceeded the time limit, while rank {self.rank} waited for it in NCCL; read "
                "the logs of the other ranks"
            )
        if self.signal_number:
            return f"rank {self.rank} was killed by {signal_name(self.signal_number)}{self._last_words()}"
        return f"rank {self.rank} exited with code {self.exit_code}{self._last_words()}"

    def _last_words(self) -> str:
        return f"; last log line: {self.last_line[:LONGEST_LAST_LINE]}" if self.last_line else ""

    def _said(self) -> dict[str, object]:
        return json_object(self.message) or {}


def decisive(ends: Sequence[RankEnd]) -> RankEnd:
    """Returns the end that is the pod's. `ends`: at least one, in the order in which the ranks ended."""
    failed = [end for end in ends if end.exit_code != ExitCode.COMPLETED]
    causes = [end for end in failed if not end.follows]
    if failed:
        return (causes or failed)[0]
    return min(ends, key=lambda end: end.rank)


def signal_name(number: int) -> str:
    name = signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"
    hint = " (probably out of memory; see the kernel log)" if number == signal.SIGKILL else ""
    return name + hint
