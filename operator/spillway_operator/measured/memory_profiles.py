"""MemoryProfiles: writes reported peaks to objects that outlive the jobs (feedback.profiles decides their content).

Profiles are written in the background, at most once per profile and 30 s, also after a change of operator, and only if
a report has news. All jobs of a profile share that write. Every failure is only logged, because ConfigMaps and profiles
may be written by anybody; the next higher peak or attempt tries again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any
from weakref import ReferenceType, WeakValueDictionary, ref

from pydantic import ValidationError

from spillway.api.job_file import JobFile
from spillway.api.limits import GROUP, VERSION
from spillway.api.profiles import MemoryProfile, MemoryProfileSpec, MemoryProfileStatus
from spillway.api.progress import PodMemory
from spillway.api.status import Escalation, PlanStatus
from spillway.api.training_job import TrainingJobSpec
from spillway.feedback.ladder import MemoryFailure
from spillway.feedback.pod_evidence import PodPeak, workload
from spillway.feedback.profiles import profile_after_failure, profile_name, profile_update
from spillway.plan import MemoryPlan
from spillway.planning.pod_resources import pod_resources

from ..decide.case import known_seconds
from ..decide.manifests import DECISION_KEY, JOB_KEY, PLAN_KEY, attempt_name, decided_memory
from ..decide.observed import JobObject
from ..kube.api_client import CONFIG_MAPS, MEMORY_PROFILES, ApiClient, ApiError, Conflict, NotFound
from ..kube.store import Key, controller
from ..log import about
from ..progress.outbox import Received

logger = logging.getLogger(__name__)

PROFILE_SECONDS = 30.0
"""Shortest interval between writes of one profile."""
LOOK_SECONDS = 5.0
PEAK_STEP = 1.01
"""Smallest factor by which a pod's peak must grow to be news; PodEvidence's margins are wider."""
MOST_PROFILES = 200
"""Most profiles per namespace."""
MOST_CONTRACTS = 256
"""Contracts kept in memory, some 30 KiB each; others are read again when needed."""

Peaks = Mapping[str, int]
"""Tier -> bytes of the rank that holds most."""
Profile = tuple[str, str]
"""Namespace and name of a MemoryProfile."""


@dataclass(frozen=True, slots=True)
class ReportedPeaks:
    """The peaks of an attempt."""

    job_uid: str
    attempt: int
    peaks: Peaks
    pod: PodMemory = field(default_factory=PodMemory)


@dataclass(frozen=True, slots=True)
class RanOut:
    """An attempt that ended because it ran out of memory."""

    job_uid: str
    attempt: int
    reason: str


News = ReportedPeaks | RanOut


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ContractFiles:
    """The part of a contract that peaks are compared with; attempts with equal contracts share one object."""

    profile: str
    """Name of the MemoryProfile."""
    spec: TrainingJobSpec
    plan: MemoryPlan
    ranks_per_node: int
    decided_bytes: int = 0
    """Memory of a pod by status.plan; 0 = the counted bytes."""
    image: str = ""
    """The trainer's image; empty if the contract is from before images were recorded."""

    def failure(self, attempt: int, reason: str) -> MemoryFailure:
        counted = self.counted_bytes
        limit = decided_memory(counted, self.decided_bytes)
        return MemoryFailure(attempt, reason, self.plan, limit, counted - limit)

    @property
    def counted_bytes(self) -> int:
        """Counted memory of a pod, including known needs in addition to its plan."""
        return pod_resources(self.spec, self.plan, self.ranks_per_node).memory_bytes

    def pod(self, said: PodMemory) -> PodPeak | None:
        """The pod's peak; None if the trainer does not report it."""
        if not said.peak:
            return None
        counted = self.counted_bytes
        return PodPeak(
            peak_bytes=said.peak,
            counted_bytes=counted - self.plan.unplanned_bytes,
            limit_bytes=decided_memory(counted, self.decided_bytes),
            is_whole=said.is_whole and bool(self.image),
            workload=workload(self.spec, self.plan, self.image),
        )


@dataclass(frozen=True, slots=True)
class Contracted:
    """Weak reference to an attempt's contract."""

    job_uid: str
    attempt: int
    contract: ReferenceType[ContractFiles]


@dataclass(frozen=True, slots=True)
class Waiting:
    """An attempt's news that will be written to its profile."""

    key: Key
    news: News
    contract: ContractFiles


@dataclass(slots=True)
class MemoryProfiles:
    client: ApiClient
    written: Callable[[str], None] = lambda _: None
    """Called with the namespace of each written profile."""
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    """Unix seconds, as in MemoryProfile.status.observedTime."""
    _waiting: dict[Key, ReportedPeaks] = field(default_factory=dict, init=False)
    """Peaks that are not in a profile yet."""
    _ended: dict[Key, RanOut] = field(default_factory=dict, init=False)
    """Out-of-memory ends (lower bounds) that are not in a profile yet."""
    _seen: dict[Key, ReportedPeaks] = field(default_factory=dict, init=False)
    _contracts: dict[Key, Contracted] = field(default_factory=dict, init=False)
    _shared: WeakValueDictionary[str, ContractFiles] = field(default_factory=WeakValueDictionary, init=False)
    """Contracts by profile: a thousand jobs of one model share its spec and plan."""
    _held: dict[int, ContractFiles] = field(default_factory=dict, init=False)
    """Strong references by id, the most recently used last."""
    _written: dict[Profile, float] = field(default_factory=dict, init=False)
    """Monotonic seconds of the last write, kept for PROFILE_SECONDS."""

    def reported(self, key: Key, received: Received) -> None:
        if received.report.spillway is None:
            return
        peaks = {tier: size for tier, size in received.report.spillway.peak if size}
        reported = ReportedPeaks(received.job_uid, received.attempt, peaks, received.report.spillway.pod)
        if peaks and is_news(reported, self._seen.get(key)):
            self._seen[key] = self._waiting[key] = reported

    def ran_out(self, job: JobObject, ended: Iterable[Escalation]) -> None:
        """Records out-of-memory ends; the last one of each job is kept until it is written."""
        for one in ended:
            self._ended[job.key] = RanOut(job.uid, one.attempt, one.reason)

    def forget(self, key: Key) -> None:
        self._waiting.pop(key, None)
        self._ended.pop(key, None)
        self._seen.pop(key, None)
        self._contracts.pop(key, None)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.write()

    async def write(self) -> None:
        """Writes each profile's news in one request, unless it was written less than PROFILE_SECONDS ago. Never
        raises."""
        for profile, waiting in (await self._by_profile()).items():
            written = self._written.get(profile, float("-inf"))
            if self.clock() - written >= PROFILE_SECONDS and await self._written_to(profile, waiting):
                for one in waiting:
                    self._done(one.key, one.news)

    async def _by_profile(self) -> dict[Profile, list[Waiting]]:
        """The waiting news by profile, out-of-memory ends first."""
        found: dict[Profile, list[Waiting]] = {}
        everything: list[tuple[Key, News]] = [*self._ended.items(), *self._waiting.items()]
        for key, news in everything:
            contract = await self._contract(key, news)
            if contract is None:
                self._done(key, news)
            else:
                found.setdefault((key[0], contract.profile), []).append(Waiting(key, news, contract))
        return found

    def _done(self, key: Key, news: News) -> None:
        """Removes written news, unless something newer arrived meanwhile."""
        if self._waiting.get(key) == news:
            del self._waiting[key]
        if self._ended.get(key) == news:
            del self._ended[key]

    async def _contract(self, key: Key, news: News) -> ContractFiles | None:
        """The contract of the attempt; None if it cannot be read, which is logged if it is an error."""
        known = self._contracts.get(key)
        is_its = known is not None and (known.job_uid, known.attempt) == (news.job_uid, news.attempt)
        if known is not None and is_its and (held := known.contract()) is not None:
            return self._hold(held)
        try:
            found = await self._read_contract(key, news)
        except ApiError as error:
            logger.warning("memory profile was not written: %s", error, extra=about(key, news.attempt))
            return None
        if found is not None and (key in self._seen or key in self._ended):  # not forgotten meanwhile
            self._contracts[key] = Contracted(news.job_uid, news.attempt, ref(self._hold(found)))
        return found

    def _hold(self, contract: ContractFiles) -> ContractFiles:
        self._held.pop(id(contract), None)
        self._held[id(contract)] = contract
        if len(self._held) > MOST_CONTRACTS:
            del self._held[next(iter(self._held))]
        return contract

    async def _read_contract(self, key: Key, news: News) -> ContractFiles | None:
        """The ConfigMap's contract; None if it is missing, another job's or of another version. Raises ApiError."""
        try:
            found = await self.client.get(CONFIG_MAPS, key[0], attempt_name(key[1], news.attempt))
            if controller(found["metadata"]).get("uid") != news.job_uid:
                return None
            read = _read(found.get("data") or {})
        except (NotFound, ValidationError):
            return None
        known = self._shared.get(read.profile)
        if known == read:
            return known
        self._shared[read.profile] = read
        return read

    async def _written_to(self, profile: Profile, waiting: Sequence[Waiting]) -> bool:
        """Writes the profile; returns whether the news is settled, also after an error."""
        try:
            return await self._update(profile, waiting)
        except ApiError as error:
            logger.warning("memory profile %s/%s was not written: %s", *profile, error)
        except Exception:
            logger.exception("memory profile %s/%s was not written", *profile)
        return True

    async def _update(self, profile: Profile, waiting: Sequence[Waiting]) -> bool:
        """Updates the profile; returns False if another operator wrote it less than PROFILE_SECONDS ago."""
        namespace, name = profile
        existing = await self._existing(namespace, name)
        if profile not in self._written and (age := self._age(existing)) < PROFILE_SECONDS:
            self._written[profile] = self.clock() - age
            return False
        known, updated = existing, None
        for one in waiting:
            if (changed := self._with(known, one)) is not None:
                known = updated = changed
            await asyncio.sleep(0)  # do not block the loop with a thousand reports
        if updated is None:
            return True
        head = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "MemoryProfile",
            "metadata": {"name": name, "namespace": namespace},
        }
        try:
            if existing is None:
                await self._make_room(namespace)
                await self.client.apply(
                    MEMORY_PROFILES, namespace, name, head | {"spec": updated.part(MemoryProfileSpec)}
                )
            body = head | {"status": updated.part(MemoryProfileStatus)}
            await self.client.apply_status(MEMORY_PROFILES, namespace, name, body)
        finally:  # it may have been written even without an answer
            now = self.clock()
            recent = {other: at for other, at in self._written.items() if now - at < PROFILE_SECONDS}
            self._written = recent | {profile: now}
            self.written(namespace)
        return True

    async def _make_room(self, namespace: str) -> None:
        """Deletes the profiles of a namespace that were observed longest ago, if there are MOST_PROFILES."""
        listed = (await self.client.list(MEMORY_PROFILES, namespace, _observed)).items
        for _, name, uid in sorted(listed)[: max(0, 1 + len(listed) - MOST_PROFILES)]:
            with suppress(NotFound, Conflict):
                await self.client.delete(MEMORY_PROFILES, namespace, name, uid)

    def _with(self, existing: MemoryProfile | None, waiting: Waiting) -> MemoryProfile | None:
        """The profile with one attempt's news; None if nothing changes or the news is invalid."""
        contract, news, key = waiting.contract, waiting.news, waiting.key
        now = datetime.fromtimestamp(self.wall_clock(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        try:
            if isinstance(news, RanOut):
                failure = contract.failure(news.attempt, news.reason)
                return profile_after_failure(existing, contract.spec, failure, now)
            source = attempt_name(key[1], news.attempt)
            pod = contract.pod(news.pod)
            return profile_update(existing, contract.spec, contract.plan, news.peaks, source, now, pod)
        except Exception:
            logger.exception("memory profile was not written", extra=about(key, news.attempt))
            return None

    def _age(self, existing: MemoryProfile | None) -> float:
        """Lower bound of the seconds since it was written, whose time has no fraction. Infinite if it was never
        written, or in the future by this clock."""
        written = None if existing is None else known_seconds(existing.observed_time)
        age = float("inf") if written is None else self.wall_clock() - written
        return age - 1.0 if age >= 0 else float("inf")

    async def _existing(self, namespace: str, name: str) -> MemoryProfile | None:
        try:
            found = await self.client.get(MEMORY_PROFILES, namespace, name)
            return MemoryProfile.read(found)
        except (NotFound, ValidationError):
            return None


def _observed(found: Mapping[str, Any]) -> tuple[str, str, str]:
    """When a profile was last observed (RFC 3339), its name and uid."""
    time = str((found.get("status") or {}).get("observedTime") or found["metadata"].get("creationTimestamp") or "")
    return time, found["metadata"]["name"], found["metadata"]["uid"]


def is_news(reported: ReportedPeaks, seen: ReportedPeaks | None) -> bool:
    """Whether the peaks differ. A pod's peak grows with the page cache, so it only counts once the run was whole, and
    in steps of PEAK_STEP."""
    if seen is None or replace(reported, pod=seen.pod) != seen:
        return True
    return reported.pod.is_whole and (not seen.pod.is_whole or reported.pod.peak > PEAK_STEP * seen.pod.peak)


def _read(data: Mapping[str, str]) -> ContractFiles:
    """The contract in a ConfigMap; its plan has no job name, so that it equals those of other jobs."""
    job = JobFile.model_validate_json(data.get(JOB_KEY, ""))
    plan = MemoryPlan.model_validate_json(data.get(PLAN_KEY, "")).model_copy(update={"job": ""})
    planned = PlanStatus.model_validate_json(data.get(DECISION_KEY) or "{}")
    decided = planned.pod_memory or 0
    return ContractFiles(profile_name(job.spec, plan), job.spec, plan, job.ranks_per_node, decided, planned.image)
