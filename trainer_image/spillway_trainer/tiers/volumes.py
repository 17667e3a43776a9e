"""Detects the kind of volume of a directory: spilling to tmpfs would use memory that no budget counts."""

from __future__ import annotations

from pathlib import Path

from spillway.errors import UserError

from ..cgroup import read_text

IN_MEMORY = ("tmpfs", "ramfs")
"""File systems that keep files in memory. O_DIRECT does not tell them apart: newer kernels support it on these, too."""
MOUNTS = Path("/proc/self/mounts")


def reject_memory(directory: Path, said: str, advice: str = "name a directory on a disk") -> None:
    """Raises UserError, whose message starts with `said`, if the spill directory is in memory."""
    kind = memory_kind(directory)
    if kind:
        raise UserError(
            f"{said}: is in memory ({kind}), so spilled bytes would use memory that no budget counts; {advice}"
        )


def memory_kind(directory: Path) -> str:
    """Returns the file system of `directory` if it is in memory, else ""."""
    kind = file_system(directory.resolve(), read_text(MOUNTS))
    return kind if kind in IN_MEMORY else ""


def file_system(directory: Path, mounts: str) -> str:
    """Returns the file system type that `mounts` (the text of /proc/mounts) gives for the nearest mount at or above
    `directory`, an absolute path."""
    kinds = {}
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split()
        kinds[Path(point.encode().decode("unicode_escape"))] = kind
    return next((kinds[path] for path in (directory, *directory.parents) if path in kinds), "")
