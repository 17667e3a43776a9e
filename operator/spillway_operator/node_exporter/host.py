"""Host memory, stalls and spill drives, from /proc, /sys and statvfs. What the kernel does not tell is left out."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spillway.metrics import (
    NODE_DISK_FREE,
    NODE_DISK_TOTAL,
    NODE_DISK_WEAR,
    NODE_DISK_WRITTEN,
    NODE_IO_STALLED,
    NODE_MEMORY_AVAILABLE,
    NODE_MEMORY_STALLED,
    NODE_MEMORY_TOTAL,
    NODE_MEMORY_WAITING,
    NODE_NUMA_FREE,
    Metric,
)

Sample = tuple[Metric, tuple[str, ...], float]
"""A series, values of its labels, and its value."""
SECTOR_BYTES = 512
"""Unit of the kernel's statistics, whatever the size of the drive's own sectors."""
SECTORS_WRITTEN = 6
"""Field of /sys/block/DRIVE/stat."""
PRESSURE = (
    (NODE_MEMORY_STALLED, "memory", "full"),
    (NODE_MEMORY_WAITING, "memory", "some"),
    (NODE_IO_STALLED, "io", "full"),
)
LIFE_FILES = ("device/life_time", "device/health_descriptor/life_time_estimation_a")
"""Files with the wear of eMMC and UFS drives: 0x01 = up to 10 % is used, 0x0b = more than 100 %. An NVMe drive tells
its wear to root only."""


@dataclass(frozen=True, slots=True)
class Drive:
    """A file system that takes spill files."""

    mountpoint: str
    """Mount point on the node."""
    path: Path
    """Path of the same file system, as this process sees it."""
    storage_class: str = ""
    """StorageClass whose volumes lie on it; empty: emptyDirs do."""


def memory_samples(proc: Path, sys: Path) -> Iterator[Sample]:
    known = _kilobytes(proc / "meminfo")
    for metric, name in ((NODE_MEMORY_AVAILABLE, "MemAvailable"), (NODE_MEMORY_TOTAL, "MemTotal")):
        if name in known:
            yield metric, (), known[name] * 1024
    for metric, resource, kind in PRESSURE:
        if match := re.search(rf"^{kind} .*total=(\d+)", _text(proc / "pressure" / resource), re.MULTILINE):
            yield metric, (), int(match[1]) / 1e6
    for folder in sorted((sys / "devices/system/node").glob("node[0-9]*")):
        if "MemFree" in (of_node := _kilobytes(folder / "meminfo")):
            yield NODE_NUMA_FREE, (folder.name.removeprefix("node"),), of_node["MemFree"] * 1024


def drive_samples(drive: Drive, sys: Path) -> Iterator[Sample]:
    """Yields the samples of a drive, if it is mounted: a bare folder would show the root file system's figures."""
    if not os.path.ismount(drive.path):
        return
    found, number = os.statvfs(drive.path), os.stat(drive.path).st_dev
    block = (sys / "dev/block" / f"{os.major(number)}:{os.minor(number)}").resolve()
    whole = block.parent if (block / "partition").exists() else block
    labels = (drive.mountpoint, drive.storage_class, whole.name if block.exists() else "")
    yield NODE_DISK_FREE, labels, found.f_bavail * found.f_frsize
    yield NODE_DISK_TOTAL, labels, found.f_blocks * found.f_frsize
    if statistics := _text(whole / "stat").split():
        yield NODE_DISK_WRITTEN, labels, int(statistics[SECTORS_WRITTEN]) * SECTOR_BYTES
    for life in filter(None, (_text(whole / name).split() for name in LIFE_FILES)):
        yield NODE_DISK_WEAR, labels, int(life[0], 16) / 10


def _kilobytes(meminfo: Path) -> dict[str, int]:
    """Values of a meminfo file by name."""
    return {name: int(value) for name, value in re.findall(r"(\w+):\s+(\d+) kB", _text(meminfo))}


def _text(file: Path) -> str:
    """The file's text; empty if it does not exist or may not be read."""
    try:
        return file.read_text(encoding="ascii")
    except OSError:
        return ""
