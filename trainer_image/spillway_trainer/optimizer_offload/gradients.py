"""Moves gradients from backward into float32 accumulators, and computes their order-free norm.

A CPU chunk's gradient leaves the device once per micro-batch, in its compute dtype, during backward:
    backward -> d2h into a staging slot -> cpu lane adds it to the host accumulator
A gradient of a streamed or resident chunk is added on the device, by the compute lane, and never leaves it. Chunks in a
row go together (`ChunkRun`). With what is taken to be the last gradient of a step, as many as came in the step before,
the sum of squares is made at once; one that comes after it unmakes it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ..kernels import dispatch as kernels
from ..kernels.reference import SquareSum
from ..tiers.arena import MemorySlice, Ring, as_bytes
from ..tiers.device_ledger import DeviceLedger
from ..tiers.lanes import DONE, Event, Lane, Lanes, Region
from .assign import Chunk
from .memory import FLOAT32_BYTES


@dataclass(slots=True)
class Accumulator:
    """The float32 gradient sum of one chunk of one use of a parameter; an alias has accumulators of its own."""

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
    """Chunks in a row of one use of a parameter, whose gradients one operation moves and one adds."""

    accumulators: Sequence[Accumulator]
    label: str
    nbytes: int
    """Of the accumulators."""
    squares: list[kernels.BegunSum] | None = None
    """Squares of this step's sums, complete with `squared`; None: not begun."""
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
    """All of them, in order; `most_on_host`: chunks of a run that comes down, so that the next one finds free slots."""
    found: list[list[Accumulator]] = []
    for one in accumulators:
        joins = found and one.lane is found[-1][0].lane and one.chunk.offset == found[-1][-1].chunk.end
        if joins and (one.lane is not Lane.CPU or len(found[-1]) < most_on_host):
            found[-1].append(one)
        else:
            found.append([one])
    return [ChunkRun.of(run) for run in found]


class GradientWindow:
    """Bounds the gradients that backward has handed over and that are not read yet, and charges them to the device.

    A gradient larger than the window passes alone.
    """

    def __init__(self, ledger: DeviceLedger, window_bytes: int) -> None:
        self._ledger = ledger
        self._window_bytes = window_bytes
        self._in_flight: deque[tuple[int, Sequence[Event]]] = deque()
        self._bytes = 0

    def admit(self, nbytes: int) -> None:
        """Wait for the oldest gradients until `nbytes` more fit."""
        while self._in_flight and self._bytes + nbytes > self._window_bytes:
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
        self._runs = {name: runs_of(parts, len(staging) // 2) for name, parts in accumulators.items()}
        self._tied = tied
        self._once = accumulators.keys() - {*tied, *tied.values()}
        """Uses whose accumulators receive nothing but their own gradients."""
        self._staging = staging
        self._window = window
        self._accumulate = partial(kernels.accumulate, num_threads=num_threads)
        self._square_sum = partial(kernels.begin_square_sum, num_threads=num_threads)
        self._taken: Counter[str] = Counter()
        """Gradients by use, in this step."""
        self._expected: Counter[str] = Counter()
        """The same of the previous step; empty: unknown, nothing is speculated."""
        self._arrived: set[str] = set()
        self._exchanged = False
        """Whether the compute lane has added other ranks' sums to the accumulators of this step."""

    def arrived(self, name: str) -> bool:
        return name in self._arrived

    def all_arrived(self) -> frozenset[str]:
        return frozenset(self._arrived)

    def take(self, name: str, gradient: Tensor) -> bool:
        """Add a gradient, flat and contiguous, that the compute lane has just written. Returns whether it is taken to
        be the last one of `name` in this step."""
        nbytes = gradient.numel() * gradient.element_size()
        self._window.admit(nbytes)
        region = Region(nbytes, f"gradient of {name}")
        self._lanes.compute(writes=[region], label=f"backward of {name}")
        written, first = self._lanes.computed(), name not in self._arrived
        self._taken[name] += 1
        is_last = self._taken[name] == self._expected[name]
        read = []
        for run in self._runs[name]:
            run.squares = [] if is_last and name in self._once else None
            add = self._add_on_host if run.lane is Lane.CPU else self._add_on_device
            read.append(add(run, gradient, region, written, first))
        self._arrived.add(name)
        self._window.add(nbytes, read)
        return is_last

    def sums(self) -> Iterator[Tensor]:
        """What arrived, chunk by chunk, each where it lives and when it is complete; the compute lane may change it."""
        for run in self._all_arrived():
            run.squares, self._exchanged = None, True
            for accumulator in run.accumulators:
                for event in accumulator.settled:
                    self._lanes.wait(event)
                memory = accumulator.memory
                self._lanes.compute(reads=[memory], writes=[memory], label=f"exchange {accumulator.chunk.label}")
                yield accumulator.values

    def sum_tied_uses(self) -> None:
        """accumulator[owner] += accumulator[alias], in declared order; an alias counts once."""
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
        """Exact sum of squares of all gradients that arrived; waits for them. Each chunk is read where it lives."""
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
        """Return when none that arrived is on the device as it came."""
        self._window.drain()

    def drop(self) -> None:
        """Forget what arrived: the next gradient of each use overwrites its accumulator."""
        self._arrived.clear()
        # With other ranks sums change after the last gradient.
        self._expected, self._taken = Counter() if self._exchanged else self._taken, Counter()
        self._exchanged = False

    def _exchange(self) -> Sequence[Event]:
        """What whoever reads an accumulator waits for, beside its own events."""
        return [self._lanes.computed()] if self._exchanged else []

    def _all_arrived(self) -> Iterator[ChunkRun]:
        for name, runs in self._runs.items():
            if self.arrived(name):
                yield from runs

    def _add_on_host(self, run: ChunkRun, gradient: Tensor, region: Region, written: Event, first: bool) -> Event:
        slots = [self._staging.take() for _ in run.accumulators]
        parts = [gradient[one.chunk.offset : one.chunk.end] for one in run.accumulators]
        size = gradient.element_size()
        staged = [slot.buffer.tensor[: part.numel() * size] for slot, part in zip(slots, parts, strict=True)]
        buffers: list[Region] = [slot.buffer for slot in slots]
        nbytes = size * run.nbytes // FLOAT32_BYTES
        copied = self._lanes.submit(
            Lane.D2H,
            partial(kernels.copy_batch, list(zip(staged, map(as_bytes, parts), strict=True))),
            reads=[region],
            writes=buffers,
            after=[written, *(event for slot in slots for event in slot.free)],
            nbytes=nbytes,
            label=f"gradient {run.label}",
        )
        added = self._lanes.submit(
            Lane.CPU,
            partial(self._add, run, [part.view(gradient.dtype) for part in staged], first, run.squares),
            reads=[*buffers, *run.memory],
            writes=run.memory,
            after=[copied, *run.settled],
            nbytes=nbytes + self._added_bytes(run, first),
            label=f"accumulate {run.label}",
        )
        for slot in slots:
            slot.free = (added,)
        run.squared = added
        run.settle(added)
        return copied

    def _add_on_device(self, run: ChunkRun, gradient: Tensor, region: Region, written: Event, first: bool) -> Event:
        parts = [gradient[one.chunk.offset : one.chunk.end] for one in run.accumulators]
        added = self._lanes.submit(
            Lane.COMPUTE,
            partial(self._add, run, parts, first, run.squares),
            reads=[region, *run.memory],
            writes=run.memory,
            after=[written, *run.settled],
            nbytes=gradient.element_size() * run.nbytes // FLOAT32_BYTES + self._added_bytes(run, first),
            label=f"accumulate {run.label}",
        )
        run.squared = added
        run.settle(added)
        return added

    def _added_bytes(self, run: ChunkRun, first: bool) -> int:
        """What adding a gradient, and squaring the sums, reads and writes of the accumulators."""
        return run.nbytes * ((1 if first else 2) + (run.squares is not None))

    def _add(self, run: ChunkRun, parts: Sequence[Tensor], first: bool, squares: list[kernels.BegunSum] | None) -> None:
        for accumulator, part in zip(run.accumulators, parts, strict=True):
            self._accumulate(accumulator.values, part, first)
        if squares is not None:
            self._add_squares(run, squares)

    def _add_squares(self, run: ChunkRun, squares: list[kernels.BegunSum]) -> None:
        squares += [self._square_sum(accumulator.values) for accumulator in run.accumulators]
