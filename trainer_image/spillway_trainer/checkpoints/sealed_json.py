"""JSON files in which every changed bit is detected: the first line holds the hash of all bytes after it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import xxhash

_SEAL = re.compile(rb'\{"xxh3_128": "([0-9a-f]{32})",\n')


class Unsealed(Exception):
    """A sealed file whose bytes differ from those written; the text says what was found."""


def seal(fields: Mapping[str, Any]) -> bytes:
    """Returns JSON whose first line holds the hash of all bytes after it, so that every changed bit is detected."""
    body = json.dumps(fields, indent=1, allow_nan=False).removeprefix("{\n").encode()
    return f'{{"xxh3_128": "{xxhash.xxh3_128_hexdigest(body)}",\n'.encode() + body + b"\n"


def unseal(content: bytes) -> dict[str, Any]:
    """Returns the fields of a sealed file. Raises Unsealed when any byte differs from what was written."""
    match = _SEAL.match(content)
    if match is None:
        raise Unsealed(f"{len(content)} bytes that do not begin with a checksum")
    body = content[match.end() :].removesuffix(b"\n")
    if match.end() + len(body) + 1 != len(content):
        raise Unsealed(f"{len(content)} bytes that do not end with a newline")
    found = xxhash.xxh3_128_hexdigest(body)
    if found != match[1].decode():
        raise Unsealed(f"content with checksum {found}, but another checksum in its first line")
    try:
        fields: dict[str, Any] = json.loads(b"{" + body)
    except ValueError as error:
        raise Unsealed(f"content that is not JSON: {error}") from error
    return fields
