"""Logs one JSON object per line, which log stores can search without a parser.

{"time": "...", "level": "INFO", "logger": "...", "message": "...", "job": "team/demo", "attempt": 2}
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

QUIET_LOGGERS = ("kopf", "aiohttp.access")
"""Loggers that report every event or request at INFO; only their warnings are kept."""
NOT_FOUND = 404


class JsonFormatter(logging.Formatter):
    """Formats a record as JSON; `job` and `attempt` come from `about`, `exception` from the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in ("job", "attempt"):
            if (value := record.__dict__.get(name)) is not None:
                line[name] = value
        if record.exc_info and not is_not_found(record.exc_info[1]):
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def is_not_found(error: BaseException | None) -> bool:
    """Whether it was caused by a 404 in kopf: a watched kind is no longer served. A traceback would add nothing."""
    while error is not None and getattr(error, "status", None) != NOT_FOUND:
        error = error.__cause__ or error.__context__
    return error is not None


def about(key: tuple[str, str], attempt: int | None = None) -> dict[str, object]:
    """The `extra` of a log call: the TrainingJob (namespace/name) and its attempt."""
    return {"job": "/".join(key), "attempt": attempt}


def start_logging(level: str, stream: TextIO | None = None) -> None:
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
