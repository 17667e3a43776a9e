"""Worker: processes one TrainingJob, from observing to writing, in a few rounds.

    observe -> reconcile -> what it needs to see | children | deletions | status -> observe ...

It ends when the decision changes nothing. A look that fails is repeated after a back-off, from a new observation.
A decision that may plan takes up to half a minute: it is made in a thread, so that the event loop goes on, and one at a
time, so that each one sees what the one before reserved.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from spillway.api.status import Escalation

from .decide.observed import Desired, JobObject, Observed
from .decide.reconcile import reconcile
from .exporter import OperatorExporter
from .kube.api_client import ApiError, RequestRejected, Unavailable
from .kube.apply import DONE, Applied, Applier
from .kube.events import EventPoster
from .kube.key_queue import KeyQueue
from .kube.store import Key, known_attempts
from .log import about
from .measured.reservations import Reservations
from .observe import Observer, Sight
from .progress.outbox import ProgressOutbox, Received

logger = logging.getLogger(__name__)

MOST_ROUNDS = 6
"""of one look: what is needed, the children, the status, nothing; and twice what a race may cost"""
UNWATCHED_SECONDS = 30.0
"""between two looks at an attempt that no watch reports"""


@dataclass(frozen=True, slots=True)
class Round:
    """What one round leaves for the next."""

    needs: frozenset[str] = frozenset()
    applied: Applied = DONE


@dataclass(frozen=True, slots=True)
class JobCallbacks:
    """What others want to hear of TrainingJobs."""

    forget: Callable[[Key], None]
    """one is gone, also when one of its name has taken its place"""
    ran_out: Callable[[JobObject, Iterable[Escalation]], None]
    """the status says for the first time that these attempts ran out of memory"""


class Worker:
    def __init__(
        self,
        queue: KeyQueue[Key],
        observer: Observer,
        applier: Applier,
        reservations: Reservations,
        outbox: ProgressOutbox,
        events: EventPoster,
        exporter: OperatorExporter,
        told: JobCallbacks,
    ) -> None:
        self._queue = queue
        self._observer = observer
        self._applier = applier
        self._reservations = reservations
        self._outbox = outbox
        self._events = events
        self._exporter = exporter
        self._told = told
        self._planning = asyncio.Lock()
        self._uids: dict[Key, str] = {}
        """of the TrainingJobs that were looked at"""

    async def run(self) -> None:
        while True:
            key = await self._queue.get()
            try:
                await self.look(key)
            finally:
                self._queue.done(key)

    async def look(self, key: Key) -> None:
        """Never raises: whatever goes wrong with one job is logged, counted, and tried again later."""
        began, result = time.monotonic(), "done"
        try:
            if await self._rounds(key):
                self._queue.succeeded(key)
            else:  # a decision that never comes to rest is made again later, not in a circle
                result = "restless"
                seconds = self._queue.retry(key)
                logger.warning("%d rounds brought no rest; again in %.1f s", MOST_ROUNDS, seconds, extra=about(key))
        except Unavailable as error:
            result = "unavailable"
            seconds = self._queue.retry(key, unanswered=True)
            logger.warning("%s; again in %.1f s", error, seconds, extra=about(key))
        except ApiError as error:
            result = "refused" if isinstance(error, RequestRejected) else "raced"
            logger.warning("%s; again in %.1f s", error, self._queue.retry(key), extra=about(key))
        except Exception:
            result = "failed"
            seconds = self._queue.retry(key)
            logger.exception("a look failed; again in %.1f s", seconds, extra=about(key))
        self._exporter.reconcile(result, time.monotonic() - began)

    async def _rounds(self, key: Key) -> bool:
        """Whether the job came to rest."""
        left = Round()
        for _ in range(MOST_ROUNDS):
            sight = await self._observer.observe(key, left.needs)
            if sight is None:
                self._uids.pop(key, None)
                self._told.forget(key)
                return True
            self._meet(sight.observed.job)
            observed = self._answered(sight.observed, left.applied)
            desired = await self._decide(observed)
            if missing := desired.needs - left.needs:
                left = replace(left, needs=left.needs | missing)
                continue
            if desired.changes_nothing:
                self._settle(key, observed, desired, sight)
                return True
            left = await self._apply(observed, desired)
        return False

    def _meet(self, job: JobObject) -> None:
        """A namesake of a job that is gone inherits nothing from it."""
        if self._uids.setdefault(job.key, job.uid) != job.uid:
            self._uids[job.key] = job.uid
            self._told.forget(job.key)

    def _answered(self, observed: Observed, applied: Applied) -> Observed:
        """With what the last round was answered, and the report that is due."""
        answered = replace(observed, conflict=applied.conflict, refusal=applied.refusal)
        key, uid = observed.job.key, observed.job.uid
        # Of an attempt that has ended the newest report is the last: it waits for no turn.
        lives = any(attempt.owner_uid == uid and not attempt.outcome for attempt in observed.attempts)
        return _with_report(answered, self._outbox.released(key) if lives else self._outbox.newest(key))

    async def _decide(self, observed: Observed) -> Desired:
        """What it creates is reserved by the caller before it awaits anything: before the next plan begins."""
        if observed.contracts is None:
            desired, seconds = _timed(observed)
        else:
            async with self._planning:
                desired, seconds = await asyncio.to_thread(_timed, self._observer.as_of_now(observed))
        self._exporter.decision(seconds)
        return desired

    async def _apply(self, observed: Observed, desired: Desired) -> Round:
        """Children, deletions, then the status, which says what is: not that of children which were refused."""
        job = observed.job
        if desired.creates:
            self._reservations.decided(job, desired.creates)
            applied = await self._applier.create(job, desired.creates)
            if applied != DONE:
                return Round(frozenset({"contracts"}) if applied.superseded else frozenset(), applied)
        await self._applier.delete(job, desired.deletes)
        if desired.status is not None:
            await self._write_status(observed, desired)
        return Round(applied=Applied(observed.conflict, observed.refusal))

    async def _write_status(self, observed: Observed, desired: Desired) -> None:
        """A status that is written anyway carries the newest report."""
        job = observed.job
        newest = self._outbox.newest(job.key)
        informed = _with_report(observed, newest)
        if informed.progress is not observed.progress and not desired.creates:
            again = await self._decide(informed)
            if again.status is not None and again.creates == () and again.deletes == desired.deletes:
                desired, observed = again, informed
        assert desired.status is not None
        written = await self._applier.write_status(job, desired.status)
        if newest is not None and newest.report is observed.progress:
            self._outbox.written(job.key, newest, time.monotonic())
        if written:
            self._told.ran_out(job, desired.ran_out)
            for event in desired.events:
                self._events.note(job, event)

    def _settle(self, key: Key, observed: Observed, desired: Desired, sight: Sight) -> None:
        """Nothing is to be done now: when to look again, and what the report that was due came to."""
        for event in desired.events:
            self._events.note(observed.job, event)
        due = self._outbox.released(key)
        if due is not None:  # it says what the status says already
            self._outbox.written(key, due, time.monotonic())
        if sight.unwatched:
            self._queue.add_after(key, UNWATCHED_SECONDS)
        if desired.look_again_seconds is not None:
            self._queue.add_after(key, desired.look_again_seconds)


def _timed(observed: Observed) -> tuple[Desired, float]:
    """A decision, and the seconds that it took."""
    began = time.perf_counter()
    desired = reconcile(observed, _now())
    return desired, time.perf_counter() - began


def _with_report(observed: Observed, received: Received | None) -> Observed:
    """A report of an attempt that is over says nothing of the present one. The present one's Job may be gone already:
    its last report came just before."""
    own = [attempt.attempt for attempt in observed.attempts if attempt.owner_uid == observed.job.uid]
    present = max([*own, known_attempts(observed.job)])
    if received is None or (received.job_uid, received.attempt) != (observed.job.uid, present):
        return observed
    return replace(observed, progress=received.report, progress_time=received.time)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
