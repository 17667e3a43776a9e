"""A progress endpoint on the standard library's HTTP server: it records reports, and answers as a test configures
it."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from spillway.api.progress import ProgressAnswer, ProgressReport


@dataclass
class Operator:
    """Stands in for the operator."""

    reports: list[ProgressReport] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    connections: int = 0
    status: int = 200
    epoch: int = 1
    activations: Callable[[ProgressReport], int | None] = lambda report: None
    """report -> `activations` of its answer"""
    answers: threading.Event = field(default_factory=threading.Event)
    drops_next: bool = False
    """if True, the next request is not answered, and its connection is closed"""
    server: http.server.ThreadingHTTPServer = field(init=False)

    def __post_init__(self) -> None:
        self.answers.set()
        operator = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                operator.connections += 1
                super().setup()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if operator.drops_next:
                    operator.drops_next = False
                    self.close_connection = True
                    return
                report = ProgressReport.model_validate_json(body)
                operator.tokens.append(self.headers["Authorization"])
                operator.reports.append(report)
                operator.answers.wait()
                answer = operator.answer(report).model_dump_json().encode()
                self.send_response(operator.status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, report: ProgressReport) -> ProgressAnswer:
        return ProgressAnswer(version=1, epoch=self.epoch, activations=self.activations(report))

    def close(self) -> None:
        self.answers.set()
        self.server.shutdown()
        self.server.server_close()

    @property
    def port(self) -> int:
        return int(self.server.server_address[1])

    @property
    def steps(self) -> list[int]:
        return [report.spillway.step for report in self.reports if report.spillway]
