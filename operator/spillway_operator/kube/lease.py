"""Leader election: among several operators, the leader holds a Lease (coordination.k8s.io/v1).

    Lease as last seen, own identity, monotonic time -> decide -> acquire | renew | wait | lost

Clocks of two machines are never compared. A standby counts from when it saw the record change; the leader counts from
when it sent its last successful renewal, which is earlier, and stops writing after GIVE_UP_SECONDS, three seconds
before anybody else may begin. A lost Lease ends the process: its data may be out of date.
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
"""After this time without a change of the record, another operator may take the Lease."""
RENEW_SECONDS = 4.0
GIVE_UP_SECONDS = 12.0
"""After this time since the last renewal, the leader writes nothing more and the process ends."""
LOOK_SECONDS = 1.0
"""Interval between reads by a standby, and between tries after a failed renewal."""
REQUEST_SECONDS = 5.0
UNSEEN_SECONDS = GIVE_UP_SECONDS - RENEW_SECONDS
"""After this time without a read, the wait restarts: the leader may also have been unable to reach the API server."""


def boot_seconds() -> float:
    """Monotonic seconds, including time while the machine sleeps, in which a Lease expires."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class LeaseLost(Exception):
    """This process may no longer write; the message says why."""


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
    """Empty if the Lease was released; None if it does not exist."""
    version: str = ""
    """resourceVersion of the record."""
    changed: float = float("-inf")
    """When the present version was first read; after UNSEEN_SECONDS without a read, when it was read again."""
    looked: float = float("-inf")
    """When it was last read."""
    lasts: float = LEASE_SECONDS
    """Its leaseDurationSeconds."""
    renewed: float | None = None
    """When the last successful renewal was sent; None for a standby."""

    def seconds_left(self, now: float) -> float:
        """Time for which this process may still write."""
        return 0.0 if self.renewed is None else max(0.0, self.renewed + GIVE_UP_SECONDS - now)


def decide(standing: LeaseView, now: float) -> LeaseStep:
    """What to do at `now`."""
    if standing.renewed is not None:
        holds = standing.holder == standing.identity and standing.seconds_left(now) > 0
        return LeaseStep.RENEW if holds else LeaseStep.LOST
    # A restarted container takes its pod's Lease: the previous container has ended.
    is_free = standing.holder in ("", standing.identity) or now > standing.changed + standing.lasts
    return LeaseStep.ACQUIRE if is_free else LeaseStep.WAIT


def seen(standing: LeaseView, found: Mapping[str, Any] | None, now: float) -> LeaseView:
    """The view after reading the Lease at `now`. After a deletion (None) the wait is the same as before, because the
    holder may not have noticed."""
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
    """A new Lease without a holder; it is deleted with its owner, so that an uninstalled release leaves none."""
    metadata = {"name": name} | ({"ownerReferences": [owner]} if owner else {})
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}


def taken(found: Mapping[str, Any], identity: str, now: datetime) -> dict[str, Any]:
    """The Lease to write for `identity`, based on the one found; "" releases it."""
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
    """Takes part in leader election. `client` must not be shared: a renewal must not wait for other requests. `run`
    only ends by raising LeaseLost."""

    client: ApiClient
    namespace: str
    name: str
    identity: str
    owner: Mapping[str, str] | None = None
    clock: Callable[[], float] = boot_seconds
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    leads: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    has_looked: bool = field(default=False, init=False)
    """The Lease has been read, which makes a standby ready."""
    _standing: LeaseView = field(init=False)
    _found: Mapping[str, Any] | None = field(default=None, init=False)
    _is_known: bool = field(default=False, init=False)
    """No request has failed since the record was read or written."""

    def __post_init__(self) -> None:
        self._standing = LeaseView(self.identity)

    def seconds_left(self) -> float:
        """Time for which this process may still write; it limits its other requests."""
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
        """Releases the Lease, so that another operator leads within a second. This process must not write after
        that."""
        if not self.seconds_left():
            return
        self._standing = replace(self._standing, renewed=None)
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                if not self._is_known:
                    await self._read()
                if self._standing.holder == self.identity:
                    await self._write("")
                    logger.info("Lease %s/%s released", self.namespace, self.name)
        except (ApiError, TimeoutError) as error:
            logger.warning("Lease %s/%s was not released: %s", self.namespace, self.name, str(error) or "no answer")

    async def _look(self) -> None:
        if not (self.leads.is_set() and self._is_known):
            await self._read()
        if decide(self._standing, self.clock()) not in (LeaseStep.ACQUIRE, LeaseStep.RENEW):
            return
        sent = self.clock()
        await self._write(self.identity)
        self._standing = replace(self._standing, renewed=sent)
        if not self.leads.is_set():
            logger.info("Lease %s/%s: this pod (%s) is the leader", self.namespace, self.name, self.identity)
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
            logger.info("standing by: pod %s is the leader", self._standing.holder)

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
        return f"{lease} was not renewed for {GIVE_UP_SECONDS:g} s: the API server did not answer, or this process hung"
