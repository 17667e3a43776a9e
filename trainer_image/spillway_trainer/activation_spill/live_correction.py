"""Live correction: others fill the spill volume, so activations of a run that goes on move from the spill file to host
memory that the plan keeps free for it (`TierBytes.reserve`), and the file becomes smaller.

    every few steps   each rank looks at its volume; all gather what they saw, and what the operator answered rank 0
    the same step     all ranks: NVMe takes less, host memory as much more; the file gives the difference back
    the next forward  keeps to it: storage by storage as the plan has it while there is room, then as is chosen again

Only where bytes wait changes, so no bit of the result does. docs/activation-spill.md says more.
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
"""Long steps are looked after sooner."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""The same in all containers of a node."""


class ReportSink(Protocol):
    """Who rank 0 reports to."""

    @property
    def wanted_activations(self) -> int:
        """Bytes of each rank's spill file that activations may take, as it answered last."""

    def spill_volume(self, volume: SpillVolume) -> None:
        """What to report from now on."""


@dataclass(frozen=True, slots=True)
class MovedBytes:
    """What changed on this rank, in bytes."""

    activations_before: int
    activations: int
    """Bytes of the spill file that they may use."""
    host: int
    """Bytes of host memory that they may use beyond the plan."""
    spill_file_before: int
    spill_file: int

    def said(self, step: int) -> str:
        return (
            f"correction at step {step}: activations may now use {format_bytes(self.activations)} of the spill file "
            f"instead of {format_bytes(self.activations_before)}, and {format_bytes(self.host)} more host memory than "
            f"planned; spill file {format_bytes(self.spill_file_before)} -> {format_bytes(self.spill_file)}"
        )


class Volume(NamedTuple):
    """A file system, now."""

    identity: int
    """The same from every process of one node."""
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
"""Never the one with the least free bytes if another is known."""


class RankSample(NamedTuple):
    """What one rank brings to a gathering; each field is a float there, exact below 2^53."""

    identity: float
    size: float
    free: float
    free_at_start: float
    host_room: float
    wanted: float
    """On rank 0; None on the others."""
    step_seconds: float


class LiveCorrection:
    """Of one rank. `end_step` follows every step of every rank, when no activations are held."""

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
        """`operator`: None where none listens, and of every rank but 0."""
        self._plan, self._spill, self._chooser, self._nvme, self._ranks = plan, spill, chooser, nvme, ranks
        self._tell, self._operator, self._clock = tell, operator, clock
        self._limits = chooser.limits
        """As planned."""
        self._moved_bytes = 0
        """Bytes of the spill file that activations may no longer use."""
        self._owed_bytes = 0
        """Of them, bytes that the file could not free so far."""
        self._free_at_start: dict[Path, int] = {}
        self._steps_left = self._num_steps = 1  # all ranks have made their files when they end their first step
        self._last_check = clock()

    @property
    def activations(self) -> int:
        """Bytes of this rank's spill file that activations may take."""
        return self._plan.bytes[Tier.NVME].activations - self._moved_bytes

    @property
    def host_room(self) -> int:
        """Bytes that may still move. None after a failure: what could not be written may have taken the room."""
        if self._nvme.first_failure is not None:
            return 0
        num_moving = sum(answer in (Policy.HOST, Policy.NVME) for answer in self._plan.activations.answers)
        lost = self._lost_bytes + ALIGNMENT_BYTES * num_moving  # a segment's storages are one run of whole pages
        return max(0, min(self.activations, self._plan.bytes[Tier.HOST].reserve - lost - self._moved_bytes))

    @property
    def _lost_bytes(self) -> int:
        """Of host memory: storages fill no tier to the last byte, and are counted in whole pages."""
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
            self._correct(int(wanted))  # what was seen is from before: the operator hears of it at the next look
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
            pass  # extents whose last use has just ended
        gc.collect()  # and those of graphs that only the collector frees
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
    """From now on `spill` is corrected at the ends of steps, where the plan has a reserve for that."""
    if spill is None or spill.chooser is None or nvme is None or not plan.movable_activations:
        return
    correction = LiveCorrection(plan, spill, spill.chooser, nvme, ranks, tell, operator)
    spill.after_step = correction.end_step


def steps_between(step_seconds: float) -> int:
    """The same on all ranks, of the same figure."""
    return CHECK_STEPS if step_seconds <= 0.0 else max(1, min(CHECK_STEPS, int(CHECK_SECONDS / step_seconds)))


def volume_of(every: Sequence[RankSample], activations: int, host_room: int) -> SpillVolume:
    """The volume with the least free bytes."""
    least = min(every, key=lambda seen: seen.free)
    return SpillVolume(
        size=int(least.size),
        free_at_start=int(least.free_at_start),
        free=int(least.free),
        num_ranks=sum(seen.identity == least.identity for seen in every),
        activations=activations,
        host_room=host_room,
    )
