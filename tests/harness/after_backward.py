"""The plain reference of BackwardExchange: everything is summed once backward is over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from spillway_trainer.optimizer.plain import StepOptimizer
from spillway_trainer.ranks import GradientSum
from spillway_trainer.tiers.lanes import Lanes


class AfterBackward:
    is_late = False

    def __init__(
        self, total: GradientSum, optimizer: StepOptimizer, lanes: Lanes, uses: Mapping[str, int], _: int = 0
    ) -> None:
        self._total, self._optimizer, self._lanes, self._uses = total, optimizer, lanes, [*uses][::-1]

    def taken(self, name: str) -> None:
        pass

    def __call__(self) -> None:
        arrived = self._optimizer.arrived()
        self._total(self._in_turn([name for name in self._uses if name in arrived]))

    def _in_turn(self, names: list[str]) -> Iterator[Tensor]:
        for part in self._optimizer.parts(names):
            for event in part.settled:
                self._lanes.wait(event)
            self._lanes.compute(reads=[part.memory], writes=[part.memory], label=f"exchange {part.memory.label}")
            yield part.values
