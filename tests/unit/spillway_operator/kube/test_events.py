"""Events for people, and log lines for machines."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
from collections import Counter

from fakes.fake_api import FakeApi
from harness.operator_parts import KEY, Counts, put_job, with_cluster
from harness.patience import until
from spillway_operator.decide.observed import EventNote
from spillway_operator.kube.api_client import ApiClient
from spillway_operator.kube.events import LONGEST_NOTE, MOST_WAITING, EventPoster
from spillway_operator.log import JsonFormatter, about

PLANNED = EventNote("Normal", "Planned", "Plan", "18 MiB on the device")


async def posted(poster: EventPoster, results: Counter[str], total: int) -> None:
    """Let it post what waits, until so many events have come to something."""
    task = asyncio.create_task(poster.run())
    await until(lambda: results.total() >= total)
    assert not task.done()
    task.cancel()


def test_event_regards_the_training_job_and_is_not_repeated_too_soon() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        now, results = 100.0, Counter[str]()
        poster = EventPoster(client, lambda result: results.update([result]), lambda: now)
        job = put_job(api)
        poster.note(job, PLANNED)
        poster.note(job, PLANNED)
        poster.note(job, EventNote("Warning", "Failed", "Fail", "é" * LONGEST_NOTE))
        now += 601.0
        poster.note(job, PLANNED)
        await posted(poster, results, 4)
        assert results == {"posted": 3, "repeated": 1}
        first, long, _again = api.bodies
        assert first["regarding"]["uid"] == job.uid
        assert (first["type"], first["reason"], first["note"]) == ("Normal", "Planned", "18 MiB on the device")
        assert first["metadata"]["name"].startswith("demo.")
        assert len(long["note"].encode()) == LONGEST_NOTE

    with_cluster(scenario)


def test_an_event_that_cannot_be_posted_is_counted_and_forgotten() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        results = Counter[str]()
        poster = EventPoster(client, lambda result: results.update([result]))
        job = put_job(api)
        api.fail("POST", "events", 403)
        for number in range(MOST_WAITING + 3):
            poster.note(job, EventNote("Normal", "Planned", "Plan", str(number)))
        assert results["failed"] == 3
        poster._waiting = asyncio.Queue()
        poster.note(job, PLANNED)
        await posted(poster, results, 4)
        assert results == {"failed": 4}

    with_cluster(scenario)


def line_of(*arguments: object, **extra: object) -> dict[str, object]:
    stream = io.StringIO()
    logger = logging.getLogger("test of lines")
    logger.propagate = False
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger.handlers[:] = [handler]
    logger.warning(*arguments, extra=about(KEY, 3), **extra)  # type: ignore[arg-type]
    (line,) = stream.getvalue().splitlines()
    return dict(json.loads(line))


def test_a_log_line_is_one_json_object_about_one_job() -> None:
    line = line_of("created %s\nin two lines", "Job")
    assert line["message"] == "created Job\nin two lines"
    assert (line["level"], line["job"], line["attempt"]) == ("WARNING", "team/demo", 3)
    assert str(line["time"]).endswith("Z")


def test_a_log_line_carries_the_traceback() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        line = line_of("failed", exc_info=sys.exc_info())
    assert "ValueError: broken" in str(line["exception"])
