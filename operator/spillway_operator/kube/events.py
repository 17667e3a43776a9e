"""Events of TrainingJobs (events.k8s.io/v1), which `kubectl describe` shows.

They are for people: posted in the background, one at a time, not repeated within REPEAT_SECONDS; failures are only
logged.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime

from spillway.api.limits import GROUP, VERSION

from ..decide.observed import EventNote, JobObject
from ..log import about
from .api_client import EVENTS, ApiClient, ApiError

logger = logging.getLogger(__name__)

REPEAT_SECONDS = 600.0
"""The same note about the same job is not repeated within this time."""
MOST_REMEMBERED = 4096
MOST_WAITING = 1000
LONGEST_NOTE = 1024
"""Longest note that the API server accepts, in bytes."""


class EventPoster:
    """Posts events; calls `count(result)` for each: posted, repeated, failed."""

    def __init__(
        self, client: ApiClient, count: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._count = count
        self._clock = clock
        self._waiting: asyncio.Queue[tuple[JobObject, EventNote]] = asyncio.Queue(MOST_WAITING)
        self._posted: OrderedDict[tuple[str, str, str], float] = OrderedDict()

    def note(self, job: JobObject, event: EventNote) -> None:
        """Queues `event` for posting, unless it was posted recently or the queue is full."""
        same, now = (job.uid, event.reason, event.note), self._clock()
        if now - self._posted.get(same, -REPEAT_SECONDS) < REPEAT_SECONDS:
            self._count("repeated")
            return
        self._posted[same] = now
        self._posted.move_to_end(same)
        if len(self._posted) > MOST_REMEMBERED:
            self._posted.popitem(last=False)
        try:
            self._waiting.put_nowait((job, event))
        except asyncio.QueueFull:
            self._failed(job, event, f"{MOST_WAITING} events are already queued")

    async def run(self) -> None:
        while True:
            job, event = await self._waiting.get()
            try:
                await self._client.create(EVENTS, job.namespace, event_object(job, event, datetime.now(UTC)))
                self._count("posted")
            except ApiError as error:
                self._failed(job, event, str(error))

    def _failed(self, job: JobObject, event: EventNote, why: str) -> None:
        self._count("failed")
        logger.warning("event %s was not posted: %s", event.reason, why, extra=about(job.key))


def event_object(job: JobObject, event: EventNote, now: datetime) -> dict[str, object]:
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": f"{job.name}.{secrets.token_hex(8)}", "namespace": job.namespace},
        "eventTime": now.isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "type": event.type,
        "reason": event.reason,
        "action": event.action,
        "note": event.note.encode()[:LONGEST_NOTE].decode(errors="ignore"),
        "regarding": {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "TrainingJob",
            "namespace": job.namespace,
            "name": job.name,
            "uid": job.uid,
            "resourceVersion": str(job.resource_version),
        },
        "reportingController": f"{GROUP}/operator",
        "reportingInstance": socket.gethostname()[:128],
    }
