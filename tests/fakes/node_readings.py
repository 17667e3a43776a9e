"""Fakes of what a node exporter reads from the kernel and NVML, with figures that a test chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MEMINFO = "MemTotal: {total} kB\nMemFree: 1 kB\nMemAvailable: {available} kB\nHugePages_Total: 0\n"
PRESSURE = "some avg10=0.00 avg60=0.00 avg300=0.00 total={some}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total={full}\n"


def write_proc(proc: Path, available_bytes: int, stalled_seconds: float = 0.0, total_bytes: int = 2**40) -> Path:
    """Writes a node's /proc to `proc`, which is returned. Figures are rounded to whole KiB and microseconds."""
    (proc / "pressure").mkdir(parents=True, exist_ok=True)
    text = MEMINFO.format(total=total_bytes // 1024, available=available_bytes // 1024)
    (proc / "meminfo.new").write_text(text, encoding="ascii")
    (proc / "meminfo.new").rename(proc / "meminfo")
    microseconds = round(stalled_seconds * 1e6)
    for resource in ("memory", "io"):
        text = PRESSURE.format(some=2 * microseconds, full=microseconds)
        (proc / "pressure" / resource).write_text(text, encoding="ascii")
    return proc


@dataclass
class FakeGpu:
    uuid: str
    free: int
    total: int = 80 * 2**30
    processes: int = 0
    instances: Sequence[tuple[int, int]] = ()
    """(GPU instance id, free bytes) of each MIG instance."""
    is_lost: bool = False
    links: set[int] = field(default_factory=set)


class FakeNvml:
    """The functions of pynvml that the exporter calls."""

    class NVMLError(Exception):
        pass

    NVML_NVLINK_MAX_LINKS = 18
    NVML_DEVICE_MIG_ENABLE = 1

    def __init__(self, *gpus: FakeGpu) -> None:
        self.gpus = gpus
        self.fails = False
        self.num_shutdowns = 0

    def nvmlShutdown(self) -> None:
        self.num_shutdowns += 1

    def nvmlDeviceGetCount(self) -> int:
        if self.fails:
            raise self.NVMLError
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self.gpus[index]

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:
        return "NVIDIA H100"

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetMemoryInfo(self, part: Any) -> Any:
        if isinstance(part, FakeGpu):
            if part.is_lost:
                raise self.NVMLError
            return SimpleNamespace(free=part.free, total=part.total)
        return SimpleNamespace(free=part[1], total=10 * 2**30)

    def nvmlDeviceGetComputeRunningProcesses(self, part: Any) -> list[int]:
        if not isinstance(part, FakeGpu):
            raise self.NVMLError
        return list(range(part.processes))

    def nvmlDeviceGetMaxPcieLinkGeneration(self, gpu: FakeGpu) -> int:
        return 5

    def nvmlDeviceGetCurrPcieLinkWidth(self, gpu: FakeGpu) -> int:
        return 16

    nvmlDeviceGetMaxPcieLinkWidth = nvmlDeviceGetCurrPcieLinkWidth

    def nvmlDeviceGetNvLinkState(self, gpu: FakeGpu, link: int) -> int:
        if link >= 4:
            raise self.NVMLError
        return link in gpu.links

    def nvmlDeviceGetPciInfo(self, gpu: FakeGpu) -> Any:
        return SimpleNamespace(busId="00000000:3B:00.0")

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:
        if not gpu.instances:
            raise self.NVMLError
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: FakeGpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, number: int) -> tuple[int, int]:
        if number >= len(gpu.instances):
            raise self.NVMLError
        return gpu.instances[number]

    def nvmlDeviceGetGpuInstanceId(self, instance: tuple[int, int]) -> int:
        return instance[0]
