"""A cluster as dicts: API server, watches that lag, Job controller, kubelets, Kueue, and the operator's real shell.

    Server      objects, resourceVersions, 409, uid preconditions, server-side apply of status, foreground deletion
    Controllers Job controller (backoffLimit 0, podReplacementPolicy Failed), garbage collector, node controller, queue
    Operator    the real Worker, Observer, Applier and Store over `Client`, which can die or lose an answer at any write

Nothing here waits: coroutines run to their end at once, and time is a number that the test advances.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from types import SimpleNamespace
from typing import Any

from cases.job_documents import TINY
from spillway.api.progress import ProgressReport
from spillway.api.status import Escalation
from spillway.api.training_job import TrainingJob
from spillway.metrics import Metric
from spillway.placement.cluster_view import ClusterView
from spillway.placement.place import Placement
from spillway.plan import MemoryPlan, Tier
from spillway.planning.hardware import local_node
from spillway.planning.planner import Overrides, make_plan
from spillway.planning.pod_resources import pod_resources
from spillway_operator import worker
from spillway_operator.decide.observed import Desired, Observed, OperatorFacts
from spillway_operator.decide.reconcile import reconcile
from spillway_operator.kube.api_client import (
    ApiError,
    ApiResource,
    Conflict,
    Listing,
    NotFound,
    RequestRejected,
    Unavailable,
)
from spillway_operator.kube.apply import Applier
from spillway_operator.kube.key_queue import KeyQueue
from spillway_operator.kube.store import Store, project_attempt, project_job
from spillway_operator.measured.reservations import Reservations
from spillway_operator.observe import Observer
from spillway_operator.progress.outbox import ProgressOutbox, Received

NAMESPACE, NAME, UID = "team", "demo", "11111111-2222-3333-4444-555555555555"
KEY = (NAMESPACE, NAME)
GRACE = 40
GIB = 1 << 30
EPOCH_START = 1_780_000_000.0
Object = dict[str, Any]


def timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(EPOCH_START + seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_of(time: str) -> float:
    return datetime.fromisoformat(time).timestamp() - EPOCH_START


# --- API server -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Write:
    """A mutating request that changed something."""

    verb: str
    kind: str
    name: str


@dataclass
class Server:
    objects: dict[tuple[str, str], Object] = field(default_factory=dict)
    """(plural, name) -> object"""
    now: float = 0.0
    version: int = 100
    writes: list[Write] = field(default_factory=list)
    """by the operator, in order"""
    subscribers: list[Callable[[str, str, Object], None]] = field(default_factory=list)
    rejects: set[str] = field(default_factory=set)
    """plurals of the resources whose creation admission rejects"""
    pruned: set[str] = field(default_factory=set)
    """fields of status.attempts and status.progress that an older CRD drops"""
    uids: int = 0
    late: list[Callable[[], Object]] = field(default_factory=list)
    """creations that the server has not carried out yet"""
    landed_late: bool = False

    def new_uid(self) -> str:
        self.uids += 1
        return f"uid-{self.uids}"

    def put(self, plural: str, found: Object) -> Object:
        """Stores an object with the next resourceVersion, and tells the watches; returns a copy."""
        self.version += 1
        found["metadata"]["resourceVersion"] = str(self.version)
        self.objects[plural, found["metadata"]["name"]] = found
        self._tell(plural, "MODIFIED", found)
        return copy.deepcopy(found)

    def take(self, plural: str, name: str) -> None:
        found = self.objects.pop((plural, name))
        self.version += 1
        found["metadata"]["resourceVersion"] = str(self.version)
        self._tell(plural, "DELETED", found)

    def _tell(self, plural: str, kind: str, found: Object) -> None:
        for subscriber in self.subscribers:
            subscriber(plural, kind, copy.deepcopy(found))

    def all(self, plural: str) -> list[Object]:
        return [found for (kind, _), found in self.objects.items() if kind == plural]

    def get(self, plural: str, name: str) -> Object | None:
        return self.objects.get((plural, name))

    def create(self, plural: str, body: Mapping[str, Any]) -> Object:
        made: Object = copy.deepcopy(dict(body))
        made["metadata"] |= {"uid": self.new_uid(), "creationTimestamp": timestamp(self.now), "generation": 1}
        return self.put(plural, made)

    def mark_deleted(self, plural: str, found: Object, grace: float = 0.0) -> None:
        if "deletionTimestamp" not in found["metadata"]:
            found["metadata"]["deletionTimestamp"] = timestamp(self.now + grace)
            self.put(plural, found)


# --- what the operator's client sees ----------------------------------------------------------------------------------


class Died(BaseException):
    """The operator's process ended in the middle of a write. A BaseException, so that no `except Exception` catches
    it."""


@dataclass
class Fault:
    """A fault at the write after `writes_before` others: the server carries it out (`landed`) or not, and the process
    dies (`dies`) or only the answer is lost. A `late` creation is carried out just before the operator's next write.
    """

    writes_before: int
    landed: bool
    dies: bool
    late: bool = False


class Client:
    """A client with those methods of ApiClient that the operator's shell calls."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.fault: Fault | None = None

    async def get(self, resource: ApiResource, namespace: str, name: str) -> Object:
        found = self.server.get(resource.plural, name)
        if found is None:
            raise NotFound("get", 404, "NotFound", f"{resource.plural} {name} not found")
        return copy.deepcopy(found)

    async def list(
        self,
        resource: ApiResource,
        namespace: str,
        project: Callable[[Object], Any],
        label_selector: str = "",
        field_selector: str = "",
    ) -> Listing[Any]:
        wanted = [term.split("=", 1) for term in label_selector.split(",") if term]
        found = [
            project(copy.deepcopy(item))
            for item in self.server.all(resource.plural)
            if all(item["metadata"].get("labels", {}).get(key) == value for key, value in wanted)
        ]
        return Listing(self.server.version, tuple(found))

    async def create(self, resource: ApiResource, namespace: str, body: Mapping[str, Any]) -> Object:
        return self._write("create", resource, body["metadata"]["name"], lambda: self._create(resource, body))

    async def delete(
        self, resource: ApiResource, namespace: str, name: str, uid: str, resource_version: int = 0
    ) -> Object:
        return self._write("delete", resource, name, lambda: self._delete(resource, name, uid, resource_version))

    async def apply_status(self, resource: ApiResource, namespace: str, name: str, body: Mapping[str, Any]) -> Object:
        return self._write("patch", resource, name, lambda: self._apply_status(name, body))

    def _create(self, resource: ApiResource, body: Mapping[str, Any]) -> Object:
        name = body["metadata"]["name"]
        if self.server.get(resource.plural, name) is not None:
            raise Conflict("create", 409, "AlreadyExists", f"{resource.plural} {name} already exists")
        if resource.plural in self.server.rejects:
            raise RequestRejected("create", 403, "Forbidden", f"{resource.plural} are forbidden: exceeded quota")
        return self.server.create(resource.plural, body)

    def _delete(self, resource: ApiResource, name: str, uid: str, resource_version: int) -> Object:
        found = self.server.get(resource.plural, name)
        if found is None:
            raise NotFound("delete", 404, "NotFound", name)
        if found["metadata"]["uid"] != uid:
            raise Conflict("delete", 409, "Conflict", "the UID in the precondition does not match")
        if resource_version and found["metadata"]["resourceVersion"] != str(resource_version):
            raise Conflict("delete", 409, "Conflict", "the ResourceVersion in the precondition does not match")
        self.server.mark_deleted(resource.plural, found)
        return copy.deepcopy(found)

    def _apply_status(self, name: str, body: Mapping[str, Any]) -> Object:
        found = self.server.get("trainingjobs", name)
        if found is None:
            raise NotFound("patch", 404, "NotFound", name)
        if found["metadata"]["uid"] != body["metadata"]["uid"]:
            raise Conflict("patch", 409, "Conflict", "uid mismatch")
        kept = copy.deepcopy(dict(body["status"]))
        for part in ("attempts", "progress"):
            for dropped in self.server.pruned.intersection(kept.get(part, ())):
                del kept[part][dropped]
        if found.get("status") == kept:
            return copy.deepcopy(found)
        found["status"] = kept
        return self.server.put("trainingjobs", found)

    def _write(self, verb: str, resource: ApiResource, name: str, do: Callable[[], Object]) -> Object:
        self._land()
        fault = self.fault
        if fault is not None and fault.writes_before == 0:
            self.fault = None
            if fault.late and verb == "create":
                self.server.late.append(do)
            elif fault.landed:
                self._record(verb, resource, name, do)
            if fault.dies:
                raise Died
            raise Unavailable(verb, 504, "Timeout", "the answer was lost")
        if fault is not None:
            fault.writes_before -= 1
        return self._record(verb, resource, name, do)

    def _land(self) -> None:
        while self.server.late:
            self.server.landed_late = True
            with suppress(ApiError):
                self.server.late.pop(0)()

    def _record(self, verb: str, resource: ApiResource, name: str, do: Callable[[], Object]) -> Object:
        answer = do()
        self.server.writes.append(Write(verb, resource.plural, name))
        return answer


# --- the operator -----------------------------------------------------------------------------------------------------


class Operator:
    """One process of the operator with the real Worker, Observer, Applier and Store. Events of watches wait in `inbox`
    until the test delivers them."""

    def __init__(self, server: Server) -> None:
        self.server, self.client, self.store = server, Client(server), Store()
        self.inbox: dict[str, list[tuple[str, Object]]] = {"trainingjobs": [], "jobs": []}
        server.subscribers[:] = [self._event]
        for found in server.all("trainingjobs"):
            self.store.put_job(project_job(copy.deepcopy(found)))
        for found in server.all("jobs"):
            if _is_watched(found):
                self.store.put_attempt(project_attempt(copy.deepcopy(found)))
        self.notes: list[Any] = []
        self.counted: dict[tuple[str, str], list[float]] = {}
        """metric and label -> the values that were added, for service levels"""
        reservations = Reservations(15.0)
        as_it_is: Any = SimpleNamespace(applied=lambda job: (job, ()))
        cluster: Any = SimpleNamespace(refresh=_nothing, view=lambda job: ClusterView(), config=as_it_is)
        events: Any = SimpleNamespace(note=lambda job, event: self.notes.append(event))
        exporter: Any = SimpleNamespace(reconcile=_must_not_fail, decision=lambda *_: None, count=self._count)
        client: Any = self.client
        clock: Any = SimpleNamespace(time=lambda: server.now, call_at=self._timer)
        self.due: float | None = None
        """time at which the operator itself wants to look again"""
        self.outbox = ProgressOutbox()
        applier = Applier(client, self.store)
        began = server.now
        progress: Any = SimpleNamespace(hearing_seconds=lambda: server.now - began)
        observer = Observer(client, self.store, cluster, reservations, lambda: FACTS, lambda: server.now, progress)
        self.queue: KeyQueue[Any] = KeyQueue(clock)
        self.ran_out: list[Escalation] = []
        """escalations that are reported to MemoryProfiles"""
        self.worker = _Worker(
            self, self.queue, observer, applier, self.outbox, events, exporter, None,
            worker.JobCallbacks(_forget, lambda _, ended: self.ran_out.extend(ended)),
        )  # fmt: skip

    def _count(self, metric: Metric, value: float, namespace: str, label: str) -> None:
        assert namespace == NAMESPACE
        self.counted.setdefault((metric.name.removeprefix("spillway_operator_"), label), []).append(value)

    def look(self, fault: Fault | None = None) -> bool:
        """Looks at the job once; returns False if the process died meanwhile."""
        self.client.fault, self.due = fault, None
        self.queue.forget(KEY)
        try:
            _run(self.worker.look(KEY))
        except Died:
            return False
        finally:
            self.client.fault = None
        return True

    def deliver(self, plural: str, count: int | None = None) -> None:
        """Passes the oldest `count` events of a watch (None: all) to the store."""
        inbox = self.inbox[plural]
        given, inbox[:] = inbox[:count], inbox[len(inbox[:count]) :]
        for kind, found in given:
            if plural == "trainingjobs":
                job = project_job(found)
                self.store.remove_job(job) if kind == "DELETED" else self.store.put_job(job)
            else:
                attempt = project_attempt(found)
                self.store.remove_attempt(attempt) if kind == "DELETED" else self.store.put_attempt(attempt)

    def deliver_all(self) -> None:
        for plural in self.inbox:
            self.deliver(plural)

    def _event(self, plural: str, kind: str, found: Object) -> None:
        """Puts an event into the inbox. As a watch with a selector does, it reports an object without the labels as
        deleted."""
        if plural in self.inbox:
            seen = plural == "trainingjobs" or _is_watched(found)
            self.inbox[plural].append((kind if seen else "DELETED", found))

    def _timer(self, when: float, callback: Callable[..., Any], *arguments: Any) -> Any:
        self.due = when if self.due is None else min(self.due, when)
        return SimpleNamespace(when=lambda: when, cancel=lambda: None)


class _Worker(worker.Worker):
    def __init__(self, operator: Operator, *parts: Any) -> None:
        super().__init__(*parts)
        self._operator = operator

    async def _decide(self, observed: Observed) -> Desired:
        return reconcile(observed, timestamp(self._operator.server.now), place)


def _is_watched(found: Object) -> bool:
    return found["metadata"].get("labels", {}).get("app.kubernetes.io/managed-by") == "spillway"


def _must_not_fail(result: str, seconds: float) -> None:
    """Fails the test if a look raised; the worker itself would survive that."""
    assert result != "failed", "a look raised: see the log"


async def _nothing(*_: object) -> None:
    return None


def _forget(key: object) -> None:
    return None


def _run(coroutine: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine to its end at once, because nothing in this model waits."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("a coroutine waited")


FACTS = OperatorFacts(
    trainer_image="spillway/trainer:test", progress_url="https://spillway.spillway.svc:8443/progress", progress_ca="PEM"
)
_PLACEMENTS: Iterator[int] = iter(range(10**9))


def place(job: TrainingJob, cluster: ClusterView) -> Placement:
    """A placement whose reason is different every time, so that an attempt that is planned again has another
    contract."""
    text = json.dumps(job.spec.model_dump(mode="json"), sort_keys=True)
    placed = _placement(f"{text} {cluster.corrections}", job, cluster)
    return replace(placed, reason=f"placement {next(_PLACEMENTS)}")


_PLACED: dict[str, Placement] = {}


def _placement(text: str, job: TrainingJob, cluster: ClusterView) -> Placement:
    """A placement on one large node. As placement.place does, it lowers the device's budget to the planned bytes and
    their margin, which the pod's limit covers."""
    if text not in _PLACED:
        node, ranks = local_node(2, 4 * GIB, 4 * GIB, 64 * GIB), job.spec.parallelism.devices_per_node
        world_size, corrections = job.spec.parallelism.world_size, cluster.corrections
        overrides = Overrides(world_size=world_size, corrections=corrections, shape=cluster.shape)
        plan = make_plan(job, node, overrides)
        assert isinstance(plan, MemoryPlan)
        held = plan.bytes[Tier.DEVICE].total
        plan = plan.model_copy(update={"budget": {**plan.budget, Tier.DEVICE: held + held // 20}})
        more = corrections.unplanned_bytes(pod_resources(job.spec, plan, ranks).memory_bytes)
        plan = plan.model_copy(update={"unplanned_bytes": more})
        pod = pod_resources(job.spec, plan, ranks)
        _PLACED[text] = Placement(plan=plan, node=node, preferences=(), reason="", headroom={}, pod=pod)
    return _PLACED[text]


# --- controllers, kubelets, queue, users ------------------------------------------------------------------------------


@cache
def tiny_spec() -> str:
    return json.dumps(TINY["spec"])


@dataclass
class World:
    """The cluster with one TrainingJob in it."""

    num_nodes: int = 1
    queue: str = ""
    max_restarts: int = 2
    lifecycle: Mapping[str, int] = field(default_factory=dict)
    """other fields of spec.lifecycle"""
    memory: Mapping[str, Any] = field(default_factory=dict)
    """spec.memory"""
    server: Server = field(default_factory=Server)
    uid: str = UID
    """of the TrainingJob that currently has the name"""

    def __post_init__(self) -> None:
        spec = json.loads(tiny_spec())
        spec["parallelism"] = {"nodes": self.num_nodes, "device": "Cpu"}
        spec["lifecycle"] = {"maxRestarts": self.max_restarts, **self.lifecycle}
        if self.memory:
            spec["memory"] = dict(self.memory)
        if self.queue:
            spec["scheduling"] = {"queueName": self.queue}
        self._create(spec)
        self.operator = Operator(self.server)

    def _create(self, spec: Object) -> None:
        metadata = {
            "name": NAME, "namespace": NAMESPACE, "uid": self.uid, "generation": 1,
            "creationTimestamp": timestamp(self.server.now),
        }  # fmt: skip
        self.server.put("trainingjobs", {"kind": "TrainingJob", "metadata": metadata, "spec": spec})

    # objects

    @property
    def job(self) -> Object:
        found = self.server.get("trainingjobs", NAME)
        assert found is not None
        return found

    @property
    def status(self) -> Object:
        return dict(self.job.get("status") or {})

    def attempts(self) -> list[Object]:
        """Jobs of the TrainingJob, oldest first."""
        own = [found for found in self.server.all("jobs") if _owner(found) == self.uid]
        return sorted(own, key=_attempt)

    def pods(self, attempt: Object | None = None) -> list[Object]:
        found = self.server.all("pods")
        if attempt is not None:
            found = [pod for pod in found if _owner(pod) == attempt["metadata"]["uid"]]
        return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))

    def condition(self, type_: str) -> Object:
        return next((found for found in self.status.get("conditions", ()) if found["type"] == type_), {})

    def is_over(self) -> bool:
        return any(self.condition(type_).get("status") == "True" for type_ in ("Complete", "Failed"))

    # the user

    def suspend(self, wanted: bool) -> None:
        if self.job["spec"].get("suspend", False) != wanted:
            self.edit(suspend=wanted)

    def edit(self, **fields: object) -> None:
        """Changes fields of the spec; a map is merged with the one that is there."""
        job = self.job
        for name, value in fields.items():
            known = job["spec"].get(name)
            job["spec"][name] = {**known, **value} if isinstance(known, dict) and isinstance(value, dict) else value
        job["metadata"]["generation"] += 1
        self.server.put("trainingjobs", job)

    @property
    def is_gone(self) -> bool:
        return self.server.get("trainingjobs", NAME) is None

    def delete_job(self) -> None:
        """As kubectl delete in the background: the TrainingJob is gone, and the garbage collector deletes its children
        later."""
        self.server.take("trainingjobs", NAME)

    def create_namesake(self, uid: str) -> None:
        """Creates another TrainingJob of the same name, while children of the earlier one may be left."""
        spec = json.loads(tiny_spec())
        spec["parallelism"] = {"nodes": self.num_nodes, "device": "Cpu"}
        self.uid = uid
        self._create(spec)

    def report(self, step: int, attempt: int = 1, release: bool = True, behind: float = 0.0) -> None:
        """Puts a progress report of the trainer into the outbox. The trainer's clock is `behind` seconds behind.
        Without `release`, the report may not be written yet."""
        own = {"epoch": attempt, "step": step, "steps": 100, "stepSeconds": 1.0,
               "lastStepTime": EPOCH_START + self.server.now - behind, "peak": {"device": 1}}  # fmt: skip
        said = ProgressReport.model_validate({"spillway": own})
        received = Received(said, self.uid, attempt, timestamp(self.server.now))
        now = time.monotonic() + self.server.now  # the clock that the worker uses for written reports
        self.operator.outbox.put(KEY, received, now)
        if release:
            self.operator.outbox.release(now)

    def delete_attempt(self, attempt: Object, foreground: bool) -> None:
        if foreground:
            self.server.mark_deleted("jobs", attempt)
        else:
            self.server.take("jobs", attempt["metadata"]["name"])

    def delete_pod(self, pod: Object) -> None:
        self.server.mark_deleted("pods", pod, GRACE)

    def plant_foreign(self, plural: str, attempt: int, labelled: bool = False) -> None:
        """Creates an object that has the name of an attempt's child but no owner; `labelled`: with the child's labels,
        too."""
        name = f"{NAME}-{attempt}"
        labels = {
            "spillway.dev/job": NAME,
            "spillway.dev/attempt": str(attempt),
            "app.kubernetes.io/managed-by": "spillway",
        }
        if self.server.get(plural, name) is None:
            metadata = {"name": name, "namespace": NAMESPACE, "labels": labels if labelled else {}}
            self.server.create(plural, {"metadata": metadata})

    def remove_foreign(self) -> None:
        for plural in ("jobs", "configmaps", "services"):
            for found in self.server.all(plural):
                if not found["metadata"].get("ownerReferences"):
                    self.server.take(plural, found["metadata"]["name"])

    # the queue

    def admit(self, attempt: Object) -> None:
        if attempt["spec"].get("suspend") and not _ended(attempt) and not _is_deleting(attempt):
            attempt["spec"]["suspend"] = False
            self.server.put("jobs", attempt)

    def evict(self, attempt: Object) -> None:
        if not attempt["spec"].get("suspend") and not _ended(attempt) and not _is_deleting(attempt):
            attempt["spec"]["suspend"] = True
            self.server.put("jobs", attempt)

    # kubelets

    def start_pods(self) -> None:
        for pod in self.pods():
            if pod["status"]["phase"] == "Pending" and not _is_deleting(pod) and not pod.get("lost"):
                pod["status"] |= {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
                pod["startedAt"] = timestamp(self.server.now)
                self.server.put("pods", pod)

    def end_pod(self, pod: Object, code: int, message: str = "", reason: str = "") -> None:
        if pod.get("lost") or pod["status"]["phase"] != "Running":
            return
        ended = {
            "exitCode": code,
            "reason": reason or ("Completed" if code == 0 else "Error"),
            "message": message,
            "finishedAt": timestamp(self.server.now),
        }
        if "startedAt" in pod:
            ended["startedAt"] = pod["startedAt"]
        pod["status"] = {
            "phase": "Failed" if code or reason else "Succeeded",
            "containerStatuses": [{"name": "trainer", "state": {"terminated": ended}}],
        }
        self.server.put("pods", pod)

    def terminate_pods(self) -> None:
        """Lets each trainer that was asked to stop do so."""
        for pod in self.pods():
            if _is_deleting(pod):
                self.end_pod(pod, 75, termination(75, "stopped on request"))
                self._kill(pod)

    def _kill(self, pod: Object) -> None:
        self.end_pod(pod, 137)
        if pod["status"]["phase"] == "Pending" and not pod.get("lost"):
            pod["status"] = {"phase": "Failed"}
            self.server.put("pods", pod)

    def lose_node(self, pod: Object) -> None:
        """Loses the pod's node: its kubelet no longer reports, and the container may still be running."""
        if pod["status"]["phase"] in ("Pending", "Running"):
            pod["lost"] = True
            pod["lost_at"] = self.server.now
            pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
            self.server.put("pods", pod)

    # controllers

    def control(self) -> None:
        """Runs every controller once: node controller, garbage collector, Job controller."""
        for pod in self.pods():
            if pod.get("lost") and not _is_deleting(pod) and self.server.now > pod["lost_at"] + 300:
                pod["status"]["conditions"].append(
                    {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
                )
                self.server.mark_deleted("pods", pod, GRACE)
        self._collect_garbage()
        owners = {found["metadata"]["uid"]: found for found in self.server.all("jobs")}
        for pod in self.pods():
            if _owner(pod) not in owners:
                self.server.mark_deleted("pods", pod, GRACE)
                if pod["status"]["phase"] in ("Failed", "Succeeded"):
                    self.server.take("pods", pod["metadata"]["name"])
        for attempt in [found for found in self.server.all("jobs") if _owner(found)]:
            self._control_job(attempt)

    def _collect_garbage(self) -> None:
        """Deletes the children of TrainingJobs that are gone or being deleted; a TrainingJob that is deleted in the
        foreground is removed once it has no children."""
        jobs = {found["metadata"]["uid"]: found for found in self.server.all("trainingjobs")}
        for plural in ("jobs", "configmaps", "services"):
            for found in self.server.all(plural):
                owner = jobs.get(_owner(found))
                if not _owner(found) or (owner is not None and not _is_deleting(owner)):
                    continue
                if plural == "jobs":
                    self.server.mark_deleted(plural, found)
                else:
                    self.server.take(plural, found["metadata"]["name"])
        for uid, job in jobs.items():
            kept = (_owner(found) for plural in ("jobs", "configmaps", "services") for found in self.server.all(plural))
            if _is_deleting(job) and uid not in kept:
                self.server.take("trainingjobs", NAME)

    def _control_job(self, job: Object) -> None:
        pods = self.pods(job)
        live = [pod for pod in pods if pod["status"]["phase"] in ("Pending", "Running")]
        status = job.setdefault("status", {})
        created = set(job.setdefault("created", []))
        succeeded = {pod["index"] for pod in pods if pod["status"]["phase"] == "Succeeded"} | set(job.get("done", []))
        failed = bool(status.get("failing")) or any(pod["status"]["phase"] == "Failed" for pod in pods)
        if not job["spec"].get("suspend"):
            failed = failed or bool(created - {pod["index"] for pod in pods} - succeeded)
        before = copy.deepcopy(job)
        if _is_deleting(job):
            self._end_pods(live)
            self._forget_ended(pods, all_of_them=True)
            if not self.pods(job):
                self.server.take("jobs", job["metadata"]["name"])
                return
        elif _ended(job):
            self._forget_ended(pods)
        elif job["spec"].get("suspend"):
            self._end_pods(live)
            self._forget_ended(pods, all_of_them=True)
            job["created"], status["failing"] = [], False
        elif failed:
            status["failing"] = True
            self._end_pods(live)
            self._forget_ended(pods)
            if not live:
                status["conditions"] = [self._outcome("Failed", "BackoffLimitExceeded")]
        elif len(succeeded) == job["spec"]["completions"]:
            status["conditions"] = [self._outcome("Complete", "CompletionsReached")]
        else:
            for index in sorted(set(range(job["spec"]["completions"])) - created):
                self._create_pod(job, index)
                job["created"] = [*job["created"], index]
        job["done"] = sorted(succeeded)
        live = [pod for pod in self.pods(job) if pod["status"]["phase"] in ("Pending", "Running")]
        status["active"] = sum(not _is_deleting(pod) for pod in live)
        status["ready"] = sum(_is_ready(pod) for pod in live)
        status["succeeded"] = len(succeeded)
        if job != before:
            self.server.put("jobs", job)

    def _outcome(self, type_: str, reason: str) -> Object:
        now = timestamp(self.server.now)
        return {"type": type_, "status": "True", "reason": reason, "lastTransitionTime": now}

    def _create_pod(self, job: Object, index: int) -> None:
        template = job["spec"]["template"]
        labels = {**template["metadata"]["labels"], "batch.kubernetes.io/job-completion-index": str(index)}
        metadata = {
            "name": f"{job['metadata']['name']}-{index}-{self.server.uids}",
            "namespace": NAMESPACE,
            "labels": labels,
            "ownerReferences": [
                {"kind": "Job", "name": job["metadata"]["name"], "uid": job["metadata"]["uid"], "controller": True}
            ],
        }
        pod = {
            "metadata": metadata,
            "index": index,
            "spec": {"nodeName": f"node-{index}"},
            "status": {"phase": "Pending"},
        }
        self.server.create("pods", pod)

    def _end_pods(self, pods: list[Object]) -> None:
        for pod in pods:
            self.server.mark_deleted("pods", pod, GRACE)

    def _forget_ended(self, pods: list[Object], all_of_them: bool = False) -> None:
        """Removes pods that have ended and are being deleted (or all that have ended); their Job has counted them."""
        for pod in pods:
            if pod["status"]["phase"] in ("Failed", "Succeeded") and (all_of_them or _is_deleting(pod)):
                self.server.take("pods", pod["metadata"]["name"])

    # the operator

    def restart_operator(self) -> None:
        self.operator = Operator(self.server)

    def look(self, fault: Fault | None = None) -> None:
        if not self.operator.look(fault):
            self.restart_operator()

    def settle(self, most: int = 12) -> None:
        """Delivers all events and looks, repeatedly, until a look writes nothing; AssertionError after `most` looks."""
        for _ in range(most):
            self.operator.deliver_all()
            before = len(self.server.writes)
            self.look()
            if len(self.server.writes) == before and not any(self.operator.inbox.values()):
                return
        raise AssertionError(f"no rest after {most} looks; the last writes: {self.server.writes[-6:]}")

    def advance(self, seconds: float) -> None:
        """Advances the time. Pods whose grace period is over are killed by their kubelet, unless it is lost."""
        self.server.now += seconds
        for pod in self.pods():
            if _is_deleting(pod) and self.server.now >= seconds_of(pod["metadata"]["deletionTimestamp"]):
                self._kill(pod)


# --- the ordinary course ----------------------------------------------------------------------------------------------


def rounds(world: World, count: int = 3, seconds: float = 2.0) -> None:
    """Plays `count` rounds of the ordinary course: watches deliver, the operator looks, controllers and kubelets
    act."""
    for _ in range(count):
        world.operator.deliver_all()
        world.look()
        world.control()
        world.start_pods()
        world.terminate_pods()
        world.control()
        world.advance(seconds)
    world.operator.deliver_all()
    world.look()


def running(**more: Any) -> World:
    world = World(**more)
    rounds(world)
    assert world.status["state"] == "Running"
    return world


def writes(world: World) -> list[str]:
    return [f"{write.verb} {write.kind}" for write in world.server.writes]


def fail(world: World, code: int, message: str = "the reason", rounds_after: int = 3, **more: Any) -> None:
    world.end_pod(world.pods(world.attempts()[-1])[0], code, termination(code, message), **more)
    rounds(world, rounds_after)


def termination(code: int, message: str, **more: object) -> str:
    from spillway.errors import reason_of

    return json.dumps(
        {"v": 1, "reason": reason_of(code), "exitCode": code, "rank": 0, "step": 7, "message": message} | more
    )


def _owner(found: Object) -> str:
    return next((owner["uid"] for owner in found["metadata"].get("ownerReferences", ())), "")


def _attempt(found: Object) -> int:
    return int(found["metadata"]["labels"]["spillway.dev/attempt"])


def _is_deleting(found: Object) -> bool:
    return "deletionTimestamp" in found["metadata"]


def _is_ready(pod: Object) -> bool:
    conditions = pod["status"].get("conditions", ())
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def _ended(job: Object) -> bool:
    return any(condition["status"] == "True" for condition in job.get("status", {}).get("conditions", ()))
