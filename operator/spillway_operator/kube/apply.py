"""Applier: turns Desired into requests. The only writer of children and of TrainingJob status.

Children are created, never changed. An existing child is ours only if its controller's uid is the job's; then an
earlier request created it and its answer was lost. Answers enter the store, so that the next look sees what was
written."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from spillway.api.limits import GROUP, VERSION

from ..decide.manifests import ATTEMPT_LABEL, same_content
from ..decide.observed import Deletion, JobObject, Manifest
from ..log import about
from .api_client import CONFIG_MAPS, JOBS, RESOURCE_OF, TRAINING_JOBS, ApiClient, Conflict, NotFound, RequestRejected
from .store import Key, Store, canonical, controller, project_attempt, project_job

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Applied:
    """Result of creating children; equals DONE if all exist now."""

    conflict: str = ""
    """The child, such as "Job demo-1", whose name a foreign object has."""
    rejection: str = ""
    """The API server's message if it rejected a child."""
    superseded: bool = False
    """The attempt's ConfigMap exists with another decision, which must be read first."""


DONE = Applied()


class Applier:
    """Makes the requests. Errors that may be temporary (`Unavailable`, conflicts) are raised as ApiError."""

    def __init__(self, client: ApiClient, store: Store) -> None:
        self._client = client
        self._store = store
        self._written: dict[Key, tuple[bytes, bytes]] = {}
        """Digests of the status that was last sent, and of the server's version of it."""
        self._warned: set[Key] = set()
        """Jobs about which `_warn_of_lost` has warned."""

    async def create(self, job: JobObject, manifests: tuple[Manifest, ...]) -> Applied:
        """Creates the children in this order, until one fails."""
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
            resource, uid = RESOURCE_OF[deletion.kind], deletion.uid
            try:
                if not uid:
                    known = (await self._client.get(resource, job.namespace, deletion.name))["metadata"]
                    if controller(known).get("uid") != job.uid:
                        continue
                    uid = known["uid"]
                found = await self._client.delete(resource, job.namespace, deletion.name, uid)
            except (NotFound, Conflict):  # deleted, or replaced by another one
                self._gone(deletion)
                continue
            if found.get("kind") == "Job":  # only marked: remember it, or the next round deletes it again
                self._store.put_attempt(project_attempt(found))
            else:
                self._gone(deletion)
            logger.info("deleted %s %s", deletion.kind, deletion.name, extra=about(job.key))

    async def _delete_training_job(self, job: JobObject, deletion: Deletion) -> None:
        """Deletes the TrainingJob. Raises Conflict if it changed since the decision: the next look decides again."""
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
        logger.info("deleted TrainingJob %s: lifecycle.ttlSecondsAfterFinished passed", job.name, extra=about(job.key))

    async def write_status(self, job: JobObject, status: Mapping[str, Any]) -> bool:
        """Writes the status unless it is the same; returns whether it was written."""
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
        except (NotFound, Conflict):  # deleted or replaced meanwhile: a watch event will follow
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
        """Logs fields that the server dropped because its CRD is older: decisions that rely on them fail."""
        lost = list(_lost(sent, kept, "status"))
        if lost and key not in self._warned:
            self._warned.add(key)
            logger.error(
                "the CRD of TrainingJob has no field %s; install the CRDs of the operator's version",
                ", ".join(lost),
                extra=about(key),
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
            return Applied(rejection=f"{kind} {name}: {error.message or error.reason}")
        if resource is JOBS and ATTEMPT_LABEL in manifest["metadata"]["labels"]:
            self._store.put_attempt(project_attempt(found))
        return DONE


def _lost(sent: object, kept: object, path: str) -> Iterator[str]:
    """Yields the fields that were sent but not kept."""
    if isinstance(sent, Mapping):
        for name, value in sent.items():
            if not isinstance(kept, Mapping) or name not in kept:
                yield f"{path}.{name}"
            else:
                yield from _lost(value, kept[name], f"{path}.{name}")


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()
