"""MemoryProfiles: peaks that trainers report become objects that outlive the jobs (spillway.profiles decides what).

Written behind the decision's back: at most once per profile and 30 s, and only when a report says something new. A
failure is logged, whatever it is: ConfigMaps and profiles may be anybody's work. The next higher peak, or the next
attempt, is another chance.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from pydantic import ValidationError

from spillway.api import GROUP, VERSION, MemoryProfileSpec, TrainingJobSpec
from spillway.job import JobFile
from spillway.plan import MemoryPlan
from spillway.profiles import profile_name, profile_update

from .api_client import CONFIG_MAPS, MEMORY_PROFILES, ApiClient, ApiError, NotFound
from .log import about
from .manifests import JOB_KEY, PLAN_KEY, attempt_name
from .progress_outbox import Received
from .store import Key, controller

logger = logging.getLogger(__name__)

PROFILE_SECONDS = 30.0
"""between two writes of one profile"""
LOOK_SECONDS = 5.0

Peaks = Mapping[str, int]
"""tier -> bytes of the fullest rank"""


@dataclass(frozen=True, slots=True)
class Reported:
    """The peaks of an attempt."""

    job_uid: str
    attempt: int
    peaks: Peaks


@dataclass(frozen=True, slots=True)
class Contracted:
    """What the peaks of an attempt are measured against."""

    job_uid: str
    attempt: int
    spec: TrainingJobSpec
    plan: MemoryPlan

    @property
    def profile(self) -> str:
        return profile_name(self.spec, self.plan)


@dataclass(slots=True)
class MemoryProfiles:
    client: ApiClient
    clock: Callable[[], float] = time.monotonic
    _waiting: dict[Key, Reported] = field(default_factory=dict, init=False)
    """what no profile holds yet"""
    _seen: dict[Key, Reported] = field(default_factory=dict, init=False)
    _contracts: dict[Key, Contracted] = field(default_factory=dict, init=False)
    _written: dict[tuple[str, str], float] = field(default_factory=dict, init=False)
    """(namespace, profile) -> monotonic seconds of its last write, for PROFILE_SECONDS"""

    def reported(self, key: Key, received: Received) -> None:
        if received.report.spillway is None:
            return
        peaks = {tier: size for tier, size in received.report.spillway.peak if size}
        reported = Reported(received.job_uid, received.attempt, peaks)
        if peaks and self._seen.get(key) != reported:
            self._seen[key] = self._waiting[key] = reported

    def forget(self, key: Key) -> None:
        for kept in (self._waiting, self._seen, self._contracts):
            kept.pop(key, None)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for key in list(self._waiting):
                await self.write(key)

    async def write(self, key: Key) -> None:
        """Bring the profile of `key` up to what was reported, unless it was written a moment ago. Never raises."""
        reported = self._waiting.get(key)
        if reported is None:  # forgotten meanwhile
            return
        try:
            contracted = await self._contracted(key, reported)
            if contracted is not None:
                profile = (key[0], contracted.profile)
                if self.clock() - self._written.get(profile, float("-inf")) < PROFILE_SECONDS:
                    return
                await self._update(key, contracted, reported.peaks)
        except ApiError as error:
            logger.warning("a memory profile was not written: %s", error, extra=about(key, reported.attempt))
        except Exception:
            logger.exception("a memory profile was not written", extra=about(key, reported.attempt))
        if self._waiting.get(key) == reported:
            del self._waiting[key]

    async def _contracted(self, key: Key, reported: Reported) -> Contracted | None:
        """Of the attempt's ConfigMap; None when it is gone, another job's, or in the words of another version."""
        known = self._contracts.get(key)
        if known is not None and (known.job_uid, known.attempt) == (reported.job_uid, reported.attempt):
            return known
        try:
            found = await self.client.get(CONFIG_MAPS, key[0], attempt_name(key[1], reported.attempt))
            if controller(found["metadata"]).get("uid") != reported.job_uid:
                return None
            known = _read(reported, found.get("data") or {})
        except (NotFound, ValidationError):
            return None
        if key in self._seen:  # not forgotten meanwhile
            self._contracts[key] = known
        return known

    async def _update(self, key: Key, contracted: Contracted, peaks: Peaks) -> None:
        namespace, name = key[0], contracted.profile
        source = attempt_name(key[1], contracted.attempt)
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        existing = await self._existing(namespace, name)
        updated = profile_update(existing, contracted.spec, contracted.plan, peaks, source, now)
        if updated is None:
            return
        body = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "MemoryProfile",
            "metadata": {"name": name, "namespace": namespace},
            "spec": updated.model_dump(mode="json", exclude_none=True),
        }
        await self.client.apply(MEMORY_PROFILES, namespace, name, body)
        now_written = self.clock()
        recent = {profile: at for profile, at in self._written.items() if now_written - at < PROFILE_SECONDS}
        self._written = recent | {(namespace, name): now_written}

    async def _existing(self, namespace: str, name: str) -> MemoryProfileSpec | None:
        try:
            found = await self.client.get(MEMORY_PROFILES, namespace, name)
            return MemoryProfileSpec.model_validate(found.get("spec") or {})
        except (NotFound, ValidationError):
            return None


def _read(reported: Reported, contract: Mapping[str, str]) -> Contracted:
    job = JobFile.model_validate_json(contract.get(JOB_KEY, ""))
    plan = MemoryPlan.model_validate_json(contract.get(PLAN_KEY, ""))
    return Contracted(reported.job_uid, reported.attempt, job.spec, plan)
