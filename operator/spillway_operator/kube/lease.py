"""Leader election: the operator that holds the Lease (coordination.k8s.io/v1) leads.

    Lease as last seen, own identity, monotonic time -> decide -> acquire | renew | wait | lost

Clocks of two machines are never compared. Who waits counts from when it saw the record change; who leads counts from
when it sent its last renewal that succeeded, which is earlier, and writes nothing once GIVE_UP_SECONDS are over, three
seconds before anybody else may begin. A lease that is lost ends the process: what it knows may be old.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum
from typing import Any

from .api_client import LEASES, ApiClient, ApiError, NotFound

logger = logging.getLogger(__name__)

LEASE_SECONDS = 15
"""without a change of the record, after which another one may take it"""
RENEW_SECONDS = 4.0
GIVE_UP_SECONDS = 12.0
"""since the last renewal: from then on nothing is written, and the process ends"""
LOOK_SECONDS = 1.0
"""between two looks of who waits, and between two tries to renew when one failed"""
REQUEST_SECONDS = 5.0
UNSEEN_SECONDS = GIVE_UP_SECONDS - RENEW_SECONDS
"""without a look at the record: who led may have had no API server to renew at, either, and comes first again"""


def boot_seconds() -> float:
    """Monotonic, and goes on while the machine sleeps: a lease runs out meanwhile."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class LeaseLost(Exception):
    """This process may not write any more; the message says why."""


class LeaseStep(Enum):
    ACQUIRE = "acquire"
    RENEW = "renew"
    WAIT = "wait"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class LeaseView:
    """What one process knows of the Lease. Times are of its own monotonic clock."""

    identity: str
    holder: str | None = None
    """"" when it was handed back; None when there is no Lease"""
    version: str = ""
    """resourceVersion of the record"""
    changed: float = float("-inf")
    """when it was first seen as it is; after UNSEEN_SECONDS without a look, when it was seen again"""
    looked: float = float("-inf")
    """when it was last seen"""
    lasts: float = LEASE_SECONDS
    """its leaseDurationSeconds"""
    renewed: float | None = None
    """when the last renewal that succeeded was sent; None for who does not lead"""

    def seconds_left(self, now: float) -> float:
        """For which this process may still write."""
        return 0.0 if self.renewed is None else max(0.0, self.renewed + GIVE_UP_SECONDS - now)


def decide(standing: LeaseView, now: float) -> LeaseStep:
    """What to do at `now`."""
    if standing.renewed is not None:
        holds = standing.holder == standing.identity and standing.seconds_left(now) > 0
        return LeaseStep.RENEW if holds else LeaseStep.LOST
    # A container that is started anew in the same pod takes its pod's lease: the one before it has ended.
    is_free = standing.holder in ("", standing.identity) or now > standing.changed + standing.lasts
    return LeaseStep.ACQUIRE if is_free else LeaseStep.WAIT


def seen(standing: LeaseView, found: Mapping[str, Any] | None, now: float) -> LeaseView:
    """After the Lease was read, with the answer at `now`. One that somebody deleted (None) is waited for as long as if
    it were there: its holder may not have noticed."""
    if found is None:
        return replace(standing, holder=None, looked=now)
    spec, version = found.get("spec") or {}, str(found["metadata"]["resourceVersion"])
    is_unchanged = version == standing.version and now - standing.looked <= UNSEEN_SECONDS
    return replace(
        standing,
        holder=str(spec.get("holderIdentity") or ""),
        version=version,
        changed=standing.changed if is_unchanged else now,
        looked=now,
        lasts=float(spec.get("leaseDurationSeconds") or LEASE_SECONDS),
    )


def first(name: str, owner: Mapping[str, str] | None) -> dict[str, Any]:
    """A Lease that nobody holds; it goes with its owner, so that an uninstalled release leaves none."""
    metadata = {"name": name} | ({"ownerReferences": [owner]} if owner else {})
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}


def taken(found: Mapping[str, Any], identity: str, now: datetime) -> dict[str, Any]:
    """The Lease to write for `identity`, made of what was found; "" hands it back."""
    time_now = now.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    before = dict(found.get("spec") or {})
    holder = before.pop("holderIdentity", None)
    spec = before | {"leaseDurationSeconds": LEASE_SECONDS, "renewTime": time_now}
    if identity:
        spec["holderIdentity"] = identity
    if identity and holder != identity:
        transitions = before.get("leaseTransitions", -1) + 1
        spec |= {"acquireTime": time_now, "leaseTransitions": transitions}
    return {**found, "spec": spec}


@dataclass(slots=True)
class Election:
    """`client` is this one's own, so that a renewal never waits behind other requests. `run` ends by LeaseLost only."""

    client: ApiClient
    namespace: str
    name: str
    identity: str
    owner: Mapping[str, str] | None = None
    clock: Callable[[], float] = boot_seconds
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    leads: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    has_looked: bool = field(default=False, init=False)
    """the Lease could be read: who stands by is ready"""
    _standing: LeaseView = field(init=False)
    _found: Mapping[str, Any] | None = field(default=None, init=False)
    _is_known: bool = field(default=False, init=False)
    """nothing went wrong since the record was read or written"""

    def __post_init__(self) -> None:
        self._standing = LeaseView(self.identity)

    def seconds_left(self) -> float:
        """For which this process may still write: the fence of its other requests."""
        return self._standing.seconds_left(self.clock())

    async def run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(min(REQUEST_SECONDS, self.seconds_left() or REQUEST_SECONDS)):
                    await self._look()
            except (ApiError, TimeoutError) as error:
                self._is_known = False
                logger.warning("Lease %s/%s: %s", self.namespace, self.name, str(error) or "no answer in time")
            if decide(self._standing, self.clock()) is LeaseStep.LOST:
                raise LeaseLost(self._why_lost())
            await self.sleep(RENEW_SECONDS if self.leads.is_set() and self._is_known else LOOK_SECONDS)

    async def release(self) -> None:
        """Hand it back, so that another one leads within a second. Nothing is written by this process after that."""
        if not self.seconds_left():
            return
        self._standing = replace(self._standing, renewed=None)
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                if not self._is_known:
                    await self._read()
                if self._standing.holder == self.identity:
                    await self._write("")
                    logger.info("Lease %s/%s is handed back", self.namespace, self.name)
        except (ApiError, TimeoutError) as error:
            logger.warning("Lease %s/%s was not handed back: %s", self.namespace, self.name, str(error) or "no answer")

    async def _look(self) -> None:
        if not (self.leads.is_set() and self._is_known):
            await self._read()
        if decide(self._standing, self.clock()) not in (LeaseStep.ACQUIRE, LeaseStep.RENEW):
            return
        sent = self.clock()
        await self._write(self.identity)
        self._standing = replace(self._standing, renewed=sent)
        if not self.leads.is_set():
            logger.info("Lease %s/%s is held by this pod (%s): it leads", self.namespace, self.name, self.identity)
            self.leads.set()

    async def _read(self) -> None:
        before = self._standing.holder
        try:
            self._found = await self.client.get(LEASES, self.namespace, self.name)
        except NotFound:
            self._found = None
        self._standing = seen(self._standing, self._found, self.clock())
        self._is_known = self.has_looked = True
        if self._standing.holder not in (before, "", None, self.identity):
            logger.info("stands by: pod %s leads", self._standing.holder)

    async def _write(self, holder: str) -> None:
        body = taken(self._found or first(self.name, self.owner), holder, datetime.now(UTC))
        if self._found is None:
            self._found = await self.client.create(LEASES, self.namespace, body)
        else:
            self._found = await self.client.replace(LEASES, self.namespace, self.name, body)
        self._standing = seen(self._standing, self._found, self.clock())

    def _why_lost(self) -> str:
        lease, holder = f"Lease {self.namespace}/{self.name}", self._standing.holder
        if holder is None:
            return f"{lease} was deleted"
        if holder != self.identity:
            return f"{lease} is held by {holder or 'nobody'}"
        return (
            f"{lease} was not renewed for {GIVE_UP_SECONDS:g} s: the API server did not answer, or this process stood"
        )
