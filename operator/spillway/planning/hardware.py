"""Hardware: what a node has and how fast it moves bytes. Figures are in catalog/*.toml, each with its source.

"h100", "h100-80"   the node class with the catalog's number of devices
"8xh100"            the same node with that many devices
"h100+nvme-gen5", "h100+16xlocal-ssd"   with drives of another class
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from spillway.errors import UserError
from spillway.plan import DeviceKind, Tier

TIER_NAMES = {Tier.DEVICE: "device memory", Tier.HOST: "host memory", Tier.NVME: "NVMe space"}
DISK_SHARE = 0.9
"""Share of the drives' capacity that spill may use."""
MEASURED = "-measured"
"""Suffix of the name of a node whose rates were measured, not taken from the catalog."""
CIPHER_BYTES_PER_SECOND = 4e9
"""Rate of AES-256-XTS by one thread in units of 4 KiB: measured on a hyperthread of a Sapphire Rapids server, November
2026."""


@dataclass(frozen=True, slots=True)
class Link:
    """Bytes per second between device and host, one direction at a time."""

    h2d_bytes_per_second: float
    d2h_bytes_per_second: float
    duplex_efficiency: float
    """The fraction of each direction's rate that remains if both are busy."""
    devices_per_root_port: int
    """Devices that share the rates."""


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One node: capacities and achieved rates. Figures of devices are per device, all others per node."""

    name: str
    device_kind: DeviceKind
    num_devices: int
    device_bytes: int
    """Usable bytes, without those of driver and allocator."""
    bfloat16_flops_per_second: float
    float32_flops_per_second: float
    device_bytes_per_second: float
    """Rate of device memory."""
    link: Link
    interconnect_bytes_per_second: float
    """Rate between devices of the node, per device, one direction."""
    network_bytes_per_second: float
    """Rate between nodes, per device, one direction."""
    num_cores: int
    host_bytes: int
    dram_bytes_per_second: float
    """Rate of host memory, for cores and copies together."""
    cpu_bytes_per_second: float
    """Rate at which the cores alone stream host memory."""
    nvme_bytes: int
    nvme_read_bytes_per_second: float
    nvme_write_bytes_per_second: float
    nvme_rated_bytes: float = 0.0
    """Bytes that the drives are rated for in their lifetime; 0: unknown."""
    bfloat16_values_per_second: float = math.inf
    """Values that operations other than matrix products read and write per second in bfloat16 training; inf: part of
    the FLOP rate, as for GPUs of the catalog."""
    float32_values_per_second: float = math.inf
    operation_overhead_seconds: float = 0.0
    """Fixed cost of handing one piece of work to a kernel or a lane; compute_work.py counts them."""
    cipher_bytes_per_second: float = CIPHER_BYTES_PER_SECOND
    """Rate of one thread that encrypts or decrypts; the catalog has no processor without AES instructions."""

    @property
    def is_calibrated(self) -> bool:
        """Whether the rates were measured on the node."""
        return self.name.endswith(MEASURED)

    @property
    def copies_use_cores(self) -> bool:
        """Whether copies take the cores that compute, as on a CPU device; on a GPU, copy engines do them."""
        return self.device_kind == "Cpu"

    def bytes_of_device(self, local_ranks: int) -> int:
        """Usable memory of one device: ranks on a CPU node share its one device."""
        if self.device_kind == "Cuda":
            return self.device_bytes
        return min(self.device_bytes, self.num_devices * self.device_bytes // local_ranks)

    def flops_per_second(self, compute: str) -> float:
        """Float16 counts as bfloat16, because GPUs compute both at one rate; a CPU's float16 is slower than that."""
        return self.float32_flops_per_second if compute == "float32" else self.bfloat16_flops_per_second

    def values_per_second(self, compute: str) -> float:
        return self.float32_values_per_second if compute == "float32" else self.bfloat16_values_per_second


def node_names() -> list[str]:
    """Names of node classes; aliases are not listed."""
    return sorted(name for name, entry in _catalog().items() if entry["kind"] != "Disk")


def resolve_node(name: str) -> NodeSpec:
    """The node class called `name`, an alias of it, or COUNTxNAME, each optionally with +DISK or +COUNTxDISK for other
    drives than its own. Raises UserError with the nearest names."""
    wanted, plus, drives = name.strip().lower().partition("+")
    match = re.fullmatch(_COUNTED, wanted)
    if match is None:
        raise UserError(f"--node is empty; known nodes: {', '.join(node_names())}")
    count, base = match.groups()
    aliases = {alias: key for key, entry in _catalog().items() for alias in (key, *entry["aliases"])}
    names = {alias: key for alias, key in aliases.items() if _catalog()[key]["kind"] != "Disk"}
    if base not in names and (counted := re.fullmatch(r"(\d+)x(.+)", base)) and counted[2] in names:
        raise UserError(f"--node {name}: {counted[1]} devices; the number must be from 1 to 999, as in 8x{counted[2]}")
    if base not in names:
        near = difflib.get_close_matches(base, names, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise UserError(
            f"node class {base!r}: not in the hardware catalog{hint} Known: {', '.join(node_names())}; 8xNAME is a "
            "node with 8 devices"
        )
    node = _node(names[base])
    node = _with_devices(node, int(count) if count else node.num_devices)
    return _with_drives(node, int(_catalog()[names[base]]["node"]["num_disks"]["value"]), drives) if plus else node


_COUNTED = r"(?:([1-9][0-9]{0,2})x)?(.+)"


def _with_drives(node: NodeSpec, num_drives: int, wanted: str) -> NodeSpec:
    match = re.fullmatch(_COUNTED, wanted)
    disks = sorted(name for name, entry in _catalog().items() if entry["kind"] == "Disk")
    if match is None or match[2] not in disks:
        raise UserError(
            f"--node: unknown drive {wanted!r}; known: {', '.join(disks)}; NODE+4xDRIVE is a node with 4 such drives"
        )
    return replace(node, name=f"{node.name}+{wanted}", **_drives(match[2], int(match[1]) if match[1] else num_drives))


def local_node(num_cores: int, device_bytes: int, host_bytes: int, nvme_bytes: int) -> NodeSpec:
    """This machine as a CPU node: the catalog's rates, the given capacities. `nvme_bytes` 0 = no spill directory."""
    node = _node("cpu")
    share = num_cores / node.num_cores
    return replace(
        node,
        name="local",
        num_cores=num_cores,
        device_bytes=device_bytes,
        bfloat16_flops_per_second=node.bfloat16_flops_per_second * share,
        float32_flops_per_second=node.float32_flops_per_second * share,
        bfloat16_values_per_second=node.bfloat16_values_per_second * share,
        float32_values_per_second=node.float32_values_per_second * share,
        host_bytes=host_bytes,
        nvme_bytes=nvme_bytes,
        nvme_rated_bytes=0.0,  # the drive is unknown
    )


def gpu_node(product: str, memory_bytes: int | None, num_devices: int) -> NodeSpec:
    """The catalog's class for a GPU that the cluster calls `product` (label nvidia.com/gpu.product); `memory_bytes` is
    what its driver reports, if known. For a product that is not in the catalog, it is the largest class with no more
    memory, or, if the memory is unknown, the smallest, so that a plan for it fits."""
    entries = {name: entry for name, entry in _catalog().items() if entry["kind"] == "Cuda"}
    sizes = {name: int(entry["device"]["memory_bytes"]["value"]) for name, entry in entries.items()}
    named = [name for name, entry in entries.items() if product in entry["products"]]
    smaller = [name for name, size in sizes.items() if memory_bytes is not None and size <= memory_bytes]
    if named or smaller:
        chosen = max(named or smaller, key=lambda name: (sizes[name], name))
    else:
        chosen = min(entries, key=lambda name: (sizes[name], name))
    node = _with_devices(_node(chosen), num_devices)
    if memory_bytes is None:
        return node
    return replace(node, device_bytes=max(0, memory_bytes - (sizes[chosen] - node.device_bytes)))


def _with_devices(node: NodeSpec, num_devices: int) -> NodeSpec:
    if node.device_kind == "Cpu" and num_devices == 1:
        return node
    return replace(node, name=f"{num_devices}x-{node.name}", num_devices=num_devices)


@cache
def _catalog() -> dict[str, dict[str, Any]]:
    folder = files("spillway").joinpath("catalog")
    entries = [entry for entry in folder.iterdir() if entry.name.endswith(".toml")]
    return {entry.name.removesuffix(".toml"): tomllib.loads(entry.read_text(encoding="utf-8")) for entry in entries}


@cache
def _node(name: str) -> NodeSpec:
    entry = _catalog()[name]
    device, links, node = (_values(entry[part]) for part in ("device", "links", "node"))
    # The catalog has a CPU's compute rates per core; the device of a CPU node is all of its cores.
    cores = node["num_cores"] if entry["kind"] == "Cpu" else 1
    return NodeSpec(
        name=name,
        device_kind=entry["kind"],
        num_devices=int(node["num_devices"]),
        device_bytes=int(device["memory_bytes"] - device["reserved_bytes"]),
        bfloat16_flops_per_second=device["bfloat16_flops_per_second"] * cores,
        float32_flops_per_second=device["float32_flops_per_second"] * cores,
        bfloat16_values_per_second=device.get("bfloat16_values_per_second", math.inf) * cores,
        float32_values_per_second=device.get("float32_values_per_second", math.inf) * cores,
        operation_overhead_seconds=device.get("operation_overhead_seconds", 0.0),
        device_bytes_per_second=device["memory_bytes_per_second"],
        link=Link(
            links["h2d_bytes_per_second"],
            links["d2h_bytes_per_second"],
            links["duplex_efficiency"],
            int(links["devices_per_root_port"]),
        ),
        interconnect_bytes_per_second=links["interconnect_bytes_per_second"],
        network_bytes_per_second=links["network_bytes_per_second"],
        num_cores=int(node["num_cores"]),
        host_bytes=int(node["host_bytes"]),
        dram_bytes_per_second=node["dram_bytes_per_second"],
        cpu_bytes_per_second=node["cpu_bytes_per_second"],
        **_drives(entry["disk"], int(node["num_disks"])),
    )


def _drives(name: str, count: int) -> dict[str, Any]:
    """The fields of NodeSpec for `count` drives of a class."""
    disk = _values(_catalog()[name]["disk"])
    return {
        "nvme_bytes": int(count * disk["capacity_bytes"] * DISK_SHARE),
        "nvme_read_bytes_per_second": count * disk["read_bytes_per_second"],
        "nvme_write_bytes_per_second": count * disk["write_bytes_per_second"],
        "nvme_rated_bytes": count * disk["rated_written_bytes"],
    }


def _values(figures: dict[str, dict[str, Any]]) -> dict[str, float]:
    return {name: figure["value"] for name, figure in figures.items()}
