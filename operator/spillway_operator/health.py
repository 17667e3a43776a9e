"""Health: serves /healthz, /readyz and /metrics.

Liveness checks without writing anything: complete lists are compared with what the watches reported (audit.py), and the
event loop's lag is measured. A dead task needs no probe: it ends the process.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from aiohttp import web

from spillway.errors import UserError

from .exporter import OperatorExporter

LAG_INTERVAL_SECONDS = 0.5
LAG_WINDOW_SECONDS = 60.0
LONGEST_LAG_SECONDS = 30.0
"""With a longer lag of the event loop, the process is not alive."""


class LoopLag:
    """Measures the longest delay of a timer in the event loop in the last minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lags: deque[tuple[float, float]] = deque()
        """(time, seconds) with decreasing seconds: the first is the maximum."""

    async def run(self) -> None:
        while True:
            began = self._clock()
            await asyncio.sleep(LAG_INTERVAL_SECONDS)
            self.saw(self._clock() - began - LAG_INTERVAL_SECONDS)

    def saw(self, seconds: float) -> None:
        while self._lags and self._lags[-1][1] <= seconds:
            self._lags.pop()
        self._lags.append((self._clock(), seconds))

    @property
    def longest(self) -> float:
        while self._lags and self._clock() - self._lags[0][0] > LAG_WINDOW_SECONDS:
            self._lags.popleft()
        return self._lags[0][1] if self._lags else 0.0


class HealthServer:
    """Serves the endpoints. `problem()` says why the operator is not alive, `not_ready()` why not ready; or ""."""

    def __init__(self, exporter: OperatorExporter, problem: Callable[[], str], not_ready: Callable[[], str]) -> None:
        self._exporter = exporter
        self._problem = problem
        self._not_ready = not_ready

    async def serve(self, port: int) -> web.AppRunner:
        """Starts the server. Raises UserError when the port is not available."""
        application = web.Application()
        application.router.add_get("/healthz", self._healthz)
        application.router.add_get("/readyz", self._readyz)
        application.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, port=port).start()
        except OSError as error:
            raise UserError(f"health port {port}: {error}; set another one (SPILLWAY_HEALTH_PORT)") from error
        return runner

    async def _healthz(self, _: web.Request) -> web.Response:
        return _said(self._problem())

    async def _readyz(self, _: web.Request) -> web.Response:
        return _said(self._not_ready())

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._exporter.text(), headers={"Content-Type": "text/plain; version=0.0.4"})


def _said(problem: str) -> web.Response:
    return web.Response(text=problem or "ok", status=503 if problem else 200)
