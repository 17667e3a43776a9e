"""Probes of the machine that a local run uses: cores, memory and disk that this process may really have.

A container's limit counts, never the machine's RAM: the kernel kills at the limit.
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
    """available now, inside the container's limit"""
    disk_bytes: int
    """free for this user on the volumes of the spill directories, as far as equal shares can use it"""
    is_limited: bool = False
    """`memory_bytes` is what the limit of a container leaves, not what the machine has free"""
    gpus: Gpus = NO_DRIVER


def probe(directory: Path, root: Path = Path("/"), further: Sequence[Path] = ()) -> LocalResources:
    """What this process can use; it will spill to `directory` and `further` ones. `root` is / except in tests."""
    memory_bytes, limits = free_memory_bytes(root), cgroup_headroom_bytes(root)
    is_limited = bool(limits) and min(limits) <= memory_bytes
    disk_bytes = free_disk_bytes([directory, *further])
    return LocalResources(usable_cores(root), memory_bytes, disk_bytes, is_limited, find_gpus())


def free_disk_bytes(directories: Sequence[Path]) -> int:
    """For a slab that has an equal share in each."""
    found = [(directory.stat().st_dev, os.statvfs(directory)) for directory in directories]
    return bytes_in_equal_shares([(volume, status.f_bavail * status.f_frsize) for volume, status in found])


def bytes_in_equal_shares(places: Sequence[tuple[int, int]]) -> int:
    """`places`: (volume, its free bytes) of each directory. Those on one volume divide what that has, and the smallest
    share decides."""
    volumes = [volume for volume, _ in places]
    return len(places) * min(free // volumes.count(volume) for volume, free in places)
