"""Speculative updates during backward, before the norm is known: out of place, in a bounded window.

    begin      assume the factor 1, or 1 / scale with loss scaling: right unless the step is clipped or overflows
    backward   last gradient of W --> spare states = states updated with it; the rounded values wait beside them
    step       that factor, no gradient since:  states and spare states swap, the values go to the device in their turn
               else:                            nothing has read the spare memory; the step updates as it always does

Which gradient is the last one is a guess, too (gradients.py). The arithmetic is that of the update itself, so what is
committed is what the step would have computed, bit for bit. The window is the end of the forward order, where backward
begins. Updates are speculative only while the last step had the factor with which it began.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from spillway.plan import Tier

from ..kernels.reference import UpdateScalars
from ..optimizer.plain import Update
from ..tiers.arena import Arena, MemorySlice, padded
from ..tiers.lanes import Event, Lane, Lanes
from .assign import Chunk, Path
from .place import Placed


@dataclass(slots=True)
class Spare:
    """Memory for one chunk's next states and values."""

    block: MemorySlice
    values: MemorySlice
    made: Event | None = None
    """The update whose results the memory contains; None: nothing valid."""


class Speculation:
    """The window's chunks, their spare memory and what is known of the step."""

    def __init__(self, lanes: Lanes, arena: Arena, window: Sequence[Placed], update: Update) -> None:
        self._lanes = lanes
        self._update = update
        blocks = arena.parts(Tier.HOST, [placed.held.nbytes for placed in window], "spare states")
        values = arena.parts(Tier.HOST, [padded(placed.nbytes) for placed in window], "spare values")
        self._spares = {p.chunk: Spare(block, value) for p, block, value in zip(window, blocks, values, strict=True)}
        self._factor = 1.0
        """The factor of speculative updates in this step."""
        self._is_likely = True
        """Whether the last step had the factor with which it began."""

    def __bool__(self) -> bool:
        return bool(self._spares)

    def begin(self, factor: float) -> None:
        """Begins a step that will have `factor`, unless it is clipped."""
        self._factor = factor

    def taken(
        self, chunks: Sequence[Placed], scalars: UpdateScalars, last: Mapping[Chunk, Event], *, is_last: bool
    ) -> None:
        """Called when a gradient is on its way into the accumulators of `chunks`. Makes the update if the gradient
        `is_last` of the step, and takes back one that was made too early. `last`: the event that ended each chunk's
        last update."""
        for placed in chunks:
            spare = self._spares.get(placed.chunk)
            if spare is None:
                continue
            spare.made = None
            if self._is_likely and is_last:
                spare.made = self._submit(placed, spare, scalars, last.get(placed.chunk))

    def discard(self) -> None:
        """Discards every speculative update, because this step will not update with the sums and scalars that it
        used."""
        for spare in self._spares.values():
            spare.made = None

    def end(self, factor: float | None) -> None:
        """Ends a step that was made with `factor`, or skipped (None). Discards every update that was not committed."""
        self.discard()
        if factor is not None:
            self._is_likely = factor == self._factor

    def commit(self, placed: Placed, factor: float) -> tuple[MemorySlice, Event] | None:
        """Swaps the chunk's states with its spare ones, if those are what a step with `factor` makes of them. Returns
        the new values (uint8, in the compute dtype) and the event that ends their update; None if there are none."""
        spare = self._spares.get(placed.chunk)
        if spare is None or spare.made is None or factor != self._factor:
            return None
        placed.block, spare.block = spare.block, placed.held
        return spare.values, spare.made

    def _submit(self, placed: Placed, spare: Spare, scalars: UpdateScalars, last: Event | None) -> Event:
        accumulator, values = placed.accumulator, spare.values.tensor[: placed.nbytes].view(placed.dtype)
        made = self._lanes.submit(
            Lane.CPU,
            partial(self._work, scalars, placed.held.tensor, spare.block.tensor, placed, values),
            reads=[placed.block, accumulator.memory],
            writes=[spare.block, spare.values],
            after=[*accumulator.settled, *([] if last is None else [last])],
            nbytes=placed.update_bytes + placed.nbytes,
            label=f"speculate {placed.chunk.label}",
        )
        accumulator.settled = (made,)
        return made

    def _work(self, scalars: UpdateScalars, states: Tensor, spare: Tensor, placed: Placed, values: Tensor) -> None:
        before, after = placed.states(states), placed.states(spare)
        made = (after.master, *after.moments)
        self._update(scalars, before.master, before.moments, placed.accumulator.values, values, after=made)


def window_of(placed: Sequence[Placed], tied: Mapping[str, str], num_parameters: int) -> list[Placed]:
    """The last chunks, of at most `num_parameters` in all, whose next states nobody reads before they count: updated by
    the CPU, uploaded to the device, and of a parameter with only one use."""
    shared = {*tied, *tied.values()}
    found, left = list[Placed](), num_parameters
    for one in reversed(placed):
        if one.chunk.path is Path.CPU and one.home is None and one.chunk.parameter not in shared:
            left -= one.chunk.size
            if left < 0:
                break
            found.append(one)
    return found[::-1]
