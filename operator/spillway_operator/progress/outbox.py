"""ProgressOutbox: the latest report of each job, and when to write it. Pure: time is an argument.

At most one write per job and 15 s, and ten per second in total; the job that waits longest goes first. Three reports of
an attempt do not wait for the job's interval: the first one, the first after a step, and the one after its last step.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from spillway.api.progress import ProgressReport

from ..kube.store import Key

JOB_SECONDS = 15.0
"""Interval between writes of one job: 4 per minute."""
TOTAL_SECONDS = 0.1
"""Interval between writes of all jobs: 10 per second."""


@dataclass(frozen=True, slots=True)
class Received:
    report: ProgressReport
    job_uid: str
    """Uid of the TrainingJob."""
    attempt: int
    time: str
    """RFC 3339."""


@dataclass(slots=True)
class Mailbox:
    """The reports of one job; a new job of the same name gets a new mailbox."""

    newest: Received
    released: bool = False
    """The newest report may be written now."""
    turn: int = 0
    """Its valid entry in the queue; 0 = none."""
    last_release: float = float("-inf")
    hurried: tuple[int, int] = (0, 0)
    """Attempt, and how many of its three immediate reports were sent."""


class ProgressOutbox:
    def __init__(self) -> None:
        self._mailboxes: dict[Key, Mailbox] = {}
        self._queue: list[tuple[float, int, Key]] = []
        """(earliest time, turn, key)."""
        self._turns = 0
        self._last_release = float("-inf")

    def __len__(self) -> int:
        return len(self._mailboxes)

    def put(self, key: Key, received: Received, now: float) -> None:
        """Replaces the job's report by `received`, and queues the job."""
        mailbox = self._mailboxes.get(key)
        if mailbox is None or mailbox.newest.job_uid != received.job_uid:
            mailbox = self._mailboxes[key] = Mailbox(received)
        mailbox.newest = received
        if _hurry(mailbox, received):
            mailbox.turn = self._push(key, now)
        elif not mailbox.turn and not mailbox.released:
            mailbox.turn = self._push(key, max(now, mailbox.last_release + JOB_SECONDS))

    def seconds_to_next(self, now: float) -> float | None:
        """Seconds until `release` returns a job; None if none is queued."""
        if not self._queue:
            return None
        return max(0.0, self._queue[0][0] - now, self._last_release + TOTAL_SECONDS - now)

    def release(self, now: float) -> Key | None:
        """A job whose newest report may be written now."""
        while self._queue and self.seconds_to_next(now) == 0.0:
            _, turn, key = heapq.heappop(self._queue)
            mailbox = self._mailboxes.get(key)
            if mailbox is None or mailbox.turn != turn:  # forgotten, or written meanwhile
                continue
            mailbox.turn, mailbox.released, mailbox.last_release = 0, True, now
            self._last_release = now
            return key
        return None

    def released(self, key: Key) -> Received | None:
        """The report that may be written now."""
        mailbox = self._mailboxes.get(key)
        return mailbox.newest if mailbox is not None and mailbox.released else None

    def newest(self, key: Key) -> Received | None:
        """The newest report that is not written yet, to be included in a status that is written anyway."""
        mailbox = self._mailboxes.get(key)
        return mailbox.newest if mailbox is not None and (mailbox.released or mailbox.turn) else None

    def written(self, key: Key, received: Received, now: float) -> None:
        """Marks `received` as written; a newer one that arrived meanwhile waits for its turn."""
        mailbox = self._mailboxes.get(key)
        if mailbox is None:
            return
        mailbox.released, mailbox.turn, mailbox.last_release = False, 0, now
        if mailbox.newest is not received:
            mailbox.turn = self._push(key, now + JOB_SECONDS)

    def forget(self, key: Key) -> None:
        self._mailboxes.pop(key, None)

    def _push(self, key: Key, when: float) -> int:
        self._turns += 1
        heapq.heappush(self._queue, (when, self._turns, key))
        return self._turns


def _hurry(mailbox: Mailbox, received: Received) -> bool:
    """Whether `received` is one of its attempt's three immediate reports; once each."""
    training = received.report.spillway
    stage = 1
    if training is not None and training.last_step_time:
        stage = 3 if 0 < training.steps <= training.step else 2
    if (received.attempt, stage) <= mailbox.hurried:
        return False
    mailbox.hurried = (received.attempt, stage)
    return True
