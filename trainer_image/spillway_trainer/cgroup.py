"""The cores and the free memory of this process, according to its cgroups and its CPU affinity.

A container's limit counts, never the machine's figure. `root` is / except in tests.
"""

from __future__ import annotations

import os
from pathlib import Path

from spillway.plan import MemoryPlan, Tier
from spillway.units import MIB

CPU_CONTROLLER_V1 = "cpu"
MEMORY_CONTROLLER_V1 = "memory"
UNLIMITED_V1_BYTES = 2**62
"""cgroup v1 writes 2^63, rounded down to a page, for "no limit"."""
MEMORY_MARGIN_BYTES = 256 * MIB
"""Bytes below the limit that stay free for other allocations of the process."""


def usable_cores(root: Path) -> int:
    """Returns the number of cores in the affinity mask, or fewer if a CPU quota of cgroup v1 or v2 allows fewer; at
    least 1."""
    quotas = [read_text(directory / "cpu.max").partition(" ")[::2] for directory in v2_directories(root)]
    quotas += [
        (read_text(directory / "cpu.cfs_quota_us"), read_text(directory / "cpu.cfs_period_us"))
        for directory in v1_directories(root, CPU_CONTROLLER_V1)
    ]
    cores = [int(quota) // int(period) for quota, period in quotas if quota.isdigit() and period.isdigit()]
    return max(1, min([len(os.sched_getaffinity(0)), *cores]))


def with_usable_threads(plan: MemoryPlan, usable: int, num_local_ranks: int) -> MemoryPlan:
    """Returns `plan` with no more update threads than a rank's part of the `usable` cores. Whatever node the plan was
    made for, a pod may have a lower quota, or fewer cores in its affinity mask. No result depends on the number of
    threads."""
    most = max(1, usable // num_local_ranks)
    if plan.optimizer.num_threads <= most:
        return plan
    return plan.model_copy(update={"optimizer": plan.optimizer.model_copy(update={"num_threads": most})})


def spare_host_bytes(plan: MemoryPlan, num_local_ranks: int, root: Path) -> int:
    """Returns the host memory that a rank may use beyond its slab and snapshot if a spill device fails: the part of its
    budget that is not planned, as far as it is free on the node and in the cgroups, less a margin."""
    unplanned = plan.budget[Tier.HOST] - plan.slab_bytes(Tier.HOST) - plan.snapshot_bytes
    free = (free_memory_bytes(root) - MEMORY_MARGIN_BYTES) // num_local_ranks
    return max(0, min(unplanned, free))


def free_memory_bytes(root: Path) -> int:
    """Returns the bytes available now, within the limit of every cgroup above this process."""
    return max(0, min([meminfo_bytes(root, "MemAvailable"), *cgroup_headroom_bytes(root)]))


def meminfo_bytes(root: Path, name: str) -> int:
    """Returns MemAvailable or MemTotal of /proc/meminfo, or what sysconf says where that file lacks the line."""
    for line in read_text(root / "proc/meminfo").splitlines():
        found, _, value = line.partition(":")
        if found == name:
            return int(value.split()[0]) * 1024
    pages = "SC_PHYS_PAGES" if name == "MemTotal" else "SC_AVPHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def cgroup_headroom_bytes(root: Path) -> list[int]:
    """Returns limit minus use of this process's cgroup and of each one above it that has a limit; the smallest counts.

    Page cache that the kernel can take back (inactive_file) does not count as used.
    """
    v2 = [headroom(directory, "memory.max", "memory.current", "inactive_file") for directory in v2_directories(root)]
    v1 = [
        headroom(directory, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        for directory in v1_directories(root, MEMORY_CONTROLLER_V1)
    ]
    return [value for value in (*v2, *v1) if value is not None]


def peak_memory_bytes(root: Path) -> int:
    """Returns the peak bytes of this process's own cgroup, including page cache; 0 if the kernel does not report them
    (cgroup v2 before Linux 5.19), or if the cgroup has no limit and may contain other processes."""
    for directories, limit_name, peak_name in (
        (v2_directories(root), "memory.max", "memory.peak"),
        (v1_directories(root, MEMORY_CONTROLLER_V1), "memory.limit_in_bytes", "memory.max_usage_in_bytes"),
    ):
        for directory in directories[:1]:
            limit, peak = read_text(directory / limit_name), read_text(directory / peak_name)
            if limit.isdigit() and peak.isdigit() and int(limit) < UNLIMITED_V1_BYTES:
                return int(peak)
    return 0


def headroom(directory: Path, limit_name: str, usage_name: str, reclaimable_name: str) -> int | None:
    """Returns limit minus use without reclaimable page cache; None if the cgroup has no limit."""
    limit, usage = read_text(directory / limit_name), read_text(directory / usage_name)
    if not limit.isdigit() or not usage.isdigit() or int(limit) >= UNLIMITED_V1_BYTES:
        return None
    statistics = (line.split() for line in read_text(directory / "memory.stat").splitlines())
    reclaimable = sum(int(pair[1]) for pair in statistics if len(pair) == 2 and pair[0] == reclaimable_name)
    return int(limit) - max(0, int(usage) - reclaimable)


def v2_directories(root: Path) -> list[Path]:
    return ancestors(root / "sys/fs/cgroup", own_path(root, controller=None))


def v1_directories(root: Path, controller: str) -> list[Path]:
    return ancestors(root / "sys/fs/cgroup" / controller, own_path(root, controller))


def own_path(root: Path, controller: str | None) -> str | None:
    """Returns this process's cgroup from /proc/self/cgroup, where the v2 line is "0::/path" and a v1 line
    "4:memory:/path"."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if (controller is None and number == "0" and not controllers) or (controller in controllers.split(",")):
            return path
    return None


def ancestors(mount: Path, path: str | None) -> list[Path]:
    """Returns the cgroup's directory and those above it, up to the mount.

    In a container without its own cgroup namespace, `path` is the host's and does not exist here: the mount itself is
    then this process's cgroup.
    """
    if path is None:
        return []
    own = mount / path.strip("/")
    if not own.is_dir():
        return [mount]
    return [own, *(parent for parent in own.parents if parent == mount or mount in parent.parents)]


def read_text(path: Path) -> str:
    """Reads a file of the kernel; "" if this kernel or container does not have it."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
