"""Chooser: observes what forward saves and when backward reads it, then sets a policy for each storage.

    watching   a few steps with the planned policy of every segment: records each storage's position in the order of
               saves, and, by two clock reads, when it is produced and needed
    choosing   `storage_choice.choose` on what all ranks saw, so that they take the same answers
    holding    answers by position while a forward saves the same sizes; other storages go where a tier has room left
    watching   again when the time of a step changes, or after a live correction changed the limits

No bit of the result depends on the answers: they only say where bytes wait.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from torch import Tensor, UntypedStorage

from spillway.plan import Policy, Tier
from spillway.planning.storage_choice import Choice, NoChoice, PolicyLimits, SavedStorage, StepSimulation, choose

from ..saved_tensors import SpilledHandle
from ..tiers.extents import round_up
from ..tiers.lanes import Lane, Lanes

WATCHED_STEPS = 3
"""Steps of one watch; the first one is a warm-up and does not count."""
WINDOW_STEPS = 20
"""Steps whose median time is compared with that of the first such window."""
DRIFT = 0.10
"""Relative change of a step's seconds that starts a new watch."""
HYSTERESIS = 0.02
"""Share of a step's seconds that new policies must save to replace the current ones."""
Agree = Callable[[Sequence[float]], Sequence[Sequence[float]]]
"""Exchanges values between ranks; returns every rank's values, by rank."""


class WatchedStorage:
    """When one storage is produced and first needed."""

    __slots__ = ("nbytes", "needed_seconds", "produced_seconds", "segment")

    def __init__(self, segment: str, nbytes: int, produced_seconds: float) -> None:
        self.segment = segment
        self.nbytes = nbytes
        """Size in whole pages, as in the spill file."""
        self.produced_seconds = produced_seconds
        self.needed_seconds: float | None = None


class WatchedHandle:
    """A handle that records when backward first needs it."""

    __slots__ = ("__weakref__", "_clock", "_handle", "_saved")

    def __init__(self, handle: SpilledHandle, saved: WatchedStorage, clock: Callable[[], float]) -> None:
        self._handle, self._saved, self._clock = handle, saved, clock

    def tensor(self) -> Tensor:
        if self._saved.needed_seconds is None:
            self._saved.needed_seconds = self._clock()
        return self._handle.tensor()

    def prefetch(self) -> None:
        self._handle.prefetch()

    def unload(self) -> Callable[[], None]:
        return self._handle.unload()


@dataclass(frozen=True, slots=True)
class Chosen:
    """A decision about the policies of storages, and its reason."""

    reason: str
    stall_seconds: float = 0.0
    pass_seconds: float = 0.0
    """Seconds of forward and backward of one micro-batch."""
    tier_bytes: dict[Tier, int] = field(default_factory=dict)
    """Bytes that leave the device per micro-batch; empty: the segments' policies stay in force."""


class Pass:
    """One forward and its backward: what it saves, and the answers that it gets."""

    def __init__(self, answers: Sequence[Policy], sizes: Sequence[int]) -> None:
        self.saved: list[WatchedStorage] = []
        self.num_saved = 0
        self.held_bytes = {Policy.HOST: 0, Policy.NVME: 0}
        self.answers, self.sizes = answers, sizes
        """Answers and sizes by position; empty until chosen."""
        self.is_as_foreseen = True
        self.by_address: dict[int, WatchedStorage] = {}


class StoragePolicy:
    """Answers, in one forward through a segment, where each new storage of a batch goes."""

    __slots__ = ("_chooser", "_pass", "_planned", "_segment")

    def __init__(self, chooser: Chooser, segment: str, planned: Policy) -> None:
        self._chooser, self._segment, self._planned = chooser, segment, planned
        self._pass = chooser.current

    def answer(self, storage: UntypedStorage) -> Policy:
        """HOST or NVME, for the next storage that the forward saves."""
        this, nbytes, position = self._pass, round_up(storage.nbytes()), self._pass.num_saved
        this.num_saved += 1
        self._chooser.note_storage(this.num_saved, nbytes)
        if self._chooser.is_watching:
            saved = WatchedStorage(self._segment, nbytes, self._chooser.now())
            this.saved.append(saved)
            this.by_address[storage._cdata] = saved
        if not this.answers:
            answer = self._roomier(nbytes) if self._chooser.is_corrected else self._planned
        else:
            if this.is_as_foreseen:
                this.is_as_foreseen = position < len(this.sizes) and this.sizes[position] == nbytes
            answer = this.answers[position] if this.is_as_foreseen else self._roomier(nbytes)
        this.held_bytes[answer] += nbytes
        return answer

    def _roomier(self, nbytes: int) -> Policy:
        """The answer where none was chosen, or where a forward saves other storages than the watched ones: the planned
        policy if its tier has room, otherwise the tier with the most room left."""
        limits, held = self._chooser.limits, self._pass.held_bytes
        room = {
            Policy.HOST: limits.host_bytes - held[Policy.HOST],
            Policy.NVME: limits.nvme_bytes - held[Policy.NVME],
        }
        return self._planned if nbytes <= room[self._planned] else max(room, key=lambda answer: room[answer])

    def watched(self, handle: SpilledHandle, storage: UntypedStorage) -> SpilledHandle:
        """`handle`; while storages are watched, wrapped to record when it is needed."""
        saved = self._pass.by_address.get(storage._cdata) if self._chooser.is_watching else None
        return handle if saved is None else WatchedHandle(handle, saved, self._chooser.now)


class Chooser:
    """Chooses, for the segments of one model that the plan moves, which storages go to host memory and which to
    NVMe."""

    def __init__(
        self,
        segments: Sequence[str],
        limits: PolicyLimits,
        lanes: Lanes,
        agree: Agree = lambda values: [list(values)],
        clock: Callable[[], float] = time.perf_counter,
        *,
        watches: bool = True,
    ) -> None:
        """`limits`: without rates, which are measured on the lanes. `segments`: those that move, in forward order.
        `watches`: False if the host's clock does not tell when kernels run; then nothing is chosen, and forwards only
        keep to the limits."""
        self.limits = limits
        self._watches = watches
        self._first = segments[0]
        self._lanes, self._agree, self._clock = lanes, agree, clock
        self.choice: Choice | None = None
        self._sizes: list[int] = []
        self.current = Pass((), ())
        self.is_watching = watches
        self.is_corrected = False
        """Whether the plan's policies exceed `limits`."""
        self.largest_bytes = 0
        """Size of the largest storage so far, in whole pages."""
        self.most_storages = 0
        """The largest number of storages of one forward so far."""
        self._passes: list[list[WatchedStorage]] = []
        """The storages of the last pass of each watched step."""
        self._num_steps = 0
        """Steps since watching, or holding, began."""
        self._step_seconds: list[float] = []
        self._usual_seconds: float | None = None
        self._last_end = clock()
        self._moved, self._busy = lanes.moved_bytes(), lanes.busy_seconds()

    def now(self) -> float:
        """Seconds on a clock of compute alone: time that it waited for copies does not count."""
        return self._clock() - self._lanes.stalled_seconds()

    def note_storage(self, number: int, nbytes: int) -> None:
        self.largest_bytes, self.most_storages = max(self.largest_bytes, nbytes), max(self.most_storages, number)

    def correct(self, limits: PolicyLimits) -> None:
        """Makes the next forward keep to `limits`: storages go where the plan puts them while there is room, and are
        watched for a new choice. Every rank calls it after the same step."""
        self.limits, self.is_corrected, self.choice = limits, True, None
        self._watch()

    def open(self, segment: str, planned: Policy) -> StoragePolicy:
        """The policy for one forward through `segment`."""
        if segment == self._first:
            answers = self.choice.answers if self.choice is not None and not self.is_watching else ()
            self.current = Pass(answers, self._sizes)
        return StoragePolicy(self, segment, planned)

    def end_step(self) -> Chosen | None:
        """Every rank calls it after each step. Returns the decision if one was made, the same on all ranks."""
        if not self._watches:
            return None
        ended = self._clock()
        seconds, self._last_end = ended - self._last_end, ended
        self._num_steps += 1
        if self.is_watching:
            self._passes.append(self.current.saved)
            if self._num_steps == 1:
                self._moved, self._busy = self._lanes.moved_bytes(), self._lanes.busy_seconds()
            if self._num_steps < WATCHED_STEPS:
                return None
            chosen = self._decide()
            self._hold()
            return chosen
        self._step_seconds.append(seconds)
        if len(self._step_seconds) == WINDOW_STEPS:
            usual, self._step_seconds = median(self._step_seconds), []
            self._usual_seconds = self._usual_seconds or usual
            drifts = abs(usual / self._usual_seconds - 1.0) > DRIFT
            if any(asked for (asked,) in self._agree([float(drifts)])):
                self._watch()
        return None

    def _watch(self) -> None:
        self.is_watching, self._num_steps, self._passes = self._watches, 0, []
        self._usual_seconds = None

    def _hold(self) -> None:
        self.is_watching, self._num_steps, self._passes = False, 0, []
        self._step_seconds = []
        self.current = Pass((), ())

    def _decide(self) -> Chosen:
        """Chooses by the mean of what the ranks saw, so that each rank solves the same problem."""
        counted = self._passes[1:]
        sizes = [saved.nbytes for saved in counted[-1]]
        signature = [(saved.segment, saved.nbytes) for saved in counted[-1]]
        is_steady = bool(sizes) and all(
            [(saved.segment, saved.nbytes) for saved in other] == signature for other in counted
        )
        said = [float(is_steady), float(len(sizes)), float(zlib.crc32(repr(signature).encode()))]
        everybody = self._agree(said)
        if not is_steady or any(list(other) != said for other in everybody):
            self.choice = None
            return Chosen(
                "the tensors saved for backward differ between steps or ranks, so the plan's policies stay in force"
            )
        own = [*times_of(counted), *self._rates()]
        every = self._agree(own)
        mean = [math.fsum(values) / len(values) for values in zip(*every, strict=True)]
        storages = [SavedStorage(size, mean[2 * index], mean[2 * index + 1]) for index, size in enumerate(sizes)]
        d2h, h2d, write, read = mean[2 * len(sizes) :]
        limits = replace(self.limits, d2h=d2h, h2d=h2d, nvme_write=write, nvme_read=read)
        found = choose(storages, limits)
        if isinstance(found, NoChoice):
            self.choice = None
            return Chosen(f"{found.reason}; so the plan's policies stay in force")
        return self._settled(found, StepSimulation(storages, limits), sizes)

    def _settled(self, found: Choice, course: StepSimulation, sizes: list[int]) -> Chosen:
        """Adopts `found`, unless the current choice would be nearly as fast under what was just watched."""
        holding = self.choice
        if holding is not None and self._sizes == sizes:
            played = course.play(holding.answers, holding.price)
            if played is not None and course.seconds + played.extra_seconds <= (1.0 + HYSTERESIS) * found.step_seconds:
                return Chosen(
                    f"the choice is unchanged: {holding.reason}",
                    played.stall_seconds,
                    course.seconds + played.extra_seconds,
                    holding.tier_bytes,
                )
        self.choice, self._sizes = found, sizes
        return Chosen(found.reason, found.stall_seconds, found.step_seconds, found.tier_bytes)

    def _rates(self) -> list[float]:
        """Bytes per second of d2h, h2d, NVMe writes and reads since watching began to count; 0 if none moved."""
        moved, busy = self._lanes.moved_bytes(), self._lanes.busy_seconds()
        rates = []
        for lane in (Lane.D2H, Lane.H2D, Lane.NVME_WRITE, Lane.NVME_READ):
            seconds = busy.get(lane.value, 0.0) - self._busy.get(lane.value, 0.0)
            nbytes = moved.get(lane.value, 0) - self._moved.get(lane.value, 0)
            rates.append(nbytes / seconds if seconds > 0.0 else 0.0)
        return rates


def times_of(passes: Sequence[Sequence[WatchedStorage]]) -> list[float]:
    """Produced and needed seconds of each storage in turn, from the first one's production: the mean of the passes. A
    storage that backward never came to counts as needed at its end."""
    found = []
    for saved in passes:
        start = saved[0].produced_seconds
        end = max(
            [one.needed_seconds for one in saved if one.needed_seconds is not None], default=saved[-1].produced_seconds
        )
        times = []
        for one in saved:
            needed = end if one.needed_seconds is None else one.needed_seconds
            times += [one.produced_seconds - start, max(needed, one.produced_seconds) - start]
        found.append(times)
    return [math.fsum(values) / len(values) for values in zip(*found, strict=True)]
