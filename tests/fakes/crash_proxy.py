"""A proxy in front of the API server that can end the operator at a chosen write: before the write or before its
answer.

It serves HTTP without TLS on 127.0.0.1 and forwards requests with the caller's own credentials, so that rights and
audit log are those of the operator. It passes the streams of watches through.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp import web

WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
NOT_COUNTED = ("/tokenreviews", "/events", "/leases", "/memoryprofiles")
"""parts of paths of writes that are not counted, because they may come at any time"""
HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "host", "content-encoding"})


@dataclass(slots=True)
class Crash:
    """Ends the operator at write number `at`, counted from 1: before the API server gets the write or, with `landed`,
    after it but before the answer."""

    at: int
    landed: bool
    end_operator: Callable[[], None]
    seen: int = 0
    happened: bool = False


class CrashProxy:
    def __init__(self, upstream: str, authority: Path) -> None:
        self._upstream = upstream.rstrip("/")
        self._tls = ssl.create_default_context(cafile=str(authority))
        self._crash: Crash | None = None
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="crash-proxy")
        self.port = 0

    def __enter__(self) -> CrashProxy:
        self._thread.start()
        assert self._ready.wait(10), "the proxy did not start"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(15)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def arm(self, crash: Crash | None) -> None:
        self._crash = crash

    def _run(self) -> None:
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._ready.set()
        self._loop.run_forever()

    async def _serve(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(ssl=self._tls, limit=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        application = web.Application(client_max_size=8 * 2**20)
        application.router.add_route("*", "/{path:.*}", self._forward)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]

    async def _close(self) -> None:
        await self._session.close()  # ends the watches whose streams are passed through
        await self._runner.cleanup()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        crash = self._crash if self._counts(request) else None
        if crash is not None:
            crash.seen += 1
        strikes = crash is not None and crash.seen == crash.at
        if strikes and not crash.landed:
            return await self._end(crash)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        url = self._upstream + request.raw_path
        body = await request.read() or None
        async with self._session.request(request.method, url, headers=headers, data=body) as answer:
            if strikes:
                await answer.read()
                return await self._end(crash)
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}
            if encoding := answer.headers.get("Content-Encoding"):
                kept["Content-Encoding"] = encoding
            response = web.StreamResponse(status=answer.status, headers=kept)
            with suppress(ConnectionError, aiohttp.ClientError):  # either side closed its connection meanwhile
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
            return response

    async def _end(self, crash: Crash) -> web.StreamResponse:
        await asyncio.get_running_loop().run_in_executor(None, crash.end_operator)
        crash.happened = True
        raise web.HTTPBadGateway

    @staticmethod
    def _counts(request: web.Request) -> bool:
        return request.method in WRITES and not any(part in request.path for part in NOT_COUNTED)
