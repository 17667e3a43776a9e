"""Applies what `reconcile` desires. The only writer of child objects and of TrainingJob status.

Children are created, never changed. A child that exists already is ours only if the uid of its controller is the job's;
then it is the result of an earlier try to create it, whose answer was lost. Answers enter the store, so that the next
look sees what was just written.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from spillway.api.limits import GROUP, VERSION

from ..decide.manifests import same_content
from ..decide.observed import Deletion, JobObject, Manifest
from ..log import about
from .api_client import CONFIG_MAPS, JOBS, RESOURCE_OF, TRAINING_JOBS, ApiClient, Conflict, NotFound, RequestRejected
from .store import Key, Store, canonical, controller, project_attempt, project_job

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Applied:
    """What came of creating children; empty strings when all of them exist now."""

    conflict: str = ""
    """a foreign object has the name of a child: "Job demo-1" """
    refusal: str = ""
    """the API server's sentence"""
    superseded: bool = False
    """the ConfigMap of this attempt exists with another decision in it, which must be read first"""


DONE = Applied()


class Applier:
    """Errors that another look can mend (`Unavailable`, and conflicts that vanish) are raised as ApiError."""

    def __init__(self, client: ApiClient, store: Store) -> None:
        self._client = client
        self._store = store
        self._written: dict[Key, tuple[bytes, bytes]] = {}
        """digests of the status that was sent last, and of what the server made of it"""
        self._warned: set[Key] = set()
        """jobs whose status the server does not keep whole"""

    async def create(self, job: JobObject, manifests: tuple[Manifest, ...]) -> Applied:
        """Create the children in this order, up to the first that cannot be had."""
        for manifest in manifests:
            applied = await self._create(job, manifest)
            if applied != DONE:
                return applied
        return DONE

    async def delete(self, job: JobObject, deletions: tuple[Deletion, ...]) -> None:
        for deletion in deletions:
            if deletion.kind == "TrainingJob":
                await self._delete_training_job(job, deletion)
                continue
            resource = RESOURCE_OF[deletion.kind]
            try:
                found = await self._client.delete(resource, job.namespace, deletion.name, deletion.uid)
            except (NotFound, Conflict):  # gone, or another one of that name
                self._gone(deletion)
                continue
            if found.get("kind") == deletion.kind:  # marked; without this the next round would delete it once more
                self._store.put_attempt(project_attempt(found))
            else:
                self._gone(deletion)
            logger.info("deleted %s %s", deletion.kind, deletion.name, extra=about(job.key))

    async def _delete_training_job(self, job: JobObject, deletion: Deletion) -> None:
        """Raises Conflict when it is not what was decided on any more: the next look decides again."""
        try:
            found = await self._client.delete(
                TRAINING_JOBS, job.namespace, deletion.name, deletion.uid, deletion.resource_version
            )
        except NotFound:
            found = {}
        if found.get("kind") == deletion.kind:
            self._store.put_job(project_job(found))
        else:
            self._store.remove_job(job)
        logger.info("deleted TrainingJob %s: lifecycle.ttlSecondsAfterFinished is over", job.name, extra=about(job.key))

    async def write_status(self, job: JobObject, status: Mapping[str, Any]) -> bool:
        """Whether anything was written: a status that says the same is left alone."""
        wanted = canonical(status)
        if wanted == job.status or self._written.get(job.key) == (_digest(wanted), _digest(job.status)):
            return False
        body = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "TrainingJob",
            "metadata": {"name": job.name, "namespace": job.namespace, "uid": job.uid},
            "status": status,
        }
        try:
            found = await self._client.apply_status(TRAINING_JOBS, job.namespace, job.name, body)
        except (NotFound, Conflict):  # deleted meanwhile, or a namesake with another uid: an event will say so
            return False
        answer = project_job(found)
        self._store.put_job(answer)
        self._written[job.key] = (_digest(wanted), _digest(answer.status))
        self._warn_of_lost(job.key, status, found.get("status"))
        return True

    def forget(self, key: Key) -> None:
        self._written.pop(key, None)
        self._warned.discard(key)

    def _gone(self, deletion: Deletion) -> None:
        known = self._store.attempts.by_uid(deletion.uid)
        if known is not None:
            self._store.remove_attempt(known)

    def _warn_of_lost(self, key: Key, sent: Mapping[str, Any], kept: object) -> None:
        """Fields that a CRD of an older version does not know are not kept: decisions that rest on them fail."""
        lost = list(_lost(sent, kept, "status"))
        if lost and key not in self._warned:
            self._warned.add(key)
            logger.error(
                "the CRD of TrainingJob has no %s: install the CRDs of this version", ", ".join(lost), extra=about(key)
            )

    async def _create(self, job: JobObject, manifest: Manifest) -> Applied:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        resource = RESOURCE_OF[kind]
        try:
            found = await self._client.create(resource, job.namespace, manifest)
            logger.info("created %s %s", kind, name, extra=about(job.key))
        except Conflict:
            found = await self._client.get(resource, job.namespace, name)
            if controller(found["metadata"]).get("uid") != job.uid:
                return Applied(conflict=f"{kind} {name}")
            if resource is CONFIG_MAPS and not same_content(found.get("data") or {}, manifest["data"]):
                return Applied(superseded=True)
        except RequestRejected as error:
            return Applied(refusal=f"{kind} {name}: {error.message or error.reason}")
        if resource is JOBS:
            self._store.put_attempt(project_attempt(found))
        return DONE


def _lost(sent: object, kept: object, path: str) -> Iterator[str]:
    """Fields that were sent and not kept."""
    if isinstance(sent, Mapping):
        for name, value in sent.items():
            if not isinstance(kept, Mapping) or name not in kept:
                yield f"{path}.{name}"
            else:
                yield from _lost(value, kept[name], f"{path}.{name}")


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()
