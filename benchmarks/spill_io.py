"""The spill file's I/O compared with fio and DeepSpeed's asynchronous I/O: same file, O_DIRECT, same queue depth.

Requests of 4 MiB, 8 in flight (mixed: a reader and a writer with 4 each), 256 MiB a run. Ours is the engine of a spill
file on a host slab, **with checksums**: of every byte that is written, and of every byte that is read, which are
compared. Rivals move as many bytes in the same file without checksums, except `fio, crc`.

  fio        the best of its engines libaio, io_uring (plain, with registered buffers) and threads (psync), chosen for
             each kind of transfer in separate rounds before those that count. Its memory is its default (malloc, small
             pages); its buffers are filled once and never touched again.
  fio, huge  the same choice with huge pages, which ours uses and fio only with a setting of glibc. Not with --quick.
  fio, crc   fio's read with verify=crc32c: the same work as ours. Not with --quick.
  DeepSpeed  aio_handle with its own locked buffers, the better of 1 and 4 threads.

Everything is measured, nothing is modelled. CPU seconds are those of the whole process for ours, and those of the I/O
threads for fio. `cpu_seconds_per_gb_vs_fio` includes our checksums; `cpu_system_vs_fio` compares only CPU seconds in
the kernel, which moves the bytes (in user mode ours does little else than checksums). For both, less is better.
SPILL_IO_DIRECTORY names the directory (default: this one) on the disk to measure; it needs 1.3 GiB.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import paired
import rivals
from spillway_trainer.kernels import native
from spillway_trainer.kernels.io_engine import Direction, IoRequest
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.spill_file import SpillFile

MIB = 2**20
DIRECTORY = Path(os.environ.get("SPILL_IO_DIRECTORY", "."))
REQUEST_BYTES = 4 * MIB
QUEUE_DEPTH = 8
REGION_BYTES = 256 * MIB
"""bytes that one run moves; ours, fio, DeepSpeed and fio with checksums each have a region of their own"""
BATCH_BYTES = REGION_BYTES
"""bytes that one call of ours or of DeepSpeed moves"""
KINDS = ("write", "read", "mixed")
FIO_ENGINES: Mapping[str, tuple[str, ...]] = {
    "libaio": ("--ioengine=libaio", f"--iodepth={QUEUE_DEPTH}"),
    "io_uring": ("--ioengine=io_uring", f"--iodepth={QUEUE_DEPTH}"),
    "io_uring, fixed buffers": ("--ioengine=io_uring", f"--iodepth={QUEUE_DEPTH}", "--fixedbufs=1"),
    "threads": ("--ioengine=psync", "--thread", f"--numjobs={QUEUE_DEPTH}"),
}
NUM_REGIONS = 5
FIGURE_NAMES = {"fio": "fio", "fio, huge": "fio_huge", "fio, crc": "fio_crc", "DeepSpeed": "deepspeed"}
HUGE = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


class Cost(NamedTuple):
    """The cost of one run, which moves REGION_BYTES."""

    seconds: float
    user_seconds: float
    system_seconds: float

    @property
    def cpu_seconds(self) -> float:
        return self.user_seconds + self.system_seconds


SECONDS, CPU, SYSTEM = (attrgetter(name) for name in ("seconds", "cpu_seconds", "system_seconds"))
Run = Callable[[], Cost]


def measured(run: Callable[[], object]) -> Cost:
    before, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    run()
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
    return Cost(seconds, after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime)


def fill(memory: Tensor) -> None:
    """Fills `memory` with random bytes, which no disk can compress within a request."""
    memory.view(-1, REQUEST_BYTES).copy_(torch.randint(0, 256, (REQUEST_BYTES,), dtype=torch.uint8))


class Ours:
    """Moves region 0 by the engine of our spill files."""

    def __init__(self, path: Path) -> None:
        self._begin = 0
        self._file = os.open(path, os.O_RDWR | os.O_DIRECT)
        halves = QUEUE_DEPTH // 2  # mixed: a reader and a writer share the depth
        self._engine, self._halves = (native.NativeEngine(self._file, depth) for depth in (QUEUE_DEPTH, halves))
        self._slab = HostSlab(2 * BATCH_BYTES)
        memory = self._slab.allocate(2 * BATCH_BYTES, "ours")
        fill(memory)
        self._buffers = memory[:BATCH_BYTES], memory[BATCH_BYTES:]
        self._checksums = [0] * (REGION_BYTES // REQUEST_BYTES)
        self._threads = ThreadPoolExecutor(1)
        self.write()

    def _move(self, engine: native.NativeEngine, direction: Direction, buffer: Tensor, begin: int, end: int) -> None:
        for start in range(begin, end, BATCH_BYTES):
            offsets = range(start, min(start + BATCH_BYTES, end), REQUEST_BYTES)
            places = [buffer[at - start : at - start + REQUEST_BYTES] for at in offsets]
            known = [self._checksums[at // REQUEST_BYTES] for at in offsets]
            transfers = [
                IoRequest(self._begin + at, *rest)
                for at, rest in zip(offsets, zip(places, known, strict=True), strict=True)
            ]
            engine.transfer(direction, transfers)
            for at, transfer in zip(offsets, transfers, strict=True):
                if transfer.failure:
                    sys.exit(f"ours, {direction.name}: {transfer.failure.name}, errno {transfer.os_error}")
                self._checksums[at // REQUEST_BYTES] = transfer.checksum

    def write(self) -> None:
        self._move(self._engine, Direction.WRITE, self._buffers[0], 0, REGION_BYTES)

    def read(self) -> None:
        self._move(self._engine, Direction.READ, self._buffers[1], 0, REGION_BYTES)

    def mixed(self) -> None:
        half = REGION_BYTES // 2
        written = self._threads.submit(self._move, self._halves, Direction.WRITE, self._buffers[0], 0, half)
        self._move(self._halves, Direction.READ, self._buffers[1], half, REGION_BYTES)
        written.result()

    def checksums(self) -> None:
        """Computes the checksums of one run of any kind, and moves nothing."""
        for _ in range(REGION_BYTES // BATCH_BYTES):
            for at in range(0, BATCH_BYTES, REQUEST_BYTES):
                native.crc32c(self._buffers[0][at : at + REQUEST_BYTES])


def fio(path: Path, kind: str, engine: str, *, huge: bool = False, region: int = 1, verify: str = "") -> Cost:
    """Runs fio once. The seconds are those that fio itself counts, without its start."""
    num_jobs = QUEUE_DEPTH if engine == "threads" else 1
    share = REGION_BYTES // num_jobs
    command = [
        *("fio", "--name=spill", f"--filename={path}", f"--offset={region * REGION_BYTES}", f"--size={share}"),
        *(f"--offset_increment={share}", "--direct=1", f"--bs={REQUEST_BYTES}", "--thread", "--group_reporting"),
        *("--gtod_reduce=1", "--scramble_buffers=0", "--output-format=json"),
        *(f"--rw={'rw' if kind == 'mixed' else kind}", *FIO_ENGINES[engine], *verify.split()),
    ]
    environment = {**os.environ, **(HUGE if huge else {})}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if ended.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{ended.stderr}{ended.stdout}")
    (job,) = json.loads(ended.stdout[ended.stdout.index("{") :])["jobs"]
    seconds = max(job["read"]["runtime"], job["write"]["runtime"]) / 1000
    user_seconds, system_seconds = (job[share] / 100 * job["job_runtime"] / 1000 for share in ("usr_cpu", "sys_cpu"))
    return Cost(seconds, user_seconds, system_seconds)


def fastest(runs: Mapping[str, Run], num_rounds: int) -> str:
    """Returns the name of the run with the least median of seconds."""
    costs: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(num_rounds):
        for name, run in runs.items():
            costs[name].append(run().seconds)
    return min(costs, key=lambda name: paired.median(costs[name]))


class DeepSpeed:
    """Moves region 2 by aio_handle."""

    def __init__(self, path: Path, aio: Any, num_threads: int) -> None:
        self._path = str(path)
        self._handle = aio.aio_handle(REQUEST_BYTES, QUEUE_DEPTH // num_threads, False, True, num_threads)
        self._buffer = self._handle.new_cpu_locked_tensor(BATCH_BYTES, torch.empty(0, dtype=torch.uint8))

    def _move(self, transfer: Callable[[Tensor, str, int], int]) -> None:
        for at in range(2 * REGION_BYTES, 3 * REGION_BYTES, BATCH_BYTES):
            transfer(self._buffer, self._path, at)

    def write(self) -> None:
        self._move(self._handle.sync_pwrite)

    def read(self) -> None:
        self._move(self._handle.sync_pread)


def deepspeed(path: Path) -> dict[str, DeepSpeed]:
    """Returns DeepSpeed's contestants by number of threads. If its operator cannot be built, prints why and returns
    none."""
    rivals.deepspeed()
    from deepspeed.ops.op_builder import AsyncIOBuilder  # noqa: PLC0415

    begin = time.perf_counter()
    if not AsyncIOBuilder().is_compatible(verbose=False):
        print("DeepSpeed's operator cannot be built here (libaio-dev is missing?): its column is left out")
        return {}
    aio = AsyncIOBuilder().load(verbose=False)
    if (seconds := time.perf_counter() - begin) > 10:
        print(f"once: DeepSpeed's operator built in {seconds:.0f} s", flush=True)
    return {f"{num_threads} threads": DeepSpeed(path, aio, num_threads) for num_threads in (1, 4)}


@contextmanager
def spill_file(directory: Path) -> Iterator[Path]:
    """Yields a preallocated file in which every block was written once. It has a name, so that rivals can open it."""
    present = set(directory.glob("slab-*"))
    file = SpillFile(directory, NUM_REGIONS * REGION_BYTES, listed=True)
    try:
        (path,) = set(directory.glob("slab-*")) - present
        block = HostSlab(BATCH_BYTES).allocate(BATCH_BYTES, "first bytes")
        fill(block)
        for at in range(0, NUM_REGIONS * REGION_BYTES, BATCH_BYTES):
            file.write_batch([(at, block)])
        yield path
    finally:
        file.close()


def contestants(path: Path, quick: bool) -> dict[str, Run]:
    """Returns the runs by "kind, contestant". Runs of a kind are adjacent, so that compared runs are close in time."""
    num_rounds = 1 if quick else 5
    theirs, has_fio = deepspeed(path), shutil.which("fio") is not None
    if not theirs and not has_fio:
        sys.exit("spill_io: nothing to compare with: install fio (apt-get install fio), or libaio-dev for DeepSpeed's")
    ours = Ours(path)
    if not has_fio:
        print("fio is not installed: its columns are left out (apt-get install fio)")
    runs: dict[str, Run] = {}
    for kind in KINDS:
        runs[f"{kind}, ours"] = functools.partial(measured, getattr(ours, kind))
        for huge in (False, True) if has_fio and not quick else (False,) * has_fio:
            column = "fio, huge" if huge else "fio"
            with_engine = {engine: functools.partial(fio, path, kind, engine, huge=huge) for engine in FIO_ENGINES}
            best = fastest(with_engine, num_rounds)
            print(f"{kind}: {column} is at its best with {best}", flush=True)
            runs[f"{kind}, {column}"] = with_engine[best]
        if has_fio and not quick and kind == "read":
            fio(path, "write", best, region=3, verify="--verify=crc32c --do_verify=0")
            runs[f"{kind}, fio, crc"] = functools.partial(fio, path, kind, best, region=3, verify="--verify=crc32c")
        if theirs and kind != "mixed":
            with_threads = {n: functools.partial(measured, getattr(handle, kind)) for n, handle in theirs.items()}
            best = fastest(with_threads, num_rounds)
            print(f"{kind}: DeepSpeed is at its best with {best}", flush=True)
            runs[f"{kind}, DeepSpeed"] = with_threads[best]
    runs["checksums alone"] = functools.partial(measured, ours.checksums)
    return runs


def measure(quick: bool) -> dict[str, float]:
    begin = time.perf_counter()
    with spill_file(DIRECTORY) as path:
        print(f"ours: threads, O_DIRECT on {path.parent.resolve()}, {native.isa()}", flush=True)
        runs = contestants(path, quick)
        elapsed = time.perf_counter() - begin
        costs = paired.alternate(runs, seconds=max(30 - elapsed, 0) if quick else 240)
    return figures(costs, "ours")


def figures(costs: Mapping[str, list[Cost]], engine: str) -> dict[str, float]:
    """Prints the table and returns the figures."""
    gigabytes = REGION_BYTES / 1e9
    print(f"\n{'':>28}  GB/s  CPU s/GB  kernel's  ours is faster by [interval of the median ratio]")
    found: dict[str, float] = {}
    for name, runs in costs.items():
        seconds, cpu, system = (paired.median(map(column, runs)) for column in (SECONDS, CPU, SYSTEM))
        row = f"{name:>28}  {gigabytes / seconds:4.2f}  {cpu / gigabytes:8.4f}  {system / gigabytes:8.4f}"
        kind, _, who = name.partition(", ")
        if kind in KINDS and who != engine:
            mine = costs[f"{kind}, {engine}"]
            ratio = paired.paired_ratio(list(map(SECONDS, mine)), list(map(SECONDS, runs)))
            row += f"  {ratio}"
            figure = f"{kind}_vs_{FIGURE_NAMES.get(who) or who.removeprefix('ours, ')}"
            found |= {figure: ratio.median, f"{figure}_low": ratio.low}
        print(row)
    for who in ("fio", "fio, huge", "fio, crc"):
        kinds = [kind for kind in KINDS if f"{kind}, {who}" in costs]
        if not kinds:
            continue
        name, of_kinds = FIGURE_NAMES[who], f"ours over that of {who}, {' + '.join(kinds)}"
        ours, theirs = ([sum(map(CPU, runs)) for runs in together(costs, kinds, w)] for w in (engine, who))
        ratio = paired.paired_ratio(theirs, ours)  # the rival's first: gives our seconds over theirs, not our speed
        print(f"CPU seconds of {of_kinds}: {ratio}")
        found |= {f"cpu_seconds_per_gb_vs_{name}": ratio.median, f"cpu_seconds_per_gb_vs_{name}_high": ratio.high}
        # Summed over all rounds, because the kernel's time in one run is a few ticks of its clock or none.
        system = [sum(sum(map(SYSTEM, runs)) for runs in together(costs, kinds, w)) for w in (engine, who)]
        found[f"cpu_system_vs_{name}"] = system[0] / system[1]
        print(f"kernel's CPU seconds of {of_kinds}: {system[0] / system[1]:.3f}")
    return found


def together(costs: Mapping[str, list[Cost]], kinds: list[str], who: str) -> Iterator[tuple[Cost, ...]]:
    """Yields for each round the contestant's runs of all `kinds`."""
    return zip(*(costs[f"{kind}, {who}"] for kind in kinds), strict=True)


if __name__ == "__main__":
    paired.main("spill_io", __doc__ or "", measure)
