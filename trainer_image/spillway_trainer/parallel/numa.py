"""The cores of a device's NUMA node, read from sysfs and chosen by a pure function. `root` is / except in tests.

Copies and CPU updates that cross sockets share the link between the sockets. So the process binds itself to its
device's node before it has threads or host memory: threads inherit the affinity, and pages are placed on the node that
first touches them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from spillway.plan import MemoryPlan

from ..cgroup import read_text


@dataclass(frozen=True, slots=True)
class CoreBinding:
    """The cores on which a rank's threads run."""

    cores: frozenset[int]
    """Empty: threads are not bound."""
    num_threads: int
    """The most update threads that this rank may have there: its share of the cores."""
    said: str
    """A line for the log: what was chosen, or why nothing was."""


def node_of(root: Path, bus_address: str) -> int | None:
    """Returns the NUMA node of a PCI device ("0000:3b:00.0"); None if the kernel does not know it or the machine has
    one node."""
    text = read_text(root / "sys/bus/pci/devices" / bus_address / "numa_node")
    return int(text) if text.isdecimal() else None


def cores_of(root: Path, node: int) -> frozenset[int]:
    """Returns the cores of a node, from its list "0-27,56-83"; empty if the kernel does not list them."""
    cores: set[int] = set()
    for part in read_text(root / f"sys/devices/system/node/node{node}/cpulist").split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal():
            cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def place(
    root: Path, bus_addresses: Sequence[str], local_rank: int, allowed: Collection[int], usable: int
) -> CoreBinding:
    """Chooses, among the `allowed` cores (affinity and cpuset), those of the node of rank `local_rank`'s device.
    `bus_addresses`: the devices of all ranks of this machine; `usable`: the number of cores that a quota leaves to all
    these ranks together."""
    address = bus_addresses[local_rank]
    part = max(1, usable // len(bus_addresses))
    node = node_of(root, address)
    if node is None:
        return CoreBinding(frozenset(), part, f"threads: on every core; no NUMA node is known for device {address}")
    cores = cores_of(root, node) & frozenset(allowed)
    if not cores:
        return CoreBinding(
            frozenset(),
            part,
            f"threads: on every core; NUMA node {node} of device {address} has none of the {len(allowed)} cores that "
            "this process may use, so copies and updates cross NUMA nodes",
        )
    num_sharing = sum(node_of(root, other) == node for other in bus_addresses)
    most = max(1, min(part, len(cores) // num_sharing))
    others = f"; {num_sharing - 1} more ranks use the same cores" if num_sharing > 1 else ""
    return CoreBinding(
        cores, most, f"threads: {len(cores)} cores of NUMA node {node}, where device {address} is{others}"
    )


def with_placed_threads(plan: MemoryPlan, placement: CoreBinding) -> MemoryPlan:
    """Returns `plan` with at most as many update threads as the rank's share of its cores. No bit of the results
    depends on them."""
    num_threads = min(plan.optimizer.num_threads, placement.num_threads)
    return plan.model_copy(update={"optimizer": plan.optimizer.model_copy(update={"num_threads": num_threads})})
