"""The whole slab, on two real files, under one percent of faults of every kind: what comes back is what was written, or
an error was raised. Reduced in `make test`, a million operations in `make faults`."""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spillway.errors import SpillIOError, SpillVolumeFull
from spillway.plan import Tier
from spillway_trainer.io_engine import Direction, system_call
from spillway_trainer.spill_file import SpillFile
from spillway_trainer.tiers import nvme_slab
from spillway_trainer.tiers.encrypted_file import encrypted
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.lanes import Buffer
from spillway_trainer.tiers.nvme_slab import Kept, NvmeExtent, NvmeSlab, OpenFile, PlannedRates, Stored

FULL = os.environ.get("SPILLWAY_SWEEPS") == "full"
NUM_OPERATIONS, SEED, FAULTY = (1_000_000 if FULL else 4_000), 1, 0.01
PAGE, NUM_CONTENTS, NUM_EXTENTS = 4096, 16, 24
KINDS = ("short", "interrupted", "eio", "enospc", "edquot", "flip", "delay")

pytestmark = pytest.mark.usefixtures("engine")


class Device:
    """In place of pread and pwrite of every file: a call in a hundred goes wrong. Delays pass in virtual time."""

    def __init__(self, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.seconds = 0.0
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def clock(self) -> float:
        return self.seconds

    def __call__(self, direction: Direction, file: int, memory: memoryview, offset: int) -> int:
        with self._lock:
            self.counts["calls"] += 1
            self.seconds += 1e-6
            fault = self._random.choice(KINDS) if self._random.random() < FAULTY else ""
            self.counts[fault] += 1
            bit = self._random.randrange(8 * len(memory))
            if fault == "delay":
                self.seconds += 12.0
        if fault == "short":
            return system_call(direction, file, memory[: max(512, len(memory) // 2 // 512 * 512)], offset)
        if fault == "interrupted":
            return -errno.EINTR
        if fault in ("eio", "enospc", "edquot"):
            number = {"eio": errno.EIO, "enospc": errno.ENOSPC, "edquot": errno.EDQUOT}[fault]
            return -(number if direction is Direction.WRITE else errno.EIO)
        if fault == "flip" and direction is Direction.WRITE:
            with mmap.mmap(-1, len(memory)) as wrong, memoryview(wrong) as view:
                view[:] = memory
                view[bit // 8] ^= 1 << bit % 8
                return system_call(direction, file, view, offset)
        moved = system_call(direction, file, memory, offset)
        if fault == "flip" and moved > 0:
            memory[bit // 8 % moved] ^= 1 << bit % 8
        return moved


@dataclass
class Held:
    """An extent, and what a model in memory says it must give back."""

    extent: NvmeExtent
    stored: dict[int, tuple[Stored, int]] = field(default_factory=dict)
    """by page: what reads it, and which content it must be"""


class Soak:
    """Random operations on one slab after another: a slab ends when none of its devices takes writes any more."""

    def __init__(self, directory: Path, seed: int, *, encrypts: bool) -> None:
        self.device = Device(seed)
        open_file = partial(SpillFile, call=self.device)
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
        while sum(self.counts[kind] for kind in ("write", "read", "drop")) < num_operations:
            if not self.slab.takes_spills and self.choose.random() < 0.02:
                self.reopen()
            step = self.choose.random()
            if step < 0.4:
                self.write()
            elif step < 0.9:
                self.read()
            elif self.held:
                self.drop(self.choose.choice(self.held))

    def write(self) -> None:
        """A new extent, or over an old one; as a copy, as states do, or from a buffer that it may go on living in."""
        self.counts["write"] += 1
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
        content, whole = self.choose.randrange(NUM_CONTENTS), held.extent.nbytes
        pages = [0] if self.choose.random() < 0.5 or held.extent.home else [*range(0, whole, PAGE)]
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
        if held.extent.home is not None:
            return  # such an extent is written once, as activations are
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
        self.counts["read"] += 1
        written = [each for each in self.held if each.stored]
        if not written:
            return
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
            planned=PlannedRates(1e9, 1e9), clock=self.device.clock,
        )  # fmt: skip

    def _memory(self, nbytes: int, generator: torch.Generator) -> Tensor:
        memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        return memory.random_(0, 256, generator=generator)


@pytest.mark.parametrize("encrypts", [False, True], ids=["plain", "encrypted"])
def test_a_soak_with_one_percent_of_faults_has_no_silent_error(
    tmp_path: Path, engine: str, encrypts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if encrypts and engine == "python":
        pytest.skip("the cipher in torch is too slow for a soak; test_encrypted_file.py has it")
    monkeypatch.setattr(nvme_slab, "STRIPE_BYTES", PAGE)  # so that small extents are striped, too
    soak = Soak(tmp_path, SEED, encrypts=encrypts)
    soak.run(NUM_OPERATIONS)
    soak.reopen()
    reduced = "" if FULL else " (of 1,000,000 with SPILLWAY_SWEEPS=full, some 6 minutes an engine)"
    print(
        f"\n{engine}{', encrypted' * encrypts}, seed {SEED}: {NUM_OPERATIONS:,} operations{reduced}: "
        f"{dict(soak.counts)}; injected: {dict(soak.device.counts)}"
    )
    assert min(soak.device.counts[kind] for kind in KINDS) > 0
    assert min(soak.counts[kind] for kind in ("kept", "raised by reads", "device_retired", "device_slow")) > 0
    assert soak.counts["silent errors"] == 0
