"""What a rank may take beside its host slab when a spill device fails: of the budget, and of what is really free."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.local_runs import spread_plan
from spillway.plan import Tier
from spillway.units import GIB, MIB
from spillway_trainer.cgroup import MEMORY_MARGIN_BYTES, free_memory_bytes, peak_memory_bytes, spare_host_bytes

MEMINFO = f"MemTotal: {64 * MIB} kB\nMemAvailable: {8 * MIB} kB\n"
"""8 GiB"""


def machine(root: Path, cgroups: str, files: dict[str, str]) -> Path:
    for name, content in {"proc/self/cgroup": cgroups, "proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


V2 = "sys/fs/cgroup/pod/memory"
V1 = "sys/fs/cgroup/memory/p/memory"


@pytest.mark.parametrize(
    ("cgroups", "files", "free"),
    [
        ("", {}, 8 * GIB),
        ("0::/pod\n", {f"{V2}.max": "max\n", f"{V2}.current": "5\n"}, 8 * GIB),
        ("0::/pod\n", {f"{V2}.max": f"{2 * GIB}\n", f"{V2}.current": f"{GIB}\n"}, GIB),
        ("0::/pod\n", {f"{V2}.max": f"{2 * GIB}\n", f"{V2}.current": f"{GIB}\n",
                       f"{V2}.stat": f"anon 7\ninactive_file {MIB}\n"}, GIB + MIB),
        ("0::/pod\n", {f"{V2}.max": f"{GIB}\n", f"{V2}.current": f"{2 * GIB}\n"}, 0),
        ("0::/pod/c\n", {f"{V2}.max": f"{2 * GIB}\n", f"{V2}.current": f"{GIB}\n",
                         "sys/fs/cgroup/pod/c/memory.max": "max\n"}, GIB),
        ("4:memory:/p\n", {f"{V1}.limit_in_bytes": f"{3 * GIB}\n", f"{V1}.usage_in_bytes": f"{GIB}\n",
                           f"{V1}.stat": f"total_inactive_file {MIB}\n"}, 2 * GIB + MIB),
    ],
)  # fmt: skip
def test_cgroup_v1_and_v2_limits_bind_and_reclaimable_cache_is_free(
    tmp_path: Path, cgroups: str, files: dict[str, str], free: int
) -> None:
    (tmp_path / "sys/fs/cgroup/pod/c").mkdir(parents=True)
    assert free_memory_bytes(machine(tmp_path, cgroups, files)) == free


@pytest.mark.parametrize(("num_ranks", "limit"), [(1, GIB), (1, 300 * MIB), (4, 300 * MIB), (1, 0)])
def test_a_rank_takes_the_rest_of_its_budget_as_far_as_it_is_free(tmp_path: Path, num_ranks: int, limit: int) -> None:
    plan = spread_plan()
    root = machine(tmp_path, "0::/pod\n", {f"{V2}.max": f"{limit}\n", f"{V2}.current": "0\n"})
    unplanned = plan.budget[Tier.HOST] - plan.slab_bytes(Tier.HOST) - plan.snapshot_bytes
    assert 0 < unplanned < 44 * MIB
    free = max(0, (limit - MEMORY_MARGIN_BYTES) // num_ranks)
    assert spare_host_bytes(plan, num_ranks, root) == min(unplanned, free)


@pytest.mark.parametrize(
    ("cgroups", "files", "peak"),
    [
        ("", {}, 0),
        ("0::/pod\n", {f"{V2}.max": f"{GIB}\n", f"{V2}.peak": f"{MIB}\n"}, MIB),
        ("0::/pod\n", {f"{V2}.max": f"{GIB}\n"}, 0),
        ("0::/pod\n", {f"{V2}.max": "max\n", f"{V2}.peak": f"{MIB}\n"}, 0),
        ("0::/pod/c\n", {f"{V2}.max": f"{GIB}\n", f"{V2}.peak": f"{5 * MIB}\n",
                         "sys/fs/cgroup/pod/c/memory.max": f"{GIB}\n", "sys/fs/cgroup/pod/c/memory.peak": "7\n"}, 7),
        ("4:memory:/p\n", {f"{V1}.limit_in_bytes": f"{GIB}\n", f"{V1}.max_usage_in_bytes": f"{MIB}\n"}, MIB),
        ("4:memory:/p\n", {f"{V1}.limit_in_bytes": f"{2**63 - 4096}\n", f"{V1}.max_usage_in_bytes": "5\n"}, 0),
    ],
)  # fmt: skip
def test_the_peak_is_that_of_the_own_group_where_it_has_a_limit(
    tmp_path: Path, cgroups: str, files: dict[str, str], peak: int
) -> None:
    assert peak_memory_bytes(machine(tmp_path, cgroups, files)) == peak
