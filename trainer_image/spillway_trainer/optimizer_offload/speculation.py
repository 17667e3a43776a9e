"""Speculative updates during backward, before the norm is known: out of place, in a bounded window.

    begin      the factor, 1 or with loss scaling 1 / scale, unless the step will be clipped or its gradients overflow
    backward   last gradient of W --> spare states = states updated with it; the rounded values wait beside them
    step       that factor, no gradient since:  states and spare change places, the values go to the device in turn
               else:                            nobody has seen any of it; the step updates as it always does

Which gradient is the last one is a guess, too (gradients.py). The arithmetic is the
update's own, so what is committed is what the step would have computed, bit for bit. The window is the end of the
forward order, where backward begins. It is tried as long as the last step had the factor that it was begun with.
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
    """The update that they contain; None: nothing that counts."""


class Speculation:
    """The window's chunks, their spare memory and what is known of the step."""

    def __init__(self, lanes: Lanes, arena: Arena, window: Sequence[Placed], update: Update) -> None:
        self._lanes = lanes
        self._update = update
        blocks = arena.parts(Tier.HOST, [placed.held.nbytes for placed in window], "spare states")
        values = arena.parts(Tier.HOST, [padded(placed.nbytes) for placed in window], "spare values")
        self._spares = {p.chunk: Spare(block, value) for p, block, value in zip(window, blocks, values, strict=True)}
        self._factor = 1.0
        """Factor of speculative updates."""
        self._is_likely = True
        """Whether the last step had that factor."""

    def __bool__(self) -> bool:
        return bool(self._spares)

    def begin(self, factor: float) -> None:
        """A step begins that will have `factor`, if nothing is clipped."""
        self._factor = factor

    def taken(
        self, chunks: Sequence[Placed], scalars: UpdateScalars, last: Mapping[Chunk, Event], *, is_last: bool
    ) -> None:
        """A gradient is on its way into the accumulators of `chunks`; `last` has what ended each one's last update.
        Makes the update when it `is_last` of the step, and takes back one that was made too early."""
        for placed in chunks:
            spare = self._spares.get(placed.chunk)
            if spare is None:
                continue
            spare.made = None
            if self._is_likely and is_last:
                spare.made = self._submit(placed, spare, scalars, last.get(placed.chunk))

    def discard(self) -> None:
        """Nothing that was made counts: the sums of this step are not those that were used."""
        for spare in self._spares.values():
            spare.made = None

    def end(self, factor: float | None) -> None:
        """The step was made with `factor`, or skipped (None). Nothing that was made and not committed counts."""
        self.discard()
        if factor is not None:
            self._is_likely = factor == self._factor

    def commit(self, placed: Placed, factor: float) -> tuple[MemorySlice, Event] | None:
        """Let the chunk's states and its spare ones change places, if they are what a step with `factor` makes of them:
        returns its values (uint8, in the compute type) and the event that ends their update; None = there are none."""
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
    """The last chunks of at most `num_parameters` whose next states nobody reads before they count: updated by the CPU,
    going up to the device, of a parameter with one use."""
    shared = {*tied, *tied.values()}
    found, left = list[Placed](), num_parameters
    for one in reversed(placed):
        if one.chunk.path is Path.CPU and one.home is None and one.chunk.parameter not in shared:
            left -= one.chunk.size
            if left < 0:
                break
            found.append(one)
    return found[::-1]
