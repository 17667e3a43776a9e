"""Audit: complete lists, page by page, that verify the watches.

A watch that was interrupted may have missed a deletion for ever (its relist does not report what is gone), and a dead
one misses everything. What a list knows better than the store is compared again a moment later, because the watch may
just be on its way; then it counts, and the store is put right.
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
"""for the watch to deliver what a list shows already"""
SOON_SECONDS = 30.0
"""to the next audit, after one that found something"""
DEAD_AFTER = 2
"""audits in a row that found something: the watch is dead"""

T = TypeVar("T", bound=Named)


@dataclass(frozen=True, slots=True)
class Difference(Generic[T]):
    """What a list of one kind knows better than the store."""

    kind: Watched[T]
    missed: tuple[T, ...] = ()
    """newer, or not known at all"""
    ghosts: tuple[T, ...] = ()
    """known, and gone"""

    @property
    def is_empty(self) -> bool:
        return not (self.missed or self.ghosts)

    def that_remains(self) -> Difference[T]:
        """Without what the watch has reported since."""
        table = self.kind.table
        return Difference(
            self.kind,
            tuple(seen for seen in self.missed if not table.knows(seen)),
            tuple(gone for gone in self.ghosts if table.get((gone.namespace, gone.name)) == gone),
        )


@dataclass(slots=True)
class Audit:
    """`enqueue(key)` is called for every TrainingJob that a list tells something new about."""

    client: ApiClient
    kinds: Sequence[Watched[Any]]
    namespaces: Sequence[str]
    """("",) = all"""
    enqueue: Callable[[Key], None]
    exporter: OperatorExporter
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    clock: Callable[[], float] = time.monotonic
    last_time: float | None = field(default=None, init=False)
    """monotonic seconds of the last complete list; None before the first"""
    corrections_in_a_row: int = field(default=0, init=False)

    @property
    def watch_is_dead(self) -> bool:
        return self.corrections_in_a_row >= DEAD_AFTER

    async def first(self) -> None:
        """The start: everything that there is enters the store. Raises ApiError."""
        self._correct(await self._differences())

    async def run(self, seconds: float) -> None:
        """Check every `seconds`, for ever; sooner after a check that found something."""
        while True:
            await self.sleep(min(seconds, SOON_SECONDS) if self.corrections_in_a_row else seconds)
            try:
                await self.check()
            except ApiError as error:
                logger.warning("the complete list is put off: %s", error)

    async def check(self) -> None:
        """Compare, wait for the watch, compare again, and put right what remains. Raises ApiError."""
        found = await self._differences()
        if not all(difference.is_empty for difference in found):
            await self.sleep(GRACE_SECONDS)
            found = [difference.that_remains() for difference in found]
        missed = sum(len(difference.missed) for difference in found)
        ghosts = sum(len(difference.ghosts) for difference in found)
        self.corrections_in_a_row = self.corrections_in_a_row + 1 if missed or ghosts else 0
        if missed or ghosts:
            logger.warning("the watch had missed %d changes and %d deletions", missed, ghosts)
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
