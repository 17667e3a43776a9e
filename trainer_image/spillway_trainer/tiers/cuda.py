"""One CUDA device: streams, events, the allocator's limit, registered host memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from spillway.errors import HostOutOfMemory, UserError
from spillway.units import MIB, format_bytes

from ..kernels.pinned import copy, spans
from .cuda_lanes import DeviceEvent, Stream
from .host_slab import HostSlab

PAGE_BYTES = 20 * MIB
"""The unit in which torch's allocator takes device memory for blocks above 1 MiB."""
SMALL_BLOCKS_BYTES = 32 * MIB
"""Reserved for smaller blocks, for which the allocator takes 2 MiB at a time, per stream."""


def device_of(local_rank: int) -> torch.device:
    """Returns the device of a rank. Raises UserError if there is none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank >= count:
        raise UserError(
            f"the plan is for Cuda devices, but rank {local_rank} of this node finds only {count} of them; give the "
            "pod one CUDA device per rank (spec.parallelism.devicesPerNode, spec.pod.resourceName), check that "
            "nvidia-smi works in the pod, or set spec.parallelism.device: Cpu in a new job"
        )
    return torch.device("cuda", local_rank)


def prepare(device: torch.device, budget_bytes: int) -> None:
    """Prepares the process before anything is allocated on `device`: selects the device, selects kernels that give the
    same bits each time, and limits memory to `budget_bytes`."""
    torch.cuda.set_device(device)
    torch.set_deterministic_debug_mode("error")  # `use_deterministic_algorithms` imports a compiler (seconds)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # no bit of a run is read before it is written
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / total), device)


def reserve(device: torch.device, nbytes: int) -> None:
    """Makes torch's allocator take `nbytes` in one piece, from which steps allocate in any order. (To grow for a block,
    the allocator requires space for the whole block, even if it only has to extend free memory.) Raises
    OutOfMemoryError if others use the memory."""
    torch.cuda.empty_cache()  # drops earlier memory, such as that of tied parameters
    pages = (nbytes - torch.cuda.memory_reserved(device) - SMALL_BLOCKS_BYTES) // PAGE_BYTES
    if pages > 0:
        torch.empty(pages * PAGE_BYTES, dtype=torch.uint8, device=device)


def bus_address(index: int) -> str:
    """Returns the PCI bus address of a device, in the notation of sysfs."""
    found: Any = torch.cuda.get_device_properties(index)
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def generator(device: torch.device) -> torch.Generator:
    """Returns the random generator that dropout uses on `device`."""
    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return torch.cuda.default_generators[device.index]


def peak_bytes(device: torch.device) -> int:
    """Returns the most device memory that torch's allocator reserved since the last call, including gaps between
    tensors."""
    found = torch.cuda.max_memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    return found


def allocator_retries(device: torch.device) -> int:
    """Returns how often torch's allocator freed its cached memory and tried again, since the last call."""
    found = int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))
    torch.cuda.reset_accumulated_memory_stats(device)
    return found


class PooledEvent:
    """A position in a stream; its torch event is reused once the object is unreferenced."""

    __slots__ = ("_pool", "event")

    def __init__(self, pool: list[torch.cuda.Event], *, timed: bool) -> None:
        self._pool = pool
        try:
            self.event = pool.pop()
        except IndexError:
            # Blocking, so that a host thread that waits for it sleeps.
            self.event = torch.cuda.Event(enable_timing=timed, blocking=True)  # type: ignore[no-untyped-call]

    def __del__(self) -> None:
        self._pool.append(self.event)

    def query(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        self.event.synchronize()


class CudaStreams:
    """The Streams of a real device. The run's compute stream is the one that is current when this object is made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._compute = torch.cuda.current_stream(device)
        self._events: dict[bool, list[torch.cuda.Event]] = {True: [], False: []}
        """Unused events, by whether they are timed."""

    def compute(self) -> Stream:
        if torch._C._cuda_getCurrentRawStream(self.device.index) != self._compute.cuda_stream:
            raise RuntimeError(
                f"spec.model: the model switched to CUDA stream {torch.cuda.current_stream(self.device)}, but the "
                f"trainer orders its copies only with {self._compute}; remove the change of streams "
                "(torch.cuda.stream) from the model"
            )
        return self._compute

    def enter_thread(self) -> None:
        torch.cuda.set_device(self.device)

    def make(self, label: str) -> Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def launch(self, stream: torch.cuda.Stream, work: Callable[[], None]) -> None:
        torch.cuda.set_stream(stream)
        try:
            work()
        finally:
            torch.cuda.set_stream(self._compute)  # the only one that the run's threads use

    def record(self, stream: torch.cuda.Stream, *, timed: bool = False) -> DeviceEvent:
        mark = PooledEvent(self._events[timed], timed=timed)
        mark.event.record(stream)
        return mark

    def wait(self, stream: torch.cuda.Stream, event: Any) -> None:
        stream.wait_event(event.event)

    def seconds_between(self, first: Any, second: Any) -> float:
        return float(first.event.elapsed_time(second.event)) / 1e3

    def allocate(self, nbytes: int) -> Tensor | None:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError:
            return None

    def pin(self, memory: Tensor) -> None:
        runtime, address = _runtime(), memory.data_ptr()
        for first, end in spans(address, memory.numel()):
            error = int(runtime.cudaHostRegister(address + first, end - first, 0))
            if error:
                raise HostOutOfMemory(
                    f"host memory: {format_bytes(end - first)} cannot be pinned for the device (CUDA error {error}), "
                    f"after {format_bytes(first)} of {format_bytes(memory.numel())} were pinned; raise the "
                    "container's memory limit and locked memory (ulimit -l), or lower spec.memory.budget.host",
                    wanted_bytes=end - first,
                    held_bytes=first,
                )

    def unpin(self, memory: Tensor) -> None:
        runtime, address = _runtime(), memory.data_ptr()
        for first, _ in spans(address, memory.numel()):
            runtime.cudaHostUnregister(address + first)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


# --- measuring --------------------------------------------------------------------------------------------------------


def memory_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)


def device_name(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).name)


def synchronize() -> None:
    torch.cuda.synchronize()


def seconds_of(steps: Sequence[Callable[[], object]]) -> list[float]:
    """Returns the seconds of each step on the current stream, measured by device events from the end of the step
    before. The host waits for the device only once, at the end."""
    streams = CudaStreams(torch.device("cuda", torch.cuda.current_device()))
    marks = [streams.record(streams.compute(), timed=True)]
    for step in steps:
        step()
        marks.append(streams.record(streams.compute(), timed=True))
    marks[-1].synchronize()
    return [streams.seconds_between(*pair) for pair in pairwise(marks)]


def link_rates(device: torch.device, host: HostSlab, nbytes: int, num_rounds: int = 5) -> dict[str, float]:
    """Measures copies of `nbytes` between the device and `host`, which has twice as many bytes. Returns bytes per
    second (medians, by device events): up, down, both at once (bytes of both), and within the device (read and
    written)."""
    streams = CudaStreams(device)
    streams.pin(host.memory)
    sent, received = (host.allocate(nbytes, label) for label in ("sent", "received"))
    there, back = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    up, down = streams.make("up"), streams.make("down")
    compute = streams.compute()

    def both() -> None:
        start = streams.record(compute)
        for stream, dst, src in ((up, there, sent), (down, received, back)):
            streams.wait(stream, start)
            streams.launch(stream, lambda dst=dst, src=src: copy(dst, src))  # type: ignore[misc]
            streams.wait(compute, streams.record(stream))

    work: dict[str, tuple[int, Callable[[], None]]] = {
        "h2d": (nbytes, lambda: copy(there, sent)),
        "d2h": (nbytes, lambda: copy(received, back)),
        "both_ways": (2 * nbytes, both),
        "on_device": (2 * nbytes, lambda: copy(there, back)),
    }
    found = {}
    for name, (moved, once) in work.items():
        once()
        seconds = seconds_of([once] * num_rounds)
        found[name] = moved / statistics.median(seconds)
    synchronize()
    streams.unpin(host.memory)
    return found
