"""Live correction: when others fill the spill volume, activations of a run in progress move from the spill file to host
memory that the plan keeps free for this (`TierBytes.reserve`), and the file becomes smaller.

    every few steps   each rank looks at its volume; all gather what they saw, and what the operator told rank 0
    the same step     on all ranks NVMe takes less and host memory as much more; the file gives the difference back
    the next forward  keeps to it: each storage goes where the plan puts it while there is room; then a new choice holds

Only the place where bytes wait changes, so no bit of the result does. docs/activation-spill.md says more.
"""

from __future__ import annotations

import gc
import math
import os
import socket
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

from spillway.api.progress import MAX_BYTES, SpillVolume
from spillway.plan import MemoryPlan, Policy, Tier
from spillway.units import format_bytes

from ..cgroup import read_text
from ..ranks import Ranks
from ..tiers.extents import ALIGNMENT_BYTES
from ..tiers.nvme_slab import NvmeSlab
from .chooser import Chooser
from .spill import ActivationSpill

CHECK_STEPS = 20
"""Most steps between two looks at the volumes."""
CHECK_SECONDS = 1.0
"""Most seconds between two looks, unless a single step takes longer."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""The same in all containers of a node."""


class ReportSink(Protocol):
    """What rank 0 reports to: the operator."""

    @property
    def wanted_activations(self) -> int:
        """Bytes of each rank's spill file that activations may take, by the operator's last answer."""

    def spill_volume(self, volume: SpillVolume) -> None:
        """Sets what to report from now on."""


@dataclass(frozen=True, slots=True)
class MovedBytes:
    """What changed on this rank, in bytes."""

    activations_before: int
    activations: int
    """Bytes of the spill file that activations may use now."""
    host: int
    """Bytes of host memory that activations may use beyond the plan."""
    spill_file_before: int
    spill_file: int

    def said(self, step: int) -> str:
        return (
            f"correction at step {step}: activations may now use {format_bytes(self.activations)} of the spill file "
            f"instead of {format_bytes(self.activations_before)}, and {format_bytes(self.host)} more host memory than "
            f"planned; spill file {format_bytes(self.spill_file_before)} -> {format_bytes(self.spill_file)}"
        )


class Volume(NamedTuple):
    """The current state of a file system."""

    identity: int
    """The same in every process of one node."""
    size: int
    free: int

    @staticmethod
    def of(directory: Path) -> Volume:
        node = read_text(BOOT_ID).strip() or socket.gethostname()
        try:
            found, device = os.statvfs(directory), directory.stat().st_dev
        except OSError:
            return UNKNOWN
        identity = zlib.crc32(f"{node} {device}".encode())
        return Volume(identity, found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


UNKNOWN = Volume(0, 0, MAX_BYTES)
"""Has so many free bytes that it is never the volume with the least, if another one is known."""


class RankSample(NamedTuple):
    """What one rank contributes to a gather, where each field is a float: exact below 2^53."""

    identity: float
    size: float
    free: float
    free_at_start: float
    host_room: float
    wanted: float
    """The operator's answer on rank 0; infinite on the other ranks, and without an operator."""
    step_seconds: float


class LiveCorrection:
    """The live correction of one rank. Every rank calls `end_step` after every step, when no activations are held."""

    def __init__(
        self,
        plan: MemoryPlan,
        spill: ActivationSpill,
        chooser: Chooser,
        nvme: NvmeSlab,
        ranks: Ranks,
        tell: Callable[[MovedBytes], None],
        operator: ReportSink | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`operator`: None if no operator listens, and on every rank but 0."""
        self._plan, self._spill, self._chooser, self._nvme, self._ranks = plan, spill, chooser, nvme, ranks
        self._tell, self._operator, self._clock = tell, operator, clock
        self._limits = chooser.limits
        """The planned limits."""
        self._moved_bytes = 0
        """Bytes of the spill file that activations may no longer use."""
        self._owed_bytes = 0
        """The part of `_moved_bytes` that the file could not free so far."""
        self._free_at_start: dict[Path, int] = {}
        self._steps_left = self._num_steps = 1  # by the end of their first step all ranks have made their files
        self._last_check = clock()

    @property
    def activations(self) -> int:
        """Bytes of this rank's spill file that activations may take."""
        return self._plan.bytes[Tier.NVME].activations - self._moved_bytes

    @property
    def host_room(self) -> int:
        """Bytes that may still move. 0 after a failure of NVMe: what could not be written may have taken the room."""
        if self._nvme.first_failure is not None:
            return 0
        num_moving = sum(answer in (Policy.HOST, Policy.NVME) for answer in self._plan.activations.answers)
        lost = self._lost_bytes + ALIGNMENT_BYTES * num_moving  # a segment's storages form one run of whole pages
        return max(0, min(self.activations, self._plan.bytes[Tier.HOST].reserve - lost - self._moved_bytes))

    @property
    def _lost_bytes(self) -> int:
        """Bytes of host memory that cannot be used: storages do not fill a tier to the last byte, and count in whole
        pages."""
        return self._chooser.largest_bytes + ALIGNMENT_BYTES * self._chooser.most_storages

    def end_step(self) -> None:
        self._steps_left -= 1
        if self._steps_left:
            return
        every = [RankSample(*values) for values in self._ranks.gather(self._look())]
        self._steps_left = self._num_steps = steps_between(max(seen.step_seconds for seen in every))
        room = int(min(seen.host_room for seen in every))
        wanted = max(min(seen.wanted for seen in every), self.activations - room, 0)
        if wanted < self.activations:
            self._correct(int(wanted))  # what was seen is outdated now: the operator hears of it at the next look
        else:
            self._give_back()
            if self._operator is not None:
                self._operator.spill_volume(volume_of(every, self.activations, room))

    def _look(self) -> RankSample:
        volumes = {directory: Volume.of(directory) for directory in self._nvme.directories}
        self._free_at_start = self._free_at_start or {directory: each.free for directory, each in volumes.items()}
        directory = min(volumes, key=lambda each: volumes[each].free)
        now, before = self._clock(), self._last_check
        self._last_check = now
        return RankSample(
            *volumes[directory],
            free_at_start=self._free_at_start[directory],
            host_room=self.host_room,
            wanted=math.inf if self._operator is None else self._operator.wanted_activations,
            step_seconds=(now - before) / self._num_steps,
        )

    def _correct(self, activations: int) -> None:
        before, file_before = self.activations, self._nvme.capacity_bytes
        self._moved_bytes += before - activations
        self._owed_bytes += before - activations
        limits, host = self._limits, self._moved_bytes + self._lost_bytes
        nvme_bytes = max(0, min(activations, limits.nvme_bytes - self._moved_bytes))
        self._chooser.correct(replace(limits, nvme_bytes=nvme_bytes, host_bytes=limits.host_bytes + host))
        self._spill.store.plans_host = True
        while self._nvme.reclaim is not None and self._nvme.reclaim():
            pass  # frees extents whose last use has just ended
        gc.collect()  # frees extents of graphs that only the garbage collector can free
        self._give_back()
        self._tell(MovedBytes(before, activations, host, file_before, self._nvme.capacity_bytes))

    def _give_back(self) -> None:
        if self._owed_bytes > 0:
            self._owed_bytes -= self._nvme.give_back(self._owed_bytes)


def attach(
    plan: MemoryPlan,
    spill: ActivationSpill | None,
    nvme: NvmeSlab | None,
    ranks: Ranks,
    tell: Callable[[MovedBytes], None],
    operator: ReportSink | None,
) -> None:
    """From now on corrects `spill` at the end of each step, if the plan has a reserve for this."""
    if spill is None or spill.chooser is None or nvme is None or not plan.movable_activations:
        return
    correction = LiveCorrection(plan, spill, spill.chooser, nvme, ranks, tell, operator)
    spill.after_step = correction.end_step


def steps_between(step_seconds: float) -> int:
    """Steps until the next look; the same on all ranks, because they pass the same figure."""
    return CHECK_STEPS if step_seconds <= 0.0 else max(1, min(CHECK_STEPS, int(CHECK_SECONDS / step_seconds)))


def volume_of(every: Sequence[RankSample], activations: int, host_room: int) -> SpillVolume:
    """The volume with the least free bytes, as rank 0 reports it."""
    least = min(every, key=lambda seen: seen.free)
    return SpillVolume(
        size=int(least.size),
        free_at_start=int(least.free_at_start),
        free=int(least.free),
        num_ranks=sum(seen.identity == least.identity for seen in every),
        activations=activations,
        host_room=host_room,
    )
