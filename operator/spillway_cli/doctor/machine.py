"""Findings of `spillway doctor` about this machine, from gathered facts. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from spillway import __version__
from spillway.extras import EXTRAS, install_command
from spillway.units import GIB, MIB, format_bytes

from ..machine.gpus import NO_DRIVER, Gpus
from .findings import STALE_DAYS, Diagnosis, Missing, Severity, days_since

OK, NOTE, WARNING, ERROR = Severity.OK, Severity.NOTE, Severity.WARNING, Severity.ERROR
WITHOUT = {
    "trainer": (WARNING, "this machine can plan and submit jobs, not train them"),
    "operator": (NOTE, "submit, status, logs and top of a cluster do not work"),
    "tables": (NOTE, "no .parquet or .arrow files can be read"),
    "fetch": (NOTE, "nothing can be downloaded from s3:// or https:// (spec.*.fetch)"),
    "hf": (
        NOTE,
        "only llama models given by their sizes (model.config), without adapters, and your own entrypoints "
        "can be trained",
    ),
    "trackers": (NOTE, "spec.tracking cannot show runs in TensorBoard, MLflow or Weights & Biases"),
    "deepspeed": (NOTE, "strategies Zero1, Zero2 and Zero3 do not work on CPUs"),
}
LEAST_DISK_BYTES, LEAST_MEMORY_BYTES = GIB, GIB
SMALL_MEMLOCK_BYTES = 64 * MIB
MOST_USED = 0.1
"""Share of a GPU's memory that may be in use before it is reported; a display uses less."""
REFERENCE = "reference"


@dataclass(frozen=True, slots=True)
class Native:
    """The state of the native library, from a trainer's process."""

    isa: str
    """Instruction set in use; "reference" = the native library is not used."""
    instruction_sets: tuple[str, ...]
    """Those that both library and processor have; empty = no library."""


@dataclass(frozen=True, slots=True)
class Disk:
    directory: str
    free_bytes: int
    direct: bool
    """Whether O_DIRECT works."""
    is_named: bool = True
    """Whether it was given by --directory; else it is the current one, which may not be meant for spilling."""
    problem: str = ""
    """Why it is not writable; empty = it is."""


@dataclass(frozen=True, slots=True)
class MachineMemory:
    total_bytes: int
    available_bytes: int
    """Bytes available to this process now, within its limits."""
    is_limited: bool
    """Whether a cgroup limits the process to less than the machine has free."""


@dataclass(frozen=True, slots=True)
class Cores:
    usable: int
    of_machine: int
    omp_num_threads: str
    """The environment variable; empty = not set."""


@dataclass(frozen=True, slots=True)
class Profile:
    path: str
    """Empty = there is no directory for it."""
    exists: bool
    measured_time: str = ""
    problem: str = ""
    """Why plans do not use the profile."""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Facts about this machine; Missing if not gathered in time."""

    python: str
    versions: Mapping[str, str]
    """Distribution -> installed version."""
    minima: Mapping[str, str]
    """Distribution -> the lowest version that this spillway requires."""
    native: Native | Missing
    huge_pages: str | Missing
    """always, madvise or never; empty: unknown."""
    disk: Disk | Missing
    memory: MachineMemory | Missing
    cores: Cores | Missing
    memlock_bytes: int | Missing | None
    """None = no limit."""
    profile: Profile | Missing
    gpus: Gpus | Missing = NO_DRIVER


def machine_findings(machine: MachineFacts, now: datetime) -> list[Diagnosis]:
    return [
        *packages(machine),
        *native_library(machine.native, "torch" in machine.versions),
        *spill_directory(machine.disk),
        *memory(machine.memory),
        *locked_memory(machine.memlock_bytes, machine.gpus),
        *gpus(machine.gpus),
        *huge_pages(machine.huge_pages),
        *threads(machine.cores),
        *profile(machine.profile, now),
    ]


def finding(check: str, severity: Severity, message: str, fix: str = "") -> Diagnosis:
    return Diagnosis("machine", check, severity, message, fix)


def unknown(check: str, missing: Missing) -> Diagnosis:
    return finding(check, WARNING, f"not examined: {missing.why}", "run spillway doctor again on an idle machine")


def packages(machine: MachineFacts) -> Iterator[Diagnosis]:
    """Python, and the packages of each extra."""
    yield finding("python", OK, f"Python {machine.python}, spillway {__version__}")
    for extra, names in EXTRAS.items():
        install = install_command(extra)
        absent = [name for name in names if name not in machine.versions]
        old = [name for name in names if is_older(machine.versions.get(name), machine.minima.get(name))]
        if absent:
            severity, effect = WITHOUT[extra]
            yield finding(extra, severity, f"not installed: {', '.join(absent)}; {effect}", install)
        elif old:
            found = ", ".join(f"{name} {machine.versions[name]} (at least {machine.minima[name]})" for name in old)
            yield finding(extra, ERROR, f"too old: {found}", install)
        else:
            yield finding(extra, OK, ", ".join(f"{name} {machine.versions[name]}" for name in names))


def is_older(version: str | None, least: str | None) -> bool:
    """Compares leading numbers only: 2.11.0+cpu is not older than 2.11."""
    return version is not None and least is not None and numbers(version) < numbers(least)


def numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def native_library(native: Native | Missing, has_torch: bool) -> Iterator[Diagnosis]:
    if not has_torch:
        return  # already reported by `packages`
    if isinstance(native, Missing):
        fix = (
            "see why: python -m spillway_trainer.kernels.native"
            if native.is_absent
            else "run it again on an idle machine"
        )
        severity = ERROR if native.is_absent else WARNING
        yield finding("native", severity, f"the native library was not examined: {native.why}", fix)
        return
    if native.isa == REFERENCE:
        forced = bool(native.instruction_sets)
        why = "is not used (SPILLWAY_FORCE_ISA=reference)" if forced else "was not built: no C++ compiler was found"
        fix = "unset SPILLWAY_FORCE_ISA" if forced else "install a C++20 compiler and CMake, then reinstall spillway"
        yield finding("native", WARNING, f"the native library {why}; same results, but slower", fix)
        return
    available = ", ".join(native.instruction_sets)
    yield finding("native", OK, f"the native library uses {native.isa} (available: {available})")


def spill_directory(disk: Disk | Missing) -> Iterator[Diagnosis]:
    check, elsewhere = "spill", "choose another --directory, and give it to spillway run --spill"
    if isinstance(disk, Missing):
        yield unknown(check, disk)
        return
    if disk.problem:
        severity = ERROR if disk.is_named else WARNING
        yield finding(check, severity, f"{disk.directory}: not writable: {disk.problem}", elsewhere)
        return
    free = f"{format_bytes(disk.free_bytes)} free"
    if disk.free_bytes < LEAST_DISK_BYTES:
        yield finding(check, WARNING, f"{disk.directory}: only {free}", f"free space, or {elsewhere}")
    if disk.direct:
        yield finding(check, OK, f"{disk.directory}: {free}, O_DIRECT works")
    else:
        message = f"{disk.directory}: {free}, no O_DIRECT: spilled bytes also occupy memory (page cache)"
        yield finding(check, WARNING, message, f"{elsewhere}, on a local disk with ext4 or xfs")


def memory(found: MachineMemory | Missing) -> Iterator[Diagnosis]:
    if isinstance(found, Missing):
        yield unknown("memory", found)
        return
    limit = ", limited by a cgroup" if found.is_limited else ""
    message = f"{format_bytes(found.available_bytes)} available of {format_bytes(found.total_bytes)}{limit}"
    if found.available_bytes >= LEAST_MEMORY_BYTES:
        yield finding("memory", OK, message)
        return
    fix = "raise the container's memory limit" if found.is_limited else "end processes that use much memory"
    yield finding("memory", WARNING, f"only {message}; torch alone needs several hundred MiB", fix)


def locked_memory(limit_bytes: int | Missing | None, gpus: Gpus | Missing) -> Iterator[Diagnosis]:
    """Checks RLIMIT_MEMLOCK: a GPU driver may count pinned host memory against it, though NVIDIA's does not."""
    if isinstance(limit_bytes, Missing):
        yield unknown("memlock", limit_bytes)
        return
    limit = "no limit" if limit_bytes is None else format_bytes(limit_bytes)
    if limit_bytes is None or limit_bytes >= SMALL_MEMLOCK_BYTES or not (isinstance(gpus, Gpus) and gpus.found):
        yield finding("memlock", OK, f"RLIMIT_MEMLOCK: {limit}")
    else:
        effect = "a GPU's driver may reject the pinned host memory of a plan"
        yield finding("memlock", NOTE, f"RLIMIT_MEMLOCK is {limit}: {effect}", "ulimit -l unlimited")


def gpus(found: Gpus | Missing) -> Iterator[Diagnosis]:
    if isinstance(found, Missing):
        yield unknown("gpu", found)
        return
    if found.problem:
        severity = WARNING if found.fix else OK
        yield finding("gpu", severity, f"no GPU can be used: {found.problem}; runs use the CPU", found.fix)
    elif found.torch_cuda:
        yield finding("gpu", OK, f"driver {found.driver}, torch built for CUDA {found.torch_cuda}")
    for index, gpu in enumerate(found.found):
        check, (generation, width, most) = f"gpu {index}", gpu.pcie
        links = f", PCIe {generation} x{width}" * bool(width) + f", {gpu.num_nvlinks} NVLinks" * bool(gpu.num_nvlinks)
        free, total = format_bytes(gpu.free_bytes), format_bytes(gpu.total_bytes)
        yield finding(check, OK, f"{gpu.name}, {free} free of {total}{links}")
        used = gpu.total_bytes - gpu.free_bytes
        if used > MOST_USED * gpu.total_bytes:
            by = f"{gpu.num_processes} computing processes" if gpu.num_processes else "the display or other programs"
            fix = "end those processes (nvidia-smi), or choose another GPU with CUDA_VISIBLE_DEVICES"
            yield finding(check, WARNING, f"{format_bytes(used)} used by {by}: plans can only use the rest", fix)
        if width < most:
            slow = f"PCIe runs with {width} of {most} lanes, so copies take {most / width:.3g} times as long"
            yield finding(check, WARNING, slow, "reseat the card, use another slot, or change the BIOS setting")


def huge_pages(mode: str | Missing) -> Iterator[Diagnosis]:
    if isinstance(mode, Missing):
        yield unknown("hugepages", mode)
    elif mode == "never":
        fix = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root)"
        yield finding("hugepages", WARNING, "transparent huge pages are off: large tensors cause more page faults", fix)
    elif mode:
        yield finding("hugepages", OK, f"transparent huge pages: {mode}")


def threads(cores: Cores | Missing) -> Iterator[Diagnosis]:
    if isinstance(cores, Missing):
        yield unknown("cores", cores)
        return
    few = f" of the machine's {cores.of_machine} (CPU affinity or quota)" if cores.usable < cores.of_machine else ""
    yield finding("cores", OK, f"{cores.usable} usable{few}")
    asked = cores.omp_num_threads
    if asked.isdecimal() and int(asked) > cores.usable:
        message = f"OMP_NUM_THREADS={asked}, but only {cores.usable} cores are usable: threads would compete"
        yield finding(
            "threads", WARNING, message, "unset OMP_NUM_THREADS; a run uses as many threads as there are cores"
        )


def profile(found: Profile | Missing, now: datetime) -> Iterator[Diagnosis]:
    check, measure = "calibration", "spillway calibrate"
    if isinstance(found, Missing):
        yield unknown(check, found)
    elif not found.exists:
        yield finding(check, NOTE, "not measured: plans for this machine use the catalog's rates", measure)
    elif found.problem:
        yield finding(check, WARNING, f"the profile is not used: {found.problem}", measure)
    elif not found.measured_time:
        yield finding(check, NOTE, f"{found.path} has no spec.measuredTime", measure)
    else:
        days = days_since(found.measured_time, now) or 0.0
        if days > STALE_DAYS:
            yield finding(check, WARNING, f"{found.path} was measured {days:.0f} days ago", measure)
        else:
            yield finding(check, OK, f"{found.path}, measured on {found.measured_time[:10]}")
