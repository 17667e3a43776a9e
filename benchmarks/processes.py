"""Memory and CPU time of another process, by the kernel's count."""

from __future__ import annotations

import os
from pathlib import Path


def peak_resident_bytes(pid: int) -> int:
    """Returns the peak since the process began, or since 5 was written to its clear_refs."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def cpu_seconds(pid: int) -> float:
    """Returns user and system time of all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
