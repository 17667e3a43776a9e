"""An S3 server (moto's) that can hold answers back, so that a test can kill a download at a chosen point."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import boto3
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


@dataclass
class S3Server:
    """A server on an address of this machine, for `with S3Server() as server:`."""

    address: str = "127.0.0.1"
    ranges: list[tuple[str, str]] = field(default_factory=list)
    """Key and range of each object that was read, in order."""
    held: str = ""
    """Suffix of keys for which only the first request is answered at once, and later ones only after `released` is
    set."""
    released: threading.Event = field(default_factory=threading.Event)
    waits: threading.Event = field(default_factory=threading.Event)
    """Set once an answer is held back."""

    def __enter__(self) -> S3Server:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._moto = DomainDispatcherApplication(create_backend_app)  # type: ignore[no-untyped-call]
        self._server = make_server(self.address, 0, self._answer, threaded=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://{self.address}:{self._server.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()

    def put(self, bucket: str, files: Mapping[str, bytes]) -> None:
        client = boto3.client(
            "s3", endpoint_url=self.url, region_name=KEYS["AWS_DEFAULT_REGION"],
            aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"], aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        )  # fmt: skip
        client.create_bucket(Bucket=bucket)
        for name, content in files.items():
            client.put_object(Bucket=bucket, Key=name, Body=content)

    def _answer(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        key = str(environ["PATH_INFO"])
        if environ["REQUEST_METHOD"] == "GET" and (span := environ.get("HTTP_RANGE")):
            self.ranges.append((key, span))
            of_this = [one for one, _ in self.ranges if one == key]
            if self.held and key.endswith(self.held) and len(of_this) > 1 and not self.released.is_set():
                self.waits.set()
                self.released.wait()
        answer: Iterable[bytes] = self._moto(environ, start)
        return answer
