"""This process's control groups: the cores that they and its affinity leave to it, and the memory that is still free.

A container's limit counts, never the machine's figure. `root` is / except in tests.
"""

from __future__ import annotations

import os
from pathlib import Path

from spillway.plan import MemoryPlan, Tier
from spillway.units import MIB

CPU_CONTROLLER_V1 = "cpu"
MEMORY_CONTROLLER_V1 = "memory"
MEMORY_MARGIN_BYTES = 256 * MIB
"""of the limit that nobody may plan with: what else the process allocates must not end it"""


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


def spare_host_bytes(plan: MemoryPlan, num_local_ranks: int, root: Path) -> int:
    """What a rank may take beside its host slab when a spill device fails: the rest of its budget, as far as the node
    and the control groups have that much free now, with a margin."""
    unplanned = plan.budget[Tier.HOST] - plan.slab_bytes(Tier.HOST)
    free = (free_memory_bytes(root) - MEMORY_MARGIN_BYTES) // num_local_ranks
    return max(0, min(unplanned, free))


def free_memory_bytes(root: Path) -> int:
    """Of the node, bounded by the limit of every control group above this process. Page cache that can go is free."""
    found = [1024 * number_after("MemAvailable:", read_text(root / "proc/meminfo"))]
    for directory in v2_directories(root):
        limit, used = read_text(directory / "memory.max"), read_text(directory / "memory.current")
        cache = number_after("inactive_file", read_text(directory / "memory.stat"))
        found += [int(limit) - int(used) + cache] if limit.isdigit() and used.isdigit() else []
    for directory in v1_directories(root, MEMORY_CONTROLLER_V1):
        limit = read_text(directory / "memory.limit_in_bytes")
        used = read_text(directory / "memory.usage_in_bytes")
        cache = number_after("total_inactive_file", read_text(directory / "memory.stat"))
        found += [int(limit) - int(used) + cache] if limit.isdigit() and used.isdigit() else []
    return max(0, min(found))


def number_after(name: str, text: str) -> int:
    """The number that follows `name` at the start of a line; 0 where there is none."""
    for line in text.splitlines():
        key, _, rest = line.partition(" ")
        if key == name:
            return int(rest.split()[0])
    return 0


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
