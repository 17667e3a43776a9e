"""Audit: verifies the watches with complete lists, page by page.

An interrupted watch may have missed a deletion permanently (its relist does not report it), and a dead one misses
everything. Differences between a list and the store are checked again after a moment, because the watch may be about to
deliver them; what remains is counted and corrected in the store.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ..exporter import OperatorExporter
from .api_client import ApiClient, ApiError
from .store import Key, Named
from .watched import Watched

logger = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
"""Time for the watch to deliver what a list already shows."""
SOON_SECONDS = 30.0
"""Interval to the next audit after one with differences."""
DEAD_AFTER = 2
"""After this many audits with differences in a row, the watch counts as dead."""

T = TypeVar("T", bound=Named)


@dataclass(frozen=True, slots=True)
class Difference(Generic[T]):
    """Differences between a list of one kind and the store."""

    kind: Watched[T]
    missed: tuple[T, ...] = ()
    """Objects that the store does not have in this or a newer version."""
    ghosts: tuple[T, ...] = ()
    """Objects in the store that no longer exist."""

    @property
    def is_empty(self) -> bool:
        return not (self.missed or self.ghosts)

    def that_remains(self) -> Difference[T]:
        """The difference without what the watch has reported since."""
        table = self.kind.table
        return Difference(
            self.kind,
            tuple(seen for seen in self.missed if not table.knows(seen)),
            tuple(gone for gone in self.ghosts if table.get((gone.namespace, gone.name)) == gone),
        )


@dataclass(slots=True)
class Audit:
    """Compares lists with the store; calls `enqueue(key)` for every TrainingJob with a difference."""

    client: ApiClient
    kinds: Sequence[Watched[Any]]
    namespaces: Sequence[str]
    """Namespaces to list; ("",) = all."""
    enqueue: Callable[[Key], None]
    exporter: OperatorExporter
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    clock: Callable[[], float] = time.monotonic
    last_time: float | None = field(default=None, init=False)
    """Monotonic seconds of the last complete list; None before the first."""
    corrections_in_a_row: int = field(default=0, init=False)

    @property
    def watch_is_dead(self) -> bool:
        return self.corrections_in_a_row >= DEAD_AFTER

    async def first(self) -> None:
        """Fills the store at the start. Raises ApiError."""
        self._correct(await self._differences())

    async def run(self, seconds: float) -> None:
        """Checks every `seconds`, endlessly; sooner after a check with differences."""
        while True:
            await self.sleep(min(seconds, SOON_SECONDS) if self.corrections_in_a_row else seconds)
            try:
                await self.check()
            except ApiError as error:
                logger.warning("the complete list, which checks the watches, is postponed: %s", error)

    async def check(self) -> None:
        """Compares, waits for the watch, compares again and corrects what remains. Raises ApiError."""
        found = await self._differences()
        if not all(difference.is_empty for difference in found):
            await self.sleep(GRACE_SECONDS)
            found = [difference.that_remains() for difference in found]
        missed = sum(len(difference.missed) for difference in found)
        ghosts = sum(len(difference.ghosts) for difference in found)
        self.corrections_in_a_row = self.corrections_in_a_row + 1 if missed or ghosts else 0
        if missed or ghosts:
            logger.warning("a complete list shows that the watches missed %d changes and %d deletions", missed, ghosts)
            self.exporter.correction("missed", missed)
            self.exporter.correction("ghost", ghosts)
        self._correct(found)

    async def _differences(self) -> list[Difference[Any]]:
        found = [await self._difference(kind, namespace) for kind in self.kinds for namespace in self.namespaces]
        self.last_time = self.clock()
        return found

    async def _difference(self, kind: Watched[T], namespace: str) -> Difference[T]:
        listing = await self.client.list(kind.resource, namespace, kind.project, kind.label_selector)
        live = {seen.uid for seen in listing.items}
        return Difference(
            kind,
            tuple(seen for seen in listing.items if not kind.table.knows(seen)),
            tuple(
                known
                for known in kind.table
                if known.uid not in live
                and namespace in ("", known.namespace)
                and known.resource_version <= listing.resource_version
            ),
        )

    def _correct(self, found: Sequence[Difference[Any]]) -> None:
        for difference in found:
            keys = [difference.kind.put(seen) for seen in difference.missed]
            keys += [difference.kind.remove(gone) for gone in difference.ghosts]
            for key in set().union(*keys):
                self.enqueue(key)
