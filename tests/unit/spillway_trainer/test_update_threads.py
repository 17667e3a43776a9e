"""Update threads: a rank's part of the cores, less those that launch; a quota binds, OMP_NUM_THREADS does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases.job_documents import LLAMA_70B, job
from harness.local_runs import spread_plan
from spillway.plan import MemoryPlan
from spillway.planning.hardware import local_node, resolve_node
from spillway.planning.planner import make_plan
from spillway.planning.step_time import LAUNCHING_CORES, update_threads
from spillway.units import GIB
from spillway_trainer.cgroup import usable_cores, with_usable_threads
from spillway_trainer.kernels import native

HERE = len(os.sched_getaffinity(0))


@given(st.integers(1, 512), st.integers(1, 16), st.booleans())
def test_ranks_of_a_node_never_have_more_threads_than_it_has_cores(cores: int, ranks: int, on_cpu: bool) -> None:
    threads = update_threads(cores, ranks, on_cpu)
    assert threads >= 1
    if threads > 1:
        assert ranks * (threads + (0 if on_cpu else LAUNCHING_CORES)) <= cores


def test_a_plan_for_gpus_leaves_cores_for_launching() -> None:
    plan = make_plan(job(LLAMA_70B), resolve_node("8xh100"), explained=False)
    assert isinstance(plan, MemoryPlan)
    assert plan.optimizer.num_threads == 112 // 8 - LAUNCHING_CORES == 12


def test_a_plan_for_a_cpu_takes_all_its_cores() -> None:
    """Compute and update take turns there."""
    plan = make_plan(job(), local_node(6, 4 * GIB, 4 * GIB, GIB), explained=False)
    assert isinstance(plan, MemoryPlan)
    assert plan.optimizer.num_threads == 6


@pytest.mark.parametrize(("usable", "ranks", "threads"), [(64, 1, 8), (8, 1, 8), (6, 1, 6), (6, 4, 1), (2, 4, 1)])
def test_a_run_takes_no_more_than_its_part_of_the_cores_that_are_there(usable: int, ranks: int, threads: int) -> None:
    planned = spread_plan()
    planned = planned.model_copy(update={"optimizer": planned.optimizer.model_copy(update={"num_threads": 8})})
    found = with_usable_threads(planned, usable, ranks)
    assert found.optimizer.num_threads == threads
    same = {"num_threads": 8}
    assert found.model_copy(update={"optimizer": found.optimizer.model_copy(update=same)}) == planned


def machine(root: Path, cgroups: str, files: dict[str, str]) -> Path:
    for name, content in {"proc/self/cgroup": cgroups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


@pytest.mark.parametrize(
    ("cgroups", "files", "cores"),
    [
        ("0::/pod\n", {"sys/fs/cgroup/pod/cpu.max": "100000 100000\n"}, 1),
        ("0::/pod\n", {"sys/fs/cgroup/pod/cpu.max": "max 100000\n"}, HERE),
        ("0::/pod/c\n", {"sys/fs/cgroup/pod/cpu.max": "199999 100000\n", "sys/fs/cgroup/pod/c/cpu.max": "max 1\n"}, 1),
        ("0::/pod\n", {"sys/fs/cgroup/pod/cpu.max": "50000 100000\n"}, 1),
        ("4:cpu,cpuacct:/p\n", {"sys/fs/cgroup/cpu/p/cpu.cfs_quota_us": "100000\n",
                                "sys/fs/cgroup/cpu/p/cpu.cfs_period_us": "100000\n"}, 1),
        ("4:cpu,cpuacct:/p\n", {"sys/fs/cgroup/cpu/p/cpu.cfs_quota_us": "-1\n",
                                "sys/fs/cgroup/cpu/p/cpu.cfs_period_us": "100000\n"}, HERE),
        ("", {}, HERE),
    ],
)  # fmt: skip
def test_a_quota_of_either_version_binds_and_none_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroups: str, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(HERE)))
    assert usable_cores(machine(tmp_path, cgroups, files)) == cores


def test_a_quota_of_more_than_one_core_is_rounded_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    root = machine(tmp_path, "0::/\n", {"sys/fs/cgroup/cpu.max": "750000 100000\n"})
    assert usable_cores(root) == 7


THREADS = """
import os, torch
from spillway_trainer.kernels import dispatch as kernels
torch.set_num_threads(3)  # what run_job does with job.json's figure
source = torch.ones(1 << 26, dtype=torch.uint8)
before = len(os.listdir("/proc/self/task"))
kernels.copy(torch.empty_like(source), source, num_threads=4)  # on the calling thread and three workers
print(torch.get_num_threads(), len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.ci
@pytest.mark.skipif(not native.available(), reason="the native library has the threads")
def test_omp_num_threads_of_the_launcher_changes_no_thread_count() -> None:
    """Launchers set it to 1, and leave most cores idle."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    out = subprocess.run(
        [sys.executable, "-c", THREADS], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert out.split() == ["3", "3"]
