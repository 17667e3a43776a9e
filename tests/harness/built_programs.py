"""Programs that the test bed built (hack/testbed/binaries.py), for tests that need no cluster."""

from __future__ import annotations

import shutil

from testbed import binaries


def built_program(name: str, otherwise: str = "") -> str | None:
    """Path of the program that this checkout's test bed built, or else of the program `otherwise` in PATH; None if
    there is neither. Builds nothing."""
    found = binaries.built(name)
    return str(found) if found else shutil.which(otherwise) if otherwise else None
