"""A plain client of the test bed's API server."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from cases.crd_cases import Document


class Client:
    """A client that keeps one connection, authenticated by the admin's certificate."""

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text(encoding="utf-8"))
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        place = urlsplit(cluster["server"])
        context = ssl.create_default_context(cadata=_content(cluster, "certificate-authority").decode())
        with tempfile.NamedTemporaryFile() as pair:  # ssl reads certificate and key from files only
            pair.write(_content(user, "client-certificate") + b"\n" + _content(user, "client-key"))
            pair.flush()
            context.load_cert_chain(pair.name)
        self._connection = http.client.HTTPSConnection(place.hostname or "", place.port, context=context, timeout=30)

    def request(self, method: str, path: str, body: Document | None = None) -> tuple[int, Document]:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        self._connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = self._connection.getresponse()
        return response.status, json.loads(response.read())

    def close(self) -> None:
        self._connection.close()


def _content(owner: dict[str, Any], name: str) -> bytes:
    """The content of field `name` of a kubeconfig, which is inline or in a file that the field names."""
    if f"{name}-data" in owner:
        return base64.b64decode(owner[f"{name}-data"])
    return Path(owner[name]).read_bytes()
