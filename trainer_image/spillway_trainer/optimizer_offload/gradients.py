"""Gradients on their way from backward into float32 accumulators, and their order-free norm.

A CPU chunk's gradient leaves the device once per micro-batch, in its compute dtype, during backward:
    backward -> d2h into a staging slot -> cpu lane adds it to the host accumulator
A gradient of a streamed or resident chunk is added on the device, by the compute lane, and never leaves it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from .. import kernels
from ..reference import SquareSum
from ..tiers.arena import Part, Ring, as_bytes
from ..tiers.device_ledger import DeviceLedger
from ..tiers.lanes import Event, Lane, Lanes, Region
from .assign import Chunk
from .memory import FLOAT32_BYTES


@dataclass(slots=True)
class Accumulator:
    """The float32 gradient sum of one chunk of one use of a parameter; an alias has accumulators of its own."""

    chunk: Chunk
    memory: Part
    values: Tensor
    """flat float32 view of `memory`, chunk.size values"""
    settled: tuple[Event, ...] = ()
    """complete when everything submitted so far is in `values`"""

    @property
    def lane(self) -> Lane:
        """The lane that owns the accumulator's memory."""
        return Lane.CPU if self.chunk.path.updates_on_cpu else Lane.COMPUTE


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
        self._tied = tied
        self._staging = staging
        self._window = window
        self._accumulate = partial(kernels.accumulate, num_threads=num_threads)
        self._square_sum = partial(kernels.begin_square_sum, num_threads=num_threads)
        self._arrived: set[str] = set()
        self._exchanged = False
        """the compute lane has added other ranks' sums to the accumulators of this step"""

    def arrived(self, name: str) -> bool:
        return name in self._arrived

    def all_arrived(self) -> frozenset[str]:
        return frozenset(self._arrived)

    def take(self, name: str, gradient: Tensor) -> None:
        """Add a gradient, flat and contiguous, that the compute lane has just written."""
        nbytes = gradient.numel() * gradient.element_size()
        self._window.admit(nbytes)
        region = Region(nbytes, f"gradient of {name}")
        self._lanes.compute(writes=[region], label=f"backward of {name}")
        written, first = self._lanes.computed(), name not in self._arrived
        add = {Lane.CPU: self._add_on_host, Lane.COMPUTE: self._add_on_device}
        read = [
            add[accumulator.lane](accumulator, gradient, region, written, first)
            for accumulator in self._accumulators[name]
        ]
        self._arrived.add(name)
        self._window.add(nbytes, read)

    def sums(self) -> Iterator[Tensor]:
        """What arrived, chunk by chunk, each where it lives and when it is complete; the compute lane may change it."""
        for accumulator in self._all_arrived():
            for event in accumulator.settled:
                self._lanes.wait(event)
            memory = accumulator.memory
            self._lanes.compute(reads=[memory], writes=[memory], label=f"exchange {accumulator.chunk.label}")
            self._exchanged = True
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
            self._arrived.add(owner)
            self._arrived.remove(alias)

    def square_sum(self) -> SquareSum:
        """Exact sum of squares of all gradients that arrived; waits for them. Each chunk is read where it lives."""
        parts: list[kernels.BegunSum] = []
        events = []
        for accumulator in self._all_arrived():
            event = self._lanes.submit(
                accumulator.lane,
                self._appending_square_sum(parts, accumulator.values),
                reads=[accumulator.memory],
                after=[*accumulator.settled, *self._exchange()],
                nbytes=FLOAT32_BYTES * accumulator.chunk.size,
                label=f"norm {accumulator.chunk.label}",
            )
            accumulator.settled = (event,)
            events.append(event)
        for event in events:
            event.wait()
        self._window.drain()
        return kernels.finish_square_sums(parts)

    def drop(self) -> None:
        """Forget what arrived: the next gradient of each use overwrites its accumulator."""
        self._arrived.clear()
        self._exchanged = False

    def _exchange(self) -> Sequence[Event]:
        """What whoever reads an accumulator waits for, beside its own events."""
        return [self._lanes.computed()] if self._exchanged else []

    def _all_arrived(self) -> Iterator[Accumulator]:
        for name, accumulators in self._accumulators.items():
            if self.arrived(name):
                yield from accumulators

    def _add_on_host(
        self, accumulator: Accumulator, gradient: Tensor, region: Region, written: Event, first: bool
    ) -> Event:
        chunk, slot = accumulator.chunk, self._staging.take()
        part = gradient[chunk.offset : chunk.end]
        nbytes = part.numel() * part.element_size()
        staged = slot.buffer.tensor[:nbytes]
        copied = self._lanes.submit(
            Lane.D2H,
            partial(kernels.copy, staged, as_bytes(part)),
            reads=[region],
            writes=[slot.buffer],
            after=[written, *slot.free],
            nbytes=nbytes,
            label=f"gradient {chunk.label}",
        )
        added = self._lanes.submit(
            Lane.CPU,
            partial(self._accumulate, accumulator.values, staged.view(part.dtype), first),
            reads=[slot.buffer, accumulator.memory],
            writes=[accumulator.memory],
            after=[copied, *accumulator.settled],
            nbytes=nbytes + FLOAT32_BYTES * chunk.size * (1 if first else 2),
            label=f"accumulate {chunk.label}",
        )
        slot.free = accumulator.settled = (added,)
        return copied

    def _add_on_device(
        self, accumulator: Accumulator, gradient: Tensor, region: Region, written: Event, first: bool
    ) -> Event:
        chunk = accumulator.chunk
        part = gradient[chunk.offset : chunk.end]
        added = self._lanes.submit(
            Lane.COMPUTE,
            partial(self._accumulate, accumulator.values, part, first),
            reads=[region, accumulator.memory],
            writes=[accumulator.memory],
            after=[written, *accumulator.settled],
            nbytes=part.numel() * part.element_size() + FLOAT32_BYTES * chunk.size * (1 if first else 2),
            label=f"accumulate {chunk.label}",
        )
        accumulator.settled = (added,)
        return added

    def _appending_square_sum(self, parts: list[kernels.BegunSum], values: Tensor) -> Callable[[], None]:
        def work() -> None:
            parts.append(self._square_sum(values))

        return work
