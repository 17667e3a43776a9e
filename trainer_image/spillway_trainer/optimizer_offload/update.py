"""One update of all chunks as a pipeline over the lanes; ordered by events only.

    cpu       update C0 | update C1 | update C2 ...           each followed at once by its upload, unless it went home
    h2d       states S0 | upload C0 | states S1 | upload C1   two slots: S1 comes in while S0 is updated and goes back
    compute             | update S0 | update R0 | update S1
    d2h                             | states S0 |   ...       a slot is refilled only after its states went back

Where the device's memory is the host's (`in_place`), the CPU's update writes the parameter and nothing is uploaded.
The states of a streamed chunk come and go without the half of their master that the device has (master_halves.py).
Chunks whose states are on NVMe are updated by the CPU between their read and their write (nvme_states.py). The bound
for c + g + s + n = 1: the slowest of the CPU's DRAM traffic, of H2D (parameters and states), of D2H and of the disk,
which reads and writes (docs/optimizer-offload.md, Time).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from torch import Tensor

from .. import kernels
from ..optimizer import States, Update
from ..reference import UpdateScalars
from ..tiers.arena import Part, Ring, RingSlot
from ..tiers.extents import round_up
from ..tiers.lanes import Event, Lane, Lanes, Region
from .assign import Chunk, Path
from .nvme_states import StateWindow
from .place import Home, Placed


@dataclass(frozen=True, slots=True)
class InHost:
    """States that the CPU can update, in `region`, once `ready` is complete."""

    states: States
    region: Region
    ready: tuple[Event, ...] = ()


@dataclass(frozen=True, slots=True)
class UpdatePipeline:
    """Submits one step's updates. Holds no state of its own but the rings, and what ended each chunk's last update:
    its next one comes after that, also when no gradient came for it in between."""

    lanes: Lanes
    uploads: Ring
    """host buffers of one chunk in the compute dtype: between the CPU's update and the upload"""
    slots: Ring
    """device buffers of one state block: streamed chunks pass through them"""
    window: StateWindow
    """what states on NVMe pass through"""
    cpu_update: Update
    device_update: Update
    in_place: bool = False
    """the device's memory is the host's: the CPU's update writes the parameter itself, and nothing goes up"""
    ends: dict[Chunk, Event] = field(default_factory=dict)

    def submit(
        self,
        updates: Sequence[tuple[Placed, UpdateScalars]],
        committed: Mapping[Chunk, tuple[Part, Event]] = MappingProxyType({}),
    ) -> list[Event]:
        """Submit the updates in order and return the events that end them, one each: upload, store, write-back or
        device update. A chunk's accumulator is free for the next gradient once its update has read it.

        Lanes may be first in, first out, so the order of submission matters for time: the states of a streamed chunk
        come in as early as a slot is free, ahead of the uploads of the CPU chunks between. `committed` chunks have been
        updated, by the event beside their new values: these are written in their turn.
        """
        computed = self.lanes.computed()  # backward still reads the parameters that the updates will overwrite
        to_load = deque(placed for placed, _ in updates if placed.chunk.path is Path.STREAMED)
        loaded: deque[tuple[RingSlot, Event]] = deque()
        for placed, scalars in updates:
            while to_load and len(loaded) < len(self.slots):
                loaded.append(self._load_states(to_load.popleft()))
            if placed.chunk in committed:
                end = self._write_committed(placed, *committed[placed.chunk], computed)
            elif placed.chunk.path is Path.CPU:
                end = self._update_on_cpu(placed, scalars, computed, InHost(placed.held_states, placed.held))
            elif placed.chunk.path is Path.NVME:
                end = self._update_in_window(placed, scalars, computed)
            elif placed.chunk.path is Path.STREAMED:
                end = self._update_in_slot(placed, scalars, computed, *loaded.popleft())
            else:
                end = self._update_resident(placed, scalars, computed)
            self.ends[placed.chunk] = end
        return [self.ends[placed.chunk] for placed, _ in updates]

    def _update_in_window(self, placed: Placed, scalars: UpdateScalars, computed: Event) -> Event:
        """States from NVMe, update by the CPU, states back; the new values go their own way meanwhile, which is what
        forward waits for."""
        loaded = self.window.load(placed.on_nvme)
        states = InHost(placed.states(loaded.block), loaded.slot.buffer, (loaded.read,))
        moved = self._update_on_cpu(placed, scalars, computed, states)
        self.window.store(placed.on_nvme, loaded, placed.accumulator.settled)
        return moved

    def _update_on_cpu(self, placed: Placed, scalars: UpdateScalars, computed: Event, states: InHost) -> Event:
        home = placed.home
        if home is not None and home.memory is not None:
            values = home.memory.view(placed.dtype)
            updated = self._submit_cpu(placed, scalars, states, values, home.region, ())
            home.changed = (updated,)
            return updated
        if placed.parameter is not None and self.in_place:
            return self._submit_cpu(placed, scalars, states, placed.parameter, placed.weights, (computed,))
        slot = self.uploads.take()
        staged = slot.buffer.tensor[: placed.nbytes]
        updated = self._submit_cpu(placed, scalars, states, staged.view(placed.dtype), slot.buffer, slot.free)
        moved = (
            self._upload(placed, staged, slot.buffer, (updated, computed))
            if home is None
            else self._store(placed, home, slot, updated)
        )
        slot.free = (moved,)
        return moved

    def _submit_cpu(
        self,
        placed: Placed,
        scalars: UpdateScalars,
        states: InHost,
        out: Tensor,
        memory: Region,
        free: Sequence[Event],
    ) -> Event:
        """The CPU's update, which writes the rounded parameter into `out`, a part of `memory`."""
        updated = self.lanes.submit(
            Lane.CPU,
            self._work(self.cpu_update, scalars, states.states, placed, out),
            reads=[states.region, placed.accumulator.memory],
            writes=[states.region, memory],
            after=[*states.ready, *placed.accumulator.settled, *free, *self._last(placed)],
            nbytes=placed.update_bytes + placed.nbytes,
            label=f"update {placed.chunk.label}",
        )
        placed.accumulator.settled = (updated,)
        return updated

    def _last(self, placed: Placed) -> Sequence[Event]:
        """What ended the chunk's last update."""
        end = self.ends.get(placed.chunk)
        return () if end is None else (end,)

    def _write_committed(self, placed: Placed, values: Part, made: Event, computed: Event) -> Event:
        """Bring what backward has made of the chunk to the parameter. In place, too, that is a copy, by the CPU's own
        lane: old and new values both exist until the step counts, and a slice of a parameter cannot change its memory
        for another. Rounding the master instead would read twice as much, and now, when forward waits for it."""
        staged = values.tensor[: placed.nbytes]
        if not self.in_place:
            return self._upload(placed, staged, values, (made, computed))
        return self.lanes.submit(
            Lane.CPU,
            partial(kernels.copy, placed.device_bytes, staged),
            reads=[values],
            writes=[placed.weights],
            after=[made, computed],
            nbytes=2 * placed.nbytes,
            label=f"commit {placed.chunk.label}",
        )

    def _upload(self, placed: Placed, staged: Tensor, memory: Region, after: Sequence[Event]) -> Event:
        """`staged` is a part of `memory`."""
        return self.lanes.submit(
            Lane.H2D,
            partial(kernels.copy, placed.device_bytes, staged),
            reads=[memory],
            writes=[placed.weights],
            after=after,
            nbytes=staged.numel(),
            label=f"upload {placed.chunk.label}",
        )

    def _store(self, placed: Placed, home: Home, slot: RingSlot, updated: Event) -> Event:
        blocks = slot.buffer.tensor[: round_up(placed.nbytes)]
        stored = self.lanes.submit(
            Lane.NVME_WRITE,
            partial(home.store, blocks),
            reads=[slot.buffer],
            writes=[home.region],
            after=[updated],
            nbytes=blocks.numel(),
            label=f"store {placed.chunk.label}",
        )
        home.changed = (stored,)
        return stored

    def _load_states(self, placed: Placed) -> tuple[RingSlot, Event]:
        slot = self.slots.take()
        nbytes = placed.held.nbytes
        loaded = self.lanes.submit(
            Lane.H2D,
            partial(kernels.copy, slot.buffer.tensor[:nbytes], placed.held.tensor),
            reads=[placed.block],
            writes=[slot.buffer],
            after=[*slot.free, *self._last(placed)],
            nbytes=nbytes,
            label=f"states {placed.chunk.label}",
        )
        return slot, loaded

    def _update_in_slot(
        self, placed: Placed, scalars: UpdateScalars, computed: Event, slot: RingSlot, loaded: Event
    ) -> Event:
        chunk, nbytes = placed.chunk, placed.held.nbytes
        block = slot.buffer.tensor[:nbytes]
        updated = self.lanes.submit(
            Lane.COMPUTE,
            self._work(self.device_update, scalars, placed.states(block), placed, placed.device_out),
            reads=[slot.buffer, placed.accumulator.memory, placed.weights],
            writes=[slot.buffer, placed.weights],
            after=[loaded, computed, *placed.accumulator.settled],
            nbytes=placed.update_bytes,
            label=f"update {chunk.label}",
        )
        placed.accumulator.settled = (updated,)
        written_back = self.lanes.submit(
            Lane.D2H,
            partial(kernels.copy, placed.held.tensor, block),
            reads=[slot.buffer],
            writes=[placed.block],
            after=[updated],
            nbytes=nbytes,
            label=f"states {chunk.label}",
        )
        slot.free = (written_back,)
        return written_back

    def _update_resident(self, placed: Placed, scalars: UpdateScalars, computed: Event) -> Event:
        states = placed.states(placed.held.tensor)
        updated = self.lanes.submit(
            Lane.COMPUTE,
            self._work(self.device_update, scalars, states, placed, placed.device_out),
            reads=[placed.block, placed.accumulator.memory, placed.weights],
            writes=[placed.block, placed.weights],
            after=[computed, *placed.accumulator.settled, *self._last(placed)],
            nbytes=placed.update_bytes,
            label=f"update {placed.chunk.label}",
        )
        placed.accumulator.settled = (updated,)
        return updated

    def _work(
        self, update: Update, scalars: UpdateScalars, states: States, placed: Placed, out: Tensor | None
    ) -> Callable[[], None]:
        gradient = placed.accumulator.values
        if placed.is_split:
            assert out is not None, placed.chunk.label
            return partial(kernels.update_split, update, scalars, states.master, states.moments, gradient, out)
        return partial(update, scalars, states.master, states.moments, gradient, out)
