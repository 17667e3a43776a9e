"""Worker: processes one TrainingJob at a time, from observing to writing, in a few rounds.

    observe -> reconcile -> further needs | children | deletions | status -> observe ...

A look ends when the decision changes nothing. A failed look is repeated after a back-off, from a new observation.
A decision takes milliseconds, because plans are found elsewhere (plan_service.py): if one is missing the look waits for
it briefly, then ends, and the job returns to the queue once the plan is known. Between a decision and its reservations
nothing else runs, so each decision sees the reservations of the previous one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from spillway.api.status import Escalation
from spillway.planning.known_plans import PlanMissing, only_known

from .decide.observed import Desired, JobObject, Observed
from .decide.reconcile import reconcile
from .exporter import OperatorExporter
from .kube.api_client import ApiError, RequestRejected, Unavailable
from .kube.apply import DONE, Applied, Applier
from .kube.events import EventPoster
from .kube.key_queue import KeyQueue
from .kube.store import Key, known_attempts
from .log import about
from .observe import Observer, Sight
from .plan_service import PlanService
from .progress.outbox import ProgressOutbox, Received

logger = logging.getLogger(__name__)

MOST_ROUNDS = 6
"""Rounds of one look: needs, children, status, nothing; and two more for races."""
PLAN_SECONDS = 0.25
"""How long a look waits for a missing plan; most take less."""
UNWATCHED_SECONDS = 30.0
"""Interval between looks at an attempt that no watch reports."""


@dataclass(frozen=True, slots=True)
class Round:
    """Result of a round, for the next one."""

    needs: frozenset[str] = frozenset()
    applied: Applied = DONE


@dataclass(frozen=True, slots=True)
class JobCallbacks:
    """Callbacks for TrainingJob events."""

    forget: Callable[[Key], None]
    """A job was deleted, or replaced by another one of the same name."""
    ran_out: Callable[[JobObject, Iterable[Escalation]], None]
    """The status first reports that these attempts ran out of memory."""


class Worker:
    def __init__(
        self,
        queue: KeyQueue[Key],
        observer: Observer,
        applier: Applier,
        outbox: ProgressOutbox,
        events: EventPoster,
        exporter: OperatorExporter,
        plans: PlanService,
        callbacks: JobCallbacks,
    ) -> None:
        self._queue = queue
        self._observer = observer
        self._applier = applier
        self._outbox = outbox
        self._events = events
        self._exporter = exporter
        self._plans = plans
        self._callbacks = callbacks
        self._uids: dict[Key, str] = {}
        """Uids of the TrainingJobs that were processed."""

    async def run(self) -> None:
        while True:
            key = await self._queue.get()
            try:
                await self.look(key)
            finally:
                self._queue.done(key)

    async def look(self, key: Key) -> None:
        """Processes one job. Never raises: errors are logged, counted and retried later."""
        began, result = time.monotonic(), "done"
        try:
            if await self._rounds(key):
                self._queue.succeeded(key)
            else:  # decisions that keep changing are retried later, not in a tight loop
                result = "restless"
                seconds = self._queue.retry(key)
                logger.warning(
                    "the job still needed changes after %d rounds; retry in %.1f s",
                    MOST_ROUNDS,
                    seconds,
                    extra=about(key),
                )
        except Unavailable as error:
            result = "unavailable"
            seconds = self._queue.retry(key, unanswered=True)
            logger.warning("%s; retry in %.1f s", error, seconds, extra=about(key))
        except ApiError as error:
            result = "rejected" if isinstance(error, RequestRejected) else "raced"
            logger.warning("%s; retry in %.1f s", error, self._queue.retry(key), extra=about(key))
        except Exception:
            result = "failed"
            seconds = self._queue.retry(key)
            logger.exception("reconciling failed; retry in %.1f s", seconds, extra=about(key))
        self._exporter.reconcile(result, time.monotonic() - began)

    async def _rounds(self, key: Key) -> bool:
        """Runs rounds until nothing changes; returns whether that happened."""
        left = Round()
        for _ in range(MOST_ROUNDS):
            sight = await self._observer.observe(key, left.needs)
            if sight is None:
                self._uids.pop(key, None)
                self._callbacks.forget(key)
                return True
            self._meet(sight.observed.job)
            observed = self._answered(sight.observed, left.applied)
            desired = await self._decide(observed)
            if desired is None:
                return True
            if missing := desired.needs - left.needs:
                left = replace(left, needs=left.needs | missing)
                continue
            if desired.changes_nothing:
                self._settle(key, observed, desired, sight)
                return True
            left = await self._apply(observed, desired)
        return False

    def _meet(self, job: JobObject) -> None:
        """Forgets the state of a deleted job if another one now has its name."""
        if self._uids.setdefault(job.key, job.uid) != job.uid:
            self._uids[job.key] = job.uid
            self._callbacks.forget(job.key)

    def _answered(self, observed: Observed, applied: Applied) -> Observed:
        """`observed` with the last round's errors and the report that may be written."""
        answered = replace(observed, conflict=applied.conflict, rejection=applied.rejection)
        key, uid = observed.job.key, observed.job.uid
        # The newest report of an ended attempt is its last: it need not wait for its turn.
        lives = any(attempt.owner_uid == uid and not attempt.outcome for attempt in observed.attempts)
        return _with_report(answered, self._outbox.released(key) if lives else self._outbox.newest(key))

    async def _decide(self, observed: Observed) -> Desired | None:
        """Makes a decision; None if a plan is missing, which adds the job to the queue once it is known.

        The caller must reserve what it creates before it awaits, so that the next decision sees it.
        """
        while True:
            now = observed if observed.contracts is None else self._observer.as_of_now(observed)
            try:
                with only_known():
                    desired, seconds = _timed(now)
            except PlanMissing as missing:
                await self._plans.ask(observed.job.key, missing.questions)
                if not await self._plans.answered(missing.questions, PLAN_SECONDS):
                    return None
            else:
                self._exporter.decision(seconds)
                return desired

    async def _apply(self, observed: Observed, desired: Desired) -> Round:
        """Writes children, deletions, then the status; not the status if a child was rejected."""
        job = observed.job
        if desired.creates:
            self._observer.reserve(job, desired.creates)
            applied = await self._applier.create(job, desired.creates)
            if applied != DONE:
                return Round(frozenset({"contracts"}) if applied.superseded else frozenset(), applied)
        await self._applier.delete(job, desired.deletes)
        if desired.status is not None:
            await self._write_status(observed, desired)
        return Round(applied=Applied(observed.conflict, observed.rejection))

    async def _write_status(self, observed: Observed, desired: Desired) -> None:
        """Writes the status, including the newest report even if it was not due."""
        job = observed.job
        newest = self._outbox.newest(job.key)
        informed = _with_report(observed, newest)
        if informed.progress is not observed.progress and not desired.creates:
            again = await self._decide(informed)
            if (
                again is not None
                and again.status is not None
                and again.creates == ()
                and again.deletes == desired.deletes
            ):
                desired, observed = again, informed
        assert desired.status is not None
        written = await self._applier.write_status(job, desired.status)
        if newest is not None and newest.report is observed.progress:
            self._outbox.written(job.key, newest, time.monotonic())
        if written:
            self._callbacks.ran_out(job, desired.ran_out)
            for count in desired.counts:
                self._exporter.count(count.metric, count.value, job.namespace, count.label)
            for event in desired.events:
                self._events.note(job, event)

    def _settle(self, key: Key, observed: Observed, desired: Desired, sight: Sight) -> None:
        """Ends a look without changes: schedules the next one and marks the due report as written."""
        for event in desired.events:
            self._events.note(observed.job, event)
        due = self._outbox.released(key)
        if due is not None:  # the status already contains it
            self._outbox.written(key, due, time.monotonic())
        if sight.unwatched:
            self._queue.add_after(key, UNWATCHED_SECONDS)
        if desired.look_again_seconds is not None:
            self._queue.add_after(key, desired.look_again_seconds)


def _timed(observed: Observed) -> tuple[Desired, float]:
    """A decision, and how many seconds it took."""
    began = time.perf_counter()
    desired = reconcile(observed, _now())
    return desired, time.perf_counter() - began


def _with_report(observed: Observed, received: Received | None) -> Observed:
    """`observed` with the report, if it is the current attempt's, whose Job may already be deleted."""
    own = [attempt.attempt for attempt in observed.attempts if attempt.owner_uid == observed.job.uid]
    present = max([*own, known_attempts(observed.job)])
    if received is None or (received.job_uid, received.attempt) != (observed.job.uid, present):
        return observed
    return replace(observed, progress=received.report, progress_time=received.time)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
