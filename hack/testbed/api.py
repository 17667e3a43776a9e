"""The API server as its administrator: wait for it, read one object, apply some."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any
from urllib.request import HTTPSHandler, ProxyHandler, build_opener

from .certificates import ADMINISTRATOR, AUTHORITY
from .layout import API_SERVER, State
from .processes import run

TIMEOUT_SECONDS = 5


def ready(state: State) -> bool:
    return _get(state, "/readyz") == b"ok"


def read(state: State, path: str) -> dict[str, Any] | None:
    """None while there is no such object, or no answer."""
    body = _get(state, path)
    if body is None:
        return None
    found: dict[str, Any] = json.loads(body)
    return found


def node_ready(state: State, name: str) -> bool:
    node = read(state, f"/api/v1/nodes/{name}") or {}
    conditions = node.get("status", {}).get("conditions", [])
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def apply(state: State, objects: Iterable[dict[str, object]]) -> None:
    """Server-side, all in one list."""
    items = list(objects)
    if items:
        document = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
        kubectl: list[str | Path] = [state.bin / "kubectl", "--kubeconfig", state.kubeconfig]
        run([*kubectl, "apply", "--server-side", "--force-conflicts", "-f", "-"], stdin=document)


def _get(state: State, path: str) -> bytes | None:
    try:
        return fetch(API_SERVER + path, _credentials(state))
    except OSError:  # not there yet, or an error for an answer
        return None


def fetch(url: str, credentials: ssl.SSLContext | None = None, data: bytes | None = None) -> bytes:
    """The body at an address of the bed, never through a proxy; with `data` it is a POST. Raises OSError."""
    handlers = [HTTPSHandler(context=credentials)] if credentials else []
    with build_opener(ProxyHandler({}), *handlers).open(url, data, timeout=TIMEOUT_SECONDS) as answer:
        body: bytes = answer.read()
        return body


@cache
def _credentials(state: State) -> ssl.SSLContext:
    folder = state.certificates
    context = ssl.create_default_context(cafile=str(folder / f"{AUTHORITY}.crt"))
    context.load_cert_chain(folder / f"{ADMINISTRATOR.name}.crt", folder / f"{ADMINISTRATOR.name}.key")
    return context
