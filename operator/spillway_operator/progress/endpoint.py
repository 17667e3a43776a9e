"""The HTTPS endpoint to which rank 0 of each job posts its progress (spillway.api.progress).

A post is answered at once with the present epoch; the newest report of each job is kept and written a few times a
minute (progress_outbox.py). Everything that a stranger can send is bounded: bodies at 64 KiB, unknown tokens at so many
a second, and posts of one job too.
"""

from __future__ import annotations

import asyncio
import logging
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
"""of one job, and"""
MOST_POSTS_AT_ONCE = 10.0
BODY_SECONDS = 10.0
"""for the whole body to arrive"""
RELOAD_SECONDS = 10.0
"""between two looks at the certificate's files"""
KEEP_ALIVE_SECONDS = 75.0
"""longer than the trainer's posting interval, so that a job keeps its connection"""
MOST_KEPT = 256
"""connections; one is 60 KiB of TLS. Of more jobs some begin a new one with each post: a millisecond"""
TLS_BUFFER_BYTES = 16 * 1024
"""for what a connection reads: a TLS record. asyncio takes 256 KiB for each, 250 MB for a thousand trainers"""
END_SECONDS = 1.0
"""for posts under way when the endpoint ends"""


class _Refusal(Exception):
    """A post is not accepted: HTTP status, a sentence, and seconds after which it may be repeated."""

    def __init__(self, code: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after

    def response(self) -> web.Response:
        headers = {} if self.retry_after is None else {hdrs.RETRY_AFTER: str(self.retry_after)}
        return web.json_response({"error": str(self)}, status=self.code, headers=headers)


class Certificate:
    """Certificate and key of the endpoint, and the authority that pods shall trust; read again when they change."""

    def __init__(self, directory: Path) -> None:
        """Raises UserError when the files do not make a certificate."""
        self._directory = directory
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.authority = ""
        self._seen: tuple[bytes, ...] = ()
        try:
            self._load(self._read())
        except (OSError, ValueError) as error:
            raise UserError(
                f"{directory}: {error}; it must hold {CERTIFICATE}, {PRIVATE_KEY} and {AUTHORITY}"
            ) from error

    async def run(self) -> None:
        while True:
            await asyncio.sleep(RELOAD_SECONDS)
            self.reload()

    def reload(self) -> None:
        """New connections use what the files say now; half-written ones are left for the next look."""
        try:
            found = self._read()
            if found != self._seen:
                self._load(found)
                logger.info("the certificate in %s changed and is in use", self._directory)
        except (OSError, ValueError) as error:
            logger.warning("%s: %s; the certificate in use stays", self._directory, error)

    def _read(self) -> tuple[bytes, ...]:
        return tuple((self._directory / name).read_bytes() for name in (CERTIFICATE, PRIVATE_KEY, AUTHORITY))

    def _load(self, found: tuple[bytes, ...]) -> None:
        self.context.load_cert_chain(self._directory / CERTIFICATE, self._directory / PRIVATE_KEY)
        self.authority = found[2].decode()
        self._seen = found


class PostLimit:
    """Posts that each job may still send: a bucket that fills with time."""

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
    """`enqueue(key)` is called when a report of `key` may be written, `accepted` with each one that is believed,
    `count(code)` once per post. Until `knows_attempts()` nobody is told that it belongs to none. Only a job that
    `is_corrected` is answered with live corrections."""

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
        """the job that was heard last, and the last one before that was another"""

    def application(self) -> web.Application:
        application = web.Application(client_max_size=LONGEST_REPORT, middlewares=[self._counted])
        application.router.add_post("/progress", self._post)
        return application

    async def serve(self, port: int, context: ssl.SSLContext | None) -> web.AppRunner:
        """Start answering. Raises UserError when the port cannot be had."""
        SSLProtocol.max_size = TLS_BUFFER_BYTES  # of all connections of this process: no parameter leads there
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
        """How long posts could arrive and be believed without a break; None when nothing is served. A post that was
        turned away for a reason of ours (no API server to check its token) ends such a time."""
        return None if self._hears_since is None else self._clock() - self._hears_since

    def others_silent_seconds(self, key: Key) -> float:
        """Since a trainer of another job was heard; infinite when none was."""
        return next((self._clock() - when for heard, when in self._last_heard if heard != key), float("inf"))

    async def flush(self) -> None:
        """Release reports as the limits allow, for ever."""
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
            response = _Refusal(error.status, error.reason).response()
        except Exception:
            logger.exception("a progress post failed")
            response = _Refusal(500, "an error of the operator; its log says which").response()
        if response.status >= 500 and self._hears_since is not None:
            self._hears_since = self._clock()
        if self._num_connections() > MOST_KEPT:
            response.force_close()
        self._count(response.status)
        return response

    async def _post(self, request: web.Request) -> web.Response:
        try:
            if not self._knows_attempts():
                raise _Refusal(503, "the operator has only begun; try again", retry_after=1)
            sender = await self._reviews.sender(_bearer(request))
            if not self._limit.allows(sender.key, self._clock()):
                raise _Refusal(429, f"more than {POSTS_PER_SECOND:g} posts a second", retry_after=1)
            return self._accept(sender, await _body(request))
        except _Refusal as refusal:
            return refusal.response()
        except Unauthenticated as error:
            return _Refusal(401, str(error)).response()
        except Forbidden as error:
            return _Refusal(403, str(error)).response()
        except TooManyReviews as error:
            return _Refusal(429, str(error), retry_after=1).response()
        except ApiError as error:
            logger.warning("a token could not be checked: %s", error)
            return _Refusal(503, "the API server did not answer; try again", retry_after=5).response()

    def _accept(self, sender: Sender, body: bytes) -> web.Response:
        try:
            report = ProgressReport.model_validate_json(body)
        except ValidationError as error:
            raise _Refusal(422, _first_problem(error)) from None
        if report.spillway is not None and report.spillway.epoch != sender.attempt:
            raise _Refusal(
                422, f"spillway.epoch = {report.spillway.epoch}: the pod belongs to attempt {sender.attempt}"
            )
        activations = None
        if sender.attempt == sender.present_attempt:  # a zombie is told the present epoch, and not believed
            received = Received(report, sender.job_uid, sender.attempt, _now())
            now = self._clock()
            self._last_heard = ((sender.key, now), *(last for last in self._last_heard if last[0] != sender.key))[:2]
            self._outbox.put(sender.key, received, now)
            self._accepted(sender.key, received)
            self._arrived.set()
            activations = self._correction(sender.key, report)
        else:
            logger.info("a report of an attempt that is over", extra=about(sender.key, sender.attempt))
        answer = ProgressAnswer(epoch=sender.present_attempt, activations=activations)
        text = answer.model_dump_json(by_alias=True, exclude_none=True)
        return web.Response(text=text, content_type="application/json")

    def _correction(self, key: Key, report: ProgressReport) -> int | None:
        """Of this report alone: an answer that is lost is given again to the next one."""
        volume = None if report.spillway is None else report.spillway.spill_volume
        left = None if volume is None else lowered(volume)
        return left if left is not None and self._is_corrected(key) else None


def _bearer(request: web.Request) -> str:
    scheme, _, token = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip() or not token.isascii():
        raise Unauthenticated("send Authorization: Bearer TOKEN, with the token that is mounted into the pod")
    return token.strip()


async def _body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise _Refusal(413, f"a report has at most {LONGEST_REPORT} bytes") from None
    except TimeoutError:
        raise _Refusal(408, f"the report did not arrive in {BODY_SECONDS:g} s") from None
    except (ConnectionError, web.RequestPayloadError, HttpProcessingError):  # the sender's end, or not what it says
        raise _Refusal(400, "the report broke off, or is not encoded as its headers say") from None


def _first_problem(error: ValidationError) -> str:
    """Never the value: it may be as long as the body."""
    problem = error.errors(include_input=False, include_url=False)[0]
    where = ".".join(map(str, problem["loc"]))[:200]
    return f"{where}: {problem['msg']}"[:500] if where else str(problem["msg"])[:500]


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
