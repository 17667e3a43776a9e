"""This process's control groups, and the cores that they and its affinity leave to it and its update threads.

A container's limit counts, never the machine's figure. `root` is / except in tests.
"""

from __future__ import annotations

import os
from pathlib import Path

from spillway.plan import MemoryPlan

CPU_CONTROLLER_V1 = "cpu"


def usable_cores(root: Path) -> int:
    """Cores of the affinity mask, bounded by a CPU quota of either version, at least 1."""
    quotas = [read_text(directory / "cpu.max").partition(" ")[::2] for directory in v2_directories(root)]
    quotas += [
        (read_text(directory / "cpu.cfs_quota_us"), read_text(directory / "cpu.cfs_period_us"))
        for directory in v1_directories(root, CPU_CONTROLLER_V1)
    ]
    cores = [int(quota) // int(period) for quota, period in quotas if quota.isdigit() and period.isdigit()]
    return max(1, min([len(os.sched_getaffinity(0)), *cores]))


def with_usable_threads(plan: MemoryPlan, usable: int, num_local_ranks: int) -> MemoryPlan:
    """No more update threads than a rank's part of the `usable` cores, whatever node the plan was made for: a pod may
    have a quota of less, or fewer cores in its affinity. No bit depends on them."""
    most = max(1, usable // num_local_ranks)
    if plan.optimizer.num_threads <= most:
        return plan
    return plan.model_copy(update={"optimizer": plan.optimizer.model_copy(update={"num_threads": most})})


def v2_directories(root: Path) -> list[Path]:
    return ancestors(root / "sys/fs/cgroup", own_path(root, controller=None))


def v1_directories(root: Path, controller: str) -> list[Path]:
    return ancestors(root / "sys/fs/cgroup" / controller, own_path(root, controller))


def own_path(root: Path, controller: str | None) -> str | None:
    """This process's cgroup, from /proc/self/cgroup: the v2 line is "0::/path", a v1 line "4:memory:/path"."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if (controller is None and number == "0" and not controllers) or (controller in controllers.split(",")):
            return path
    return None


def ancestors(mount: Path, path: str | None) -> list[Path]:
    """The cgroup's directory and those above it up to the mount.

    In a container without its own cgroup namespace the path is the host's and is not there: then the mount is ours.
    """
    if path is None:
        return []
    own = mount / path.strip("/")
    if not own.is_dir():
        return [mount]
    return [own, *(parent for parent in own.parents if parent == mount or mount in parent.parents)]


def read_text(path: Path) -> str:
    """A file of the kernel, or "" where this kernel or container does not have it."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
