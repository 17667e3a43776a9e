"""Threads on the device's NUMA node, from sysfs trees as machines have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import local_runs
from spillway_trainer.parallel.numa import CoreBinding, cores_of, node_of, place, with_placed_threads

GPUS = ("0000:1a:00.0", "0000:3b:00.0", "0000:9a:00.0", "0000:bb:00.0")
ALL = frozenset(range(112))


def tree(root: Path, nodes: dict[int, str], devices: dict[str, str]) -> Path:
    files = {f"sys/devices/system/node/node{node}/cpulist": cores for node, cores in nodes.items()}
    files |= {f"sys/bus/pci/devices/{address}/numa_node": node for address, node in devices.items()}
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True)
        path.write_text(content + "\n")
    return root


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    """56 cores, two threads each; four devices, two a socket."""
    return tree(tmp_path, {0: "0-27,56-83", 1: "28-55,84-111"}, dict(zip(GPUS, ("0", "0", "1", "1"), strict=True)))


def test_four_ranks_go_to_their_devices_sockets_and_share_them(two_sockets: Path) -> None:
    found = [place(two_sockets, GPUS, rank, ALL, 112) for rank in range(4)]
    assert [one.cores == cores_of(two_sockets, node) for one, node in zip(found, (0, 0, 1, 1), strict=True)] == [
        True
    ] * 4
    assert [one.num_threads for one in found] == [28] * 4
    assert (
        found[2].said
        == "threads: 56 cores of NUMA node 1, where device 0000:9a:00.0 is; 1 more ranks use the same cores"
    )


def test_one_rank_has_the_whole_socket_of_its_device(two_sockets: Path) -> None:
    found = place(two_sockets, GPUS[3:], 0, ALL, 112)
    assert (found.cores, found.num_threads) == (cores_of(two_sockets, 1), 56)


def test_a_cpuset_smaller_than_the_node_binds(two_sockets: Path) -> None:
    found = place(two_sockets, GPUS[:1], 0, frozenset({2, 3, 60, 100}), 4)
    assert (found.cores, found.num_threads) == (frozenset({2, 3, 60}), 3)


def test_a_cpuset_without_the_devices_node_is_left_as_it_is_and_said(two_sockets: Path) -> None:
    found = place(two_sockets, GPUS[:1], 0, range(28, 40), 12)
    assert (found.cores, found.num_threads) == (frozenset(), 12)
    assert "NUMA node 0 of device 0000:1a:00.0 has none of the 12 cores that this process may use" in found.said


def test_a_quota_bounds_threads_and_not_the_cores_that_they_move_among(two_sockets: Path) -> None:
    found = place(two_sockets, GPUS, 0, ALL, 16)
    assert (len(found.cores), found.num_threads) == (56, 4)


@pytest.mark.parametrize("node", ["-1", "", "unknown"])
def test_a_device_without_a_node_leaves_threads_where_they_are(tmp_path: Path, node: str) -> None:
    root = tree(tmp_path, {0: "0-7"}, {GPUS[0]: node})
    found = place(root, GPUS[:1], 0, range(8), 8)
    assert (found.cores, found.num_threads) == (frozenset(), 8)
    assert "no NUMA node is known for device 0000:1a:00.0" in found.said


def test_files_that_are_missing_are_no_error(tmp_path: Path) -> None:
    assert node_of(tmp_path, GPUS[0]) is None
    assert cores_of(tmp_path, 0) == frozenset()
    only_device = tree(tmp_path, {}, {GPUS[0]: "3"})
    assert place(only_device, GPUS[:1], 0, range(8), 8).cores == frozenset()


def test_more_ranks_than_cores_have_a_thread_each(two_sockets: Path) -> None:
    assert place(two_sockets, GPUS, 1, frozenset({0}), 1).num_threads == 1


@pytest.mark.parametrize(("most", "wanted"), [(3, 3), (8, 8), (64, 8)])
def test_a_plan_never_gets_more_threads_than_it_has(most: int, wanted: int) -> None:
    plan = local_runs.spread_plan()
    plan = plan.model_copy(update={"optimizer": plan.optimizer.model_copy(update={"num_threads": 8})})
    assert with_placed_threads(plan, CoreBinding(frozenset(), most, "")).optimizer.num_threads == wanted
