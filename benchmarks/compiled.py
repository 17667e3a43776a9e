"""Compiles the small C programs in this directory for this processor. They show what the machine can do without us."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import rivals

HEADERS = Path(__file__).parents[1] / "csrc" / "include"


def compiled(name: str) -> ctypes.CDLL:
    """Compiles benchmarks/NAME.c to a library under build/rivals and loads it."""
    source, library = Path(__file__).with_name(f"{name}.c"), rivals.RIVALS / f"{name}.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    command = [os.environ.get("CC", "cc"), "-O3", "-march=native", "-shared", "-fPIC", "-pthread", f"-I{HEADERS}"]
    subprocess.run([*command, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))
