"""Updates all chunks as a pipeline over the lanes, ordered by events only.

    cpu       update C0 | update C1 | update C2 ...           each followed at once by its upload, unless it has a home
    h2d       states S0 | upload C0 | states S1 | upload C1   two slots: S1 comes in while S0 is updated and goes back
    compute             | update S0 | update R0 | update S1
    d2h                             | states S0 |   ...       a slot is refilled only after its states went back

One operation updates several consecutive CPU chunks, and one uploads them, up to `group_bytes` together. Where device
memory is host memory (`in_place`), the update writes the parameters, and nothing is uploaded. The states of a streamed
chunk come and go without the half of their master that the device has (master_halves.py). The CPU updates chunks whose
states are on NVMe between their read and their write (nvme_states.py). For shares c + g + s + n = 1 the bound is the
slowest of the CPU's DRAM traffic, H2D (parameters and states), D2H, and the disk's reads and writes
(docs/optimizer-offload.md, Time).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from types import MappingProxyType

from torch import Tensor

from ..kernels import dispatch as kernels
from ..kernels.reference import UpdateScalars
from ..optimizer.plain import OptimizerStates, Update
from ..tiers.arena import MemorySlice, Ring, RingSlot, padded
from ..tiers.extents import round_up
from ..tiers.lanes import Event, Lane, Lanes, Region
from .assign import Chunk, Path
from .nvme_states import StateWindow
from .place import Home, Placed


@dataclass(frozen=True, slots=True)
class OnCpu:
    """One update by the CPU, of states in `region`, once `ready` is complete."""

    placed: Placed
    scalars: UpdateScalars
    states: OptimizerStates
    region: Region
    ready: tuple[Event, ...] = ()


@dataclass(frozen=True, slots=True)
class UpdatePipeline:
    """Submits one step's updates. Its only state is the rings and the event that ended each chunk's last update
    (`ends`): the chunk's next update comes after that event, even if steps without a gradient lie in between."""

    lanes: Lanes
    uploads: Ring
    """Host buffers, each for one chunk in the compute dtype, between the CPU's update and the upload."""
    slots: Ring
    """Device buffers, each for one state block, that streamed chunks pass through."""
    window: StateWindow
    """The buffers that states on NVMe pass through."""
    cpu_update: Update
    device_update: Update
    group_bytes: int
    """Most value bytes that one CPU operation updates if it updates several chunks; at most an upload buffer, where
    there are uploads."""
    in_place: bool = False
    """Whether the device's memory is the host's: CPU updates write parameters directly, and nothing is copied up."""
    ends: dict[Chunk, Event] = field(default_factory=dict)

    def submit(
        self,
        updates: Sequence[tuple[Placed, UpdateScalars]],
        committed: Mapping[Chunk, tuple[MemorySlice, Event]] = MappingProxyType({}),
    ) -> list[Event]:
        """Submits the updates in order. Returns, for each, the event that the compute lane waits for before it reads
        the new values: upload, store or device update. A chunk's accumulator is free for the next gradient once its
        update has read it.

        Lanes may be first in, first out, so the order of submission matters for time: the states of a streamed chunk
        come in as early as a slot is free, ahead of the uploads of the CPU chunks in between. `committed` chunks are
        already updated, by the event beside their new values; only these values are written, in their turn.
        """
        computed = self.lanes.computed()  # backward still reads the parameters that the updates will overwrite
        to_load = deque(placed for placed, _ in updates if placed.chunk.path is Path.STREAMED)
        loaded: deque[tuple[RingSlot, Event]] = deque()
        made: dict[Chunk, Event] = {}
        group: list[OnCpu] = []
        for placed, scalars in updates:
            while to_load and len(loaded) < len(self.slots):
                loaded.append(self._load_states(to_load.popleft()))
            if placed.chunk in committed:
                made[placed.chunk] = self._write_committed(placed, *committed[placed.chunk], computed)
            elif placed.chunk.path is Path.CPU:
                if group and not self._joins(group, placed):
                    self._update_group(group, computed, made)
                group.append(OnCpu(placed, scalars, placed.held_states, placed.held))
            elif placed.chunk.path is Path.NVME:
                made[placed.chunk] = self._update_in_window(placed, scalars, computed)
            elif placed.chunk.path is Path.STREAMED:
                made[placed.chunk] = self._update_in_slot(placed, scalars, computed, *loaded.popleft())
            else:
                made[placed.chunk] = self._update_resident(placed, scalars, computed)
        self._update_group(group, computed, made)
        for placed, _ in updates:
            if placed.chunk.path is not Path.STREAMED:
                self.ends[placed.chunk] = made[placed.chunk]
        return [made[placed.chunk] for placed, _ in updates]

    def _joins(self, group: Sequence[OnCpu], placed: Placed) -> bool:
        """Whether one operation may update `placed` together with `group`: small enough, and written to memory of the
        same kind."""
        homes = [one.home for one in (placed, group[0].placed)]
        on_nvme = any(home is not None and home.memory is None for home in homes)
        alike = (homes[0] is None) == (homes[1] is None)
        nbytes = padded(placed.nbytes) + sum(padded(one.placed.nbytes) for one in group)
        return alike and not on_nvme and nbytes <= self.group_bytes

    def _update_group(self, group: list[OnCpu], computed: Event, made: dict[Chunk, Event]) -> None:
        if group:
            made.update(dict.fromkeys([one.placed.chunk for one in group], self._update_on_cpu(group, computed)))
            group.clear()

    def _update_in_window(self, placed: Placed, scalars: UpdateScalars, computed: Event) -> Event:
        """Reads states from NVMe, updates them on the CPU and writes them back. The new values travel independently;
        forward waits only for the event that is returned, their arrival."""
        loaded = self.window.load(placed.on_nvme)
        update = OnCpu(placed, scalars, placed.states(loaded.block), loaded.slot.buffer, (loaded.read,))
        moved = self._update_on_cpu([update], computed)
        self.window.store(placed.on_nvme, loaded, placed.accumulator.settled)
        return moved

    def _update_on_cpu(self, group: Sequence[OnCpu], computed: Event) -> Event:
        """Submits updates of one kind (`_joins`), and what brings their values to where they live. Returns the event of
        that."""
        chunks = [one.placed for one in group]
        homes = [placed.home for placed in chunks if placed.home is not None]
        if homes and homes[0].memory is not None:
            memory = [home.memory for home in homes if home.memory is not None]
            values = [values.view(placed.dtype) for values, placed in zip(memory, chunks, strict=True)]
            updated = self._submit_cpu(group, values, [placed.weights for placed in chunks], ())
            for home in homes:
                home.changed = (updated,)
            return updated
        if self.in_place and not homes:
            values = [placed.parameter for placed in chunks if placed.parameter is not None]
            return self._submit_cpu(group, values, [placed.weights for placed in chunks], (computed,))
        slot, ends = self.uploads.take(), accumulate(padded(placed.nbytes) for placed in chunks)
        begins = [end - padded(placed.nbytes) for end, placed in zip(ends, chunks, strict=True)]
        staged = [slot.buffer.tensor[at : at + placed.nbytes] for at, placed in zip(begins, chunks, strict=True)]
        values = [part.view(placed.dtype) for part, placed in zip(staged, chunks, strict=True)]
        updated = self._submit_cpu(group, values, [slot.buffer], slot.free)
        moved = (
            self._store(chunks[0], homes[0], slot, updated)
            if homes
            else self._upload(chunks, staged, slot.buffer, (updated, computed))
        )
        slot.free = (moved,)
        return moved

    def _submit_cpu(
        self, group: Sequence[OnCpu], outs: Sequence[Tensor], memory: Sequence[Region], free: Sequence[Event]
    ) -> Event:
        """Submits the CPU's updates, which write the rounded parameters into `outs`, parts of `memory`."""
        work = [
            self._work(self.cpu_update, one.scalars, one.states, one.placed, out)
            for one, out in zip(group, outs, strict=True)
        ]
        chunks = [one.placed for one in group]
        states, gradients = [one.region for one in group], [placed.accumulator.memory for placed in chunks]
        settled = [event for placed in chunks for event in placed.accumulator.settled]
        ready = [event for one in group for event in one.ready]
        updated = self.lanes.submit(
            Lane.CPU,
            work[0] if len(work) == 1 else partial(_do_all, work),
            reads=[*states, *gradients],
            writes=[*states, *memory],
            after=[*ready, *settled, *free, *(event for placed in chunks for event in self._last(placed))],
            nbytes=sum(placed.update_bytes + placed.nbytes for placed in chunks),
            label=_label("update", chunks),
        )
        for placed in chunks:
            placed.accumulator.settled = (updated,)
        return updated

    def _last(self, placed: Placed) -> Sequence[Event]:
        """The event that ended the chunk's last update, if there was one."""
        end = self.ends.get(placed.chunk)
        return () if end is None else (end,)

    def _write_committed(self, placed: Placed, values: MemorySlice, made: Event, computed: Event) -> Event:
        """Brings the values that were computed during backward to the parameter. This is a copy even in place, then on
        the cpu lane: old and new values both exist until the step counts, and a slice of a parameter cannot be moved to
        other memory. Rounding the master instead would read twice as much, and at a time when forward waits for it."""
        staged = values.tensor[: placed.nbytes]
        if not self.in_place:
            return self._upload([placed], [staged], values, (made, computed))
        return self.lanes.submit(
            Lane.CPU,
            partial(kernels.copy, placed.device_bytes, staged),
            reads=[values],
            writes=[placed.weights],
            after=[made, computed],
            nbytes=2 * placed.nbytes,
            label=f"commit {placed.chunk.label}",
        )

    def _upload(
        self, chunks: Sequence[Placed], staged: Sequence[Tensor], memory: Region, after: Sequence[Event]
    ) -> Event:
        """Submits the upload of `staged`, parts of `memory`, one per chunk."""
        pairs = [(placed.device_bytes, part) for placed, part in zip(chunks, staged, strict=True)]
        return self.lanes.submit(
            Lane.H2D,
            partial(kernels.copy_batch, pairs),
            reads=[memory],
            writes=[placed.weights for placed in chunks],
            after=after,
            nbytes=sum(part.numel() for part in staged),
            label=_label("upload", chunks),
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
        self.ends[chunk] = written_back
        return updated

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
        self, update: Update, scalars: UpdateScalars, states: OptimizerStates, placed: Placed, out: Tensor | None
    ) -> Callable[[], None]:
        gradient = placed.accumulator.values
        if placed.is_split:
            assert out is not None, placed.chunk.label
            return partial(kernels.update_split, update, scalars, states.master, states.moments, gradient, out)
        return partial(update, scalars, states.master, states.moments, gradient, out)


def _do_all(work: Sequence[Callable[[], None]]) -> None:
    for one in work:
        one()


def _label(what: str, chunks: Sequence[Placed]) -> str:
    more = f" and {len(chunks) - 1} more" if len(chunks) > 1 else ""
    return f"{what} {chunks[0].chunk.label}{more}"
