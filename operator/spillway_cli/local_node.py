"""Probes of the machine that a local run uses: cores, memory and disk that this process may really have.

A container's limit counts, never the machine's RAM: the kernel kills at the limit.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from spillway_trainer.cgroup import read_text, usable_cores, v1_directories, v2_directories

MEMORY_CONTROLLER_V1 = "memory"
UNLIMITED_V1_BYTES = 2**62
"""cgroup v1 writes a page-rounded 2^63 for "no limit"."""


@dataclass(frozen=True, slots=True)
class LocalResources:
    cores: int
    memory_bytes: int
    """available now, inside the container's limit"""
    disk_bytes: int
    """free for this user on the volume of the spill directory"""


def probe(directory: Path, root: Path = Path("/")) -> LocalResources:
    """What this process can use; `directory` is where it will spill. `root` is / except in tests."""
    available = meminfo_bytes(root, "MemAvailable")
    headrooms = [available, *cgroup_headroom_bytes(root)]
    status = os.statvfs(directory)
    return LocalResources(usable_cores(root), max(0, min(headrooms)), status.f_bavail * status.f_frsize)


def meminfo_bytes(root: Path, name: str) -> int:
    """MemAvailable or MemTotal of /proc/meminfo."""
    for line in read_text(root / "proc/meminfo").splitlines():
        found, _, value = line.partition(":")
        if found == name:
            return int(value.split()[0]) * 1024
    pages = "SC_PHYS_PAGES" if name == "MemTotal" else "SC_AVPHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def cgroup_headroom_bytes(root: Path) -> list[int]:
    """Limit minus use of this process's cgroup and of each one above it: the tightest binds.

    Page cache that the kernel can take back (inactive_file) does not count as used.
    """
    v2 = [headroom(directory, "memory.max", "memory.current", "inactive_file") for directory in v2_directories(root)]
    v1 = [
        headroom(directory, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        for directory in v1_directories(root, MEMORY_CONTROLLER_V1)
    ]
    return [value for value in (*v2, *v1) if value is not None]


def headroom(directory: Path, limit_name: str, usage_name: str, reclaimable_name: str) -> int | None:
    """None when the cgroup has no limit."""
    limit, usage = read_text(directory / limit_name), read_text(directory / usage_name)
    if not limit.isdigit() or not usage.isdigit() or int(limit) >= UNLIMITED_V1_BYTES:
        return None
    statistics = (line.split() for line in read_text(directory / "memory.stat").splitlines())
    reclaimable = sum(int(pair[1]) for pair in statistics if len(pair) == 2 and pair[0] == reclaimable_name)
    return int(limit) - max(0, int(usage) - reclaimable)
