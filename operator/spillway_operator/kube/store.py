"""Store: the known TrainingJobs and attempts, as frozen projections; API objects are not kept.

Watches, lists and answers to our own writes put objects here; the newest resourceVersion wins (an integer, which
clients may compare). The resourceVersion of a deleted object is kept, so that a late event cannot restore it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

from spillway.api.earlier import as_today
from spillway.api.limits import GROUP
from spillway.api.status import MAX_ATTEMPTS

from ..decide.manifests import ATTEMPT_LABEL, JOB_LABEL, MANAGED_BY_LABEL
from ..decide.observed import AttemptObject, JobObject

Key = tuple[str, str]
"""Namespace and name of a TrainingJob."""

MANAGED_BY = f"{MANAGED_BY_LABEL}=spillway"
"""Label selector of all objects that the operator creates."""
MOST_TOMBSTONES = 20_000


class Named(Protocol):
    @property
    def uid(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def namespace(self) -> str: ...
    @property
    def resource_version(self) -> int: ...


T = TypeVar("T", bound=Named)


class Table(Generic[T]):
    """Projections of one kind by (namespace, name)."""

    def __init__(self) -> None:
        self._found: dict[Key, T] = {}
        self._by_uid: dict[str, T] = {}
        self._tombstones: dict[str, int] = {}
        """Uid -> resourceVersion of the deletion."""
        self._undelivered: dict[str, tuple[int, float]] = {}
        """Uid -> the first resourceVersion that the watch has not delivered yet, and since when; oldest first."""

    @property
    def lag_seconds(self) -> float:
        """How long the watch has not delivered a change that is known from elsewhere; 0 if there is none."""
        return max((time.monotonic() - since for _, since in list(self._undelivered.values())[:1]), default=0.0)

    def delivered(self, seen: T) -> None:
        """Records that the watch delivered this version."""
        if self._undelivered.get(seen.uid, (sys.maxsize, 0.0))[0] <= seen.resource_version:
            del self._undelivered[seen.uid]

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._found.values()))

    def get(self, key: Key) -> T | None:
        return self._found.get(key)

    def by_uid(self, uid: str) -> T | None:
        return self._by_uid.get(uid)

    def put(self, seen: T) -> bool:
        """Stores the object if it is newer than the known one; returns whether it is."""
        key = (seen.namespace, seen.name)
        if self.knows(seen):
            return False
        known = self._found.get(key)
        if known is not None and known.uid != seen.uid:  # its deletion was not reported
            self._bury(known)
            del self._by_uid[known.uid]
        self._found[key] = self._by_uid[seen.uid] = seen
        self._undelivered.setdefault(seen.uid, (seen.resource_version, time.monotonic()))
        return True

    def knows(self, seen: T) -> bool:
        """Whether this version of the object, a newer one or its deletion is known."""
        known = self._found.get((seen.namespace, seen.name))
        if known is not None and known.resource_version >= seen.resource_version:
            return True
        return self._tombstones.get(seen.uid, -1) >= seen.resource_version

    def remove(self, gone: T) -> bool:
        """Removes the object; returns whether it was known."""
        key = (gone.namespace, gone.name)
        known = self._found.get(key)
        if known is not None and known.uid == gone.uid and known.resource_version > gone.resource_version:
            return False
        self._bury(gone)
        if known is None or known.uid != gone.uid:
            return False
        del self._found[key], self._by_uid[gone.uid]
        return True

    def _bury(self, gone: T) -> None:
        self._undelivered.pop(gone.uid, None)
        self._tombstones[gone.uid] = gone.resource_version
        if len(self._tombstones) > MOST_TOMBSTONES:
            del self._tombstones[next(iter(self._tombstones))]


class Store:
    """All known objects; `put_*` and `remove_*` return the TrainingJobs that need a look."""

    def __init__(self) -> None:
        self.jobs: Table[JobObject] = Table()
        self.attempts: Table[AttemptObject] = Table()
        self._attempts_of: dict[Key, set[str]] = {}
        """TrainingJob -> names of the Jobs that have its label or are owned by it."""
        self._owner_of: dict[Key, Key] = {}

    def put_job(self, seen: JobObject) -> set[Key]:
        return {seen.key} if self.jobs.put(seen) else set()

    def remove_job(self, gone: JobObject) -> set[Key]:
        return {gone.key} if self.jobs.remove(gone) else set()

    def put_attempt(self, seen: AttemptObject) -> set[Key]:
        if not self.attempts.put(seen):
            return set()
        name, owner = (seen.namespace, seen.name), (seen.namespace, seen.owner_name)
        before = self._owner_of.get(name)
        if before is not None and before != owner:  # somebody changed its label
            self._attempts_of[before].discard(seen.name)
        self._owner_of[name] = owner
        self._attempts_of.setdefault(owner, set()).add(seen.name)
        return {owner} if before is None else {owner, before}

    def remove_attempt(self, gone: AttemptObject) -> set[Key]:
        if not self.attempts.remove(gone):
            return set()
        owner = self._owner_of.pop((gone.namespace, gone.name))
        names = self._attempts_of[owner]
        names.discard(gone.name)
        if not names:
            del self._attempts_of[owner]
        return {owner}

    def attempts_of(self, key: Key) -> tuple[AttemptObject, ...]:
        """The attempts of a TrainingJob, ordered by name."""
        found = (self.attempts.get((key[0], name)) for name in sorted(self._attempts_of.get(key, ())))
        return tuple(attempt for attempt in found if attempt is not None)


def canonical(value: object) -> bytes:
    """Canonical JSON: equal values give equal bytes."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=False).encode()


def controller(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """The controlling ownerReference; {} if there is none."""
    return next((owner for owner in metadata.get("ownerReferences") or () if owner.get("controller")), {})


def project_job(found: Mapping[str, Any]) -> JobObject:
    """A TrainingJob as the API server sent it."""
    metadata = found["metadata"]
    return JobObject(
        uid=metadata["uid"],
        name=metadata["name"],
        namespace=sys.intern(metadata["namespace"]),
        generation=metadata.get("generation", 1),
        resource_version=int(metadata["resourceVersion"]),
        creation_time=metadata.get("creationTimestamp") or "",
        spec=canonical(as_today(found.get("spec") or {})),
        status=canonical(found.get("status") or {}),
        deleting="deletionTimestamp" in metadata,
    )


def project_attempt(found: Mapping[str, Any]) -> AttemptObject:
    """A batch/v1 Job as the API server sent it. Anybody may set labels: only the controller's uid makes it ours."""
    metadata, spec, status = found["metadata"], found.get("spec") or {}, found.get("status") or {}
    labels = metadata.get("labels") or {}
    owner = controller(metadata)
    ours = owner.get("kind") == "TrainingJob" and str(owner.get("apiVersion", "")).startswith(f"{GROUP}/")
    ended = [
        condition
        for condition in status.get("conditions") or ()
        if condition.get("type") in ("Complete", "Failed") and condition.get("status") == "True"
    ]
    return AttemptObject(
        uid=metadata["uid"],
        name=metadata["name"],
        namespace=sys.intern(metadata["namespace"]),
        resource_version=int(metadata["resourceVersion"]),
        owner_uid=str(owner["uid"]) if ours else "",
        owner_name=str(owner["name"]) if ours else str(labels.get(JOB_LABEL, "")),
        attempt=attempt_number(labels),
        creation_time=metadata.get("creationTimestamp") or "",
        suspended=bool(spec.get("suspend")),
        ready=status.get("ready") or 0,
        active=status.get("active") or 0,
        succeeded=status.get("succeeded") or 0,
        failed=status.get("failed") or 0,
        outcome=ended[0]["type"] if ended else "",
        reason=sys.intern(str(ended[0].get("reason", ""))) if ended else "",
        outcome_time=str(ended[0].get("lastTransitionTime") or "") if ended else "",
        deleting="deletionTimestamp" in metadata,
        deletion_time=metadata.get("deletionTimestamp") or "",
    )


def attempt_number(labels: Mapping[str, Any]) -> int:
    """The attempt's number; 0 if the label is missing or not a number."""
    written = str(labels.get(ATTEMPT_LABEL, ""))
    return int(written) if written.isascii() and written.isdigit() and len(written) <= len(str(MAX_ATTEMPTS)) else 0


def known_attempts(job: JobObject) -> int:
    """status.attempts.total; 0 if it is missing or invalid."""
    attempts = json.loads(job.status).get("attempts")
    total = attempts.get("total") if isinstance(attempts, dict) else 0
    return total if isinstance(total, int) and 0 <= total <= MAX_ATTEMPTS else 0
