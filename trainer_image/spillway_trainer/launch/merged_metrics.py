"""One /metrics port for all ranks of a node: scrapes each rank and merges the answers.

    rank 0  127.0.0.1:40001/metrics  \\
    rank 1  127.0.0.1:40002/metrics  -> 0.0.0.0:9400/metrics
"""

from __future__ import annotations

import http.client
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from spillway.errors import UserError
from spillway.metrics import JOB_LABEL, RANK_LABEL, RANK_UP

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ANSWER_SECONDS = 1.5
"""Seconds for all ranks together: Prometheus waits 10 s for an answer, the test bed's Prometheus 2 s."""
LONGEST_EXPOSITION = 4 << 20
"""Most bytes of one rank's answer."""
CLIENT_SECONDS = 10.0
"""Seconds that a client may send nothing after it has connected."""


@dataclass(slots=True)
class MetricFamily:
    """One metric: its comments once, and the samples of every rank."""

    comments: dict[str, str] = field(default_factory=dict)
    """HELP or TYPE -> the line."""
    samples: dict[str, str] = field(default_factory=dict)
    """Name and labels -> the line."""


def merge(expositions: Mapping[int, str]) -> str:
    """Merges the ranks' answers into one exposition; a series that two ranks have is kept once, from the lower rank."""
    families: dict[str, MetricFamily] = {}
    for _, text in sorted(expositions.items()):
        name = ""
        for line in text.splitlines():
            match line.split(None, 3):
                case ["#", ("HELP" | "TYPE") as kind, name, *_]:
                    families.setdefault(name, MetricFamily()).comments.setdefault(kind, line)
                case [first, *_] if not first.startswith("#"):
                    series = series_of(line)
                    name = name if series.startswith(name) and name else series.partition("{")[0]
                    families.setdefault(name, MetricFamily()).samples.setdefault(series, line)
    return "".join(
        f"{line}\n" for family in families.values() for line in (*family.comments.values(), *family.samples.values())
    )


def series_of(sample: str) -> str:
    """`spillway_step{rank="0"} 7 1700000000` -> `spillway_step{rank="0"}`; a label's value may hold spaces."""
    end = sample.rfind("}") + 1
    return sample[:end] if end else sample.split(None, 1)[0]


@dataclass(frozen=True, slots=True)
class RankMetrics:
    """The ranks' own ports, which are asked at the same time."""

    job: str
    ports: Mapping[int, int]
    """Rank -> port on 127.0.0.1."""
    is_running: Callable[[int], bool]

    def exposition(self) -> str:
        """Returns what the ranks that answer in time say, and which ranks these are."""
        answers: dict[int, str] = {}
        threads = [
            threading.Thread(target=self._ask, args=(rank, answers), daemon=True)
            for rank in self.ports
            if self.is_running(rank)
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + ANSWER_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        in_time = dict(answers)
        return merge(in_time) + self._up(in_time)

    def _ask(self, rank: int, answers: dict[int, str]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.ports[rank], timeout=ANSWER_SECONDS)
        try:
            connection.request("GET", "/metrics", headers={"Accept": "text/plain"})
            answer = connection.getresponse()
            content = answer.read(LONGEST_EXPOSITION + 1)
            if answer.status == http.client.OK and len(content) <= LONGEST_EXPOSITION:
                answers[rank] = content.decode(errors="replace")
        except (OSError, http.client.HTTPException):
            return  # not up yet, or gone: spillway_rank_up says so
        finally:
            connection.close()

    def _up(self, answers: Mapping[int, str]) -> str:
        lines = [f"# HELP {RANK_UP.name} {RANK_UP.help}", f"# TYPE {RANK_UP.name} {RANK_UP.kind}"]
        for rank in sorted(self.ports):
            labels = f'{JOB_LABEL}="{self.job}",{RANK_LABEL}="{rank}"'
            lines.append(f"{RANK_UP.name}{{{labels}}} {int(rank in answers)}")
        return "\n".join(lines) + "\n"


class Handler(BaseHTTPRequestHandler):
    """GET /metrics, and nothing else."""

    timeout = CLIENT_SECONDS
    server: Server

    def do_GET(self) -> None:
        if self.path.partition("?")[0] not in ("/", "/metrics"):
            self.send_error(http.client.NOT_FOUND)
            return
        content = self.server.metrics.exposition().encode()
        self.send_response(http.client.OK)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Logs nothing: a scrape is no event."""


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, metrics: RankMetrics) -> None:
        super().__init__(("", port), Handler)
        self.metrics = metrics

    def server_bind(self) -> None:
        """Binds without the reverse lookup of the host's name, which HTTPServer adds and a broken DNS delays."""
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request: object, client_address: object) -> None:
        """Logs nothing: a client that went away is no event either."""


def serve(port: int, metrics: RankMetrics) -> Server:
    """Answers on `port` from a daemon thread. Raises UserError if the port cannot be opened."""
    try:
        server = Server(port, metrics)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"metrics port {port}: cannot be opened: {error}; choose another port (spillway run --metrics-port)"
        ) from error
    threading.Thread(target=server.serve_forever, daemon=True, name="metrics").start()
    return server
