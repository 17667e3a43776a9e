"""Parses JSON from sources that may be cut off or malformed: killed processes, proxies, termination messages."""

from __future__ import annotations

import json
from typing import Any


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """The object that `text` holds; None if `text` is not JSON, holds another type, or is nested too deeply to
    parse."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
