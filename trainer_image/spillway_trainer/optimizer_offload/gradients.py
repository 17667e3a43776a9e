"""Moves gradients from backward into float32 accumulators, and computes their order-free norm.

A CPU chunk's gradient leaves the device once per micro-batch, in its compute dtype, during backward:
    backward -> d2h into a staging slot -> cpu lane adds it to the host accumulator
Where device memory is host memory there is no copy: the cpu lane adds what backward wrote. Nor is there one for a
gradient of a streamed or resident chunk, which the compute lane adds on the device. Consecutive chunks go together
(`ChunkRun`), and small gradients wait for more, so that one operation adds several. A use of a parameter is expected to
get as many gradients as in the previous step. With the last of them its sum of squares is computed at once, and
discarded if yet another gradient comes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from ..kernels import dispatch as kernels
from ..kernels.reference import SquareSum
from ..optimizer.plain import FLOAT32_BYTES
from ..tiers.arena import MemorySlice, Ring, as_bytes
from ..tiers.device_ledger import DeviceLedger
from ..tiers.lanes import DONE, Event, Lane, Lanes, Region
from .assign import Chunk


@dataclass(slots=True)
class Accumulator:
    """The float32 gradient sum of one chunk of one use of a parameter; an alias has its own accumulators."""

    chunk: Chunk
    memory: MemorySlice
    values: Tensor
    """Flat float32 view of `memory`, chunk.size values."""
    settled: tuple[Event, ...] = ()
    """Complete when everything submitted so far is in `values`."""

    @property
    def lane(self) -> Lane:
        """The lane that owns the accumulator's memory."""
        return Lane.CPU if self.chunk.path.updates_on_cpu else Lane.COMPUTE


@dataclass(slots=True)
class ChunkRun:
    """Consecutive chunks of one use of a parameter. One operation moves all their gradients, and one adds them."""

    accumulators: Sequence[Accumulator]
    label: str
    nbytes: int
    """Bytes of the accumulators."""
    squares: list[kernels.BegunSum] | None = None
    """Squares of this step's sums, complete when `squared` is; None: not begun."""
    squared: Event = DONE

    @classmethod
    def of(cls, accumulators: Sequence[Accumulator]) -> ChunkRun:
        chunks = [accumulator.chunk for accumulator in accumulators]
        label = f"{chunks[0].parameter}[{chunks[0].offset}:{chunks[-1].end}]"
        return cls(accumulators, label, FLOAT32_BYTES * sum(chunk.size for chunk in chunks))

    @property
    def lane(self) -> Lane:
        return self.accumulators[0].lane

    @property
    def memory(self) -> list[Region]:
        return [accumulator.memory for accumulator in self.accumulators]

    @property
    def settled(self) -> list[Event]:
        return [event for accumulator in self.accumulators for event in accumulator.settled]

    def settle(self, event: Event) -> None:
        for accumulator in self.accumulators:
            accumulator.settled = (event,)


def runs_of(accumulators: Sequence[Accumulator], most_on_host: int) -> list[ChunkRun]:
    """All accumulators in runs, in order. `most_on_host`: most chunks of a run whose gradients go to the host, so that
    the next run finds free slots."""
    found: list[list[Accumulator]] = []
    for one in accumulators:
        joins = found and one.lane is found[-1][0].lane and one.chunk.offset == found[-1][-1].chunk.end
        if joins and (one.lane is not Lane.CPU or len(found[-1]) < most_on_host):
            found[-1].append(one)
        else:
            found.append([one])
    return [ChunkRun.of(run) for run in found]


BATCH_BYTES = 1 << 20
"""Bytes of gradients that one operation adds at least, where they need no copy, if backward makes so many."""


@dataclass(frozen=True, slots=True)
class Part:
    """A run's part of a gradient, to be added from where it lies."""

    run: ChunkRun
    values: Sequence[Tensor]
    """One tensor per chunk."""
    region: Region
    """The memory of the whole gradient."""
    first: bool
    """Whether it is the step's first: it overwrites the accumulator."""
    squares: list[kernels.BegunSum] | None
    read: list[Event]
    """Receives the events after which the gradient's memory is free."""


class GradientWindow:
    """Bounds the bytes of gradients that backward has handed over and that are not read yet, and charges them to the
    device.

    A gradient larger than the window passes alone.
    """

    def __init__(self, ledger: DeviceLedger, window_bytes: int) -> None:
        self._ledger = ledger
        self._window_bytes = window_bytes
        self._in_flight: deque[tuple[int, Sequence[Event]]] = deque()
        self._bytes = 0

    def has_room(self, nbytes: int) -> bool:
        return self._bytes + nbytes <= self._window_bytes

    def admit(self, nbytes: int) -> None:
        """Waits for the oldest gradients until `nbytes` more fit."""
        while self._in_flight and not self.has_room(nbytes):
            self._retire()
        self._ledger.charge("gradients", nbytes)
        self._bytes += nbytes

    def add(self, nbytes: int, read: Sequence[Event]) -> None:
        """An admitted gradient is free once all of `read` are complete."""
        self._in_flight.append((nbytes, read))

    def drain(self) -> None:
        while self._in_flight:
            self._retire()

    def _retire(self) -> None:
        nbytes, read = self._in_flight.popleft()
        for event in read:
            event.wait()
        self._ledger.release("gradients", nbytes)
        self._bytes -= nbytes


class Gradients:
    """Accumulators of every use (owner or alias) of every trainable parameter."""

    def __init__(
        self,
        lanes: Lanes,
        accumulators: Mapping[str, Sequence[Accumulator]],
        tied: Mapping[str, str],
        staging: Ring,
        window: GradientWindow,
        num_threads: int,
    ) -> None:
        self._lanes = lanes
        self._accumulators = accumulators
        most = len(staging) // 2 if staging else 1 << 31
        self._runs = {name: runs_of(parts, most) for name, parts in accumulators.items()}
        self._tied = tied
        self._once = accumulators.keys() - {*tied, *tied.values()}
        """Uses whose accumulators receive nothing but their own gradients."""
        self._staging = staging
        self._window = window
        self._accumulate = partial(kernels.accumulate, num_threads=num_threads)
        self._square_sum = partial(kernels.begin_square_sum, num_threads=num_threads)
        self._taken: Counter[str] = Counter()
        """Number of gradients of each use in this step."""
        self._expected: Counter[str] = Counter()
        """The same for the previous step; empty if unknown: then no sum of squares is computed ahead, and nothing is
        speculated."""
        self._arrived: set[str] = set()
        self._exchanged = False
        """Whether other ranks' sums are added to the accumulators of this step, maybe on the compute lane."""
        self._waiting: dict[Lane, list[Part]] = {Lane.CPU: [], Lane.COMPUTE: []}
        """Parts whose addition is not submitted yet."""
        self._waiting_bytes = 0

    def arrived(self, name: str) -> bool:
        return name in self._arrived

    def all_arrived(self) -> frozenset[str]:
        return frozenset(self._arrived)

    def take(self, name: str, gradient: Tensor) -> bool:
        """Adds a gradient, flat and contiguous, that the compute lane has just written. Returns whether it is assumed
        to be the last one of `name` in this step."""
        nbytes = gradient.numel() * gradient.element_size()
        if not self._window.has_room(nbytes):
            self.hand_over()
        self._window.admit(nbytes)
        region = Region(nbytes, f"gradient of {name}")
        self._lanes.compute(writes=[region], label=f"backward of {name}")
        first = name not in self._arrived
        self._taken[name] += 1
        is_last = self._taken[name] == self._expected[name]
        read: list[Event] = []
        for run in self._runs[name]:
            run.squares = [] if is_last and name in self._once else None
            values = [gradient[one.chunk.offset : one.chunk.end] for one in run.accumulators]
            part = Part(run, values, region, first, run.squares, read)
            if run.lane is Lane.CPU and self._staging:
                self._add_through_staging(part)
            else:
                self._waiting[run.lane].append(part)
                self._waiting_bytes += sum(one.nbytes for one in values)
        self._arrived.add(name)
        self._window.add(nbytes, read)
        if self._waiting_bytes >= BATCH_BYTES:
            self.hand_over()
        return is_last

    def hand_over(self) -> None:
        """Submits the additions of the gradients that still wait for more."""
        for lane, parts in self._waiting.items():
            if parts:
                self._add_in_place(lane, parts)
                self._waiting[lane] = []
        self._waiting_bytes = 0

    def parts(self, names: Sequence[str]) -> list[Accumulator]:
        """The accumulators of these uses, for a caller that adds other ranks' sums to them."""
        self.hand_over()
        self._exchanged = True
        runs = [run for name in names for run in self._runs[name]]
        for run in runs:
            run.squares = None
        return [accumulator for run in runs for accumulator in run.accumulators]

    def sum_tied_uses(self) -> None:
        """accumulator[owner] += accumulator[alias], in declared order; an alias counts once."""
        self.hand_over()
        for alias, owner in self._tied.items():
            if not self.arrived(alias):
                continue
            first = not self.arrived(owner)
            for target, source in zip(self._accumulators[owner], self._accumulators[alias], strict=True):
                event = self._lanes.submit(
                    target.lane,
                    partial(self._accumulate, target.values, source.values, first),
                    reads=[target.memory, source.memory],
                    writes=[target.memory],
                    after=[*target.settled, *source.settled, *self._exchange()],
                    nbytes=3 * FLOAT32_BYTES * target.chunk.size,
                    label=f"tied {source.chunk.label}",
                )
                target.settled = source.settled = (event,)
            for run in self._runs[owner]:
                run.squares = None
            self._arrived.add(owner)
            self._arrived.remove(alias)

    def square_sum(self) -> SquareSum:
        """Exact sum of squares of all gradients that arrived, after waiting for them. Each chunk is read where it
        lives."""
        self.hand_over()
        runs = list(self._all_arrived())
        for run in runs:
            if run.squares is None:
                run.squares = []
                run.squared = self._lanes.submit(
                    run.lane,
                    partial(self._add_squares, run, run.squares),
                    reads=run.memory,
                    after=[*run.settled, *self._exchange()],
                    nbytes=run.nbytes,
                    label=f"norm {run.label}",
                )
                run.settle(run.squared)
        for run in runs:
            run.squared.wait()
        self._window.drain()
        return kernels.finish_square_sums([one for run in runs for one in run.squares or ()])

    def leave(self) -> None:
        """Waits until every gradient that arrived has been read from the memory that backward wrote it to."""
        self.hand_over()
        self._window.drain()

    def drop(self) -> None:
        """Forgets what arrived: the next gradient of each use overwrites its accumulator."""
        self._arrived.clear()
        # With other ranks the sums change after the last gradient, so no gradient is expected to be the last.
        self._expected, self._taken = Counter() if self._exchanged else self._taken, Counter()
        self._exchanged = False

    def _exchange(self) -> Sequence[Event]:
        """The events that a reader of an accumulator waits for, besides the accumulator's own."""
        return [self._lanes.computed()] if self._exchanged else []

    def _all_arrived(self) -> Iterator[ChunkRun]:
        for name, runs in self._runs.items():
            if self.arrived(name):
                yield from runs

    def _add_through_staging(self, part: Part) -> None:
        run, values = part.run, part.values
        slots = [self._staging.take() for _ in values]
        size = values[0].element_size()
        staged = [slot.buffer.tensor[: one.numel() * size] for slot, one in zip(slots, values, strict=True)]
        buffers: list[Region] = [slot.buffer for slot in slots]
        nbytes = size * run.nbytes // FLOAT32_BYTES
        copied = self._lanes.submit(
            Lane.D2H,
            partial(kernels.copy_batch, list(zip(staged, map(as_bytes, values), strict=True))),
            reads=[part.region],
            writes=buffers,
            after=[self._lanes.computed(), *(event for slot in slots for event in slot.free)],
            nbytes=nbytes,
            label=f"gradient {run.label}",
        )
        part.read.append(copied)
        there = replace(part, values=[one.view(values[0].dtype) for one in staged])
        added = self._lanes.submit(
            Lane.CPU,
            partial(self._add, [there]),
            reads=[*buffers, *run.memory],
            writes=run.memory,
            after=[copied, *run.settled],
            nbytes=nbytes + self._added_bytes(part),
            label=f"accumulate {run.label}",
        )
        for slot in slots:
            slot.free = (added,)
        run.squared = added
        run.settle(added)

    def _add_in_place(self, lane: Lane, parts: Sequence[Part]) -> None:
        memory = [region for part in parts for region in part.run.memory]
        more = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
        added = self._lanes.submit(
            lane,
            partial(self._add, parts),
            reads=[*(part.region for part in parts), *memory],
            writes=memory,
            after=[self._lanes.computed(), *dict.fromkeys(event for part in parts for event in part.run.settled)],
            nbytes=sum(sum(one.nbytes for one in part.values) + self._added_bytes(part) for part in parts),
            label=f"accumulate {parts[0].run.label}{more}",
        )
        for part in parts:
            part.read.append(added)
            part.run.squared = added
            part.run.settle(added)

    def _added_bytes(self, part: Part) -> int:
        """Bytes of the accumulators that adding a gradient, and squaring the sums, reads and writes."""
        return part.run.nbytes * ((1 if part.first else 2) + (part.squares is not None))

    def _add(self, parts: Sequence[Part]) -> None:
        for part in parts:
            for accumulator, values in zip(part.run.accumulators, part.values, strict=True):
                self._accumulate(accumulator.values, values, part.first)
            if part.squares is not None:
                self._add_squares(part.run, part.squares)

    def _add_squares(self, run: ChunkRun, squares: list[kernels.BegunSum]) -> None:
        squares += [self._square_sum(accumulator.values) for accumulator in run.accumulators]
