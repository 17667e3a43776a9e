"""Sums gradients over ranks during backward: the network lane exchanges each use of a parameter once its gradient is
final.

A use is final when it has had as many gradients as the step has micro-batches. All ranks exchange the same list in the
same order: the uses that had a gradient in the step before, the last declared first, which is about the order of
backward. Ranks need no message to agree on this list, because at the end of each step they compare which gradients
arrived. A use that is not final holds up those after it until backward is over. So the exchange of a model that
branches may be later, but its order never changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

from ..optimizer.plain import StepOptimizer
from ..ranks import GradientSum
from ..tiers.lanes import Event, Lane, Lanes


class BackwardExchange:
    """One rank's part in the exchange. `taken` is called during backward; the object itself is called when backward is
    over."""

    def __init__(
        self, total: GradientSum, optimizer: StepOptimizer, lanes: Lanes, uses: Mapping[str, int], num_gradients: int
    ) -> None:
        """`uses`: number of values by name, in declared order. `num_gradients`: the gradients of each use in one
        step."""
        self._total, self._optimizer, self._lanes = total, optimizer, lanes
        self._num_values, self._uses, self._num_gradients = uses, [*uses][::-1], num_gradients
        self._order: list[str] = []
        """The uses to exchange during the backward of this step, in order."""
        self._taken: Counter[str] = Counter()
        self._several: set[str] = set()
        """Uses that had several gradients in one backward, as happens with re-entrant checkpointing."""
        self._begun: dict[str, None] = {}
        self._waiting: list[str] = []
        """The last uses of `_begun`, together still too small for an operation."""
        self._last: Sequence[Event] = ()
        self.is_late = False

    def taken(self, name: str) -> None:
        """Records that the optimizer has one more gradient of `name`."""
        self._taken[name] += 1
        if self._taken[name] > self._num_gradients:
            self._several.add(name)
            self.is_late |= name in self._begun
        while len(self._begun) < len(self._order) and self._is_final(following := self._order[len(self._begun)]):
            self._begin(following)

    def __call__(self) -> None:
        arrived = self._optimizer.arrived()
        for name in (*self._order, *self._uses):
            if name in arrived and name not in self._begun:
                self._begin(name)
        self._exchange()
        for event in self._last:
            event.wait()
        self._order = [name for name in self._uses if name in arrived]
        self._begun, self.is_late = {}, False
        self._taken.clear()

    def _is_final(self, name: str) -> bool:
        return self._taken[name] == self._num_gradients and name not in self._several

    def _begin(self, name: str) -> None:
        self._begun[name] = None
        self._waiting.append(name)
        if self._num_waiting_values >= self._total.bucket:
            self._exchange()

    def _exchange(self) -> None:
        if not self._waiting:
            return
        parts = self._optimizer.parts(self._waiting)
        memory = [part.memory for part in parts]
        exchanged = self._lanes.submit(
            Lane.NETWORK,
            partial(self._total, [part.values for part in parts]),
            reads=memory,
            writes=memory,
            after=[*self._last, self._lanes.computed(), *dict.fromkeys(e for part in parts for e in part.settled)],
            nbytes=self._total.sent_bytes(self._num_waiting_values),
            label=f"exchange {self._waiting[0]} to {self._waiting[-1]}",
        )
        for part in parts:
            part.settled = (exchanged,)
        self._last, self._waiting = (exchanged,), []

    @property
    def _num_waiting_values(self) -> int:
        return sum(self._num_values[name] for name in self._waiting)
