"""Probes the machine for a local run: the cores, memory and disk that this process may use.

A container's limit counts, not the machine's RAM: the kernel kills at the limit.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spillway_trainer.cgroup import cgroup_headroom_bytes, free_memory_bytes, usable_cores

from .gpus import NO_DRIVER, Gpus, find_gpus


@dataclass(frozen=True, slots=True)
class LocalResources:
    cores: int
    memory_bytes: int
    """Available now, within the container's limit."""
    disk_bytes: int
    """Free for this user on the spill directories' volumes, as far as equal shares can use it."""
    is_limited: bool = False
    """Whether a container's limit, not the machine, determines `memory_bytes`."""
    gpus: Gpus = NO_DRIVER


def probe(directory: Path, root: Path = Path("/"), further: Sequence[Path] = ()) -> LocalResources:
    """What this process can use, if it spills to `directory` and `further` ones. `root` is / except in tests."""
    memory_bytes, limits = free_memory_bytes(root), cgroup_headroom_bytes(root)
    is_limited = bool(limits) and min(limits) <= memory_bytes
    disk_bytes = free_disk_bytes([directory, *further])
    return LocalResources(usable_cores(root), memory_bytes, disk_bytes, is_limited, find_gpus())


def free_disk_bytes(directories: Sequence[Path]) -> int:
    """Free bytes for a slab with an equal share in each directory."""
    found = [(directory.stat().st_dev, os.statvfs(directory)) for directory in directories]
    return bytes_in_equal_shares([(volume, status.f_bavail * status.f_frsize) for volume, status in found])


def bytes_in_equal_shares(places: Sequence[tuple[int, int]]) -> int:
    """Bytes that fit when every directory holds an equal share. `places`: (volume, its free bytes) of each directory;
    directories on one volume share its space."""
    volumes = [volume for volume, _ in places]
    return len(places) * min(free // volumes.count(volume) for volume, free in places)
