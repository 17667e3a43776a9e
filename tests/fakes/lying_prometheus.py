"""A fake Prometheus over HTTP that answers the operator's queries, either correctly or in one of the ways to fail."""

from __future__ import annotations

import http.server
import json
import random
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import parse_qsl, urlsplit

from spillway.placement.node_signals import DISK_SERIES, HOST_SERIES, STALLED_SERIES


class Health(StrEnum):
    WELL = "well"
    KILLED = "killed"
    HANGING = "hanging"
    """accepts the query and never answers"""
    GARBAGE = "garbage"
    EMPTY = "empty"
    STALE = "stale"
    """answers with figures whose time stamp is ten minutes old"""
    LYING = "lying"
    """each figure is multiplied or divided by the node's `lies`, so that the worse node looks better"""


STALE_SECONDS = 600.0
GARBAGE = (
    b"<html><h1>502 Bad Gateway</h1></html>",
    b"",
    b"null",
    b'{"status": "success"}',
    b'{"status": "success", "data": {"result": [{"metric": 3, "value": [1, "2"]}]}}',
    b"[" * 100_000,
    random.Random(10).randbytes(4096),
)


@dataclass(frozen=True, slots=True)
class NodeTruth:
    host_bytes: float
    disk_bytes: float
    memory_stalled: float
    lies: float
    """factor by which a lie multiplies the node's free bytes, and divides its stalled time"""

    def value(self, series: str, lying: bool) -> float:
        factor = self.lies if lying else 1.0
        if series == STALLED_SERIES:
            return self.memory_stalled / factor
        return {HOST_SERIES: self.host_bytes, DISK_SERIES: self.disk_bytes}[series] * factor


class LyingPrometheus:
    """A fake Prometheus that answers correctly until `become` is called."""

    def __init__(self, nodes: Mapping[str, NodeTruth]) -> None:
        self.health = Health.WELL
        self.num_questions = 0
        self._nodes = nodes
        self._ended = threading.Event()
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fake._answer(self)

            def log_message(self, format: str, *arguments: object) -> None:
                """Logs nothing, because nobody would read it."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def become(self, health: Health) -> None:
        self.health = health
        if health is Health.KILLED:
            self.close()

    def close(self) -> None:
        """Stops the server; nobody listens on its port afterwards."""
        if not self._ended.is_set():
            self._ended.set()
            self._server.shutdown()
            self._server.server_close()

    def _answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        self.num_questions += 1
        health = self.health
        if health is Health.HANGING:
            self._ended.wait()
        body = GARBAGE[self.num_questions % len(GARBAGE)] if health is Health.GARBAGE else self._vector(handler.path)
        with suppress(OSError):  # the client may have closed the connection
            handler.send_response(200)
            handler.send_header("Content-Type", "application/json")
            handler.send_header("Content-Length", str(len(body)))
            handler.end_headers()
            handler.wfile.write(body)

    def _vector(self, path: str) -> bytes:
        query = dict(parse_qsl(urlsplit(path).query)).get("query", "")
        evaluated = time.time() - (STALE_SECONDS if self.health is Health.STALE else 0.0)
        nodes = {} if self.health is Health.EMPTY else self._nodes
        result = [
            {"metric": {"node": name, "mountpoint": "/"},
             "value": [evaluated, str(truth.value(series, self.health is Health.LYING))]}
            for series in (HOST_SERIES, DISK_SERIES, STALLED_SERIES) if series in query
            for name, truth in nodes.items()
        ]  # fmt: skip
        return json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}}).encode()
