"""The `Spilling` objects of one test, closed at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from spillway_trainer.activation_spill import Spilling


@contextmanager
def spillings(directory: Path, **sizes: Any) -> Iterator[Callable[..., Spilling]]:
    """Yields a function that makes a `Spilling` of a module (default: an empty one) in `directory`. `sizes` are
    defaults of its keyword arguments."""
    made: list[Spilling] = []

    def spilling(module: nn.Module | None = None, **given: Any) -> Spilling:
        made.append(Spilling(module or nn.Module(), directory, **{"nvme_bytes": 1 << 24, **sizes, **given}))
        return made[-1]

    yield spilling
    for each in made:
        each.close()
