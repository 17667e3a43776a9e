"""The progress endpoint: HTTPS, where rank 0 of each job posts its progress (spillway.api.progress).

A post is answered at once with the current attempt's number; the newest report of each job is kept and written a few
times a minute (outbox.py). Everything that a client can send is limited: bodies to 64 KiB, unknown tokens and posts per
job by rate.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
import time
from asyncio.sslproto import SSLProtocol
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path

from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError
from pydantic import ValidationError

from spillway.api.progress import LONGEST_REPORT, ProgressAnswer, ProgressReport
from spillway.errors import UserError
from spillway.feedback.live_correction import lowered

from ..kube.api_client import ApiError
from ..kube.store import Key
from ..log import about
from ..settings import AUTHORITY, CERTIFICATE, PRIVATE_KEY
from .outbox import ProgressOutbox, Received
from .token_reviews import Forbidden, Sender, TokenReviews, TooManyReviews, Unauthenticated

logger = logging.getLogger(__name__)

POSTS_PER_SECOND = 2.0
"""Sustained rate of posts per job."""
MOST_POSTS_AT_ONCE = 10.0
"""Largest burst of posts per job."""
BODY_SECONDS = 10.0
"""Time for the whole body to arrive."""
RELOAD_SECONDS = 10.0
"""Interval between checks of the certificate's files."""
KEEP_ALIVE_SECONDS = 75.0
"""Longer than the trainer's posting interval, so that a job keeps its connection."""
MOST_KEPT = 256
"""Connections kept open, 60 KiB of TLS state each. With more jobs, some reconnect for each post, in a millisecond."""
TLS_BUFFER_BYTES = 16 * 1024
"""Read buffer of a connection: one TLS record. asyncio's 256 KiB would be 250 MB for a thousand trainers."""
END_SECONDS = 1.0
"""Time for posts in progress when the endpoint ends."""


class _Rejection(Exception):
    """A rejected post: HTTP status, message, and seconds after which it may be repeated."""

    def __init__(self, code: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after

    def response(self) -> web.Response:
        headers = {} if self.retry_after is None else {hdrs.RETRY_AFTER: str(self.retry_after)}
        return web.json_response({"error": str(self)}, status=self.code, headers=headers)


class Certificate:
    """The endpoint's certificate and key, and the authority that pods trust; read again when they change."""

    def __init__(self, directory: Path) -> None:
        """Raises UserError when the files are not a valid certificate."""
        self._directory = directory
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.authority = ""
        self.expiry: float | None = None
        """Unix time; None: the certificate does not say."""
        self._seen: tuple[bytes, ...] = ()
        try:
            self._load(self._read())
        except (OSError, ValueError) as error:
            raise UserError(
                f"{directory}: {error}; the directory must contain {CERTIFICATE}, {PRIVATE_KEY} and {AUTHORITY}"
            ) from error

    async def run(self) -> None:
        while True:
            await asyncio.sleep(RELOAD_SECONDS)
            self.reload()

    def reload(self) -> None:
        """Makes new connections use the current files; half-written ones are retried at the next check."""
        try:
            found = self._read()
            if found != self._seen:
                self._load(found)
                logger.info("the certificate in %s changed and was reloaded", self._directory)
        except (OSError, ValueError) as error:
            logger.warning("%s: %s; keeping the current certificate", self._directory, error)

    def _read(self) -> tuple[bytes, ...]:
        return tuple((self._directory / name).read_bytes() for name in (CERTIFICATE, PRIVATE_KEY, AUTHORITY))

    def _load(self, found: tuple[bytes, ...]) -> None:
        self.context.load_cert_chain(self._directory / CERTIFICATE, self._directory / PRIVATE_KEY)
        self.authority = found[2].decode()
        self.expiry = _expiry(found[0].decode())
        self._seen = found


def _expiry(certificate: str) -> float | None:
    """notAfter of the first certificate in a PEM text: the second of the two times that follow each other in its DER.
    The standard library parses certificates of peers only."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    der = ssl.PEM_cert_to_DER_cert(begin + certificate.partition(begin)[2].partition(end)[0] + end)
    found = re.search(rb"(?:\x17\x0d\d{12}|\x18\x0f\d{14})Z(?:\x17\x0d(\d{12})|\x18\x0f(\d{14}))Z", der)
    if found is None:
        return None
    time = (found[2] or (b"20" if found[1] < b"5" else b"19") + found[1]).decode()
    return datetime.strptime(time + "+0000", "%Y%m%d%H%M%S%z").timestamp()


class PostLimit:
    """Limits the posts of each job: a token bucket."""

    def __init__(self) -> None:
        self._left: dict[Key, tuple[float, float]] = {}

    def allows(self, key: Key, now: float) -> bool:
        left, since = self._left.get(key, (MOST_POSTS_AT_ONCE, now))
        left = min(MOST_POSTS_AT_ONCE, left + (now - since) * POSTS_PER_SECOND)
        self._left[key] = (max(0.0, left - 1.0) if left >= 1.0 else left, now)
        return left >= 1.0

    def forget(self, key: Key) -> None:
        self._left.pop(key, None)


class ProgressEndpoint:
    """Receives reports. Calls `enqueue(key)` when a report of `key` may be written, `accepted` with each accepted one,
    `count(code)` once per post. Before `knows_attempts()`, posts are answered with 503. Only jobs for which
    `is_corrected` holds are answered with live corrections."""

    def __init__(
        self,
        reviews: TokenReviews,
        outbox: ProgressOutbox,
        enqueue: Callable[[Key], None],
        accepted: Callable[[Key, Received], None],
        count: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
        knows_attempts: Callable[[], bool] = lambda: True,
        is_corrected: Callable[[Key], bool] = lambda _key: False,
    ) -> None:
        self._knows_attempts = knows_attempts
        self._is_corrected = is_corrected
        self._reviews = reviews
        self._outbox = outbox
        self._enqueue = enqueue
        self._accepted = accepted
        self._count = count
        self._clock = clock
        self._limit = PostLimit()
        self._arrived = asyncio.Event()
        self._num_connections: Callable[[], int] = lambda: 0
        self._hears_since: float | None = None
        self._last_heard: tuple[tuple[Key, float], ...] = ()
        """The job that reported last, and the last other job before it, with times."""

    def application(self) -> web.Application:
        application = web.Application(client_max_size=LONGEST_REPORT, middlewares=[self._counted])
        application.router.add_post("/progress", self._post)
        return application

    async def serve(self, port: int, context: ssl.SSLContext | None) -> web.AppRunner:
        """Starts the server. Raises UserError when the port is not available."""
        SSLProtocol.max_size = TLS_BUFFER_BYTES  # for all connections of this process: there is no parameter for it
        runner = web.AppRunner(
            self.application(), access_log=None, keepalive_timeout=KEEP_ALIVE_SECONDS, shutdown_timeout=END_SECONDS
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, port=port, ssl_context=context, backlog=2048).start()
        except OSError as error:
            raise UserError(f"progress port {port}: {error}; set another one (SPILLWAY_PROGRESS_PORT)") from error
        server = runner.server
        assert server is not None, "set up"
        self._num_connections = lambda: len(server.connections)
        self._hears_since = self._clock()
        return runner

    def hearing_seconds(self) -> float | None:
        """How long posts could be received and checked without interruption; None if nothing is served. A post that
        failed with a 5xx (for example, the API server could not check its token) is an interruption."""
        return None if self._hears_since is None else self._clock() - self._hears_since

    def others_silent_seconds(self, key: Key) -> float:
        """Seconds since a trainer of another job reported; infinite if none has."""
        return next((self._clock() - when for heard, when in self._last_heard if heard != key), float("inf"))

    async def flush(self) -> None:
        """Releases reports as the limits allow, endlessly."""
        while True:
            self._arrived.clear()
            now = self._clock()
            if (key := self._outbox.release(now)) is not None:
                self._enqueue(key)
                continue
            try:
                async with asyncio.timeout(self._outbox.seconds_to_next(now)):
                    await self._arrived.wait()
            except TimeoutError:
                pass

    def forget(self, key: Key) -> None:
        self._limit.forget(key)
        self._outbox.forget(key)

    @web.middleware
    async def _counted(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            response = await handler(request)
        except web.HTTPException as error:  # unknown path or method
            response = _Rejection(error.status, error.reason).response()
        except Exception:
            logger.exception("a progress post failed")
            response = _Rejection(500, "internal error of the operator; see its log").response()
        if response.status >= 500 and self._hears_since is not None:
            self._hears_since = self._clock()
        if self._num_connections() > MOST_KEPT:
            response.force_close()
        self._count(response.status)
        return response

    async def _post(self, request: web.Request) -> web.Response:
        try:
            if not self._knows_attempts():
                raise _Rejection(503, "the operator is starting; try again", retry_after=1)
            sender = await self._reviews.sender(_bearer(request))
            if not self._limit.allows(sender.key, self._clock()):
                raise _Rejection(
                    429, f"this job posts more than {POSTS_PER_SECOND:g} reports a second; post fewer", retry_after=1
                )
            return self._accept(sender, await _body(request))
        except _Rejection as rejection:
            return rejection.response()
        except Unauthenticated as error:
            return _Rejection(401, str(error)).response()
        except Forbidden as error:
            return _Rejection(403, str(error)).response()
        except TooManyReviews as error:
            return _Rejection(429, str(error), retry_after=1).response()
        except ApiError as error:
            logger.warning("cannot check a token: %s", error)
            return _Rejection(503, "the API server did not answer; try again", retry_after=5).response()

    def _accept(self, sender: Sender, body: bytes) -> web.Response:
        try:
            report = ProgressReport.model_validate_json(body)
        except ValidationError as error:
            raise _Rejection(422, _first_problem(error)) from None
        if report.spillway is not None and report.spillway.epoch != sender.attempt:
            raise _Rejection(
                422,
                f"spillway.epoch = {report.spillway.epoch}: must be {sender.attempt}, because the pod belongs to "
                f"attempt {sender.attempt}",
            )
        activations = None
        if sender.attempt == sender.present_attempt:  # otherwise the answer is only the current attempt's number
            received = Received(report, sender.job_uid, sender.attempt, _now())
            now = self._clock()
            self._last_heard = ((sender.key, now), *(last for last in self._last_heard if last[0] != sender.key))[:2]
            self._outbox.put(sender.key, received, now)
            self._accepted(sender.key, received)
            self._arrived.set()
            activations = self._correction(sender.key, report)
        else:
            logger.info("ignored a progress report of an earlier attempt", extra=about(sender.key, sender.attempt))
        answer = ProgressAnswer(epoch=sender.present_attempt, activations=activations)
        text = answer.model_dump_json(by_alias=True, exclude_none=True)
        return web.Response(text=text, content_type="application/json")

    def _correction(self, key: Key, report: ProgressReport) -> int | None:
        """The live correction for this report alone: if the answer is lost, the next report gets it again."""
        volume = None if report.spillway is None else report.spillway.spill_volume
        left = None if volume is None else lowered(volume)
        return left if left is not None and self._is_corrected(key) else None


def _bearer(request: web.Request) -> str:
    scheme, _, token = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip() or not token.isascii():
        raise Unauthenticated(
            "header Authorization: missing or not valid; send Bearer TOKEN, with the token mounted into the pod"
        )
    return token.strip()


async def _body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise _Rejection(413, f"report too long: at most {LONGEST_REPORT} bytes") from None
    except TimeoutError:
        raise _Rejection(408, f"the report did not arrive in {BODY_SECONDS:g} s") from None
    except (ConnectionError, web.RequestPayloadError, HttpProcessingError):  # incomplete, or wrongly encoded
        raise _Rejection(400, "the report is incomplete, or not encoded as its headers say") from None


def _first_problem(error: ValidationError) -> str:
    """The first problem, without the value, which may be as long as the body."""
    problem = error.errors(include_input=False, include_url=False)[0]
    where = ".".join(map(str, problem["loc"]))[:200]
    return f"{where}: {problem['msg']}"[:500] if where else str(problem["msg"])[:500]


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
