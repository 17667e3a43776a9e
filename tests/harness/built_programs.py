"""Programs that the test bed built (hack/testbed/binaries.py), for tests that need no cluster."""

from __future__ import annotations

import shutil

from testbed import binaries


def built_program(name: str, otherwise: str = "") -> str | None:
    """As this checkout's test bed has it, from its cache; `otherwise`: one in PATH that does, too. Builds none."""
    found = binaries.built(name)
    return str(found) if found else shutil.which(otherwise) if otherwise else None
