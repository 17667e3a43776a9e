"""GPUs and their MIG instances, by the driver's library (NVML)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from spillway.metrics import NODE_DEVICE_FREE, NODE_DEVICE_INFO, NODE_DEVICE_PROCESSES, NODE_DEVICE_TOTAL

from .host import Sample


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    total_bytes: int
    free_bytes: int
    num_processes: int = 0
    """Processes that compute on it now."""
    pcie: tuple[int, int, int] = (0, 0, 0)
    """Generation, lanes now, most lanes; 0 = not known."""
    num_nvlinks: int = 0


def gpu_of(nvml: Any, handle: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    links = (asked(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS))
    return Gpu(
        name=nvml.nvmlDeviceGetName(handle),
        total_bytes=memory.total,
        free_bytes=memory.free,
        num_processes=len(asked(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()),
        pcie=(
            asked(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle) or 0,  # an idle device lowers the current one
            asked(nvml, nvml.nvmlDeviceGetCurrPcieLinkWidth, handle) or 0,
            asked(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle) or 0,
        ),
        num_nvlinks=sum(1 for link in links if link),
    )


def asked(nvml: Any, question: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result; None if the device does not support it."""
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return None


def started_nvml() -> Any:
    """The binding, connected to the driver; None if there is no driver or it does not answer."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


class GpuReader:
    """Reads all GPUs and MIG instances. Connects to the driver once, and again after the driver failed."""

    def __init__(self, sys: Path, start: Callable[[], Any] = started_nvml) -> None:
        self._sys, self._start = sys, start
        self._nvml: Any = None

    def samples(self) -> Iterator[Sample]:
        self._nvml = nvml = self._nvml or self._start()
        if nvml is None:
            return
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        except nvml.NVMLError:
            asked(nvml, nvml.nvmlShutdown)
            self._nvml = None
            return
        for index, handle in enumerate(handles):
            yield from asked(nvml, self._of_gpu, nvml, index, handle) or ()

    def _of_gpu(self, nvml: Any, index: int, handle: Any) -> list[Sample]:
        """The samples of one GPU. Raises NVMLError if it is lost."""
        gpu, uuid = gpu_of(nvml, handle), nvml.nvmlDeviceGetUUID(handle)
        whole = (str(index), uuid, "")
        details = (gpu.name, self._numa_node(nvml, handle), str(gpu.pcie[0]), str(gpu.pcie[1]), str(gpu.num_nvlinks))
        found: list[Sample] = [(NODE_DEVICE_INFO, (*whole, *details), 1.0)]
        for labels, part in self._parts(nvml, whole, handle):
            memory = nvml.nvmlDeviceGetMemoryInfo(part)
            processes = asked(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, part)
            found += [(NODE_DEVICE_FREE, labels, memory.free), (NODE_DEVICE_TOTAL, labels, memory.total)]
            if processes is not None:
                found.append((NODE_DEVICE_PROCESSES, labels, len(processes)))
        return found

    @staticmethod
    def _parts(nvml: Any, whole: tuple[str, str, str], handle: Any) -> Iterator[tuple[tuple[str, str, str], Any]]:
        """Yields what pods can have of a GPU, as (labels, handle): its MIG instances, else the whole GPU."""
        mode = asked(nvml, nvml.nvmlDeviceGetMigMode, handle)
        if not mode or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            yield whole, handle
            return
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            instance = asked(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
            if instance is not None:
                yield (*whole[:2], str(nvml.nvmlDeviceGetGpuInstanceId(instance))), instance

    def _numa_node(self, nvml: Any, handle: Any) -> str:
        """The GPU's NUMA node; empty if it is not known."""
        pci = asked(nvml, nvml.nvmlDeviceGetPciInfo, handle)
        if pci is None:
            return ""
        address = pci.busId if isinstance(pci.busId, str) else pci.busId.decode()
        file = self._sys / "bus/pci/devices" / address[-12:].lower() / "numa_node"
        found = file.read_text(encoding="ascii").strip() if file.is_file() else ""
        return "" if found == "-1" else found
