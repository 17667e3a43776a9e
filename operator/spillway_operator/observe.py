"""Observer: gathers the input of `reconcile` for one TrainingJob.

The store has what the watches report. The rest is read when a decision needs it: the ConfigMaps of earlier attempts
before a new one, the pods of an attempt that failed or does not get ready, the claims in the spec.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from .decide import inspection
from .decide.acceptance import given
from .decide.case import whole
from .decide.conditions import SCHEDULED
from .decide.gangs import is_gang
from .decide.manifests import (
    ATTEMPT_LABEL,
    CONTAINER,
    JOB_LABEL,
    JOB_UID_LABEL,
    READ_VOLUMES,
    attempt_name,
)
from .decide.observed import (
    AttemptObject,
    Claim,
    ContainerEnding,
    Contract,
    Inspection,
    JobObject,
    Manifest,
    Observed,
    OperatorFacts,
    PodObject,
    WaitingGang,
)
from .kube.api_client import (
    CLAIMS,
    CONFIG_MAPS,
    EVENTS,
    JOBS,
    PODS,
    TRAINING_JOBS,
    WORKLOADS,
    ApiClient,
    NotFound,
    RequestRejected,
    is_path_segment,
)
from .kube.store import MANAGED_BY, Key, Store, attempt_number, controller, known_attempts, project_attempt, project_job
from .measured.cluster import Cluster
from .measured.held_devices import Holders
from .measured.reservations import Reservations

INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
WORKLOAD_JOB_LABEL = "kueue.x-k8s.io/job-uid"
"""Label of a Workload: the uid of its Job."""
CLAIM_FIELDS = ("checkpoint.claim", *(field.removeprefix("spec.") for field in READ_VOLUMES))
"""Fields of a spec that name claims for its pods."""
LONGEST_TEXT = 4096
"""Characters of a message that are kept; termination messages are not longer."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What was observed, and whether the watches will report changes."""

    observed: Observed
    unwatched: bool = False
    """An attempt of the job lost the labels by which the watch selects."""


class ProgressSource(Protocol):
    """The progress endpoint's record of when it could receive reports."""

    def hearing_seconds(self) -> float | None: ...

    def others_silent_seconds(self, key: Key) -> float: ...


class Observer:
    def __init__(
        self,
        client: ApiClient,
        store: Store,
        cluster: Cluster,
        reservations: Reservations,
        facts: Callable[[], OperatorFacts],
        clock: Callable[[], float] = time.monotonic,
        progress: ProgressSource | None = None,
    ) -> None:
        self._client = client
        self._store = store
        self._cluster = cluster
        self._reservations = reservations
        self._facts = facts
        self._clock = clock
        self._progress = progress
        self._holders = Holders(store)
        self._workloads = WORKLOADS[0]
        """The version that Kueue served last."""

    async def observe(self, key: Key, needs: frozenset[str] = frozenset()) -> Sight | None:
        """The TrainingJob's state, or None if it does not exist. `needs` are the last decision's. Raises ApiError."""
        job = self._store.jobs.get(key)
        if job is None:
            return None
        attempts = self._store.attempts_of(key)
        contracts, unwatched = None, False
        if "contracts" in needs or may_start(job, attempts):
            # The watches may be late; a new attempt must not be created while another one exists.
            if (fresh := await self._read_job(job)) is None:
                return None
            job = fresh
            contracts = await self._contracts(job)
            attempts, unwatched = await self._read_attempts(job, contracts)
            await self._cluster.refresh(job.namespace)
        elif "capacity" in needs:
            await self._cluster.refresh(job.namespace)
        self._reservations.settle(job, attempts, self._clock())
        pods = await self._pods(job, attempts) if "pods" in needs else None
        with_defaults, inherited = self._cluster.config.applied(job)
        return Sight(
            Observed(
                job=with_defaults,
                inherited=inherited,
                attempts=attempts,
                facts=self._facts(),
                cluster=self._cluster.view(job),
                contracts=contracts,
                pods=pods,
                pods_rejection=await self._pods_rejection(job, attempts, pods),
                claims=await self._claims(job) if "claims" in needs else None,
                inspection=await self._inspection(job) if "inspection" in needs else None,
                hearing_seconds=None if self._progress is None else self._progress.hearing_seconds(),
                queue_says=await self._queue_says(job, attempts) if "queue_says" in needs else None,
                capacity_is_fresh="capacity" in needs,
                waiting_gangs=self._waiting_gangs(key) if "waiting_gangs" in needs else None,
                others_silent_seconds=self._others_silent_seconds(key),
            ),
            unwatched,
        )

    def reserve(self, job: JobObject, creates: Iterable[Manifest]) -> None:
        """Reserves what these children of `job` will take, until it is observed."""
        self._reservations.decided(job, creates)

    def as_of_now(self, observed: Observed) -> Observed:
        """`observed` with other jobs' current reservations, and the devices that they hold."""
        view = self._cluster.view(observed.job)
        return replace(observed, cluster=replace(view, held=self._holders.besides(observed.job)))

    def _others_silent_seconds(self, key: Key) -> float | None:
        """Seconds since a trainer of another job reported; None if no other running attempt has ever reported, because
        a script that never reports says nothing about the operator."""
        running = ((one.namespace, one.owner_name) for one in self._store.attempts if one.ready and not one.outcome)
        others = (self._store.jobs.get(other) for other in running if other != key)
        others_report = any(job is not None and b'"lastStepTime"' in job.status for job in others)
        return self._progress.others_silent_seconds(key) if self._progress is not None and others_report else None

    def _waiting_gangs(self, key: Key) -> tuple[WaitingGang, ...]:
        """Other gangs that wait for nodes. Searches the text before parsing: of thousands of jobs only a few wait."""
        found = (waiting_gang(job) for job in self._store.jobs if b'"Unschedulable"' in job.status and job.key != key)
        return tuple(gang for gang in found if gang is not None)

    async def _read_job(self, job: JobObject) -> JobObject | None:
        try:
            found = project_job(await self._client.get(TRAINING_JOBS, job.namespace, job.name))
        except NotFound:
            self._store.remove_job(job)
            return None
        self._store.put_job(found)
        return found

    async def _contracts(self, job: JobObject) -> tuple[Contract, ...]:
        selector = f"{JOB_LABEL}={job.name},{MANAGED_BY}"
        found = await self._client.list(CONFIG_MAPS, job.namespace, project_contract, selector)
        return tuple(sorted(found.items, key=lambda contract: contract.attempt))

    async def _read_attempts(
        self, job: JobObject, contracts: tuple[Contract, ...]
    ) -> tuple[tuple[AttemptObject, ...], bool]:
        """The attempts' Jobs, and whether the newest has lost the labels by which the watch selects."""
        selector = f"{JOB_LABEL}={job.name},{MANAGED_BY}"
        listed = (await self._client.list(JOBS, job.namespace, project_attempt, selector)).items
        for attempt in listed:
            self._store.put_attempt(attempt)
        ours = [contract for contract in contracts if contract.owner_uid == job.uid]
        if not ours or ours[-1].name in {attempt.name for attempt in listed}:
            return listed, False
        try:
            unlisted = project_attempt(await self._client.get(JOBS, job.namespace, ours[-1].name))
        except NotFound:
            return listed, False
        return (*listed, replace(unlisted, attempt=ours[-1].attempt)), unlisted.owner_uid == job.uid

    async def _pods(self, job: JobObject, attempts: tuple[AttemptObject, ...]) -> tuple[PodObject, ...]:
        """Pods of the newest attempt, by our labels: pods may outlive their Job, without an owner if it was deleted
        with --cascade=orphan."""
        ours = [attempt.attempt for attempt in attempts if attempt.owner_uid == job.uid]
        newest = max([*ours, known_attempts(job)])
        name = attempt_name(job.name, newest)
        selector = f"{JOB_UID_LABEL}={job.uid},{ATTEMPT_LABEL}={newest}"
        found = await self._client.list(PODS, job.namespace, lambda pod: _pod_of(name, pod), selector)
        pods = sorted((pod for pod in found.items if pod is not None), key=lambda pod: (pod.index, pod.name))
        for number, pod in enumerate(pods):
            if pod.phase == "Pending" and pod.node and not (pod.waiting or pod.deleting):
                pods[number] = replace(pod, waiting=await self._obstacle(job, pod))
                break  # the others wait for the same
        return tuple(pods)

    async def _obstacle(self, job: JobObject, pod: PodObject) -> str:
        """Why the kubelet cannot start the containers of a pod: its newest warning, such as a ConfigMap to mount that
        does not exist; "" if there is none, or events may not be listed."""
        selector = f"regarding.kind=Pod,regarding.uid={pod.uid},type=Warning"
        try:
            found = await self._client.list(EVENTS, job.namespace, _warning, field_selector=selector)
        except RequestRejected:
            return ""
        return max(found.items, default=("", ""))[1]

    async def _pods_rejection(
        self, job: JobObject, attempts: tuple[AttemptObject, ...], pods: tuple[PodObject, ...] | None
    ) -> str:
        """Why the API server rejected missing pods, from the Job controller's events; "" if no pod is missing, there is
        no such event, or events may not be listed. Anybody who may write events can write this text."""
        living = [found for found in attempts if found.owner_uid == job.uid and not (found.outcome or found.suspended)]
        if pods is None or not living or len(pods) >= whole(given(json.loads(job.spec), "parallelism.nodes"), 1):
            return ""
        newest = max(living, key=lambda attempt: attempt.attempt)
        selector = f"regarding.kind=Job,regarding.uid={newest.uid},reason=FailedCreate"
        try:
            found = await self._client.list(EVENTS, job.namespace, _event_time, field_selector=selector)
        except RequestRejected:
            return ""
        return max(found.items, default=("", ""))[1]

    async def _queue_says(self, job: JobObject, attempts: tuple[AttemptObject, ...]) -> str:
        """Kueue's message about the newest attempt; empty if there is none, or Workloads do not exist or may not be
        listed. Asks for the version served last, and for the others if that one is not served any more."""
        newest = max(
            (each for each in attempts if each.owner_uid == job.uid), key=lambda each: each.attempt, default=None
        )
        if newest is None:
            return ""
        selector = f"{WORKLOAD_JOB_LABEL}={newest.uid}"
        for resource in (self._workloads, *(one for one in WORKLOADS if one != self._workloads)):
            try:
                found = await self._client.list(resource, job.namespace, project_workload, selector)
            except NotFound:  # this version is not served
                continue
            except RequestRejected:
                break
            self._workloads = resource
            return next(filter(None, found.items), "")
        return ""

    async def _inspection(self, job: JobObject) -> Inspection:
        """The ConfigMap with the model's shape; without one, the Job that finds it and the state of its pod."""
        for resource, kind, name in (
            (CONFIG_MAPS, "ConfigMap", inspection.shape_name(job.name)),
            (JOBS, "Job", inspection.job_name(job.name)),
        ):
            try:
                found = await self._client.get(resource, job.namespace, name)
            except NotFound:
                continue
            if controller(found["metadata"]).get("uid") != job.uid:
                return Inspection(foreign=f"{kind} {name}")
            if resource is CONFIG_MAPS:
                return Inspection(shape=str((found.get("data") or {}).get(inspection.SHAPE_KEY) or " "))
            conditions = (found.get("status") or {}).get("conditions") or ()
            ended = [one for one in conditions if one.get("type") in ("Complete", "Failed") and one["status"] == "True"]
            uid = str(found["metadata"]["uid"])
            listed = await self._client.list(
                PODS, job.namespace, project_pod, f"batch.kubernetes.io/controller-uid={uid}"
            )
            pod = max(listed.items, key=lambda one: one.name, default=None)
            return Inspection(
                job_uid=uid,
                outcome=ended[0]["type"] if ended else "",
                reason=_text(ended[0].get("reason")) if ended else "",
                ending=pod.ending if pod is not None else None,
                obstacle=(pod.waiting or pod.unschedulable) if pod is not None else "",
            )
        return Inspection()

    async def _claims(self, job: JobObject) -> tuple[Claim, ...]:
        return tuple([await self._claim(job, name) for name in _claim_names(json.loads(job.spec))])

    async def _claim(self, job: JobObject, name: str) -> Claim:
        if not is_path_segment(name):
            return Claim(name, exists=False)
        try:
            found = await self._client.get(CLAIMS, job.namespace, name)
        except NotFound:
            return Claim(name, exists=False)
        except RequestRejected:  # not permitted to read claims
            return Claim(name, exists=True)
        return Claim(
            name, exists=True, access_modes=tuple(map(str, (found.get("spec") or {}).get("accessModes") or ()))
        )


def may_start(job: JobObject, attempts: tuple[AttemptObject, ...]) -> bool:
    """Whether the next decision may create an attempt: none exists and the job has not ended."""
    if job.deleting or any(found.owner_uid == job.uid and not found.outcome for found in attempts):
        return False
    conditions = json.loads(job.status).get("conditions") or ()
    return not any(
        condition.get("type") in ("Complete", "Failed") and condition.get("status") == "True"
        for condition in conditions
    )


def waiting_gang(job: JobObject) -> WaitingGang | None:
    """The job, if it has several pods and the scheduler finds no nodes for its current attempt; else None."""
    spec, status = json.loads(job.spec), json.loads(job.status)
    if job.deleting or not isinstance(status, dict) or not is_gang(spec):
        return None
    for condition in status.get("conditions") or ():
        if condition.get("type") == SCHEDULED and condition.get("reason") == "Unschedulable":
            since = str(condition.get("lastTransitionTime") or "")
            return WaitingGang(job.namespace, job.name, job.uid, job.creation_time, since)
    return None


def project_contract(found: Mapping[str, Any]) -> Contract:
    """An attempt's ConfigMap as the API server sent it."""
    metadata, data = found["metadata"], found.get("data") or {}
    return Contract(
        attempt=attempt_number(metadata.get("labels") or {}),
        name=metadata["name"],
        owner_uid=str(controller(metadata).get("uid", "")),
        uid=str(metadata.get("uid") or ""),
        job_json=str(data.get("job.json", "")),
        plan_json=str(data.get("plan.json", "")),
        decision_json=str(data.get("decision.json", "")),
        attempt_json=str(data.get("attempt.json", "")),
    )


def project_workload(found: Mapping[str, Any]) -> str:
    """Why Kueue has not admitted the Workload; empty if it has, or gives no message."""
    if (found.get("spec") or {}).get("active") is False:
        return f"Workload {found['metadata']['name']} is deactivated: spec.active is false"
    conditions = (found.get("status") or {}).get("conditions") or ()
    waits = (each for each in conditions if each.get("type") == "QuotaReserved" and each.get("status") == "False")
    return next((_text(condition.get("message")) for condition in waits), "")


def project_pod(found: Mapping[str, Any]) -> PodObject:
    """A pod of an attempt. Its content is untrusted: texts are cut, and invalid values do not raise."""
    metadata, spec, status = found["metadata"], found.get("spec") or {}, found.get("status") or {}
    annotations, labels = metadata.get("annotations") or {}, metadata.get("labels") or {}
    written = str(annotations.get(INDEX_LABEL) or labels.get(INDEX_LABEL) or "")
    conditions = {str(condition.get("type")): condition for condition in status.get("conditions") or ()}
    grace = metadata.get("deletionGracePeriodSeconds")
    scheduled, disrupted = conditions.get("PodScheduled", {}), conditions.get("DisruptionTarget", {})
    return PodObject(
        name=metadata["name"],
        uid=metadata["uid"],
        index=int(written) if written.isascii() and written.isdigit() and len(written) < 10 else 0,
        node=str(spec.get("nodeName") or ""),
        phase=sys.intern(str(status.get("phase") or "")),
        scheduled_at=str(scheduled.get("lastTransitionTime") or "") if scheduled.get("status") == "True" else "",
        ready=conditions.get("Ready", {}).get("status") == "True",
        deleting="deletionTimestamp" in metadata,
        deletion_time=str(metadata.get("deletionTimestamp") or ""),
        grace_seconds=grace if isinstance(grace, int) else 0,
        orphaned=not controller(metadata),
        status_reason=_text(status.get("reason")),
        status_message=_text(status.get("message")),
        disruption=_text(disrupted.get("reason")) if disrupted.get("status") == "True" else "",
        unschedulable=_text(scheduled.get("message")) if scheduled.get("reason") == "Unschedulable" else "",
        waiting=_waiting(status),
        ending=_ending(status),
    )


def _pod_of(job_name: str, found: Mapping[str, Any]) -> PodObject | None:
    """The pod if its controller is the attempt's Job; labels can be copied to any pod.

    A running pod without a controller also counts, because its Job may have been deleted; its ending is not used.
    """
    owner, pod = controller(found["metadata"]), project_pod(found)
    if not owner:
        return replace(pod, ending=None) if pod.phase not in ("Failed", "Succeeded") else None
    return pod if owner.get("kind") == "Job" and owner.get("name") == job_name else None


def _waiting(status: Mapping[str, Any]) -> str:
    """Why a container cannot start, init containers first; "" during a normal start."""
    for container in _containers(status):
        state = (container.get("state") or {}).get("waiting") or {}
        reason = str(state.get("reason") or "")
        if reason and reason not in ("PodInitializing", "ContainerCreating"):
            return _text(f"{reason}: {state['message']}" if state.get("message") else reason)
    return ""


def _ending(status: Mapping[str, Any]) -> ContainerEnding | None:
    """How the trainer's container ended; None if it runs or has not started."""
    for container in _containers(status):
        ended = (container.get("state") or {}).get("terminated")
        if container.get("name") == CONTAINER and ended:
            code = ended.get("exitCode")
            return ContainerEnding(
                exit_code=code if isinstance(code, int) else -1,
                reason=_text(ended.get("reason")),
                message=_text(ended.get("message")),
                finished_at=str(ended.get("finishedAt") or ""),
                started_at=str(ended.get("startedAt") or ""),
            )
    return None


def _containers(status: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from status.get("initContainerStatuses") or ()
    yield from status.get("containerStatuses") or ()


_NEW_POD = re.compile(
    r'^(\(combined from similar events\): )?(Error creating: )?(pods? "[^"]*" is (forbidden|invalid): )?', re.IGNORECASE
)
"""Beginning of a FailedCreate message, removed because the pod's name changes with every try, and so would the
status."""


def _event_time(event: Mapping[str, Any]) -> tuple[str, str]:
    """When the event last happened (RFC 3339), and its message."""
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("deprecatedLastTimestamp"), event.get("eventTime"))
    return max(str(time or "") for time in times), _text(_NEW_POD.sub("", str(event.get("note") or "")))


def _warning(event: Mapping[str, Any]) -> tuple[str, str]:
    """When it last happened (RFC 3339); its reason and message."""
    time, message = _event_time(event)
    return time, _text(f"{event.get('reason')}: {message}")


def _text(found: object) -> str:
    return str(found or "")[:LONGEST_TEXT]


def _claim_names(spec: object) -> tuple[str, ...]:
    """The claims in an unvalidated spec, once each."""
    if not isinstance(spec, dict):
        return ()
    mounts = given(spec, "pod.mounts")
    mounted = [mount.get("claim") for mount in mounts if isinstance(mount, dict)] if isinstance(mounts, list) else []
    named = (*(given(spec, field) for field in CLAIM_FIELDS), *mounted)
    return tuple(sorted({name for name in named if isinstance(name, str) and name}))
