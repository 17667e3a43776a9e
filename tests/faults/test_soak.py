"""The whole slab, on two real files, under one percent of faults of every kind: what comes back is what was written, or
an error was raised. Reduced in `make test`, 200,000 operations in `make test-all`."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import shutil
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness.depth import FULL
from harness.places import ROOT
from spillway.errors import SpillIOError, SpillVolumeFull
from spillway.plan import Tier
from spillway_trainer.kernels import native
from spillway_trainer.kernels.io_engine import Direction, SystemCall
from spillway_trainer.tiers import nvme_slab
from spillway_trainer.tiers.encrypted_file import encrypted
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.lanes import Buffer
from spillway_trainer.tiers.nvme_slab import Kept, NvmeExtent, NvmeSlab, OpenFile, PlannedRates, Stored
from spillway_trainer.tiers.spill_file import SpillFile

NUM_OPERATIONS, SEED, FAULTY_PER_MILLION = (200_000 if FULL else 4_000), 1, 10_000
PAGE, NUM_CONTENTS, NUM_EXTENTS = 4096, 16, 24
KINDS = ("short", "interrupted", "eio", "enospc", "edquot", "flip", "delay")
"""in the order of faulty_calls.c"""
REPORTED_EACH = 20_000
SOURCE = Path(__file__).with_name("faulty_calls.c")
HEADERS = ROOT / "csrc" / "include"

pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("engine")]


class FaultyCalls:
    """faulty_calls.c, compiled: a call in a hundred goes wrong. Its state is the process's; `begin` makes it anew."""

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        self._begin, self._count, self._nanoseconds = (
            ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_uint64)(("faulty_begin", loaded)),
            ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int32)(("faulty_count", loaded)),
            ctypes.CFUNCTYPE(ctypes.c_int64)(("faulty_nanoseconds", loaded)),
        )
        self._native = native.IO_CALL(("faulty_call", loaded))

    def begin(self, seed: int) -> None:
        self._begin(seed, FAULTY_PER_MILLION)

    def clock(self) -> float:
        """Seconds of virtual time."""
        return float(self._nanoseconds() * 1e-9)

    def counts(self) -> dict[str, int]:
        """Calls by what was done to them."""
        return {kind: self._count(number) for number, kind in enumerate(("sound", *KINDS))}

    def call(self, engine: str) -> SystemCall:
        """What takes the place of pread and pwrite."""
        return self._from_python if engine == "python" else self._native

    def _from_python(self, direction: Direction, file: int, memory: memoryview, offset: int) -> int:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return int(self._native(None, direction, file, address, len(memory), offset))


@pytest.fixture(scope="module")
def faulty_calls(tmp_path_factory: pytest.TempPathFactory) -> FaultyCalls:
    compiler = os.environ.get("CC", "cc")
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed: the faults of the soak are written in C")
    library = tmp_path_factory.mktemp("faulty_calls") / "faulty_calls.so"
    options = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{HEADERS}"]
    subprocess.run([compiler, *options, str(SOURCE), "-o", str(library)], check=True)
    return FaultyCalls(library)


@dataclass
class Held:
    """An extent, and what a model in memory says it must give back."""

    extent: NvmeExtent
    stored: dict[int, tuple[Stored, int]] = field(default_factory=dict)
    """by page: what reads it, and which content it must be"""


class Soak:
    """Random operations on one slab after another: a slab ends when none of its devices takes writes any more."""

    def __init__(self, directory: Path, seed: int, calls: FaultyCalls, engine: str, *, encrypts: bool) -> None:
        self.calls, self._started = calls, time.process_time()
        self.calls.begin(seed)
        open_file = partial(SpillFile, call=calls.call(engine))
        self._open_file: OpenFile = encrypted(open_file) if encrypts else open_file
        self.choose = random.Random(seed + 1)
        self.counts: Counter[str] = Counter()
        self.host = HostSlab(512 * PAGE)
        generator = torch.Generator().manual_seed(seed)
        self.contents = [self._memory(4 * PAGE, generator) for _ in range(NUM_CONTENTS)]
        self.target = self._memory(4 * PAGE, generator)
        self._directory = directory
        self.slab = self._opened()
        self.held: list[Held] = []

    def run(self, num_operations: int) -> None:
        next_report = REPORTED_EACH
        while self.num_operations < num_operations:
            if self.num_operations >= next_report:
                print(self.found(), flush=True)
                next_report += REPORTED_EACH
            if not self.slab.takes_spills and self.choose.random() < 0.02:
                self.reopen()
            step = self.choose.random()
            if step < 0.4:
                self.write()
            elif step < 0.9:
                self.read()
            elif self.held:
                self.drop(self.choose.choice(self.held))

    @property
    def num_operations(self) -> int:
        """Batches written and read, and extents dropped; what was chosen and could not be done is none."""
        return self.counts["write"] + self.counts["read"] + self.counts["drop"]

    def found(self) -> str:
        seconds = time.process_time() - self._started
        done = f"{self.num_operations:,} operations, {seconds:.0f} s of a core"
        return f"{done}: {dict(self.counts)}; injected: {self.calls.counts()}"

    def write(self) -> None:
        """A new extent, or over an old one; as a copy, as states do, or from a buffer that it may go on living in."""
        if len(self.held) < NUM_EXTENTS and self.slab.takes_spills:
            try:
                held = Held(self.slab.allocate(self.choose.randrange(1, 5) * PAGE, "soak"))
            except SpillVolumeFull:
                assert self.slab.first_failure is not None, "64 pages are enough while none is retired"
                return
            self.held.append(held)
        elif self.held:
            held = self.choose.choice(self.held)
        else:
            return
        if held.extent.home is not None:
            return  # such an extent is written once, as activations are
        content, whole = self.choose.randrange(NUM_CONTENTS), held.extent.nbytes
        pages = [0] if self.choose.random() < 0.5 else [*range(0, whole, PAGE)]
        nbytes = whole if len(pages) == 1 else PAGE
        if held.stored and set(held.stored) != set(pages):
            return  # places in an extent stay the same while it lives, as in the trainer
        source = None
        data = self.contents[content]
        if not held.stored and self.choose.random() < 0.3 and len(pages) == 1:
            memory = self.host.allocate_now(whole, "staging")
            if memory is not None:
                memory.copy_(data[:whole])
                source, data = Buffer(Tier.HOST, memory, "staging", self.host.free), memory
        writes = [(held.extent.at(page), data[page : page + nbytes], f"page {page}") for page in pages]
        self.counts["write"] += 1
        try:
            stored = self.slab.write_batch(writes, source)
            held.stored = {page: (each, content) for page, each in zip(pages, stored, strict=True)}
            self.counts["kept"] += sum(isinstance(each, Kept) for each in stored)
        except (SpillIOError, SpillVolumeFull):
            self.counts["raised by writes"] += 1
            self.drop(held)
        if source is not None:
            source.poison()
            source.drop()

    def read(self) -> None:
        written = [each for each in self.held if each.stored]
        if not written:
            return
        self.counts["read"] += 1
        held = self.choose.choice(written)
        nbytes = held.extent.nbytes if len(held.stored) == 1 else PAGE
        targets = {page: self.target[page : page + nbytes] for page in held.stored}
        for target in targets.values():
            target.fill_(0)
        try:
            self.slab.read_batch([(held.stored[page][0], targets[page], f"page {page}") for page in targets])
        except SpillIOError:
            self.counts["raised by reads"] += 1
            self.drop(held)
            return
        for page, target in targets.items():
            wanted = self.contents[held.stored[page][1]][page : page + nbytes]
            self.counts["silent errors"] += not torch.equal(target, wanted)

    def drop(self, held: Held) -> None:
        self.counts["drop"] += 1
        self.held.remove(held)
        held.extent.drop()

    def reopen(self) -> None:
        self.counts["slabs"] += 1
        self.counts.update(self.slab.faults())
        for held in [*self.held]:
            self.drop(held)
        assert self.host.held_bytes == 0, "what was kept is freed with its extents"
        assert self.slab.held_bytes == 0
        self.slab.close()
        self.slab = self._opened()

    def _opened(self) -> NvmeSlab:
        paths = [self._directory / name for name in ("first", "second")]
        for path in paths:
            path.mkdir(exist_ok=True)
        return NvmeSlab(
            paths, 128 * PAGE, 1, open_file=self._open_file, host=self.host,
            planned=PlannedRates(1e9, 1e9), clock=self.calls.clock,
        )  # fmt: skip

    def _memory(self, nbytes: int, generator: torch.Generator) -> Tensor:
        memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        return memory.random_(0, 256, generator=generator)


@pytest.mark.parametrize("encrypts", [False, True], ids=["plain", "encrypted"])
def test_a_soak_with_one_percent_of_faults_has_no_silent_error(
    tmp_path: Path, engine: str, encrypts: bool, faulty_calls: FaultyCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    if encrypts and engine == "python":
        pytest.skip("the cipher in torch is too slow for a soak; test_encrypted_file.py has it")
    monkeypatch.setattr(nvme_slab, "STRIPE_BYTES", PAGE)  # so that small extents are striped, too
    soak = Soak(tmp_path, SEED, faulty_calls, engine, encrypts=encrypts)
    soak.run(NUM_OPERATIONS)
    soak.reopen()
    reduced = "" if FULL else " (of 1,000,000 with SPILLWAY_DEPTH=all, some 4 minutes of a core, 5 encrypted)"
    print(f"\n{engine}{', encrypted' * encrypts}, seed {SEED}{reduced}: {soak.found()}")
    injected = faulty_calls.counts()
    assert min(injected.values()) > 0
    assert min(soak.counts[kind] for kind in ("kept", "raised by reads", "device_retired", "device_slow")) > 0
    assert soak.counts["silent errors"] == 0
