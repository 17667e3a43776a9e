"""MemoryProfiles: peaks that trainers report become objects that outlive the jobs (spillway.profiles decides what).

Written behind the decision's back: at most once per profile and 30 s, and only when a report says something new. A
failure is logged; the next higher peak, or the next attempt, is another chance.
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
from spillway.progress import ProgressReport

from .api_client import CONFIG_MAPS, MEMORY_PROFILES, ApiClient, ApiError, NotFound
from .log import about
from .manifests import JOB_KEY, PLAN_KEY, attempt_name
from .store import Key

logger = logging.getLogger(__name__)

PROFILE_SECONDS = 30.0
"""between two writes of one profile"""
LOOK_SECONDS = 5.0

Peaks = Mapping[str, int]
"""tier -> bytes of the fullest rank"""


@dataclass(frozen=True, slots=True)
class Contracted:
    """What the peaks of an attempt are measured against."""

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
    _waiting: dict[Key, tuple[int, Peaks]] = field(default_factory=dict, init=False)
    """attempt and peaks that no profile holds yet"""
    _seen: dict[Key, tuple[int, Peaks]] = field(default_factory=dict, init=False)
    _contracts: dict[Key, Contracted] = field(default_factory=dict, init=False)
    _written: dict[tuple[str, str], float] = field(default_factory=dict, init=False)
    """(namespace, profile) -> monotonic seconds of its last write"""

    def reported(self, key: Key, attempt: int, report: ProgressReport) -> None:
        if report.spillway is None:
            return
        peaks = {tier: size for tier, size in report.spillway.peak if size}
        if peaks and self._seen.get(key) != (attempt, peaks):
            self._seen[key] = self._waiting[key] = (attempt, peaks)

    def forget(self, key: Key) -> None:
        self._seen.pop(key, None)
        self._contracts.pop(key, None)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for key in list(self._waiting):
                await self.write(key)

    async def write(self, key: Key) -> None:
        """Bring the profile of `key` up to what was reported, unless it was written a moment ago."""
        attempt, peaks = self._waiting[key]
        try:
            contracted = await self._contracted(key, attempt)
            if contracted is not None:
                profile = (key[0], contracted.profile)
                if self.clock() - self._written.get(profile, float("-inf")) < PROFILE_SECONDS:
                    return
                await self._update(key, contracted, peaks)
        except ApiError as error:
            logger.warning("a memory profile was not written: %s", error, extra=about(key, attempt))
        if self._waiting.get(key) == (attempt, peaks):
            del self._waiting[key]

    async def _contracted(self, key: Key, attempt: int) -> Contracted | None:
        """Of the attempt's ConfigMap; None when it is gone, or written in the words of another version."""
        known = self._contracts.get(key)
        if known is not None and known.attempt == attempt:
            return known
        try:
            found = await self.client.get(CONFIG_MAPS, key[0], attempt_name(key[1], attempt))
            known = _read(attempt, found.get("data") or {})
        except (NotFound, ValidationError):
            return None
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
        self._written[namespace, name] = self.clock()

    async def _existing(self, namespace: str, name: str) -> MemoryProfileSpec | None:
        try:
            found = await self.client.get(MEMORY_PROFILES, namespace, name)
            return MemoryProfileSpec.model_validate(found.get("spec") or {})
        except (NotFound, ValidationError):
            return None


def _read(attempt: int, contract: Mapping[str, str]) -> Contracted:
    job = JobFile.model_validate_json(contract.get(JOB_KEY, ""))
    return Contracted(attempt, job.spec, MemoryPlan.model_validate_json(contract.get(PLAN_KEY, "")))
